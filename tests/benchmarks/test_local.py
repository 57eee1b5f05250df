import time

import pytest

from benchmarks.local import Effort, throughput, time_in_turns

SHORT = Effort(rounds=2, turn_s=0.06, served_rounds=1, served_turn_s=0.1)


def test_stopwatch_measures_a_known_delay() -> None:
    times = time_in_turns({"sleeper": lambda: time.sleep(0.02)}, SHORT, seed=0)["sleeper"]
    assert min(times) >= 20.0
    assert min(times) < 25.0  # the fastest: others may have waited for a busy machine


def test_systems_take_turns_and_unmeasured_calls_come_first() -> None:
    heard: list[str] = []
    calls = {name: lambda name=name: (heard.append(name), time.sleep(0.005)) for name in ("first", "second")}
    times = time_in_turns(calls, SHORT, seed=0)  # type: ignore[arg-type]
    turns = [name for place, name in enumerate(heard) if place == 0 or heard[place - 1] != name]
    assert len(turns) in (3, 4)  # two rounds of two; the last of one may be the first of the next
    assert heard.count("first") == len(times["first"]) + 2 * 3


def test_order_of_turns_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[str]:
        heard: list[str] = []
        effort = Effort(rounds=4, turn_s=0.0, served_rounds=1, served_turn_s=0.1)
        time_in_turns({name: lambda name=name: heard.append(name) for name in "ab"}, effort, seed)  # type: ignore[misc]
        return heard

    assert order(1) == order(1)


def test_throughput_is_all_texts_over_all_time() -> None:
    assert throughput([100.0, 300.0], batch=32) == pytest.approx(64 / 0.4)
