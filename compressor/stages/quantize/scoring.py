"""Candidates on the validation rows, in the batches that a server makes; and how long a call takes.

Shape legend: N rows, C classes, P compositions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from compressor import onnx_graph
from compressor.dataset import Encoded
from compressor.errors import GateError
from compressor.evaluate import MODEL_FILE, Logits, OnnxPredictor, Predictor, answers, same_answers, scores
from compressor.latency import shaped_call, time_in_turns
from compressor.models import score_scale
from compressor.statistics import mcnemar, wilson
from compressor.tasks import Task

# What a server makes of waiting texts: one alone, some of similar length, and a full batch of all lengths, padded to
# its longest.
COMPOSITIONS: Mapping[str, tuple[int, bool]] = {
    "1": (1, True),
    "8": (8, True),
    "64": (64, True),
    "64 mixed": (64, False),
}
"""By name: rows of a batch, and whether they are of similar length."""
LATENCY_SHAPES = ((1, 16), (1, 32), (1, 128), (8, 32))  # batch, tokens
SCORED_ROWS = 5000  # at most; of a larger validation set a fixed sample

Rows = NDArray[np.int64]


class ExactPredictor(OnnxPredictor):
    """An ONNX classifier as a processor with VNNI computes it, on one without: slower, but no product saturates."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import onnxruntime as ort

        super().__init__(path, threads=threads)
        options = self._session.get_session_options()
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = ort.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )


class Scorer:
    """Scores graphs on the same rows, against the same fp32 student and teacher."""

    def __init__(
        self,
        task: Task,
        validation: Encoded,
        teacher_NC: Logits,
        threads: int,
        *,
        fp32: Path,
        fp32_validation: Encoded,
        predictor: type[OnnxPredictor] = OnnxPredictor,
    ) -> None:
        """`fp32_validation` are the same rows, as the fp32 student's tokenizer cuts them."""
        rows = np.random.default_rng(0).permutation(len(validation))[:SCORED_ROWS]
        self.task, self.validation, self.row_N = task, validation, np.sort(rows)
        self._label_N, self._teacher_NC = validation.label_N[self.row_N], teacher_NC[self.row_N]
        self._threads, self._predictor = threads, predictor
        self.fp32 = self._by_composition("fp32", fp32, fp32_validation)

    def row(self, scheme: str, graph: Path, excluded: tuple[str, ...] = ()) -> dict[str, Any]:
        """One line of the table of candidates, but for its times.

        `score` is the worst of all compositions, `drop` the largest loss against fp32 in the same one. Between batches
        scores of a regression without a range of its own differ by shares of their spread; `score_difference_fp32`, of
        any regression, is the root mean square of the difference to fp32 over the spread of fp32's scores. Raises
        GateError if it gives logits that are no numbers.
        """
        found = self.fp32 if scheme == "fp32" else self._by_composition(scheme, graph, self.validation)
        metric = {name: self._score(logits_NC) for name, logits_NC in found.items()}
        fp32 = {name: self._score(logits_NC) for name, logits_NC in self.fp32.items()}
        alone_NC = found["1"]
        apart_N = ~np.all([same_answers(self.task, alone_NC, other_NC) for other_NC in found.values()], axis=0)
        every_PNC = np.stack(list(found.values()))
        _, unit = score_scale(self.task, lambda: self.fp32["1"])
        facts = {
            "scheme": scheme,
            "excluded": list(excluded),
            "metric": self.task.metric,
            "score": min(metric.values()),
            "scores": metric,
            "drop": max(fp32[name] - metric[name] for name in found),
            "flips": float(apart_N.mean()),
            "batch_logit_difference": float((every_PNC.max(axis=0) - every_PNC.min(axis=0)).max()) / (unit or 1.0),
            "fp32_logit_difference": float(np.abs(alone_NC - self.fp32["1"]).max()),
            "agreement_fp32": float(same_answers(self.task, alone_NC, self.fp32["1"]).mean()),
            "agreement_teacher": float(same_answers(self.task, alone_NC, self._teacher_NC).mean()),
            "size_bytes": graph.stat().st_size,
            "rows": len(self.row_N),
        }
        if self.task.is_regression:
            fp32_NC = self.fp32["1"].astype(np.float64)
            error = float(np.sqrt(np.square(alone_NC - fp32_NC).mean()))
            facts["score_difference_fp32"] = error / (float(fp32_NC.std()) or 1.0)
        else:
            same = int(same_answers(self.task, alone_NC, self.fp32["1"]).sum())
            facts["agreement_fp32_95"] = list(wilson(same, len(self.row_N)))
            right = [answers(self.task, logits_NC) == self._label_N for logits_NC in (alone_NC, self.fp32["1"])]
            facts["mcnemar_fp32"] = mcnemar(right[0], right[1])["p_value"]
        return facts

    def _score(self, logits_NC: Logits) -> float:
        return scores(self.task, logits_NC, self._label_N)[self.task.metric]

    def _by_composition(self, scheme: str, graph: Path, examples: Encoded) -> dict[str, Logits]:
        predictor = self._predictor(graph, threads=self._threads)
        found = {}
        for name, (size, similar) in COMPOSITIONS.items():
            found[name] = logits_in_batches(predictor, examples, self.row_N, size, similar=similar)
            broken = int((~np.isfinite(found[name]).all(axis=1)).sum())
            if broken:
                remedy = "; export the student again" if scheme.startswith("fp32") else ""
                raise GateError(
                    f"accuracy gate: {scheme} gives logits that are no numbers (NaN or infinite) for {broken} of "
                    f"{len(self.row_N)} validation texts in batches of {name}; the bound is 0{remedy}"
                )
        return found


