"""The page of a comparison: with 1, 3 and 20 systems, whole without a network, each figure in its place."""

import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import compare_page, compare_tables, report
from benchmarks.baseline import against_baseline
from benchmarks.local import STUDENT, TEACHER, THROUGHPUT
from benchmarks.ratios import exactly

TEST = {"score": 0.9, "interval_95": [0.88, 0.92], "rows": 900}
PAIR = {"agreement": 0.97, "p_value": 0.25}
TIMES = {"p50_ms": 2.0, "p95_ms": 3.0, "p99_ms": None, "p50_by_round_ms": [2.0, 2.1]}


def system(name: str, number: int) -> dict[str, Any]:
    shapes = {"real_texts_batch_1": TIMES, "1x32": {**TIMES, "p50_ms": 2.0 + number}}
    test = {**TEST, "score": 0.9 - number / 1000, "against_teacher": None if name == TEACHER else PAIR}
    return {"size_bytes": 10_000_000, "test": test, "latency": shapes, THROUGHPUT: 500.0}


def served(number: int) -> dict[str, Any]:
    load = [
        {
            **TIMES,
            "concurrency": n,
            "requests_per_s": 90.0 * n,
            "server_cpu_s_per_1000_texts": None,
            "client_cpu_s_per_1000_texts": 0.5,
            "price_per_million_texts": None,
            "failures": 0,
        }
        for n in (1, 4)
    ]
    planned = [
        {**TIMES, "rate_per_s": rate, "answered_per_s": rate, "sent_late_p99_ms": 0.2, "failures": 0}
        for rate in (30.0, 60.0)
    ]
    shares = {"instances": 2, "threads_of_each": 1}
    return {**shares, "test": {**TEST, "against_teacher": PAIR}, "load": load, "open_loop": planned}


def result(count: int) -> dict[str, Any]:
    """A made-up comparison of so many systems, the student among them."""
    names = [STUDENT, TEACHER, *(f"runtime_{n}" for n in range(count - 2))][:count]
    spent = {"cpu_s_per_1000_texts": 2.0, "price_per_million_texts": 0.02}
    ratio = {"figure": "p50", "where": "1x32", "system": STUDENT}
    bins = [{"low": 0.8, "high": 0.9, "rows": 9, "confidence": 0.85, "accuracy": 0.8, "interval_95": [0.7, 0.9]}]
    sure = {"ece": 0.05, "ece_by_chance": 0.02, "overconfidence": 0.05, "rows": 9, "bins": bins}
    example = {
        "text": "a | <b>bold</b> film",
        "label": "negative",
        "teacher": "negative, 99 %",
        "int8": "positive, 90 %",
    }
    return {
        "benchmark": "compare",
        "task": "sst2",
        "verdict": "The INT8 student keeps 99.0 % of the teacher's test accuracy.",
        "metric": "accuracy",
        "price_per_core_hour": 0.04,
        **report.context(report.Begun(), command="python -m benchmarks compare", seed=0, threads=1),
        "conditions": dict.fromkeys(
            ("in_process", "text_to_label", "start", "processor_time", "served", "ratios"), "so"
        ),
        "systems": {name: f"about {name}" for name in names},
        "in_process": {name: system(name, number) for number, name in enumerate(names)},
        "overhead": {"empty_call_p50_ms": 0.0001, "fastest_p50_ms": 2.0, "share": 0.00005, "served_client_share": 0.2},
        "tokenizer": TIMES,
        "text_to_label": {
            STUDENT: {"test": system(STUDENT, 0)["test"], "size_bytes": 1, "latency": TIMES, THROUGHPUT: 1.0}
        },
        "start": {name: {"first_answer_s": 1.5, "uss_bytes": 50_000_000} for name in ("process_alone", *names)},
        "processor_time": {name: {"one_at_a_time": spent, "batches_of_32": spent} for name in names},
        "served": {name: served(n) for n, name in enumerate(["sst2", "sst2_teacher", *names[2:]][:count])},
        "time_split_ms": {"sst2": {"client": 0.4, "triton": 0.7, "tokenizer": 0.1, "onnxruntime": 0.8}},
        "server": {"ready_s": 4.0, "uss_bytes": 900_000_000},
        "ratios": [{**ratio, "than": name, **exactly(0.5 + n)} for n, name in enumerate(names[1:])],
        "targets": [
            {"target": "speed", "value": 40.0, "interval_95": None, "rule": "at least", "bound": 35.0, "is_met": True}
        ],
        "calibration": {"rows": 9, "split": "test", "systems": {STUDENT: sure}},
        "disagreements": {"count": 1, "rows": 9, "split": "test", "examples": [example]},
    }


