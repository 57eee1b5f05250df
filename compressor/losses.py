"""TinyBERT's distillation losses: pure functions of tensors.

Every mean runs over real tokens, so padding a batch changes nothing; where there is none at all, the loss is 0 (and
its gradient too). Source of all: TinyBERT, arXiv:1909.10351, section 3.1 (equations 7 to 10).

Shape legend: B batch, S sequence, D hidden width, H heads, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax


def hidden_loss(student_BSD: Tensor, teacher_BSD: Tensor, mask_BS: Tensor) -> Tensor:
    """Mean squared error between two hidden states of equal width, over real tokens and features.

    `mask_BS` is boolean, True at a real token. Returns a float32 scalar. Raises ValueError if the shapes differ.
    """
    if student_BSD.shape != teacher_BSD.shape:
        raise ValueError(
            f"student states {tuple(student_BSD.shape)} and teacher states {tuple(teacher_BSD.shape)} differ in shape; "
            "project the student's to the teacher's width first"
        )
    error_BSD = (student_BSD.float() - teacher_BSD.float()).masked_fill(~mask_BS[:, :, None], 0.0)
    return error_BSD.square().sum() / (mask_BS.sum() * student_BSD.shape[2]).clamp(min=1)


def attention_loss(student_BHSS: Tensor, teacher_BHSS: Tensor, mask_BS: Tensor) -> Tensor:
    """Mean squared error between two attention-score maps, over heads and pairs of real tokens.

    Scores are QK/sqrt(head size) before softmax. `mask_BS` is boolean, True at a real token. Returns a float32 scalar.
    Raises ValueError if the shapes differ.
    """
    if student_BHSS.shape != teacher_BHSS.shape:
        raise ValueError(
            f"student scores {tuple(student_BHSS.shape)} and teacher scores {tuple(teacher_BHSS.shape)} differ "
            "in shape; give the student the teacher's head count"
        )
    pairs_B1SS = (mask_BS[:, :, None] & mask_BS[:, None, :]).unsqueeze(1)
    error_BHSS = (student_BHSS.float() - teacher_BHSS.float()).masked_fill(~pairs_B1SS, 0.0)
    return error_BHSS.square().sum() / (pairs_B1SS.sum() * student_BHSS.shape[1]).clamp(min=1)


def soft_cross_entropy(student_BC: Tensor, teacher_BC: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the student's distribution under the teacher's, both from logits divided by `temperature`.

    The mean runs over the batch, the sum over classes. Returns a float32 scalar. Raises ValueError if the shapes
    differ.
    """
    if student_BC.shape != teacher_BC.shape:
        raise ValueError(
            f"student logits {tuple(student_BC.shape)} and teacher logits {tuple(teacher_BC.shape)} differ in shape; "
            "both need the classes of the task"
        )
    target_BC = (teacher_BC.float() / temperature).softmax(dim=-1)
    return -(target_BC * log_softmax(student_BC.float() / temperature, dim=-1)).sum(dim=-1).mean()


def intermediate_loss(
    student_hidden: Sequence[Tensor],
    teacher_hidden: Sequence[Tensor],
    student_scores: Sequence[Tensor],
    teacher_scores: Sequence[Tensor],
    mask_BS: Tensor,
) -> dict[str, Tensor]:
    """The terms of TinyBERT's intermediate stage: embedding, hidden, attention; each a sum over its layers.

    Hidden states come with the embedding output first, already projected to the teacher's width; the teacher's are
    those of the mapped layers. All terms weigh 1 in the paper.
    """
    embedding, *hidden = (hidden_loss(s, t, mask_BS) for s, t in zip(student_hidden, teacher_hidden, strict=True))
    attention = [attention_loss(s, t, mask_BS) for s, t in zip(student_scores, teacher_scores, strict=True)]
    return {"embedding": embedding, "hidden": torch.stack(hidden).sum(), "attention": torch.stack(attention).sum()}
