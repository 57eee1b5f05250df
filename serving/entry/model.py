"""Texts or pairs in, labels and probabilities or numbers out: Triton's Python backend runs this file in the server.

It stands beside `tokenizer.json` in a version folder. It opens the ONNX file that the model's parameter `onnx` names,
or, with the parameter `student`, asks the model of that name in the same server, which serves the file.
The model's configuration says which inputs it takes (TEXT, or TEXT and TEXT_PAIR) and its labels (none: a regression).
The rows of all waiting requests that are padded to the same width run together.

shape legend: R rows (texts or pairs), T tokens, C classes, or 1 for a regression
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

MAX_TEXT_BYTES = 100_000
"""Longest text taken; far more than any model reads."""

MAX_REQUEST_BYTES = 500_000
"""Most that the texts of one request may hold together: what else its instance has to do waits for it. Single texts of
so much take 0.03 s to tokenise (0.2 s where they have no end of a word), pairs 0.6 s."""

LONG_PAIR = 4
"""A pair with a text of more characters than this for each token that the model reads is cut before it is tokenised."""

LONG_TEXT = 8
"""A text of more than twice so many characters for each token that the model reads is looked at in parts, the first one
of so many: where its tokens are enough, the rest is not read."""

LONGEST_ADDED = 100
"""Most characters of a token that the tokenizer knows beside its vocabulary, such as [MASK]: it is found anywhere."""

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: few distinct shapes, and whole vector registers.

Rows of different widths run one after the other, not padded to the longest. With an INT8 student on one thread, 32
texts of SST-2 in one batch took 2.7 ms each of processor time, alone 1.6, and by width 1.2.
"""

FLUSH_S = 1.0
"""What was counted is handed to the server this much later: all counters together cost it 0.2 milliseconds."""

# U+0010 to U+001F (but escape) and U+0080 to U+009F are let pass: it is what mis-decoded quotation marks of real data
# sets turn into, and BERT's own tokenizer drops it. The same characters pass in training data.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e\x0f\x1b\x7f]")


# What a model that was asked says of rows that its graph refuses: Triton's onnxruntime backend, and `runner`.
_REFUSALS = ("onnx runtime error", "the graph refused")

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


class BadRowsError(Exception):
    """The graph cannot run these rows; others it can, and these it can not later either."""


