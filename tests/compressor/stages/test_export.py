"""ONNX graphs against PyTorch: made for classification, and caught when they are wrong."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file, save_file

from compressor import onnx_export, onnx_graph, parity
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.config import ExportConfig
from compressor.dataset import Inputs, encode
from compressor.errors import ConfigError, GateError, ModelError
from compressor.evaluate import OnnxPredictor, TorchPredictor
from compressor.onnx_export import export_onnx
from compressor.parity import difference, measure_parity
from compressor.stages.export import export, refuse_broken
from compressor.triton_releases import RUNTIMES, format_for
from tests import tiny
from tests.conftest import Line

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter's own


@pytest.fixture(scope="module")
def exported(line: Line) -> Artifact:
    return Artifact.open(line.run / "6-export", kind="onnx")


@pytest.fixture(scope="module")
def graphs(line: Line, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The teacher, which has two layers, by each exporter, and as the library computes it."""
    folder, source = tmp_path_factory.mktemp("graphs"), line.run / "2-finetune"
    assert export_onnx(source, folder / "optimum", exporter="optimum") == "optimum"
    assert export_onnx(source, folder / "torch", exporter="torch") == "torch"
    export_onnx(source, folder / "plain", rewrite=False)
    return {name: folder / name / "model.onnx" for name in ("optimum", "torch", "plain")}


def run(config: ExportConfig, line: Line, out: Path, student: Artifact | None = None) -> Artifact:
    return export(
        config,
        tiny.TASK,
        student=student or Artifact.open(line.run / "5-distill-prediction", kind="student"),
        teacher=Artifact.open(line.run / "2-finetune", kind="teacher"),
        corpus=Artifact.open(line.run / "1-corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key=out.name,
        out=out,
    )


def batch(rows: int, tokens: int) -> Inputs:
    """Random ids with padding behind them."""
    random = np.random.default_rng(rows)
    mask = (np.arange(tokens) < random.integers(1, tokens + 1, (rows, 1))).astype(np.int64)
    return Inputs(random.integers(5, 30, (rows, tokens)), random.integers(0, 2, (rows, tokens)), mask)


def operators(path: Path) -> dict[str, int]:
    names = [node.op_type for node in onnx.load(path).graph.node]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_parity_is_measured_on_the_validation_texts_at_every_shape(exported: Artifact, name: str) -> None:
    found = exported.metrics[name]
    assert found["max_logit_difference"] == max(found["by_shape"].values()) <= found["bound"] == 1e-4
    assert (found["rows"], found["agreement"]) == (48, 1.0)
    assert list(found["by_shape"]) == ["1x1", "1x128", "8x33", f"1x{tiny.MAX_TOKENS}", "64xmixed"]


@pytest.mark.parametrize("exporter", ["optimum", "torch"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 16), (5, 7), (33, 12)])
def test_a_graph_answers_as_pytorch_at_any_shape(
    line: Line, graphs: dict[str, Path], exporter: str, rows: int, tokens: int
) -> None:
    mine = OnnxPredictor(graphs[exporter], threads=1)(batch(rows, tokens))
    theirs = TorchPredictor(load_classifier(line.run / "2-finetune", tiny.TASK))(batch(rows, tokens))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("exporter", ["optimum", "torch"])
def test_the_last_layer_is_computed_for_the_first_token_alone(graphs: dict[str, Path], exporter: str) -> None:
    dense = {item.name: item for item in onnx_graph.dense_products(onnx.load(graphs[exporter]))}
    names = [name.strip("/").rsplit("/", 1)[0] for name in dense]
    assert [name for name in names if name.startswith("layers")] == [
        f"layers.0/{part}" for part in ("attention/qkv", "attention/out", "feed_forward/up", "feed_forward/down")
    ]
    assert {"last/attention/query", "last/attention/kv", "last/attention/out", "last/feed_forward/up"} <= set(names)
    first = next(
        node for node in onnx.load(graphs[exporter]).graph.node if node.op_type == "Gather" and "last" in node.name
    )
    states = {item.input for name, item in dense.items() if "last/attention/query" in name}
    assert states == {first.output[0]}


