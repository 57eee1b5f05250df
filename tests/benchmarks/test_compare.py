"""The whole comparison on tiny models, and what its figures cost and mean."""

import copy
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import baseline, cold, compare, cost, served
from benchmarks.bert_base import BERT_BASE
from benchmarks.cold import ALONE
from benchmarks.local import STUDENT, TEACHER, Effort, Wanted
from benchmarks.ratios import exactly
from benchmarks.runs import forms_of, open_run
from compressor import latency, machine
from compressor.errors import GateError, ModelError
from serving.runtime import TritonServer
from tests.benchmarks.conftest import TEXTS
from tests.benchmarks.test_compare_page import result as made_up
from tests.conftest import Line

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
    line: Line,
    tiny_server: TritonServer,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(compare, "QUICK", TINY_EFFORT)
    monkeypatch.setattr(cost, "measure_starts", no_starts)
    # Times are not what this is about.
    for module in (latency, cost):
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(machine, "LOOK_S", 0.1)
    flags = ["--run", str(line.run), "--url", tiny_server.grpc_url, "--quick", "--json", "--out", str(tmp_path)]
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
    assert result["verdict"].startswith("The INT8 student ")
    assert result["overhead"]["served_client_share"] is None
    assert result["calibration"]["systems"]["student_int8"]["rows"] == 48
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


def no_starts(systems: list[str], *_: object, threads: int, starts: int) -> dict[str, Any]:
    """In place of a process for each system, which takes seconds: `test_a_start_...` below measures some."""
    return {name: {"starts": starts, "first_answer_s": 0.1, "uss_bytes": 1e7} for name in (ALONE, *systems)}


def check_in_process(result: dict[str, Any]) -> None:
    assert list(result["in_process"]) == ["teacher_pytorch", "teacher_onnx", "student_fp32", "student_int8"]
    for facts in result["in_process"].values():
        assert list(facts["latency"]) == ["real_texts_batch_1", "1x8", "2x8"]
        assert all(times["p50_ms"] > 0 and len(times["p50_by_round_ms"]) == 2 for times in facts["latency"].values())
        assert facts["test"]["rows"] == 48
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
    assert set(result["start"]) == {ALONE, *result["in_process"], "optimum"}
    for facts in result["processor_time"].values():
        for row in facts.values():
            assert row["cpu_s_per_1000_texts"] > 0
            # 0.36 for an hour of a core is 0.0001 for a second; a million texts are 1,000 times a thousand.
            assert row["price_per_million_texts"] == pytest.approx(0.1 * row["cpu_s_per_1000_texts"])


def check_served(result: dict[str, Any]) -> None:
    assert list(result["served"]) == ["sst2", "sst2_teacher"]
    assert result["served"]["sst2_teacher"]["instances"] >= 1
    for facts in result["served"].values():
        assert facts["threads_of_each"] >= 1
        assert [row["concurrency"] for row in facts["load"]] == [1, 4]
        assert all(row["failures"] == 0 and row["requests_per_s"] > 0 for row in facts["load"])
        assert all(row["failures"] == 0 and row["sent_late_p99_ms"] >= 0 for row in facts["open_loop"])
    student = result["served"]["sst2"]["test"]
    assert student["against_in_process"]["agreement"] == 1.0
    assert 0 <= student["against_teacher"]["p_value"] <= 1


def test_a_million_texts_cost_what_their_seconds_cost() -> None:
    # 1.8 s for 1,000 texts are half an hour for a million.
    assert cost.price(1.8, 0.04) == pytest.approx(0.02)


