"""Several words in one pass of a masked LM, compared with one, on a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import words_apart
from compressor.errors import ConfigError, DataError
from tests import augmenting
from tests.conftest import Line

TEXTS = ("good film bad plot fine story great actor poor movie awful picture good", "film", "the film is bad", " ")


def compared(line: Line, folder: Path, *texts: str, **given: Any) -> dict[str, Any]:
    file = folder / "texts.txt"
    file.write_text("\n".join(texts), encoding="utf-8")
    asked: dict[str, Any] = {
        "masked_lm": augmenting.saved_masked_lm(folder / "lm"),
        "vectors": augmenting.glove(folder / "vectors.txt"),
        "texts": 3,
    }
    return words_apart.compare_distances(
        line.run, str(file), "text", threads=1, seed=0, command="words-apart", **asked | given
    )


def test_every_distance_is_compared_with_one_word_in_a_pass(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_apart, "CANDIDATES", 5)  # of the twelve words that the small model knows
    found = compared(line, tmp_path, *TEXTS)
    assert found["texts_asked"] == 3
    distances = {row["apart_tokens"]: row for row in found["distances"]}
    assert list(distances) == [None, 64, 32, 16, 8]
    # The longest text has thirteen tokens.
    for apart in (None, 64, 32, 16):
        assert (distances[apart]["same_likeliest"], distances[apart]["shared_candidates"]) == (1, 1)
        assert distances[apart]["label_kept"] == distances[None]["label_kept"]
    assert 0 < distances[8]["shared_candidates"] < 1
    assert {row["words"] for row in found["distances"]} == {16}
    (table,) = words_apart.tables(found)
    assert [row[0] for row in table.rows] == ["one word in a pass", "64", "32", "16", "8"]


@pytest.mark.parametrize("text", [" ", "not the 7 ."])
def test_texts_without_words_are_refused(line: Line, tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"texts\.txt holds no word that could be replaced"):
        compared(line, tmp_path, text)


def test_texts_without_a_word_that_is_one_piece_are_refused(line: Line, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"texts\.txt holds no word that is one word piece of .*lm; give other texts"):
        compared(line, tmp_path, "zebras yawning")


def test_a_run_without_a_masked_language_model_is_refused(line: Line, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has made no masked language model; name one with --masked-lm"):
        compared(line, tmp_path, *TEXTS, masked_lm=None)
