"""Distillation losses: by an independent reference, by hand, by property, by golden number.

Shape legend: B batch, S sequence, D hidden width, H heads, C classes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close

from compressor.losses import (
    attention_loss,
    attention_scores,
    hidden_loss,
    intermediate_loss,
    relation_loss,
    score_loss,
    soft_cross_entropy,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text(encoding="utf-8"))
MASK_BS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
NORMALISATIONS = ("tokens", "published")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def wave(*shape: int, phase: float) -> Tensor:
    """Numbers that do not depend on a random generator."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) + phase).reshape(shape).float()


def states() -> tuple[Tensor, Tensor]:
    return random(2, 5, 4, seed=0), random(2, 5, 4, seed=1)


def scores() -> tuple[Tensor, Tensor]:
    return random(2, 3, 5, 5, seed=2), random(2, 3, 5, 5, seed=3)


def relations(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    return relation_loss(student, teacher, mask, heads=2)


# The reference: one number at a time, from the formulas of the papers and of the published code.


def close(found: Tensor, expected: float) -> None:
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def lists(*tensors: Tensor) -> list[list]:
    return [tensor.tolist() for tensor in tensors]


def reference_hidden(student: Tensor, teacher: Tensor, mask: Tensor, published: bool) -> float:
    mine, theirs, real = lists(student, teacher, mask)
    total = count = 0.0
    for b, row in enumerate(mine):
        for s, token in enumerate(row):
            for d, value in enumerate(token):
                if real[b][s] or published:
                    total, count = total + (value - theirs[b][s][d]) ** 2, count + 1
    return total / count


def reference_scores(query: Tensor, key: Tensor, heads: int) -> list:
    """[row][head][query][key]"""
    queries, keys = lists(query, key)
    size = query.shape[2] // heads
    return [
        [
            [
                [sum(q[d] * k[d] for d in range(head * size, (head + 1) * size)) / math.sqrt(size) for k in keys[b]]
                for q in queries[b]
            ]
            for head in range(heads)
        ]
        for b in range(len(queries))
    ]


def reference_attention(mine: list, theirs: list, mask: Tensor, published: bool) -> float:
    real = mask.tolist()
    total = count = 0.0
    for b, row in enumerate(mine):
        for h, head in enumerate(row):
            for q, scored in enumerate(head):
                for k in range(len(scored)):
                    pair = [scored[k], theirs[b][h][q][k]]
                    if published:
                        # The model adds (1 - mask) * -10000; the loss then clears what is -100 or less.
                        pair = [value + (0.0 if real[b][k] else -10000.0) for value in pair]
                        pair = [0.0 if value <= -100.0 else value for value in pair]
                    elif not (real[b][q] and real[b][k]):
                        continue
                    total, count = total + (pair[0] - pair[1]) ** 2, count + 1
    return total / count


def reference_relation(student: Tensor, teacher: Tensor, mask: Tensor, heads: int) -> float:
    real = mask.tolist()
    total, count = 0.0, 0
    mine, theirs = reference_scores(student, student, heads), reference_scores(teacher, teacher, heads)
    for b in range(len(real)):
        keys = [k for k in range(len(real[b])) if real[b][k]]
        for h in range(heads):
            for q in keys:
                p, r = ([math.exp(side[b][h][q][k]) for k in keys] for side in (theirs, mine))
                p, r = [value / sum(p) for value in p], [value / sum(r) for value in r]
                total += sum(x * (math.log(x) - math.log(y)) for x, y in zip(p, r, strict=True))
                count += 1
    return total / count


def reference_cross_entropy(student: Tensor, teacher: Tensor, temperature: float, published: bool) -> float:
    total = 0.0
    for mine, theirs in zip(*lists(student, teacher), strict=True):
        p, r = ([math.exp(value / temperature) for value in logits] for logits in (theirs, mine))
        total -= sum(x / sum(p) * math.log(y / sum(r)) for x, y in zip(p, r, strict=True))
    return total / len(student) / (student.shape[1] if published else 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Tensor]:
    """A seed and the mask of a small batch; every row has a token, not all have more."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    width = max(lengths) + draw(st.integers(0, 2))
    return draw(st.integers(0, 999)), torch.arange(width) < torch.tensor(lengths)[:, None]


def doubles(mask: Tensor, *shapes: tuple[int, ...], seed: int, scale: float = 1.0) -> list[Tensor]:
    """One float64 tensor of (B, S, *shape) for each shape."""
    return [
        scale * random(*mask.shape, *shape, seed=seed + 1000 * number, dtype=torch.float64)
        for number, shape in enumerate(shapes)
    ]


@settings(deadline=None, max_examples=30)
@given(batches(), st.sampled_from(NORMALISATIONS))
def test_hidden_loss_is_the_reference(batch, normalisation):
    seed, mask = batch
    student, teacher = doubles(mask, (4,), (4,), seed=seed)
    close(
        hidden_loss(student, teacher, mask, normalisation),
        reference_hidden(student, teacher, mask, normalisation == "published"),
    )


@settings(deadline=None, max_examples=30)
@given(batches(), st.sampled_from(NORMALISATIONS), st.sampled_from([1.0, 8.0]))
def test_attention_loss_is_the_reference(batch, normalisation, scale):
    seed, mask = batch
    query, key, their_query, their_key = doubles(mask, (4,), (4,), (6,), (6,), seed=seed, scale=scale)
    mine, theirs = reference_scores(query, key, 2), reference_scores(their_query, their_key, 2)
    found = attention_loss(
        attention_scores(query, key, 2), attention_scores(their_query, their_key, 2), mask, normalisation
    )
    close(found, reference_attention(mine, theirs, mask, normalisation == "published"))


def test_published_scores_of_minus_100_and_less_count_as_0():
    student, teacher = torch.tensor([[[[-99.0, -100.0], [3.0, -101.0]]]]), torch.zeros(1, 1, 2, 2)
    loss = attention_loss(student, teacher, torch.tensor([[True, True]]), "published")
    assert_close(loss, torch.tensor((99.0**2 + 9.0) / 4))


@settings(deadline=None, max_examples=30)
@given(batches(), st.sampled_from([1, 2]))
def test_relation_loss_is_the_reference(batch, heads):
    seed, mask = batch
    student, teacher = doubles(mask, (4,), (6,), seed=seed)
    close(relation_loss(student, teacher, mask, heads), reference_relation(student, teacher, mask, heads))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5),
    st.integers(2, 5),
    st.integers(0, 999),
    st.sampled_from([1.0, 4.0]),
    st.sampled_from(NORMALISATIONS),
)
def test_soft_cross_entropy_is_the_reference(rows, classes, seed, temperature, normalisation):
    student, teacher = (random(rows, classes, seed=seed + place, dtype=torch.float64) for place in (0, 1000))
    found = soft_cross_entropy(student, teacher, temperature, normalisation)
    close(found, reference_cross_entropy(student, teacher, temperature, normalisation == "published"))


def test_score_loss_is_the_reference():
    student, teacher = (random(7, 1, seed=seed, dtype=torch.float64) for seed in (0, 1))
    (mine, theirs) = lists(student, teacher)
    expected = sum((x[0] - y[0]) ** 2 for x, y in zip(mine, theirs, strict=True)) / 7
    close(score_loss(student, teacher), expected)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_intermediate_loss_is_the_reference(normalisation):
    mask, published = MASK_BS, normalisation == "published"
    hidden = [doubles(mask, (6,), (6,), seed=seed) for seed in (1, 2, 3)]
    inner = [doubles(mask, (4,), (4,), (6,), (6,), seed=seed) for seed in (4, 5)]
    terms = intermediate_loss(
        (tuple(mine for mine, _ in hidden), tuple(theirs for _, theirs in hidden)),
        ([(q, k) for q, k, _, _ in inner], [(q, k) for _, _, q, k in inner]),
        mask,
        heads=2,
        relations=False,
        normalisation=normalisation,
    )
    assert set(terms) == {"embedding", "hidden", "attention"}
    expected = [reference_hidden(mine, theirs, mask, published) for mine, theirs in hidden]
    close(terms["embedding"], expected[0])
    close(terms["hidden"], expected[1] + expected[2])
    maps = [(reference_scores(q, k, 2), reference_scores(their_q, their_k, 2)) for q, k, their_q, their_k in inner]
    close(terms["attention"], sum(reference_attention(*pair, mask, published) for pair in maps))


def test_relations_add_up_queries_keys_and_values_of_every_layer():
    mine = [tuple(doubles(MASK_BS, (4,), (4,), (4,), seed=seed)) for seed in (1, 2)]
    theirs = [tuple(doubles(MASK_BS, (6,), (6,), (6,), seed=seed)) for seed in (3, 4)]
    hidden = [doubles(MASK_BS, (6,), (6,), (6,), seed=seed) for seed in (5, 6)]
    terms = intermediate_loss((hidden[0], hidden[1]), (mine, theirs), MASK_BS, heads=2, relations=True)
    assert set(terms) == {"embedding", "hidden", "relations"}
    pairs = [pair for layer in zip(mine, theirs, strict=True) for pair in zip(*layer, strict=True)]
    assert len(pairs) == 6
    close(terms["relations"], sum(reference_relation(*pair, MASK_BS, 2) for pair in pairs))


def test_layers_without_partner_are_refused():
    student_BSD, teacher_BSD = states()
    with pytest.raises(ValueError, match="zip"):
        intermediate_loss(([student_BSD] * 3, [teacher_BSD] * 2), ([], []), MASK_BS, heads=2, relations=False)


def test_published_values_are_those_of_plain_means_over_padded_tensors():
    """The published training loop, transcribed: additive mask, `where`, nn.MSELoss, mean over classes."""
    mse = nn.MSELoss()
    hidden, teacher_hidden = states()
    assert_close(hidden_loss(hidden, teacher_hidden, MASK_BS, "published"), mse(hidden, teacher_hidden))
    student_scores, teacher_scores = scores()
    extended = (1.0 - MASK_BS[:, None, None, :].float()) * -10000.0
    seen, wanted = student_scores + extended, teacher_scores + extended
    seen = torch.where(seen <= -1e2, torch.zeros_like(seen), seen)
    wanted = torch.where(wanted <= -1e2, torch.zeros_like(wanted), wanted)
    assert_close(attention_loss(student_scores, teacher_scores, MASK_BS, "published"), mse(seen, wanted))
    logits, teacher_logits = random(4, 3, seed=8), random(4, 3, seed=9)
    published = (-teacher_logits.softmax(-1) * logits.log_softmax(-1)).mean()
    assert_close(soft_cross_entropy(logits, teacher_logits, 1.0, "published"), published)


def test_published_means_depend_on_padding():
    student, teacher = (pad(part * MASK_BS[:, :, None], (0, 0, 0, 5)) for part in states())
    loss = hidden_loss(student, teacher, pad(MASK_BS, (0, 5)), "published")
    expected = hidden_loss(student, teacher, pad(MASK_BS, (0, 5))) * 8 / 20  # real tokens, tokens
    assert_close(loss, expected)


# By hand.


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


def test_relation_loss_by_hand():
    root = math.log(3) ** 0.5
    teacher_BSD = torch.tensor([[[root], [0.0]]])  # relations of the first: 3/4, 1/4; of the second: 1/2, 1/2
    loss = relation_loss(torch.zeros(1, 2, 1), teacher_BSD, torch.ones(1, 2, dtype=torch.bool), heads=1)
    assert_close(loss, torch.tensor((0.75 * math.log(1.5) + 0.25 * math.log(0.5) + 0.0) / 2))


def test_soft_cross_entropy_by_hand():
    student_BC, teacher_BC = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
    assert_close(soft_cross_entropy(student_BC, teacher_BC), torch.tensor(math.log(2)))
    sharp_BC = torch.tensor([[math.log(4), 0.0]])  # 4/5, 1/5
    expected = -(0.75 * math.log(0.8) + 0.25 * math.log(0.2))
    assert_close(soft_cross_entropy(sharp_BC, teacher_BC), torch.tensor(expected))


def test_temperature_divides_both_logits():
    student_BC, teacher_BC = random(4, 3, seed=4), random(4, 3, seed=5)
    assert_close(soft_cross_entropy(student_BC, teacher_BC, 2.0), soft_cross_entropy(student_BC / 2, teacher_BC / 2))


# By golden number.


def golden_losses() -> dict[str, float]:
    """What `tests/golden/losses.json` holds."""
    states, their_states = (wave(2, 5, 4, phase=phase) for phase in (0.0, 0.5))
    maps, their_maps = (wave(2, 3, 5, 5, phase=phase) for phase in (1.0, 1.5))
    logits, their_logits = (wave(4, 3, phase=phase) for phase in (2.0, 2.5))
    return {
        "hidden": hidden_loss(states, their_states, MASK_BS).item(),
        "hidden_published": hidden_loss(states, their_states, MASK_BS, "published").item(),
        "attention": attention_loss(maps, their_maps, MASK_BS).item(),
        "attention_published": attention_loss(maps, their_maps, MASK_BS, "published").item(),
        "relation": relation_loss(states, their_states, MASK_BS, 2).item(),
        "soft_cross_entropy": soft_cross_entropy(logits, their_logits).item(),
        "soft_cross_entropy_published": soft_cross_entropy(logits, their_logits, 1.0, "published").item(),
        "soft_cross_entropy_at_temperature_2": soft_cross_entropy(logits, their_logits, 2.0).item(),
        "score": score_loss(logits[:, :1], their_logits[:, :1]).item(),
    }


def test_every_golden_number_is_made():
    assert set(golden_losses()) == set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_number(name):
    assert golden_losses()[name] == pytest.approx(GOLDEN[name], rel=1e-5)
