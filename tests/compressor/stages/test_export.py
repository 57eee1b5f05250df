"""ONNX graphs against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier
from compressor.config import ExportConfig
from compressor.dataset import Inputs
from compressor.errors import GateError
from compressor.evaluate import OnnxPredictor, TorchPredictor
from compressor.stages import export as stage
from compressor.stages.export import _difference, export
from tests import tiny
from tests.conftest import Line

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter's own


@pytest.fixture(scope="module")
def exported(line: Line) -> Artifact:
    return Artifact.open(line.run / "6-export", kind="onnx")


def run(config: ExportConfig, line: Line, out: Path) -> Artifact:
    return export(
        config,
        tiny.TASK,
        student=Artifact.open(line.run / "5-distill-prediction", kind="student"),
        teacher=Artifact.open(line.run / "3-finetune", kind="teacher"),
        corpus=Artifact.open(line.run / "1-corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key=out.name,
        out=out,
    )


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_parity_is_measured_on_the_validation_texts(exported: Artifact, name: str) -> None:
    found = exported.metrics[name]
    assert found["max_logit_difference"] <= found["bound"] == 1e-4
    assert (found["rows"], found["agreement"], found["batch_sizes"]) == (48, 1.0, [1, 8, 33])


@pytest.mark.parametrize(("name", "step"), [("student", "5-distill-prediction"), ("teacher", "3-finetune")])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 3), (1, 16), (5, 7), (33, 12)])
def test_a_graph_answers_as_pytorch_at_any_shape(
    line: Line, exported: Artifact, name: str, step: str, rows: int, tokens: int
) -> None:
    random = np.random.default_rng(rows)
    ids = random.integers(5, 30, (rows, tokens))
    mask = (np.arange(tokens) < random.integers(1, tokens + 1, (rows, 1))).astype(np.int64)
    inputs = Inputs(ids, random.integers(0, 2, (rows, tokens)), mask)
    mine = OnnxPredictor(exported.path / name / "model.onnx", threads=1)(inputs)
    theirs = TorchPredictor(load_classifier(line.run / step, tiny.TASK))(inputs)
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_inputs_are_int64_with_named_dynamic_axes(exported: Artifact) -> None:
    graph = onnx.load(exported.path / "student" / "model.onnx").graph
    found = {item.name: item.type.tensor_type for item in graph.input}
    assert set(found) == {"input_ids", "attention_mask", "token_type_ids"}
    for tensor in found.values():
        assert tensor.elem_type == TensorProto.INT64
        assert [axis.dim_param for axis in tensor.shape.dim] == ["batch_size", "sequence_length"]
    assert [item.name for item in graph.output] == ["logits"]


def test_a_graph_is_one_file_with_its_tokenizer(exported: Artifact) -> None:
    names = {path.name for path in (exported.path / "student").iterdir()}
    assert {"model.onnx", "tokenizer.json", "config.json"} <= names
    assert not [name for name in names if name.endswith((".data", ".safetensors"))]


def test_a_bound_that_cannot_be_kept_fails_with_both_numbers(line: Line, tmp_path: Path) -> None:
    message = r"parity gate: student: largest logit difference to PyTorch \d\.\d\de-\d+ on 48 .* \(bound 1e-15\)"
    with pytest.raises(GateError, match=message) as caught:
        run(ExportConfig(max_logit_difference=1e-15), line, tmp_path / "onnx")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_count_as_different(value: float) -> None:
    good, bad = np.zeros((2, 2), np.float32), np.array([[0, 0], [value, 0]], np.float32)
    assert _difference(bad, good) > 1e30
    assert _difference(bad, bad) > 1e30 or np.isinf(value)


def test_a_graph_that_gives_nan_fails_the_gate(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = OnnxPredictor.__call__
    monkeypatch.setattr(stage.OnnxPredictor, "__call__", lambda self, inputs: predict(self, inputs) * np.nan)
    with pytest.raises(GateError, match=r"parity gate: student"):
        run(ExportConfig(), line, tmp_path / "onnx")


def test_the_longest_and_the_shortest_text_are_always_tried(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PARITY_ROWS", 2)
    made = run(ExportConfig(), line, tmp_path / "onnx")
    assert made.metrics["student"]["rows"] == 2
