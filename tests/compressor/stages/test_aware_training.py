"""Quantization-aware training: it rounds what INT8 rounds, it repairs, and it comes last."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor import progress
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier
from compressor.classifier_graph import ClassifierGraph
from compressor.config import DistillConfig
from compressor.dataset import Encoded
from compressor.errors import GateError
from compressor.evaluate import OnnxPredictor, TorchPredictor, predict
from compressor.onnx_export import export_onnx, write_graph
from compressor.stages.quantize import aware_training
from compressor.stages.quantize.aware_training import AwareTraining, round_products
from compressor.stages.quantize.calibration import calibrate
from compressor.stages.quantize.candidates import Static
from compressor.stages.quantize.rewriting import quantize_graph
from compressor.triton_releases import format_for
from tests import tiny
from tests.compressor.stages.test_quantize import hasty, models, run, settings
from tests.conftest import Line

__all__ = ["hasty", "models"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore")  # the exporters' and ONNX Runtime's own
ROWS = 24
EXPORTED = {"exporter": "torch", "triton_release": "24.06", "bound": 1e-4}


def prepared(line: Line, rows: Encoded, weight_bits: int) -> AwareTraining:
    return AwareTraining(
        task=tiny.TASK,
        student=line.run / "5-distill-prediction",
        teacher=line.run / "2-finetune",
        train=rows,
        validation=rows,
        weight_bits=weight_bits,
        calibration_rows=ROWS,
        max_tokens=tiny.MAX_TOKENS,
        seed=3,
        exported=EXPORTED,
    )


@pytest.mark.parametrize("weight_bits", [7, 4])  # of 8, sums saturate on a processor without VNNI
def test_a_rounded_graph_answers_as_its_int8_graph(
    line: Line, models: Artifact, tmp_path: Path, weight_bits: int
) -> None:
    rows = tiny.encoded(tmp_path, train=ROWS)
    source = models.path / "student" / "model.onnx"
    quantize_graph(
        source,
        tmp_path / "int8.onnx",
        Static(embeddings=False),
        calibrate(source, rows, ROWS, 3),
        weight_bits=weight_bits,
    )
    aware = prepared(line, rows, weight_bits)
    graph = ClassifierGraph(load_classifier(aware.student, aware.task))
    products = round_products(graph, weight_bits)
    plain_NC = predict(TorchPredictor(graph), rows)
    aware_training.set_mode(products, "see")
    aware.run_texts(graph)
    aware_training.set_mode(products, "round")
    rounded_NC = predict(TorchPredictor(graph), rows)
    int8_NC = predict(OnnxPredictor(tmp_path / "int8.onnx", threads=1), rows)
    assert np.abs(rounded_NC - int8_NC).max() < 0.2 * np.abs(plain_NC - int8_NC).max()


def test_a_rounded_product_has_the_gradient_of_a_plain_one() -> None:
    torch.manual_seed(0)
    graph = torch.nn.Sequential(torch.nn.Linear(16, 8))
    (product,) = round_products(graph, 8)
    x = torch.randn(4, 16, requires_grad=True)
    gradients = []
    for mode in ("see", "round"):
        aware_training.set_mode([product], mode)
        gradients.append(torch.autograd.grad(graph(x).sum(), (x, product.weight, product.bias)))
    for plain, rounded in zip(*gradients, strict=True):
        assert torch.allclose(plain, rounded, atol=0.05)


def test_asking_the_teacher_shows_progress(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", -1.0)
    caplog.set_level("INFO")
    rows = tiny.encoded(tmp_path, train=ROWS)
    prepared(line, rows, 7)._teacher_logits(DistillConfig(objective="prediction", epochs=1, learning_rate=1e-3))
    assert f"quantize asks the teacher {ROWS}/{ROWS}" in caplog.text


def test_small_heads_are_left_as_they_are(line: Line) -> None:
    graph = ClassifierGraph(load_classifier(line.run / "5-distill-prediction", tiny.TASK))
    round_products(graph, 8)
    assert type(graph.head.classifier) is torch.nn.Linear
    assert type(graph.head.pooler) is aware_training.RoundedLinear


def test_the_trained_graph_is_written_and_proved_as_the_exported_one_was(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def write(model: Any, path: Path, **how: Any) -> str:
        asked.append(how)
        return write_graph(model, path, **how)

    monkeypatch.setattr(aware_training, "STEPS", 1)
    monkeypatch.setattr(aware_training, "write_graph", write)
    aware = prepared(line, tiny.encoded(tmp_path, train=ROWS), 7)
    aware.write(line.run / "6-export" / "student", tmp_path / "trained")
    assert asked == [{"exporter": "torch", "form": format_for("24.06")}]
    strict = replace(aware, exported=EXPORTED | {"bound": 1e-15})
    with pytest.raises(GateError, match=r"parity gate: student trained for INT8: largest .* \(bound 1e-15\)"):
        strict.write(line.run / "6-export" / "student", tmp_path / "again")


@pytest.fixture
def outlier(line: Line, tmp_path: Path) -> tuple[Artifact, Artifact]:
    """The line's student, and its ONNX, with one channel of each attention ten thousand times as large and read so."""
    model = load_classifier(line.run / "5-distill-prediction", tiny.TASK)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            value, out = layer.attention.self.value, layer.attention.output.dense
            value.weight[0] *= 1e4
            value.bias[0] *= 1e4
            out.weight[:, 0] /= 1e4
    student = tmp_path / "student"
    shutil.copytree(line.run / "5-distill-prediction", student)
    model.save_pretrained(student)
    exported = tmp_path / "export"
    shutil.copytree(line.run / "6-export", exported)
    export_onnx(student, exported / "student")
    opened = (
        Artifact.open(line.run / "5-distill-prediction", kind="student"),
        Artifact.open(line.run / "6-export", kind="onnx"),
    )
    return replace(opened[0], path=student), replace(opened[1], path=exported)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_training_repairs_what_rounding_broke_and_then_wins(
    line: Line, outlier: tuple[Artifact, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aware_training, "STEPS", 100)
    monkeypatch.setattr(aware_training, "LEARNING_RATE", 5e-3)  # the tiny student learns slowly
    student, models = outlier
    made = run(
        settings(candidates=("static-qat", "static"), max_excluded=0, target_cpu="avx2"),
        line,
        models,
        tmp_path / "int8",
        student=student,
    )
    table = {item["scheme"]: item for item in made.metrics["candidates"]}
    assert list(table) == ["fp32", "static", "static-qat"]
    assert table["static"]["drop"] > 0.3
    assert table["static-qat"]["drop"] <= 0.1
    assert made.metrics["scheme"] == "static-qat"
    assert made.metrics["test"]["score"] > 0.8
    assert [name for name in made.manifest["files"] if name.endswith(".onnx")] == ["model.onnx"]
    assert not list(made.path.glob("*trained*"))


@pytest.mark.usefixtures("hasty")
def test_nothing_is_trained_where_another_candidate_is_within_the_bounds(
    line: Line, models: Artifact, tmp_path: Path
) -> None:
    made = run(settings(candidates=("static-qat", "static")), line, models, tmp_path / "int8")
    assert [item["scheme"] for item in made.metrics["candidates"]] == ["fp32", "static"]


@pytest.mark.usefixtures("hasty")
def test_a_trimmed_student_is_trained_and_trimmed_again(
    line: Line, outlier: tuple[Artifact, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aware_training, "STEPS", 2)  # too few to repair anything
    student, models = outlier
    config = settings(candidates=("static", "static-qat"), trim_vocabulary=True, max_excluded=0)
    with pytest.raises(GateError, match=r"static: accuracy .*static-qat: accuracy") as caught:
        run(config, line, models, tmp_path / "int8", student=student)
    assert caught.value.exit_code == 3
