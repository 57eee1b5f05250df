"""Products left in fp32: which of them do most harm in INT8."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.dataset import Encoded
from compressor.evaluate import Predictor
from compressor.progress import Progress
from compressor.stages.quantize.scoring import logit_error, logits_in_batches

JUDGE_ROWS = 256  # training texts that tell which product does most harm

Write = Callable[[tuple[str, ...], Path], None]
"""Writes a candidate's graph with these products left in fp32."""
Open = Callable[[Path], Predictor]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Ranks the products of a student that become INT8."""

    source: Path
    """The student in fp32."""
    write: Write
    load: Open
    examples: Encoded
    scratch: Path
    seed: int

    def by_harm(self, names: Sequence[str], *, spared: tuple[str, ...] = (), end_s: float) -> list[str]:
        """Products, the one that does most harm first: each is left in fp32 once, beside those `spared` already.

        The most harmful one brings the logits of training texts nearest to those of fp32. At `end_s`, of
        `time.monotonic()`, the products that are left are not tried, and come last; one is at least.
        """
        row_N = np.random.default_rng(self.seed).permutation(len(self.examples))[:JUDGE_ROWS]
        fp32_NC = logits_in_batches(self.load(self.source), self.examples, row_N, 64, similar=True)
        trial, what = self.scratch / "trial.onnx", f"quantize ranks products to leave in fp32 ({len(spared) + 1})"
        progress, errors = Progress(what, total=len(names)), dict[str, float]()
        for name in names:
            self.write((*spared, name), trial)
            errors[name] = logit_error(self.load(trial), self.examples, row_N, fp32_NC)
            progress.advance()
            if time.monotonic() > end_s:
                break
        progress.close()
        trial.unlink()
        if len(errors) < len(names):
            log.warning("quantize tried %d of %d products in the time that it has for this", len(errors), len(names))
        return sorted(names, key=lambda name: errors.get(name, np.inf))


def likely_first(names: Sequence[str]) -> list[str]:
    """Products from the last layer to the first, second ones of feed-forward parts before all others.

    These read what GELU gives, where the outliers are; in the last layers they do most harm.
    """
    return sorted(names, key=lambda name: ("feed_forward/down" not in name, -names.index(name)))
