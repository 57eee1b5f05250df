"""In process: what each form of the classifier answers, and how long it takes.

Shape legend: N rows, C classes, B batch, S sequence.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import Run
from compressor.dataset import Encoded, encode, read_examples, texts_of
from compressor.evaluate import MODEL_FILE, Logits, OnnxPredictor, Predictor, TorchPredictor, measure, paired, predict
from compressor.latency import Call, shaped_call, summary, time_in_turns
from compressor.tasks import Task

TEACHER, STUDENT = "teacher_pytorch", "student_int8"
SHAPES = ((1, 32), (8, 32), (32, 32))  # batch, tokens
THROUGHPUT_BATCH = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int
    """Turns that each system gets, in process."""
    turn_s: float
    """Seconds of one turn, in process."""
    served_rounds: int
    """Turns that each served model gets at each concurrency."""
    served_turn_s: float
    """Seconds of one turn, served."""

    def time(self, calls: Mapping[str, Call], seed: int) -> dict[str, list[float]]:
        """Raw times in ms of each call."""
        return time_in_turns(calls, rounds=self.rounds, turn_s=self.turn_s, seed=seed)


FULL = Effort(rounds=10, turn_s=0.5, served_rounds=4, served_turn_s=4.0)
QUICK = Effort(rounds=3, turn_s=0.3, served_rounds=2, served_turn_s=1.0)


@dataclass(frozen=True)
class System:
    """One form of the classifier, loaded."""

    predictor: Predictor
    file: Path
    """Its weights."""
    encoded: Mapping[str, Encoded]
    """Validation and test, through its own tokenizer."""
    vocabulary: int
    """Tokens that every system timed beside it knows."""


def load_systems(run: Run, threads: int, scratch: Path) -> dict[str, System]:
    """Teacher and student in every form, each with `threads` threads; `scratch` takes the encoded texts."""
    import torch

    from compressor.checkpoints import load_classifier, load_tokenizer

    torch.set_num_threads(threads)

    tokenizers = {folder: load_tokenizer(folder) for folder in (run.teacher.path, run.int8.path)}

    def encoded(folder: Path) -> dict[str, Encoded]:
        return {
            split: encode(run.corpus, split, tokenizers[folder], run.max_tokens, cache=scratch)
            for split in ("validation", "test")
        }

    teacher, student = encoded(run.teacher.path), encoded(run.int8.path)
    # Teacher and student share their vocabulary; the shapes are timed on ids that both know.
    vocabulary = min(len(tokenizer) for tokenizer in tokenizers.values())

    def onnx(file: Path, texts: Mapping[str, Encoded]) -> System:
        return System(OnnxPredictor(file, threads=threads), file, texts, vocabulary)

    model = TorchPredictor(load_classifier(run.teacher.path, run.task))
    return {
        TEACHER: System(model, run.teacher.path / "model.safetensors", teacher, vocabulary),
        "teacher_onnx": onnx(run.onnx.path / "teacher" / MODEL_FILE, teacher),
        "student_fp32": onnx(run.onnx.path / "student" / MODEL_FILE, student),
        STUDENT: onnx(run.int8.path / MODEL_FILE, student),
    }


def measure_systems(
    systems: Mapping[str, System], task: Task, logits: Mapping[str, Logits], effort: Effort, seed: int
) -> dict[str, dict[str, Any]]:
    """By system: size, the task's metric on the test rows (from `logits`), latency and throughput."""
    latency = {"real_texts_batch_1": _real_calls(systems, 1, seed)}
    for batch, tokens in SHAPES:
        latency[f"{batch}x{tokens}"] = {
            name: shaped_call(system.predictor, batch, tokens, system.vocabulary) for name, system in systems.items()
        }
    times: dict[str, dict[str, list[float]]] = {}
    for what, calls in latency.items():
        log.info("in process: %s ...", what)
        times[what] = effort.time(calls, seed)
    log.info("in process: throughput ...")
    batches = effort.time(_real_calls(systems, THROUGHPUT_BATCH, seed), seed)
    teacher = systems[TEACHER]
    return {
        name: {
            "size_bytes": system.file.stat().st_size,
            "test": {
                **measure(task, logits[name], system.encoded["test"].label_N),
                "against_teacher": None
                if system is teacher
                else paired(task, logits[TEACHER], logits[name], teacher.encoded["test"].label_N),
            },
            "latency": {what: summary(times[what][name]) for what in times},
            f"throughput_batch_{THROUGHPUT_BATCH}_texts_per_s": throughput(batches[name], THROUGHPUT_BATCH),
        }
        for name, system in systems.items()
    }


def test_logits(systems: Mapping[str, System]) -> dict[str, Logits]:
    """Logits (N, C) of each system on the test rows."""
    return {name: predict(system.predictor, system.encoded["test"]) for name, system in systems.items()}


def throughput(times_ms: list[float], batch: int) -> float:
    """Texts a second of calls of `batch` texts each: all texts over all time."""
    return batch * len(times_ms) / (sum(times_ms) / 1000)


def time_tokenizer(run: Run, effort: Effort, seed: int) -> dict[str, Any]:
    """How long the student's tokenizer takes for one validation text; in-process latencies are without it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(run.int8.path / "tokenizer.json"))
    texts = validation_texts(run)
    order = itertools.cycle(np.random.default_rng(seed).permutation(len(texts)).tolist())
    return summary(effort.time({"tokenizer": lambda: tokenizer.encode(*texts[next(order)])}, seed)["tokenizer"])


def validation_texts(run: Run) -> list[tuple[str, ...]]:
    """The validation texts as they were read: one or two of each row."""
    return texts_of(read_examples(run.corpus.path / "validation.arrow"))


def _real_calls(systems: Mapping[str, System], batch: int, seed: int) -> dict[str, Call]:
    """A call of each system on the next `batch` validation texts, in one seeded order, padded to the longest."""

    def call(system: System) -> Call:
        texts = system.encoded["validation"]
        rows = np.random.default_rng(seed).permutation(len(texts))
        rows = np.resize(rows, max(1, len(rows) // batch) * batch).reshape(-1, batch)
        batches = itertools.cycle([texts.batch(row_B) for row_B in rows])

        return lambda: system.predictor(next(batches).inputs)

    return {name: call(system) for name, system in systems.items()}
