"""Through a running Triton: what the models answer, and how long clients wait.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from benchmarks.counted import Counted
from benchmarks.load import WARMUP_REQUESTS, Answered, Load, closed_loop
from benchmarks.local import Effort, read_test, rounds_summary, validation_texts
from benchmarks.open_loop import Arrivals, Arrived, open_loop
from benchmarks.runs import Run
from compressor.errors import ArtifactError
from compressor.evaluate import Logits, measure, paired, queries, served_logits
from compressor.stages.publish import is_published
from compressor.tasks import Task
from serving import repository
from serving.client import Client
from serving.errors import ModelError, ServingError
from serving.runtime import TritonServer, free_port
from serving.transport import GrpcTransport, Served
from serving.triton import parameters_of

TIMEOUT_S = 10.0  # of a question about a model

log = logging.getLogger(__name__)
Query = str | tuple[str, str]
Send = Callable[[Load, Sequence[Query]], Answered]
SendPlanned = Callable[[Arrivals, Sequence[Query]], Arrived]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    url: str
    """host:port of gRPC."""
    ready_s: float | None = None
    """From its start until it was ready; None if it ran already."""
    pid: int | None = None
    """Of the parent of its processes, if it was started here."""
    metrics_url: str | None = None
    """Address of its metrics page, if it was started here."""

    def processor_s(self) -> float | None:
        """Processor time in seconds of all its processes so far."""
        if self.pid is None:
            return None
        parent = psutil.Process(self.pid)
        return float(sum(sum(each.cpu_times()[:2]) for each in (parent, *parent.children(recursive=True))))

    def memory_bytes(self) -> int | None:
        """Memory that its processes have for themselves alone."""
        if self.pid is None:
            return None
        parent = psutil.Process(self.pid)
        return int(sum(each.memory_full_info().uss for each in (parent, *parent.children(recursive=True))))


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
def server(root: Path, url: str | None) -> Iterator[Server]:
    """The running server `url`, or one started on `root` for as long as the block runs."""
    if url is not None:
        yield Server(url=url)
        return
    log.info("served: starting Triton on %s ...", root)
    began = perf_counter()
    with TritonServer(root, http_port=free_port(), grpc_port=free_port(), metrics_port=free_port()) as triton:
        ready_s = perf_counter() - began
        yield Server(url=triton.grpc_url, ready_s=ready_s, pid=triton.pid, metrics_url=triton.metrics_url)


def served_names(run: Run, url: str) -> list[str]:
    """Models that take texts on the server: the student first, then the teacher and the cascade, if there are."""
    task = run.task.name
    published = None if run.publication is None else run.publication.metrics["versions"]
    found = [task]
    for name in (f"{task}_teacher", f"{task}_cascade"):
        with Client(url, model=name) as client:
            if client.is_ready() if published is None else name in published:
                found.append(name)
    return found


def measure_served(
    run: Run,
    running: Server,
    in_process_NC: Logits,
    effort: Effort,
    *,
    untrained: Mapping[str, Server],
    rates_per_s: Sequence[float],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """By served model, student first: its processes, the metric through the server, latency and throughput under load.

    `in_process_NC` are the INT8 student's logits of the test rows; of the `untrained` models, by name on their own
    servers, only the closed loop is measured; no `rates_per_s` takes shares of what each other model answers at most.
    Raises ServingError if the server cannot be asked or answers other labels than the task's.
    """
    url, names = running.url, served_names(run, running.url)
    test_texts, label_N = read_test(run, effort)
    answers = {name: ask(url, name, test_texts, run.task) for name in names}
    texts = queries(validation_texts(run))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:

        def send(load: Load, texts: Sequence[Query]) -> Answered:
            return process.submit(closed_loop, load, texts).result()

        def send_planned(load: Arrivals, texts: Sequence[Query]) -> Arrived:
            return process.submit(open_loop, load, texts).result()

        loads = measure_loads(send, {**dict.fromkeys(names, running), **untrained}, texts, effort, seed)
        trained = {name: loads[name] for name in names}
        rates = {name: list(rates_per_s) for name in names} if rates_per_s else chosen_rates(trained, effort)
        planned = measure_arrivals(send_planned, url, rates, texts, effort, seed)
    found: dict[str, dict[str, Any]] = {}
    teacher = f"{run.task.name}_teacher"
    for name in names:
        compared = teacher in names and name != teacher
        against = paired(run.task, answers[teacher], answers[name], label_N) if compared else None
        facts = {**measure(run.task, answers[name], label_N), "against_teacher": against}
        found[name] = {**shares(url, name), "test": facts, "load": loads[name], "open_loop": planned[name]}
    found[names[0]]["test"]["against_in_process"] = paired(run.task, in_process_NC, answers[names[0]], label_N)
    for name, other in untrained.items():
        found[name] = {**shares(other.url, name), "test": None, "load": loads[name], "open_loop": []}
    return found


def shares(url: str, model: str) -> dict[str, int]:
    """How many instances answer for a model, and with how many threads each (0: it has no graph, and asks others)."""
    with closing(GrpcTransport(url, TIMEOUT_S)) as server:
        config = server.config(Served(model, ""))
    threads = parameters_of(config).get("intra_op_threads", "0")
    return {"instances": sum(group.count for group in config.instance_group), "threads_of_each": int(threads)}


def ask(url: str, model: str, texts: Sequence[tuple[str, ...]], task: Task) -> Logits:
    """What `model` answers over gRPC (N, C): 1 for the label it gives, or its values."""
    log.info("served: %s answers %d test texts ...", model, len(texts))
    with Client(url, model=model) as client:
        _check_labels(client, url, model, task)
        return served_logits(client, task, texts)


def check_server(run: Run, root: Path, url: str | None) -> int:
    """Ask the server for each model that will be measured, before what takes long; returns the student's cores.

    Raises ServingError if it cannot be asked, or started on `root`, or answers other labels than the task's.
    """
    with server(root, url) as running:
        for name in served_names(run, running.url):
            with Client(running.url, model=name) as client:
                _check_labels(client, running.url, name, run.task)
        student = shares(running.url, run.task.name)
        return student["instances"] * student["threads_of_each"]


def _check_labels(client: Client, url: str, model: str, task: Task) -> None:
    if set(client.labels) != set(task.labels):
        raise ModelError(
            f"{model} on {url} answers labels {list(client.labels)}; {task.name} has {list(task.labels)}; "
            "start the server on this run's model repository"
        )


def measure_loads(
    send: Send, models: Mapping[str, Server], texts: Sequence[Query], effort: Effort, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """By model, of those on each server: one row per concurrency; the models take turns.

    Raises ServingError if no request of a turn is answered.
    """
    rows: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
    for concurrency in effort.concurrency:
        log.info("served: %d concurrent clients ...", concurrency)
        parts: dict[str, list[Answered]] = {model: [] for model in models}
        spent_s: dict[str, list[float]] = {model: [] for model in models}
        for turn, model in _turns(list(models), effort.served_rounds):
            running = models[model]
            load = Load(
                url=running.url, model=model, concurrency=concurrency, seconds=effort.served_turn_s, seed=seed + turn
            )
            before_s = running.processor_s()
            parts[model].append(send(load, texts))
            after_s = running.processor_s()
            if before_s is not None and after_s is not None:
                spent_s[model].append(after_s - before_s)
        for model in models:
            rows[model].append(load_row(concurrency, parts[model], spent_s[model]))
    return rows


def time_split_ms(run: Run, running: Server, effort: Effort, seed: int) -> dict[str, dict[str, float]]:
    """By served model with a graph of its own: where the time of a mean request of one client goes, in ms.

    From the server's own counters; empty for a server that was not started here, whose metrics page is not known.
    """
    if running.metrics_url is None:
        return {}
    found, texts = {}, queries(validation_texts(run))
    names = [name for name in served_names(run, running.url) if not name.endswith("_cascade")]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for name in names:
            log.info("served: where the time of a request of %s goes ...", name)
            load = Load(url=running.url, model=name, concurrency=1, seconds=effort.served_turn_s, seed=seed)
            before = Counted.read(running.metrics_url, name)
            answered = process.submit(closed_loop, load, texts).result()
            _check_answered([answered], "one client")
            after = Counted.read(running.metrics_url, name)
            found[name] = after.parts_ms(before, float(np.mean(answered.times_ms)))
    return found


def _turns(models: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Number of the round and model: every model once in each round, forwards and backwards by turns."""
    for turn in range(rounds):
        for model in models if turn % 2 == 0 else reversed(models):
            yield turn, model


