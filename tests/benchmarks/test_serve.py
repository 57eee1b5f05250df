"""What a request costs, and what a server stands."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc
from typer.testing import CliRunner

from benchmarks import serve, soak
from benchmarks.__main__ import app
from compressor.dataset import Example, write_examples
from compressor.errors import DataError, GateError
from compressor.tasks import TASKS
from serving import repository
from serving.exchange import Answer, classification, regression
from serving.inprocess import VALUE
from tests.serving.conftest import tiny_model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A repository of a tiny student and teacher, and a file of examples."""
    folder = tmp_path_factory.mktemp("measured")
    repository.write(tiny_model(folder / "model"), folder / "repository", teacher=tiny_model(folder / "teacher"))
    rows = [Example((text,), 0, n) for n, text in enumerate(["good film", "a bad film", "fine", "bad bad film"] * 3)]
    write_examples(folder / "validation.arrow", rows, TASKS["sst2"])
    return folder / "repository", folder / "validation.arrow"


@pytest.mark.triton
def test_parts_add_up_and_answers_are_the_files_own(published: tuple[Path, Path]) -> None:
    root, texts = published
    where = serve.Where(repository=root, model="sst2", texts=texts, teacher=False)
    result = serve.measure(where, plan=serve.Plan(turns=1, turn_s=0.2, clients=3), threads=1, seed=0, command="x")
    assert list(result["models"]) == ["sst2"]
    for row in result["models"].values():
        assert row["answers"]["texts"] == 12
        assert row["answers"]["other_labels"] == 0
        assert row["answers"]["largest_difference"] < 1e-6
        assert 0 < row["in_process"]["p50_ms"] < row["alone"]["p50_ms"]
        assert 0.3 < sum(row["parts_ms"].values()) / row["alone"]["p50_ms"] < 5
        assert row["parts_ms"]["onnxruntime"] > 0
        assert row["parts_ms"]["client"] > 0
        for batch, load in row["load"].items():
            assert load["failures"] == 0
            assert load["share"] == pytest.approx(load["texts_per_s"] / load["onnxruntime_alone_texts_per_s"])
            assert load["texts_per_s"] > int(batch)
    shown = "\n".join(table.text() for table in serve.tables(result))
    assert "sst2 x8" in shown
    json.dumps(result)


def row(**changes: Any) -> dict[str, Any]:
    """A result of a student that meets each target, but for `changes` of its row."""
    found: dict[str, Any] = {
        "in_process": {"p50_ms": 1.0},
        "alone": {"p50_ms": 1.8, "p99_ms": 3.6},
        "load": {"1": {"share": 0.6}, "8": {"share": 0.8}},
        "answers": {"other_labels": 0, "largest_difference": 1e-6},
    }
    return {"models": {"sst2": found | changes}, "deaths": [], "machine_was_busy": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alone": {"p50_ms": 1.9, "p99_ms": 3.6}}, r"p50 is 0.90 ms above in process \(at most 0.8\)"),
        ({"alone": {"p50_ms": 1.8, "p99_ms": 3.7}}, r"p99 is 2.1 times p50 \(at most 2\)"),
        ({"load": {"1": {"share": 0.59}, "8": {"share": 0.8}}}, r"1 texts a request: 59 % .* \(at least 60\)"),
        ({"load": {"1": {"share": 0.6}, "8": {"share": 0.7}}}, r"8 texts a request: 70 % .* \(at least 80\)"),
        ({"answers": {"other_labels": 1, "largest_difference": 0.0}}, "sst2 answers other than its file"),
        ({"answers": {"other_labels": 0, "largest_difference": 1e-4}}, "sst2 answers other than its file"),
    ],
)
def test_each_target_is_checked(changes: dict[str, Any], message: str) -> None:
    serve.check_targets(row())
    with pytest.raises(GateError, match=message):
        serve.check_targets(row(**changes))


