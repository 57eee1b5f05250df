"""What counts as a regression, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baseline import against_baseline, check_baseline, read_baseline, table
from compressor.errors import ArtifactError, GateError

FILE = Path("compare.json")


def ratio(value: float, interval: list[float] | None, than: str = "teacher_pytorch") -> dict[str, Any]:
    name = {"figure": "p50", "where": "1x32", "system": "student_int8", "than": than}
    return {**name, "ratio": value, "interval_95": interval, "rounds": 8}


def result(*rows: dict[str, Any], task: str = "sst2", cores: int = 2) -> dict[str, Any]:
    return {"task": task, "command": "c", "machine": {"cores": cores}, "ratios": list(rows)}


@pytest.mark.parametrize(
    ("was", "now", "regressed"),
    [
        ((40.0, [39.0, 41.0]), (30.0, [29.0, 31.0]), True),
        ((40.0, [30.0, 50.0]), (30.0, [29.0, 31.0]), False),  # the intervals overlap
        ((40.0, [39.5, 40.5]), (37.0, [36.5, 37.5]), False),  # by 7.5 % only
        ((40.0, [39.0, 41.0]), (50.0, [49.0, 51.0]), False),  # better
        ((40.0, None), (30.0, None), True),  # one round each: the values themselves
    ],
)
def test_lower_by_more_than_the_tolerance_and_than_the_rounds_vary(was: Any, now: Any, regressed: bool) -> None:
    found = against_baseline(result(ratio(*now)), result(ratio(*was)), file=FILE, tolerance=0.1)
    (row,) = found["compared"]
    assert row["is_regression"] is regressed
    if regressed:
        with pytest.raises(GateError) as error:
            check_baseline(found)
        assert error.value.exit_code == 3
        assert "1 of 1 ratios regressed by more than 10 % since compare.json: p50 of student_int8 against" in str(
            error.value
        )
        assert "teacher_pytorch (1x32) fell by 25.0 %, from 40.00 to 30.00 times" in str(error.value)
    else:
        check_baseline(found)


def test_only_what_both_have_is_compared_and_the_rest_is_named() -> None:
    now, before = result(ratio(2.0, None), ratio(1.0, None, "openvino"), cores=4), result(ratio(2.1, None))
    found = against_baseline(now, before, file=FILE, tolerance=0.1)
    assert [row["than"] for row in found["compared"]] == ["teacher_pytorch"]
    assert found["only_now"] == ["p50, 1x32, student_int8, openvino"]
    assert found["only_before"] == []
    assert found["is_same_machine"] is False
    assert table(found).rows[0][3] == "-4.8 %"


def test_another_task_is_refused() -> None:
    with pytest.raises(ArtifactError, match="is of the task rte, this run of sst2"):
        against_baseline(result(), result(task="rte"), file=FILE, tolerance=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is a result of None"),
        (json.dumps({"benchmark": "serve"}), "is a result of 'serve' in version None"),
        (json.dumps({"benchmark": "compare", "schema_version": 7}), "version 7 .* must be of 'compare' in version 1"),
    ],
)
def test_a_file_that_is_no_such_result_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    with pytest.raises(ArtifactError, match=message):
        read_baseline(tmp_path / "old.json", 1)
