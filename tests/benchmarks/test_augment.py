from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import augment
from compressor.errors import DataError, GateError

VECTORS = {"engine_rows_per_s": 30_000.0, "stage_s": 20.0, "stage_peak_gb": 0.5}


def test_the_column_of_sentences_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('sentence\tlabel\na "film\t1\nplot\t0\n', encoding="utf-8")
    assert augment.sentences(tmp_path / "a.tsv") == ['a "film', "plot"]
    (tmp_path / "b.tsv").write_text("text\tlabel\na\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.tsv has columns text, label; it must have rows with a sentence"):
        augment.sentences(tmp_path / "b.tsv")


def test_a_result_that_meets_the_targets_passes() -> None:
    augment.check_targets({"times": 15.0, "vectors": VECTORS})


@pytest.mark.parametrize(
    ("times", "change", "sentence"),
    [
        (14.0, {}, r"times the published way is 14\.00; the target is at least 15"),
        (15.0, {"engine_rows_per_s": 100.0}, r"rows/s with word vectors is 100\.00; the target is at least 20,000"),
        (15.0, {"stage_s": 181.0}, r"seconds of the stage is 181\.00; the target is at most 180"),
        (15.0, {"stage_peak_gb": 1.2}, r"memory of the stage in GB is 1\.20; the target is at most 1"),
    ],
)
def test_a_missed_target_is_told_with_its_bound(times: float, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GateError, match=sentence):
        augment.check_targets({"times": times, "vectors": VECTORS | change})
