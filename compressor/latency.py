"""How long one call takes: raw times and percentiles of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.evaluate import Predictor

WARMUP_CALLS = 5


@dataclass(frozen=True)
class Latency:
    """Times of equal calls."""

    times_ms: tuple[float, ...]
    """One by one, in the order measured."""

    def percentile_ms(self, percent: float) -> float:
        """The time that `percent` of the calls did not exceed."""
        return float(np.percentile(self.times_ms, percent))

    def summary(self) -> dict[str, float]:
        """p50, p95, p99 and how many calls they come from."""
        return {
            "p50_ms": self.percentile_ms(50),
            "p95_ms": self.percentile_ms(95),
            "p99_ms": self.percentile_ms(99),
            "calls": len(self.times_ms),
        }


def time_calls(
    calls: Sequence[Callable[[], object]], *, min_seconds: float = 1.0, min_calls: int = 30
) -> list[Latency]:
    """Time several things in turns, so that a busy machine hurts all alike.

    Goes on until each was called `min_calls` times and `min_seconds` went by for each on average.
    """
    for call in calls:
        for _ in range(WARMUP_CALLS):
            call()
    times: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    while len(times[0]) < min_calls or time.perf_counter() - began < min_seconds * len(calls):
        for call, samples in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e6)
    return [Latency(tuple(samples)) for samples in times]


def shaped_call(predictor: Predictor, *, batch: int, tokens: int) -> Callable[[], object]:
    """A call of `predictor` on `batch` rows of `tokens` real tokens each (random ids, fixed seed)."""
    random = np.random.default_rng(0)
    input_ids_BS = random.integers(1000, 20_000, size=(batch, tokens), dtype=np.int64)
    mask_BS = np.ones_like(input_ids_BS)
    return lambda: predictor(input_ids_BS, mask_BS)
