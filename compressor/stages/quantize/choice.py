"""Which candidate wins: the fastest within the bounds; and what is said if there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from compressor.bounds import MAX_SCORE_DIFFERENCE, Bounds
from compressor.errors import GateError
from compressor.evaluate import METRIC_NAMES

# Timings closer than this are noise; among such candidates the one that says what fp32 says most often wins.
SAME_SPEED = 1.1
SIGNIFICANT = 0.05  # a p value below it is more than chance

log = logging.getLogger(__name__)


def choose(table: Sequence[dict[str, Any]], bounds: Bounds, hint: str = "") -> str:
    """The fastest candidate within the bounds; of equally fast ones, the one that agrees most with fp32.

    The first row is fp32. Raises GateError with the table and the nearest miss if there is none; `hint` ends it.
    """
    _, *candidates = table
    passed = [row for row in candidates if bounds.hold(row)]
    if not passed:
        nearest = min(candidates, key=bounds.excess)
        raise GateError(
            f"accuracy gate: no INT8 candidate is within the bounds; the nearest miss is {nearest['scheme']}: it loses "
            f"{100 * nearest['drop']:.2f} points on {evidence(nearest)}, the bound is "
            f"{100 * bounds.max_metric_drop:.2f} (quantize.max_metric_drop), {100 * nearest['flips']:.2f} % of "
            f"answers depend on the batch, the bound is {100 * bounds.max_label_flips:.2f} (quantize.max_label_flips), "
            f"logits differ between batches by {nearest['batch_logit_difference']:.1e}, {_logit_bound(bounds)}, and "
            f"{_likeness(nearest, bounds)}; " + "; ".join(line(row) for row in table) + hint
        )
    fastest = min(speed(row) for row in passed)
    equal = [row for row in passed if speed(row) <= fastest * SAME_SPEED]
    chosen = min(equal, key=lambda row: (-row["agreement_fp32"], row["drop"], row["fp32_logit_difference"]))
    log.info(
        "quantize chose %s: loses %.2f points on %s (bound %.2f), %.2f %% of answers depend on the batch (bound %.2f)",
        chosen["scheme"],
        100 * chosen["drop"],
        evidence(chosen),
        100 * bounds.max_metric_drop,
        100 * chosen["flips"],
        100 * bounds.max_label_flips,
    )
    return str(chosen["scheme"])


def _logit_bound(bounds: Bounds) -> str:
    bound = bounds.max_batch_difference
    return "which has no bound" if bound is None else f"the bound is {bound:.0e} where max_label_flips is 0"


def evidence(row: dict[str, Any]) -> str:
    """The rows that a loss was seen on, what one of them is worth, and whether they can show it."""
    found = [f"one is {100 / row['rows']:.2f} points"] if row["metric"] == "accuracy" else []
    if "mcnemar_fp32" in row:
        shown = "more than chance" if row["mcnemar_fp32"] < SIGNIFICANT else "they cannot tell it from chance"
        found.append(f"McNemar's p = {row['mcnemar_fp32']:.2g}: {shown}")
    return f"{row['rows']} validation rows" + (f" ({'; '.join(found)})" if found else "")


def agreement(row: dict[str, Any]) -> str:
    """How often a candidate says what fp32 says, in words."""
    low, high = row.get("agreement_fp32_95", (None, None))
    interval = "" if low is None else f" (95 % interval {100 * low:.2f} to {100 * high:.2f})"
    return f"{100 * row['agreement_fp32']:.2f} % of answers are those of fp32{interval}"


def _likeness(row: dict[str, Any], bounds: Bounds) -> str:
    """How near labels, or the scores of a regression, are to fp32's, and the bound."""
    if "score_difference_fp32" not in row:
        return f"{agreement(row)}, the bound is {100 * bounds.min_agreement:.2f} (quantize.min_agreement)"
    return (
        f"scores differ from those of fp32 by {row['score_difference_fp32']:.2f} of their spread, the bound is "
        f"{MAX_SCORE_DIFFERENCE:.2f}"
    )


def slower_than_fp32(table: Sequence[dict[str, Any]], chosen: str) -> str:
    """What to say if the chosen candidate takes longer than fp32, the first row; or nothing."""
    row = next(row for row in table if row["scheme"] == chosen)
    ratio = speed(row) / speed(table[0])
    if ratio <= 1:
        return ""
    return (
        f"{chosen} takes {ratio:.2f} times as long as fp32 on this machine, over all shapes ({_times(row)} against "
        f"{_times(table[0])}); serve the fp32 graph here, or quantize again on the machine that "
        "will serve, with nothing else running"
    )


def _times(row: dict[str, Any]) -> str:
    """One time of a call: at 1x32, or at the first shape of a model too short for that."""
    shape = "1x32" if "1x32" in row["p50_ms"] else next(iter(row["p50_ms"]))
    return f"{row['p50_ms'][shape]:.2f} ms at {shape}"


def speed(row: dict[str, Any]) -> float:
    """Geometric mean of the p50 latencies, in ms."""
    return float(np.exp(np.mean(np.log(list(row["p50_ms"].values())))))


def line(row: dict[str, Any]) -> str:
    """One row of the table in words."""
    times = f", {_times(row)}" if "p50_ms" in row else ""
    return (
        f"{row['scheme']}: {METRIC_NAMES[row['metric']]} {100 * row['score']:.2f} in the worst batches (loses "
        f"{100 * row['drop']:.2f}), {100 * row['flips']:.2f} % of answers depend on the batch, logits by "
        f"{row['batch_logit_difference']:.1e}, {row['size_bytes'] / 1e6:.1f} MB{times}"
    )
