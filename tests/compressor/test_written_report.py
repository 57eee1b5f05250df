"""The verdict where a metric is not above 0, and when a report that is there is written again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor import cli, report


@pytest.mark.parametrize(
    ("teacher", "student", "said"),
    [
        (0.5, 0.45, "The INT8 student keeps 90.0 % of the teacher's test Matthews (45.0 against 50.0), is 2.0 times"),
        (0.5, 0.55, "The INT8 student reaches 110.0 % of the teacher's test Matthews (55.0 against 50.0), is 2.0"),
        (0.0, 0.1, "The INT8 student is compared with the teacher's test Matthews (10.0 against 0.0), is 2.0 times"),
        (-0.05, 0.1, "The INT8 student is compared with the teacher's test Matthews (10.0 against -5.0), is 2.0"),
        (0.2, -0.1, "The INT8 student is compared with the teacher's test Matthews (-10.0 against 20.0), is 2.0"),
    ],
)
def test_there_is_no_share_of_a_metric_that_is_not_above_0(teacher: float, student: float, said: str) -> None:
    times = {"teacher PyTorch": 3.0, "teacher ONNX": 2.0, "student INT8": 1.0}
    facts = {
        "task": {"metric": "Matthews"},
        "systems": [
            {"system": "teacher", "test": {"score": teacher}, "onnx_size_bytes": 10},
            {"system": "student INT8", "test": {"score": student}, "onnx_size_bytes": 5},
        ],
        "latency": {
            "headline_shape": "1x32",
            "machine_was_busy": False,
            "systems": {name: {"1x32": {"p50_ms": p50_ms}} for name, p50_ms in times.items()},
        },
    }
    assert report._verdict(facts).startswith(said)


@pytest.mark.parametrize("lost", [None, *report.FILES])
def test_a_report_is_kept_only_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str | None) -> None:
    manifest = tmp_path / "manifest.json"
    for path in (manifest, *(tmp_path / name for name in report.FILES)):
        path.touch()
    os.utime(manifest, (0, 0))
    if lost is not None:
        (tmp_path / lost).unlink()
    written = list[Path]()

    def write_report(run: Path, artifacts: Any) -> Path:
        written.append(run)
        return run / "report.html"

    monkeypatch.setattr(report, "write_report", write_report)
    stage: Any = SimpleNamespace(path=tmp_path)
    assert cli._write_report(tmp_path, {"a stage": stage}) == tmp_path / "report.html"
    assert written == ([] if lost is None else [tmp_path])
