"""Tiny real parts for the tests: a bag-of-words ONNX graph, a WordPiece tokenizer, a published repository."""

import importlib.util
import os
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from google.protobuf import json_format
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from serving import Classification, Client, ServedModel, Text, TritonServer, free_port, triton, versions, write

LABELS = ("negative", "positive")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "fine", "film", "é")
WEIGHTS = np.array([[0, 0], [0, 0], [0, 0], [0, 0], [0, 2], [2, 0], [0, 1], [0, 0], [0, 3]], np.float32)
ALL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def write_graph(
    file: Path,
    *,
    inputs: Sequence[str] = ALL_INPUTS,
    weights: np.ndarray = WEIGHTS,
    segments: np.ndarray | None = None,
    kind: int = TensorProto.INT64,
    rows: int | str = "batch",
    output: str = "logits",
) -> Path:
    """Write a graph whose logits are the sums of the weights of the tokens that the mask shows.

    `segments` [2, columns] multiply the weights of the tokens of the first and of the second text.
    """
    words = "words" if segments is not None else "tokens"
    nodes = [
        helper.make_node("Gather", ["weights", "input_ids"], [words]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["tokens", "column"], ["shown"]),
        helper.make_node("ReduceSum", ["shown", "middle"], [output], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(weights, "weights"),
        numpy_helper.from_array(np.array([-1]), "last"),
        numpy_helper.from_array(np.array([1]), "middle"),
    ]
    if segments is not None:
        constants.append(numpy_helper.from_array(segments, "segments"))
        nodes.insert(1, helper.make_node("Gather", ["segments", "token_type_ids"], ["factors"]))
        nodes.insert(2, helper.make_node("Mul", ["words", "factors"], ["tokens"]))
    tensors = [helper.make_tensor_value_info(name, kind, [rows, "sequence"]) for name in inputs]
    logits = helper.make_tensor_value_info(output, TensorProto.FLOAT, [rows, weights.shape[1]])
    graph = helper.make_graph(nodes, "bag", tensors, [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file


def write_tokenizer(file: Path, *, words: Sequence[str] = WORDS) -> Path:
    """Write a WordPiece tokenizer with BERT's template."""
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="session")
def kit() -> types.ModuleType:
    """Return this module: test files cannot import it by a name that holds under every import mode of pytest."""
    return sys.modules[__name__]


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., ServedModel]:
    """Return a function that makes a served model out of tiny files; fields can be given."""
    return lambda **fields: tiny_model(tmp_path / "model", **fields)


def pair_model(folder: Path, **fields: Any) -> ServedModel:
    """Return a served model of pairs: a word of the second text counts three times, for the other label."""
    given: dict[str, Any] = {"name": "rte", "pair": True, "warmup_texts": (("good", "bad film"), ("a film", "é"))}
    if "onnx" not in fields:
        given["onnx"] = write_graph(folder / "pair.onnx", segments=np.array([[1, 1], [-3, -3]], np.float32))
    return tiny_model(folder, **(given | fields))


def score_model(folder: Path, **fields: Any) -> ServedModel:
    """Return a served regression on pairs: the good words of the first text less half of those of the second."""
    graph = write_graph(folder / "score.onnx", weights=WEIGHTS[:, 1:], segments=np.array([[1], [-0.5]], np.float32))
    return pair_model(folder, **({"name": "stsb", "labels": (), "onnx": graph} | fields))


def tiny_model(folder: Path, **fields: Any) -> ServedModel:
    """Return a served model out of tiny files in `folder`."""
    given: dict[str, Any] = {
        "name": "sst2",
        "labels": LABELS,
        "max_tokens": 12,
        "max_batch_size": 4,
        "instances": 1,
        "intra_op_threads": 1,
        "warmup_texts": ("a good film", "a bad film, é"),
    } | fields
    given.setdefault("onnx", folder / "model.onnx")
    given.setdefault("tokenizer", folder / "tokenizer.json")
    if not given["onnx"].exists():
        write_graph(given["onnx"])
    if not given["tokenizer"].exists():
        write_tokenizer(given["tokenizer"])
    return ServedModel(**given)


class FakeTritonError(Exception):
    """Triton's error object."""

    INVALID_ARG = "invalid"
    INTERNAL = "internal"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class FakeTensor:
    """Triton's tensor."""

    def __init__(self, name: str, value: np.ndarray) -> None:
        self.name, self.value = name, value

    def as_numpy(self) -> np.ndarray:
        return self.value


class FakeResponse:
    """Triton's response: `outputs` by name, or an `error`."""

    def __init__(self, output_tensors: Sequence[FakeTensor] = (), error: FakeTritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.value for tensor in output_tensors}
        self.error = error


ALL_OUTPUTS = ("LABEL", "SCORE", "PROBABILITIES", "VALUE", "TRUNCATED", "logits")


class FakeRequest(dict[str, FakeTensor]):
    """Triton's request: tensors by name."""

    asked: Sequence[str] = ALL_OUTPUTS

    def requested_output_names(self) -> Sequence[str]:
        return self.asked


class FakeFamily:
    """Triton's family of metrics; all that was counted is in `counted`, by name."""

    COUNTER = "counter"
    counted: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        # A model that is still counting from an earlier test does so there.
        self.counts = self.counted

    def Metric(self, labels: dict[str, str]) -> "FakeFamily":
        return self

    def increment(self, value: float) -> None:
        self.counts[self.name] = self.counts.get(self.name, 0) + value


def request_of(**tensors: np.ndarray) -> FakeRequest:
    """Return a request as the fake module reads it."""
    return FakeRequest({name: FakeTensor(name, value) for name, value in tensors.items()})


def text_request(*texts: str | bytes) -> FakeRequest:
    """Return a request of texts, [texts, 1]."""
    return request_of(TEXT=text_column(*texts))


def pair_request(*pairs: tuple[str | bytes, str | bytes]) -> FakeRequest:
    """Return a request of pairs, two columns of [pairs, 1]."""
    first, second = zip(*pairs, strict=True)
    return request_of(TEXT=text_column(*first), TEXT_PAIR=text_column(*second))


def text_column(*texts: str | bytes) -> np.ndarray:
    """Return texts as the server hands them over, [texts, 1]."""
    column = np.empty((len(texts), 1), dtype=object)
    column[:, 0] = [text.encode() if isinstance(text, str) else text for text in texts]
    return column


@pytest.fixture
def load_entry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that starts the model of a published folder, as the server would, with a fake `pb_utils`."""
    backend = types.ModuleType("triton_python_backend_utils")
    vars(backend).update(
        Tensor=FakeTensor,
        InferenceResponse=FakeResponse,
        TritonError=FakeTritonError,
        MetricFamily=FakeFamily,
        get_input_tensor_by_name=lambda request, name: request.get(name),
    )
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    FakeFamily.counted = {}
    # The model sets them for its own process.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")

    def load(version: Path) -> Any:
        spec = importlib.util.spec_from_file_location("published_model", version / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = triton.from_text((version / "config.pbtxt").read_text())
        model = module.TritonPythonModel()
        model.initialize(
            {
                "model_config": json_format.MessageToJson(config, preserving_proto_field_name=True),
                "model_name": version.parent.name,
                "model_repository": str(version.parent),
                "model_version": version.name,
            }
        )
        return model

    return load


class Spy:
    """A tokenizer that counts, by method, the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.read = Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def spied(given: Any, **options: Any) -> Any:
            rows = [given] if isinstance(given, str) else given
            self.read[name] += sum(len(text) for row in rows for text in ((row,) if isinstance(row, str) else row))
            return getattr(self._tokenizer, name)(given, **options)

        return spied


def ports() -> dict[str, int]:
    """Return three free ports by the names of the server's arguments."""
    return {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let servers keep their run folders below the test's own folder, and return where."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"compressor-triton-{os.getuid()}"


def regions(prefix: str = "compressor-") -> list[str]:
    """Return the names of the shared memory that servers of ours hold."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return once a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def answers(entry: Any, *requests: Any) -> list[Any]:
    """Return the labels of each request, or the message of its error."""
    return [
        str(response.error) if response.error else response.outputs["LABEL"][:, 0].tolist()
        for response in entry.execute(list(requests))
    ]


def classification(client: Client, text: Text) -> Classification:
    """Return the answer to a text of a model that has labels."""
    (answer,) = client.classify([text])
    assert isinstance(answer, Classification)
    return answer


Served = tuple[TritonServer, Any, Path]
"""A server, the small parts of these tests, and the folder of its repository."""


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two versions published, the second one live."""
    folder = tmp_path_factory.mktemp("operated")
    publish(kit, folder, 1)
    publish(kit, folder, 2)
    with TritonServer(folder / "repository", **kit.ports()) as server:
        yield server, kit, folder


def publish(kit: Any, folder: Path, strength: float, **fields: Any) -> int:
    """Publish a model whose scores tell its strength; return its version."""
    onnx = kit.write_graph(folder / f"{strength}.onnx", weights=kit.WEIGHTS * strength)
    written = write(kit.tiny_model(folder / "model", onnx=onnx, **fields), folder / "repository")[0]
    return int(written.name.removeprefix(versions.WAITING))
