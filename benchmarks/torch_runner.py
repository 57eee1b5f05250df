"""Token ids in, logits out, by PyTorch: Triton's Python backend runs this file, copied as `model.py`, beside a model.

It is for comparison alone: the folder `model` beside it holds what `transformers` saved.

shape legend: R rows, T tokens, C classes
"""

import json
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForSequenceClassification


class TritonPythonModel:
    """The model; Triton calls `initialize` once and `execute` with whatever waits in the queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights. `args` is Triton's: strings, and the configuration as JSON."""
        config = json.loads(args["model_config"])
        torch.set_num_threads(int(config["parameters"]["intra_op_threads"]["string_value"]))
        self.inputs = [tensor["name"] for tensor in config["input"]]
        folder = Path(args["model_repository"]) / args["model_version"] / "model"
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response for each request, int64 [R, T] in and float32 [R, C] out, in order."""
        responses = []
        for request in requests:
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            with torch.inference_mode():
                logits_RC = self.model(**{name: torch.from_numpy(tensor) for name, tensor in tensors.items()}).logits
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits_RC.numpy())]))
        return responses