def load_row(concurrency: int, parts: Sequence[Answered], server_cpu_s: Sequence[float] = ()) -> dict[str, Any]:
    """All turns of one model at one concurrency as one row. Raises ServingError if one turn had no answer.

    `server_cpu_s` is the server's processor time of each turn, its warm-up included; none = not known.
    """
    failures = [failure for part in parts for failure in part.failures]
    _check_answered(parts, f"{concurrency} concurrent clients")
    answered = sum(len(part.times_ms) for part in parts)
    seconds = sum(part.seconds for part in parts)
    asked = answered + len(failures) + WARMUP_REQUESTS * concurrency * len(parts)
    return {
        "concurrency": concurrency,
        **rounds_summary([part.times_ms for part in parts]),
        "requests_per_s": answered / seconds,
        "requests_by_round_per_s": [len(part.times_ms) / part.seconds for part in parts],
        "server_cpu_s_per_1000_texts": 1000 * sum(server_cpu_s) / asked if server_cpu_s else None,
        "client_cpu_s_per_1000_texts": 1000 * sum(part.processor_s for part in parts) / answered,
        "seconds": seconds,
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
    }


def chosen_rates(loads: Mapping[str, Sequence[Mapping[str, Any]]], effort: Effort) -> dict[str, list[float]]:
    """By model: shares of the most that each of the models answered, as far as the model itself answers that many.

    So the slowest model's rates are asked of all: there they can be compared.
    """
    most = {name: max(row["requests_per_s"] for row in rows) for name, rows in loads.items()}
    rates = sorted(share * peak for peak in most.values() for share in effort.load_shares)
    limit = max(effort.load_shares)
    return {name: [rate for rate in rates if rate <= limit * peak] for name, peak in most.items()}


