"""BERTs: new students, and what one forward pass shows of the inside.

Shape legend: B batch, S sequence, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from compressor.config import StudentConfig
from compressor.shapes import Sizes, check_copied
from compressor.tasks import Task


@dataclass(frozen=True)
class Activations:
    """What one forward pass shows of an encoder."""

    hidden: tuple[Tensor, ...]
    """Embedding output, then each layer's output: (B, S, D)."""
    attention: dict[int, tuple[Tensor, ...]]
    """By observed layer: what its query, key and, if asked for, value layers give, each (B, S, D)."""


class Observed(nn.Module):
    """The encoder of a BERT, whose forward pass shows hidden states and what goes into the attention.

    Attention itself is computed by the model's fused kernel, which hands out no scores: losses work them out again
    from queries and keys, which are kept at the layers asked for only. Pooler, head and layers beyond `depth` are no
    part of this module; the others share their weights with `model`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        parts: Sequence[str] = ("query", "key"),
        depth: int | None = None,
    ) -> None:
        super().__init__()
        bert: Any = model.base_model
        self.embeddings: nn.Module = bert.embeddings
        self.layers: nn.ModuleList = bert.encoder.layer[:depth]
        self._observed, self._parts = frozenset(layers), tuple(parts)

    def forward(self, input_ids_BS: Tensor, mask_BS: Tensor, segment_BS: Tensor | None = None) -> Activations:
        """One pass; `mask_BS` is 1 at a real token, `segment_BS` 0 at every token if not given."""
        states_BSD = self.embeddings(input_ids=input_ids_BS, token_type_ids=segment_BS)
        bias_BS = torch.zeros_like(mask_BS, dtype=states_BSD.dtype)
        bias_BS = bias_BS.masked_fill(mask_BS == 0, torch.finfo(states_BSD.dtype).min)
        bias_B1SS = bias_BS[:, None, None, :].expand(-1, 1, mask_BS.shape[1], -1)
        hidden, attention = [states_BSD], {}
        layer: Any
        for number, layer in enumerate(self.layers):
            seen: dict[str, Tensor] = {}
            parts = self._parts if number in self._observed else ()
            hooks = [self._keep(getattr(layer.attention.self, name), name, seen) for name in parts]
            try:
                states_BSD = layer(states_BSD, bias_B1SS)[0]
            finally:
                for hook in hooks:
                    hook.remove()
            hidden.append(states_BSD)
            if parts:
                attention[number] = tuple(seen[name] for name in parts)
        return Activations(tuple(hidden), attention)

    @staticmethod
    def _keep(linear: nn.Module, name: str, seen: dict[str, Tensor]) -> Any:
        return linear.register_forward_hook(lambda module, inputs, output: seen.__setitem__(name, output))


def student_shape(config: StudentConfig, teacher: BertConfig) -> BertConfig:
    """The configuration of a student: its own sizes, the teacher's vocabulary, positions and labels; no dropout."""
    shape = BertConfig.from_dict(teacher.to_dict())
    shape.num_hidden_layers = config.layers
    shape.hidden_size = config.hidden
    shape.num_attention_heads = config.heads
    shape.intermediate_size = config.intermediate
    shape.hidden_dropout_prob = shape.attention_probs_dropout_prob = 0.0
    shape.classifier_dropout = None
    return shape


def score_scale(task: Task, read: Callable[[], NDArray[Any]]) -> tuple[float, float]:
    """Mean and spread of training scores of any size: a regression is trained on what is left without them.

    Otherwise a head would begin far from them, and the rates of the recipes would not reach them. (0, 1) for labels,
    and for a range that the task gives: TinyBERT trains on STS-B's scores as they are. `read` gives the scores (N,),
    and is called only if they are needed.
    """
    if not task.is_regression or task.score_range is not None:
        return 0.0, 1.0
    score_N = read()
    return float(score_N.mean(dtype=np.float64)), float(score_N.std(dtype=np.float64))


@torch.no_grad()
def rescale(model: BertForSequenceClassification, mean: float, spread: float) -> None:
    """Have a regression answer `spread` times what it answered, plus `mean`."""
    if (mean, spread) != (0.0, 1.0):
        model.classifier.weight.mul_(spread)
        model.classifier.bias.mul_(spread).add_(mean)


def random_student(shape: BertConfig, seed: int) -> BertForSequenceClassification:
    """A student with fresh weights."""
    torch.manual_seed(seed)
    return BertForSequenceClassification(shape)


def copied_student(
    shape: BertConfig, teacher: BertForSequenceClassification, layers: Sequence[int]
) -> BertForSequenceClassification:
    """A student that starts as the given `layers` (from 0) of the teacher. Raises ModelError if the widths differ."""
    check_copied(Sizes.of(shape), Sizes.of(teacher.config))
    student = BertForSequenceClassification(shape)
    student.bert.embeddings.load_state_dict(teacher.bert.embeddings.state_dict())
    for layer, source in zip(student.bert.encoder.layer, layers, strict=True):
        layer.load_state_dict(teacher.bert.encoder.layer[source].state_dict())
    student.bert.pooler.load_state_dict(teacher.bert.pooler.state_dict())
    student.classifier.load_state_dict(teacher.classifier.state_dict())
    return student
