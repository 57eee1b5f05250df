"""A student of any width, depth and head size from the fine-tuned teacher's own weights.

The student lives in the subspace of the teacher's hidden states that carries the most energy. Every weight is the
teacher's, seen in that subspace; attention heads are cut to the student's head size by the best low-rank
approximation of their bilinear forms.

Shape legend: D teacher width, d student width, H heads, A teacher head size, a student head size, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from compressor.errors import ModelError
from compressor.models import layer_map

Sample = list[tuple[Tensor, Tensor]]
"""Batches of (input ids, mask), both (B, S) int64."""


@torch.no_grad()
def projected_student(
    shape: BertConfig, teacher: BertForSequenceClassification, sample: Sample, seed: int
) -> tuple[BertForSequenceClassification, Tensor]:
    """A student that starts as the projection of `teacher`, and the basis (D, d) that leads back to its width.

    `sample` is a few thousand real texts. Raises ModelError if the student is wider than the teacher or has another
    head count.
    """
    config = teacher.config
    if shape.hidden_size > config.hidden_size:
        raise ModelError(
            f'init = "project" cannot widen: the teacher\'s width is {config.hidden_size}, not {shape.hidden_size}'
        )
    if shape.num_attention_heads != config.num_attention_heads:
        raise ModelError(
            f'init = "project" keeps the teacher\'s heads: {config.num_attention_heads}, '
            f"not {shape.num_attention_heads}"
        )
    kept = layer_map(shape.num_hidden_layers, config.num_hidden_layers)
    teacher = teacher.eval()
    moment_DD, energy = _statistics(teacher, sample, kept)
    basis_Dd = _basis(moment_DD, shape.hidden_size, seed)
    torch.manual_seed(seed)  # the neurons that the teacher does not have
    student = BertForSequenceClassification(shape)
    _project_embeddings(student.bert.embeddings, teacher.bert.embeddings, basis_Dd)
    for layer, source in enumerate(kept):
        target = student.bert.encoder.layer[layer]
        origin = teacher.bert.encoder.layer[source]
        _project_attention(target.attention, origin.attention, basis_Dd, shape.num_attention_heads)
        _project_feed_forward(target, origin, basis_Dd, energy[source])
    student.bert.pooler.dense.weight.copy_(basis_Dd.T @ teacher.bert.pooler.dense.weight @ basis_Dd)
    student.bert.pooler.dense.bias.copy_(basis_Dd.T @ teacher.bert.pooler.dense.bias)
    student.classifier.weight.copy_(teacher.classifier.weight @ basis_Dd)
    student.classifier.bias.copy_(teacher.classifier.bias)
    return student, basis_Dd


def _statistics(
    teacher: BertForSequenceClassification, sample: Sample, kept: Iterable[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Second moment (D, D) of all hidden states over real tokens, and mean squared activation (F) by kept layer."""
    width = teacher.config.hidden_size
    moment_DD = torch.zeros(width, width, dtype=torch.float64)
    energy = {layer: torch.zeros(teacher.config.intermediate_size, dtype=torch.float64) for layer in kept}
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> object:
        return lambda module, inputs, output: seen.__setitem__(layer, output)

    hooks = [teacher.bert.encoder.layer[layer].intermediate.register_forward_hook(keep(layer)) for layer in energy]
    tokens = 0
    for input_ids, mask in sample:
        output = teacher.bert(input_ids=input_ids, attention_mask=mask, output_hidden_states=True)
        real = mask.bool()
        tokens += int(real.sum())
        for hidden_BSD in output.hidden_states:
            states_ND = hidden_BSD[real].double()
            moment_DD += states_ND.T @ states_ND
        for layer, activation_BSF in seen.items():
            energy[layer] += activation_BSF[real].double().square().sum(dim=0)
    for hook in hooks:
        hook.remove()
    return moment_DD / tokens, {layer: (total / tokens).float() for layer, total in energy.items()}


