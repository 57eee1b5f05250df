"""Copies of one row: distinct, as many as can be, and drawn with the chance of the recipe."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from compressor.stages.augment.copies import FEW, Copy, Options, Variants, copies_of
from compressor.stages.augment.words import Change, changed, eligible_words


def options_of(text: str, *new: str, side: int = 0) -> Options:
    """Every word of a text, with the same words to put in its place."""
    return [
        [Change(side, word.start, word.text, other, by_masked_lm=False) for other in new]
        for word in eligible_words(text)
    ]


def copies(text: str, options: Options, *, count: int, probability: float = 0.5, seed: int = 0) -> list[Copy]:
    stream = random.Random(seed)
    return copies_of((text,), [options], copies=count, probability=probability, stream=stream)[0]


def test_copies_are_distinct_and_none_is_the_original() -> None:
    """Defect c of the published code: a draw that gives nothing new takes no copy's place."""
    found = copies("a film", options_of("a film", "movie", "picture"), count=50)
    assert sorted(copy.texts for copy in found) == [("a movie",), ("a picture",)]


@pytest.mark.parametrize("words", [1, 2, 3])
@pytest.mark.parametrize("probability", [0.01, 0.4, 0.99])
def test_there_are_as_many_copies_as_the_text_allows(words: int, probability: float) -> None:
    """Defect c of the published code."""
    text = " ".join(["film"] * words)
    possible = 5**words - 1
    for count in (1, possible - 1, possible, possible + 1, 3 * possible):
        found = copies(text, options_of(text, "wa", "wb", "wc", "wd"), count=count, probability=probability)
        assert len({copy.texts for copy in found} - {(text,)}) == len(found) == min(count, possible)


def test_many_copies_are_found_where_only_just_more_can_be_made() -> None:
    """The texts are too many to be listed; the last ones are as hard to draw as can be."""
    text = " ".join(["film"] * 10)
    found = copies(text, options_of(text, "movie"), count=5000, probability=0.01)
    assert FEW < 2**10
    assert len({copy.texts for copy in found}) == 2**10 - 1


def test_a_text_without_words_has_no_copies_and_takes_no_draw() -> None:
    """Defect r of the published code."""
    stream = random.Random(0)
    assert copies_of(("!!!",), [[]], copies=3, probability=0.5, stream=stream) == ([], 0)
    assert stream.random() == random.Random(0).random()


def test_changes_say_what_was_replaced() -> None:
    text = "film film film"
    for copy in copies(text, options_of(text, "movie", "reel"), count=20):
        assert copy.texts == (changed(text, copy.changes),)
        assert len(copy.changes) == 3 - copy.texts[0].count("film") > 0
        assert all(text[found.start :].startswith(found.old) for found in copy.changes)


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.9])
def test_each_word_is_replaced_with_the_chance_of_the_recipe_given_that_one_is(probability: float) -> None:
    text = " ".join(["film"] * 12)
    options, stream = options_of(text, "movie", "reel"), random.Random(1)
    counts, places = [], np.zeros(12)
    for _ in range(4000):
        changes = Variants(text, options, probability, stream).draw()[1]
        counts.append(len(changes))
        for found in changes:
            places[found.start // 5] += 1
    expected = 12 * probability / (1 - (1 - probability) ** 12)
    assert np.mean(counts) == pytest.approx(expected, rel=0.03)
    assert places / 4000 == pytest.approx(np.full(12, expected / 12), rel=0.15)


def test_candidates_are_chosen_evenly() -> None:
    text = " ".join(["film"] * 30)
    variants = Variants(text, options_of(text, "wa", "wb", "wc"), 0.5, random.Random(0))
    chosen = [found.new for _ in range(300) for found in variants.draw()[1]]
    shares = [chosen.count(name) / len(chosen) for name in ("wa", "wb", "wc")]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_draws_that_were_thrown_away_are_counted() -> None:
    stream = random.Random(0)
    found = [options_of("a film", "movie")]
    assert copies_of(("a film",), found, copies=1, probability=0.5, stream=stream)[1] == 0
    variants = Variants("a film", options_of("a film", "movie", "reel"), 0.5, random.Random(0))
    drawn = [variants.draw()[0] for _ in range(2)]
    assert sorted(drawn) == ["a movie", "a reel"]
    assert variants.left == 0
    assert 0 <= variants.duplicates <= 4


def test_a_long_text_takes_no_long_time() -> None:
    text = " ".join(["film"] * 5000)
    started = time.thread_time()
    found = copies(text, options_of(text, "movie", "reel"), count=20)
    assert len({copy.texts for copy in found}) == 20
    assert time.thread_time() - started < 2.0


PAIR = ("a film", "a plot")
FILMS = options_of("a film", "movie", "picture", "reel")
PLOTS = options_of("a plot", "story", "script", "tale", side=1)


def pair_copies(sides: list[Options], *, seed: int = 0, count: int = 4) -> list[tuple[str, ...]]:
    stream = random.Random(seed)
    return [copy.texts for copy in copies_of(PAIR, sides, copies=count, probability=0.99, stream=stream)[0]]


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_of_a_pair_varies_one_side_and_the_sides_take_turns(seed: int) -> None:
    """Defect f of the published code: the side that stays is the original one."""
    found = pair_copies([FILMS, PLOTS], seed=seed, count=2)
    varied = [[new != old for new, old in zip(copy, PAIR, strict=True)] for copy in found]
    assert sorted(varied) == [[False, True], [True, False]]


def test_which_side_of_a_pair_begins_is_drawn() -> None:
    first = [pair_copies([FILMS, PLOTS], seed=seed, count=1)[0] for seed in range(20)]
    assert {copy[0] == PAIR[0] for copy in first} == {True, False}


@pytest.mark.parametrize(("sides", "kept"), [([FILMS, []], 1), ([[], PLOTS], 0)])
def test_a_side_without_words_stays_and_the_other_varies_in_every_copy(sides: list[Options], kept: int) -> None:
    found = pair_copies(sides, count=2)
    assert [copy[kept] for copy in found] == [PAIR[kept]] * 2
    assert len(set(found)) == 2


def test_a_side_that_has_no_more_copies_leaves_its_turns_to_the_other() -> None:
    found = pair_copies([options_of("a film", "movie"), PLOTS], count=12)
    assert sorted(found) == [("a film", "a script"), ("a film", "a story"), ("a film", "a tale"), ("a movie", "a plot")]
