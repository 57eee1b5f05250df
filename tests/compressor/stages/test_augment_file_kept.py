"""What an interrupted augment-file keeps of the teacher's answers, and what it says of scores that nobody named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from compressor.config import AugmentConfig
from compressor.stages.augment import file as module
from compressor.stages.augment.file import Columns, augment_file
from tests import augmenting, tiny
from tests.augmenting import table

Texts = tuple[str, ...]
LABELLED = [{"text": f"{word} film", "kind": "positive"} for word in ("good", "bad", "fine", "great", "poor")]


@pytest.fixture
def config(tmp_path: Path) -> AugmentConfig:
    return augmenting.settings(vectors=augmenting.glove(tmp_path / "vectors.txt"))


def test_what_the_teacher_has_judged_is_not_asked_again(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left = list[Texts](), 2

    class Interrupted:
        def __init__(self, *arguments: Any) -> None:
            pass

        def probabilities(self, rows: list[Texts]) -> list[list[float]]:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            asked.extend(rows)
            return [[0.9, 0.1] if "poor" in text else [0.1, 0.9] for (text,) in rows]

    monkeypatch.setattr(module, "Teacher", Interrupted)
    monkeypatch.setattr(module, "JUDGED_AT_ONCE", 6)
    source, out = table(tmp_path / "in.csv", LABELLED), tmp_path / "out.csv"
    teacher, other = (tiny.checkpoint(tmp_path / name) for name in ("teacher", "other"))
    (other / "more").touch()
    config = config.model_copy(update={"max_disagreement": 0.5})

    def augment(out: Path, teacher: Path) -> None:
        augment_file(source, out, Columns(text="text", label="kind"), config, teacher=teacher, seed=0)

    with pytest.raises(KeyboardInterrupt):
        augment(out, teacher)
    first, left = list(asked), 1
    with pytest.raises(KeyboardInterrupt):
        augment(out, other)  # of another teacher nothing is known
    assert asked[len(first) :] == first[: len(asked) - len(first)] != []
    asked.clear()
    left = 99
    augment(out, teacher)
    rest = list(asked)
    asked.clear()
    augment(tmp_path / "whole.csv", teacher)
    assert [*first, *rest] == asked
    assert first
    assert rest
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("rows", "columns", "regression", "warnings"),
    [
        ([{"text": "good", "Score": value} for value in ("1", "3.8", "2.5")], Columns(text="text"), False, 1),
        ([{"text": "good", "label": 1.5}], Columns(text="text"), True, 0),
        ([{"text": "good", "label": "3"}], Columns(text="text"), False, 0),
        ([{"text": "good", "price": "3.8"}], Columns(text="text"), False, 0),
        ([{"text": "good", "score": "3.8", "label": "1"}], Columns(text="text", label="label"), False, 0),
    ],
)
def test_a_score_that_is_not_named_is_said_once(
    tmp_path: Path,
    config: AugmentConfig,
    caplog: pytest.LogCaptureFixture,
    rows: list[dict[str, Any]],
    columns: Columns,
    regression: bool,
    warnings: int,
) -> None:
    config = config.model_copy(update={"regression": regression})
    with caplog.at_level(logging.WARNING):
        augment_file(table(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", columns, config, seed=0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    if said:
        assert "in.jsonl, line 2: column 'Score' looks like a score (3.8), and copies keep it" in said[0]
        assert "give --label Score to have that refused, or --regression" in said[0]
