"""The benchmark of the INT8 student, on the tiny build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks import int8 as benchmark
from compressor.errors import GateError
from compressor.evaluate import MODEL_FILE
from compressor.stages.quantize.candidates import CANDIDATES
from compressor.stages.quantize.rewriting import products, quantize_graph
from tests.conftest import Line


def result() -> dict[str, Any]:
    """One that meets every target."""
    clocks = {"wall_ms": 2.0, "processor_ms": 1.0}
    row = {"scores": {"1": 0.9, "64 mixed": 0.9}, "drop": 0.0, "flips": 0.0, "batch_logit_difference": 0.0}
    row |= {"agreement_fp32": 1.0, "agreement_teacher": 0.97, "size_bytes": 14_600_000, "metric": "accuracy"}
    times = {"fp32": {"p50_ms": 3.0}, "int8": {"p50_ms": 1.0}, "speedup": 3.0, "products_speedup": 3.5}
    return {
        "scheme": "static",
        "int8_cpu": "avx512_vnni",
        "products": {"int8": 18, "fp32": 1},
        "threads": 2,
        "machine_was_busy": False,
        "other_work_meanwhile_percent": 5.0,
        "cpu_in_use_before_percent": 3.0,
        "one_core": {"1x16": {"model": {**clocks, "processor_ms": 1.6}, "products": clocks}},
        "latency": {"1x32": times, "1x128": times},
        "graph_forms": {"1x16": {"library's": clocks, "classification's": clocks}},
        "batches": {"fp32": row, "int8": row},
        "share_of_size": 0.254,
    }


def test_the_products_alone_are_the_graph_s_own(line: Line) -> None:
    graphs = [line.run / folder / MODEL_FILE for folder in ("7-quantize", "6-export/student")]
    for graph, in_int8 in zip(graphs, (6, 0), strict=True):
        call, shapes = benchmark.products_alone(graph, 8)
        # One layer, whose keys and values alone are of every token; the pooler; the classifier, which is never in INT8.
        assert sorted(rows for rows, _ in shapes.values()) == [1, 1, 1, 1, 1, 1, 8]
        assert benchmark._count_products(graph) == {"int8": in_int8, "fp32": 7 - in_int8}
        assert call() is None  # nothing is copied out


def test_products_that_were_left_in_fp32_are_counted(line: Line, tmp_path: Path) -> None:
    source, graph = line.run / "6-export" / "student" / MODEL_FILE, tmp_path / MODEL_FILE
    left = [item.name for item in products(onnx.load(source))][:2]
    quantize_graph(source, graph, CANDIDATES["per-row"], excluded=left)
    assert benchmark._count_products(graph) == {"int8": 4, "fp32": 3}
    assert len(benchmark.products_alone(graph, 8)[1]) == 7


def test_targets_are_met() -> None:
    benchmark.check_targets(result())
    assert benchmark.over_products(result()) == {"1x16": 1.6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_of_size": 0.3}, r"INT8 has 0\.300 of the size; the bound is 0\.26"),
        ({"machine_was_busy": True}, "run again on a quiet machine"),
        ({"latency": {"1x32": {"speedup": 1.7}}}, r"at 1x32 INT8 is 1\.70 times as fast; the target is 1\.8"),
        (
            {"one_core": {"1x64": {"model": {"processor_ms": 1.8}, "products": {"processor_ms": 1.0}}}},
            r"at 1x64 on one core the model takes 1\.80 times its products; the bound is 1\.7",
        ),
        (
            {"batches": {"int8": {"drop": 0.004, "flips": 0, "batch_logit_difference": 0}}},
            r"loses 0\.40 points .* bound is 0\.3",
        ),
        ({"batches": {"int8": {"drop": 0, "flips": 0.01, "batch_logit_difference": 0}}}, r"1\.00 % of answers depend"),
        ({"batches": {"int8": {"drop": 0, "flips": 0, "batch_logit_difference": 0.1}}}, r"logits differ by 1\.0e-01"),
    ],
)
def test_a_missed_target_fails_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=message):
        benchmark.check_targets(result() | change)


def test_without_vnni_a_target_that_cannot_be_met_is_not_met() -> None:
    slow = {"1x32": {"speedup": 1.4, "products_speedup": 1.75}}
    message = r"as fast; the target is 1\.8, which is for processors with VNNI: .* its products alone are 1\.75 times"
    with pytest.raises(GateError, match=message):
        benchmark.check_targets(result() | {"int8_cpu": "avx2", "latency": slow})
    benchmark.check_targets(result() | {"int8_cpu": "avx2"})  # met all the same


def test_tables_hold_times_and_batches() -> None:
    text = "\n".join(table.markdown() for table in benchmark.tables(result()))
    assert "| 1x16 | 1.600 | 1.000 | 2.000 | 2.000 | 1.60 |" in text
    assert "its own products (18 in INT8, 1 in fp32)" in text
    assert "| 1x128 | 3.000 | 1.000 | 3.00 | 3.50 |" in text
    assert "| int8 | 90.00 | 90.00 | 0.00 | 0.0e+00 | 100.00 | 97.00 | 14.60 |" in text
