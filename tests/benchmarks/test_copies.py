"""Students of more or fewer augmented rows, on a tiny run; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import copies
from compressor.artifact import RUN_FILE
from compressor.errors import ConfigError
from tests import augmenting, tiny
from tests.conftest import Line


def test_each_number_of_copies_takes_the_same_steps(line: Line, tmp_path: Path) -> None:
    found = copies.compare_copies(
        line.run, [0, 2], masked_lm=None, steps_per_phase=3, seeds=[1, 2], out=tmp_path, threads=1, command="copies"
    )
    made = found["distillations"]
    assert found["seeds"] == [1, 2]
    assert [(row["copies"], row["seed"]) for row in made] == [(0, 1), (2, 1), (0, 2), (2, 2)]
    assert {(row["intermediate_steps"], row["prediction_steps"]) for row in made} == {(3, 3)}
    assert made[1]["rows"] > 2 * made[0]["rows"]
    assert found["summary"]["2"]["mean"] == pytest.approx((made[1]["test_score"] + made[3]["test_score"]) / 2)
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


def test_a_run_without_a_masked_language_model_is_refused(line: Line, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has made no masked language model; name one with --masked-lm, or leave"):
        copies.compare_copies(
            line.run, [1], masked_lm="adapt", steps_per_phase=1, seeds=[1], out=tmp_path, threads=1, command="copies"
        )


@pytest.mark.parametrize("source", ["adapt", "FOLDER", None])
def test_copies_are_made_with_the_masked_language_model_of_the_run(
    source: str | None, line: Line, tmp_path: Path
) -> None:
    run = line.copy(tmp_path).run
    facts = json.loads((run / RUN_FILE).read_text())
    facts["config"]["augment"]["masked_lm"] = "adapt"
    (run / RUN_FILE).write_text(json.dumps(facts))
    with tiny.sealed(run / "90-adapt", "masked-lm") as draft:
        augmenting.saved_masked_lm(draft.path)
    source = str(run / "90-adapt") if source == "FOLDER" else source
    found = copies.compare_copies(
        run, [1], masked_lm=source, steps_per_phase=1, seeds=[1], out=tmp_path / "out", threads=1, command="copies"
    )
    assert found["distillations"][0]["copies"] == 1
    (made,) = (tmp_path / "out").glob("copies1-*-augment")
    metrics = json.loads((made / "manifest.json").read_text())["metrics"]
    assert (metrics["share_by_masked_lm"] > 0) == (source is not None)
