"""Projected students, against what their teacher does.

Shape legend: D teacher width, d student width, A teacher head size, a student head size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from compressor.errors import ModelError
from compressor.models import Observed, student_shape
from compressor.projection import _basis, _statistics, _with_bias, projected_student
from tests import tiny

FULL = {"layers": 2, "hidden": 32, "intermediate": 64}


def sample(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 4000, (64, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(3, 13, (64, 1), generator=generator)).long()
    return [(ids[:32] * mask[:32], mask[:32]), (ids[32:] * mask[32:], mask[32:])]


def project(teacher: Any, *, seed: int = 0, **shape: int) -> tuple[Any, torch.Tensor]:
    student, basis_Dd = projected_student(student_shape(tiny.student(**shape), teacher.config), teacher, sample(), seed)
    return student.eval(), basis_Dd


def logits(model: Any) -> torch.Tensor:
    ids, mask = sample(seed=1)[0]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return found


def test_full_size_keeps_every_hidden_state_where_layer_norms_are_plain() -> None:
    # With gain 1 and bias 0 the direction that LayerNorm removes carries no energy: the turn is exact.
    teacher = tiny.bert(seed=3)
    student, basis_Dd = project(teacher, **FULL)
    ids, mask = sample(seed=1)[0]
    with torch.no_grad():
        theirs, mine = (Observed(model, [])(ids, mask).hidden for model in (teacher, student))
    for state, turned in zip(theirs, mine, strict=True):
        assert_close(turned @ basis_Dd.T, state, atol=1e-4, rtol=1e-4)


def test_full_size_keeps_every_attention_score_where_layer_norms_are_plain() -> None:
    teacher = tiny.bert(seed=3)
    student, _ = project(teacher, **FULL)
    ids, mask = sample(seed=1)[0]
    with torch.no_grad():
        theirs, mine = (Observed(model, [0, 1])(ids, mask).scores for model in (teacher, student))
    for layer in (0, 1):
        assert_close(mine[layer], theirs[layer], atol=1e-4, rtol=1e-4)


def test_full_size_comes_close_to_the_logits_of_a_lively_teacher() -> None:
    # Not exactly: the gains of LayerNorm become one, and tanh of the pooler acts on turned coordinates.
    teacher = tiny.lively(tiny.bert())
    student, _ = project(teacher, **FULL)
    theirs, mine = logits(teacher), logits(student)
    assert torch.corrcoef(torch.stack([theirs.flatten(), mine.flatten()]))[0, 1] > 0.9


def test_a_narrow_student_starts_nearer_to_its_teacher_than_a_random_one() -> None:
    from compressor.models import random_student

    teacher = tiny.lively(tiny.bert())
    shape = {"layers": 2, "hidden": 24, "intermediate": 64}
    random = random_student(student_shape(tiny.student(**shape), teacher.config), 0).eval()
    student, _ = project(teacher, **shape)
    theirs = logits(teacher)
    assert (logits(student) - theirs).square().mean() < (logits(random) - theirs).square().mean()


def test_basis_is_orthonormal() -> None:
    _, basis_Dd = project(tiny.lively(tiny.bert()), hidden=16)
    assert_close(basis_Dd.T @ basis_Dd, torch.eye(16), atol=1e-5, rtol=0)


def test_basis_spans_the_leading_eigenvectors() -> None:
    moment_DD = torch.diag(torch.tensor([5.0, 1.0, 4.0, 0.1, 3.0, 2.0], dtype=torch.float64))
    basis_Dd = _basis(moment_DD, 3, seed=0)
    assert_close(basis_Dd[[1, 3, 5]], torch.zeros(3, 3), atol=1e-6, rtol=0)


def test_the_direction_that_layer_norm_removes_carries_the_least_important_eigenvector() -> None:
    moment_DD = torch.diag(torch.tensor([5.0, 1.0, 4.0, 0.1, 3.0, 2.0], dtype=torch.float64))
    basis_Dd = _basis(moment_DD, 4, seed=0)
    carried_D = (basis_Dd @ torch.ones(4) / 2).abs()
    assert_close(carried_D, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]), atol=1e-6, rtol=0)


def test_moment_counts_real_tokens_alone() -> None:
    teacher = tiny.lively(tiny.bert())
    ids, mask = sample()[0]
    padded = [(torch.nn.functional.pad(ids, (0, 5), value=9), torch.nn.functional.pad(mask, (0, 5)))]
    with torch.no_grad():
        moment_DD, energy = _statistics(teacher, [(ids, mask)], [1])
        padded_DD, padded_energy = _statistics(teacher, padded, [1])
    assert_close(padded_DD, moment_DD, atol=1e-4, rtol=1e-4)
    assert_close(padded_energy[1], energy[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", range(4))
def test_scores_of_a_head_are_the_best_that_its_size_allows(head: int) -> None:
    teacher = tiny.lively(tiny.bert())
    student, basis_Dd = project(teacher, hidden=16, layers=2)
    old, new = slice(8 * head, 8 * head + 8), slice(4 * head, 4 * head + 4)
    theirs, mine = (model.bert.encoder.layer[0].attention.self for model in (teacher, student))
    # What the head computes of [y, 1]: its queries times its keys, over the root of its size.
    wanted = _with_bias(theirs.query, old, basis_Dd) @ _with_bias(theirs.key, old, basis_Dd).T / 8**0.5
    weights = [torch.cat([part.weight[new].T, part.bias[new][None]]) for part in (mine.query, mine.key)]
    found = weights[0] @ weights[1].T / 4**0.5
    # Eckart and Young: no matrix of rank 4 is nearer than the singular values behind the fourth.
    bound = torch.linalg.svdvals(wanted)[4:].square().sum().sqrt()
    assert_close((found - wanted).norm(), bound, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("head", range(4))
def test_values_of_a_head_are_the_best_that_its_size_allows(head: int) -> None:
    teacher = tiny.lively(tiny.bert())
    student, basis_Dd = project(teacher, hidden=16, layers=2)
    old, new = slice(8 * head, 8 * head + 8), slice(4 * head, 4 * head + 4)
    theirs, mine = (model.bert.encoder.layer[0].attention for model in (teacher, student))
    wanted = _with_bias(theirs.self.value, old, basis_Dd) @ theirs.output.dense.weight[:, old].T @ basis_Dd
    value = torch.cat([mine.self.value.weight[new].T, mine.self.value.bias[new][None]])
    bound = torch.linalg.svdvals(wanted)[4:].square().sum().sqrt()
    assert_close((value @ mine.output.dense.weight[:, new].T - wanted).norm(), bound, atol=1e-4, rtol=1e-3)


def test_feed_forward_keeps_the_neurons_that_add_most() -> None:
    teacher = tiny.lively(tiny.bert(layers=1))
    dead = [3, 17, 40]
    with torch.no_grad():
        teacher.bert.encoder.layer[0].output.dense.weight[:, dead] = 0
    student, basis_Dd = project(teacher, layers=1, hidden=32, intermediate=61)
    alive = [neuron for neuron in range(64) if neuron not in dead]
    kept = teacher.bert.encoder.layer[0].intermediate.dense.weight[alive] @ basis_Dd
    assert_close(student.bert.encoder.layer[0].intermediate.dense.weight.detach(), kept.detach())


def test_more_neurons_than_the_teacher_has_stay_fresh() -> None:
    student, _ = project(tiny.lively(tiny.bert(layers=1)), layers=1, hidden=32, intermediate=80)
    assert student.bert.encoder.layer[0].intermediate.dense.weight[64:].any()


def test_the_result_is_fixed_by_its_seed() -> None:
    teacher = tiny.lively(tiny.bert())
    torch.manual_seed(1)
    first, _ = project(teacher, seed=5, intermediate=80)
    torch.manual_seed(2)
    again, _ = project(teacher, seed=5, intermediate=80)
    other, _ = project(teacher, seed=6, intermediate=80)
    for name, weights in first.state_dict().items():
        assert torch.equal(weights, again.state_dict()[name]), name
    assert not torch.equal(logits(first), logits(other))


def test_projecting_leaves_the_teacher_as_it_is() -> None:
    teacher = tiny.lively(tiny.bert())
    before = logits(teacher)
    project(teacher)
    assert torch.equal(logits(teacher), before)


def test_widening_is_refused() -> None:
    with pytest.raises(ModelError, match=r'"project" cannot widen: the teacher\'s width is 32, not 64'):
        project(tiny.bert(), hidden=64)


def test_another_head_count_is_refused() -> None:
    with pytest.raises(ModelError, match=r'"project" keeps the teacher\'s heads: 4, not 2'):
        project(tiny.bert(), heads=2)
