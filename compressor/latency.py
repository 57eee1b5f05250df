"""How long calls take: raw times, and percentiles of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.dataset import Inputs

if TYPE_CHECKING:
    from compressor.evaluate import Predictor

PERCENTILES = (50, 90, 95, 99)
WARMUP_CALLS = 3
MIN_CALLS = 2
# The threads of ONNX Runtime and of OpenMP go on spinning for tens of ms after a call; a call of another system made
# meanwhile would be charged for them. Measured on two busy cores: it can make PyTorch several times slower.
SETTLE_S = 0.15

Call = Callable[[], object]


def summary(times_ms: Sequence[float]) -> dict[str, float | int | None]:
    """How many calls, the fastest, and the percentiles, all from the raw times in ms.

    A percentile is None unless at least one call is expected beyond it: p99 of 30 calls is only their maximum.
    """
    found: dict[str, float | int | None] = {"calls": len(times_ms), "min_ms": min(times_ms, default=None)}
    for percent in PERCENTILES:
        enough = len(times_ms) * (100 - percent) >= 100
        one = percent == 50 and len(times_ms) > 0
        found[f"p{percent}_ms"] = float(np.percentile(times_ms, percent)) if enough or one else None
    return found


def time_in_turns(
    calls: Mapping[str, Call], *, rounds: int = 6, turn_s: float = 0.25, seed: int = 0, least: int = MIN_CALLS
) -> dict[str, list[float]]:
    """Raw times in ms of each call, in `rounds` turns of `turn_s` seconds and `least` calls, in a new order each round.

    A busy machine hurts all alike; each turn starts with a pause and unmeasured calls, so that none pays for another:
    one at least, and more as long as they take no longer than the turn itself.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        for name in random.permutation(sorted(calls)).tolist():
            time.sleep(SETTLE_S)
            _warm_up(calls[name], turn_s)
            times[name] += _turn(calls[name], turn_s, least)
    return times


def _warm_up(call: Call, seconds: float) -> None:
    end = time.perf_counter() + seconds
    for _ in range(WARMUP_CALLS):
        call()
        if time.perf_counter() >= end:
            break


def _turn(call: Call, seconds: float, least: int) -> list[float]:
    times_ms: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_ms) < least or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        times_ms.append((time.perf_counter_ns() - start) / 1e6)
    return times_ms


def shaped_call(predictor: Predictor, batch: int, tokens: int, vocabulary: int) -> Call:
    """A call of `predictor` on `batch` rows of `tokens` real tokens each: random ids below `vocabulary`, fixed seed."""
    random = np.random.default_rng(0)
    input_ids_BS = random.integers(0, vocabulary, size=(batch, tokens), dtype=np.int64)
    inputs = Inputs(input_ids_BS, np.zeros_like(input_ids_BS), np.ones_like(input_ids_BS))
    return lambda: predictor(inputs)
