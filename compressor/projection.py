"""A student of any width, depth and head size from the fine-tuned teacher's own weights, in seconds.

The student lives in the subspace of the teacher's hidden states that carries the most energy. Its weights are the
teacher's, seen in that subspace; then, from the embeddings upwards, what a sample of text can correct is fitted by
ridge regression on the student's own activations: what skipped layers did and cut directions carried, as far as it is
linear. Every fit corrects the projected weights and is pulled towards them, so a student of the teacher's own shape is
the teacher.

Shape legend: B batch, S sequence, N picked tokens, T texts, D teacher width, d student width, A teacher head size,
a student head size, F feed-forward neurons, C outputs, k features of a fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from compressor.checkpoints import Projections
from compressor.dataset import Encoded, Rows
from compressor.models import copied_student, random_student
from compressor.shapes import Sizes, check_projected, layer_map
from compressor.training import Tensors

Sample = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Batches of (input ids, segments, mask), each (B, S) int64; the mask is 1 at a real token."""
TOKENS = 30_000  # that take part in the fits, at most about: bounds memory and time
LAYER_RIDGE = 1e-2  # pulls of the fits to the projected weights, in units of the features' mean energy
VIEW_RIDGE = 1e-3
HEAD_RIDGE = 1e-1  # the head is fitted on texts, of which there are few, and not on tokens


def begun_student(
    init: str,
    shape: BertConfig,
    teacher: BertForSequenceClassification,
    layers: tuple[int, ...],
    encoded: Encoded,
    groups: Sequence[Rows],
    seed: int,
) -> tuple[BertForSequenceClassification, Projections | None]:
    """A student begun as `init` says, and what its projections to the teacher's width start from.

    `layers` are the teacher's (from 0) that it learns from; `groups` are batches of rows of `encoded` that show the
    subspace of the teacher's states. Raises ModelError if it cannot begin so.
    """
    match init:
        case "random":
            return random_student(shape, seed), None
        case "teacher-layers":
            student, basis_Dd = copied_student(shape, teacher, layers), torch.eye(shape.hidden_size)
        case _:
            batches = [Tensors.of(encoded.batch(row_B), teacher.device) for row_B in groups]
            sample = [(batch.input_ids_BS, batch.segment_BS, batch.mask_BS) for batch in batches]
            student, basis_Dd = projected_student(shape, teacher, sample, seed, kept=layers)
    return student, [(basis_Dd, torch.zeros(len(basis_Dd)))]


def in_groups(row_N: Rows, size: int) -> list[Rows]:
    """Rows in batches of `size`, the last one what is left."""
    return [row_N[first : first + size] for first in range(0, len(row_N), size)]


