"""What must hold of every loss: padding, order, precision and extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from compressor.losses import (
    attention_loss,
    attention_scores,
    hidden_loss,
    score_loss,
    soft_cross_entropy,
)
from tests.compressor.test_losses import MASK_BS, random, relations, scores, states

# By property.

LOSSES = [(hidden_loss, states), (attention_loss, scores), (relations, states)]


def padded(part: Tensor, filler: float, rows: int = 0) -> Tensor:
    """Three more tokens, and more rows, of something else."""
    places = (0, 0, 0, 3, 0, rows) if part.dim() == 3 else (0, 3, 0, 3, 0, 0, 0, rows)
    return pad(part, places, value=filler)


@pytest.mark.parametrize("filler", [0.0, 1e4, -torch.inf, torch.inf, torch.nan, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_padding_leaves_losses_unchanged(loss, make, filler):
    longer = [padded(part, filler, rows=2) for part in make()]
    assert_close(loss(*longer, pad(MASK_BS, (0, 3, 0, 2))), loss(*make(), MASK_BS))


@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_infinite_padding_gives_finite_gradients(loss, make):
    student, teacher = make()
    hide = ~MASK_BS[:, :, None] if student.dim() == 3 else ~(MASK_BS[:, None, :, None] & MASK_BS[:, None, None, :])
    student = student.masked_fill(hide, -torch.inf).requires_grad_()
    loss(student, teacher.masked_fill(hide, -torch.inf), MASK_BS).backward()
    assert student.grad.isfinite().all()
    assert student.grad.any()
    assert not student.grad.masked_select(hide.expand_as(student)).any()


@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_order_of_rows_does_not_matter(loss, make):
    student, teacher = make()
    assert_close(loss(student.flip(0), teacher.flip(0), MASK_BS.flip(0)), loss(student, teacher, MASK_BS))


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (relations, states)])
def test_order_of_tokens_does_not_matter(loss, make):
    student, teacher = make()
    assert_close(loss(student.flip(1), teacher.flip(1), MASK_BS.flip(1)), loss(student, teacher, MASK_BS))


@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_every_real_token_weighs_the_same_whatever_row_it_is_in(loss, make):
    student, teacher = (part.double() for part in make())
    alone = [loss(student[row : row + 1], teacher[row : row + 1], MASK_BS[row : row + 1]) for row in range(2)]
    tokens = MASK_BS.sum(dim=1).double()
    weights = tokens.square() if loss is attention_loss else tokens
    together = (torch.stack(alone) * weights).sum() / weights.sum()
    assert_close(loss(student, teacher, MASK_BS), together, rtol=1e-9, atol=1e-12)


def test_every_row_weighs_the_same_in_the_cross_entropy():
    student, teacher = random(4, 3, seed=4), random(4, 3, seed=5)
    alone = [soft_cross_entropy(student[row : row + 1], teacher[row : row + 1]) for row in range(4)]
    assert_close(soft_cross_entropy(student, teacher), torch.stack(alone).mean())
    assert_close(soft_cross_entropy(student.flip(0), teacher.flip(0)), soft_cross_entropy(student, teacher))


@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_a_perfect_student_has_no_loss(loss, make):
    student, teacher = make()
    assert loss(student, student, MASK_BS) == 0
    assert loss(student, teacher, MASK_BS) > 0


def test_relations_of_the_same_vectors_in_another_basis_are_the_same():
    student, _ = states()
    turn = torch.linalg.qr(random(2, 2, seed=9)).Q
    turned = (student.view(2, 5, 2, 2) @ turn).flatten(2)
    assert_close(relations(turned, student, MASK_BS), torch.tensor(0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("loss", "make"), LOSSES)
def test_without_a_real_token_loss_and_gradient_are_0(loss, make):
    student, teacher = make()
    student.requires_grad_()
    found = loss(student, teacher, torch.zeros_like(MASK_BS))
    found.backward()
    assert (found.item(), student.grad.abs().sum().item()) == (0.0, 0.0)


def test_a_row_of_one_token_has_one_relation():
    student, teacher = (random(1, 1, 4, seed=seed).requires_grad_() for seed in (0, 1))
    one = torch.ones(1, 1, dtype=torch.bool)
    found = relations(student, teacher, one)
    found.backward()
    assert found == 0
    assert student.grad is not None
    assert not student.grad.any()
    assert_close(hidden_loss(student, teacher, one), (student - teacher).square().mean())
    scored, wanted = (attention_scores(part, part, 2) for part in (student, teacher))
    assert_close(attention_loss(scored, wanted, one), (scored - wanted).square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    student_BSD, teacher_BSD = torch.full((1, 64, 64), 300.0, dtype=dtype), torch.zeros(1, 64, 64, dtype=dtype)
    everything = torch.ones(1, 64, dtype=torch.bool)
    assert_close(hidden_loss(student_BSD, teacher_BSD, everything), torch.tensor(300.0**2))  # fp16 ends at 65504
    scored = attention_scores(student_BSD, student_BSD, 1)
    assert_close(scored, torch.full((1, 1, 64, 64), 300.0**2 * 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss", "make"), LOSSES)
@pytest.mark.parametrize("size", [1.0, 3e3])
def test_half_precision_gives_finite_losses_and_gradients(dtype, loss, make, size):
    student, teacher = ((size * part).to(dtype) for part in make())
    student.requires_grad_()
    found = loss(student, teacher, MASK_BS)
    found.backward()
    assert found.dtype == torch.float32
    assert found.isfinite()
    assert student.grad.isfinite().all()
    exact = loss(student.detach().double(), teacher.double(), MASK_BS)
    assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_half_precision_is_finite(dtype):
    student, teacher = ((1e4 * random(4, 3, seed=seed)).to(dtype).requires_grad_() for seed in (1, 2))
    found = soft_cross_entropy(student, teacher)
    found.backward()
    assert found.dtype == torch.float32
    assert found.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert score_loss(student[:, :1], teacher[:, :1]).isfinite()


def test_autocast_does_not_lower_the_precision_of_scores():
    query, key = states()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scored, related = attention_scores(query, key, 2), relations(query, key, MASK_BS)
    assert torch.equal(scored, attention_scores(query, key, 2))
    assert torch.equal(related, relations(query, key, MASK_BS))


def test_cross_entropy_is_least_for_the_teacher_s_own_distribution():
    teacher_BC = random(4, 3, seed=6)
    own = soft_cross_entropy(teacher_BC + 5.0, teacher_BC)  # a constant added to all logits changes nothing
    assert_close(own, torch.distributions.Categorical(logits=teacher_BC).entropy().mean())
    assert own < soft_cross_entropy(random(4, 3, seed=7), teacher_BC)


def test_cross_entropy_stays_finite_for_extreme_logits():
    student_BC, teacher_BC = torch.tensor([[1e4, -1e4]]), torch.tensor([[-1e4, 1e4]])
    assert_close(soft_cross_entropy(student_BC, teacher_BC), torch.tensor(2e4))


@pytest.mark.parametrize(
    ("loss", "student", "teacher", "sentence"),
    [
        (hidden_loss, (2, 5, 4), (2, 5, 6), r"states \(2, 5, 4\) and .* \(2, 5, 6\) differ .* project the student's"),
        (attention_loss, (2, 3, 5, 5), (2, 6, 5, 5), r"scores \(2, 3, 5, 5\) and .* the teacher's head count"),
        (relations, (2, 5, 4), (2, 5, 7), r"2 heads do not divide a width of 7; choose a divisor of it"),
    ],
)
def test_shapes_that_differ_are_refused(loss, student, teacher, sentence):
    with pytest.raises(ValueError, match=sentence):
        loss(torch.zeros(student), torch.zeros(teacher), MASK_BS)


@pytest.mark.parametrize(("loss", "outputs"), [(soft_cross_entropy, 2), (score_loss, 1)])
def test_logits_that_would_broadcast_are_refused(loss, outputs):
    with pytest.raises(
        ValueError, match=rf"logits \(4, {outputs}\) and teacher logits \(1, {outputs}\) differ in shape"
    ):
        loss(torch.zeros(4, outputs), torch.zeros(1, outputs))
