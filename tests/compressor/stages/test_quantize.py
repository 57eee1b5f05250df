"""INT8 graphs: what is quantized, how well, and which candidate wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from compressor import latency
from compressor.artifact import Artifact
from compressor.checkpoints import load_tokenizer
from compressor.config import QuantizeConfig
from compressor.dataset import Encoded, encode
from compressor.errors import GateError
from compressor.evaluate import OnnxPredictor
from compressor.stages import quantize as stage
from compressor.stages.quantize import (
    CalibrationTexts,
    choose,
    dense_products,
    quantize,
    quantize_embeddings,
    quantize_graph,
    quantize_rows,
)
from tests import tiny
from tests.conftest import Line

pytestmark = pytest.mark.filterwarnings("ignore")  # ONNX Runtime's own
DENSE_PER_LAYER = 6  # query, key, value, output, and two of the feed-forward


@pytest.fixture(scope="module")
def models(line: Line) -> Artifact:
    return Artifact.open(line.run / "6-export", kind="onnx")


@pytest.fixture(scope="module")
def rows(line: Line, models: Artifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoded]:
    corpus, cache = Artifact.open(line.run / "1-corpus", kind="examples"), tmp_path_factory.mktemp("encoded")
    tokenizer = load_tokenizer(models.path / "student")
    return {split: encode(corpus, split, tokenizer, tiny.MAX_TOKENS, cache=cache) for split in ("train", "validation")}


@pytest.fixture(scope="module")
def graphs(
    models: Artifact, rows: dict[str, Encoded], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, onnx.ModelProto]:
    """The teacher, which has two layers, in both schemes."""
    folder, found = tmp_path_factory.mktemp("int8"), {}
    for scheme in ("dynamic", "static"):
        target = folder / f"{scheme}.onnx"
        quantize_graph(models.path / "teacher" / "model.onnx", target, scheme, rows["train"], 16, 0)
        found[scheme] = onnx.load(target)
        found[scheme].metadata_props.add(key="path", value=str(target))
    assert sorted(path.name for path in folder.iterdir()) == ["dynamic.onnx", "static.onnx"]
    return found


def path_of(model: onnx.ModelProto) -> Path:
    return Path(next(item.value for item in model.metadata_props if item.key == "path"))


def operators(model: onnx.ModelProto) -> dict[str, int]:
    names = [node.op_type for node in model.graph.node]
    return {name: names.count(name) for name in names}


def row(scheme: str, accuracy: float, ms: float, flips: float = 0.0) -> dict[str, Any]:
    times = {"1x16": ms, "1x32": ms, "8x32": ms}
    facts = {"scheme": scheme, "metric": "accuracy", "score": accuracy, "flips": flips}
    return {**facts, "size_bytes": 1_000_000, "p50_ms": times}


def test_rows_are_within_half_a_step_of_what_they_were() -> None:
    random = np.random.default_rng(0)
    table = (random.normal(size=(50, 16)) * 10.0 ** random.integers(-6, 4, (50, 1))).astype(np.float32)
    rows, scale = quantize_rows(table)
    assert rows.dtype == np.int8
    assert (np.abs(rows * scale - table) <= scale * 0.5001).all()


def test_a_row_uses_the_whole_range() -> None:
    rows, scale = quantize_rows(np.array([[1.0, -2.0, 0.5], [0.1, 0.0, 0.05]], np.float32))
    assert np.abs(rows).max(axis=1).tolist() == [127, 127]
    assert scale.shape == (2, 1)


def test_a_row_of_zeros_stays_zero() -> None:
    rows, scale = quantize_rows(np.zeros((2, 4), np.float32))
    assert not (rows * scale).any()


def test_looked_up_embeddings_are_within_half_a_step(models: Artifact) -> None:
    model = onnx.load(models.path / "teacher" / "model.onnx")
    before = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    quantize_embeddings(model)
    after = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    name = next(name for name, table in before.items() if table.shape == (tiny.VOCABULARY, 32))
    rows, scale = after[f"{name}_int8"], after[f"{name}_scale"]
    assert rows.dtype == np.int8
    assert (np.abs(rows * scale - before[name]) <= scale * 0.5001).all()
    assert name not in after


def test_small_tables_are_left_alone(models: Artifact) -> None:
    model = onnx.load(models.path / "teacher" / "model.onnx")
    quantize_embeddings(model)
    shapes = [tuple(item.dims) for item in model.graph.initializer]
    assert (64, 32) in shapes  # the positions


def test_dense_products_are_those_with_a_weight(models: Artifact) -> None:
    model = onnx.load(models.path / "teacher" / "model.onnx")
    found = dense_products(model)
    assert len(found) == 2 * DENSE_PER_LAYER
    assert operators(model)["MatMul"] == len(found) + 2 * 2  # two products of attention in each layer


def test_the_dynamic_scheme_quantizes_the_dense_products_alone(graphs: dict[str, onnx.ModelProto]) -> None:
    found = operators(graphs["dynamic"])
    assert found["MatMulInteger"] == 2 * DENSE_PER_LAYER
    assert found["MatMul"] == 4 + 2  # those of attention; pooler and classifier, which were Gemm
    assert "DequantizeLinear" not in found


def test_the_static_scheme_quantizes_the_dense_products_alone(graphs: dict[str, onnx.ModelProto]) -> None:
    model = graphs["static"]
    made_by = {name: node for node in model.graph.node for name in node.output}
    dequantized = {name for name, node in made_by.items() if node.op_type == "DequantizeLinear"}
    dense = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in dequantized]
    attention = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] not in dequantized]
    assert len(dense) == 2 * DENSE_PER_LAYER
    assert all(node.input[0] in dequantized for node in dense)
    assert len(attention) == 4


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_norms_and_softmax_stay_in_fp32(graphs: dict[str, onnx.ModelProto], scheme: str) -> None:
    found = operators(graphs[scheme])
    assert found["LayerNormalization"] == 5
    assert found["Softmax"] == 2
    assert not [name for name in found if name.startswith("QLinear")]


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_weights_are_signed_with_one_scale_for_each_column(graphs: dict[str, onnx.ModelProto], scheme: str) -> None:
    tensors = {item.name: item for item in graphs[scheme].graph.initializer}
    weights = [item for item in tensors.values() if item.name.endswith("_quantized") and len(item.dims) == 2]
    assert len(weights) == 2 * DENSE_PER_LAYER
    for item in weights:
        assert item.data_type == TensorProto.INT8
        scale = tensors[item.name.replace("_quantized", "_scale")]
        assert list(scale.dims) == [item.dims[1]]


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_an_int8_graph_is_much_smaller_and_says_nearly_the_same(
    graphs: dict[str, onnx.ModelProto], models: Artifact, rows: dict[str, Encoded], scheme: str
) -> None:
    source, target = models.path / "teacher" / "model.onnx", path_of(graphs[scheme])
    assert target.stat().st_size < 0.4 * source.stat().st_size
    batch = rows["validation"].batch(np.arange(48))
    theirs, mine = (OnnxPredictor(path, threads=1)(batch.inputs) for path in (source, target))
    assert (theirs.argmax(axis=1) == mine.argmax(axis=1)).mean() > 0.95


def test_the_static_scheme_gives_a_row_the_same_logits_alone_and_in_a_batch(
    graphs: dict[str, onnx.ModelProto], rows: dict[str, Encoded]
) -> None:
    predictor = OnnxPredictor(path_of(graphs["static"]), threads=1)
    chosen = np.flatnonzero(rows["validation"].lengths(np.arange(len(rows["validation"]))) <= 8)
    together = rows["validation"].batch(chosen)
    logits_NC = predictor(together.inputs)
    for place, number in enumerate(chosen):
        alone = rows["validation"].batch(np.array([number]))
        assert np.array_equal(predictor(alone.inputs)[0], logits_NC[place])


def test_calibration_texts_come_one_by_one_without_padding(rows: dict[str, Encoded]) -> None:
    texts = CalibrationTexts(rows["train"], 5, ["input_ids", "attention_mask"], 0)
    feeds = list(iter(texts.get_next, None))
    assert len(feeds) == 5
    for feed in feeds:
        assert set(feed) == {"input_ids", "attention_mask"}
        assert feed["attention_mask"].all()


def test_calibration_texts_are_fixed_by_the_seed(rows: dict[str, Encoded]) -> None:
    first, again, other = (
        [
            feed["input_ids"].tolist()
            for feed in iter(CalibrationTexts(rows["train"], 8, ["input_ids"], seed).get_next, None)
        ]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_fastest_within_the_bound_wins() -> None:
    table = [row("fp32", 0.9, 10), row("dynamic", 0.9, 6), row("static", 0.895, 3)]
    assert choose(table, 0.005) == "static"
    assert choose(table, 0.004) == "dynamic"


def test_of_equally_fast_ones_the_one_with_fewer_flips_wins() -> None:
    table = [row("fp32", 0.9, 10), row("dynamic", 0.9, 5.0, flips=0.01), row("static", 0.9, 5.4)]
    assert choose(table, 0.005) == "static"
    table[1] = row("dynamic", 0.9, 4.0, flips=0.01)
    assert choose(table, 0.005) == "dynamic"


def test_a_loss_of_just_the_bound_passes() -> None:
    assert choose([row("fp32", 0.9, 10), row("dynamic", 0.9 - 0.005, 6)], 0.005) == "dynamic"


def test_speed_is_the_geometric_mean_of_all_shapes() -> None:
    assert stage.speed({"p50_ms": {"1x16": 1.0, "1x32": 2.0, "8x32": 4.0}}) == pytest.approx(2.0)


def test_none_within_the_bound_fails_with_the_table() -> None:
    table = [row("fp32", 0.9, 10), row("dynamic", 0.8, 6), row("static", 0.85, 3)]
    message = (
        r"best INT8 candidate \(static\) loses 5\.00 points .* bound is 0\.50 .*"
        r"fp32: accuracy 90\.00 .*; dynamic: accuracy 80\.00 \(-10\.00\).*; static: accuracy 85\.00 \(-5\.00\)"
    )
    with pytest.raises(GateError, match=message) as caught:
        choose(table, 0.005)
    assert caught.value.exit_code == 3


def test_a_better_candidate_never_fails() -> None:
    assert choose([row("fp32", 0.9, 10), row("dynamic", 0.95, 6)], 0.0) == "dynamic"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time little."""
    monkeypatch.setitem(latency.time_in_turns.__kwdefaults__, "rounds", 1)
    monkeypatch.setitem(latency.time_in_turns.__kwdefaults__, "turn_s", 0.0)