def test_shapes_are_constants_but_for_batch_and_sequence(graphs: dict[str, Path]) -> None:
    found, plain = operators(graphs["optimum"]), operators(graphs["plain"])
    assert found.get("Shape", 0) == 1 < plain["Shape"]  # the length, for the positions
    assert "Concat" not in found
    assert sum(found.values()) < 0.6 * sum(plain.values())


def test_inputs_are_int64_with_named_dynamic_axes(exported: Artifact) -> None:
    model = onnx.load(exported.path / "student" / "model.onnx")
    found = {item.name: item.type.tensor_type for item in model.graph.input}
    assert set(found) == {"input_ids", "attention_mask", "token_type_ids"}
    for tensor in found.values():
        assert tensor.elem_type == TensorProto.INT64
        assert [axis.dim_param for axis in tensor.shape.dim] == ["batch_size", "sequence_length"]
    assert [item.name for item in model.graph.output] == ["logits"]
    assert (model.ir_version, model.opset_import[0].version) == (8, 18)


def test_a_graph_is_one_file_with_its_tokenizer(exported: Artifact) -> None:
    names = {path.name for path in (exported.path / "student").iterdir()}
    assert {"model.onnx", "tokenizer.json", "config.json"} <= names
    assert not [name for name in names if name.endswith((".data", ".safetensors"))]


def test_sizes_by_part_are_those_of_the_weights(exported: Artifact) -> None:
    sizes = exported.metrics["teacher"]["size_by_part"]
    width = 32
    indices = 100  # bytes, at most, of what is no weight
    assert 0 <= sizes["embeddings"] - 4 * width * (tiny.VOCABULARY + 64 + 2 + 2) < indices
    assert 0 <= sizes["head"] - 4 * (width * width + width + 2 * width + 2) < indices
    assert sum(sizes.values()) <= exported.metrics["teacher"]["size_bytes"]


def test_a_bound_that_cannot_be_kept_fails_with_both_numbers(line: Line, tmp_path: Path) -> None:
    message = r"parity gate: student: largest logit difference to PyTorch \d\.\d\de-\d+ on 48 .* \(bound 1e-15\)"
    with pytest.raises(GateError, match=message) as caught:
        run(ExportConfig(max_logit_difference=1e-15), line, tmp_path / "onnx")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "onnx").exists()


