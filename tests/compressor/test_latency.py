"""Raw times and their percentiles."""

import itertools
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from compressor import latency
from compressor.dataset import Inputs
from compressor.latency import Call, shaped_call, summary, time_in_turns


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


def test_stopwatch_measures_a_known_delay() -> None:
    slept_ms: list[float] = []

    def sleep() -> None:
        start = time.perf_counter_ns()
        time.sleep(0.02)
        slept_ms.append((time.perf_counter_ns() - start) / 1e6)

    times = time_in_turns({"sleeper": sleep}, rounds=1, turn_s=0.12, seed=0)["sleeper"]
    assert min(times) >= 20.0
    # A busy machine ends a sleep late, and that is measured too; the stopwatch itself adds next to nothing.
    more_ms = [measured - slept for measured, slept in zip(times, slept_ms[-len(times) :], strict=True)]
    assert 0 <= min(more_ms) < 1


def heard_call(heard: list[str], name: str, delay_s: float) -> Call:
    """A call that takes a while and leaves its name in `heard`."""

    def call() -> None:
        heard.append(name)
        time.sleep(delay_s)

    return call


def test_systems_take_turns_and_unmeasured_calls_come_first() -> None:
    heard: list[str] = []
    calls = {name: heard_call(heard, name, 0.005) for name in ("first", "second")}
    times = time_in_turns(calls, rounds=2, turn_s=0.06, seed=0)
    turns = [name for place, name in enumerate(heard) if place == 0 or heard[place - 1] != name]
    assert len(turns) in (3, 4)  # two rounds of two; the last of one may be the first of the next
    assert heard.count("first") == len(times["first"]) + 2 * 3


def test_a_slow_call_is_warmed_up_once() -> None:
    heard: list[str] = []
    times = time_in_turns({"slow": heard_call(heard, "slow", 0.02)}, rounds=1, turn_s=0.01, seed=0)
    assert len(heard) == len(times["slow"]) + 1


def test_order_of_turns_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SETTLE_S", 0.0)

    def order(seed: int, names: str) -> list[str]:
        heard: list[str] = []
        time_in_turns({name: partial(heard.append, name) for name in names}, rounds=4, turn_s=0.0, seed=seed)
        return heard

    orders = [order(seed, "abc") for seed in range(4)]
    assert [order(seed, "cab") for seed in range(4)] == orders
    assert all(first != second for first, second in itertools.combinations(orders, 2))


def test_shaped_call_gives_rows_of_real_tokens_every_time_the_same():
    seen: list[Inputs] = []

    def predictor(inputs: Inputs) -> Any:
        seen.append(inputs)

    call = shaped_call(predictor, 2, 7, vocabulary=50)
    call()
    shaped_call(predictor, 2, 7, vocabulary=50)()
    (ids_BS, segment_BS, mask_BS), (again_BS, _, _) = seen
    assert ids_BS.shape == (2, 7)
    assert mask_BS.all()
    assert not segment_BS.any()
    assert ids_BS.max() < 50
    assert np.array_equal(ids_BS, again_BS)