@torch.no_grad()
def projected_student(
    shape: BertConfig,
    teacher: BertForSequenceClassification,
    sample: Sample,
    seed: int,
    *,
    kept: tuple[int, ...] | None = None,
) -> tuple[BertForSequenceClassification, Tensor]:
    """A student that starts as the projection of `teacher`, and the basis (D, d) that leads back to its width.

    `sample` is about two thousand real texts, on the teacher's device; `kept` names the teacher layer (from 0) that
    each student layer is made from, the uniform map if not given. The head is fitted to the teacher's logits,
    whatever they are worth. Raises ModelError if the student is wider or deeper than the teacher, or has another head
    count.
    """
    check_projected(Sizes.of(shape), Sizes.of(teacher.config))
    kept = kept or layer_map(shape.num_hidden_layers, teacher.config.num_hidden_layers)
    teacher = teacher.eval()
    picked = _pick(sample, seed)
    seen = _observe(teacher, sample, picked)
    basis_Dd = _basis(seen.moment_DD, shape.hidden_size)
    torch.manual_seed(seed)  # the neurons that the teacher does not have
    student = BertForSequenceClassification(shape).to(teacher.device).eval()

    _project_embeddings(student.bert.embeddings, teacher.bert.embeddings, basis_Dd)
    summed = [_summed(student.bert.embeddings, ids, segment) for ids, segment, _ in sample]
    _correct_norm(student.bert.embeddings.LayerNorm, _picked(summed, picked), seen.states[0] @ basis_Dd)
    streams = [student.bert.embeddings(input_ids=ids, token_type_ids=segment) for ids, segment, _ in sample]
    biases = [_bias(mask) for _, _, mask in sample]
    target: Any
    for target, source in zip(student.bert.encoder.layer, kept, strict=True):
        origin: Any = teacher.bert.encoder.layer[source]
        input_Nd = _picked(streams, picked)
        view = _view(input_Nd, seen.states[source], basis_Dd)
        _project_attention(target.attention, origin.attention, basis_Dd, view, _metric(input_Nd))
        attended = [
            target.attention.self(stream, attention_mask=bias)[0] for stream, bias in zip(streams, biases, strict=True)
        ]
        context_Nd = _picked(attended, picked)
        _correct(target.attention.output, input_Nd, context_Nd, seen.middles[source] @ basis_Dd)
        middle_Nd = target.attention.output(context_Nd, input_Nd)
        view = _view(middle_Nd, seen.middles[source], basis_Dd)
        _project_feed_forward(target, origin, basis_Dd, view, seen.energies[source])
        _correct(target.output, middle_Nd, target.intermediate(middle_Nd), seen.states[source + 1] @ basis_Dd)
        streams = [target(stream, attention_mask=bias)[0] for stream, bias in zip(streams, biases, strict=True)]
    _project_head(student, teacher, basis_Dd, torch.cat([stream[:, 0] for stream in streams]), seen)
    return student, basis_Dd


@dataclass(frozen=True)
class _Seen:
    """What the teacher does at the picked tokens, and at the first token of each text."""

    moment_DD: Tensor
    """Second moment of all hidden states, float64."""
    states: list[Tensor]
    """Embedding output, then each layer's output: (N, D)."""
    middles: list[Tensor]
    """By layer: what goes into its feed-forward part, (N, D)."""
    energies: list[Tensor]
    """By layer: mean squared activation of each neuron, (F,)."""
    pooled_TD: Tensor
    """Inputs of the pooler's tanh."""
    logits_TC: Tensor


def _pick(sample: Sample, seed: int) -> list[Tensor]:
    """Masks (B, S) of the real tokens that take part, at most about TOKENS."""
    real = [mask.bool() for _, _, mask in sample]
    share = TOKENS / max(1, sum(int(mask_BS.sum()) for mask_BS in real))
    generator = torch.Generator().manual_seed(seed)
    return [mask_BS & (torch.rand(mask_BS.shape, generator=generator) < share).to(mask_BS.device) for mask_BS in real]


def _picked(states: Sequence[Tensor], picked: Sequence[Tensor]) -> Tensor:
    return torch.cat([state_BSD[mask_BS] for state_BSD, mask_BS in zip(states, picked, strict=True)])


def _bias(mask_BS: Tensor) -> Tensor:
    """What attention adds to its scores: next to minus infinity at padding, (B, 1, 1, S)."""
    bias_BS = torch.zeros(mask_BS.shape, device=mask_BS.device).masked_fill(mask_BS == 0, torch.finfo().min)
    return bias_BS[:, None, None, :]


def _observe(teacher: BertForSequenceClassification, sample: Sample, picked: Sequence[Tensor]) -> _Seen:
    layers: Any = teacher.bert.encoder.layer
    states: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]
    middles: list[list[Tensor]] = [[] for _ in layers]
    energies = [torch.zeros(teacher.config.intermediate_size, device=teacher.device) for _ in layers]
    pooled = []
    for (ids, segment, mask), pick_BS in zip(sample, picked, strict=True):
        stream_BSD = teacher.bert.embeddings(input_ids=ids, token_type_ids=segment)
        states[0].append(stream_BSD[pick_BS])
        for number, layer in enumerate(layers):
            middle_BSD = layer.attention(stream_BSD, attention_mask=_bias(mask))[0]
            activation_BSF = layer.intermediate(middle_BSD)
            stream_BSD = layer.output(activation_BSF, middle_BSD)
            middles[number].append(middle_BSD[pick_BS])
            energies[number] += activation_BSF[pick_BS].square().sum(dim=0)
            states[number + 1].append(stream_BSD[pick_BS])
        pooled.append(teacher.bert.pooler.dense(stream_BSD[:, 0]))
    joined, pooled_TD = [torch.cat(parts) for parts in states], torch.cat(pooled)
    count = len(joined[0])
    moment_DD = torch.zeros(2 * (teacher.config.hidden_size,), dtype=torch.float64, device=teacher.device)
    for states_ND in joined:
        moment_DD += (states_ND.T @ states_ND).double() / count
    return _Seen(
        moment_DD,
        joined,
        [torch.cat(parts) for parts in middles],
        [energy_F / count for energy_F in energies],
        pooled_TD,
        teacher.classifier(pooled_TD.tanh()),
    )


