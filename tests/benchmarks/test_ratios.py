"""Ratios by hand: which way they go, what they are known by, and what had to be reached."""

from typing import Any

import numpy as np
import pytest

from benchmarks import ratios
from benchmarks.bert_base import BERT_BASE
from benchmarks.local import STUDENT, TEACHER
from compressor.statistics import mcnemar, share_differences


def system(p50: list[float], size: int, rates: list[float]) -> dict[str, Any]:
    return {
        "size_bytes": size,
        "latency": {"1x32": {"p50_by_round_ms": p50}},
        "throughput_by_round_texts_per_s": rates,
        "test": {"against_teacher": {"ratio": 1.25, "ratio_95": (1.2, 1.3), "p_value": 0.2}},
    }


def model(p50: list[float], rates: list[float]) -> dict[str, Any]:
    load = [{"concurrency": 4, "p50_by_round_ms": p50, "requests_by_round_per_s": rates}]
    return {"load": load, "test": {"against_teacher": {"ratio": 0.5, "p_value": 0.01}}}


def by_name(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    return {ratios.name_of(row): row for row in rows}


def test_in_process_more_is_better_everywhere() -> None:
    rows = ratios.in_process(
        {TEACHER: system([70.0, 70.0], 90, [10.0, 10.0]), STUDENT: system([2.0, 2.0], 9, [50.0, 50.0])}, "matthews"
    )
    found = by_name(rows)
    assert found["p50", "1x32", STUDENT, TEACHER]["ratio"] == pytest.approx(35.0)
    assert found["throughput", "batches of 32", STUDENT, TEACHER]["ratio"] == pytest.approx(5.0)
    assert (
        found["size", "file", STUDENT, TEACHER] | {"ratio": 10.0, "interval_95": [10.0, 10.0]}
        == (found["size", "file", STUDENT, TEACHER])
    )
    kept = found["matthews", "in process", STUDENT, TEACHER]
    assert kept["ratio"] == pytest.approx(1 / 1.25)  # the pair is teacher / student
    assert kept["interval_95"] == pytest.approx([1 / 1.3, 1 / 1.2])


def test_the_rounds_own_ratios_count_so_that_a_slow_round_hurts_neither() -> None:
    rows = ratios.in_process(
        {TEACHER: system([10.0, 100.0], 9, [1.0, 1.0]), STUDENT: system([1.0, 10.0], 9, [1.0, 1.0])}, "accuracy"
    )
    found = by_name(rows)["p50", "1x32", STUDENT, TEACHER]
    assert found["ratio"] == pytest.approx(10.0)
    assert found["interval_95"] == pytest.approx([10.0, 10.0])
    assert found["rounds"] == 2


def test_served_models_are_compared_with_the_served_teacher() -> None:
    models = {
        "sst2": model([5.0], [300.0]),
        "sst2_teacher": model([20.0], [100.0]),
        "sst2_cascade": model([10.0], [150.0]),
    }
    found = by_name(ratios.served(models, "accuracy"))
    assert found["served p50", "4 clients", "sst2", "sst2_teacher"]["ratio"] == pytest.approx(4.0)
    assert found["served requests/s", "4 clients", "sst2_cascade", "sst2_teacher"]["ratio"] == pytest.approx(1.5)
    assert found["accuracy", "served", "sst2_cascade", "sst2_teacher"]["ratio"] == pytest.approx(2.0)
    assert not any(name[2] == "sst2_teacher" for name in found)
    assert ratios.served({"sst2": model([5.0], [300.0])}, "accuracy") == []


def test_the_served_student_alone_is_compared_with_bert_base() -> None:
    models = {"sst2": model([5.0], [300.0]), "sst2_teacher": model([20.0], [100.0])}
    models[BERT_BASE] = model([100.0], [20.0]) | {"test": None}
    found = by_name(ratios.served(models, "accuracy"))
    assert found["served p50", "4 clients", "sst2", BERT_BASE]["ratio"] == pytest.approx(20.0)
    assert found["served requests/s", "4 clients", "sst2", BERT_BASE]["ratio"] == pytest.approx(15.0)
    assert {name[2] for name in found if name[3] == BERT_BASE} == {"sst2"}
    assert BERT_BASE not in {name[2] for name in found}


@pytest.mark.parametrize(
    ("pair", "ratio", "interval"),
    [
        ({}, None, None),  # the student's metric is not above 0
        ({"ratio": 0.0}, None, None),  # the teacher's is 0
        ({"ratio": 2.0}, 0.5, None),
        ({"ratio": 2.0, "ratio_95": (-0.5, 3.0)}, 0.5, None),  # of Matthews: an end beyond 0 has no inverse
    ],
)
def test_a_metric_that_is_not_above_zero_has_no_ratio(pair: Any, ratio: Any, interval: Any) -> None:
    found = ratios._quality("matthews", "served", "sst2", "sst2_teacher", pair)
    assert (found["ratio"], found["interval_95"]) == (ratio, interval)


@pytest.mark.parametrize(
    ("interval", "standing"),
    [
        ([1.01, 1.2], ratios.Standing.AHEAD),
        ([0.9, 0.99], ratios.Standing.BEHIND),
        ([0.9, 1.1], ratios.Standing.OPEN),
        (None, ratios.Standing.OPEN),
    ],
)
def test_without_an_interval_two_systems_are_not_told_apart(interval: Any, standing: ratios.Standing) -> None:
    assert ratios.standing_of({"ratio": 0.95, "interval_95": interval}) is standing


@pytest.mark.parametrize(
    ("only_first", "only_second", "standing"),
    [
        (0, 5, ratios.Standing.OPEN),  # p = 0.0625, though the delta method's interval does not hold 1
        (0, 6, ratios.Standing.AHEAD),  # p = 0.031
        (6, 0, ratios.Standing.BEHIND),
    ],
)
def test_an_accuracy_stands_as_mcnemar_s_test_says(
    only_first: int, only_second: int, standing: ratios.Standing
) -> None:
    answer_N = np.ones(200, dtype=bool)
    teacher_N, student_N = answer_N.copy(), answer_N.copy()
    teacher_N[:only_second], student_N[-only_first or 200 :] = False, False
    pair = mcnemar(teacher_N, student_N)
    pair |= share_differences(int(teacher_N.sum()), only_first, only_second, 200)
    (row,) = ratios.ratios(
        {
            "metric": "accuracy",
            "in_process": {STUDENT: {"latency": {}, "test": {"against_teacher": pair}}},
            "text_to_label": {STUDENT: {}},
            "served": {},
        }
    )
    assert ratios.standing_of(row) is standing


def reached(ratio: float, high: float) -> dict[str, Any]:
    return {
        "figure": "p50",
        "where": "1x32",
        "system": STUDENT,
        "than": BERT_BASE,
        "ratio": ratio,
        "interval_95": [1.0, high],
    }


@pytest.mark.parametrize(("ratio", "high", "is_met"), [(35.0, 37.0, True), (34.9, 36.0, False)])
def test_a_target_is_met_by_the_ratio_itself(ratio: float, high: float, is_met: bool) -> None:
    first, overhead = ratios.targets([reached(ratio, high)], overhead_share=0.01)
    assert (first["value"], first["bound"], first["is_met"]) == (ratio, 35.0, is_met)
    assert overhead["is_met"]


@pytest.mark.parametrize(("high", "is_met"), [(1.01, True), (0.99, False)])
def test_no_worse_is_missed_only_beyond_what_the_rounds_vary(high: float, is_met: bool) -> None:
    row = {"figure": "text to label p50", "where": "one text", "system": STUDENT, "than": "optimum"}
    first, _ = ratios.targets([{**row, "ratio": 0.97, "interval_95": [0.9, high]}], overhead_share=0.01)
    assert (first["bound"], first["is_met"]) == (1.0, is_met)


def test_a_benchmark_that_takes_too_much_itself_misses_its_target() -> None:
    (overhead,) = ratios.targets([], overhead_share=0.05)
    assert overhead["target"].startswith("in process: ")
    assert not overhead["is_met"]
