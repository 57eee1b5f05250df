import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.report import Table, ratio
from compressor import machine
from compressor.errors import ArtifactError

TABLE = Table("Sizes", ["system", "MB"], [["teacher", "90.0"], ["student", "9.5"]])


def test_numbers_that_are_none_become_null() -> None:
    text = report.to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": (1,)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": [1]}


def test_tables_align_and_render_as_markdown() -> None:
    assert TABLE.text().splitlines() == ["Sizes", "  system     MB", "  teacher  90.0", "  student   9.5"]
    assert TABLE.markdown().splitlines()[2:4] == ["| system | MB |", "| --- | ---: |"]


def test_a_text_of_any_form_stays_in_its_cell() -> None:
    table = Table("Of a_b", ["text", "label"], [["one\nline <img src=x> \\| `more`", "good"], ["b", "bad"]])
    line = "| one line \\<img src=x\\> \\\\\\| \\`more\\` | good |"
    assert table.markdown().splitlines() == [
        "## Of a\\_b",
        "",
        "| text | label |",
        "| --- | ---: |",
        line,
        "| b | bad |",
    ]
    assert [len(line) for line in table.text().splitlines()[1:]] == [39, 39, 39]


def test_figures_are_written_before_the_page_is_made(tmp_path: Path) -> None:
    def html(result: Any) -> str:
        raise ZeroDivisionError

    result = report.context(report.Begun(), command="python -m benchmarks starts", seed=[1, 2], threads=1)
    result |= {"conditions": "quiet"}
    with pytest.raises(ZeroDivisionError):
        report.write(tmp_path, "compare", result, [TABLE], html)
    assert json.loads((tmp_path / "compare.json").read_text())["seeds"] == [1, 2]
    assert "seeds 1, 2, other work" in (tmp_path / "compare.md").read_text()


def test_a_figure_that_was_not_measured_is_a_dash() -> None:
    assert report.percentiles({"p50_ms": 1.234, "p95_ms": 2.0, "p99_ms": None}) == "1.23 / 2.00 / -"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = report.context(report.Begun(), command="python -m benchmarks compare", seed=0, threads=1)
    with pytest.raises(ArtifactError, match=r"cannot write to --out .*taken"):
        report.write(tmp_path / "taken", "compare", result | {"conditions": "quiet"}, [TABLE])


@pytest.mark.parametrize(
    ("before", "meanwhile", "is_busy"), [(10.0, 10.0, False), (10.5, 0.0, True), (0.0, 10.5, True)]
)
def test_other_work_counts_before_the_measurement_and_during_it(
    monkeypatch: pytest.MonkeyPatch, before: float, meanwhile: float, is_busy: bool
) -> None:
    monkeypatch.setattr(machine, "in_use_percent", lambda: before)
    monkeypatch.setattr(machine.OtherWork, "percent", lambda self: meanwhile)
    result = report.context(report.Begun(), command="python -m benchmarks compare", seed=0, threads=1)
    assert result["machine_was_busy"] is is_busy
    said = f"other work used {before:.0f} % of the processor before and {meanwhile:.0f} % meanwhile"
    assert report.headline(result).endswith(said + (": do not publish these times" if is_busy else ""))


def test_ratio_by_hand() -> None:
    assert ratio(70.0, 2.0) == 35.0
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 0.0) is None