def _basis(moment_DD: Tensor, width: int) -> Tensor:
    """An orthonormal basis (D, d) of the leading subspace, as near to `width` of the teacher's features as it can be.

    LayerNorm's gains and the mean it removes belong to single features, so they carry over best where the basis is
    hardly turned. The features are those that the subspace holds best (pivoted Cholesky of its projector). At the
    teacher's own width the basis is the identity.
    """
    if width == len(moment_DD):
        return torch.eye(width, device=moment_DD.device)
    _, vectors = torch.linalg.eigh(moment_DD)
    leading_Dd = vectors[:, -width:]
    rest_DD = leading_Dd @ leading_Dd.T
    features: list[int] = []
    for _ in range(width):
        held_D = rest_DD.diagonal().clone()
        held_D[features] = -1.0
        best = int(held_D.argmax())
        features.append(best)
        column_D = rest_DD[:, best] / rest_DD[best, best].clamp(min=1e-12).sqrt()
        rest_DD = rest_DD - column_D.outer(column_D)
    left_dd, _, right_dd = torch.linalg.svd(leading_Dd[sorted(features)].T)
    basis_Dd: Tensor = (leading_Dd @ left_dd @ right_dd).float()  # nearest to the features: orthogonal Procrustes
    return basis_Dd


def _ridge(features_Nk: Tensor, error_Nm: Tensor, pull: float, weight_N: Tensor | None = None) -> Tensor:
    """The correction (k + 1, m) of weights and, in the last row, bias that removes most of the squared error."""
    ones_N1 = torch.ones(len(features_Nk), 1, device=features_Nk.device)
    features_Nk = torch.cat([features_Nk, ones_N1], dim=1)
    weighted_Nk = features_Nk if weight_N is None else features_Nk * weight_N[:, None]
    gram_kk = (weighted_Nk.T @ features_Nk).double()
    gram_kk.diagonal().add_(pull * gram_kk.diagonal().mean())
    found_km: Tensor = torch.linalg.solve(gram_kk, (weighted_Nk.T @ error_Nm).double()).float()
    return found_km


def _add(linear: Any, correction_km: Tensor) -> None:
    linear.weight.add_(correction_km[:-1].T)
    linear.bias.add_(correction_km[-1])


def _correct(part: Any, residual_Nd: Tensor, features_Nk: Tensor, target_Nd: Tensor) -> None:
    """Correct the dense layer of LayerNorm(residual + dense(features)), and the gains, towards the target."""
    norm: nn.LayerNorm = part.LayerNorm
    _correct_norm(norm, residual_Nd + part.dense(features_Nk), target_Nd)
    summed_Nd = residual_Nd + part.dense(features_Nk)
    # What comes out of LayerNorm is divided by the token's deviation and multiplied by the feature's gain. A token
    # with a small deviation counts for more; a gain near 0 must not ask for the moon.
    deviation_N1 = summed_Nd.std(dim=1, correction=0, keepdim=True).clamp(min=1e-6)
    gain_d = norm.weight.abs().clamp(min=0.01 * float(norm.weight.abs().mean())).copysign(norm.weight)
    error_Nd = (target_Nd - norm(summed_Nd)) * deviation_N1 / gain_d
    _add(part.dense, _ridge(features_Nk, error_Nd, LAYER_RIDGE, deviation_N1[:, 0] ** -2))
    _correct_norm(norm, residual_Nd + part.dense(features_Nk), target_Nd)


