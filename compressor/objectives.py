"""What a student is trained on: modules for `training.fit` that map a batch to loss terms.

The teacher is never part of a module: it is not trained, not saved, and not synchronised between processes.

Shape legend: N rows, B batch, S sequence, C outputs, D teacher width, d student width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import BertConfig, PreTrainedModel

from compressor.checkpoints import Projections
from compressor.config import DistillConfig, Imitation
from compressor.errors import ModelError
from compressor.losses import intermediate_loss, score_loss, soft_cross_entropy
from compressor.models import Observed
from compressor.shapes import Sizes, refuse_unlike
from compressor.training import Tensors


class Intermediate(nn.Module):
    """TinyBERT's general and intermediate distillation: a teacher's embedding, hidden states and attention.

    `layers` are the teacher's (from 0) that the student's learn from, one for each; deeper ones are not computed.
    Pooler and head of the student take no part. The projections to the teacher's width start at `start`: one that all
    share, or one for the embedding and each layer; without it they are drawn at random. Their biases start at 0.
    Raises ModelError if the two models cannot be compared the way that `config` says.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        layers: Sequence[int],
        config: Imitation,
        start: Projections | None = None,
    ) -> None:
        super().__init__()
        refuse_unlike(config, Sizes.of(student.config), Sizes.of(teacher.config))
        self._relations = config.attention == "relations"
        self._heads = config.relation_heads if self._relations else student.config.num_attention_heads
        self._normalisation = config.normalisation
        self._layers = tuple(layers)
        parts = ("query", "key", "value") if self._relations else ("query", "key")
        self.student = Observed(student, range(len(layers)), parts)
        self.projections = _projections(config, len(layers), (student.config, teacher.config), start)
        # In a list, so that it is no part of this module.
        self._teacher = [Observed(teacher.eval().requires_grad_(False), layers, parts, depth=max(layers) + 1)]

    def forward(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The loss terms `embedding`, `hidden`, and `attention` or `relations`."""
        inputs = batch.input_ids_BS, batch.mask_BS, batch.segment_BS
        with torch.no_grad():
            theirs = self._teacher[0](*inputs)
        mine = self.student(*inputs)
        count = len(self.projections)  # 1 if shared
        projected = [self.projections[number % count](states) for number, states in enumerate(mine.hidden)]
        targets = [theirs.hidden[0], *(theirs.hidden[layer + 1] for layer in self._layers)]
        attention = [mine.attention[layer] for layer in range(len(self._layers))]
        terms = intermediate_loss(
            (projected, targets),
            (attention, [theirs.attention[layer] for layer in self._layers]),
            batch.mask_BS.bool(),
            heads=self._heads,
            relations=self._relations,
            normalisation=self._normalisation,
        )
        # Means over tokens weigh by the tokens of the rows; published ones count padding, and all rows have as much.
        weights = {"relations": batch.tokens}
        if self._normalisation == "tokens":
            weights |= {"embedding": batch.tokens, "hidden": batch.tokens, "attention": batch.pairs}
        return {name: term * weights.get(name, 1.0) for name, term in terms.items()}

    def trained_projections(self) -> Projections:
        """The projections to the teacher's width as they are now."""
        parts: Any = self.projections
        return [(part.weight.detach().cpu(), part.bias.detach().cpu()) for part in parts]


class Prediction(nn.Module):
    """TinyBERT's prediction stage: the teacher's answers, worked out once for every row, as (N, C).

    They may be a memory map: only the rows of a batch are read. Classes are learnt by soft cross-entropy, a regression
    (C is 1) by its squared error.
    """

    def __init__(self, student: nn.Module, teacher_logits_NC: NDArray[np.float32], config: DistillConfig) -> None:
        super().__init__()
        self.student = student
        self._teacher_logits_NC = teacher_logits_NC
        self._temperature, self._normalisation = config.temperature, config.normalisation

    def forward(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The loss term `soft_label`, or `score` of a regression."""
        logits_BC = self.student(
            input_ids=batch.input_ids_BS, token_type_ids=batch.segment_BS, attention_mask=batch.mask_BS
        ).logits
        target_BC = torch.from_numpy(self._teacher_logits_NC[batch.row_B.numpy()])
        target_BC = target_BC.to(logits_BC.device, non_blocking=True)
        if target_BC.shape[1] == 1:
            return {"score": score_loss(logits_BC, target_BC)}
        return {"soft_label": soft_cross_entropy(logits_BC, target_BC, self._temperature, self._normalisation)}


def _projections(
    config: Imitation, layers: int, shapes: tuple[BertConfig, BertConfig], start: Projections | None
) -> nn.ModuleList:
    """Linear maps from the student's to the teacher's width: a shared one, or for the embedding and each layer."""
    count = 1 if config.projection == "shared" else layers + 1
    if start is not None and len(start) > count:
        raise ModelError(
            f'the student comes with {len(start)} projections and projection is "shared"; set it to "per-layer"'
        )
    narrow, wide = (shape.hidden_size for shape in shapes)
    made = nn.ModuleList()
    for number in range(count):
        linear = nn.Linear(narrow, wide)
        with torch.no_grad():
            linear.bias.zero_()
            if start is not None:
                weight_Dd, bias_D = start[number % len(start)]
                linear.weight.copy_(weight_Dd)
                linear.bias.copy_(bias_D)
        made.append(linear)
    return made
