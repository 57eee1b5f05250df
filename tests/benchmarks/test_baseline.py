"""What counts as a regression, and what cannot be compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, served
from benchmarks.baseline import against_baseline, check_baseline, read_baseline, table
from benchmarks.bert_base import BERT_BASE
from benchmarks.local import Wanted
from compressor.errors import ArtifactError, GateError
from compressor.statistics import ratio_of_rounds

FILE = Path("compare.json")


def ratio(value: float, interval: list[float] | None, than: str = "teacher_pytorch", **changes: str) -> dict[str, Any]:
    name = {"figure": "p50", "where": "1x32", "system": "student_int8", "than": than} | changes
    return {**name, "ratio": value, "interval_95": interval, "rounds": 8}


def result(*rows: dict[str, Any], cores: int = 2) -> dict[str, Any]:
    systems: dict[str, Any] = {"in_process": {"teacher_pytorch": {}, "student_int8": {}}, "served": {"sst2": {}}}
    return {**systems, "command": "c", "machine": {"cores": cores}, "ratios": list(rows)}


@pytest.mark.parametrize(
    ("was", "now", "regressed"),
    [
        ((40.0, [39.0, 41.0]), (30.0, [29.0, 31.0]), True),
        ((40.0, [27.0, 59.3]), (30.0, [29.0, 31.0]), False),  # the earlier rounds vary by more
        ((40.0, [34.8, 46.0]), (30.0, [26.1, 34.9]), True),  # the intervals just overlap, that of the change is below 0
        ((40.0, [39.5, 40.5]), (37.0, [36.5, 37.5]), False),  # by 7.5 % only
        ((40.0, [39.0, 41.0]), (50.0, [49.0, 51.0]), False),  # better
        ((40.0, None), (30.0, [29.0, 31.0]), False),  # one round: nothing is known of it
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
        said = str(error.value)
        assert "1 of 1 ratios regressed by more than allowed since compare.json: p50 of student_int8 against" in said
        assert "teacher_pytorch (1x32) fell by 25.0 % (allowed 10 %), from 40.00 to 30.00 times" in said
    else:
        check_baseline(found)


@pytest.mark.parametrize(
    ("rounds", "times_worse", "low", "high"),
    [(4, 1.5, 0.7, 1.0), (8, 1.5, 0.95, 1.0), (8, 1.3, 0.7, 1.0), (4, 1.0, 0.0, 0.02), (8, 1.0, 0.0, 0.02)],
)
def test_how_often_noisy_rounds_are_called_a_regression(
    rounds: int, times_worse: float, low: float, high: float
) -> None:
    """Rounds that vary by 15 %, as served ones do; by a seed, so that it is the same each time."""
    random = np.random.default_rng(0)

    def measured(middle: float) -> dict[str, Any]:
        found = ratio_of_rounds((middle * random.lognormal(0, 0.15, rounds)).tolist(), [1.0] * rounds)
        return result(ratio(found["ratio"], found["interval_95"], figure="served p50", where="1 clients"))

    runs = [(measured(8.0), measured(8.0 / times_worse)) for _ in range(300)]
    found = [against_baseline(now, was, file=FILE, tolerance=0.1)["compared"][0] for was, now in runs]
    assert low <= np.mean([row["is_regression"] for row in found]) <= high


@pytest.mark.parametrize(
    ("was", "now", "regressed"),
    [
        ((1.003, [0.991, 1.015]), (0.97, [0.96, 0.98]), True),
        ((1.003, [0.991, 1.015]), (0.97, [0.95, 0.992]), True),  # the intervals overlap, but the rows are the same
        ((1.003, [0.991, 1.015]), (0.97, None), True),
        ((1.0, [0.997, 1.01]), (0.995, [0.99, 0.996]), False),  # by half a per cent only
    ],
)
def test_of_the_accuracy_a_hundredth_may_go(was: Any, now: Any, regressed: bool) -> None:
    first, second = (ratio(*each, figure="accuracy", where="in process") for each in (was, now))
    found = against_baseline(result(second), result(first), file=FILE, tolerance=0.1)
    assert found["compared"][0]["is_regression"] is regressed
    assert table(found).rows[0][-2:] == ["-1 %", "REGRESSED" if regressed else ""]


def test_a_metric_that_is_no_longer_above_zero_is_a_regression() -> None:
    kept = ratio(0.95, [0.9, 1.0], figure="Matthews correlation", where="in process")
    served = ratio(0.95, None, "sst2_teacher", figure="Matthews correlation", where="served", system="sst2")
    found = against_baseline(result(ratio(2.0, None)), result(ratio(2.0, None), kept, served), file=FILE, tolerance=0.1)
    name = "Matthews correlation, in process, student_int8, teacher_pytorch"
    assert found["lost"] == [name]  # of the served ones the teacher was not measured
    assert [row[-1] for row in table(found).rows] == ["", "REGRESSED", "not measured now"]
    with pytest.raises(GateError, match=f"1 of 2 ratios regressed .*: {name} has no ratio any more: one of the two is"):
        check_baseline(found)


def test_only_what_both_have_is_compared_and_the_rest_is_named() -> None:
    now, before = (
        result(ratio(2.0, None), ratio(1.0, None, "openvino"), cores=4),
        result(ratio(2.1, None), ratio(3.0, None, "optimum")),
    )
    found = against_baseline(now, before, file=FILE, tolerance=0.1)
    assert [row["than"] for row in found["compared"]] == ["teacher_pytorch"]
    assert found["only_now"] == ["p50, 1x32, student_int8, openvino"]
    assert found["only_before"] == ["p50, 1x32, student_int8, optimum"]
    assert table(found).rows[-1] == ["p50, 1x32, student_int8, optimum", "", "-", "", "", "not measured now"]
    assert found["is_same_machine"] is False
    assert table(found).title == (
        "Against compare.json, measured on another machine; 2 ratios are of one of the two alone and not compared"
    )
    assert table(found).rows[0][3] == "-4.8 %"


@pytest.mark.parametrize(
    ("url", "than", "system", "missing"),
    [
        (None, "optimum", "student_int8", "optimum"),  # --peer forgotten
        (None, BERT_BASE, "student_int8", BERT_BASE),  # --bert-base forgotten
        (None, "sst2_teacher", "sst2", "sst2_teacher"),  # no teacher in the repository
        ("host:1", "sst2_teacher", "sst2", "sst2_teacher"),
        (None, "teacher_onnx", "student_int8", None),
        (None, "sst2", "sst2", None),
        ("host:1", "sst2", "sst2", None),
    ],
)
def test_a_system_that_will_not_be_measured_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, url: str | None, than: str, system: str, missing: str | None
) -> None:
    monkeypatch.setattr(served, "served_names", lambda run, url: ["sst2"])
    run: Any = SimpleNamespace(publication=SimpleNamespace(metrics={"versions": {"sst2": 1}}))
    question: Any = SimpleNamespace(url=url, baseline=FILE, wanted=Wanted())
    before = result(ratio(2.0, None, than, system=system))
    if missing is None:
        compare.check_measured(run, question, before)
    else:
        with pytest.raises(ArtifactError, match=f"has ratios of {missing}, which would not be measured; give --bert"):
            compare.check_measured(run, question, before)


ALIKE: dict[str, Any] = {"task": "sst2", "url": None, "quick": False, "threads": 2}


def written(file: Path, **changes: Any) -> Path:
    """A result that can be compared, or not, because of the changes."""
    size = ratio(9.0, [9.0, 9.0], figure="size", where="file")
    facts = {"benchmark": "compare", "schema_version": 1, **ALIKE, **result(size), **changes}
    file.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    return file


def test_what_counts_of_an_earlier_result_is_read(tmp_path: Path) -> None:
    before = read_baseline(written(tmp_path / "old.json"), 1, **ALIKE)
    found = against_baseline(
        result(ratio(8.0, [8.0, 8.0], figure="size", where="file")), before, file=FILE, tolerance=0.1
    )
    assert found["compared"][0]["is_regression"] is True


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "rte"}, "was measured with task rte, this run would be with sst2; compare like with like"),
        ({"quick": True}, "was measured with quick True, this run would be with False"),
        ({"url": "host:1"}, "was measured with url host:1, this run would be with None"),
        ({"threads": 1}, "was measured with threads 1, this run would be with 2"),
        ({"threads": None}, "was measured with threads None, this run would be with 2"),
        ({"machine": None}, r"old\.json has a fault at machine \(Field required\); measure it again"),
        ({"ratios": [{"figure": "p50"}]}, r"has a fault at ratios\.0\.where \(Field required\)"),
        ({"ratios": [ratio(0.0, None)]}, r"has a fault at ratios\.0\.ratio \(Input should be greater than 0\)"),
        ({"ratios": [ratio(2.0, None)]}, "lacks the ratios of size, which every result has; measure it again"),
    ],
)
def test_what_cannot_be_compared_is_known_from_the_file_alone(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        read_baseline(written(tmp_path / "old.json", **changes), 1, **ALIKE)


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
