"""augment(): rows in, rows and copies out, the same for any number of processes; hard texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import CompressorError, ConfigError, SourceError
from compressor.stages.augment import Augmented, augment, engine, workers
from compressor.stages.augment.words import changed
from tests import augmenting
from tests.augmenting import CONTENT, PIECES

TEXTS: list[str | tuple[str, ...]] = ["The film is good, the plot is NOT.", ("A Bad film", "a good plot"), "!!! 42"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with word vectors and a masked LM."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "vectors": augmenting.glove(folder / "vectors.txt"),
        "masked_lm": augmenting.saved_masked_lm(folder / "lm"),
        "keep_names": False,
    }


def test_each_row_comes_first_and_its_copies_behind_it(sources: dict[str, Any]) -> None:
    rows = list(augment(TEXTS, copies=3, **sources))
    assert [row.origin for row in rows] == [0] * 4 + [1] * 4 + [2]
    originals = [row for row in rows if not row.changes]
    assert [row.texts for row in originals] == [(TEXTS[0],), TEXTS[1], (TEXTS[2],)]
    assert rows.index(originals[1]) == 4


def test_changes_make_the_copy_of_the_original(sources: dict[str, Any]) -> None:
    for row in augment(TEXTS, copies=10, **sources):
        given = TEXTS[row.origin]
        texts = [given] if isinstance(given, str) else list(given)
        for side, text in enumerate(texts):
            texts[side] = changed(text, [change for change in row.changes if change.side == side])
        assert row.texts == tuple(texts)
        assert len({change.side for change in row.changes}) <= 1
        assert row.by_masked_lm + row.by_vectors == len(row.changes)


def test_one_piece_words_are_changed_by_the_model_and_others_by_the_vectors(tmp_path: Path) -> None:
    """The vectors need words that the model's vocabulary lacks, or they would never be asked."""
    vectors = {"films": (1, 0), "movies": (1, 0.1), "good": (0, 1), "great": (0.1, 1)}
    given: dict[str, Any] = {
        "vectors": augmenting.glove(tmp_path / "vectors.txt", vectors),
        "masked_lm": augmenting.saved_masked_lm(tmp_path / "lm"),
    }
    rows = list(augment(["films good"], copies=200, **given))
    changes = [change for row in rows for change in row.changes]
    assert {change.new for change in changes if change.start == 0} == {"movies", "good", "great"}
    assert {change.new for change in changes if change.start > 0} == set(CONTENT) - {"good"}
    assert all(change.by_masked_lm == (change.start > 0) for change in changes)


def test_a_word_without_a_capital_is_not_replaced_by_one_with(tmp_path: Path) -> None:
    vectors = {"film": (1, 0), "Paris": (1, 0.1), "reel": (1, 0.2), "movie": (1, 0.3)}
    near = augmenting.glove(tmp_path / "vectors.txt", vectors)
    rows = list(augment(["film Film"], copies=50, vectors=near, keep_names=False))
    new = {(change.start, change.new) for row in rows for change in row.changes}
    assert new == {(0, "reel"), (0, "movie"), (5, "Paris"), (5, "Reel"), (5, "Movie")}


def test_copies_hold_no_fragment_and_no_special_token(sources: dict[str, Any]) -> None:
    """Defects b and p of the published code."""
    words = {change.new.casefold() for row in augment(TEXTS, copies=200, **sources) for change in row.changes}
    assert words <= set(CONTENT)
    assert not words & {piece for piece in PIECES if not piece.isalpha()}


def test_a_replaced_word_keeps_its_capitals(sources: dict[str, Any]) -> None:
    """Defect e of the published code: nothing is lower-cased."""
    text = '  The FILM is  "good", not Bad —\u2028isn\'t it?'
    shape = re.compile(r'  The [A-Z]+ is  "[a-z]+", not [A-Z][a-z]+ —\u2028isn\'t it\?')
    rows = list(augment([text], copies=30, **sources))
    assert [row.texts[0] for row in rows if not shape.fullmatch(row.texts[0])] == []
    assert len({row.texts for row in rows}) == 31


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_a_word_is_never_its_own_replacement_nor_a_stop_word_in_capitals(copies: int, tmp_path: Path) -> None:
    """The capital of the dotless i is I: written with the capitals of its place, a neighbour can be another word."""
    near = {"irak": (1, 0.1), "ırak": (1, 0.2), "iran": (1, 0.3), "ıf": (1, 0.4)}
    rows = list(augment(["Irak"], copies=copies, vectors=augmenting.glove(tmp_path / "vectors.txt", near)))
    assert [row.texts for row in rows] == [("Irak",), ("Iran",)]


