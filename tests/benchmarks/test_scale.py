"""How cost grows: what is measured, where it bends, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from benchmarks import scale
from benchmarks.load import Answered, Load
from benchmarks.scale import Plan, attention_share, findings, growth
from benchmarks.served import Query
from compressor import latency
from serving.errors import ServingError
from tests.conftest import Line

PLAN = Plan(tokens=(8, 16, 512), batches=(1, 2), labels=(2, 9), clients=(1, 2), rounds=1, turn_s=0.0, served_s=0.3)


@pytest.mark.parametrize(("power", "p50_ms"), [(0.0, 3.0), (1.0, 12.0), (2.0, 48.0)])
def test_growth_is_the_power_of_the_size(power: float, p50_ms: float) -> None:
    assert growth({"size": 8, "p50_ms": 3.0}, 32, p50_ms) == pytest.approx(power)


def test_attention_s_share_of_the_multiplications() -> None:
    # A layer of width 2 with 4 units between: 4 x 2 x 2 + 2 x 2 x 4 = 32 for each token, and 2 x 2 for each pair.
    assert attention_share({"hidden_size": 2, "intermediate_size": 4}, 8) == pytest.approx(0.5)
    assert attention_share({"hidden_size": 312, "intermediate_size": 1200}, 512) == pytest.approx(0.21918, abs=1e-5)


def rows(*times_ms: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, p50_ms in enumerate(times_ms):
        exponent = growth(found[-1], 2**number, p50_ms) if found else None
        found.append({"size": 2**number, "p50_ms": p50_ms, "p95_ms": None, "exponent": exponent})
    return found


def said(what: str, measured: list[dict[str, Any]]) -> str:
    sweeps = {what: {"unit": "units", "systems": {"ours": measured}}}
    return " ".join(findings(sweeps, {"ours": {1: 0.1, 2 ** (len(measured) - 1): 0.4}}))


def test_a_sweep_says_where_it_bends() -> None:
    assert said("batch", rows(1, 2, 4)) == "ours, batch: linear over the whole range."
    assert "up to 4 units time grows more slowly" in said("batch", rows(1, 1.1, 1.3, 2.6))
    steep = said("tokens", rows(1, 2, 5, 20))
    assert "at 4 units time grows faster than the work, with the power 1.32" in steep
    assert "10 % of a layer's multiplications are between tokens at 1, 40 % at 8" in steep


def test_only_the_first_sizes_are_said_to_be_all_start_up() -> None:
    exponents = (0.5, 1.0, 1.3, 1.2, 0.88)
    sentences = said("batch", rows(*(2**power for power in accumulate(exponents, initial=0.0))))
    assert "up to 2 units time grows more slowly than the work" in sentences
    assert "at 8 units time grows faster than the work, with the power 1.30" in sentences
    assert "at 32 units time grows more slowly than the work, though not before" in sentences
    late = said("batch", rows(1, 2, 3))
    assert "at 4 units" in late
    assert "up to" not in late
    assert "linear" not in late


def test_labels_are_compared_from_end_to_end() -> None:
    assert "8 labels take +50.0 % of the time of 1" in said("labels", rows(1, 1.2, 1.4, 1.5))


def test_clients_are_enough_where_more_gain_nothing() -> None:
    measured = [
        {"size": size, "p50_ms": p50_ms, "requests_per_s": rate, "failures": 0}
        for size, p50_ms, rate in ((1, 2.0, 480.0), (4, 5.0, 790.0), (16, 20.0, 800.0))
    ]
    sentence = said("clients", measured)
    assert "4 clients reach 790 requests/s, and more of them at most 800" in sentence
    assert "5.0 ms with 4, 20.0 with 16" in sentence
    assert "cores" not in sentence  # how busy they are is not measured
    still = said("clients", measured[:2])
    assert "rate still grows at 4 clients, the most measured: 790 requests/s" in still
    assert "more of them" not in still


def test_failed_requests_are_counted_and_no_answer_is_an_error() -> None:
    plan = replace(PLAN, clients=(1, 256))

    def send(load: Load, texts: Sequence[Query]) -> Answered:
        failures = ["DeadlineError: late", "DeadlineError: later"] if load.concurrency == 256 else []
        return Answered([1.0, 2.0], failures, 0.5)

    found = scale.client_rows(send, "host:1", ["sst2"], ["a film"], plan, seed=0)
    assert [(row["size"], row["requests_per_s"], row["failures"]) for row in found["sst2"]] == [(1, 4, 0), (256, 4, 2)]
    sentence = "2 requests of 256 clients failed and are not in the times, the first with: DeadlineError: late"
    assert sentence in said("clients", found["sst2"])
    (table, _) = scale.tables(
        {
            "sweeps": {"clients": {"unit": "clients", "systems": found}},
            "conditions": {"clients": "closed loop"},
            "findings": [],
        }
    )
    assert (table.header[-1], [row[-1] for row in table.rows]) == ("failures", ["0", "2"])
    with pytest.raises(ServingError, match="no request of 1 concurrent clients was answered"):
        scale.client_rows(lambda load, texts: Answered([], ["lost"], 0.5), "host:1", ["sst2"], ["a film"], plan, seed=0)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_every_sweep_is_measured(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SETTLE_S", 0.0)
    result = scale.scale(line.run, line.repository, plan=PLAN, threads=1, seed=0, command="python -m benchmarks scale")
    sizes = {
        what: {name: [row["size"] for row in found] for name, found in sweep["systems"].items()}
        for what, sweep in result["sweeps"].items()
    }
    assert sizes == {
        "tokens": {"student INT8": [8, 16], "teacher ONNX": [8, 16]},  # the tiny models have 64 positions
        "batch": {"student INT8": [1, 2], "teacher ONNX": [1, 2]},
        "labels": {"student fp32": [2, 9]},
        "clients": {"sst2": [1, 2], "sst2_teacher": [1, 2]},
    }
    for sweep in result["sweeps"].values():
        for found in sweep["systems"].values():
            assert all(row["p50_ms"] > 0 for row in found)
    assert len(result["findings"]) >= 7
    json.dumps(result)
    assert [table.title.partition(":")[0] for table in scale.tables(result)] == [
        "Tokens",
        "Batch",
        "Labels",
        "Clients",
        "What is not linear",
    ]
    headers = {table.title.partition(":")[0]: table.header for table in scale.tables(result)}
    assert [name for name, header in headers.items() if "us each" in header] == ["Tokens", "Batch"]
    assert "requests/s" in headers["Clients"]
    plots = scale.plots(result)
    assert set(plots) == {*sizes, "clients-rate"}
    assert "requests/s" in plots["clients-rate"]
    assert all(text.startswith("<svg") for text in plots.values())
    text = scale.html(result)
    assert text.count("<svg") == len(plots)
    assert result["findings"][0] in text
