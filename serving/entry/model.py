"""Texts or pairs in, labels and probabilities or numbers out: Triton's Python backend runs this file in the server.

It stands beside `tokenizer.json` in a version folder. It opens the ONNX file that the model's parameter `onnx` names,
or, with the parameter `student`, asks the model of that name in the same server, which serves the file.
The model's configuration says which inputs it takes (TEXT, or TEXT and TEXT_PAIR) and its labels (none: a regression).
All waiting requests are tokenised together; rows that are padded to the same width run together.

shape legend: R rows (texts or pairs), T tokens, C classes, or 1 for a regression
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

MAX_TEXT_BYTES = 100_000
"""Longest text taken; far more than any model reads, small enough that one request cannot hold the others up."""

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: few distinct shapes, and whole vector registers.

Rows of different widths run one after the other, not padded to the longest. With an INT8 student on one thread, 32
texts of SST-2 in one batch took 2.7 ms each of processor time, alone 1.6, and by width 1.2.
"""

FLUSH_S = 1.0
"""Counters are handed to the server at most this often: each costs 20 microseconds."""

# U+0010 to U+001F (but escape) and U+0080 to U+009F are let pass: it is what mis-decoded quotation marks of real data
# sets turn into, and BERT's own tokenizer drops it. The same characters pass in training data.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e\x0f\x1b\x7f]")


METRICS = {
    "tokenise_s": ("compressor_tokenise_seconds_total", "Time spent reading and tokenising texts"),
    "run_s": ("compressor_run_seconds_total", "Time spent in ONNX Runtime, padding and softmax included"),
    "texts": ("compressor_texts_total", "Texts or pairs answered"),
    "cut": ("compressor_truncated_texts_total", "Texts or pairs cut at the model's limit of tokens"),
    "refused": ("compressor_refused_requests_total", "Requests refused for what they hold"),
    "tokens": ("compressor_tokens_total", "Tokens run, padding not counted"),
    "padded": ("compressor_padded_tokens_total", "Tokens run, padding counted"),
}


class BadTextError(Exception):
    """A request that cannot be answered; the message goes to its sender, the other requests go on."""


class GraphError(Exception):
    """The graph gave no answer, which is no fault of a request; the same one may succeed later."""


Graph = Callable[[dict[str, NDArray[Any]]], NDArray[Any]]
"""Runs one padded batch: the graph's inputs by name, int64 [R, T], to its logits, float32 [R, C]."""


