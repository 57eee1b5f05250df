"""Distillation losses: by hand, by property, by golden number.

Shape legend: B batch, S sequence, D hidden width, H heads, C classes.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from compressor.losses import attention_loss, hidden_loss, intermediate_loss, soft_cross_entropy

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text(encoding="utf-8"))
MASK_BS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wave(*shape: int, phase: float) -> Tensor:
    """Numbers that do not depend on a random generator."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) + phase).reshape(shape).float()


def states() -> tuple[Tensor, Tensor]:
    return random(2, 5, 4, seed=0), random(2, 5, 4, seed=1)


def scores() -> tuple[Tensor, Tensor]:
    return random(2, 3, 5, 5, seed=2), random(2, 3, 5, 5, seed=3)


def test_hidden_loss_by_hand():
    student_BSD = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]]])
    teacher_BSD = torch.tensor([[[0.0, 2.0], [3.0, 1.0], [0.0, 0.0]]])
    # (1 + 0 + 0 + 9) over 2 real tokens of 2 features
    loss = hidden_loss(student_BSD, teacher_BSD, torch.tensor([[True, True, False]]))
    assert_close(loss, torch.tensor(10 / 4))


def test_attention_loss_by_hand():
    student_BHSS = torch.tensor([[[[1.0, 2.0], [3.0, 9.0]], [[0.0, 1.0], [1.0, 9.0]]]])
    teacher_BHSS = torch.zeros(1, 2, 2, 2)
    whole = attention_loss(student_BHSS, teacher_BHSS, torch.tensor([[True, True]]))
    assert_close(whole, torch.tensor((1 + 4 + 9 + 81 + 0 + 1 + 1 + 81) / 8))
    first = attention_loss(student_BHSS, teacher_BHSS, torch.tensor([[True, False]]))
    assert_close(first, torch.tensor(1 / 2))  # one pair, two heads


def test_soft_cross_entropy_by_hand():
    student_BC, teacher_BC = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
    assert_close(soft_cross_entropy(student_BC, teacher_BC), torch.tensor(math.log(2)))
    sharp_BC = torch.tensor([[math.log(4), 0.0]])  # 4/5, 1/5
    expected = -(0.75 * math.log(0.8) + 0.25 * math.log(0.2))
    assert_close(soft_cross_entropy(sharp_BC, teacher_BC), torch.tensor(expected))


def test_temperature_divides_both_logits():
    student_BC, teacher_BC = random(4, 3, seed=4), random(4, 3, seed=5)
    assert_close(soft_cross_entropy(student_BC, teacher_BC, 2.0), soft_cross_entropy(student_BC / 2, teacher_BC / 2))


def test_intermediate_loss_sums_over_layers_and_keeps_the_embedding_apart():
    hidden, attention = [states() for _ in range(3)], [scores() for _ in range(2)]
    students, teachers = zip(*hidden, strict=True)
    student_scores, teacher_scores = zip(*attention, strict=True)
    terms = intermediate_loss(students, teachers, student_scores, teacher_scores, MASK_BS)
    one_state, one_map = hidden_loss(*states(), MASK_BS), attention_loss(*scores(), MASK_BS)
    assert_close(terms, {"embedding": one_state, "hidden": 2 * one_state, "attention": 2 * one_map})


def test_intermediate_loss_refuses_layers_without_partner():
    student_BSD, teacher_BSD = states()
    with pytest.raises(ValueError, match="zip"):
        intermediate_loss([student_BSD] * 3, [teacher_BSD] * 2, [], [], MASK_BS)


@pytest.mark.parametrize("filler", [0.0, 1e4, -torch.inf, torch.inf, torch.nan])
def test_padding_leaves_hidden_loss_unchanged(filler):
    padded = [pad(part, (0, 0, 0, 3), value=filler) for part in states()]
    assert_close(hidden_loss(*padded, pad(MASK_BS, (0, 3))), hidden_loss(*states(), MASK_BS))


@pytest.mark.parametrize("filler", [0.0, 1e4, -torch.inf, torch.finfo(torch.float32).min, torch.nan])
def test_padding_leaves_attention_loss_unchanged(filler):
    padded = [pad(part, (0, 3, 0, 3), value=filler) for part in scores()]
    assert_close(attention_loss(*padded, pad(MASK_BS, (0, 3))), attention_loss(*scores(), MASK_BS))