def measure_arrivals(
    send: SendPlanned,
    url: str,
    rates: Mapping[str, Sequence[float]],
    texts: Sequence[Query],
    effort: Effort,
    seed: int,
) -> dict[str, list[dict[str, Any]]]:
    """By model, one row for each of its arrival rates; in turns. Raises ServingError if no request of a turn is."""
    rows: dict[str, list[dict[str, Any]]] = {model: [] for model in rates}
    for rate in sorted(set(itertools.chain(*rates.values()))):
        models = [model for model in rates if rate in rates[model]]
        log.info("served: %.0f requests a second arrive ...", rate)
        parts: dict[str, list[Arrived]] = {model: [] for model in models}
        for turn, model in _turns(models, effort.served_rounds):
            load = Arrivals(url=url, model=model, rate_per_s=rate, seconds=effort.served_turn_s, seed=seed + turn)
            parts[model].append(send(load, texts))
        for model in models:
            rows[model].append(arrivals_row(rate, parts[model]))
    return rows


def arrivals_row(rate_per_s: float, parts: Sequence[Arrived]) -> dict[str, Any]:
    """All turns of one model at one arrival rate as one row. Raises ServingError if one turn had no answer."""
    failures = [failure for part in parts for failure in part.failures]
    _check_answered(parts, f"{rate_per_s:.0f} requests a second")
    late_ms = list(itertools.chain(*(part.late_ms for part in parts)))
    return {
        "rate_per_s": rate_per_s,
        **rounds_summary([part.times_ms for part in parts]),
        "answered_per_s": sum(len(part.times_ms) for part in parts) / sum(part.seconds for part in parts),
        "sent_late_p99_ms": float(np.percentile(late_ms, 99)),
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
    }


def _check_answered(parts: Sequence[Answered | Arrived], load: str) -> None:
    for number, part in enumerate(parts, 1):
        if not part.times_ms:
            first = part.failures[0] if part.failures else "nothing was sent"
            raise ServingError(
                f"no request of {load} was answered in turn {number} of {len(parts)}; its first failure: {first}; see "
                "the server's log, or ask less of it"
            )