def test_names_stay_unless_they_are_to_be_replaced(sources: dict[str, Any]) -> None:
    settings = sources | {"keep_names": True}
    assert {change.old for row in augment(["a good Film"], copies=30, **settings) for change in row.changes} == {"good"}


def test_the_seed_decides(sources: dict[str, Any]) -> None:
    """Defect m of the published code."""
    one, same, other = (list(augment(TEXTS, copies=3, seed=seed, **sources)) for seed in (1, 1, 2))
    assert one == same != other


def test_blocks_leave_no_trace(sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(augment(TEXTS * 3, copies=3, **sources))
    for size in (1, 2, 4):
        monkeypatch.setattr(engine, "ROWS_AT_ONCE", size)
        assert list(augment(TEXTS * 3, copies=3, **sources)) == expected
    monkeypatch.undo()
    for characters in (1, 40, 100):
        monkeypatch.setattr(engine, "CHARACTERS_AT_ONCE", characters)
        assert list(augment(TEXTS * 3, copies=3, **sources)) == expected


def test_processes_leave_no_trace(sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROWS_AT_ONCE", 2)
    settings = sources | {"masked_lm": None}
    expected = list(augment(TEXTS * 3, copies=3, **settings))
    assert list(augment(TEXTS * 3, copies=3, processes=2, **settings)) == expected


def noted(row: Any, read: list[int]) -> Iterator[Any]:
    """A row a hundred times; the numbers of those that are asked for are kept in `read`."""
    for number in range(100):
        read.append(number)
        yield row


def test_rows_are_read_as_they_are_asked_for(sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROWS_AT_ONCE", 2)
    read: list[int] = []
    next(augment(noted("good film", read), copies=1, **sources))
    assert read == [0, 1]


@pytest.mark.parametrize("row", ["good film", ("good", " film")])
def test_of_long_rows_fewer_are_read_at_a_time(
    row: Any, sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CHARACTERS_AT_ONCE", 20)
    read: list[int] = []
    next(augment(noted(row, read), copies=1, **sources))
    assert read == [0, 1, 2]  # of nine characters each


def test_a_wrong_setting_is_told_before_anything_is_read() -> None:
    """Defect l of the published code: what is asked for is what is done, or it is refused."""
    with pytest.raises(ConfigError, match=r"augment\.copies is 0; .*; unknown key 'augment.vector'"):
        augment(["a"], copies=0, vectors="x", vector="y")
    with pytest.raises(ConfigError, match=r"augment\.vectors is missing"):
        augment(["a"], copies=1)


def test_one_text_in_the_place_of_rows_is_refused(sources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rows is the text 'A fine film.'; give a list of texts: augment\(\[text\]"):
        augment("A fine film.", copies=1, **sources)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"processes": 0}, "processes is 0; it must be at least 1"),
        ({"device": "gpu"}, "--device is 'gpu'; known: auto, cpu, cuda"),
    ],
)
def test_where_it_cannot_run_is_told(wrong: dict[str, Any], reason: str, sources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=reason):
        next(augment(["A fine film."], copies=1, **sources, **wrong))


@pytest.mark.parametrize("bound", [0.0, 0.5, 1.0])
def test_a_bound_on_doubts_is_refused_where_nobody_judges(bound: float, sources: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"augment\.max_disagreement is .*; augment\(\) has no teacher.*; drop the key"
    ):
        augment(["a film"], copies=1, max_disagreement=bound, **sources)


def test_what_is_wrong_with_a_source_is_told_from_other_processes_too() -> None:
    for processes in (1, 2):
        with pytest.raises(SourceError, match=r"augment.vectors is 'absent.txt', and there is no such file"):
            list(augment(["a film"], copies=1, vectors="absent.txt", processes=processes))


def test_a_process_that_is_ended_is_told(sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_augmented", _ended)
    with pytest.raises(CompressorError, match="one of 2 processes that replace words was ended from outside"):
        list(augment(["a film"], copies=1, processes=2, vectors=sources["vectors"]))


@pytest.mark.parametrize(("rank", "devices"), [("0", ["cuda:0", "cuda:1"]), ("1", ["cuda:2", "cuda:3"])])
def test_every_process_of_torchrun_has_gpus_of_its_own(
    rank: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "resolve_device", lambda _: "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = augmenting.settings(masked_lm="x")
    assert workers.Workers(config, processes=2, device="auto")._devices == devices
    with pytest.raises(ConfigError, match="6 processes were asked for and there are 4 GPUs"):
        workers.Workers(config, processes=3, device="auto")


def _ended(*_: object) -> None:
    os._exit(7)


HARD = {
    "empty": "",
    "blanks": " \t\r\n ",
    "one word": "film",
    "emoji": "👍 good 👨‍👩‍👧‍👦 film 🇫🇷!",
    "right to left": "فيلم جيد good \u200fפילם טוב",
    "chinese": "这部电影很好，good film。",
    "control characters": "good\x00 film\x1b[0m plot\x7f\u200b\ufeff",
    "combining": "cafe\u0301 good nai\u0308ve film",
    "lines": "good\u2028film\u0085plot\x1cfilm\r\ngood",
    "quotes": 'he said ""good"" , "film\tplot',
    "128 words": " ".join(["good film plot bad"] * 32),
    "512 words": " ".join(["good film plot bad"] * 128),
    "5,000 words": " ".join(["good film plot bad fine"] * 1000),
    "900 times the same": " ".join(["film"] * 900),
    "no blank": "film" * 2000,
    "unknown": "zyzzyva qwxz",
}


@pytest.fixture(scope="module")
def hard(sources: dict[str, Any]) -> list[Augmented]:
    return list(augment(HARD.values(), copies=3, **sources))


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_keep_their_bytes(name: str, hard: list[Augmented]) -> None:
    """Defects a, d, e, o and r of the published code."""
    number = list(HARD).index(name)
    rows = [row for row in hard if row.origin == number]
    assert rows[0] == Augmented((HARD[name],), number)
    assert len({row.texts for row in rows}) == len(rows) <= 4
    for row in rows:
        assert row.texts == (changed(HARD[name], row.changes),)
    nothing_to_replace = ("empty", "blanks", "no blank", "unknown")
    assert len(rows) == (1 if name in nothing_to_replace else 4)


def test_words_of_chinese_are_no_words_of_the_vectors(hard: list[Augmented]) -> None:
    """Defect o of the published code: of a text without blanks nothing is replaced by garbage."""
    number = list(HARD).index("chinese")
    changes = [change for row in hard if row.origin == number for change in row.changes]
    assert {change.old for change in changes} == {"good", "film"}


def test_without_a_masked_lm_no_model_library_is_loaded(sources: dict[str, Any]) -> None:
    program = (
        "import sys, json\n"
        "from compressor.stages.augment import augment\n"
        f"rows = list(augment(['good film'], copies=2, vectors={sources['vectors']!r}))\n"
        "print(json.dumps([len(rows), *[name in sys.modules for name in ('torch', 'transformers', 'datasets')]]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [3, False, False, False]


def test_duplicates_are_told_of_the_row_that_was_given(sources: dict[str, Any]) -> None:
    found = list(augment(["good film", "!!! 42"], copies=60, **sources))
    assert found[0].duplicates > 0
    assert {row.duplicates for row in found[1:]} == {0}


def test_a_regression_is_refused_where_there_are_no_labels(sources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"augment.regression is true; augment\(\) sees no labels, .*; drop the key"):
        next(augment(["good film"], copies=1, regression=True, **sources))


def test_words_of_several_pieces_have_neighbours_under_numpy_2(
    sources: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect s of the published code: a name that NumPy 2 lacks was used at the first word of several pieces."""
    for name in ("Inf", "Infinity", "infty", "NaN", "PINF", "NINF", "float_", "product", "in1d"):
        monkeypatch.delattr(np, name, raising=False)
    assert not {"yawning", "sleepy"} & set(PIECES)
    vectors = augmenting.glove(tmp_path / "vectors.txt", {"yawning": (1, 0.1), "sleepy": (1, 0.2), "good": (0, 1)})
    rows = list(augment(["a yawning ..."], copies=9, **sources | {"vectors": vectors}))
    assert [row.texts for row in rows][:1] == [("a yawning ...",)]
    assert {row.texts for row in rows[1:]} == {("a sleepy ...",), ("a good ...",)}
    assert [row.by_vectors for row in rows] == [0, 1, 1]
