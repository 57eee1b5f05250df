"""What a metric on some rows can show: intervals and paired comparisons.

Shape legend: N rows, C outputs, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

RESAMPLES = 1000
Z_95 = 1.959964
SEED = 0  # of the resamples: the same rows give the same interval
Rows = NDArray[np.intp]


def wilson(right: int, rows: int) -> tuple[float, float]:
    """95 % interval of a share, by Wilson's method."""
    interval = binomtest(right, rows).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(statistic: Callable[[Rows], float], rows: int) -> tuple[float, float]:
    """95 % interval of a statistic of row numbers: percentiles over rows drawn again with replacement."""
    random = np.random.default_rng(SEED)
    values_R = [statistic(random.integers(rows, size=rows)) for _ in range(RESAMPLES)]
    low, high = np.percentile(values_R, (2.5, 97.5))
    return float(low), float(high)


def mcnemar(first_right: NDArray[np.bool_], second_right: NDArray[np.bool_]) -> dict[str, float]:
    """Exact McNemar test of two classifiers on the same rows.

    Gives how many rows only the first and only the second gets right, and the two-sided p value that they are
    equally good.
    """
    only_first = int((first_right & ~second_right).sum())
    only_second = int((second_right & ~first_right).sum())
    discordant = only_first + only_second
    p_value = float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return {"only_first_right": only_first, "only_second_right": only_second, "p_value": p_value}


def share_differences(right: int, only_first: int, only_second: int, rows: int) -> dict[str, Any]:
    """Difference and ratio of two shares of right answers to the same rows, with 95 % intervals for pairs.

    `right` rows are right by the first. Difference: Wald on counts with 1/2 added to each cell (Agresti & Min 2005).
    Ratio: delta method on its logarithm; left out if either is never right.
    """
    centre = (only_first - only_second) / (rows + 2)
    variance = only_first + only_second + 1 - (only_first - only_second) ** 2 / (rows + 2)
    spread = Z_95 * math.sqrt(variance) / (rows + 2)
    result: dict[str, Any] = {
        "difference": (only_first - only_second) / rows,
        "difference_95": [max(-1.0, centre - spread), min(1.0, centre + spread)],
    }
    other = right - only_first + only_second
    if right and other:
        factor = math.exp(Z_95 * math.sqrt((only_first + only_second) / (right * other)))
        result |= {"ratio": right / other, "ratio_95": [right / other / factor, right / other * factor]}
    return result
