"""Through a running Triton: what the models answer, and how long clients wait.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import Answered, Load, closed_loop
from benchmarks.local import Effort, validation_texts
from benchmarks.runs import Run
from compressor.dataset import read_examples, texts_of
from compressor.errors import ArtifactError
from compressor.evaluate import Logits, measure, paired, queries, served_logits
from compressor.latency import summary
from compressor.stages.publish import is_published
from compressor.tasks import Task
from serving import repository
from serving.client import Client
from serving.errors import ModelError, ServingError
from serving.runtime import TritonServer, free_port

CONCURRENCY = (1, 4, 16)

log = logging.getLogger(__name__)
Query = str | tuple[str, str]
Send = Callable[[Load, Sequence[Query]], Answered]


def check_repository(run: Run, root: Path) -> None:
    """Raise unless `root` serves just what `run` published: RepositoryError or ArtifactError."""
    repository.read(root)
    if run.publication is None:
        raise ArtifactError(f"--run {run.path} was not published; run `compressor build` to its end first")
    if not is_published(run.publication, root):
        raise ArtifactError(
            f"model repository {root} does not hold what {run.path} published; publish that run again, or name another"
        )


@contextmanager
def server(root: Path, url: str | None) -> Iterator[str]:
    """host:port of gRPC: of the running server `url`, or of one started on `root` for as long as the block runs."""
    if url is not None:
        yield url
        return
    log.info("served: starting Triton on %s ...", root)
    with TritonServer(root, http_port=free_port(), grpc_port=free_port(), metrics_port=free_port()) as triton:
        yield triton.grpc_url


def measure_served(run: Run, url: str, in_process_NC: Logits, effort: Effort, seed: int) -> dict[str, dict[str, Any]]:
    """By served model, student first: the metric through the server, and latency and throughput under load.

    `in_process_NC` are the INT8 student's logits of the test rows. Raises ServingError if the server cannot be asked
    or answers other labels than the task's.
    """
    names = [run.task.name, f"{run.task.name}_teacher"]
    if run.publication is not None:
        names = [name for name in names if name in run.publication.metrics["versions"]]
    test = read_examples(run.corpus.path / "test.arrow")
    label_N = np.array(test["label"])
    answers = {name: ask(url, name, texts_of(test), run.task) for name in names}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:

        def send(load: Load, texts: Sequence[Query]) -> Answered:
            return process.submit(closed_loop, load, texts).result()

        loads = measure_loads(send, url, names, queries(validation_texts(run)), effort, seed)
    student_NC, teacher_NC = answers[names[0]], answers.get(names[-1]) if len(names) > 1 else None
    compared = {
        "against_in_process": paired(run.task, in_process_NC, student_NC, label_N),
        "against_teacher": None if teacher_NC is None else paired(run.task, teacher_NC, student_NC, label_N),
    }
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {"test": measure(run.task, answers[name], label_N), "load": loads[name]}
    found[names[0]]["test"] |= compared
    return found


def ask(url: str, model: str, texts: Sequence[tuple[str, ...]], task: Task) -> Logits:
    """What `model` answers over gRPC (N, C): 1 for the label it gives, or its values."""
    log.info("served: %s answers %d test texts ...", model, len(texts))
    with Client(url, model=model) as client:
        if set(client.labels) != set(task.labels):
            raise ModelError(
                f"{model} on {url} answers labels {list(client.labels)}; {task.name} has {list(task.labels)}; "
                "start the server on this run's model repository"
            )
        return served_logits(client, task, texts)


def measure_loads(
    send: Send, url: str, models: Sequence[str], texts: Sequence[Query], effort: Effort, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """By model, one row per concurrency; the models take turns. Raises ServingError if no request is answered."""
    rows: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
    for concurrency in CONCURRENCY:
        log.info("served: %d concurrent clients ...", concurrency)
        parts: dict[str, list[Answered]] = {model: [] for model in models}
        for turn in range(effort.served_rounds):
            for model in models if turn % 2 == 0 else reversed(models):
                load = Load(
                    url=url, model=model, concurrency=concurrency, seconds=effort.served_turn_s, seed=seed + turn
                )
                parts[model].append(send(load, texts))
        for model in models:
            rows[model].append(load_row(concurrency, parts[model]))
    return rows


def load_row(concurrency: int, parts: Sequence[Answered]) -> dict[str, Any]:
    """All turns of one model at one concurrency as one row. Raises ServingError if no request was answered."""
    times_ms = [time_ms for part in parts for time_ms in part.times_ms]
    failures = [failure for part in parts for failure in part.failures]
    if not times_ms:
        first = failures[0] if failures else "nothing was sent"
        raise ServingError(f"no request of {concurrency} concurrent clients was answered; first failure: {first}")
    seconds = sum(part.seconds for part in parts)
    return {
        "concurrency": concurrency,
        **summary(times_ms),
        "requests_per_s": len(times_ms) / seconds,
        "seconds": seconds,
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
    }
