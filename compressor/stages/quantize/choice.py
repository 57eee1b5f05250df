"""Which candidate wins: the fastest within the bounds; and what is said if there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.errors import GateError
from compressor.evaluate import METRIC_NAMES

# Timings closer than this are noise; among such candidates the one that says what fp32 says most often wins.
SAME_SPEED = 1.1
# For the rounding of shares of rows, not for the gate.
TOLERANCE = 1e-12

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a candidate may lose."""

    max_metric_drop: float
    """Against fp32, in the batch composition where it is largest."""
    max_label_flips: float
    """Share of the validation texts whose answer depends on the batch."""

    def drop_holds(self, row: dict[str, Any]) -> bool:
        """Whether a line of the table loses little enough."""
        return bool(row["drop"] <= self.max_metric_drop + TOLERANCE)

    def flips_hold(self, row: dict[str, Any]) -> bool:
        """Whether its answers depend little enough on the batch."""
        return bool(row["flips"] <= self.max_label_flips + TOLERANCE)

    def hold(self, row: dict[str, Any]) -> bool:
        """Both."""
        return self.drop_holds(row) and self.flips_hold(row)

    def excess(self, row: dict[str, Any]) -> float:
        """How far a line is outside, in metric and flips together."""
        return float(max(0.0, row["drop"] - self.max_metric_drop) + max(0.0, row["flips"] - self.max_label_flips))


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
            f"{100 * nearest['drop']:.2f} points on the validation rows, the bound is "
            f"{100 * bounds.max_metric_drop:.2f} (quantize.max_metric_drop), and {100 * nearest['flips']:.2f} % of "
            f"answers depend on the batch, the bound is {100 * bounds.max_label_flips:.2f} (quantize.max_label_flips); "
            + "; ".join(line(row) for row in table)
            + hint
        )
    fastest = min(speed(row) for row in passed)
    equal = [row for row in passed if speed(row) <= fastest * SAME_SPEED]
    chosen = min(equal, key=lambda row: (-row["agreement_fp32"], row["drop"], row["fp32_logit_difference"]))
    log.info(
        "quantize chose %s: loses %.2f points (bound %.2f), %.2f %% of answers depend on the batch (bound %.2f)",
        chosen["scheme"],
        100 * chosen["drop"],
        100 * bounds.max_metric_drop,
        100 * chosen["flips"],
        100 * bounds.max_label_flips,
    )
    return str(chosen["scheme"])


def speed(row: dict[str, Any]) -> float:
    """Geometric mean of the p50 latencies, in ms."""
    return float(np.exp(np.mean(np.log(list(row["p50_ms"].values())))))


def line(row: dict[str, Any]) -> str:
    """One row of the table in words."""
    times = f", {row['p50_ms']['1x32']:.2f} ms at 1x32" if "p50_ms" in row else ""
    return (
        f"{row['scheme']}: {METRIC_NAMES[row['metric']]} {100 * row['score']:.2f} in the worst batches (loses "
        f"{100 * row['drop']:.2f}), {100 * row['flips']:.2f} % of answers depend on the batch, "
        f"{row['size_bytes'] / 1e6:.1f} MB{times}"
    )
