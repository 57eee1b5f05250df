"""How many times better the student is than each other system, with the interval that the rounds give.

Latency and size are theirs / ours, throughput and the task's metric ours / theirs: more is better everywhere. A ratio
is known by its figure, where it was measured, and the two systems; runs are compared by these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from benchmarks.bert_base import BERT_BASE
from benchmarks.local import STUDENT, TEACHER, THROUGHPUT_BATCH
from compressor.statistics import ratio_of_rounds

BATCHES = f"batches of {THROUGHPUT_BATCH}"
ONE_TEXT = "one text"
QUALITY = ("in process", "served")
"""Where the task's metric is measured."""
SIGNIFICANT = 0.05  # McNemar's p below it: more than chance explains
TARGETS = (
    ("p50", "1x32", BERT_BASE, 35.0),
    ("throughput", BATCHES, BERT_BASE, 15.0),
    ("size", "file", BERT_BASE, 24.0),
    ("served p50", "1 clients", BERT_BASE, 35.0),
    ("served requests/s", "16 clients", BERT_BASE, 15.0),
    ("text to label p50", ONE_TEXT, "transformers", 4.0),
    ("text to label p50", ONE_TEXT, "optimum", 1.0),
    ("text to label throughput", BATCHES, "optimum", 1.0),
)
MAX_OVERHEAD = 0.05


def ratios(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every ratio of a result of `compare`; those of the open loop are left out, since its rates differ by run."""
    metric = result["metric"]
    found = in_process(result["in_process"], metric) + text_to_label(result["text_to_label"])
    found += served(result["served"], metric)
    return [row for row in found if row["ratio"] is not None]


def in_process(systems: Mapping[str, Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Of the INT8 student to every other form and peer: each latency, throughput, size and the task's metric."""
    rows, student = [], systems[STUDENT]
    for name, theirs in systems.items():
        if name == STUDENT:
            continue
        for what, times in student["latency"].items():
            rounds = theirs["latency"][what]["p50_by_round_ms"], times["p50_by_round_ms"]
            rows.append(_row("p50", what, STUDENT, name, ratio_of_rounds(*rounds)))
        rows.append(_throughput("throughput", name, theirs, student))
        rows.append(_row("size", "file", STUDENT, name, exactly(theirs["size_bytes"] / student["size_bytes"])))
    return [*rows, _quality(metric, QUALITY[0], STUDENT, TEACHER, student["test"]["against_teacher"])]


def text_to_label(systems: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of our way from text to label to every peer's."""
    rows, student = [], systems[STUDENT]
    for name, theirs in systems.items():
        if name != STUDENT:
            rounds = theirs["latency"]["p50_by_round_ms"], student["latency"]["p50_by_round_ms"]
            rows.append(_row("text to label p50", ONE_TEXT, STUDENT, name, ratio_of_rounds(*rounds)))
            rows.append(_throughput("text to label throughput", name, theirs, student))
    return rows


def served(models: Mapping[str, Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Under the closed loop: of each model to the teacher, if it is served, and of the student to BERT-base, if it is.

    Of those to the teacher the task's metric as well. The student is the first of the models.
    """
    rows: list[dict[str, Any]] = []
    teacher = next((name for name in models if name.endswith("_teacher")), None)
    if teacher is not None:
        for name in (name for name in models if name not in (teacher, BERT_BASE)):
            rows += _under_load(models, name, teacher)
            rows.append(_quality(metric, QUALITY[1], name, teacher, models[name]["test"]["against_teacher"]))
    return rows + (_under_load(models, next(iter(models)), BERT_BASE) if BERT_BASE in models else [])


def _under_load(models: Mapping[str, Mapping[str, Any]], name: str, than: str) -> list[dict[str, Any]]:
    rows = []
    for mine, theirs in zip(models[name]["load"], models[than]["load"], strict=True):
        where = f"{mine['concurrency']} clients"
        p50 = ratio_of_rounds(theirs["p50_by_round_ms"], mine["p50_by_round_ms"])
        rate = ratio_of_rounds(mine["requests_by_round_per_s"], theirs["requests_by_round_per_s"])
        rows += [_row("served p50", where, name, than, p50), _row("served requests/s", where, name, than, rate)]
    return rows


def exactly(value: float) -> dict[str, Any]:
    """A ratio that does not vary: of sizes."""
    return {"ratio": value, "interval_95": [value, value], "rounds": None}


def _throughput(figure: str, name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    by_round = "throughput_by_round_texts_per_s"
    return _row(figure, BATCHES, STUDENT, name, ratio_of_rounds(ours[by_round], theirs[by_round]))


def _quality(metric: str, where: str, system: str, than: str, pair: Mapping[str, Any]) -> dict[str, Any]:
    """Student / teacher of what `evaluate.paired` found for teacher and student; None if one of them is not above 0.

    An accuracy has McNemar's p as well, which says whether the two differ.
    """
    found: dict[str, Any] = {"ratio": None, "interval_95": None, "rounds": None}
    if pair.get("ratio", 0.0) > 0:
        low, high = pair.get("ratio_95", (0.0, 0.0))
        found |= {"ratio": 1 / pair["ratio"], "interval_95": [1 / high, 1 / low] if low > 0 else None}
    if metric == "accuracy":
        found["p_value"] = pair["p_value"]
    return _row(metric, where, system, than, found)


def _row(figure: str, where: str, system: str, than: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"figure": figure, "where": where, "system": system, "than": than, **found}


def find(rows: Sequence[Mapping[str, Any]], figure: str, where: str, than: str) -> Mapping[str, Any] | None:
    """A ratio of the INT8 student; None if it was not measured."""
    wanted = (figure, where, than)
    return next((row for row in rows if (row["figure"], row["where"], row["than"]) == wanted), None)


def name_of(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """What a ratio is known by."""
    return row["figure"], row["where"], row["system"], row["than"]


class Standing(Enum):
    """What a ratio says of the two systems."""

    AHEAD = "better"
    OPEN = "not told apart"
    BEHIND = "the other is better"


def standing_of(row: Mapping[str, Any]) -> Standing:
    """Which of the two is better, by more than the rounds vary, or by McNemar's p; with neither it is not known."""
    if "p_value" in row:
        if row["p_value"] >= SIGNIFICANT:
            return Standing.OPEN
        return Standing.AHEAD if row["ratio"] > 1 else Standing.BEHIND
    low, high = row["interval_95"] or (0.0, math.inf)
    return Standing.AHEAD if low > 1 else Standing.BEHIND if high < 1 else Standing.OPEN


def targets(rows: Sequence[Mapping[str, Any]], overhead_share: float) -> list[dict[str, Any]]:
    """What had to be reached, of what was measured: ratio, interval, bound, and whether it holds.

    A bound of 1 is "no worse": it is reached unless the rounds show that ours is worse.
    """
    found = []
    for figure, where, than, bound in TARGETS:
        row = find(rows, figure, where, than)
        if row is not None:
            is_met = standing_of(row) is not Standing.BEHIND if bound == 1 else row["ratio"] >= bound
            what = f"{figure}, {where}: times better than {than.replace('_', ' ')}"
            value = {"value": row["ratio"], "interval_95": row["interval_95"]}
            found.append({"target": what, **value, "rule": "at least", "bound": bound, "is_met": is_met})
    what = "in process: share of the benchmark itself in the fastest p50"
    value = {"value": overhead_share, "interval_95": None}
    met = overhead_share < MAX_OVERHEAD
    return [*found, {"target": what, **value, "rule": "below", "bound": MAX_OVERHEAD, "is_met": met}]
