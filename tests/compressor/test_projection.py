"""Projected students, against what their teacher does.

Shape legend: B batch, S sequence, N tokens, D teacher width, d student width, A teacher head size, a student head size.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compressor import projection
from compressor.errors import ModelError
from compressor.models import Observed, random_student, student_shape
from compressor.projection import _basis, _metric, _pick, _project_attention, _seen_through, projected_student
from tests import tiny

FULL: dict[str, Any] = {"layers": 2, "hidden": 32, "intermediate": 64}
Batches = list[tuple[Tensor, Tensor, Tensor]]


def batches(size: int, ids: Tensor, segment: Tensor, mask: Tensor) -> Batches:
    rows = range(0, len(ids), size)
    return [(ids[row : row + size], segment[row : row + size], mask[row : row + size]) for row in rows]


def sample(seed: int = 0, texts: int = 96) -> Batches:
    """Pairs of random tokens, of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 200, (texts, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(3, 13, (texts, 1), generator=generator)).long()
    segment = (torch.arange(12) >= 5).long() * mask
    return batches(32, ids * mask, segment, mask)


def project(
    teacher: Any, *, seed: int = 0, texts: Batches | None = None, kept: tuple[int, ...] | None = None, **shape: int
) -> tuple[Any, Tensor]:
    given = student_shape(tiny.student(**shape), teacher.config)
    student, basis_Dd = projected_student(given, teacher, texts or sample(), seed, kept=kept)
    return student.eval(), basis_Dd


@torch.no_grad()
def logits(model: Any, texts: Batches | None = None) -> Tensor:
    parts = [model(input_ids=i, token_type_ids=s, attention_mask=m).logits for i, s, m in texts or sample(seed=1)]
    return torch.cat(parts)


@pytest.fixture(scope="module")
def trained() -> Any:
    """A teacher that has learnt which of two tokens a text contains."""
    teacher = tiny.bert(layers=3, vocab_size=200)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for step in range(80):
        ids, segment, mask = labelled(seed=step)[0]
        output = teacher(
            input_ids=ids, token_type_ids=segment, attention_mask=mask, labels=(ids == 2).any(dim=1).long()
        )
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher.eval().requires_grad_(False)


def labelled(seed: int, texts: int = 64) -> Batches:
    """Texts of which every second contains token 2, and the others token 3."""
    ids, segment, mask = (torch.cat(parts) for parts in zip(*sample(seed + 100, texts), strict=True))
    place = torch.randint(1, 3, (texts,), generator=torch.Generator().manual_seed(seed))
    ids[torch.arange(texts), place] = 2 + torch.arange(texts) % 2
    return batches(64, ids, segment, mask)


def test_a_student_of_the_teachers_own_shape_is_the_teacher() -> None:
    teacher = tiny.lively(tiny.bert())
    student, basis_Dd = project(teacher, **FULL)
    assert torch.equal(basis_Dd, torch.eye(32))
    assert_close(logits(student), logits(teacher), atol=1e-4, rtol=1e-4)
    ids, segment, mask = sample(seed=1)[0]
    with torch.no_grad():
        theirs, mine = (Observed(model, [])(ids, mask, segment).hidden for model in (teacher, student))
    for layer in range(3):
        assert_close(mine[layer], theirs[layer], atol=1e-4, rtol=1e-4)


def test_more_neurons_than_the_teacher_has_stay_fresh_and_change_nothing() -> None:
    teacher = tiny.lively(tiny.bert())
    student, _ = project(teacher, **FULL | {"intermediate": 80})
    assert student.bert.encoder.layer[0].intermediate.dense.weight[64:].any()
    assert_close(logits(student), logits(teacher), atol=1e-4, rtol=1e-4)


def test_layers_are_made_from_those_that_are_named() -> None:
    teacher = tiny.lively(tiny.bert(layers=3))
    student, _ = project(teacher, kept=(0, 1), **FULL)
    ids, segment, mask = sample(seed=1)[0]
    with torch.no_grad():
        theirs, mine = (Observed(model, [])(ids, mask, segment).hidden for model in (teacher, student))
    assert_close(mine[2], theirs[2], atol=1e-4, rtol=1e-4)