def logits_in_batches(predictor: Predictor, examples: Encoded, row_N: Rows, size: int, *, similar: bool) -> Logits:
    """Logits (N, C) of the rows asked for, in batches of `size`: of similar length, or as they come."""
    order_N = np.random.default_rng(1).permutation(len(row_N))
    if similar:
        order_N = np.argsort(examples.lengths(row_N), kind="stable")
    parts = [
        predictor(examples.batch(row_N[order_N[first : first + size]]).inputs) for first in range(0, len(row_N), size)
    ]
    found = np.empty((len(row_N), parts[0].shape[1]), dtype=np.float32)
    found[order_N] = np.concatenate(parts)
    return found


def latency_shapes(student: Path) -> list[tuple[int, int]]:
    """The shapes that the model in a folder has positions for; at least one."""
    positions = json.loads((student / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return [(batch, tokens) for batch, tokens in LATENCY_SHAPES if tokens <= positions] or [(1, positions)]


def add_times(table: list[dict[str, Any]], graphs: Mapping[str, Path], student: Path, threads: int) -> None:
    """Put the p50 of a call at each shape into each line, in ms; the candidates take turns."""
    vocabulary = len(onnx_graph.word_embeddings(onnx.load(student / MODEL_FILE))[1])
    predictors = {name: OnnxPredictor(path, threads=threads) for name, path in graphs.items()}
    for row in table:
        row["p50_ms"] = {}
    for batch, tokens in latency_shapes(student):
        calls = {name: shaped_call(predictor, batch, tokens, vocabulary) for name, predictor in predictors.items()}
        times = time_in_turns(calls)
        for row in table:
            row["p50_ms"][f"{batch}x{tokens}"] = float(np.median(times[row["scheme"]]))


def logit_error(predictor: Predictor, examples: Encoded, row_N: Rows, fp32_NC: Logits) -> float:
    """Root mean square of the difference to fp32 logits on the rows asked for."""
    found_NC = logits_in_batches(predictor, examples, row_N, 64, similar=True)
    return float(np.sqrt(np.square(found_NC - fp32_NC).mean()))
