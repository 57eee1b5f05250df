"""Products left in fp32: which of them do most harm in INT8."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from compressor.dataset import Encoded
from compressor.evaluate import Predictor
from compressor.progress import Progress
from compressor.stages.quantize.rewriting import products
from compressor.stages.quantize.scoring import logit_error, logits_in_batches

JUDGE_ROWS = 256  # training texts that tell which product does most harm

Write = Callable[[tuple[str, ...], Path], None]
"""Writes a candidate's graph with these products left in fp32."""
Open = Callable[[Path], Predictor]

log = logging.getLogger(__name__)


def most_harmful(
    source: Path, write: Write, load: Open, examples: Encoded, scratch: Path, seed: int, *, end_s: float
) -> list[str]:
    """Names of products, the most harmful first: each is left in fp32 once, with all others in INT8.

    The most harmful one brings the logits of training texts nearest to those of fp32. At `end_s`, of
    `time.monotonic()`, the products that are left are not tried; one is at least.
    """
    row_N = np.random.default_rng(seed).permutation(len(examples))[:JUDGE_ROWS]
    fp32_NC = logits_in_batches(load(source), examples, row_N, 64, similar=True)
    names, trial = [item.name for item in products(onnx.load(source))], scratch / "trial.onnx"
    progress, errors = Progress("quantize leaves each product in fp32 once", total=len(names)), dict[str, float]()
    for name in names:
        write((name,), trial)
        errors[name] = logit_error(load(trial), examples, row_N, fp32_NC)
        progress.advance()
        if time.monotonic() > end_s:
            break
    progress.close()
    trial.unlink()
    if len(errors) < len(names):
        log.warning("quantize tried %d of %d products in the time that it has for this", len(errors), len(names))
    return sorted(errors, key=lambda name: errors[name])
