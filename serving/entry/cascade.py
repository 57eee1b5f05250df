"""Texts in, the student's answers out where it is sure enough, the teacher's where not; copied as `model.py`.

Each request goes on to the student as it came, all of them at the same time, so that the student's own batcher puts
them together and each keeps its own errors. The rows that the student is unsure of go on to the teacher.

shape legend: R rows, C classes
"""

import asyncio
import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

METRICS = {
    "texts": ("compressor_cascade_texts_total", "Texts or pairs answered by a cascade"),
    "escalated": ("compressor_cascade_escalated_texts_total", "Texts or pairs that the teacher had to answer"),
}


class TritonPythonModel:
    """One instance of the model; Triton calls `initialize` once and `execute` with whatever waits in the queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the configuration. `args` is Triton's: strings, and the configuration as JSON."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.student, self.teacher = parameters["student"], parameters["teacher"]
        self.threshold = float(parameters["threshold"])
        self.texts = [tensor["name"] for tensor in config["input"]]
        labels, teacher_labels = (json.loads(parameters[name]) for name in ("labels", "teacher_labels"))
        self.labels = np.array(labels, dtype=object)
        # In the order in which each model gives their probabilities.
        self.labels_of = {self.student: labels, self.teacher: teacher_labels}
        # The teacher may name its labels in another order.
        self.order_C = [teacher_labels.index(label) for label in labels]
        labels_of = {"model": args["model_name"], "version": args["model_version"]}
        self.families = {
            key: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.COUNTER)
            for key, (name, text) in METRICS.items()
        }
        self.metrics = {key: family.Metric(labels=labels_of) for key, family in self.families.items()}

    async def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response for each request, in order."""
        return list(await asyncio.gather(*(self.answer(request) for request in requests)))

    async def answer(self, request: Any) -> Any:
        """Return the response to one request of R rows."""
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.texts}
        first = await self.ask(self.student, tensors)
        if isinstance(first, pb_utils.TritonError):
            return pb_utils.InferenceResponse(error=first)
        answers_RC, is_cut_R1 = first
        unsure_R = answers_RC.max(axis=1) < self.threshold
        if unsure_R.any():
            second = await self.ask(self.teacher, {name: tensor[unsure_R] for name, tensor in tensors.items()})
            if isinstance(second, pb_utils.TritonError):
                return pb_utils.InferenceResponse(error=second)
            answers_RC[unsure_R] = second[0][:, self.order_C]
            is_cut_R1[unsure_R] = second[1]
        self.metrics["texts"].increment(len(answers_RC))
        self.metrics["escalated"].increment(int(unsure_R.sum()))
        best_R1 = answers_RC.argmax(axis=1)[:, None]
        values = {
            "LABEL": self.labels[best_R1],
            "SCORE": np.take_along_axis(answers_RC, best_R1, axis=1),
            "PROBABILITIES": answers_RC,
            "TRUNCATED": is_cut_R1,
            "ESCALATED": unsure_R[:, None],
        }
        asked = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values[name]) for name in values if name in asked])

    async def ask(self, model: str, tensors: dict[str, NDArray[Any]]) -> Any:
        """Return the probabilities, float32 [R, C], and TRUNCATED, bool [R, 1], that a model answers; or an error."""
        response = await pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=["PROBABILITIES", "TRUNCATED", "LABEL"],
            inputs=[pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()],
        ).async_exec()
        if response.has_error():
            message = response.error().message()
            # The status of the model that was asked does not come through; what it says of a text begins with its name.
            is_senders = message.startswith("TEXT")
            return pb_utils.TritonError(
                message, pb_utils.TritonError.INVALID_ARG if is_senders else pb_utils.TritonError.UNAVAILABLE
            )
        answers_RC, is_cut_R1, label_R1 = (
            np.array(pb_utils.get_output_tensor_by_name(response, name).as_numpy())
            for name in ("PROBABILITIES", "TRUNCATED", "LABEL")
        )
        labels = self.labels_of[model]
        # Another version of the model, deployed alone, may have its labels in another order.
        if answers_RC.shape[1] != len(labels) or any(
            labels[best] != label.decode()
            for best, label in zip(answers_RC.argmax(axis=1), label_R1[:, 0], strict=True)
        ):
            return pb_utils.TritonError(
                f"{model} has other labels now than {labels}; deploy the cascade that was published with it",
                pb_utils.TritonError.UNAVAILABLE,
            )
        return answers_RC, is_cut_R1