def test_texts_must_be_as_the_model_reads_them(published: tuple[Path, Path], tmp_path: Path) -> None:
    assert serve.read_texts(published[1], is_pair=False)[:2] == ["good film", "a bad film"]
    with pytest.raises(DataError, match="does not hold pairs, which the model reads"):
        serve.read_texts(published[1], is_pair=True)
    with pytest.raises(DataError, match="cannot be read"):
        serve.read_texts(tmp_path / "none.arrow", is_pair=False)


@pytest.mark.triton
def test_mixed_load_and_kills_are_survived(published: tuple[Path, Path], tmp_path: Path) -> None:
    root, texts = published
    arguments = ("--repository", str(root), "--texts", str(texts), "--minutes", "0.1", "--kill", "--json")
    done = CliRunner().invoke(app, ["soak", *arguments])
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert {"conditions", "machine", "seed", "command", "quick"} <= set(result)
    assert [kill["killed"] for kill in result["recoveries"]] == ["/bin/tritonserver", "/sst2/"]
    assert all(0 < kill["seconds"] < 60 for kill in result["recoveries"])
    # What is refused is refused with its own error, whatever it is sent beside.
    assert {kind for kind in result["right"] if kind.startswith("bad")} == {f"bad: {kind}" for kind in soak.REFUSALS}
    assert result["right"]["good"] > 20
    assert set(result["sent"]) - set(result["right"]) == {"given up", "slow"}
    # Requests are lost by a kill alone.
    assert result["lost"]["while up"] == {}
    assert result["lost"]["while down"]["good"] > 0
    for name in ("in flight", "while down"):
        assert sum(result["lost"][name].values()) == sum(kill[name] for kill in result["recoveries"])
    assert len(result["deaths"]) >= 2
    assert "started again" in result["memory_not_judged"]
    assert f"not judged: {result['memory_not_judged']}" in soak.tables(result)[1].title


def soaked(**changes: Any) -> dict[str, Any]:
    good = {"minutes": 30.0, "wrong_count": 0, "wrong": [], "rss_mb": {"second_quarter": 100.0, "last_quarter": 104.0}}
    lost: dict[str, Any] = {"in flight": {}, "while down": {}, "while up": {}}
    counts = {"sent": {}, "right": {}, "lost": lost, "reasons": lost}
    return {**good, **counts, "deaths": [], "recoveries": [], "memory_not_judged": None, **changes}


def test_what_a_soak_must_show_is_checked() -> None:
    soak.check(soaked())
    for changes, message in (
        ({"wrong_count": 2, "wrong": ["a", "b"]}, "2 wrong answers, the first: a"),
        ({"rss_mb": {"second_quarter": 100.0, "last_quarter": 106.0}}, r"memory grew by 6.0 % \(at most 5\)"),
        ({"deaths": ["it died"]}, "1 deaths by itself"),
        (
            {"lost": {"while up": {"good": 2, "bad: empty": 1}}, "reasons": {"while up": {"its queue is full": 3}}},
            "3 requests lost while the server was up, most often: its queue is full",
        ),
    ):
        with pytest.raises(GateError, match=message):
            soak.check(soaked(**changes))
    soak.check(soaked(lost={"in flight": {"good": 4}, "while down": {"good": 600}, "while up": {}}))


@pytest.mark.parametrize(
    ("began", "ended", "fate"),
    [
        (9.0, 9.9, "while up"),
        (9.9, 10.1, "in flight"),
        (10.1, 10.2, "while down"),
        (11.9, 15.0, "while down"),
        (12.4, 12.4, "while down"),  # its client has not looked again yet
        (12.6, 12.7, "while up"),
        (19.9, 20.1, "in flight"),
    ],
)
def test_what_became_of_a_lost_request_is_told_by_when_it_was_sent(began: float, ended: float, fate: str) -> None:
    kills = [soak.Kill("server", 10.0, 12.0), soak.Kill("model", 20.0, 22.0)]
    assert soak.fate(soak.Lost("good", began, ended, "no"), kills) == fate
    assert soak.fate(soak.Lost("good", began, ended, "no"), []) == "while up"