class TritonPythonModel:
    """One instance of the model; Triton calls `initialize` once and `execute` with whatever waits in the queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load tokenizer and graph. `args` is Triton's: strings, and the configuration as JSON."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        version = Path(args["model_repository"]) / args["model_version"]
        threads = int(parameters["intra_op_threads"])
        # The tokenizer's thread pool reads these when it is first used.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self.max_batch_size = int(config["max_batch_size"])
        self.max_tokens = int(parameters["max_tokens"])
        self.max_batch_tokens = int(parameters["max_batch_tokens"])
        self.texts = [tensor["name"] for tensor in config["input"]]
        self.labels = np.array(json.loads(parameters["labels"]), dtype=object)
        self.is_regression = not self.labels.size
        self.tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)
        self.pad_id = int(parameters["pad_id"])
        self.inputs: list[str] = json.loads(parameters["inputs"])
        self.graph: Graph
        if "student" in parameters:
            self.graph = ask_student(parameters["student"], int(args["model_version"]))
        else:
            self.graph = open_graph(version / parameters["onnx"].format(version=args["model_version"]), threads)
        self.counters = Counters(args["model_name"], args["model_version"])

    def finalize(self) -> None:
        """Hand over what was counted last; Triton calls it before the model goes."""
        self.counters.flush()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response for each request, in order; a bad request gets an error of its own."""
        began = time.perf_counter()
        errors: dict[int, str] = {}
        rows: list[tuple[str, ...]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            try:
                found = self.read(request)
            except BadTextError as error:
                errors[index] = str(error)
            else:
                rows += found
                owners += [index] * len(found)
        encodings = self.tokenizer.encode_batch_fast(rows if len(self.texts) == 2 else [text for (text,) in rows])
        tokenised = time.perf_counter()
        for owner, texts, encoding in zip(owners, rows, encodings, strict=True):
            for number in set(range(len(texts))) - set(encoding.sequence_ids):
                errors[owner] = (
                    f"{self.texts[number]} {texts[number][:20]!a} holds nothing that the tokenizer can read; "
                    "send at least one word"
                )
        kept = [row for row, owner in enumerate(owners) if owner not in errors]
        try:
            answers_RC = self.run([encodings[row] for row in kept])
        except GraphError as error:
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
            return [
                refusal(errors[index]) if index in errors else pb_utils.InferenceResponse(error=failure)
                for index in range(len(requests))
            ]
        is_cut_R = np.array([bool(encodings[row].overflowing) for row in kept], dtype=bool)
        rows_of: dict[int, list[int]] = {}
        for position, row in enumerate(kept):
            rows_of.setdefault(owners[row], []).append(position)
        ran = time.perf_counter()
        responses = [
            refusal(errors[index])
            if index in errors
            else self.response(request, answers_RC[rows_of[index]], is_cut_R[rows_of[index]])
            for index, request in enumerate(requests)
        ]
        self.counters.add(
            tokenise_s=tokenised - began,
            run_s=ran - tokenised,
            texts=len(kept),
            cut=int(is_cut_R.sum()),
            refused=len(errors),
            tokens=sum(len(encodings[row]) for row in kept),
            padded=sum(self.width(len(encodings[row])) for row in kept),
        )
        return responses

    def read(self, request: Any) -> list[tuple[str, ...]]:
        """Return the rows of one request, each of one text or two; raise BadTextError naming the broken rule."""
        columns = [read_texts(pb_utils.get_input_tensor_by_name(request, name).as_numpy(), name) for name in self.texts]
        if len(columns[0]) != len(columns[-1]):
            raise BadTextError(f"TEXT holds {len(columns[0])} texts and TEXT_PAIR {len(columns[1])}; send pairs")
        return list(zip(*columns, strict=True))

    def run(self, encodings: list[Encoding]) -> NDArray[Any]:
        """Return the probabilities, or the numbers of a regression, float32 [R, C], of tokenised rows.

        Rows of one padded width run together, at most `max_batch_size` rows and `max_batch_tokens` tokens at a time.
        """
        if not encodings:
            return np.empty((0, 1), np.float32)
        by_width: dict[int, list[int]] = {}
        for row, encoding in enumerate(encodings):
            by_width.setdefault(self.width(len(encoding)), []).append(row)
        logits_RC: NDArray[Any] | None = None
        for width, rows in by_width.items():
            step = max(1, min(self.max_batch_size, self.max_batch_tokens // width))
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                found = self.graph(self.feed([encodings[row] for row in some], width))
                if logits_RC is None:
                    logits_RC = np.empty((len(encodings), found.shape[1]), np.float32)
                logits_RC[some] = found
        assert logits_RC is not None  # there are rows
        return logits_RC if self.is_regression else softmax(logits_RC)

    def width(self, tokens: int) -> int:
        """Return the tokens that a row is padded to: not past max_tokens, where the position table can end."""
        return min(-(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE, self.max_tokens)

    def feed(self, encodings: list[Encoding], width: int) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs, int64 [R, T], T being `width`."""
        ids_RT = np.full((len(encodings), width), self.pad_id, np.int64)
        mask_RT, types_RT = np.zeros_like(ids_RT), np.zeros_like(ids_RT)
        for row, encoding in enumerate(encodings):
            ids_RT[row, : len(encoding)] = encoding.ids
            mask_RT[row, : len(encoding)] = 1
            types_RT[row, : len(encoding)] = encoding.type_ids
        tensors = {"input_ids": ids_RT, "attention_mask": mask_RT, "token_type_ids": types_RT}
        return {name: tensors[name] for name in self.inputs}

    def response(self, request: Any, answers_RC: NDArray[Any], is_cut_R: NDArray[np.bool_]) -> Any:
        """Return the answer for one request of R rows: the outputs that it asks for."""
        if not np.isfinite(answers_RC).all():
            error = pb_utils.TritonError(
                "the model answered a number that is not finite", pb_utils.TritonError.INTERNAL
            )
            return pb_utils.InferenceResponse(error=error)
        values: dict[str, NDArray[Any]] = {"TRUNCATED": is_cut_R[:, None]}
        if self.is_regression:
            values["VALUE"] = answers_RC
        else:
            best_R1 = answers_RC.argmax(axis=1)[:, None]
            values["LABEL"] = self.labels[best_R1]
            values["SCORE"] = np.take_along_axis(answers_RC, best_R1, axis=1)
            values["PROBABILITIES"] = answers_RC
        asked = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values[name]) for name in values if name in asked])


class Counters:
    """Counts what the instances of a model have done, on the server's metrics page."""

    def __init__(self, model: str, version: str) -> None:
        """Register with the server."""
        labels = {"model": model, "version": version}
        self._families = {
            key: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.COUNTER)
            for key, (name, text) in METRICS.items()
        }
        self._metrics = {key: family.Metric(labels=labels) for key, family in self._families.items()}
        self._counted = dict.fromkeys(METRICS, 0.0)
        self._flushed = time.monotonic()

    def add(self, **counted: float) -> None:
        """Count; the server hears of it within `FLUSH_S`, or with the next request after that."""
        for key, value in counted.items():
            self._counted[key] += value
        if time.monotonic() > self._flushed + FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand over what was counted since the last time."""
        for key, value in self._counted.items():
            if value:
                self._metrics[key].increment(value)
        self._counted = dict.fromkeys(METRICS, 0.0)
        self._flushed = time.monotonic()


def ask_student(name: str, version: int) -> Graph:
    """Return what asks the model `name` of this server, and of it the version that was published with this model."""

    def ask(feed: dict[str, NDArray[Any]]) -> NDArray[Any]:
        response = pb_utils.InferenceRequest(
            model_name=name,
            model_version=version,
            requested_output_names=["logits"],
            inputs=[pb_utils.Tensor(tensor, value) for tensor, value in feed.items()],
            # A student on a GPU would leave its logits there.
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise GraphError(f"{name} gave no answer: {response.error().message()}")
        logits_RC: NDArray[Any] = np.array(pb_utils.get_output_tensor_by_name(response, "logits").as_numpy())
        return logits_RC

    return ask


def open_graph(onnx: Path, threads: int) -> Graph:
    """Open a graph on the processor with `threads` threads."""
    import onnxruntime  # here: where another model has the graph, its backend's own library is enough

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # For these models the fused operator is slower than its parts: without it one text is about 20 % faster.
    session = onnxruntime.InferenceSession(
        str(onnx), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    return lambda feed: session.run(["logits"], feed)[0]


def read_texts(texts_R1: NDArray[Any], name: str) -> list[str]:
    """Return the texts of one input, an object array of bytes [R, 1]; raise BadTextError naming the broken rule."""
    if texts_R1.ndim != 2 or texts_R1.shape[1] != 1 or not len(texts_R1):
        raise BadTextError(f"{name} has shape {list(texts_R1.shape)}; send [texts, 1] with at least one text")
    one = len(texts_R1) == 1
    return [read_text(bytes(raw), name if one else f"{name}[{row}]") for row, raw in enumerate(texts_R1[:, 0])]


def read_text(raw: bytes, name: str) -> str:
    """Return one text; raise BadTextError naming the text and the rule that is broken."""
    if len(raw) > MAX_TEXT_BYTES:
        raise BadTextError(f"{name} is {len(raw)} bytes long; at most {MAX_TEXT_BYTES} are taken, send a part of it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadTextError(f"{name} is not UTF-8 (byte {error.start}: {error.reason}); encode it as UTF-8") from error
    if not text.strip():
        raise BadTextError(f"{name} is empty or white space alone; send at least one word")
    control = _CONTROL.search(text)
    if control:
        raise BadTextError(
            f"{name} holds the control character U+{ord(control[0]):04X} at position {control.start()}; "
            "of these only tab, line feed and carriage return are taken"
        )
    return text


def softmax(logits_RC: NDArray[Any]) -> NDArray[Any]:
    """Return float32 [R, C] rows that sum to 1; shifting by the maximum keeps exp() from overflowing."""
    shifted = np.exp(logits_RC.astype(np.float64) - logits_RC.max(axis=1, keepdims=True))
    probabilities_RC: NDArray[Any] = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities_RC.astype(np.float32)


def refusal(message: str) -> Any:
    """Return the error response for one request."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