class Row(NamedTuple):
    """A text or pair, tokenised."""

    ids: list[int]
    type_ids: list[int]
    is_cut: bool
    """Whether the model reads only a part of it."""
    start: str
    """How the first text begins, to name it."""


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
        rows: list[Row] = []
        parts: list[slice] = []
        for index, request in enumerate(requests):
            start = len(rows)
            try:
                rows += self.read(request)
            except BadTextError as error:
                errors[index] = str(error)
            parts.append(slice(start, len(rows)))
        tokenised = time.perf_counter()
        try:
            answers_RC, refused = self.run_each(rows)
        except GraphError as error:
            self.counters.add(refused=len(errors))
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
            return [
                refusal(errors[index]) if index in errors else pb_utils.InferenceResponse(error=failure)
                for index in range(len(requests))
            ]
        for row, reason in refused.items():
            owner = next(index for index, part in enumerate(parts) if row < part.stop)
            errors[owner] = f"{self.texts[0]} {rows[row].start!a} cannot be run: {reason}; leave it out"
        ran = time.perf_counter()
        responses = [
            refusal(errors[index]) if index in errors else self.response(request, answers_RC[part], rows[part])
            for index, (request, part) in enumerate(zip(requests, parts, strict=True))
        ]
        answered = [row for index, part in enumerate(parts) if index not in errors for row in rows[part]]
        self.counters.add(
            tokenise_s=tokenised - began,
            run_s=ran - tokenised,
            texts=len(answered),
            cut=sum(row.is_cut for row in answered),
            refused=len(errors),
            tokens=sum(len(row.ids) for row in answered),
            padded=sum(self.width(len(row.ids)) for row in answered),
        )
        return responses

    def read(self, request: Any) -> list[Row]:
        """Return the rows of one request; raise BadTextError naming the broken rule."""
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.texts}
        columns = [read_texts(texts_R1, name) for name, texts_R1 in tensors.items()]
        if len(columns[0]) != len(columns[-1]):
            raise BadTextError(f"TEXT holds {len(columns[0])} texts and TEXT_PAIR {len(columns[1])}; send pairs")
        size = sum(len(raw) for texts_R1 in tensors.values() for raw in texts_R1[:, 0])
        if size > MAX_REQUEST_BYTES:
            raise BadTextError(
                f"TEXT: the request holds {size} bytes of text; at most {MAX_REQUEST_BYTES} are taken, "
                "send fewer texts at a time"
            )
        rows = []
        for texts, encoding in zip(zip(*columns, strict=True), self.tokenise(columns), strict=True):
            for number in set(range(len(texts))) - set(encoding.sequence_ids):
                raise BadTextError(
                    f"{self.texts[number]} {texts[number][:20]!a} holds nothing that the tokenizer can read; "
                    "send at least one word"
                )
            rows.append(Row(encoding.ids, encoding.type_ids, bool(encoding.overflowing), texts[0][:20]))
        return rows

    def tokenise(self, columns: list[list[str]]) -> list[Encoding]:
        """Return each text, or pair, as the model reads it."""
        if len(columns) == 1:
            return list(self.tokenizer.encode_batch_fast([self.shorten(text) for text in columns[0]]))
        return list(self.tokenizer.encode_batch_fast([self.shorten_pair(pair) for pair in zip(*columns, strict=True)]))

    def shorten(self, text: str) -> str:
        """Return a text without an end that is not read anyway; it gives the same tokens, and is cut as before.

        A batch holds texts of many requests, and 64 of them with 100 kB each took 7 s. What follows changes no more of
        the tokens of a part than those of its last word, or of an added token that the part ends in.
        """
        size = LONG_TEXT * self.max_tokens
        if len(text) <= 2 * size:
            return text
        while size < len(text):
            found = self.tokenizer.encode(text[:size], add_special_tokens=False)
            if found.overflowing:
                last_word = found.overflowing[-1].word_ids[-1]
                if found.word_ids[-1] != last_word and found.offsets[-1][1] + LONGEST_ADDED <= size:
                    return text[:size]
            size *= 16
        return text

    def shorten_pair(self, pair: tuple[str, str]) -> tuple[str, str]:
        """Return a pair without the ends of its texts that are not read anyway; it gives the same tokens.

        The library combines each part of the first text that does not fit with each of the second: time and memory
        grow with the square of the length. Twice max_tokens of the longer text stay and once of the other, so
        that the longer one stays that: it may keep one token more. The words of WordPiece are matched from the left:
        what comes later does not change a token.
        """
        if max(map(len, pair)) <= LONG_PAIR * self.max_tokens:
            return pair
        # Without special tokens each part but the last holds max_tokens tokens, more than a pair has of one text.
        first, second = (
            [found, *found.overflowing] for found in self.tokenizer.encode_batch(pair, add_special_tokens=False)
        )
        is_first_longer = sum(map(len, first)) > sum(map(len, second))
        return (
            cut_behind(pair[0], first[: 1 + is_first_longer]),
            cut_behind(pair[1], second[: 2 - is_first_longer]),
        )

    def run_each(self, rows: list[Row]) -> tuple[NDArray[Any], dict[int, str]]:
        """Return what `run` does, NaN for each row that the graph refuses, and the reasons for these rows."""
        try:
            return self.run(rows), {}
        except BadRowsError:
            # One row spoils the batch; alone, each gets its own answer.
            answers_RC = np.full((len(rows), max(1, self.labels.size)), np.nan, np.float32)
        refused: dict[int, str] = {}
        for number, row in enumerate(rows):
            try:
                answers_RC[number] = self.run([row])[0]
            except BadRowsError as error:
                refused[number] = str(error)
        return answers_RC, refused

    def run(self, rows: list[Row]) -> NDArray[Any]:
        """Return the probabilities, or the numbers of a regression, float32 [R, C], of tokenised rows.

        Rows of one padded width run together, at most `max_batch_size` rows and `max_batch_tokens` tokens at a time.
        """
        if not rows:
            return np.empty((0, 1), np.float32)
        by_width: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_width.setdefault(self.width(len(row.ids)), []).append(number)
        logits_RC: NDArray[Any] | None = None
        for width, numbers in by_width.items():
            step = max(1, min(self.max_batch_size, self.max_batch_tokens // width))
            for start in range(0, len(numbers), step):
                some = numbers[start : start + step]
                found = self.graph(self.feed([rows[number] for number in some], width))
                if logits_RC is None:
                    logits_RC = np.empty((len(rows), found.shape[1]), np.float32)
                logits_RC[some] = found
        assert logits_RC is not None  # there are rows
        return logits_RC if self.is_regression else softmax(logits_RC)

    def width(self, tokens: int) -> int:
        """Return the tokens that a row is padded to: not past max_tokens, where the position table can end."""
        return min(-(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE, self.max_tokens)

    def feed(self, rows: list[Row], width: int) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs, int64 [R, T], T being `width`."""
        ids_RT = np.full((len(rows), width), self.pad_id, np.int64)
        mask_RT, types_RT = np.zeros_like(ids_RT), np.zeros_like(ids_RT)
        for number, row in enumerate(rows):
            tokens = len(row.ids)
            ids_RT[number, :tokens] = row.ids
            mask_RT[number, :tokens] = 1
            types_RT[number, :tokens] = row.type_ids
        tensors = {"input_ids": ids_RT, "attention_mask": mask_RT, "token_type_ids": types_RT}
        return {name: tensors[name] for name in self.inputs}

    def response(self, request: Any, answers_RC: NDArray[Any], rows: list[Row]) -> Any:
        """Return the answer for one request of R rows: the outputs that it asks for."""
        if not np.isfinite(answers_RC).all():
            error = pb_utils.TritonError(
                "the model answered a number that is not finite", pb_utils.TritonError.INTERNAL
            )
            return pb_utils.InferenceResponse(error=error)
        asked = set(request.requested_output_names())
        values = {"TRUNCATED": np.array([[row.is_cut] for row in rows])}
        values["VALUE" if self.is_regression else "PROBABILITIES"] = answers_RC
        # The clients of this project do without these, and each costs time.
        if not asked.isdisjoint(("LABEL", "SCORE")) and not self.is_regression:
            best_R1 = answers_RC.argmax(axis=1)[:, None]
            values["LABEL"] = self.labels[best_R1]
            values["SCORE"] = np.take_along_axis(answers_RC, best_R1, axis=1)
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
        self._counted: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, **counted: float) -> None:
        """Count; the server hears of it `FLUSH_S` later at the latest."""
        with self._lock:
            if not self._counted:
                timer = threading.Timer(FLUSH_S, self.flush)
                timer.daemon = True
                timer.start()
            for key, value in counted.items():
                self._counted[key] = self._counted.get(key, 0.0) + value

    def flush(self) -> None:
        """Hand over what was counted since the last time."""
        with self._lock:
            for key, value in self._counted.items():
                if value:
                    self._metrics[key].increment(value)
            self._counted = {}


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
            message = response.error().message()
            if any(refusal in message for refusal in _REFUSALS):
                raise BadRowsError(message)
            raise GraphError(f"{name} gave no answer: {message}")
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

    def run(feed: dict[str, NDArray[Any]]) -> NDArray[Any]:
        try:
            logits_RC: NDArray[Any] = session.run(["logits"], feed)[0]
        # ONNX Runtime's errors share no base class of their own. The usual reasons are a token that the graph's
        # vocabulary lacks, and memory.
        except Exception as error:
            raise BadRowsError(str(error)) from error
        return logits_RC

    return run


def read_texts(texts_R1: NDArray[Any], name: str) -> list[str]:
    """Return the texts of one input, an object array of bytes [R, 1]; raise BadTextError naming the broken rule."""
    if texts_R1.ndim != 2 or texts_R1.shape[1] != 1 or not len(texts_R1):
        raise BadTextError(f"{name} has shape {list(texts_R1.shape)}; send [texts, 1] with at least one text")
    one = len(texts_R1) == 1
    return [read_text(bytes(raw), name if one else f"{name}[{row}]") for row, raw in enumerate(texts_R1[:, 0])]


def cut_behind(text: str, parts: list[Encoding]) -> str:
    """Return a text up to the end of its last token in `parts`; whole if they hold none."""
    return text[: parts[-1].offsets[-1][1]] if len(parts[-1]) else text


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
    shifted = np.exp(np.subtract(logits_RC, logits_RC.max(axis=1, keepdims=True), dtype=np.float64))
    probabilities_RC: NDArray[Any] = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities_RC.astype(np.float32)


def refusal(message: str) -> Any:
    """Return the error response for one request."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
