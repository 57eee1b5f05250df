import pytest

from benchmarks.samples import ratio, summary


def test_percentiles_are_those_of_the_raw_times() -> None:
    found = summary([float(number) for number in range(1, 102)])
    expected = {"calls": 101, "min_ms": 1.0, "p50_ms": 51.0, "p90_ms": 91.0, "p95_ms": 96.0, "p99_ms": 100.0}
    assert found == pytest.approx(expected)


def test_a_percentile_that_too_few_calls_can_show_is_none() -> None:
    found = summary([2.0] * 20)
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"]) == (2.0, 2.0, None)
    assert summary([3.0])["p50_ms"] == 3.0


def test_no_calls_give_no_figures() -> None:
    assert set(summary([]).values()) == {0, None}


def test_ratio_by_hand() -> None:
    assert ratio(70.0, 2.0) == 35.0
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 0.0) is None
