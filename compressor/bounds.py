"""What an INT8 candidate may lose: the stage chooses by it, and the report says by it why another one is out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Of a text's logits between batches, where no answer may depend on the batch: that none was seen to is luck above it.
MAX_BATCH_DIFFERENCE = 1e-5
# Between a regression's scores and fp32's, in shares of the spread of these: its metrics are correlations, which see
# neither another scale nor another offset.
MAX_SCORE_DIFFERENCE = 0.25
# For the rounding of shares of rows, not for the gate.
TOLERANCE = 1e-12

Row = Mapping[str, Any]
"""A line of the table of candidates."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a candidate may lose."""

    max_metric_drop: float
    """Against fp32, in the batch composition where it is largest."""
    max_label_flips: float
    """Share of the validation texts whose answer depends on the batch; with 0 their logits may not either."""
    min_agreement: float
    """Share of the validation texts with fp32's answer; a candidate may have less if so few rows cannot show it."""

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Bounds:
        """Those of a recipe's [quantize]; runs of old versions have none of the agreement."""
        return cls(
            max_metric_drop=section["max_metric_drop"],
            max_label_flips=section["max_label_flips"],
            min_agreement=section.get("min_agreement", 0.0),
        )

    @property
    def max_batch_difference(self) -> float | None:
        """What a text's logits may differ by between batches; None where answers may."""
        return MAX_BATCH_DIFFERENCE if self.max_label_flips == 0 else None

    def drop_holds(self, row: Row) -> bool:
        """Whether a line of the table loses little enough."""
        return bool(row["drop"] <= self.max_metric_drop + TOLERANCE)

    def flips_hold(self, row: Row) -> bool:
        """Whether few enough answers were seen to depend on the batch."""
        return bool(row["flips"] <= self.max_label_flips + TOLERANCE)

    def logits_hold(self, row: Row) -> bool:
        """Whether logits depend little enough on the batch."""
        bound = self.max_batch_difference
        return bound is None or bool(row["batch_logit_difference"] <= bound)

    def agreement_holds(self, row: Row) -> bool:
        """Whether it says what fp32 says: the interval of the agreement reaches the bound."""
        return bool(most_agreement(row) >= self.min_agreement)

    def scores_hold(self, row: Row) -> bool:
        """Whether a regression's answers are close enough to fp32's; labels, and runs of old versions, have no such."""
        return bool(row.get("score_difference_fp32", 0.0) <= MAX_SCORE_DIFFERENCE)

    def ignores_the_batch(self, row: Row) -> bool:
        """Whether neither answers nor logits depend too much on the batch."""
        return self.flips_hold(row) and self.logits_hold(row)

    def faults(self, row: Row) -> list[str]:
        """What a line of the table does not hold, in words."""
        checks = {
            f"loses {100 * row['drop']:.2f} points": self.drop_holds(row),
            f"{100 * row['flips']:.2f} % of answers depend on the batch": self.flips_hold(row),
            f"logits differ between batches by {row['batch_logit_difference']:.1e}": self.logits_hold(row),
            f"at most {100 * most_agreement(row):.2f} % of answers are those of fp32": self.agreement_holds(row),
            f"scores differ from those of fp32 by {row.get('score_difference_fp32', 0.0):.2f} of their spread": (
                self.scores_hold(row)
            ),
        }
        return [fault for fault, holds in checks.items() if not holds]

    def hold(self, row: Row) -> bool:
        """Whether there is no fault."""
        return not self.faults(row)

    def excess(self, row: Row) -> float:
        """How far a line is outside, in metric, flips, logits, agreement and scores together."""
        disagrees = 0.0 if self.agreement_holds(row) else self.min_agreement - row["agreement_fp32"]
        differs = 0.0 if self.logits_hold(row) else row["batch_logit_difference"]
        scores = row.get("score_difference_fp32", 0.0) - MAX_SCORE_DIFFERENCE
        over = (row["drop"] - self.max_metric_drop, row["flips"] - self.max_label_flips, differs, disagrees, scores)
        return float(sum(max(0.0, value) for value in over))


def most_agreement(row: Row) -> float:
    """The most that the share of answers as fp32's may be (95 %).

    A regression has the difference of its scores instead.
    """
    return float(row.get("agreement_fp32_95", [1.0, 1.0])[1])
