"""Students of more or fewer augmented rows, on a tiny run; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import copies
from benchmarks.runs import RUN_FILE
from compressor.errors import ConfigError
from tests.conftest import Line


def test_each_number_of_copies_takes_the_same_steps(line: Line, tmp_path: Path) -> None:
    found = copies.compare_copies(
        line.run, [0, 2], masked_lm=None, steps_per_phase=3, seeds=[1, 2], out=tmp_path, threads=1, command="copies"
    )
    made = found["distillations"]
    assert [(row["copies"], row["seed"]) for row in made] == [(0, 1), (2, 1), (0, 2), (2, 2)]
    assert {(row["intermediate_steps"], row["prediction_steps"]) for row in made} == {(3, 3)}
    assert made[1]["rows"] > 2 * made[0]["rows"]
    assert found["summary"]["2"]["mean"] == pytest.approx((made[1]["score"] + made[3]["score"]) / 2)
    (table,) = copies.tables(found)
    assert [row[0] for row in table.rows] == ["0", "2"]
    folders = {folder.name for folder in tmp_path.iterdir()}
    assert {
        "copies2-vectors-seed1-augment",
        "copies2-vectors-seed1-prediction",
        "copies0-seed2-intermediate",
    } <= folders


def test_a_run_without_augmentation_is_refused(line: Line, tmp_path: Path) -> None:
    facts = json.loads((line.run / RUN_FILE).read_text())
    facts["config"]["augment"] = None
    (tmp_path / RUN_FILE).write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"was made without \[augment\]"):
        copies.compare_copies(
            tmp_path, [0], masked_lm=None, steps_per_phase=1, seeds=[1], out=tmp_path, threads=1, command="copies"
        )
