"""Percentiles of raw times. Light, so that a client process needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 95, 99)


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


def ratio(above: float | int | None, below: float | int | None) -> float | None:
    """`above` / `below`; None if one of them was not measured or `below` is 0."""
    return None if above is None or not below else above / below