def damaged(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the exporter write graphs whose first product has other weights."""
    write = onnx_export._write_with_optimum

    def write_damaged(model: Any, path: Path) -> None:
        write(model, path)
        graph = onnx.load(path)
        name = next(node.input[1] for node in graph.graph.node if node.op_type == "MatMul" and "attention" in node.name)
        weight = next(item for item in graph.graph.initializer if item.name == name)
        values = numpy_helper.to_array(weight).copy()
        change(values)
        weight.CopyFrom(numpy_helper.from_array(values, name))
        onnx.save(graph, path)

    monkeypatch.setattr(onnx_export, "_write_with_optimum", write_damaged)


def test_a_weight_column_times_100_fails_the_parity_gate(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(monkeypatch, lambda weight_KN: weight_KN[:, -1].__imul__(100))
    with pytest.raises(GateError, match=r"parity gate: student: largest logit difference .*1x1: .*64xmixed: "):
        run(ExportConfig(), line, tmp_path / "onnx")


def test_a_graph_that_gives_nan_fails_the_gate_and_is_told_so(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(monkeypatch, lambda weight_KN: weight_KN.fill(np.nan))
    with pytest.raises(GateError, match=r"finite gate: \S+/student/model.onnx has weights that are no .* in \S+; "):
        run(ExportConfig(), line, tmp_path / "onnx")


def test_logits_that_are_no_numbers_fail_the_gate(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(monkeypatch, lambda weight_KN: weight_KN.fill(1e38))  # finite, and the products are not
    with pytest.raises(GateError, match=r"parity gate: student: logits that are no numbers \(NaN or infinite\) at 1x1"):
        run(ExportConfig(), line, tmp_path / "onnx")


def trained_wrongly(folder: Path, weight: str, change: Any) -> Path:
    """A saved classifier, healthy but for one weight."""
    model = tiny.lively(tiny.bert())
    with torch.no_grad():
        change(model.get_parameter(weight))
    return tiny.checkpoint(folder, model)


LAYER = "bert.encoder.layer.1"


@pytest.mark.parametrize(
    ("weight", "change", "what"),
    [
        (f"{LAYER}.intermediate.dense.weight", lambda weight: weight[5].mul_(100), "row 5"),
        (f"{LAYER}.attention.self.value.weight", lambda weight: weight[:, 5].mul_(100), "column 5"),
        (f"{LAYER}.output.dense.weight", lambda weight: weight[5].mul_(100), "row 5"),
        ("classifier.weight", lambda weight: weight[1].mul_(100), "row 1"),
        (f"{LAYER}.attention.output.dense.weight", lambda weight: weight[:, 5].mul_(100), "column 5"),
        ("bert.embeddings.word_embeddings.weight", lambda weight: weight[:, 5].mul_(100), "column 5"),
        ("bert.embeddings.position_embeddings.weight", lambda weight: weight[:, 5].mul_(100), "column 5"),
        ("bert.embeddings.token_type_embeddings.weight", lambda weight: weight[:, 5].mul_(100), "column 5"),
    ],
)
def test_a_model_with_one_row_or_column_times_100_fails_the_outlier_gate_by_name(
    tmp_path: Path, weight: str, change: Any, what: str
) -> None:
    folder = trained_wrongly(tmp_path, weight, change)
    message = rf"outlier gate: {what} of the student's {weight} has \d+ times the norm of the median .* bound is 30 "
    with pytest.raises(GateError, match=message) as caught:
        refuse_broken("student", folder, 30.0)
    assert caught.value.exit_code == 3
    refuse_broken("student", folder, 1e4)


def test_a_weight_of_the_model_that_is_no_number_fails_by_name(tmp_path: Path) -> None:
    folder = trained_wrongly(tmp_path, f"{LAYER}.output.dense.bias", lambda bias_N: bias_N[3].fill_(np.nan))
    with pytest.raises(GateError, match=rf"finite gate: the teacher has weights .* in {LAYER}.output.dense.bias; "):
        refuse_broken("teacher", folder, 30.0)


def test_a_large_row_that_its_layer_norm_makes_small_again_is_healthy(tmp_path: Path) -> None:
    trained_wrongly(tmp_path, f"{LAYER}.output.dense.weight", lambda weight: weight[5].mul_(100))
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{LAYER}.output.LayerNorm.weight"][5] /= 100
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuse_broken("student", tmp_path, 30.0)


def test_columns_of_a_small_table_count_against_those_of_the_words(tmp_path: Path) -> None:
    """Segments have two rows of very unlike sizes: in MiniLM, one column is 14 times the median."""
    folder = trained_wrongly(
        tmp_path, "bert.embeddings.token_type_embeddings.weight", lambda table: table.mul_(0.01)[:, 5].mul_(100)
    )
    refuse_broken("student", folder, 30.0)


def test_a_model_that_gives_one_answer_fails_the_accuracy_gate(line: Line, tmp_path: Path) -> None:
    source = line.run / "5-distill-prediction"
    shutil.copytree(source, tmp_path / "student")
    weights = load_file(source / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.bias"][3] += 1e4
    save_file(weights, tmp_path / "student" / "model.safetensors", metadata={"format": "pt"})
    broken = replace(Artifact.open(source, kind="student"), path=tmp_path / "student")
    message = r"accuracy gate: the student has accuracy 50\.0 on the 48 validation rows, .* 50\.0, which is the bound"
    with pytest.raises(GateError, match=message) as caught:
        run(ExportConfig(), line, tmp_path / "onnx", broken)
    assert caught.value.exit_code == 3


def test_a_broken_model_is_not_exported(line: Line, tmp_path: Path) -> None:
    with pytest.raises(
        GateError, match=r"outlier gate: .* of the student's .*; the bound is 1\.01 \(export.max_weight"
    ):
        run(ExportConfig(max_weight_outlier=1.01), line, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_one_validation_row_is_enough(line: Line, graphs: dict[str, Path], tmp_path: Path) -> None:
    rows = tiny.examples(tmp_path / "examples", held_out=1)
    model = line.run / "2-finetune"
    encoded = encode(rows, "validation", load_tokenizer(model), tiny.MAX_TOKENS, cache=tmp_path / "cache")
    found = measure_parity(graphs["optimum"], load_classifier(model, tiny.TASK), tiny.TASK, encoded, 48)
    assert (found["rows"], found["agreement"]) == (1, 1.0)
    assert "1x48" in found["by_shape"]  # of the longest text that is served, though no text is as long


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_difference_that_is_no_number_is_none(value: float) -> None:
    good, bad = np.zeros((2, 2), np.float32), np.array([[0, 0], [value, 0]], np.float32)
    assert difference(bad, good) is difference(bad, bad) is None
    assert difference(good, good + 2) == 2


def test_the_gpu_target_adds_an_fp16_graph_with_a_bound_of_its_own(line: Line, tmp_path: Path) -> None:
    made = run(ExportConfig(targets=("cpu", "gpu")), line, tmp_path / "onnx")
    found, path = made.metrics["student"]["fp16"], made.path / "student" / "model.fp16.onnx"
    assert 1e-6 < found["max_logit_difference"] <= found["bound"] == 5e-2
    assert path.stat().st_size < 0.6 * (made.path / "student" / "model.onnx").stat().st_size
    with pytest.raises(GateError, match=r"parity gate: student fp16: .*\(bound 1e-09\)"):
        run(ExportConfig(targets=("cpu", "gpu"), max_logit_difference_fp16=1e-9), line, tmp_path / "failing")


def test_the_longest_and_the_shortest_text_are_always_tried(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "PARITY_ROWS", 2)
    made = run(ExportConfig(), line, tmp_path / "onnx")
    assert made.metrics["student"]["rows"] == 2


def test_without_optimum_pytorch_exports(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum.exporters.onnx", None)  # importing it now raises ImportError
    assert export_onnx(line.run / "5-distill-prediction", tmp_path / "onnx") == "torch"
    with pytest.raises(ConfigError, match=r'export.exporter is "optimum" and optimum-onnx cannot be imported'):
        export_onnx(line.run / "5-distill-prediction", tmp_path / "other", exporter="optimum")


def test_a_release_says_which_runtime_reads_the_graph(exported: Artifact) -> None:
    assert format_for("24.10").onnxruntime == exported.metrics["student"]["onnxruntime"] == "1.19.2"
    assert exported.metrics["student"]["listed_release"] == "24.10"


@pytest.mark.parametrize(
    ("release", "listed"), [("24.09", "24.06"), ("25.03", "25.02"), ("25.12", "25.07"), ("31.01", "26.07")]
)
def test_a_release_that_is_not_listed_has_at_least_the_runtime_of_the_one_before(release: str, listed: str) -> None:
    assert (format_for(release).listed_release, format_for(release).onnxruntime) == (listed, RUNTIMES[listed])
    ExportConfig(triton_release=release)


@pytest.mark.parametrize("release", ["24.01", "24.13", "25.1", "v25.03", "25.03-py3"])
def test_what_is_no_release_is_refused_with_the_rule(release: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"export.triton_release is '{release}'; give one as year.month, 24\.06 or la"
    ):
        format_for(release)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda graph: graph.input[0].type.tensor_type.__setattr__("elem_type", TensorProto.INT32), "is not int64"),
        (lambda graph: graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_value", 1), "is not int64"),
        (lambda graph: graph.output[0].__setattr__("name", "scores"), "not logits alone"),
        (lambda graph: graph.input.append(onnx.helper.make_tensor_value_info("more", 7, ["a", "b"])), "'more' is not"),
    ],
)
def test_a_graph_that_cannot_be_served_is_refused(
    graphs: dict[str, Path], tmp_path: Path, change: Any, fault: str
) -> None:
    model = onnx.load(graphs["optimum"])
    change(model.graph)
    if model.graph.output[0].name == "scores":
        model.graph.node[-1].output[0] = "scores"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=fault):
        onnx_graph.check(tmp_path / "model.onnx")
