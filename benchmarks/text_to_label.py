"""From text to label in process: our INT8 student with its tokenizer, and the peers that read texts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.forms import Forms
from benchmarks.local import (
    STUDENT,
    THROUGHPUT,
    THROUGHPUT_BATCH,
    CallsOf,
    Effort,
    calls_of_a_round,
    read_test,
    rounds_summary,
    rows_of_a_round,
    throughput,
    validation_texts,
)
from benchmarks.peers import Classify, text_peers
from benchmarks.runs import Run, forms_of
from compressor.evaluate import Logits, measure, paired, queries
from compressor.latency import Call
from compressor.tasks import Task
from serving.inprocess import Files
from serving.model import Text

log = logging.getLogger(__name__)


def files_of(forms: Forms) -> Files:
    """The INT8 student's files, as the server reads them."""
    return Files(
        onnx=forms.int8_graph,
        tokenizer=forms.int8 / "tokenizer.json",
        labels=forms.labels,
        is_pair=forms.is_pair,
        max_tokens=forms.max_tokens,
        pad_id=forms.pad_id,
    )


def open_student(forms: Forms, threads: int) -> Classify:
    """Our way from texts to labels, or to the numbers of a regression: as on the server."""
    logits_of = files_of(forms).open_batches(threads)

    def classify(texts: Sequence[Text]) -> list[Any]:
        if not forms.labels:
            return [float(logits_C[0]) for logits_C in logits_of(texts)]
        return [forms.labels[int(logits_C.argmax())] for logits_C in logits_of(texts)]

    return classify


def measure_texts(
    run: Run, teacher_NC: Logits, effort: Effort, *, peers: Sequence[str], threads: int, seed: int
) -> dict[str, dict[str, Any]]:
    """By system, ours first: size, quality on the test texts, latency of one text, throughput of batches.

    `teacher_NC` are the teacher's logits of the test rows. Times are of validation texts.
    """
    forms, task = forms_of(run), run.task
    texts = queries(validation_texts(run))
    test, label_N = read_test(run, effort)
    test_texts = queries(test)
    systems = {STUDENT: (open_student(forms, threads), forms.int8_graph.stat().st_size)}
    for name, peer in text_peers(peers).items():
        log.info("text to label: %s ...", peer.about)
        systems[name] = peer.open(forms, threads)
    classifiers = {name: classify for name, (classify, _) in systems.items()}
    one = effort.time_rounds(_calls(classifiers, texts, 1, seed), seed, least=calls_of_a_round(1))
    many = effort.time_rounds(_calls(classifiers, texts, THROUGHPUT_BATCH, seed), seed)
    found = {}
    for name, (classify, size_bytes) in systems.items():
        logits_NC = _as_logits(task, _in_batches(classify, test_texts))
        found[name] = {
            "size_bytes": size_bytes,
            "test": {
                **measure(task, logits_NC, label_N),
                "against_teacher": paired(task, teacher_NC, logits_NC, label_N),
            },
            "latency": rounds_summary(one[name]),
            THROUGHPUT: throughput(list(itertools.chain(*many[name])), THROUGHPUT_BATCH),
            "throughput_by_round_texts_per_s": [throughput(turn, THROUGHPUT_BATCH) for turn in many[name]],
        }
    return found


def _calls(classifiers: Mapping[str, Classify], texts: Sequence[Text], batch: int, seed: int) -> CallsOf:
    """Calls of each system on the texts of the round."""

    def calls_of(number: int) -> dict[str, Call]:
        rows_KB = rows_of_a_round(len(texts), batch, seed, number).tolist()

        def call(classify: Classify) -> Call:
            batches = itertools.cycle([[texts[row] for row in row_B] for row_B in rows_KB])
            return lambda: classify(next(batches))

        return {name: call(classify) for name, classify in classifiers.items()}

    return calls_of


def _in_batches(classify: Classify, texts: Sequence[Text]) -> list[Any]:
    starts = range(0, len(texts), THROUGHPUT_BATCH)
    return list(itertools.chain(*(classify(texts[start : start + THROUGHPUT_BATCH]) for start in starts)))


def _as_logits(task: Task, answers: Sequence[Any]) -> Logits:
    """Answers as logits (N, C): 1 for the label that was given, or the number of a regression."""
    found = np.zeros((len(answers), task.outputs), dtype=np.float32)
    for row, answer in enumerate(answers):
        if task.is_regression:
            found[row, 0] = answer
        else:
            found[row, task.labels.index(answer)] = 1.0
    return found