def run(config: QuantizeConfig, line: Line, models: Artifact, out: Path) -> Artifact:
    return quantize(
        config,
        tiny.TASK,
        onnx_models=models,
        teacher=Artifact.open(line.run / "3-finetune", kind="teacher"),
        corpus=Artifact.open(line.run / "1-corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        seed=7,
        key=out.name,
        out=out,
    )


@pytest.mark.usefixtures("hasty")
def test_a_stage_whose_candidates_all_lose_too_much_leaves_nothing(
    line: Line, models: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = stage.score

    def poor(*arguments: Any) -> list[dict[str, Any]]:
        fp32, *others = score(*arguments)
        return [fp32, *(other | {"score": fp32["score"] - 0.25} for other in others)]

    monkeypatch.setattr(stage, "score", poor)
    with pytest.raises(GateError, match=r"accuracy gate: .* loses 25\.00 points"):
        run(QuantizeConfig(calibration_rows=4), line, models, tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


def test_the_stage_keeps_the_chosen_graph_alone(line: Line) -> None:
    made = Artifact.open(line.run / "7-quantize", kind="int8")
    assert [name for name in made.manifest["files"] if name.endswith(".onnx")] == ["model.onnx"]
    assert made.metrics["size_bytes"] == (made.path / "model.onnx").stat().st_size
    assert made.metrics["scheme"] in ("dynamic", "static")


def test_the_latency_table_has_every_system_at_every_shape(line: Line) -> None:
    found = Artifact.open(line.run / "7-quantize", kind="int8").metrics["latency"]
    assert set(found) == {"teacher PyTorch", "teacher ONNX", "student fp32", "student INT8"}
    for shapes in found.values():
        assert set(shapes) == {"1x16", "1x32", "8x32"}
        assert all(0 < times["min_ms"] <= times["p50_ms"] for times in shapes.values())


def test_the_table_of_candidates_starts_with_fp32(line: Line) -> None:
    found = Artifact.open(line.run / "7-quantize", kind="int8").metrics["candidates"]
    assert [item["scheme"] for item in found] == ["fp32", "dynamic", "static"]
    assert found[0]["against_fp32"]["agreement"] == 1.0
    assert all(item["score"] == min(item["score_batch_1"], item["score_batch_64"]) for item in found)
