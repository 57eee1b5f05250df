"""Token ids in, logits out: Triton's Python backend runs this file, copied as `model.py`, beside `model.onnx`.

It stands in for Triton's onnxruntime backend, which the embedded server lacks, and takes the same tensors.

shape legend: R rows, T tokens, C classes
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray


class BadTensorsError(Exception):
    """A request that cannot be answered; the message goes to its sender, the other requests go on."""


class TritonPythonModel:
    """One instance of the model; Triton calls `initialize` once and `execute` with whatever waits in the queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph. `args` is Triton's: strings, and the configuration as JSON."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.max_batch_size = int(config["max_batch_size"])
        self.max_tokens = int(parameters["max_tokens"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(parameters["intra_op_threads"])
        options.inter_op_num_threads = 1
        # For these models the fused operator is slower than its parts: without it one text is about 20 % faster.
        self.session = onnxruntime.InferenceSession(
            str(Path(args["model_repository"]) / args["model_version"] / "model.onnx"),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["SkipLayerNormFusion"],
        )
        self.inputs = [tensor.name for tensor in self.session.get_inputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response for each request, in order; requests of the same length run as one batch."""
        responses: list[Any] = [None] * len(requests)
        same_width: dict[int, dict[int, dict[str, NDArray[Any]]]] = {}
        for index, request in enumerate(requests):
            try:
                tensors = self.read(request)
            except BadTensorsError as error:
                responses[index] = refusal(str(error))
            else:
                same_width.setdefault(tensors["input_ids"].shape[1], {})[index] = tensors
        for group in same_width.values():
            for index, response in self.answer(group).items():
                responses[index] = response
        return responses

    def read(self, request: Any) -> dict[str, NDArray[Any]]:
        """Return the tensors of one request, int64 [R, T]; raise BadTensorsError naming the rule that is broken."""
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
        shapes = {tensor.shape for tensor in tensors.values()}
        rows_by_tokens = shapes.pop()
        if shapes or len(rows_by_tokens) != 2:
            found = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise BadTensorsError(f"inputs have the shapes {found}; all must be the same [rows, tokens]")
        if not rows_by_tokens[0] or not 1 <= rows_by_tokens[1] <= self.max_tokens:
            raise BadTensorsError(
                f"inputs have the shape {list(rows_by_tokens)}; send at least one row of 1 to {self.max_tokens} tokens"
            )
        return tensors

    def answer(self, group: dict[int, dict[str, NDArray[Any]]]) -> dict[int, Any]:
        """Return the responses to requests of one width, by index."""
        try:
            logits_RC = self.run({name: np.concatenate([t[name] for t in group.values()]) for name in self.inputs})
        # ONNX Runtime's errors share no base class of their own; an id outside the vocabulary is the usual reason.
        except Exception as error:
            if len(group) == 1:
                return {index: refusal(f"the graph refused the tensors: {error}") for index in group}
            # One request spoils the batch; alone, each gets its own answer.
            return {
                index: response for index in group for index, response in self.answer({index: group[index]}).items()
            }
        ends = np.cumsum([len(tensors["input_ids"]) for tensors in group.values()])
        parts = np.split(logits_RC, ends[:-1])
        return {
            index: pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("logits", part)])
            for index, part in zip(group, parts, strict=True)
        }

    def run(self, tensors: dict[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the logits, float32 [R, C]; at most `max_batch_size` rows run at a time."""
        rows = len(tensors["input_ids"])
        chunks = [
            self.session.run(["logits"], {name: t[start : start + self.max_batch_size] for name, t in tensors.items()})[
                0
            ]
            for start in range(0, rows, self.max_batch_size)
        ]
        return np.concatenate(chunks)


def refusal(message: str) -> Any:
    """Return the error response for one request."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
