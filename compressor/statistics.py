"""What a count can show: intervals and paired tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

Logits = NDArray[np.float32]


def wilson(right: int, rows: int) -> tuple[float, float]:
    """95 % interval of a share, by Wilson's method."""
    interval = binomtest(right, rows).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


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


def paired(first: Logits, second: Logits, label_N: NDArray[np.int64]) -> dict[str, float]:
    """How two classifiers' answers to the same rows compare: agreement and McNemar's test."""
    first_N, second_N = first.argmax(axis=1), second.argmax(axis=1)
    agreement = float((first_N == second_N).mean())
    return {"agreement": agreement, **mcnemar(first_N == label_N, second_N == label_N)}