@cache
def page_of(count: int) -> str:
    """The page of that comparison, drawn once."""
    return compare_page.html(result(count))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_each_system_has_its_place_and_its_point(count: int) -> None:
    shown = page_of(count)
    plots = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    for name in result(count)["in_process"]:
        words = name.replace("_", " ")
        assert sum(words in plot for plot in plots) >= 2, name  # against accuracy, and alone
        assert f"<td>{words}</td>" in shown
    assert len(re.findall("<figure", shown)) == 6
    assert "The INT8 student keeps 99.0\u00a0% of the teacher" in shown


def test_the_page_needs_no_network_and_shows_no_foreign_markup() -> None:
    shown = page_of(3)
    assert not re.search(r"(src|href)=[\"'](?!#)|<script|@import|url\((?!#)", shown)
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown
    assert "None" not in shown
    for plot in re.findall(r"<svg.*?</svg>", shown, re.DOTALL):
        ElementTree.fromstring(re.sub(r"xlink:", "", plot))


def test_where_another_system_is_better_the_tables_say_so() -> None:
    tables = compare_tables.by_name(result(3))
    assert [row[-1] for row in tables["ratios"].rows] == ["the other is better", "better"]
    assert "the other is better" in page_of(3)


def test_a_regression_without_calibration_still_has_a_page() -> None:
    shown = compare_page.html(result(3) | {"calibration": None})
    assert "Calibration" not in shown
    assert len(re.findall("<figure", shown)) == 5


def test_markdown_keeps_a_table_whole_whatever_a_text_holds() -> None:
    line = compare_tables.by_name(result(3))["disagreements"].markdown().splitlines()[-1]
    assert line == "| a \\| \\<b\\>bold\\</b\\> film | negative | negative, 99 % | positive, 90 % |"


def test_what_the_client_takes_stands_beside_what_the_stopwatch_takes() -> None:
    found = result(1)
    title = compare_tables.in_process(found).title
    assert title.endswith("0.1 us, 0.005 % of the fastest; client and network take 20 % of a served request)")
    assert title.replace("p50 / p95 / p99", "p50") == compare_tables.p50_in_process(found).title
    found["overhead"]["served_client_share"] = None
    assert compare_tables.in_process(found).title.endswith("0.1 us, 0.005 % of the fastest)")


def test_served_models_are_shown_with_their_processes() -> None:
    assert compare_tables.closed_loop(result(1)).rows[0][0] == "sst2 (2 x 1)"


def test_each_row_of_a_baseline_says_what_is_allowed() -> None:
    row = {"figure": "accuracy", "where": "in process", "system": STUDENT, "than": TEACHER, "interval_95": None}
    found = result(3)
    before = {**found, "ratios": [{**row, "ratio": 1.0}]}
    now = {**found, "ratios": [{**row, "ratio": 0.95}]}
    found["baseline"] = against_baseline(now, before, file=Path("b.json"), tolerance=0.1)
    shown = compare_page.html(found).replace("\u00a0", " ")
    assert "10 %" not in shown
    assert re.search(r">-5\.0 %</td>\s*<td[^>]*>-1 %</td>\s*<td[^>]*>REGRESSED</td>", shown)
