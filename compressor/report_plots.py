"""The plots of the report of a build, from the JSON object that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.page import bars, height_for, intervals, reliability, scatter, svg


def plots(facts: Mapping[str, Any]) -> dict[str, str]:
    """SVG elements by name, of what `facts` have; the template says where each goes."""
    systems = facts.get("systems", [])
    seconds = {row["stage"]: row["duration_s"] for row in facts["stages"]}
    found = {"time": svg("time", lambda axes: bars(axes, seconds, "time, s", "{:,.0f} s"))}
    if systems:
        names = [row["system"] for row in systems]
        series = {split: [_interval(row[split]) for row in systems] for split in ("validation", "test")}
        label = f"{facts['task']['metric']} x 100 (bars: 95 % interval)"
        found["metric"] = svg("metric", lambda axes: intervals(axes, names, series, label))
    if sizes := {row["system"]: row["onnx_size_bytes"] / 1e6 for row in systems if "onnx_size_bytes" in row}:
        found["size"] = svg("size", lambda axes: bars(axes, sizes, "ONNX file, MB", "{:.1f} MB"))
    if "latency" in facts:
        shape, p50_ms = headline(facts["latency"])
        label = f"p50 of a call at {shape} (batch x tokens), ms, log scale"
        found["latency"] = svg("latency", lambda axes: bars(axes, p50_ms, label, "{:.3g} ms", log=True))
        found["tradeoff"] = _tradeoff(facts, shape, p50_ms)
    if "calibration" in facts:
        bins = {name: item["bins"] for name, item in facts["calibration"]["systems"].items()}
        found["calibration"] = svg("calibration", lambda axes: reliability(axes, bins), height=height_for(12))
    return found


def _tradeoff(facts: Mapping[str, Any], shape: str, p50_ms: Mapping[str, float]) -> str:
    """Latency against the metric on test. A system that is timed in two forms has its metric for both."""
    measured = {row["system"]: _interval(row["test"]) for row in facts["systems"]}
    # "teacher PyTorch" and "teacher ONNX" are forms of "teacher"
    quality = {timed: found for timed in p50_ms for name, found in measured.items() if timed.startswith(name)}
    points = {timed: (p50_ms[timed], middle) for timed, (middle, _, _) in quality.items()}
    spans = {timed: (low, high) for timed, (_, low, high) in quality.items()}
    labels = (f"p50 of a call at {shape} (batch x tokens), ms, log scale", f"test {facts['task']['metric']} x 100")
    return svg(
        "tradeoff",
        lambda axes: scatter(axes, points, labels, log_x=True, strong=["student INT8"], spans=spans),
        height=height_for(12),
    )


def headline(latency: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The shape that verdict and plots speak of, and the p50 of each system there."""
    shape = latency["headline_shape"]
    return shape, {name: times[shape]["p50_ms"] for name, times in latency["systems"].items()}


def _interval(facts: Mapping[str, Any]) -> tuple[float, float, float]:
    """Score and its interval, times 100."""
    low, high = facts["interval_95"]
    return 100 * facts["score"], 100 * low, 100 * high