def test_padding_rows_leave_losses_unchanged():
    mask = pad(MASK_BS, (0, 0, 0, 2))
    hidden = [pad(part, (0, 0, 0, 0, 0, 2), value=7.0) for part in states()]
    maps = [pad(part, (0, 0, 0, 0, 0, 0, 0, 2), value=-torch.inf) for part in scores()]
    assert_close(hidden_loss(*hidden, mask), hidden_loss(*states(), MASK_BS))
    assert_close(attention_loss(*maps, mask), attention_loss(*scores(), MASK_BS))


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (attention_loss, scores)])
def test_infinite_padding_gives_finite_gradients(loss, make):
    student, teacher = make()
    hide = ~MASK_BS[:, :, None] if student.dim() == 3 else ~(MASK_BS[:, None, :, None] & MASK_BS[:, None, None, :])
    student = student.masked_fill(hide, -torch.inf).requires_grad_()
    loss(student, teacher.masked_fill(hide, -torch.inf), MASK_BS).backward()
    assert student.grad.isfinite().all()
    assert not student.grad.masked_select(hide.expand_as(student)).any()


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (attention_loss, scores)])
def test_order_of_rows_does_not_matter(loss, make):
    student, teacher = make()
    assert_close(loss(student.flip(0), teacher.flip(0), MASK_BS.flip(0)), loss(student, teacher, MASK_BS))


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (attention_loss, scores)])
def test_every_real_token_weighs_the_same_whatever_row_it_is_in(loss, make):
    student, teacher = make()
    alone = [loss(student[row : row + 1], teacher[row : row + 1], MASK_BS[row : row + 1]) for row in range(2)]
    tokens = MASK_BS.sum(dim=1).double()
    weights = tokens if loss is hidden_loss else tokens.square()
    together = (torch.stack(alone).double() * weights).sum() / weights.sum()
    assert_close(loss(student, teacher, MASK_BS).double(), together, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (attention_loss, scores)])
def test_a_perfect_student_has_no_loss(loss, make):
    student, _ = make()
    assert loss(student, student, MASK_BS) == 0


@pytest.mark.parametrize(("loss", "make"), [(hidden_loss, states), (attention_loss, scores)])
def test_without_a_real_token_loss_and_gradient_are_0(loss, make):
    student, teacher = make()
    student.requires_grad_()
    found = loss(student, teacher, torch.zeros_like(MASK_BS))
    found.backward()
    assert (found.item(), student.grad.abs().sum().item()) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    student_BSD, teacher_BSD = torch.full((1, 64, 64), 300.0, dtype=dtype), torch.zeros(1, 64, 64, dtype=dtype)
    loss = hidden_loss(student_BSD, teacher_BSD, torch.ones(1, 64, dtype=torch.bool))
    assert_close(loss, torch.tensor(300.0**2))  # fp16 ends at 65504


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
    ],
)
def test_shapes_that_differ_are_refused(loss, student, teacher, sentence):
    with pytest.raises(ValueError, match=sentence):
        loss(torch.zeros(student), torch.zeros(teacher), MASK_BS)


def test_logits_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"logits \(4, 2\) and teacher logits \(1, 2\) differ in shape"):
        soft_cross_entropy(torch.zeros(4, 2), torch.zeros(1, 2))


def golden_losses() -> dict[str, float]:
    """What `tests/golden/losses.json` holds."""
    states = [wave(2, 5, 4, phase=phase) for phase in (0.0, 0.5)]
    maps = [wave(2, 3, 5, 5, phase=phase) for phase in (1.0, 1.5)]
    logits = [wave(4, 3, phase=phase) for phase in (2.0, 2.5)]
    return {
        "hidden": hidden_loss(*states, MASK_BS).item(),
        "attention": attention_loss(*maps, MASK_BS).item(),
        "soft_cross_entropy": soft_cross_entropy(*logits).item(),
        "soft_cross_entropy_at_temperature_2": soft_cross_entropy(*logits, 2.0).item(),
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_number(name):
    assert golden_losses()[name] == pytest.approx(GOLDEN[name], rel=1e-5)