def _basis(moment_DD: Tensor, width: int, seed: int) -> Tensor:
    """An orthonormal basis (D, d) of the leading subspace, turned so that LayerNorm costs least.

    LayerNorm removes the mean over features: the direction (1, ..., 1) is lost, so it carries the least important
    kept eigenvector. The others are turned at random within its complement, which spreads outlying features.
    """
    _, vectors = torch.linalg.eigh(moment_DD)
    leading_Dd = vectors.flip(-1)[:, :width]
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(width, width, dtype=torch.float64, generator=generator)
    columns[:, 0] = 1.0
    turn_dd, _ = torch.linalg.qr(columns)  # first column is parallel to (1, ..., 1)
    turn_dd = turn_dd.roll(-1, dims=1)
    basis_Dd: Tensor = (leading_Dd @ turn_dd.T).float()
    return basis_Dd


def _project_norm(target: nn.LayerNorm, origin: nn.LayerNorm, basis_Dd: Tensor) -> None:
    large, small = basis_Dd.shape
    target.bias.copy_(basis_Dd.T @ origin.bias)
    target.weight.fill_(float(origin.weight.square().mean().sqrt()) * math.sqrt(large / small))


def _project_embeddings(target: Any, origin: Any, basis_Dd: Tensor) -> None:
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        getattr(target, name).weight.copy_(getattr(origin, name).weight @ basis_Dd)
    _project_norm(target.LayerNorm, origin.LayerNorm, basis_Dd)


def _project_attention(target: Any, origin: Any, basis_Dd: Tensor, heads: int) -> None:
    """Cut each head's two bilinear forms, score and value-output, to the student's head size by SVD."""
    large, small = basis_Dd.shape
    teacher_size, size = large // heads, small // heads
    before, after = origin.self, target.self
    out_DD = origin.output.dense.weight
    # QK/sqrt(head size) stays what it was although the head size changes.
    rescale = math.sqrt(size / teacher_size)
    for head in range(heads):
        old, new = slice(head * teacher_size, (head + 1) * teacher_size), slice(head * size, (head + 1) * size)
        query = _with_bias(before.query, old, basis_Dd)
        key = _with_bias(before.key, old, basis_Dd)
        left, values, right = torch.linalg.svd(query @ key.T * rescale, full_matrices=False)
        root = values[:size].sqrt()
        _set_head(after.query, new, left[:, :size] * root)
        _set_head(after.key, new, right[:size].T * root)
        value = _with_bias(before.value, old, basis_Dd)
        left, values, right = torch.linalg.svd(value @ (out_DD[:, old].T @ basis_Dd), full_matrices=False)
        root = values[:size].sqrt()
        _set_head(after.value, new, left[:, :size] * root)
        target.output.dense.weight[:, new] = right[:size].T * root
    target.output.dense.bias.copy_(basis_Dd.T @ origin.output.dense.bias)
    _project_norm(target.output.LayerNorm, origin.output.LayerNorm, basis_Dd)


def _with_bias(linear: nn.Linear, rows: slice, basis_Dd: Tensor) -> Tensor:
    """One head's weights in the student's coordinates, with its bias as the last row: (d + 1, A)."""
    return torch.cat([basis_Dd.T @ linear.weight[rows].T, linear.bias[rows][None]])


def _set_head(linear: nn.Linear, rows: slice, weights: Tensor) -> None:
    linear.weight[rows] = weights[:-1].T
    linear.bias[rows] = weights[-1]


def _project_feed_forward(target: Any, origin: Any, basis_Dd: Tensor, energy_F: Tensor) -> None:
    """Keep the neurons that add most: mean squared activation times squared norm of the outgoing weight."""
    width = target.intermediate.dense.weight.shape[0]
    into, out = origin.intermediate.dense, origin.output.dense
    best = (energy_F * out.weight.square().sum(dim=0)).topk(min(width, len(energy_F))).indices.sort().values
    target.intermediate.dense.weight[: len(best)] = into.weight[best] @ basis_Dd
    target.intermediate.dense.bias[: len(best)] = into.bias[best]
    target.output.dense.weight[:, : len(best)] = basis_Dd.T @ out.weight[:, best]
    target.output.dense.bias.copy_(basis_Dd.T @ out.bias)
    _project_norm(target.output.LayerNorm, origin.output.LayerNorm, basis_Dd)