def test_half_the_width_and_a_third_of_the_depth_answers_as_its_trained_teacher(trained: Any) -> None:
    texts, fresh = labelled(seed=1_000, texts=512), labelled(seed=2_000, texts=256)
    right = torch.cat([(ids == 2).any(dim=1) for ids, _, _ in fresh])
    theirs = logits(trained, fresh).argmax(dim=1)
    assert (theirs == right).float().mean() > 0.97
    student, _ = project(trained, texts=texts, layers=1, hidden=16, intermediate=32)
    assert (logits(student, fresh).argmax(dim=1) == theirs).float().mean() > 0.9


def test_skipped_layers_and_cut_directions_are_made_up_for() -> None:
    # Against the same student without any fit, whose pull to the projected weights is beyond all bounds.
    teacher = tiny.lively(tiny.bert(layers=4))
    shape: dict[str, Any] = {"layers": 2, "hidden": 24, "intermediate": 48}
    ids, segment, mask = sample(seed=1)[0]

    def error() -> float:
        student, basis_Dd = project(teacher, texts=sample(texts=960), **shape)
        with torch.no_grad():
            theirs, mine = (Observed(model, [])(ids, mask, segment).hidden[-1] for model in (teacher, student))
        return float((mine @ basis_Dd.T - theirs)[mask.bool()].square().mean())

    fitted = error()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LAYER_RIDGE", "VIEW_RIDGE"):
            patch.setattr(projection, name, 1e9)
        patch.setattr(projection, "_correct_norm", lambda *given: None)
        plain = error()
    assert fitted < 0.7 * plain


def test_a_narrow_student_starts_nearer_to_its_teacher_than_a_random_one() -> None:
    teacher = tiny.lively(tiny.bert())
    shape: dict[str, Any] = {"layers": 2, "hidden": 24, "intermediate": 64}
    random = random_student(student_shape(tiny.student(**shape), teacher.config), 0).eval()
    student, _ = project(teacher, **shape)
    theirs = logits(teacher)
    assert (logits(student) - theirs).square().mean() < (logits(random) - theirs).square().mean()


def test_basis_is_orthonormal() -> None:
    _, basis_Dd = project(tiny.lively(tiny.bert()), hidden=16)
    assert_close(basis_Dd.T @ basis_Dd, torch.eye(16), atol=1e-5, rtol=0)


def test_basis_spans_the_leading_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(0)
    turn_DD, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))
    moment_DD = turn_DD * torch.tensor([5.0, 0.2, 4.0, 0.1, 3.0, 0.3], dtype=torch.float64) @ turn_DD.T
    basis_Dd = _basis(moment_DD, 3)
    assert_close(basis_Dd.T @ turn_DD[:, [1, 3, 5]].float(), torch.zeros(3, 3), atol=1e-6, rtol=0)


def test_basis_keeps_features_as_they_are_where_the_subspace_is_made_of_features() -> None:
    moment_DD = torch.diag(torch.tensor([5.0, 1.0, 4.0, 0.1, 3.0, 2.0], dtype=torch.float64))
    assert_close(_basis(moment_DD, 3), torch.eye(6)[:, [0, 2, 4]], atol=1e-6, rtol=0)


def test_padding_takes_no_part() -> None:
    teacher = tiny.lively(tiny.bert())
    pad = torch.nn.functional.pad
    padded = [(pad(ids, (0, 5), value=9), pad(segment, (0, 5)), pad(mask, (0, 5))) for ids, segment, mask in sample()]
    found, again = project(teacher, hidden=16)[0], project(teacher, hidden=16, texts=padded)[0]
    assert_close(logits(again), logits(found), atol=1e-3, rtol=1e-3)


def test_a_large_sample_takes_part_with_a_share_of_its_real_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "TOKENS", 200)
    picked, masks = _pick(sample(), seed=0), [mask.bool() for _, _, mask in sample()]
    assert 140 < sum(int(pick.sum()) for pick in picked) < 260
    assert not any((pick & ~mask).any() for pick, mask in zip(picked, masks, strict=True))


