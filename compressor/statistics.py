"""What a metric on some rows can show: intervals and paired comparisons.

Shape legend: N rows, C outputs, R resamples or rounds, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, t

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
    Ratio: delta method on its logarithm, its variance from the same counts, so that few rows without a disagreement do
    not pass for certainty; left out if either is never right.
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
        factor = math.exp(Z_95 * math.sqrt((only_first + only_second + 1) / ((right + 1) * (other + 1))))
        result |= {"ratio": right / other, "ratio_95": [right / other / factor, right / other * factor]}
    return result


def calibration(probability_NC: NDArray[Any], label_N: NDArray[Any], bins: int = 10) -> dict[str, Any]:
    """Whether a classifier is right as often as it says: reliability by confidence, and the expected error (ECE).

    Confidence is the largest probability of a row. `bins` are of equal width from 0 to 1, each without its low end, and
    those without rows are left out; a bin's `confidence` is the mean of its rows, its `accuracy` their share of right
    labels, with Wilson's 95 % interval. `ece` is the mean distance of the two, weighted by rows. Chance alone keeps
    them apart, the more so the fewer rows: `ece_by_chance` is what a model with these confidences has on average if it
    is right exactly as often as it says. Raises ValueError if there is no row, or rows do not sum to 1.
    """
    rows = len(label_N)
    if not rows or probability_NC.shape[0] != rows or not np.allclose(probability_NC.sum(axis=1), 1, atol=1e-4):
        raise ValueError(
            f"probabilities {probability_NC.shape} for {rows} labels; give at least one row, one for each label, that "
            "sums to 1"
        )
    confidence_N = np.asarray(probability_NC.max(axis=1), dtype=np.float64)
    right_N = probability_NC.argmax(axis=1) == label_N
    bin_N = np.clip(np.ceil(confidence_N * bins).astype(int) - 1, 0, bins - 1)
    count_B, claimed_B = np.bincount(bin_N, minlength=bins), np.bincount(bin_N, confidence_N, bins)

    def apart(right_N: NDArray[np.bool_]) -> float:
        return float(np.abs(np.bincount(bin_N, right_N, bins) - claimed_B).sum() / rows)

    random = np.random.default_rng(SEED)
    by_chance = [apart(random.random(rows) < confidence_N) for _ in range(RESAMPLES)]
    found = []
    for number in np.flatnonzero(count_B).tolist():
        count, right = int(count_B[number]), int(right_N[bin_N == number].sum())
        bounds = {"low": number / bins, "high": (number + 1) / bins, "rows": count}
        shares = {"confidence": float(claimed_B[number] / count), "accuracy": right / count}
        found.append({**bounds, **shares, "interval_95": list(wilson(right, count))})
    return {"ece": apart(right_N), "ece_by_chance": float(np.mean(by_chance)), "rows": rows, "bins": found}


def ratio_of_rounds(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """How many times `below` the figure `above` is, from one figure of each per round (R,), all above 0.

    The Hodges-Lehmann estimate on the logarithms of the rounds' own ratios (the median of the means of all pairs), with
    Wilcoxon's signed-rank 95 % interval: some rounds in which other work hurt one of the two do not decide. Under six
    rounds, where Wilcoxon has no such interval, it is Student's t. The rounds, not the calls in them, are what counts
    as independent. One round has no interval.
    """
    log_R = np.log(np.asarray(above, dtype=np.float64) / np.asarray(below, dtype=np.float64))
    rounds = len(log_R)
    pairs_P = np.sort((log_R[:, None] + log_R)[np.triu_indices(rounds)] / 2)
    interval: list[float] | None = None
    if cut := _wilcoxon_cut(rounds):
        interval = [math.exp(pairs_P[cut - 1]), math.exp(pairs_P[-cut])]
    elif rounds > 1:
        middle, spread = log_R.mean(), t.ppf(0.975, rounds - 1) * log_R.std(ddof=1) / math.sqrt(rounds)
        interval = [math.exp(middle - spread), math.exp(middle + spread)]
    return {"ratio": math.exp(np.median(pairs_P)), "interval_95": interval, "rounds": rounds}


def _wilcoxon_cut(rounds: int) -> int:
    """How many of the lowest, and highest, rank sums have together a probability of 2.5 % at most; 0 = none has."""
    ways_S = np.ones(1)  # in which a rank sum comes about
    for rank in range(1, rounds + 1):
        ways_S = np.pad(ways_S, (0, rank)) + np.pad(ways_S, (rank, 0))
    return int((np.cumsum(ways_S) / 2.0**rounds <= 0.025).sum())