def _correct_norm(norm: nn.LayerNorm, summed_Nd: Tensor, target_Nd: Tensor) -> None:
    """Fit gain and bias of each feature by least squares."""
    plain_Nd = nn.functional.layer_norm(summed_Nd, norm.normalized_shape, eps=norm.eps)
    error_Nd = target_Nd - norm(summed_Nd)
    mean_d = plain_Nd.mean(dim=0)
    centred_Nd = plain_Nd - mean_d
    change_d = (centred_Nd * error_Nd).mean(dim=0) / (centred_Nd.square().mean(dim=0) + 1e-6)
    norm.weight.add_(change_d)
    norm.bias.add_(error_Nd.mean(dim=0) - change_d * mean_d)


def _project_norm(target: nn.LayerNorm, origin: nn.LayerNorm, basis_Dd: Tensor) -> None:
    large, small = basis_Dd.shape
    target.bias.copy_(basis_Dd.T @ origin.bias)
    target.weight.copy_(basis_Dd.square().T @ origin.weight * math.sqrt(large / small))


def _project_embeddings(target: Any, origin: Any, basis_Dd: Tensor) -> None:
    """A gain acts on single features and so before the projection; at the teacher's own width it stays where it is."""
    gain_D = origin.LayerNorm.weight
    scale = float(gain_D.square().mean().sqrt())
    _project_norm(target.LayerNorm, origin.LayerNorm, basis_Dd)
    narrower = basis_Dd.shape[0] > basis_Dd.shape[1]
    if narrower:
        target.LayerNorm.weight.fill_(scale * math.sqrt(basis_Dd.shape[0] / basis_Dd.shape[1]))
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        table_VD = getattr(origin, name).weight
        if narrower:
            table_VD = (table_VD - table_VD.mean(dim=1, keepdim=True)) * (gain_D / scale)
        getattr(target, name).weight.copy_(table_VD @ basis_Dd)


def _summed(embeddings: Any, ids_BS: Tensor, segment_BS: Tensor) -> Tensor:
    """What goes into the embeddings' LayerNorm."""
    summed_BSd: Tensor = embeddings.word_embeddings(ids_BS) + embeddings.token_type_embeddings(segment_BS)
    summed_BSd += embeddings.position_embeddings.weight[: ids_BS.shape[1]]
    return summed_BSd


def _view(states_Nd: Tensor, wanted_ND: Tensor, basis_Dd: Tensor) -> Tensor:
    """The teacher's states as a linear map (d + 1, D) of the student's, which a teacher layer takes as its input.

    It brings back what the basis cut off or skipped layers changed.
    """
    view = _ridge(states_Nd, wanted_ND - states_Nd @ basis_Dd.T, VIEW_RIDGE)
    view[:-1] += basis_Dd.T
    return view


def _seen_through(view: Tensor, linear: nn.Linear, rows: Tensor | slice = slice(None)) -> Tensor:
    """Some outputs of a teacher's layer on the student's states: weights (d, rows), with the bias as the last row."""
    weights: Tensor = view @ linear.weight[rows].T
    weights[-1] += linear.bias[rows]
    return weights


def _metric(states_Nd: Tensor) -> Tensor:
    """A root R of the second moment of [state, 1]: |Rᵀ w| is the root mean square of [state, 1] · w. Float64."""
    states_Nk = torch.cat([states_Nd, torch.ones(len(states_Nd), 1, device=states_Nd.device)], dim=1)
    moment_kk = (states_Nk.T @ states_Nk).double() / len(states_Nk)
    moment_kk.diagonal().add_(1e-6 * moment_kk.diagonal().mean())
    root_kk: Tensor = torch.linalg.cholesky(moment_kk)
    return root_kk


