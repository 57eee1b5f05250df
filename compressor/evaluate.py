"""Metrics of any predictor on a split, and what they can show.

Shape legend: N rows, C classes, B batch, S sequence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.artifact import Artifact, read
from compressor.dataset import Encoded, encode, read_examples
from compressor.errors import ArtifactError, ModelError
from compressor.statistics import wilson
from compressor.tasks import Task
from compressor.world import available_cores

if TYPE_CHECKING:
    from serving.client import Classifier

MODEL_FILE = "model.onnx"
Predictor = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(input ids, mask), both (B, S) -> logits (B, C)."""


def predict(predictor: Predictor, examples: Encoded, batch_size: int = 64) -> NDArray[np.float32]:
    """Logits (N, C) of every row, in the rows' order; batches of similar length."""
    parts, rows = [], []
    for batch in examples.batches_by_length(batch_size):
        parts.append(predictor(batch.input_ids_BS, batch.mask_BS))
        rows.append(batch.row_B)
    logits_NC = np.concatenate(parts)
    ordered_NC = np.empty_like(logits_NC)
    ordered_NC[np.concatenate(rows)] = logits_NC
    return ordered_NC


def measure(logits_NC: NDArray[np.float32], label_N: NDArray[np.int64]) -> dict[str, Any]:
    """Accuracy with its 95 % interval (Wilson), and the number of rows."""
    right = int((logits_NC.argmax(axis=1) == label_N).sum())
    return {"accuracy": right / len(label_N), "interval_95": wilson(right, len(label_N)), "rows": len(label_N)}


def measure_splits(predictor: Predictor, encoded: Mapping[str, Encoded], out: Path) -> dict[str, Any]:
    """Metrics on validation and test; the logits are kept in `out`, so that later stages can compare row by row."""
    metrics = {}
    for split in ("validation", "test"):
        logits_NC = predict(predictor, encoded[split])
        np.save(out / f"{split}.logits.npy", logits_NC)
        metrics[split] = measure(logits_NC, encoded[split].label_N)
    return metrics


def save_classifier(model: Any, tokenizer: Any, encoded: Mapping[str, Encoded], out: Path) -> dict[str, Any]:
    """Save a PyTorch classifier with its tokenizer, and measure it."""
    metrics = measure_splits(TorchPredictor(model), encoded, out)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return metrics


def evaluate_saved(folder: Path, task: Task, examples: Artifact, split: str) -> dict[str, Any]:
    """Metrics of a saved teacher, student or INT8 model on a split of `examples`.

    Raises ArtifactError if `folder` holds no such artifact.
    """
    from compressor.models import load_classifier, load_tokenizer

    found = read(folder)
    kinds = ("teacher", "student", "int8")
    if found is None or found.manifest["kind"] not in kinds:
        raise ArtifactError(f"{folder} is no finished artifact of kind {', '.join(kinds)}; give the folder of one")
    artifact = Artifact.open(folder, kind=found.manifest["kind"])
    max_tokens = artifact.manifest["section"].get("max_tokens") or task.max_tokens
    with tempfile.TemporaryDirectory() as scratch:
        encoded = encode(examples, split, load_tokenizer(folder), max_tokens, cache=Path(scratch))
        predictor: Predictor
        if artifact.manifest["kind"] == "int8":
            predictor = OnnxPredictor(folder / MODEL_FILE, threads=available_cores())
        else:
            predictor = TorchPredictor(load_classifier(folder, task))
        return measure(predict(predictor, encoded), encoded.label_N)


def evaluate_served(client: Classifier, task: Task, examples: Artifact, split: str) -> dict[str, Any]:
    """Metrics of a served model on a split, asked as a client asks: texts in, labels out.

    Raises ModelError if it answers other labels than the task's.
    """
    if sorted(client.labels) != sorted(task.labels):
        raise ModelError(
            f"the served model answers {list(client.labels)}; {task.name} has {list(task.labels)}; "
            "give the address of a server of this task"
        )
    rows = read_examples(examples.path / f"{split}.arrow")
    answers = client.classify(list(rows["text"]))
    one_hot_NC = np.eye(len(task.labels), dtype=np.float32)[[task.labels.index(answer.label) for answer in answers]]
    return measure(one_hot_NC, np.array(rows["label"]))


class TorchPredictor:
    """A PyTorch classifier in fp32, on its own device."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def __call__(self, input_ids_BS: NDArray[np.int64], mask_BS: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (B, C)."""
        import torch

        device = self._model.device
        with torch.inference_mode():
            ids, mask = (torch.from_numpy(array).to(device) for array in (input_ids_BS, mask_BS))
            logits: NDArray[np.float32] = self._model(input_ids=ids, attention_mask=mask).logits.float().cpu().numpy()
        return logits


class OnnxPredictor:
    """An ONNX classifier in ONNX Runtime on the CPU."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        # The fused operator is slower on CPUs than the Add and LayerNormalization it replaces.
        self._session = ort.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )
        self._inputs = [item.name for item in self._session.get_inputs()]

    def __call__(self, input_ids_BS: NDArray[np.int64], mask_BS: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (B, C)."""
        feeds = {"input_ids": input_ids_BS, "attention_mask": mask_BS, "token_type_ids": np.zeros_like(input_ids_BS)}
        logits: NDArray[np.float32] = self._session.run(["logits"], {name: feeds[name] for name in self._inputs})[0]
        return logits
