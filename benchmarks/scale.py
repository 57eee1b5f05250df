"""scale: what a call costs as the work grows: tokens, rows of a batch, labels, and clients that ask at once."""

from __future__ import annotations

import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks import report, served
from benchmarks.load import Answered, Load, closed_loop
from benchmarks.local import validation_texts
from benchmarks.report import Table, number
from benchmarks.runs import Run, open_run
from benchmarks.served import Query, Send
from compressor import page
from compressor.evaluate import MODEL_FILE, OnnxPredictor, queries
from compressor.latency import shaped_call, summary, time_in_turns

STUDENT, TEACHER = "student INT8", "teacher ONNX"
TOKENS_OF_A_BATCH = 32
LINEAR = (0.9, 1.15)  # exponents of growth between two sizes that still count as linear
FULL_SHARE = 0.95  # of the highest rate: more clients than that need it gain little
# Beside the percentiles, by sweep: heading, name in a row, digits. Labels are no work to be shared out.
POWER, EACH = ("power since the row above", "exponent", 2), ("us each", "us_each", 0)
MORE_COLUMNS = {
    "tokens": (EACH, POWER),
    "batch": (EACH, POWER),
    "labels": (POWER,),
    "clients": (("requests/s", "requests_per_s", 1), ("failures", "failures", 0)),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how long."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    labels: tuple[int, ...]
    clients: tuple[int, ...]
    rounds: int
    turn_s: float
    served_s: float
    """Seconds of load for each number of clients."""


FULL = Plan(
    tokens=(8, 16, 32, 64, 128, 256, 512),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    labels=(2, 10, 30, 100),
    clients=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    rounds=6,
    turn_s=0.3,
    served_s=4.0,
)
QUICK = Plan(
    tokens=(8, 32, 128),
    batches=(1, 8, 32),
    labels=(2, 100),
    clients=(1, 4, 16),
    rounds=2,
    turn_s=0.1,
    served_s=1.0,
)


def scale(run_folder: Path, root: Path, *, plan: Plan, threads: int, seed: int, command: str) -> dict[str, Any]:
    """Measure every sweep; systems take turns at each size.

    Raises CompressorError or ServingError if run or repository cannot be used, or no request is answered.
    """
    run = open_run(run_folder)
    served.check_repository(run, root)
    begun = report.Begun()
    configs = {
        name: json.loads((folder / "config.json").read_text(encoding="utf-8")) for name, folder in _folders(run).items()
    }
    sweeps = _in_process(run, configs, plan, threads, seed)
    with served.server(root, None) as server:
        sweeps["clients"] = {"unit": "clients", "systems": _clients(run, server.url, plan, seed)}
    sizes = [row["size"] for row in sweeps["tokens"]["systems"][STUDENT]]
    shares = {name: {size: attention_share(config, size) for size in sizes} for name, config in configs.items()}
    return {
        "benchmark": "scale",
        "task": run.task.name,
        "run": str(run_folder),
        **report.context(begun, command=command, seed=seed, threads=threads),
        "conditions": {
            "tokens": "one row of real tokens, no padding",
            "batch": f"rows of {TOKENS_OF_A_BATCH} tokens, no padding",
            "labels": f"the student's shape with random weights in fp32 and so many labels, 1 x {TOKENS_OF_A_BATCH}",
            "clients": "Triton on the same machine, one validation text a request over gRPC, closed loop; clients and "
            "server share the cores",
        },
        "attention_share_of_arithmetic": shares,
        "sweeps": sweeps,
        "findings": findings(sweeps, shares),
    }


def _folders(run: Run) -> dict[str, Path]:
    """Where each system's graph and configuration are."""
    return {STUDENT: run.int8.path, TEACHER: run.onnx.path / "teacher"}


def _in_process(
    run: Run, configs: Mapping[str, Mapping[str, Any]], plan: Plan, threads: int, seed: int
) -> dict[str, dict[str, Any]]:
    """The sweeps that need no server; what they load is gone afterwards."""
    vocabulary, positions = (
        min(config[limit] for config in configs.values()) for limit in ("vocab_size", "max_position_embeddings")
    )
    predictors = {name: OnnxPredictor(folder / MODEL_FILE, threads=threads) for name, folder in _folders(run).items()}
    turns = partial(time_in_turns, rounds=plan.rounds, turn_s=plan.turn_s, seed=seed)

    def shaped(batch: int, tokens: int) -> dict[str, Any]:
        log.info("%d x %d tokens ...", batch, tokens)
        calls = {name: shaped_call(predictor, batch, tokens, vocabulary) for name, predictor in predictors.items()}
        return {name: summary(times_ms) for name, times_ms in turns(calls).items()}

    return {
        "tokens": _sweep("tokens", {size: shaped(1, size) for size in plan.tokens if size <= positions}),
        "batch": _sweep("texts", {size: shaped(size, TOKENS_OF_A_BATCH) for size in plan.batches}),
        "labels": _sweep("labels", _labels(run, plan.labels, turns, threads, vocabulary)),
    }


def attention_share(config: Mapping[str, Any], tokens: int) -> float:
    """Share of a layer's multiplications that are between tokens: those grow with the square of their number."""
    width = config["hidden_size"]
    dense: int = 4 * width**2 + 2 * width * config["intermediate_size"]  # for each token
    between: int = 2 * tokens * width
    return between / (dense + between)


def _labels(
    run: Run, labels: Sequence[int], turns: Callable[..., Any], threads: int, vocabulary: int
) -> dict[int, dict[str, Any]]:
    """Times of one call of the student's shape with so many labels, by number of labels."""
    from transformers import BertConfig, BertForSequenceClassification

    from compressor.classifier_graph import ClassifierGraph
    from compressor.onnx_export import write_graph

    with tempfile.TemporaryDirectory() as scratch:
        calls = {}
        for count in labels:
            log.info("%d labels ...", count)
            config = BertConfig.from_pretrained(run.student.path, num_labels=count, local_files_only=True)
            path = Path(scratch) / f"{count}.onnx"
            write_graph(ClassifierGraph(BertForSequenceClassification(config)), path)
            predictor = OnnxPredictor(path, threads=threads)
            calls[str(count)] = shaped_call(predictor, 1, TOKENS_OF_A_BATCH, vocabulary)
        return {int(count): {"student fp32": summary(times_ms)} for count, times_ms in turns(calls).items()}


def _clients(run: Run, url: str, plan: Plan, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rate and latency by number of clients, of every model that takes texts and was published."""
    texts = queries(validation_texts(run))
    names = [run.task.name, f"{run.task.name}_teacher"]
    names = [name for name in names if run.publication is not None and name in run.publication.metrics["versions"]]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:

        def send(load: Load, texts: Sequence[Query]) -> Answered:
            return process.submit(closed_loop, load, texts).result()

        return client_rows(send, url, names, texts, plan, seed)


def client_rows(
    send: Send, url: str, names: Sequence[str], texts: Sequence[Query], plan: Plan, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """By model, a row for each number of clients, failures counted in it. Raises ServingError if none is answered."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for count in plan.clients:
        for name in names:
            log.info("%s: %d clients ...", name, count)
            load = Load(url=url, model=name, concurrency=count, seconds=plan.served_s, seed=seed)
            found[name].append({"size": count, **served.load_row(count, [send(load, texts)])})
    return found


def _sweep(unit: str, found: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """By system, a row for each size: its times, and how they grew since the size before."""
    systems: dict[str, list[dict[str, Any]]] = {}
    for size, by_system in sorted(found.items()):
        for name, times in by_system.items():
            rows = systems.setdefault(name, [])
            grew = growth(rows[-1], size, times["p50_ms"]) if rows else None
            row = {"size": size, **times, "exponent": grew}
            rows.append(row if unit == "labels" else {**row, "us_each": 1000 * times["p50_ms"] / size})
    return {"unit": unit, "systems": systems}


def growth(before: Mapping[str, Any], size: int, p50_ms: float) -> float:
    """The power of the size that the time grew with: 0 no growth, 1 as the size, 2 as its square."""
    return math.log(p50_ms / before["p50_ms"]) / math.log(size / before["size"])


def findings(sweeps: Mapping[str, Any], shares: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Where each sweep is not linear, in sentences with the figures measured; usual reasons are called just that."""
    said = []
    for what, sweep in sweeps.items():
        for name, rows in sweep["systems"].items():
            if what == "clients":
                said += [_saturation(name, rows), *_failures(name, rows)]
            elif what == "labels":
                said.append(_labels_sentence(name, rows))
            else:
                said += _bends(f"{name}, {what}", sweep["unit"], rows)
                if what == "tokens":
                    said.append(_attention(name, rows, shares[name]))
    return said


def _bends(where: str, unit: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    least, most = LINEAR
    said = []
    # What a call costs whatever its size shows at the first sizes; a dip after them is something else.
    flat = list(itertools.takewhile(lambda row: row["exponent"] < least, rows[1:]))
    if flat:
        said.append(
            f"{where}: up to {flat[-1]['size']} {unit} time grows more slowly than the work. Usual reasons, not "
            "measured here: a call costs something whatever its size (each operator is started, threads are woken), "
            "and small products do not fill the processor."
        )
    if steep := [row for row in rows[1:] if row["exponent"] > most]:
        first = steep[0]
        said.append(
            f"{where}: at {first['size']} {unit} time grows faster than the work, with the power "
            f"{first['exponent']:.2f}. Usual reasons, not measured here: what the layers hand on no longer fits the "
            "caches, or attention weighs in."
        )
    if late := [str(row["size"]) for row in rows[1 + len(flat) :] if row["exponent"] < least]:
        said.append(f"{where}: at {', '.join(late)} {unit} time grows more slowly than the work, though not before.")
    return said or [f"{where}: linear over the whole range."]


def _attention(name: str, rows: Sequence[Mapping[str, Any]], shares: Mapping[int, float]) -> str:
    first, last = rows[0]["size"], rows[-1]["size"]
    return (
        f"{name}, tokens: {100 * shares[first]:.0f} % of a layer's multiplications are between tokens at {first}, "
        f"{100 * shares[last]:.0f} % at {last}: that part grows with the square."
    )


def _labels_sentence(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    change = 100 * (last["p50_ms"] / first["p50_ms"] - 1)
    return (
        f"{name}, labels: {last['size']} labels take {change:+.1f} % of the time of {first['size']}: the head is one "
        "small product of [CLS] alone."
    )


def _saturation(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    most = max(row["requests_per_s"] for row in rows)
    full = next(row for row in rows if row["requests_per_s"] >= FULL_SHARE * most)
    if full is rows[-1]:
        return (
            f"{name}, clients: the rate still grows at {full['size']} clients, the most measured: "
            f"{full['requests_per_s']:.0f} requests/s, p50 {full['p50_ms']:.1f} ms."
        )
    return (
        f"{name}, clients: {full['size']} clients reach {full['requests_per_s']:.0f} requests/s, and more of them at "
        f"most {most:.0f}. p50 is {full['p50_ms']:.1f} ms with {full['size']}, {rows[-1]['p50_ms']:.1f} with "
        f"{rows[-1]['size']}: clients that share a rate wait the longer, the more they are."
    )


def _failures(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}, clients: {row['failures']} requests of {row['size']} clients failed and are not in the times, the "
        f"first with: {row['first_failure']}"
        for row in rows
        if row["failures"]
    ]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    made = []
    for what, sweep in result["sweeps"].items():
        columns = (("p50 ms", "p50_ms", 2), ("p95 ms", "p95_ms", 2), *MORE_COLUMNS[what])
        header = [f"system, {sweep['unit']}", *(heading for heading, _, _ in columns)]
        lines = [
            [f"{name}, {row['size']}", *(number(row[key], digits) for _, key, digits in columns)]
            for name, rows in sweep["systems"].items()
            for row in rows
        ]
        made.append(Table(f"{what.capitalize()}: {result['conditions'][what]}", header, lines))
    made.append(Table("What is not linear", ["finding"], [[sentence] for sentence in result["findings"]]))
    return made


def html(result: Mapping[str, Any]) -> str:
    """The result as a page with the plots."""
    heading = f"Scale: {result['task']}"
    lines = [*report.headline(result).splitlines(), *result["findings"]]
    return page.render(
        "result.html",
        form="html",
        package="benchmarks",
        plots=plots(result),
        heading=heading,
        lines=lines,
        tables=tables(result)[:-1],  # the last holds the findings
    )


def plots(result: Mapping[str, Any]) -> dict[str, str]:
    """A plot of the times of each sweep, and one of the rate by clients, as SVG, by its name."""
    found = {}
    for what, sweep in result["sweeps"].items():
        found[what] = page.svg(what, partial(_draw, sweep=sweep, figure="p50_ms", label="p50, ms"))
    rate = partial(_draw, sweep=result["sweeps"]["clients"], figure="requests_per_s", label="requests/s")
    return {**found, "clients-rate": page.svg("clients-rate", rate)}


def _draw(axes: Axes, *, sweep: Mapping[str, Any], figure: str, label: str) -> None:
    curves = {
        name: ([row["size"] for row in rows], [row[figure] for row in rows]) for name, rows in sweep["systems"].items()
    }
    page.lines(axes, curves, (sweep["unit"], label), log_x=True, log_y=True)
