"""The page of a comparison: verdict, plots and tables in one file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import compare_tables, report
from benchmarks.compare import headline_shape
from benchmarks.compare_tables import named
from benchmarks.local import STUDENT
from compressor import page


def html(result: Mapping[str, Any]) -> str:
    """The page, from what `compare.compare` gives."""
    tables = compare_tables.by_name(result)
    # Percentiles of ten shapes side by side do not fit on a page; they are in the JSON and the Markdown.
    tables["in_process"] = compare_tables.p50_in_process(result)
    return page.render(
        "compare.html",
        form="html",
        package="benchmarks",
        plots=plots(result),
        facts=result,
        other_work=report.other_work(result),
        tables=tables,
    )


def plots(result: Mapping[str, Any]) -> dict[str, str]:
    """SVG elements by name; the template says where each goes."""
    systems, served = result["in_process"], result["served"]
    shape, height = headline_shape(systems[STUDENT]), page.height_for(len(systems))
    p50_ms = {named(name): facts["latency"][shape]["p50_ms"] for name, facts in systems.items()}
    where = f"p50 of a call at {shape} (batch x tokens), ms, log scale"
    tested = {named(name): facts["test"] for name, facts in systems.items() if facts["test"] is not None}
    points = {name: (p50_ms[name], 100 * test["score"]) for name, test in tested.items()}
    spans = {name: (100 * test["interval_95"][0], 100 * test["interval_95"][1]) for name, test in tested.items()}
    metric = f"test {result['metric']} x 100"
    strong = (named(STUDENT),)
    found = {
        "tradeoff": page.svg(
            "tradeoff",
            lambda axes: page.scatter(axes, points, (where, metric), log_x=True, strong=strong, spans=spans),
            height=height,
        ),
        "latency": page.svg(
            "latency", lambda axes: page.bars(axes, p50_ms, where, "{:.3g} ms", log=True), height=height
        ),
    }
    student = (next(iter(served)),)
    for kind, rate, latency, label in (
        ("load", "requests_per_s", "p50_ms", "requests answered a second"),
        ("open_loop", "rate_per_s", "p95_ms", "requests that arrive a second"),
    ):
        curves = {name: _curve(facts[kind], rate, latency) for name, facts in served.items()}
        known = {name: curve for name, curve in curves.items() if curve[0]}
        if known:
            name, labels = {"load": "closed_loop"}.get(kind, kind), (label, f"{latency[:3]} latency, ms, log scale")
            found[name] = _lines(name, known, labels, student)
    if result["time_split_ms"]:
        split = {named(part): spent for part, spent in result["time_split_ms"][student[0]].items()}
        label = f"{student[0]}: ms of a mean request, one client"
        found["time_split"] = page.svg("time_split", lambda axes: page.bars(axes, split, label, "{:.2f} ms"))
    if result["calibration"] is not None:
        bins = {named(name): facts["bins"] for name, facts in result["calibration"]["systems"].items()}
        found["calibration"] = page.svg("calibration", lambda axes: page.reliability(axes, bins, strong=strong))
    return found


def _lines(
    name: str,
    curves: Mapping[str, tuple[list[float], list[float]]],
    labels: tuple[str, str],
    strong: tuple[str, ...],
) -> str:
    height = page.height_for(len(curves))
    return page.svg(name, lambda axes: page.lines(axes, curves, labels, log_y=True, strong=strong), height=height)


def _curve(rows: list[Mapping[str, Any]], rate: str, latency: str) -> tuple[list[float], list[float]]:
    """Rates and latencies of the rows that have both: too few requests have no high percentile."""
    known = [row for row in rows if row[latency] is not None]
    return [row[rate] for row in known], [row[latency] for row in known]
