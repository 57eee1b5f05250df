"""compare: teacher and student side by side, in process and served, from one run on one machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, served
from benchmarks.local import (
    FULL,
    QUICK,
    STUDENT,
    TEACHER,
    THROUGHPUT_BATCH,
    load_systems,
    measure_systems,
    test_logits,
    time_tokenizer,
)
from benchmarks.report import Table, number, percentiles, ratio
from benchmarks.runs import open_run
from compressor.evaluate import METRIC_NAMES

THROUGHPUT = f"throughput_batch_{THROUGHPUT_BATCH}_texts_per_s"
IN_PROCESS = (
    "one process, token ids in, logits out (tokenizing is timed apart); systems take turns, each turn after a pause "
    "and unmeasured calls; real texts are the validation texts at their own lengths, in a seeded order; a shape BxT is "
    "B rows of T real tokens; throughput is batches of 32 real texts, padded to the longest, all texts over all time"
)
SERVED = (
    "Triton on the same machine, text in, label out; closed loop over gRPC, one text per request, from one client "
    "process with a thread per client, which shares the cores with the server; models take turns"
)


def compare(
    run_folder: Path, root: Path, *, url: str | None, threads: int, seed: int, quick: bool, command: str
) -> dict[str, Any]:
    """Measure everything; the result is ready for `report.to_json`.

    Raises CompressorError or ServingError if run, repository or server cannot be used.
    """
    run = open_run(run_folder)
    if url is None:
        served.check_repository(run, root)
    effort = QUICK if quick else FULL
    result = {
        "benchmark": "compare",
        "task": run.task.name,
        "metric": METRIC_NAMES[run.task.metric],
        "run": str(run_folder),
        "repository": None if url else str(root),
        "url": url,
        "quick": quick,
        **report.context(command=command, seed=seed, threads=threads),
        "conditions": {"in_process": IN_PROCESS, "served": SERVED},
    }
    with tempfile.TemporaryDirectory() as scratch:
        systems = load_systems(run, threads, Path(scratch))
        logits = test_logits(systems)
        result["in_process"] = measure_systems(systems, run.task, logits, effort, seed)
        result["tokenizer"] = time_tokenizer(run, effort, seed)
        del systems  # their threads and memory; the server gets the machine to itself
    with served.server(root, url) as grpc_url:
        result["served"] = served.measure_served(run, grpc_url, logits[STUDENT], effort, seed)
    result["ratios"] = ratios(result)
    return result


def ratios(result: Mapping[str, Any]) -> dict[str, Any]:
    """How many times the PyTorch teacher's figure the INT8 student's is, and the served teacher's the served student's.

    Latency and size: teacher / student. Throughput: student / teacher. So more is better everywhere.
    """
    teacher, student = result["in_process"][TEACHER], result["in_process"][STUDENT]
    found: dict[str, Any] = {
        "size": ratio(teacher["size_bytes"], student["size_bytes"]),
        "p50": {
            what: ratio(teacher["latency"][what]["p50_ms"], times["p50_ms"])
            for what, times in student["latency"].items()
        },
        "throughput": ratio(student[THROUGHPUT], teacher[THROUGHPUT]),
    }
    loads = [model["load"] for model in result["served"].values()]
    if len(loads) == 2:
        found["served"] = [
            {
                "concurrency": mine["concurrency"],
                "p50": ratio(theirs["p50_ms"], mine["p50_ms"]),
                "requests_per_s": ratio(mine["requests_per_s"], theirs["requests_per_s"]),
            }
            for mine, theirs in zip(*loads, strict=True)
        ]
    return found


def failures(result: Mapping[str, Any]) -> int:
    """Requests that failed under load, all models together."""
    return sum(row["failures"] for model in result["served"].values() for row in model["load"])


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    systems = result["in_process"]
    shapes = list(systems[TEACHER]["latency"])
    latency = [
        [
            name.replace("_", " "),
            *(percentiles(facts["latency"][shape]) for shape in shapes),
            number(facts[THROUGHPUT], 1),
        ]
        for name, facts in systems.items()
    ]
    latency.append(["tokenizer alone", percentiles(result["tokenizer"]), *("" for _ in shapes)])
    loads = [
        [name, str(row["concurrency"]), percentiles(row), number(row["requests_per_s"], 1), str(row["failures"])]
        for name, facts in result["served"].items()
        for row in facts["load"]
    ]
    header = ["system", *(shape.replace("_", " ") for shape in shapes), f"texts/s, batches of {THROUGHPUT_BATCH}"]
    return [
        _quality_table(result),
        Table("In process, p50 / p95 / p99 in ms", header, latency),
        Table("Served, gRPC", ["model", "clients", "p50 / p95 / p99 ms", "requests/s", "failures"], loads),
        _ratio_table(result["ratios"]),
    ]


def _quality_table(result: Mapping[str, Any]) -> Table:
    rows = []
    facts: Mapping[str, Any]
    for name, facts in result["in_process"].items():
        rows.append([name.replace("_", " "), *_quality(facts["test"]), number(facts["size_bytes"] / 1e6, 1)])
    for name, facts in result["served"].items():
        rows.append([f"{name} served", *_quality(facts["test"]), report.MISSING])
    header = [
        "system",
        f"test {result['metric']} x 100",
        "95 % interval",
        "rows",
        "agrees with teacher %",
        "McNemar p",
        "file MB",
    ]
    return Table("Quality on the test rows, and size", header, rows)


def _quality(test: Mapping[str, Any]) -> list[str]:
    low, high = test["interval_95"]
    against = test.get("against_teacher")
    return [
        number(100 * test["score"]),
        f"{100 * low:.2f} to {100 * high:.2f}",
        str(test["rows"]),
        number(100 * against["agreement"]) if against else report.MISSING,
        f"{against['p_value']:.3g}" if against and "p_value" in against else report.MISSING,
    ]


def _ratio_table(found: Mapping[str, Any]) -> Table:
    rows = [[f"p50, {what.replace('_', ' ')}", number(value, 1)] for what, value in found["p50"].items()]
    rows.append(["throughput", number(found["throughput"], 1)])
    rows.append(["file size", number(found["size"], 1)])
    for row in found.get("served", []):
        rows.append([f"served p50, {row['concurrency']} clients", number(row["p50"], 1)])
        rows.append([f"served requests/s, {row['concurrency']} clients", number(row["requests_per_s"], 1)])
    return Table("How many times better the INT8 student is than the teacher", ["figure", "times"], rows)