def test_a_start_takes_the_time_and_memory_of_what_it_loads(line: Line) -> None:
    forms = forms_of(open_run(line.run))
    start = cost.measure_starts([STUDENT, TEACHER], forms, TEXTS[0], threads=1, starts=1)
    assert list(start) == [ALONE, STUDENT, TEACHER]
    assert all(row["first_answer_s"] > 0 and row["rss_bytes"] >= row["uss_bytes"] > 1e6 for row in start.values())
    assert start[TEACHER]["first_answer_s"] > start[ALONE]["first_answer_s"]
    assert start[TEACHER]["uss_bytes"] > start[STUDENT]["uss_bytes"] > start[ALONE]["uss_bytes"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library that is compared with
def test_what_a_process_loads_alone_answers(line: Line) -> None:
    forms = forms_of(open_run(line.run))
    systems = (ALONE, TEACHER, "teacher_onnx", "student_fp32", STUDENT, "optimum", "torch-dynamic")
    found = {name: cold.answer_of(name, forms, 1)(TEXTS[0]) for name in systems}
    assert found[ALONE] is None
    teacher, student = cast(dict[str, float], found["teacher_onnx"]), cast(dict[str, float], found[STUDENT])
    logits = cast(list[list[float]], found[TEACHER])[0]
    assert math.log(teacher["positive"] / teacher["negative"]) == pytest.approx(logits[1] - logits[0], abs=1e-3)
    assert student == pytest.approx(found["student_fp32"], abs=0.2)
    assert found["optimum"] == [max(student, key=lambda label: student[label])]
    assert np.shape(cast(Any, found["torch-dynamic"])) == (1, 2)


def test_a_process_that_cannot_load_a_system_is_one_sentence(line: Line) -> None:
    forms = forms_of(open_run(line.run))
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


MADE = made_up(3)
EARLIER: dict[str, Any] = {
    "benchmark": "compare",
    "schema_version": compare.SCHEMA_VERSION,
    "task": "sst2",
    "quick": True,
    "threads": 2,
    "command": "earlier",
    "machine": {},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The arguments of a comparison whose measurements are made up, with a baseline file to be written."""

    @contextmanager
    def server(root: Path, url: str | None) -> Iterator[served.Server]:
        yield served.Server(url="host:1")

    def in_process(run: Any, question: Any, result: dict[str, Any]) -> dict[str, Any]:
        keys = ("in_process", "overhead", "tokenizer", "processor_time", "text_to_label", "start", "disagreements")
        result |= {key: copy.deepcopy(MADE[key]) for key in (*keys, "calibration")}
        return {STUDENT: None}

    run = SimpleNamespace(task=SimpleNamespace(name="sst2", metric="accuracy"))
    monkeypatch.setattr(compare, "open_run", lambda path: run)
    monkeypatch.setattr(compare, "_measure_in_process", in_process)
    monkeypatch.setattr(compare, "ratios", lambda result: MADE["ratios"])
    monkeypatch.setattr(compare, "check_measured", lambda *_: None)  # the peers of MADE are
    for name, value in {
        "check_repository": lambda *_: None,
        "check_server": lambda *_: 2,
        "server": server,
        "measure_served": lambda *_, **__: copy.deepcopy(MADE["served"]),
        "time_split_ms": lambda *_: MADE["time_split_ms"],
    }.items():
        monkeypatch.setattr(served, name, value)
    flags = ["--quick", "--threads", "2", "--json", "--out", str(tmp_path / "out")]
    return ["compare", *flags, "--baseline", str(tmp_path / "before.json")]


def test_a_regression_ends_with_3_and_all_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: list[str], tmp_path: Path
) -> None:
    size = {"figure": "size", "where": "file", "system": STUDENT, "than": TEACHER, **exactly(9.0)}
    better = [{**row, **exactly(2 * row["ratio"])} for row in MADE["ratios"][:1]]
    (tmp_path / "before.json").write_text(json.dumps(EARLIER | {"ratios": [size, *better, *MADE["ratios"][1:]]}))
    assert run(monkeypatch, *measured) == 3
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown == json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["is_regression"] for row in shown["baseline"]["compared"]] == [True, False]
    assert shown["overhead"]["served_client_share"] == pytest.approx(0.4 / 2.0)
    assert "a cascade asks two models and is measured here alone" in shown["conditions"]["served"]
    assert "error: 1 of 2 ratios regressed by more than allowed" in err
    assert "REGRESSED" in (tmp_path / "out" / "compare.html").read_text()
    assert "REGRESSED" in (tmp_path / "out" / "compare.md").read_text()
    documented = (Path(__file__).parents[2] / "docs" / "report.md").read_text().partition("# The comparison as JSON")[2]
    assert [key for key in shown if f"`{key}`" not in documented] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"quick": False}, "was measured with quick False"), ({"ratios": []}, "lacks the ratios of size")],
)
def test_what_no_run_could_be_compared_with_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measured: list[str],
    tmp_path: Path,
    changes: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.setattr(compare, "_measure_in_process", lambda *_: pytest.fail("measured first"))
    (tmp_path / "before.json").write_text(json.dumps(EARLIER | changes))
    assert run(monkeypatch, *measured) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--bert-base", "--url", "host:1"), "error: --bert-base with --url host:1: it is served on this machine"),
        (("--tolerance", "0.2"), "error: --tolerance 0.2 is how far a ratio may fall since --baseline, which is not"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    assert run(monkeypatch, "compare", *flags) == 1
    assert capsys.readouterr().err.startswith(sentence)


def test_bert_base_gets_the_student_s_cores(monkeypatch: pytest.MonkeyPatch, line: Line) -> None:
    given: list[int] = []
    monkeypatch.setattr(compare, "bert_base", lambda task, vocabulary: "a model")
    monkeypatch.setattr(compare, "write_repository", lambda model, run, root, cores: given.append(cores))
    monkeypatch.setattr(served, "server", lambda root, url: nullcontext(served.Server(url="host:2")))
    with compare._untrained(open_run(line.run), Wanted(bert_base=True), 6) as found:
        assert list(found) == [BERT_BASE]
    assert given == [6]


def in_words(size_bytes: int = 40_000_000, **changes: Any) -> str:
    found = copy.deepcopy(MADE) | {"quick": False, "machine_was_busy": False}
    speed = {"figure": "p50", "where": "1x32", "system": STUDENT, "than": TEACHER, "rounds": 8}
    found["ratios"] = [speed | {"ratio": 8.0, "interval_95": [7.0, 9.0]} | changes]
    found["in_process"][TEACHER]["size_bytes"] = size_bytes
    return compare.verdict(found)


def test_the_verdict_in_words() -> None:
    assert in_words() == (
        "The INT8 student reaches 100.1 % of the teacher's test accuracy (90.0 against 89.9, which chance can explain: "
        "McNemar p = 0.25), is 4.0 times smaller, and answers 1 x 32 tokens 8.0 times faster (95 % interval 7.0 to "
        "9.0) than the teacher in PyTorch."
    )
    assert ", is 2.0 times larger, and answers" in in_words(size_bytes=5_000_000)


@pytest.mark.parametrize(
    ("ratio", "interval", "words"),
    [
        (0.5, [0.4, 0.625], "tokens 2.0 times slower (95 % interval 1.6 to 2.5) than the teacher in PyTorch."),
        (
            0.8,
            [0.6, 1.1],
            "tokens in a time not told apart (1.2 times slower, 95 % interval of the ratio 0.60 to 1.10) from that of "
            "the teacher in PyTorch.",
        ),
        (2.0, None, "tokens 2.0 times faster (one round, no interval) than the teacher in PyTorch."),
    ],
)
def test_the_verdict_says_who_is_faster_as_far_as_the_rounds_tell(
    ratio: float, interval: list[float] | None, words: str
) -> None:
    assert in_words(ratio=ratio, interval_95=interval).endswith(words)


@pytest.mark.parametrize(
    ("metric", "score", "pair", "words"),
    [
        ("accuracy", 0.8, {"p_value": 0.001}, "keeps 88.9 % of the teacher's test accuracy (80.0 against 90.0, more "),
        ("Matthews correlation", -0.1, {"difference_95": (0.9, 1.1)}, "is compared with the teacher's test Matthews"),
        (
            "F1",
            0.89,
            {"difference_95": (-0.01, 0.03)},
            "which chance can explain: 95 % interval of the difference -3.0 ",
        ),
        (
            "F1",
            0.89,
            {"difference_95": (0.005, 0.02)},
            "more than chance explains: 95 % interval of the difference -2.0",
        ),
    ],
)
def test_the_verdict_says_whether_the_metric_differs(
    metric: str, score: float, pair: dict[str, Any], words: str
) -> None:
    assert words in compare._kept({"score": score, "against_teacher": pair}, {"score": 0.9}, metric)


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
