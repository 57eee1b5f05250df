"""A finished build of tiny models, made of the real parts: Arrow, PyTorch, ONNX, INT8, a published repository."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import PublishConfig
from compressor.pipeline import RUN_FILE
from compressor.recipe import read_recipe, recipe_text
from compressor.tasks import TASKS
from serving.runtime import TritonServer, free_port

TASK = TASKS["sst2"]
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "fine", "film", "with", "some", "scenes")
TEXTS = tuple(
    f"a {opinion} film{tail}"
    for opinion in ("good", "bad", "fine")
    for tail in ("", " with some scenes", " with a bad film")
)
MAX_TOKENS = 16


@dataclass(frozen=True)
class TinyBuild:
    """Where a tiny build is."""

    run: Path
    repository: Path


def save_tiny_bert(folder: Path, *, layers: int, seed: int) -> None:
    """Save a classifier with random weights and its tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    torch.manual_seed(seed)
    shape = BertConfig(
        vocab_size=30_522,  # shaped calls draw ids up to 20,000
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        id2label=dict(enumerate(TASK.labels)),
        label2id={label: index for index, label in enumerate(TASK.labels)},
    )
    BertForSequenceClassification(shape).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)


def build_tiny(root: Path) -> TinyBuild:
    """Make a run folder and publish it."""
    from compressor.checkpoints import load_tokenizer
    from compressor.dataset import Example, write_examples
    from compressor.onnx_export import export_onnx
    from compressor.stages.publish import publish
    from compressor.stages.quantize import quantize_graph
    from compressor.stages.quantize.candidates import PerRow

    run, repository = root / "runs" / "sst2", root / "model_repository"
    run.mkdir(parents=True)
    config = read_recipe(recipe_text("sst2", "laptop"), (f"task.max_tokens={MAX_TOKENS}",), name="laptop")
    (run / RUN_FILE).write_text(json.dumps({"recipe": "laptop", "config": config.model_dump()}))

    def seal(name: str, kind: str, parents: dict[str, Artifact]) -> Any:
        return artifact.write(
            run / name, kind, key=name, section={"task": TASK.model_dump(mode="json")}, parents=parents
        )

    with seal("1-corpus", "examples", {}) as draft:
        for split in ("train", "validation", "test"):
            rows = [Example((text,), number % 2, number) for number, text in enumerate(TEXTS * 4)]
            write_examples(draft.path / f"{split}.arrow", rows, TASK)
    corpus = Artifact.open(run / "1-corpus", kind="examples")
    with seal("2-finetune", "teacher", {"corpus": corpus}) as draft:
        save_tiny_bert(draft.path, layers=2, seed=0)
    teacher = Artifact.open(run / "2-finetune", kind="teacher")
    with seal("4-distill-prediction", "student", {"teacher": teacher}) as draft:
        save_tiny_bert(draft.path, layers=1, seed=1)
    student = Artifact.open(run / "4-distill-prediction", kind="student")
    with seal("5-export", "onnx", {"student": student, "teacher": teacher, "corpus": corpus}) as draft:
        export_onnx(student.path, draft.path / "student")
        export_onnx(teacher.path, draft.path / "teacher")
    onnx = Artifact.open(run / "5-export", kind="onnx")
    with seal("6-quantize", "int8", {"onnx": onnx, "teacher": teacher, "corpus": corpus}) as draft:
        quantize_graph(onnx.path / "student" / "model.onnx", draft.path / "model.onnx", PerRow())
        load_tokenizer(student.path).save_pretrained(draft.path)
        shutil.copyfile(student.path / "config.json", draft.path / "config.json")
    int8 = Artifact.open(run / "6-quantize", kind="int8")
    publish(
        PublishConfig(),
        TASK,
        int8=int8,
        onnx_models=onnx,
        corpus=corpus,
        max_tokens=MAX_TOKENS,
        key="publish",
        out=run / "7-publish",
        root=repository,
    )
    return TinyBuild(run, repository)


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    """A finished tiny build; tests leave it as it is."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_server(tiny_build: TinyBuild) -> Iterator[TritonServer]:
    """A real Triton that serves the tiny build. One that dies is started again on its ports; `still_alive` tells."""
    ports: dict[str, Any] = {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}
    with TritonServer(tiny_build.repository, **ports) as server:
        yield server


@pytest.fixture(autouse=True)
def still_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail each test under which the server of the session died, with what its log says."""
    server: TritonServer | None = None
    if "tiny_server" in request.fixturenames:
        server = request.getfixturevalue("tiny_server")
    known = len(server.deaths()) if server else 0
    yield
    if server and server.deaths()[known:]:
        pytest.fail(f"{server.deaths()[known:]}; its log says:\n{server.log_tail(40)}")
