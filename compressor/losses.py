"""TinyBERT's and MiniLMv2's distillation losses: pure functions of tensors.

By default every mean runs over real tokens, so that padding a batch changes nothing; where there is none at all, the
loss is 0 (and its gradient too). `normalisation="published"` gives the values of TinyBERT's published code instead,
for comparison: they depend on how much padding a batch has. Half precision is computed in float32; float64 stays.

Sources: TinyBERT, arXiv:1909.10351, section 3.1 (equations 7 to 10); MiniLMv2, arXiv:2012.15828, section 3.

Shape legend: B batch, S sequence, D hidden width, H heads, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

Normalisation = Literal["tokens", "published"]
# The published code adds -10,000 to the scores of masked keys, and sets to 0 what is not above this.
PUBLISHED_FLOOR = -100.0


def hidden_loss(
    student_BSD: Tensor, teacher_BSD: Tensor, mask_BS: Tensor, normalisation: Normalisation = "tokens"
) -> Tensor:
    """Mean squared error between two hidden states (or embedding outputs) of equal width: a scalar.

    Divides by real tokens x D; published: by B x S x D, padding compared like the rest. `mask_BS` is boolean, True at
    a real token. Raises ValueError if the shapes differ. Source: TinyBERT, equations 8 and 9.
    """
    if student_BSD.shape != teacher_BSD.shape:
        raise ValueError(
            f"student states {tuple(student_BSD.shape)} and teacher states {tuple(teacher_BSD.shape)} differ in shape; "
            "project the student's to the teacher's width first"
        )
    error_BSD = _wide(student_BSD) - _wide(teacher_BSD)
    if normalisation == "published":
        return error_BSD.square().mean()
    # Filled, not multiplied: padding may hold anything, and inf * 0 is nan.
    error_BSD = error_BSD.masked_fill(~mask_BS[:, :, None], 0.0)
    return error_BSD.square().sum() / (mask_BS.sum() * student_BSD.shape[2]).clamp(min=1)


def attention_scores(query_BSD: Tensor, key_BSD: Tensor, heads: int) -> Tensor:
    """Attention scores QK^T/sqrt(D/H) before mask and softmax, (B, H, S, S), from the outputs of a layer's linears.

    Raises ValueError if `heads` does not divide D.
    """
    query_BHSd, key_BHSd = _split(query_BSD, heads), _split(key_BSD, heads)
    return _products(query_BHSd, key_BHSd) / math.sqrt(query_BHSd.shape[-1])


def attention_loss(
    student_BHSS: Tensor, teacher_BHSS: Tensor, mask_BS: Tensor, normalisation: Normalisation = "tokens"
) -> Tensor:
    """Mean squared error between two maps of attention scores before softmax: a scalar.

    Divides by H x pairs of real tokens (the sum over rows of their count squared). Published: by B x H x S x S; scores
    of masked keys, and scores of -100 and less, count as 0 in both; queries at padding are compared. `mask_BS` is
    boolean, True at a real token. Raises ValueError if the shapes differ. Source: TinyBERT, equation 7.
    """
    if student_BHSS.shape != teacher_BHSS.shape:
        raise ValueError(
            f"student scores {tuple(student_BHSS.shape)} and teacher scores {tuple(teacher_BHSS.shape)} differ "
            "in shape; give the student the teacher's head count"
        )
    student_BHSS, teacher_BHSS = _wide(student_BHSS), _wide(teacher_BHSS)
    if normalisation == "published":
        student_BHSS, teacher_BHSS = (
            scores_BHSS.masked_fill(~mask_BS[:, None, None, :] | (scores_BHSS <= PUBLISHED_FLOOR), 0.0)
            for scores_BHSS in (student_BHSS, teacher_BHSS)
        )
        return (student_BHSS - teacher_BHSS).square().mean()
    pairs_B1SS = (mask_BS[:, :, None] & mask_BS[:, None, :]).unsqueeze(1)
    error_BHSS = (student_BHSS - teacher_BHSS).masked_fill(~pairs_B1SS, 0.0)
    return error_BHSS.square().sum() / (pairs_B1SS.sum() * student_BHSS.shape[1]).clamp(min=1)


def relation_loss(student_BSD: Tensor, teacher_BSD: Tensor, mask_BS: Tensor, heads: int) -> Tensor:
    """KL divergence of the student's relations from the teacher's: a scalar. The widths D may differ.

    X, the outputs of a layer's query, key or value linear, is cut into `heads` heads of size d = D/heads; a relation
    is softmax(XX^T/sqrt(d)) over real tokens. Divides by heads x real tokens (as queries); the published code of
    TinyBERT has no such term. `mask_BS` is boolean, True at a real token. Raises ValueError if `heads` does not divide
    a width. Source: MiniLMv2, section 3.1.
    """
    student_BHSS, teacher_BHSS = (_log_relations(states, mask_BS, heads) for states in (student_BSD, teacher_BSD))
    # Queries at padding add nothing: their vectors are 0 in both models, so their relations are the same.
    divergence = (teacher_BHSS.exp() * (teacher_BHSS - student_BHSS)).sum()
    return divergence / (mask_BS.sum() * heads).clamp(min=1)


def soft_cross_entropy(
    student_BC: Tensor, teacher_BC: Tensor, temperature: float = 1.0, normalisation: Normalisation = "tokens"
) -> Tensor:
    """Cross-entropy of the student's distribution under the teacher's, both from logits over `temperature`: a scalar.

    A sum over classes that is divided by B; published: by B x C. There is no factor temperature^2. Raises ValueError
    if the shapes differ. Source: TinyBERT, equation 10.
    """
    _refuse_different(student_BC, teacher_BC)
    target_BC = (_wide(teacher_BC) / temperature).softmax(dim=-1)
    entropy_BC = -(target_BC * log_softmax(_wide(student_BC) / temperature, dim=-1))
    return entropy_BC.mean() if normalisation == "published" else entropy_BC.sum(dim=-1).mean()


def score_loss(student_B1: Tensor, teacher_B1: Tensor) -> Tensor:
    """Mean squared error against the teacher's scores, for a regression: a scalar, divided by B.

    Raises ValueError if the shapes differ. (TinyBERT's code compares with the gold score and leaves the teacher out;
    augmented texts have no gold score.)
    """
    _refuse_different(student_B1, teacher_B1)
    return (_wide(student_B1) - _wide(teacher_B1)).square().mean()


def intermediate_loss(
    hidden: tuple[Sequence[Tensor], Sequence[Tensor]],
    attention: tuple[Sequence[tuple[Tensor, ...]], Sequence[tuple[Tensor, ...]]],
    mask_BS: Tensor,
    *,
    heads: int,
    relations: bool,
    normalisation: Normalisation = "tokens",
) -> dict[str, Tensor]:
    """The terms of TinyBERT's general and intermediate distillation, each a sum over its layers; all weigh 1.

    `hidden` and `attention` hold the student's layers, then the teacher's mapped ones. Hidden states, (B, S, D), come
    with the embedding output first, the student's already projected. Attention is one tuple for each layer: outputs of
    its query and key linears, whose scores are compared as term `attention`; or, with `relations`, of query, key and
    value, whose relations are compared one by one and added up as term `relations`. `heads` are the models' own for
    scores, any that divide both widths for relations.
    """
    embedding, *layers = (
        hidden_loss(mine, theirs, mask_BS, normalisation) for mine, theirs in zip(*hidden, strict=True)
    )
    terms = {"embedding": embedding, "hidden": torch.stack(layers).sum()}
    if relations:
        parts = [pair for layer in zip(*attention, strict=True) for pair in zip(*layer, strict=True)]
        return terms | {"relations": torch.stack([relation_loss(*pair, mask_BS, heads) for pair in parts]).sum()}
    losses = []
    for layer in zip(*attention, strict=True):
        student_BHSS, teacher_BHSS = (attention_scores(query_BSD, key_BSD, heads) for query_BSD, key_BSD in layer)
        losses.append(attention_loss(student_BHSS, teacher_BHSS, mask_BS, normalisation))
    return terms | {"attention": torch.stack(losses).sum()}


def _wide(values: Tensor) -> Tensor:
    """At least float32."""
    return values if values.dtype == torch.float64 else values.float()


def _split(states_BSD: Tensor, heads: int) -> Tensor:
    """(B, S, D) to (B, H, S, D/H)."""
    batch, size, width = states_BSD.shape
    if width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}; choose a divisor of it")
    return states_BSD.view(batch, size, heads, width // heads).transpose(1, 2)


def _products(left_BHSd: Tensor, right_BHSd: Tensor) -> Tensor:
    """All dot products (B, H, S, S) of two sets of vectors, not in the half precision of an outer autocast."""
    with torch.autocast(left_BHSd.device.type, enabled=False):
        return _wide(left_BHSd) @ _wide(right_BHSd).transpose(-1, -2)


def _log_relations(states_BSD: Tensor, mask_BS: Tensor, heads: int) -> Tensor:
    """Logarithm of softmax(XX^T/sqrt(d)) over real tokens, (B, H, S, S); finite everywhere."""
    states_BHSd = _split(states_BSD.masked_fill(~mask_BS[:, :, None], 0.0), heads)
    products_BHSS = _products(states_BHSd, states_BHSd) / math.sqrt(states_BHSd.shape[-1])
    # Not -inf: a row without a real token would give nan gradients.
    lowest = torch.finfo(products_BHSS.dtype).min
    return log_softmax(products_BHSS.masked_fill(~mask_BS[:, None, None, :], lowest), dim=-1)


def _refuse_different(student_BC: Tensor, teacher_BC: Tensor) -> None:
    if student_BC.shape != teacher_BC.shape:
        raise ValueError(
            f"student logits {tuple(student_BC.shape)} and teacher logits {tuple(teacher_BC.shape)} differ in shape; "
            "both need the outputs of the task"
        )
