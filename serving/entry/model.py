"""Text in, label and probabilities out: Triton's Python backend runs this file inside the server.

It stands beside `tokenizer.json` and `labels.txt` in a version folder, and opens the ONNX file that the model's
parameter `onnx` names. All waiting requests are tokenised together, padded together and run together.

shape legend: R rows (texts), T tokens, C classes
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

MAX_TEXT_BYTES = 100_000
"""Longest text taken; far more than any model reads, small enough that one request cannot hold the others up."""

PAD_MULTIPLE = 8
"""Batches are padded to a multiple of this many tokens: few distinct shapes, and whole vector registers."""

# The second half of the control characters (U+0080 to U+009F) is let pass: it is what mis-decoded quotation marks
# of real data sets turn into, and BERT's own tokenizer drops it.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class BadTextError(Exception):
    """A request that cannot be answered; the message goes to its sender, the other requests go on."""


class TritonPythonModel:
    """One instance of the model; Triton calls `initialize` once and `execute` with whatever waits in the queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load tokenizer, labels and graph. `args` is Triton's: strings, and the configuration as JSON."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        version = Path(args["model_repository"]) / args["model_version"]
        threads = int(parameters["intra_op_threads"])
        # The tokenizer's thread pool reads these when it is first used.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self.max_batch_size = int(config["max_batch_size"])
        self.max_tokens = int(parameters["max_tokens"])
        self.labels = np.array((version / "labels.txt").read_text("utf-8").splitlines(), dtype=object)
        self.tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)
        self.pad_id = int(parameters["pad_id"])
        self.session = open_session(version / parameters["onnx"].format(version=args["model_version"]), threads)
        self.inputs = [tensor.name for tensor in self.session.get_inputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response for each request, in order; a bad request gets an error of its own."""
        errors: dict[int, str] = {}
        texts: list[str] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            try:
                found = read_texts(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy())
            except BadTextError as error:
                errors[index] = str(error)
            else:
                texts += found
                owners += [index] * len(found)
        encodings = self.tokenizer.encode_batch_fast(texts)
        for owner, text, encoding in zip(owners, texts, encodings, strict=True):
            if all(encoding.special_tokens_mask):
                errors[owner] = f"TEXT {text[:20]!a} holds nothing that the tokenizer can read; send at least one word"
        kept = [row for row, owner in enumerate(owners) if owner not in errors]
        probabilities_RC = self.classify([encodings[row] for row in kept])
        rows_of: dict[int, list[int]] = {}
        for position, row in enumerate(kept):
            rows_of.setdefault(owners[row], []).append(position)
        return [
            refusal(errors[index]) if index in errors else self.response(probabilities_RC[rows_of[index]])
            for index in range(len(requests))
        ]

    def classify(self, encodings: list[Encoding]) -> NDArray[Any]:
        """Return the probabilities, float32 [R, C], of tokenised texts; at most `max_batch_size` run at a time."""
        chunks = [
            softmax(self.session.run(["logits"], self.feed(encodings[start : start + self.max_batch_size]))[0])
            for start in range(0, len(encodings), self.max_batch_size)
        ]
        return np.concatenate(chunks) if chunks else np.empty((0, len(self.labels)), np.float32)

    def feed(self, encodings: list[Encoding]) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs, int64 [R, T], T being the longest text padded to a multiple of 8."""
        longest = max(len(encoding) for encoding in encodings)
        # Padding may not pass max_tokens: the position table can end there.
        width = min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, self.max_tokens)
        ids_RT = np.full((len(encodings), width), self.pad_id, np.int64)
        mask_RT, types_RT = np.zeros_like(ids_RT), np.zeros_like(ids_RT)
        for row, encoding in enumerate(encodings):
            ids_RT[row, : len(encoding)] = encoding.ids
            mask_RT[row, : len(encoding)] = 1
            types_RT[row, : len(encoding)] = encoding.type_ids
        tensors = {"input_ids": ids_RT, "attention_mask": mask_RT, "token_type_ids": types_RT}
        return {name: tensors[name] for name in self.inputs}

    def response(self, probabilities_RC: NDArray[Any]) -> Any:
        """Return the answer for one request of R texts."""
        if not np.isfinite(probabilities_RC).all():
            error = pb_utils.TritonError(
                "the model answered a number that is not finite", pb_utils.TritonError.INTERNAL
            )
            return pb_utils.InferenceResponse(error=error)
        best_R1 = probabilities_RC.argmax(axis=1)[:, None]
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("LABEL", self.labels[best_R1]),
                pb_utils.Tensor("SCORE", np.take_along_axis(probabilities_RC, best_R1, axis=1)),
                pb_utils.Tensor("PROBABILITIES", probabilities_RC),
            ]
        )


def open_session(onnx: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph on the processor with `threads` threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # For these models the fused operator is slower than its parts: without it one text is about 20 % faster.
    return onnxruntime.InferenceSession(
        str(onnx), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )


def read_texts(texts_R1: NDArray[Any]) -> list[str]:
    """Return the texts of one request, an object array of bytes [R, 1]; raise BadTextError naming the broken rule."""
    if texts_R1.ndim != 2 or texts_R1.shape[1] != 1 or not len(texts_R1):
        raise BadTextError(f"TEXT has shape {list(texts_R1.shape)}; send [texts, 1] with at least one text")
    one = len(texts_R1) == 1
    return [read_text(bytes(raw), "TEXT" if one else f"TEXT[{row}]") for row, raw in enumerate(texts_R1[:, 0])]


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