@pytest.mark.parametrize("head", range(4))
def test_scores_and_values_of_a_head_are_the_best_on_the_sample_that_its_size_allows(head: int) -> None:
    theirs = tiny.lively(tiny.bert()).bert.encoder.layer[0].attention
    mine = tiny.bert(hidden=16).bert.encoder.layer[0].attention
    generator = torch.Generator().manual_seed(head)
    states_Nd = torch.randn(300, 16, generator=generator) * torch.logspace(-1, 1, 16)
    basis_Dd = torch.linalg.qr(torch.randn(32, 16, generator=generator))[0]
    view = torch.cat([basis_Dd.T, torch.zeros(1, 32)])
    with torch.no_grad():
        _project_attention(mine, theirs, basis_Dd, view, _metric(states_Nd))
        old, new, full = slice(8 * head, 8 * head + 8), slice(4 * head, 4 * head + 4), torch.eye(17, 16)
        only_bias = torch.cat([full[:16], torch.zeros(1, 16)])
        states_Nk = torch.cat([states_Nd, torch.ones(300, 1)], dim=1).double()
        parts = [
            _seen_through(view, part, old).double() for part in (theirs.self.query, theirs.self.key, theirs.self.value)
        ]
        cut = [
            _seen_through(only_bias, part, new).double() for part in (mine.self.query, mine.self.key, mine.self.value)
        ]
        out = [theirs.output.dense.weight[:, old].T @ basis_Dd, mine.output.dense.weight[:, new].T]
    scores = parts[0] @ parts[1].T / math.sqrt(8), cut[0] @ cut[1].T / math.sqrt(4)
    values = parts[2] @ out[0].double(), cut[2] @ out[1].double()
    for (wanted, found), right in ((scores, states_Nk.T), (values, torch.eye(16, dtype=torch.float64))):
        error = (states_Nk @ (found - wanted) @ right).norm()
        # Eckart and Young: nothing of rank 4 is nearer than the singular values behind the fourth.
        assert_close(error, torch.linalg.svdvals(states_Nk @ wanted @ right)[4:].norm(), atol=1e-4, rtol=1e-2)
        left_basis, sizes, right_basis = torch.linalg.svd(wanted, full_matrices=False)
        plain = left_basis[:, :4] * sizes[:4] @ right_basis[:4]  # blind to the sample
        assert error < (states_Nk @ (plain - wanted) @ right).norm()


def test_feed_forward_keeps_the_neurons_that_add_most() -> None:
    teacher = tiny.lively(tiny.bert(layers=1))
    dead = [3, 17, 40]
    with torch.no_grad():
        teacher.bert.encoder.layer[0].output.dense.weight[:, dead] = 0
    student, _ = project(teacher, layers=1, hidden=32, intermediate=61)
    alive = [neuron for neuron in range(64) if neuron not in dead]
    kept = teacher.bert.encoder.layer[0].intermediate.dense.weight[alive]
    assert_close(student.bert.encoder.layer[0].intermediate.dense.weight.detach(), kept.detach(), atol=1e-4, rtol=1e-4)


def test_a_regression_starts_at_its_teachers_scores() -> None:
    teacher = tiny.lively(tiny.bert(task=tiny.pair_task(labels=(), score_range=(0.0, 5.0))))
    student, _ = project(teacher, **FULL)
    assert logits(student).shape == (96, 1)
    assert_close(logits(student), logits(teacher), atol=1e-4, rtol=1e-4)


def test_a_head_that_knows_nothing_gives_a_head_that_knows_nothing() -> None:
    teacher = tiny.lively(tiny.bert())
    with torch.no_grad():
        teacher.classifier.weight.zero_()
    student, _ = project(teacher, hidden=16)
    assert_close(logits(student), logits(teacher), atol=1e-4, rtol=1e-4)
    assert all(weights.isfinite().all() for weights in student.state_dict().values())


def test_one_short_text_is_sample_enough() -> None:
    one = [(ids[:1], segment[:1], mask[:1]) for ids, segment, mask in sample()[:1]]
    student, _ = project(tiny.lively(tiny.bert()), texts=one, hidden=16)
    assert logits(student).isfinite().all()


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
    with pytest.raises(ModelError, match=r"cannot widen: student\.hidden is 64 and the teacher's 32; give at most 32"):
        project(tiny.bert(), hidden=64)


def test_another_head_count_is_refused() -> None:
    with pytest.raises(ModelError, match=r"keeps the teacher's heads: student\.heads is 2 and the teacher's 4; give 4"):
        project(tiny.bert(), heads=2)


def test_a_deeper_student_is_refused() -> None:
    with pytest.raises(ModelError, match=r"student\.layers is 3 and the teacher has 2"):
        project(tiny.bert(), layers=3)
