"""Load planned in advance: its moments, and that a server that stalls is charged for what waits."""

import threading
import time

import numpy as np
import pytest

from benchmarks.open_loop import Arrivals, open_loop, plan, run_plan
from serving.errors import DeadlineError, UnavailableError
from serving.runtime import TritonServer


def test_a_plan_has_its_rate_and_random_gaps() -> None:
    moments = plan(200.0, 10.0, seed=0)
    assert len(moments) == 2000
    assert moments == sorted(moments)
    assert 0 <= moments[0] <= moments[-1] <= 10
    gaps = np.diff(moments)
    # Independent arrivals: the deviation of the gaps is their mean, and one in e is longer than the mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.03)


def test_a_plan_is_the_same_for_a_seed() -> None:
    assert plan(50.0, 1.0, seed=3) == plan(50.0, 1.0, seed=3) != plan(50.0, 1.0, seed=4)


def test_a_slow_plan_still_asks_once() -> None:
    assert len(plan(0.1, 1.0, seed=0)) == 1


def test_a_stall_is_charged_to_all_that_wait_meanwhile() -> None:
    server = threading.Lock()

    def send(number: int) -> None:
        with server:  # one at a time, the first takes half a second
            time.sleep(0.5 if number == 0 else 0.001)

    moments = [n * 0.01 for n in range(40)]
    found = run_plan(moments, [send, send])
    assert len(found.times_ms) == 40
    # Of 40 requests in 0.4 s all came during the stall: those due at 0.2 s waited 0.3 s, though sending took 1 ms.
    assert np.median(found.times_ms) > 250
    assert max(found.times_ms) >= 500
    assert np.percentile(found.late_ms, 90) > 100  # two senders alone: the rest was sent late, and that is told
    assert found.seconds > 0.5


def test_a_fast_server_is_asked_on_time() -> None:
    late_ms = []
    for _ in range(3):
        found = run_plan([n * 0.02 for n in range(20)], [lambda number: time.sleep(0.002)] * 4)
        assert len(found.times_ms) == 20
        assert min(found.times_ms) >= 2
        assert found.seconds > 0.37
        assert min(found.late_ms) >= 0
        late_ms.append(np.median(found.late_ms))
    # The best of them: a busy machine wakes whoever sends late.
    assert min(late_ms) < 10


def test_failures_are_told_and_have_no_time() -> None:
    def send(number: int) -> None:
        if number % 2:
            raise DeadlineError("late")

    found = run_plan([0.0] * 6, [send])
    assert (len(found.times_ms), found.failures) == (3, ["DeadlineError: late"] * 3)


def test_no_server_is_one_sentence() -> None:
    load = Arrivals(url="127.0.0.1:1", model="sst2", rate_per_s=10.0, seconds=0.1, seed=0)
    with pytest.raises(UnavailableError, match=r"no server answers at 127\.0\.0\.1:1"):
        open_loop(load, ["a film"])


@pytest.mark.triton
def test_a_real_server_is_asked_as_often_as_planned(tiny_server: TritonServer) -> None:
    load = Arrivals(url=tiny_server.grpc_url, model="sst2", rate_per_s=40.0, seconds=1.0, seed=0)
    found = open_loop(load, ["a good film", "a bad film"])
    assert not found.failures
    assert len(found.times_ms) == len(found.late_ms) == 40
    assert min(found.times_ms) > 0
    assert 0.8 < found.seconds < 5
