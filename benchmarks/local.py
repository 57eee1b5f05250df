"""In process: what each form of the classifier answers, and how long it takes.

Shape legend: N rows, C classes, B batch, S sequence.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bert_base import BERT_BASE, bert_base
from benchmarks.peers import token_peers
from benchmarks.runs import Run, forms_of
from compressor.dataset import Encoded, encode, read_examples, texts_of
from compressor.evaluate import (
    MODEL_FILE,
    Labels,
    Logits,
    OnnxPredictor,
    Predictor,
    TorchPredictor,
    measure,
    paired,
)
from compressor.latency import MIN_CALLS, Call, shaped_call, summary, time_in_turns
from compressor.tasks import Task

TEACHER, STUDENT = "teacher_pytorch", "student_int8"
THROUGHPUT_BATCH = 32
TEST_BATCH = 64
THROUGHPUT = f"throughput_batch_{THROUGHPUT_BATCH}_texts_per_s"
REAL_TEXTS = "real_texts_batch_1"
CallsOf = Callable[[int], Mapping[str, Call]]
"""Number of a round -> what is called in it."""
_SEEDS = 1000  # a round's order comes from its own seed; one benchmark has fewer rounds than this

log = logging.getLogger(__name__)


def always(calls: Mapping[str, Call]) -> CallsOf:
    """The same calls in every round."""
    return lambda number: calls


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure, and how much."""

    rounds: int
    """Turns that each system gets, in process; a ratio is taken in each round."""
    turn_s: float
    """Seconds of one turn, in process."""
    served_rounds: int
    """Turns that each served model gets at each concurrency and each rate."""
    served_turn_s: float
    """Seconds of one turn, served."""
    shapes: tuple[tuple[int, int], ...] = tuple(itertools.product((1, 8, 32), (8, 32, 128)))
    """Batch and tokens of the calls, in process."""
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    """Clients of the closed loop."""
    load_shares: tuple[float, ...] = (0.3, 0.6, 0.9)
    """Arrival rates of the open loop, as shares of the most that a model answered in the closed loop."""
    test_rows: int | None = None
    """How many test rows are answered, from the first on; None = all."""
    starts: int = 3
    """Processes that are started to measure one system's start and memory."""

    def time(self, calls: Mapping[str, Call], seed: int) -> dict[str, list[float]]:
        """Raw times in ms of each call."""
        rounds = self.time_rounds(always(calls), seed)
        return {name: list(itertools.chain(*times)) for name, times in rounds.items()}

    def time_rounds(self, calls_of: CallsOf, seed: int, *, least: int = MIN_CALLS) -> dict[str, list[list[float]]]:
        """Raw times in ms of each call, round by round; in a round each call gets one turn, in an order of its own."""
        turns = [
            time_in_turns(calls_of(number), rounds=1, turn_s=self.turn_s, seed=_SEEDS * seed + number, least=least)
            for number in range(self.rounds)
        ]
        return {name: [turn[name] for turn in turns] for name in turns[0]}


FULL = Effort(rounds=8, turn_s=0.4, served_rounds=4, served_turn_s=4.0)
QUICK = Effort(
    rounds=3,
    turn_s=0.15,
    served_rounds=2,
    served_turn_s=1.0,
    shapes=((1, 32), (8, 32)),
    concurrency=(1, 8),
    load_shares=(0.5,),
    test_rows=200,
    starts=1,
)


@dataclass(frozen=True, kw_only=True)
class System:
    """One form of the classifier, loaded."""

    predictor: Predictor
    size_bytes: int
    """Of its weights."""
    encoded: Mapping[str, Encoded]
    """Validation and test, through its own tokenizer."""
    is_trained: bool = True
    """Whether its answers mean anything."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured besides teacher and student."""

    bert_base: bool = False
    """BERT-base in PyTorch with random weights: latency needs no training."""
    peers: Sequence[str] = ()
    """Names of `peers.PEERS`."""


def load_systems(run: Run, threads: int, scratch: Path, wanted: Wanted) -> dict[str, System]:
    """Teacher and student in every form and what is wanted beside them, each with `threads` threads.

    `scratch` takes the encoded texts.
    """
    import torch

    from compressor.checkpoints import load_classifier, load_tokenizer

    torch.set_num_threads(threads)

    def encoded(folder: Path) -> dict[str, Encoded]:
        tokenizer = load_tokenizer(folder)
        return {
            split: encode(run.corpus, split, tokenizer, run.max_tokens, cache=scratch)
            for split in ("validation", "test")
        }

    teacher, int8 = encoded(run.teacher.path), encoded(run.int8.path)
    student = encoded(run.onnx.path / "student")  # of INT8 the vocabulary may be smaller

    def onnx(file: Path, texts: Mapping[str, Encoded]) -> System:
        predictor = OnnxPredictor(file, threads=threads)
        return System(predictor=predictor, size_bytes=file.stat().st_size, encoded=texts)

    found = {
        TEACHER: System(
            predictor=TorchPredictor(load_classifier(run.teacher.path, run.task)),
            size_bytes=(run.teacher.path / "model.safetensors").stat().st_size,
            encoded=teacher,
        ),
        "teacher_onnx": onnx(run.onnx.path / "teacher" / MODEL_FILE, teacher),
        "student_fp32": onnx(run.onnx.path / "student" / MODEL_FILE, student),
        STUDENT: onnx(run.int8.path / MODEL_FILE, int8),
    }
    if wanted.bert_base:
        model = bert_base(run.task, len(load_tokenizer(run.teacher.path)))
        found[BERT_BASE] = System(
            predictor=TorchPredictor(model),
            size_bytes=4 * model.num_parameters(),  # fp32
            encoded=student,
            is_trained=False,
        )
    forms = forms_of(run)
    for name, peer in token_peers(wanted.peers).items():
        log.info("in process: %s ...", peer.about)
        predictor, size_bytes = peer.open(forms, threads)
        texts = int8 if peer.reads_int8 else student
        found[name] = System(predictor=predictor, size_bytes=size_bytes, encoded=texts)
    return found


