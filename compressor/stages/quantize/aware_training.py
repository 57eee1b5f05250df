"""Quantization-aware training: a student that is distilled for a short while with its products rounded to INT8.

It is the graph that is served which is trained, so what is rounded in training is what INT8 will round. The straight
gradient through a rounding is PyTorch's own.
Shape legend: N rows, B batch, S sequence, C outputs, K input width, N output width (of a product).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compressor.checkpoints import load_classifier
from compressor.classifier_graph import ClassifierGraph
from compressor.config import DistillConfig
from compressor.dataset import Encoded
from compressor.evaluate import MODEL_FILE, Logits, TorchPredictor, predict, scores
from compressor.objectives import Prediction
from compressor.onnx_export import write_graph
from compressor.parity import prove
from compressor.progress import Progress
from compressor.stages.quantize.rewriting import SMALLEST_OUTPUT
from compressor.tasks import Task
from compressor.training import fit, rows_seen
from compressor.triton_releases import format_for
from compressor.world import World

STEPS = 400
BATCH_SIZE = 32
LEARNING_RATE = 5e-5
TEACHER_BATCH = 128
HIGHEST = 255  # of an unsigned 8-bit activation


class RoundedLinear(nn.Linear):
    """A dense product that can see the range of its input, or round input and weights to the values that INT8 has."""

    mode: Literal["plain", "see", "round"] = "plain"

    def __init__(self, source: nn.Linear, weight_bits: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self._largest, self._low, self._high = 2 ** (weight_bits - 1) - 1, 0.0, 0.0

    def forward(self, states: Tensor) -> Tensor:
        """The product of `states` (..., K): (..., N)."""
        if self.mode == "see":
            self._low, self._high = min(self._low, float(states.min())), max(self._high, float(states.max()))
        if self.mode != "round":
            return linear(states, self.weight, self.bias)
        step = max(self._high - self._low, 1e-12) / HIGHEST
        rounded = torch.fake_quantize_per_tensor_affine(states, step, round(-self._low / step), 0, HIGHEST)
        return linear(rounded, self._rounded(), self.bias)

    def _rounded(self) -> Tensor:
        scale_N = self.weight.detach().abs().amax(dim=1).clamp_min(1e-12) / self._largest
        zero_N = torch.zeros_like(scale_N, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(self.weight, scale_N, zero_N, 0, -self._largest, self._largest)


@dataclass(frozen=True, kw_only=True)
class AwareTraining:
    """What it needs to know; the rows are cut by the tokenizer that student and teacher share."""

    task: Task
    student: Path
    """Folder of the student, in PyTorch."""
    teacher: Path
    train: Encoded
    validation: Encoded
    weight_bits: int
    calibration_rows: int
    max_tokens: int
    """Of the longest row that is served."""
    seed: int
    exported: Mapping[str, Any]
    """What the export said of the student's graph: its exporter, its Triton release, its bound."""

    def write(self, exported: Path, folder: Path) -> None:
        """Copy the folder `exported` to `folder`, with the trained weights in its fp32 graph.

        It is written and proved as the export's was: raises GateError as `parity.prove`.
        """
        shutil.copytree(exported, folder)
        graph = ClassifierGraph(load_classifier(self.student, self.task))
        graph.embeddings.requires_grad_(False)  # their INT8 has a scale for each row and loses next to nothing
        products = round_products(graph, self.weight_bits)
        set_mode(products, "see")
        self.run_texts(graph)
        set_mode(products, "round")
        self._train(graph, folder / "checkpoint")
        set_mode(products, "plain")
        exporter, form = self.exported["exporter"], format_for(self.exported["triton_release"])
        write_graph(graph, folder / MODEL_FILE, exporter=exporter, form=form)
        prove(
            "student trained for INT8",
            folder / MODEL_FILE,
            graph,
            self.task,
            self.validation,
            self.exported["bound"],
            max_tokens=self.max_tokens,
        )

    def run_texts(self, graph: ClassifierGraph) -> None:
        """Some training texts one by one, without padding."""
        for row in np.random.default_rng(self.seed).permutation(len(self.train))[: self.calibration_rows]:
            size = int(self.train.lengths(np.array([row]))[0])
            TorchPredictor(graph)(self.train.padded_to(size).batch(np.array([row])).inputs)

    def _train(self, graph: ClassifierGraph, checkpoint: Path) -> None:
        epochs = min(1000.0, STEPS * BATCH_SIZE / len(self.train))
        config = DistillConfig(
            objective="prediction", epochs=epochs, learning_rate=LEARNING_RATE, batch_size=BATCH_SIZE, precision="fp32"
        )

        def validate() -> float:
            logits_NC = predict(TorchPredictor(graph), self.validation)
            return scores(self.task, logits_NC, self.validation.label_N)[self.task.metric]

        fit(
            Prediction(graph, self._teacher_logits(config), config),
            self.train,
            config,
            world=World(device=torch.device("cpu")),
            seed=self.seed,
            folder=checkpoint,
            validate=validate,
        )
        shutil.rmtree(checkpoint)

    def _teacher_logits(self, config: DistillConfig) -> Logits:
        """The teacher's logits (N, C) of the rows that are trained on; 0 in others."""
        teacher = load_classifier(self.teacher, self.task)
        predictor = TorchPredictor(teacher)
        found_NC = np.zeros((len(self.train), teacher.config.num_labels), dtype=np.float32)
        row_R = rows_seen(self.train, config, self.seed)
        progress = Progress("quantize asks the teacher", total=len(self.train if row_R is None else row_R))
        for batch in self.train.batches_by_length(TEACHER_BATCH, row_R):
            found_NC[batch.row_B] = predictor(batch.inputs)
            progress.advance(len(batch.row_B))
        progress.close()
        return found_NC


def round_products(graph: nn.Module, weight_bits: int) -> list[RoundedLinear]:
    """Put products that can round in the place of those that INT8 will have, in place; returns them."""
    made = []
    for module in list(graph.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.out_features >= SMALLEST_OUTPUT:
                made.append(RoundedLinear(child, weight_bits))
                setattr(module, name, made[-1])
    return made


def set_mode(products: list[RoundedLinear], mode: Literal["plain", "see", "round"]) -> None:
    """Say what products do with their input: nothing more, see its range, or round it and their weights."""
    for product in products:
        product.mode = mode
