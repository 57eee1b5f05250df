"""Raw times and their percentiles."""

import numpy as np
import pytest

from compressor.latency import WARMUP_CALLS, Latency, shaped_call, time_calls


def test_percentiles_of_known_times():
    latency = Latency(tuple(float(time) for time in range(1, 101)))
    assert [latency.percentile_ms(percent) for percent in (0, 50, 100)] == [1.0, 50.5, 100.0]


def test_summary_says_how_many_calls_it_comes_from():
    assert Latency((1.0, 3.0)).summary() == pytest.approx({"p50_ms": 2.0, "p95_ms": 2.9, "p99_ms": 2.98, "calls": 2})


def test_things_are_timed_in_turns_after_warm_up():
    called = []
    latencies = time_calls([lambda: called.append("a"), lambda: called.append("b")], min_seconds=0, min_calls=3)
    assert "".join(called) == "a" * WARMUP_CALLS + "b" * WARMUP_CALLS + "ab" * 3
    assert [len(latency.times_ms) for latency in latencies] == [3, 3]


def test_timing_goes_on_until_the_seconds_went_by(monkeypatch):
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("compressor.latency.time.perf_counter", lambda: next(clock))
    (latency,) = time_calls([lambda: None], min_seconds=5, min_calls=1)
    assert len(latency.times_ms) == 5


def test_shaped_call_gives_rows_of_real_tokens_every_time_the_same():
    seen = []
    call = shaped_call(lambda ids_BS, mask_BS: seen.append((ids_BS, mask_BS)), batch=2, tokens=7)
    call()
    shaped_call(lambda ids_BS, mask_BS: seen.append((ids_BS, mask_BS)), batch=2, tokens=7)()
    (ids_BS, mask_BS), (again_BS, _) = seen
    assert ids_BS.shape == (2, 7)
    assert mask_BS.all()
    assert np.array_equal(ids_BS, again_BS)