def _project_attention(target: Any, origin: Any, basis_Dd: Tensor, view: Tensor, metric: Tensor) -> None:
    """Cut each head's two bilinear forms, score and value-output, to the student's head size.

    The cut is the one that costs least over the sample's tokens, and not over all directions alike.
    """
    before, after = origin.self, target.self
    large, small = before.attention_head_size, after.attention_head_size
    for head in range(before.num_attention_heads):
        old, new = slice(head * large, (head + 1) * large), slice(head * small, (head + 1) * small)
        query, key, value = (
            _seen_through(view, part, old).double() for part in (before.query, before.key, before.value)
        )
        # QK/sqrt(head size) stays what it was although the head size changes.
        left, right = _cut(metric.T @ query, metric.T @ key * math.sqrt(small / large), small)
        _set_head(after.query, new, torch.linalg.solve_triangular(metric.T, left, upper=True))
        _set_head(after.key, new, torch.linalg.solve_triangular(metric.T, right, upper=True))
        left, right = _cut(metric.T @ value, basis_Dd.T.double() @ origin.output.dense.weight[:, old].double(), small)
        _set_head(after.value, new, torch.linalg.solve_triangular(metric.T, left, upper=True))
        target.output.dense.weight[:, new] = right.float()
    target.output.dense.bias.copy_(basis_Dd.T @ origin.output.dense.bias)
    _project_norm(target.output.LayerNorm, origin.output.LayerNorm, basis_Dd)


def _cut(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best approximation of left @ right.T by `rank`, which share the singular values evenly."""
    (left_basis, left_rest), (right_basis, right_rest) = torch.linalg.qr(left), torch.linalg.qr(right)
    turn, values, turn_back = torch.linalg.svd(left_rest @ right_rest.T)
    root = values[:rank].sqrt()
    return left_basis @ turn[:, :rank] * root, right_basis @ turn_back[:rank].T * root


def _set_head(linear: nn.Linear, rows: slice, weights: Tensor) -> None:
    linear.weight[rows] = weights[:-1].T.float()
    linear.bias[rows] = weights[-1].float()


def _project_feed_forward(target: Any, origin: Any, basis_Dd: Tensor, view: Tensor, energy_F: Tensor) -> None:
    """Keep the neurons that add most: mean squared activation times squared norm of the outgoing weight.

    Neurons that the teacher does not have stay fresh, and silent until training.
    """
    into, out = target.intermediate.dense, origin.output.dense
    count = min(len(into.bias), len(energy_F))
    best = (energy_F * out.weight.square().sum(dim=0)).topk(count).indices.sort().values
    weights = _seen_through(view, origin.intermediate.dense, best)
    into.weight[:count] = weights[:-1].T
    into.bias[:count] = weights[-1]
    target.output.dense.weight.zero_()
    target.output.dense.weight[:, :count] = basis_Dd.T @ out.weight[:, best]
    target.output.dense.bias.copy_(basis_Dd.T @ out.bias)
    _project_norm(target.output.LayerNorm, origin.output.LayerNorm, basis_Dd)


def _project_head(student: Any, teacher: Any, basis_Dd: Tensor, first_Td: Tensor, seen: _Seen) -> None:
    """Keep the pooler's neurons that move the logits most, each as it is: a mixture would not pass through tanh.

    Then fit their inputs, and after that the classifier, on the first token of each text.
    """
    pooler, old = student.bert.pooler.dense, teacher.bert.pooler.dense
    weight_CD = teacher.classifier.weight
    if len(weight_CD) > 1:
        weight_CD = weight_CD - weight_CD.mean(dim=0)  # what all classes share decides nothing
    effect_D = seen.pooled_TD.tanh().std(dim=0, correction=0) * weight_CD.norm(dim=0)
    best = effect_D.topk(basis_Dd.shape[1]).indices.sort().values
    pooler.weight.copy_(old.weight[best] @ basis_Dd)
    pooler.bias.copy_(old.bias[best])
    _add(pooler, _ridge(first_Td, seen.pooled_TD[:, best] - pooler(first_Td), HEAD_RIDGE))
    student.classifier.weight.copy_(teacher.classifier.weight[:, best])
    student.classifier.bias.copy_(teacher.classifier.bias)
    pooled_Td = pooler(first_Td).tanh()
    _add(student.classifier, _ridge(pooled_Td, seen.logits_TC - student.classifier(pooled_Td), HEAD_RIDGE))
