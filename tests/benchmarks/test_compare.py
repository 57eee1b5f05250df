"""The whole comparison on tiny models, and what its figures cost and mean."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import baseline, compare, cost
from benchmarks.local import Effort
from benchmarks.runs import forms_of, open_run
from compressor.errors import GateError, ModelError
from serving.runtime import TritonServer
from tests.benchmarks.conftest import TEXTS, TinyBuild

TINY_EFFORT = Effort(
    rounds=2,
    turn_s=0.02,
    served_rounds=2,
    served_turn_s=0.3,
    shapes=((1, 8), (2, 8)),
    concurrency=(1, 4),
    load_shares=(0.5,),
    starts=1,
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command as `python -m benchmarks` does; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    return int(left.value.code or 0)


@pytest.mark.triton
@pytest.mark.slow
def test_compare_gives_one_json_object_and_a_baseline(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_build: TinyBuild,
    tiny_server: TritonServer,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(compare, "QUICK", TINY_EFFORT)
    flags = ["--run", str(tiny_build.run), "--url", tiny_server.grpc_url, "--quick", "--json", "--out", str(tmp_path)]
    flags += ["--threads", "1", "--seed", "3", "--peer", "optimum", "--price-per-core-hour", "0.36"]
    assert run(monkeypatch, "compare", *flags) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out, parse_constant=pytest.fail)
    assert (result["benchmark"], result["schema_version"], result["seed"], result["threads"]) == ("compare", 2, 3, 1)
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["onnxruntime"]
    assert json.loads((tmp_path / "compare.json").read_text()) == result
    assert "## Served, gRPC, closed loop" in (tmp_path / "compare.md").read_text()
    check_in_process(result)
    check_costs(result)
    check_served(result)
    assert result["time_split_ms"] == {}  # the server's metrics page is not known
    assert result["verdict"].startswith("The INT8 student keeps")
    assert result["calibration"]["systems"]["student_int8"]["rows"] == 36
    assert 0 < result["overhead"]["share"] < 1

    faster = json.loads((tmp_path / "compare.json").read_text())
    for row in faster["ratios"]:
        if row["figure"] == "size" and row["than"] == "teacher_onnx":
            row["ratio"], row["interval_95"] = 2 * row["ratio"], [2 * end for end in row["interval_95"]]
    (tmp_path / "before.json").write_text(json.dumps(faster))
    monkeypatch.setattr(compare, "_measure_in_process", lambda *_: pytest.fail("measured before the baseline is read"))
    assert run(monkeypatch, "compare", *flags, "--baseline", str(tmp_path / "none.json")) == 1
    found = baseline.against_baseline(result, faster, file=tmp_path / "before.json", tolerance=0.1)
    with pytest.raises(GateError, match=r"1 of \d+ ratios regressed .* size of student_int8 against teacher_onnx"):
        baseline.check_baseline(found)


def check_in_process(result: dict[str, Any]) -> None:
    assert list(result["in_process"]) == ["teacher_pytorch", "teacher_onnx", "student_fp32", "student_int8"]
    for facts in result["in_process"].values():
        assert list(facts["latency"]) == ["real_texts_batch_1", "1x8", "2x8"]
        assert all(times["p50_ms"] > 0 and len(times["p50_by_round_ms"]) == 2 for times in facts["latency"].values())
        assert facts["test"]["rows"] == 36
        assert len(facts["test"]["interval_95"]) == 2
    assert list(result["text_to_label"]) == ["student_int8", "optimum"]
    ours, theirs = (result["text_to_label"][name] for name in ("student_int8", "optimum"))
    # The same file, asked in another way.
    assert ours["test"]["all"] == theirs["test"]["all"] == result["in_process"]["student_int8"]["test"]["all"]
    names = [(row["figure"], row["where"], row["than"]) for row in result["ratios"]]
    assert ("text to label p50", "one text", "optimum") in names
    assert ("accuracy", "in process", "teacher_pytorch") in names
    assert len(names) == len(set(names))


def check_costs(result: dict[str, Any]) -> None:
    start = result["start"]
    assert next(iter(start)) == "process_alone"
    assert set(start) == {"process_alone", *result["in_process"], "optimum"}
    assert all(row["first_answer_s"] > 0 and row["uss_bytes"] > 1e6 for row in start.values())
    assert start["teacher_pytorch"]["first_answer_s"] > start["process_alone"]["first_answer_s"]
    assert (
        start["teacher_pytorch"]["uss_bytes"] > start["student_int8"]["uss_bytes"] > start["process_alone"]["uss_bytes"]
    )
    for facts in result["processor_time"].values():
        for row in facts.values():
            assert row["cpu_s_per_1000_texts"] > 0
            # 0.36 for an hour of a core is 0.0001 for a second; a million texts are 1,000 times a thousand.
            assert row["price_per_million_texts"] == pytest.approx(0.1 * row["cpu_s_per_1000_texts"])


def check_served(result: dict[str, Any]) -> None:
    assert list(result["served"]) == ["sst2", "sst2_teacher"]
    for facts in result["served"].values():
        assert [row["concurrency"] for row in facts["load"]] == [1, 4]
        assert all(row["failures"] == 0 and row["requests_per_s"] > 0 for row in facts["load"])
        assert all(row["failures"] == 0 and row["sent_late_p99_ms"] >= 0 for row in facts["open_loop"])
    student = result["served"]["sst2"]["test"]
    assert student["against_in_process"]["agreement"] == 1.0
    assert 0 <= student["against_teacher"]["p_value"] <= 1


def test_a_million_texts_cost_what_their_seconds_cost() -> None:
    # 1.8 s for 1,000 texts are half an hour for a million.
    assert cost.price(1.8, 0.04) == pytest.approx(0.02)


def test_a_process_that_cannot_load_a_system_is_one_sentence(tiny_build: TinyBuild) -> None:
    forms = forms_of(open_run(tiny_build.run))
    with pytest.raises(
        ModelError, match="a process that loads nothing_known alone fails; the last it says is: KeyError"
    ):
        cost.measure_starts(["nothing_known"], forms, TEXTS[0], threads=1, starts=1)


def targets(**changes: Any) -> dict[str, Any]:
    row = {"target": "p50", "value": 30.0, "rule": "at least", "bound": 35.0, "is_met": False}
    return {"quick": False, "machine_was_busy": False, "targets": [row | changes]}


def test_a_missed_target_is_a_gate_with_value_and_bound() -> None:
    with pytest.raises(GateError, match=r"^targets missed: p50 is 30\.00, the target is at least 35$"):
        compare.check_targets(targets())
    compare.check_targets(targets(is_met=True))
    compare.check_targets(targets() | {"quick": True})


def test_peers_that_win_are_named_in_the_verdict() -> None:
    def row(than: str, ratio: float, interval: list[float]) -> dict[str, Any]:
        return {
            "figure": "text to label p50",
            "where": "one text",
            "than": than,
            "ratio": ratio,
            "interval_95": interval,
        }

    rows = [row("transformers", 4.5, [4.0, 5.0]), row("optimum", 0.8, [0.7, 0.9]), row("openvino", 0.95, [0.8, 1.1])]
    tail = compare._against_peers({"ratios": rows})
    assert tail == (
        "; on one text it is faster than transformers (4.5 times); the rounds cannot tell it from openvino (0.95 "
        "times); it is slower than optimum (0.8 times)"
    )
    assert compare._against_peers({"ratios": []}) == ""
