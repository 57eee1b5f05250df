"""Students from different starts: the figures, and what is refused."""

import pytest

from benchmarks import starts
from benchmarks.runs import RUN_FILE
from compressor.errors import ArtifactError
from tests.benchmarks.conftest import TinyBuild


def test_the_mean_has_student_s_interval():
    found = starts._summary([0.89, 0.90, 0.88])
    assert found["mean"] == pytest.approx(0.89)
    # t of 2 degrees of freedom is 4.303; the deviation 0.01
    assert found["interval_95"] == pytest.approx([0.89 - 4.303 * 0.01 / 3**0.5, 0.89 + 4.303 * 0.01 / 3**0.5], abs=1e-5)


def test_one_seed_has_no_interval():
    assert starts._summary([0.89]) == {"mean": 0.89, "interval_95": None, "seeds": 1}


def test_a_run_without_a_teacher_is_refused(tiny_build: TinyBuild, tmp_path):
    (tmp_path / RUN_FILE).write_bytes((tiny_build.run / RUN_FILE).read_bytes())
    with pytest.raises(ArtifactError, match="holds no finished artifact of kind 'examples'"):
        starts.compare_starts(tmp_path, {"random": "random"}, seeds=[1], out=tmp_path, threads=1, command="x")
