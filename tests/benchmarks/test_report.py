import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Table, ratio
from compressor.errors import ArtifactError

TABLE = Table("Sizes", ["system", "MB"], [["teacher", "90.0"], ["student", "9.5"]])


def test_numbers_that_are_none_become_null() -> None:
    text = report.to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": (1,)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": [1]}


def test_tables_align_and_render_as_markdown() -> None:
    assert TABLE.text().splitlines() == ["Sizes", "  system     MB", "  teacher  90.0", "  student   9.5"]
    assert TABLE.markdown().splitlines()[2:4] == ["| system | MB |", "| --- | ---: |"]


def test_a_figure_that_was_not_measured_is_a_dash() -> None:
    assert report.percentiles({"p50_ms": 1.234, "p95_ms": 2.0, "p99_ms": None}) == "1.23 / 2.00 / -"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = report.context(command="python -m benchmarks compare", seed=0, threads=1)
    assert result["cpu_in_use_before_percent"] >= 0
    with pytest.raises(ArtifactError, match=r"cannot write to --out .*taken"):
        report.write(tmp_path / "taken", "compare", result, [TABLE])


def test_ratio_by_hand() -> None:
    assert ratio(70.0, 2.0) == 35.0
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 0.0) is None
