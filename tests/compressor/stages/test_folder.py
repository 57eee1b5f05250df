"""The model card: code that runs, and claims that the rows can show."""

from __future__ import annotations

import re
from typing import Any

import pytest
from huggingface_hub import ModelCard

from compressor import machine
from compressor.artifact import Artifact
from compressor.stages.quantize.folder import card
from compressor.tasks import TASKS, Task
from tests import tiny
from tests.conftest import Line

ORIGINS = {"data": 'files in "reviews": ours', "corpus": "c" * 64, "teacher": "7" * 64, "student": "5" * 64}
HOST = {"processor": "Test processor", "cores": 3, "cpu_flags": ["avx2", "avx_vnni"]}


@pytest.fixture
def metrics(line: Line) -> dict[str, Any]:
    """Of the finished stage; changed by tests."""
    return {**Artifact.open(line.run / "7-quantize", kind="int8").metrics, "cpu_in_use_percent": 2.0}


def written(metrics: dict[str, Any], task: Task = tiny.TASK, **changes: Any) -> str:
    """The card on one line."""
    return " ".join(card(task, metrics | changes, tiny.MAX_TOKENS, HOST, ORIGINS).split())


@pytest.mark.filterwarnings("ignore")  # ONNX Runtime's own
@pytest.mark.parametrize("task", ["sst2", "mrpc"])
def test_the_code_of_the_card_takes_texts_longer_than_the_positions(
    line: Line,
    metrics: dict[str, Any],
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(line.run / "7-quantize")
    text = card(TASKS[task], metrics, tiny.MAX_TOKENS, HOST, ORIGINS)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert "'label': " in capsys.readouterr().out
    long = "a good film " * 100
    query = {"text": long, "text_pair": long} if TASKS[task].is_pair else long
    assert names["classify"]([query])[0]["label"] in tiny.TASK.labels


@pytest.mark.parametrize(
    ("name", "hubs"), [("cola", "matthews_correlation"), ("stsb", "spearmanr"), ("sst2", "accuracy")]
)
def test_the_header_names_metrics_as_the_hub_does(metrics: dict[str, Any], name: str, hubs: str) -> None:
    assert f"metrics: - type: {hubs} value: " in written(metrics, TASKS[name])


def test_the_header_names_the_data_that_was_used_and_not_the_tasks(metrics: dict[str, Any]) -> None:
    text = card(TASKS["sst2"], metrics, tiny.MAX_TOKENS, HOST, ORIGINS)
    (result,) = ModelCard(text).data.to_dict()["model-index"][0]["results"]
    assert (result["dataset"]["name"], result["dataset"]["type"]) == (ORIGINS["data"], f"sha256-{ORIGINS['corpus']}")
    for name in ("teacher", "student"):
        assert f"- {name.capitalize()}: SHA-256 {ORIGINS[name]}." in text


def test_a_difference_has_its_sign_its_interval_and_its_rows(metrics: dict[str, Any]) -> None:
    pair = {"agreement": 0.985, "difference": -0.0023, "difference_95": [-0.0097, 0.0051]}
    text = written(metrics, validation_pairs={"student fp32": pair})
    assert (
        "Against the fp32 student, 48 validation rows: accuracy -0.23 points (95 % interval -0.97 to +0.51: no "
        "difference that these rows can show); 98.5 % of answers are the same." in text
    )
    gain = {**pair, "difference": 0.02, "difference_95": [0.01, 0.03]}
    assert "accuracy +2.00 points (95 % interval +1.00 to +3.00);" in written(
        metrics, validation_pairs={"student fp32": gain}
    )


def test_a_gain_in_the_worst_batches_is_no_loss(metrics: dict[str, Any]) -> None:
    row = next(row for row in metrics["candidates"] if row["scheme"] == metrics["scheme"])
    assert "48 validation rows: +0.23 points in the worst" in written(metrics, candidates=[{**row, "drop": -0.0023}])
    assert "48 validation rows: +0.00 points in the worst" in written(metrics, candidates=[{**row, "drop": 0.0}])


def test_times_name_the_processor_and_what_else_it_did(metrics: dict[str, Any]) -> None:
    assert "Times are of Test processor, 3 cores (avx2 avx_vnni); other work used 2 % of it before." in written(metrics)
    text = written(metrics, cpu_in_use_percent=40.0, host_warning=machine.foreign_cpu("neon", "amx"))
    assert "used 40 % of it before, too much to rely on them. Take care: INT8 is made for neon, and this" in text
