"""serve: what a request costs on the way through Triton, against the same tokenizer and ONNX Runtime in process.

A request of concurrency 1 is taken apart (client and network, Triton, tokenizer, ONNX Runtime) with the server's own
counters; throughput is measured with many clients, on the same cores that the server uses.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.counted import Counted
from benchmarks.load import Load, closed_loop
from benchmarks.report import Table, number, ratio
from compressor.errors import DataError, GateError
from compressor.latency import summary
from serving import repository
from serving.client import Client
from serving.errors import ServingError
from serving.inprocess import Files
from serving.model import Text
from serving.online import gap_of, numbers_of, version_files
from serving.runtime import TritonServer, free_port

BATCHES = (1, 8)
MAX_OVERHEAD_MS, MAX_TAIL = 0.8, 2.0
SHARES = {1: 0.6, 8: 0.8}
SAME_BATCH_BOUND = 1e-5

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure; all that is compared takes turns."""

    turns: int
    turn_s: float
    clients: int = 32
    """Of the measurement of throughput."""


FULL, QUICK = Plan(turns=5, turn_s=4.0), Plan(turns=2, turn_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Where:
    """What is measured."""

    repository: Path
    model: str
    """One that takes texts."""
    texts: Path
    """Arrow file of examples."""
    teacher: bool
    """Whether its teacher is measured as well."""


def measure(where: Where, *, plan: Plan, threads: int, seed: int, command: str) -> dict[str, Any]:
    """Measure a model on a server that is started on its repository.

    Raises ServingError if it cannot be served, and DataError if the file holds no texts for the model.
    """
    root, model = where.repository, where.model
    repository.read(root)
    names = [model, *([f"{model}_teacher"] if where.teacher else [])]
    texts = read_texts(where.texts, version_files(root / model).is_pair)
    begun = report.Begun()
    with TritonServer(root, http_port=free_port(), grpc_port=free_port(), metrics_port=free_port()) as server:
        rows = {name: _one_model(server, root / name, texts, plan, threads, seed) for name in names}
        deaths = server.deaths()
    found = {
        "benchmark": "serve",
        "quick": plan is not FULL,
        **report.context(begun, command=command, seed=seed, threads=threads),
        "texts": len(texts),
        "clients": plan.clients,
        "models": rows,
        "deaths": deaths,
    }
    if where.teacher:
        student, large = rows[names[0]], rows[names[1]]
        found["against_teacher"] = {
            f"throughput_{batch}": ratio(
                student["load"][str(batch)]["texts_per_s"], large["load"][str(batch)]["texts_per_s"]
            )
            for batch in BATCHES
        } | {"p95": ratio(large["alone"]["p95_ms"], student["alone"]["p95_ms"])}
    return found


def read_texts(file: Path, is_pair: bool) -> list[Text]:
    """The texts, or pairs, of an Arrow file of examples. Raises DataError if they are not as the model reads them."""
    from compressor.dataset import read_examples, texts_of

    try:
        rows = texts_of(read_examples(file))
    except (OSError, KeyError) as error:
        raise DataError(f"--texts {file} cannot be read ({error}); give the examples of `compressor corpus`") from error
    if not rows or (len(rows[0]) == 2) != is_pair:
        raise DataError(f"--texts {file} does not hold {'pairs' if is_pair else 'single texts'}, which the model reads")
    return [(row[0], row[1]) if is_pair else row[0] for row in rows]


def _one_model(
    server: TritonServer, folder: Path, texts: Sequence[Text], plan: Plan, threads: int, seed: int
) -> dict[str, Any]:
    log.info("%s: one request at a time ...", folder.name)
    in_process: list[list[float]] = []
    alone: list[float] = []
    parts: list[dict[str, float]] = []
    call = version_files(folder).open(threads=1)
    order = itertools.cycle(np.random.default_rng(seed).permutation(len(texts)).tolist())
    with Client(server.grpc_url, model=folder.name) as client:
        for turn in range(plan.turns + 1):
            some = [texts[next(order)] for _ in range(50)]
            times = _timed(call, some, plan.turn_s)
            before = Counted.read(server.metrics_url, folder.name)
            served = _timed(lambda text: client.classify([text]), some, plan.turn_s)
            after = Counted.read(server.metrics_url, folder.name)
            if turn:  # the first one warms up
                in_process.append(times)
                alone += served
                parts.append(after.parts_ms(before, float(np.mean(served))))
    found: dict[str, Any] = {
        "in_process": summary([time_ms for times in in_process for time_ms in times]),
        "alone": summary(alone),
        "parts_ms": {name: float(np.mean([turn[name] for turn in parts])) for name in parts[0]},
        "load": {},
    }
    # Turn by turn: other work on the machine hits both alike.
    for batch in BATCHES:
        log.info("%s: %d clients, %d texts a request ...", folder.name, plan.clients, batch)
        found["load"][str(batch)] = _throughput(server, folder, texts, batch, plan, threads, seed)
    found["answers"] = _same_answers(server, folder, texts)
    return found


def _timed(call: Callable[[Any], Any], texts: Sequence[Text], seconds: float) -> list[float]:
    """Times in ms of calls, one text each, for some seconds and at least once over all `texts`."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    for text in itertools.cycle(texts):
        began = time.perf_counter()
        if began > end and len(times) >= len(texts):
            return times
        call(text)
        times.append((time.perf_counter() - began) * 1000)
    raise AssertionError("there are texts")


def _throughput(
    server: TritonServer, folder: Path, texts: Sequence[Text], batch: int, plan: Plan, threads: int, seed: int
) -> dict[str, Any]:
    """Texts a second through the server and of ONNX Runtime alone on all threads, turn by turn."""
    files = version_files(folder)
    served_texts = served_s = own_texts = own_s = 0.0
    times: list[float] = []
    failures: list[str] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        threads_pool = stack.enter_context(ThreadPoolExecutor(threads))
        alone_on = [_graph_alone(files, texts) for _ in range(threads)]
        for turn in range(plan.turns + 1):
            load = Load(
                url=server.grpc_url,
                model=folder.name,
                concurrency=plan.clients,
                seconds=plan.turn_s,
                seed=seed + turn,
                batch=batch,
            )
            answered = pool.submit(closed_loop, load, texts).result()
            began = time.perf_counter()
            counts = [threads_pool.submit(run, began + plan.turn_s, seed + turn) for run in alone_on]
            alone = sum(count.result() for count in counts), time.perf_counter() - began
            if turn:
                served_texts += batch * len(answered.times_ms)
                served_s += answered.seconds
                own_texts, own_s = own_texts + alone[0], own_s + alone[1]
                times += answered.times_ms
                failures += answered.failures
    if not times:
        raise ServingError(f"no request was answered; first failure: {failures[0] if failures else 'nothing was sent'}")
    return {
        "texts_per_s": served_texts / served_s,
        "onnxruntime_alone_texts_per_s": own_texts / own_s,
        "share": (served_texts / served_s) / (own_texts / own_s),
        **summary(times),
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
    }


def _graph_alone(files: Files, texts: Sequence[Text]) -> Callable[[float, int], int]:
    """Return what runs the graph alone, on one thread, text after text that is tokenised already, until a moment."""
    session, reader = files.read_graph(threads=1), files.read_tokenizer()
    encodings = reader.encode_batch_fast(list(texts))
    feeds = [files.feed([encoding], files.width(len(encoding)), session) for encoding in encodings]

    def run(end: float, seed: int) -> int:
        order = itertools.cycle(np.random.default_rng(seed).permutation(len(feeds)).tolist())
        count = 0
        while time.perf_counter() < end:
            session.run(["logits"], feeds[next(order)])
            count += 1
        return count

    return run


def _same_answers(server: TritonServer, folder: Path, texts: Sequence[Text]) -> dict[str, Any]:
    """Compare the server's answers with those of the same file in process, one text a request, on every text."""
    expected = version_files(folder).answers(texts)
    wrong, gap = 0, 0.0
    with Client(server.grpc_url, model=folder.name) as client:
        for text, wanted in zip(texts, expected, strict=True):
            found = numbers_of(client.classify([text])[0])
            wrong += max(found, key=lambda name: found[name]) != max(wanted, key=lambda name: wanted[name])
            gap = max(gap, gap_of(found, wanted))
    return {"texts": len(texts), "other_labels": wrong, "largest_difference": gap}


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError for each target that the student misses, or if the machine was too busy to tell."""
    row = next(iter(result["models"].values()))
    missed = [
        f"{batch} texts a request: {100 * row['load'][str(batch)]['share']:.0f} % of ONNX Runtime alone "
        f"(at least {100 * bound:.0f})"
        for batch, bound in SHARES.items()
        if row["load"][str(batch)]["share"] < bound
    ]
    overhead = row["alone"]["p50_ms"] - row["in_process"]["p50_ms"]
    tail = row["alone"]["p99_ms"] / row["alone"]["p50_ms"]
    if overhead > MAX_OVERHEAD_MS:
        missed.append(f"p50 is {overhead:.2f} ms above in process (at most {MAX_OVERHEAD_MS})")
    if tail > MAX_TAIL:
        missed.append(f"p99 is {tail:.1f} times p50 (at most {MAX_TAIL:g})")
    for name, each in result["models"].items():
        if each["answers"]["other_labels"] or each["answers"]["largest_difference"] > SAME_BATCH_BOUND:
            missed.append(f"{name} answers other than its file: {each['answers']}")
    if result["deaths"]:
        missed.append(f"the server died: {result['deaths']}")
    if missed:
        busy = " (the machine was busy with other work)" if result["machine_was_busy"] else ""
        raise GateError(f"targets missed{busy}: {'; '.join(missed)}")


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Latency, its parts, and throughput."""
    models = result["models"]
    latency = [
        [name, *(number(row[kind][p]) for kind in ("in_process", "alone") for p in ("p50_ms", "p99_ms"))]
        for name, row in models.items()
    ]
    parts = [
        [name, *(f"{number(ms)} ({100 * ms / sum(row['parts_ms'].values()):.0f} %)" for ms in row["parts_ms"].values())]
        for name, row in models.items()
    ]
    loads = [
        [
            f"{name} x{batch}",
            number(load["texts_per_s"], 0),
            number(load["onnxruntime_alone_texts_per_s"], 0),
            f"{100 * load['share']:.0f} %",
            report.percentiles(load),
            str(load["failures"]),
        ]
        for name, row in models.items()
        for batch, load in row["load"].items()
    ]
    answers = [
        [
            name,
            str(row["answers"]["texts"]),
            str(row["answers"]["other_labels"]),
            f"{row['answers']['largest_difference']:.1g}",
        ]
        for name, row in models.items()
    ]
    found = [
        Table("one request at a time, ms", ["model", "in process p50", "p99", "served p50", "p99"], latency),
        Table(
            "where the time of a request goes, ms (share)", ["model", *next(iter(models.values()))["parts_ms"]], parts
        ),
        Table(
            f"{result['clients']} clients",
            ["model x texts a request", "texts/s", "ONNX Runtime alone", "share", "p50 / p95 / p99 ms", "failed"],
            loads,
        ),
        Table(
            "answers against the same file in process",
            ["model", "texts", "other labels", "largest difference"],
            answers,
        ),
    ]
    if "against_teacher" in result:
        rows = [[name, f"{number(value)} times"] for name, value in result["against_teacher"].items()]
        found.append(Table("student against teacher", ["figure", "better by"], rows))
    return found
