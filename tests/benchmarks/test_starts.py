"""Students from different starts: the figures, and what is refused."""

import pytest

from benchmarks import starts
from benchmarks.students import mean_of
from compressor.artifact import RUN_FILE
from compressor.errors import ArtifactError
from tests.conftest import Line


def test_the_mean_has_student_s_interval():
    found = mean_of([0.89, 0.90, 0.88])
    assert found["mean"] == pytest.approx(0.89)
    # t of 2 degrees of freedom is 4.303; the deviation 0.01
    assert found["interval_95"] == pytest.approx([0.89 - 4.303 * 0.01 / 3**0.5, 0.89 + 4.303 * 0.01 / 3**0.5], abs=1e-5)


def test_one_seed_has_no_interval():
    assert mean_of([0.89]) == {"mean": 0.89, "interval_95": None, "seeds": 1}


def test_a_run_without_a_teacher_is_refused(line: Line, tmp_path):
    (tmp_path / RUN_FILE).write_bytes((line.run / RUN_FILE).read_bytes())
    with pytest.raises(ArtifactError, match="holds no finished artifact of kind 'examples'"):
        starts.compare_starts(
            tmp_path, {"random": "random"}, epochs=0.5, seeds=[1], out=tmp_path, threads=1, command="x"
        )


def test_students_of_each_start_and_seed_are_compared(line: Line, tmp_path):
    found = starts.compare_starts(
        line.run,
        {"cold": "random", "project": "project"},
        epochs=0.5,
        seeds=[1, 2],
        out=tmp_path,
        threads=1,
        command="starts",
    )
    made = found["distillations"]
    assert found["seeds"] == [1, 2]
    assert [(row["start"], row["seed"]) for row in made] == [("cold", 1), ("project", 1), ("cold", 2), ("project", 2)]
    assert [row["score_at_start"] is None for row in made] == [True, False, True, False]
    assert found["summary"]["cold"]["mean"] == pytest.approx((made[0]["score"] + made[2]["score"]) / 2)
    (table,) = starts.tables(found)
    assert [row[0] for row in table.rows] == ["cold", "project"]
    assert {"random-seed1-intermediate", "project-seed2-prediction"} <= {folder.name for folder in tmp_path.iterdir()}