def known_tokens(run: Run) -> int:
    """Tokens that every system knows: shapes are timed on random ids below this number."""
    from compressor.checkpoints import load_tokenizer

    return min(len(load_tokenizer(folder)) for folder in (run.teacher.path, run.int8.path))


def measure_systems(
    systems: Mapping[str, System],
    task: Task,
    logits: Mapping[str, Logits],
    effort: Effort,
    *,
    vocabulary: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """By system: size, the task's metric on the test rows (from `logits`), latency and throughput."""
    log.info("in process: %s ...", REAL_TEXTS)
    times = {REAL_TEXTS: effort.time_rounds(real_calls(systems, 1, seed), seed, least=calls_of_a_round(1))}
    for batch, tokens in effort.shapes:
        what = f"{batch}x{tokens}"
        log.info("in process: %s ...", what)
        calls = {name: shaped_call(system.predictor, batch, tokens, vocabulary) for name, system in systems.items()}
        times[what] = effort.time_rounds(always(calls), seed)
    log.info("in process: throughput ...")
    batches = effort.time_rounds(real_calls(systems, THROUGHPUT_BATCH, seed), seed)
    label_N = systems[TEACHER].encoded["test"].label_N[: effort.test_rows]
    found: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        found[name] = {
            "size_bytes": system.size_bytes,
            "test": None,
            "latency": {what: rounds_summary(times[what][name]) for what in times},
            THROUGHPUT: throughput(list(itertools.chain(*batches[name])), THROUGHPUT_BATCH),
            "throughput_by_round_texts_per_s": [throughput(turn, THROUGHPUT_BATCH) for turn in batches[name]],
        }
        if system.is_trained:
            against = None if name == TEACHER else paired(task, logits[TEACHER], logits[name], label_N)
            found[name]["test"] = {**measure(task, logits[name], label_N), "against_teacher": against}
    return found


def rounds_summary(times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Percentiles over all calls, and the p50 of each round."""
    found: dict[str, Any] = dict(summary(list(itertools.chain(*times_ms))))
    return {**found, "p50_by_round_ms": [float(np.median(turn)) for turn in times_ms]}


def test_logits(systems: Mapping[str, System], effort: Effort) -> dict[str, Logits]:
    """Logits (N, C) of each trained system on the test rows."""
    found = {}
    for name, system in systems.items():
        if system.is_trained:
            log.info("in process: %s answers the test texts ...", name)
            found[name] = _first_logits(system, effort.test_rows or len(system.encoded["test"]))
    return found


def _first_logits(system: System, rows: int) -> Logits:
    texts = system.encoded["test"]
    batches = texts.batches_by_length(TEST_BATCH, np.arange(min(rows, len(texts))))
    answered = [(batch.row_B, system.predictor(batch.inputs)) for batch in batches]
    order_N = np.concatenate([row_B for row_B, _ in answered]).argsort()
    return np.asarray(np.concatenate([logits_BC for _, logits_BC in answered])[order_N])


def read_test(run: Run, effort: Effort) -> tuple[list[tuple[str, ...]], Labels]:
    """Texts and labels (N,) of the test rows that are answered."""
    test = read_examples(run.corpus.path / "test.arrow")
    return texts_of(test)[: effort.test_rows], np.array(test["label"])[: effort.test_rows]


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


def measurement_overhead(systems: Mapping[str, Mapping[str, Any]], effort: Effort, seed: int) -> dict[str, Any]:
    """What an empty call takes, timed the same way, and its share of the fastest p50 that was measured."""
    empty_ms = float(np.median(effort.time({"empty": lambda: None}, seed)["empty"]))
    fastest = min(times["p50_ms"] for system in systems.values() for times in system["latency"].values())
    return {"empty_call_p50_ms": empty_ms, "fastest_p50_ms": fastest, "share": empty_ms / fastest}


def validation_texts(run: Run) -> list[tuple[str, ...]]:
    """The validation texts as they were read: one or two of each row."""
    return texts_of(read_examples(run.corpus.path / "validation.arrow"))


def calls_of_a_round(batch: int) -> int:
    """Different calls on real texts in a round: so few that the slowest system makes each of them in its turn."""
    return 8 if batch == 1 else MIN_CALLS


def rows_of_a_round(rows: int, batch: int, seed: int, number: int) -> NDArray[np.intp]:
    """Row numbers (calls, batch), of `rows`, of a round's calls: the same for every system, others in each round."""
    order_N = np.random.default_rng([seed, number]).permutation(rows)
    return np.resize(order_N, (calls_of_a_round(batch), batch))


def real_calls(systems: Mapping[str, System], batch: int, seed: int) -> CallsOf:
    """Calls of each system on the validation texts of the round, padded to the longest of a call."""

    def calls_of(number: int) -> dict[str, Call]:
        def call(system: System) -> Call:
            texts = system.encoded["validation"]
            rows_KB = rows_of_a_round(len(texts), batch, seed, number)
            batches = itertools.cycle([texts.batch(row_B) for row_B in rows_KB])
            return lambda: system.predictor(next(batches).inputs)

        return {name: call(system) for name, system in systems.items()}

    return calls_of