@pytest.mark.parametrize(
    ("answer", "wanted", "mistake"),
    [
        (classification("a", "yes", 0.8, {"no": 0.2, "yes": 0.8}), {"no": 0.1, "yes": 0.9}, None),
        (
            classification("a", "no", 0.2, {"no": 0.2, "yes": 0.8}),
            {"no": 0.1, "yes": 0.9},
            "label 'no' with {'no': 0.2",
        ),
        (classification("a", "no", 0.55, {"no": 0.55, "yes": 0.45}), {"no": 0.45, "yes": 0.55}, None),
        (classification("a", "yes", 0.6, {"no": 0.4, "yes": 0.6}), {"no": 0.1, "yes": 0.9}, "{'no': 0.4, 'yes': 0.6}"),
        (classification("a", "yes", 1.0, {"yes": 1.0}), {"no": 0.1, "yes": 0.9}, "{'yes': 1.0} instead of"),
        (regression("a", 3.1), {VALUE: 3.0}, None),
        (regression("a", 3.3), {VALUE: 3.0}, "{'value': 3.3} instead of"),
    ],
)
def test_labels_and_numbers_are_compared(answer: Answer, wanted: dict[str, float], mistake: str | None) -> None:
    found = soak.mistake_of(answer, wanted)
    assert (found or "").startswith(mistake or "")
    assert bool(found) == bool(mistake)


@pytest.mark.parametrize(
    ("status", "message", "counted"),
    [
        ("INVALID_ARGUMENT", "of another request", "wrong"),
        ("INTERNAL", "broken", "wrong"),
        ("UNAVAILABLE", "full", "lost"),
    ],
)
def test_a_refusal_must_be_the_bad_request_s_own(status: str, message: str, counted: str) -> None:
    class Refusing(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode[status], message)

    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Refusing(), server)
    address: Any = SimpleNamespace(grpc_url=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    seen, chooser = soak.Seen(), random.Random(0)
    for _ in range(10):
        soak._bad(address, "sst2", False, seen, chooser)
    server.stop(None).wait()
    assert {"wrong": len(seen.wrong), "lost": len(seen.lost)} == {"wrong": 0, "lost": 0, counted: 10}
    assert not seen.right


def test_what_nobody_waits_for_is_shown_as_sent() -> None:
    result = soaked(sent={"good": 3, "slow": 2}, right={"good": 2}, lost={"while up": {"good": 1}})
    assert soak.tables(result)[0].rows == [["good", "3", "2", "1"], ["slow", "2", "-", "0"]]


@pytest.mark.parametrize(
    ("deaths", "minutes", "reason"),
    [
        ([], 30.0, None),
        ([], 0.3, "0.3 minutes are too few: in the first 2 a server still warms up"),
        (["killed"], 30.0, "a process of the server was started again"),
    ],
)
def test_a_soak_says_why_memory_is_not_judged(deaths: list[str], minutes: float, reason: str | None) -> None:
    assert soak.why_unjudged(deaths, minutes) == reason
    grown = {"second_quarter": 100.0, "last_quarter": 120.0}
    result = soaked(rss_mb=grown, memory_not_judged=reason)
    title = soak.tables(result)[1].title
    if reason is None:
        assert "not judged" not in title
        with pytest.raises(GateError, match="memory grew"):
            soak.check(result)
    else:
        assert f"not judged: {reason}" in title
        soak.check(result)


def test_long_texts_are_made_of_the_real_ones() -> None:
    texts = soak._texts(["one two three"] * 300, is_pair=False, seed=0)
    assert [len(str(text).split()) for text in texts[-3:]] == [120, 250, 510]
    assert len({len(str(text).split()) for text in texts}) == 9
    pairs = soak._texts([("one two three", "four five")] * 300, is_pair=True, seed=0)
    assert [[len(side.split()) for side in pair] for pair in pairs[-3:]] == [[120] * 2, [250] * 2, [510] * 2]
    assert {pair[1].split()[0] for pair in pairs} == {"four", "five"}
