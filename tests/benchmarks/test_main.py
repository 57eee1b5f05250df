import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import bert_base, compare
from benchmarks.local import Effort
from compressor.errors import GateError
from serving.runtime import TritonServer

TINY_EFFORT = Effort(rounds=1, turn_s=0.02, served_rounds=1, served_turn_s=0.3)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command as `python -m benchmarks` does; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    return int(left.value.code or 0)


def test_an_unknown_flag_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "compare", "--qick") == 2
    assert "--qick" in capsys.readouterr().err


def test_a_missing_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "compare", "--run", str(tmp_path / "none"), "--json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --run")
    assert err.count("\n") == 1


def test_an_unpublished_repository_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_build: Any, tmp_path: Path
) -> None:
    assert run(monkeypatch, "compare", "--run", str(tiny_build.run), "--repository", str(tmp_path / "none")) == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_missed_target_is_a_gate_with_value_and_bound() -> None:
    result = {
        "machine_was_busy": False,
        "speedup_p50": 12.3,
        "min_speedup_p50": 35.0,
        "shrink": 30.0,
        "min_shrink": 24.0,
    }
    with pytest.raises(GateError, match=r"^the student's speed is 12\.3 times; the target is at least 35$"):
        bert_base.check_targets(result)
    bert_base.check_targets(result | {"speedup_p50": 35.0})


def test_a_busy_machine_proves_nothing() -> None:
    with pytest.raises(GateError, match=r"^80 % of the processor was in use by other work, the bound is 10 %"):
        bert_base.check_targets({"machine_was_busy": True, "cpu_in_use_before_percent": 80.0})


@pytest.mark.triton
def test_compare_gives_one_json_object(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_build: Any,
    tiny_server: TritonServer,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(compare, "QUICK", TINY_EFFORT)
    flags = ["--run", str(tiny_build.run), "--url", tiny_server.grpc_url, "--quick", "--json", "--out", str(tmp_path)]
    assert run(monkeypatch, "compare", *flags, "--threads", "1", "--seed", "3") == 0
    out, _ = capsys.readouterr()
    result = json.loads(out, parse_constant=pytest.fail)
    assert (result["benchmark"], result["seed"], result["threads"], result["quick"]) == ("compare", 3, 1, True)
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["onnxruntime"]
    assert list(result["in_process"]) == ["teacher_pytorch", "teacher_onnx", "student_fp32", "student_int8"]
    for facts in result["in_process"].values():
        assert set(facts) == {"size_bytes", "test", "latency", "throughput_batch_32_texts_per_s"}
        assert list(facts["latency"]) == ["real_texts_batch_1", "1x32", "8x32", "32x32"]
        assert all(times["p50_ms"] > 0 for times in facts["latency"].values())
        assert facts["test"]["rows"] == 36
        assert len(facts["test"]["interval_95"]) == 2
    assert set(result["served"]) == {"sst2", "sst2_teacher"}
    student = result["served"]["sst2"]
    assert [row["concurrency"] for row in student["load"]] == [1, 4, 16]
    assert all(row["failures"] == 0 and row["requests_per_s"] > 0 for row in student["load"])
    assert student["test"]["against_in_process"]["agreement"] == 1.0
    assert json.loads((tmp_path / "compare.json").read_text()) == result
    assert "## Served, gRPC" in (tmp_path / "compare.md").read_text()


def test_ratios_by_hand() -> None:
    def system(p50: float, size: int, rate: float) -> dict[str, object]:
        return {"size_bytes": size, "latency": {"1x32": {"p50_ms": p50}}, compare.THROUGHPUT: rate}

    def model(p50: float, rate: float) -> dict[str, object]:
        return {"load": [{"concurrency": 4, "p50_ms": p50, "requests_per_s": rate}]}

    found = compare.ratios(
        {
            "in_process": {"teacher_pytorch": system(70.0, 90, 10.0), "student_int8": system(2.0, 9, 50.0)},
            "served": {"sst2": model(5.0, 300.0), "sst2_teacher": model(20.0, 100.0)},
        }
    )
    assert found == {
        "size": 10.0,
        "p50": {"1x32": 35.0},
        "throughput": 5.0,
        "served": [{"concurrency": 4, "p50": 4.0, "requests_per_s": 3.0}],
    }
