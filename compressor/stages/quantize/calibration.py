"""Activation ranges for static INT8, from real tokens only: texts run one by one at their own length.

Shape legend: T tokens, K channels, H bins of a histogram.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compressor.dataset import Encoded
from compressor.errors import GateError
from compressor.evaluate import INPUT_NAMES
from compressor.onnx_graph import Dense, dense_products, inputs_of
from compressor.stages.quantize.candidates import Method

BINS = 2048
PERCENTILE = 0.0001  # share of the values that may lie outside on either side
LEVELS = 128  # of one sign in 8 bits
THRESHOLDS = 96  # tried by the entropy method

Floats = NDArray[np.float64]


@dataclass
class Activation:
    """What one input of dense products was seen to hold."""

    low_K: Floats
    high_K: Floats
    counts_H: Floats
    """How many values were in each of equal bins from the lowest to the highest."""

    def range(self, method: Method) -> tuple[float, float]:
        """Lowest and highest value that INT8 should hold."""
        low, high = float(self.low_K.min()), float(self.high_K.max())
        match method:
            case "min-max":
                return low, high
            case "percentile":
                share_H = np.cumsum(self.counts_H) / self.counts_H.sum()
                edges = np.linspace(low, high, BINS + 1)
                first, last = np.searchsorted(share_H, (PERCENTILE, 1 - PERCENTILE))
                return float(edges[first]), float(edges[min(last + 1, BINS)])
            case "entropy":
                limit = entropy_threshold(*self._sizes(low, high))
                return max(low, -limit), min(high, limit)
            case _:
                assert_never(method)

    def _sizes(self, low: float, high: float) -> tuple[Floats, float]:
        """Histogram of the values' sizes, and the largest."""
        centres = low + (np.arange(BINS) + 0.5) * (high - low) / BINS
        largest = max(abs(low), abs(high))
        counts, _ = np.histogram(np.abs(centres), bins=BINS, range=(0.0, largest), weights=self.counts_H)
        return counts, largest


def entropy_threshold(counts_H: Floats, largest: float) -> float:
    """The size at which to cut, so that the 8-bit histogram tells least from the true one (Kullback-Leibler).

    As in TensorRT's calibration: what is cut off counts for the last bin that is kept.
    """
    best, threshold = np.inf, largest
    for stop in np.unique(np.linspace(LEVELS, BINS, THRESHOLDS, dtype=int)):
        kept = counts_H[:stop]
        true = kept.copy()
        true[-1] += counts_H[stop:].sum()
        level = np.arange(stop) * LEVELS // stop
        full = kept > 0
        sums, numbers = np.bincount(level, kept, LEVELS), np.bincount(level, full, LEVELS)
        means = np.divide(sums, numbers, out=np.zeros(LEVELS), where=numbers > 0)
        coarse = np.where(full, means[level], 0.0)
        both = (true > 0) & (coarse > 0)
        if not both.any() or (true > 0).sum() > both.sum() + 1:
            continue
        p, q = true[both] / true[both].sum(), coarse[both] / coarse[both].sum()
        divergence = float((p * np.log(p / q)).sum()) + float(counts_H[stop:].sum() / counts_H.sum())
        if divergence < best:
            best, threshold = divergence, largest * stop / BINS
    return threshold


def texts(examples: Encoded, rows: int, inputs: list[str], seed: int) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Inputs of some training texts, one by one at their own length: padding never sets a range."""
    for row in np.random.default_rng(seed).permutation(len(examples))[:rows]:
        size = int(examples.lengths(np.array([row]))[0])
        feeds = dict(zip(INPUT_NAMES, examples.padded_to(size).batch(np.array([row])).inputs, strict=True))
        yield {name: feeds[name] for name in inputs}


def calibrate(source: Path, examples: Encoded, rows: int, seed: int) -> Mapping[str, Activation]:
    """By name: every input of a dense product, as `rows` training texts fill it.

    Two passes: ranges first, then histograms within them. Raises GateError if a value is no number.
    """
    model = onnx.load(source)
    products = dense_products(model)
    names, inputs = list(dict.fromkeys(dense.input for dense in products)), inputs_of(model)
    session = _with_outputs(model, names)
    found: dict[str, Activation] = {}
    for feeds in texts(examples, rows, inputs, seed):
        for name, value in zip(names, session.run(names, feeds), strict=True):
            value_TK = value.reshape(-1, value.shape[-1])
            low_K, high_K = value_TK.min(axis=0), value_TK.max(axis=0)
            if not (np.isfinite(low_K).all() and np.isfinite(high_K).all()):
                raise GateError(_no_number(name, products, feeds))
            if name not in found:
                found[name] = Activation(low_K.astype(np.float64), high_K.astype(np.float64), np.zeros(BINS))
            np.minimum(found[name].low_K, low_K, out=found[name].low_K)
            np.maximum(found[name].high_K, high_K, out=found[name].high_K)
    for feeds in texts(examples, rows, inputs, seed):
        for name, value in zip(names, session.run(names, feeds), strict=True):
            seen = found[name]
            low, high = seen.low_K.min(), seen.high_K.max()
            place = ((value.ravel() - low) * (BINS / max(high - low, 1e-30))).astype(np.int64)
            seen.counts_H += np.bincount(np.clip(place, 0, BINS - 1), minlength=BINS)
    return found


def _no_number(name: str, products: Sequence[Dense], feeds: Mapping[str, NDArray[np.int64]]) -> str:
    """What is said of the first activation in the graph with a value that is no number."""
    reader = next(dense.name for dense in products if dense.input == name)
    return (
        f"finite gate: {name}, which the product {reader} reads, has values that are no numbers (NaN or infinite) in a "
        f"training text of {feeds['input_ids'].shape[1]} tokens; the bound is 0; look for weights before it that are "
        "far larger than others, and export a student whose training did not fail"
    )


def _with_outputs(model: Any, names: list[str]) -> Any:
    """A session on one thread that also gives the values of these names."""
    import onnxruntime as ort

    model = copy.deepcopy(model)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
