"""What a request costs, and what a server stands."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import serve, soak
from benchmarks.__main__ import app
from compressor.dataset import Example, write_examples
from compressor.errors import DataError, GateError
from compressor.tasks import TASKS
from serving import repository
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
    assert {kind for kind in result["right"] if kind.startswith("bad")} >= {"bad: empty", "bad: not UTF-8"}
    assert result["right"]["good"] > 20
    assert len(result["deaths"]) >= 2


def test_what_a_soak_must_show_is_checked() -> None:
    good = {"minutes": 30.0, "wrong_count": 0, "wrong": [], "rss_mb": {"second_quarter": 100.0, "last_quarter": 104.0}}
    quiet: dict[str, Any] = {**good, "deaths": [], "recoveries": []}
    soak.check(quiet)
    for changes, message in (
        ({"wrong_count": 2, "wrong": ["a", "b"]}, "2 wrong answers, the first: a"),
        ({"rss_mb": {"second_quarter": 100.0, "last_quarter": 106.0}}, r"memory grew by 6.0 % \(at most 5\)"),
        ({"deaths": ["it died"]}, "1 deaths by itself"),
    ):
        with pytest.raises(GateError, match=message):
            soak.check(quiet | changes)


def test_memory_is_not_judged_while_a_server_warms_up() -> None:
    grown = {"second_quarter": 100.0, "last_quarter": 120.0}
    soak.check({"minutes": 0.3, "wrong_count": 0, "wrong": [], "rss_mb": grown, "deaths": [], "recoveries": []})


def test_long_texts_are_made_of_the_real_ones() -> None:
    texts = soak._texts(["one two three"] * 300, is_pair=False, seed=0)
    assert [len(str(text).split()) for text in texts[-3:]] == [120, 250, 510]
    assert len({len(str(text).split()) for text in texts}) == 9
