"""Products left in fp32: the most harmful ones, found one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

from compressor.dataset import Encoded
from compressor.evaluate import OnnxPredictor
from compressor.stages.quantize.rewriting import products
from compressor.stages.quantize.scoring import logit_error, logits_in_batches

JUDGE_ROWS = 256  # training texts that tell which product does most harm

Write = Callable[[tuple[str, ...], Path], None]
"""Writes a candidate's graph with these products left in fp32."""


def most_harmful(
    source: Path, write: Write, examples: Encoded, threads: int, scratch: Path, seed: int
) -> Iterator[tuple[str, ...]]:
    """Names of products to leave in fp32: one, then two and so on, each the best that can be added to those before.

    The best leaves the logits of training texts nearest to those of fp32.
    """
    row_N = np.random.default_rng(seed).permutation(len(examples))[:JUDGE_ROWS]
    fp32_NC = logits_in_batches(OnnxPredictor(source, threads=threads), examples, row_N, 64, similar=True)
    names, trial = [item.name for item in products(onnx.load(source))], scratch / "trial.onnx"
    chosen: tuple[str, ...] = ()
    while len(chosen) < len(names):
        errors = {}
        for name in names:
            if name not in chosen:
                write((*chosen, name), trial)
                errors[name] = logit_error(OnnxPredictor(trial, threads=threads), examples, row_N, fp32_NC)
        trial.unlink()
        chosen = (*chosen, min(errors, key=lambda name: errors[name]))
        yield chosen
