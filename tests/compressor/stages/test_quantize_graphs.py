"""INT8 graphs: what is quantized, how well, and from which ranges."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from compressor import machine, onnx_graph, progress
from compressor.artifact import Artifact
from compressor.checkpoints import load_tokenizer
from compressor.config import Int8Candidate
from compressor.dataset import Encoded, encode
from compressor.errors import GateError
from compressor.evaluate import OnnxPredictor
from compressor.onnx_export import export_onnx
from compressor.stages.quantize.calibration import BINS, Activation, calibrate, entropy_threshold, texts
from compressor.stages.quantize.candidates import CANDIDATES, Dynamic, PerRow, Static
from compressor.stages.quantize.exclusion import Ranking, likely_first
from compressor.stages.quantize.rewriting import (
    products,
    quantize_columns,
    quantize_embeddings,
    quantize_graph,
    quantize_rows,
    smoothing,
)
from compressor.stages.quantize.scoring import ExactPredictor, logits_in_batches
from compressor.stages.quantize.vocabulary import in_any_text, trim, unknown_share, used_pieces
from tests import tiny
from tests.conftest import Line

pytestmark = pytest.mark.filterwarnings("ignore")  # ONNX Runtime's own
# Two layers: query+key+value, output, up, down; in the last the query apart; and the pooler.
DENSE = 4 + 5 + 1


@pytest.fixture(scope="module")
def teacher(line: Line) -> Path:
    """The folder of the teacher, which has two layers."""
    return Artifact.open(line.run / "6-export", kind="onnx").path / "teacher"


@pytest.fixture(scope="module")
def rows(line: Line, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoded]:
    corpus, cache = Artifact.open(line.run / "1-corpus", kind="examples"), tmp_path_factory.mktemp("encoded")
    tokenizer = load_tokenizer(teacher)
    return {split: encode(corpus, split, tokenizer, tiny.MAX_TOKENS, cache=cache) for split in ("train", "validation")}


@pytest.fixture(scope="module")
def activations(teacher: Path, rows: dict[str, Encoded]) -> Any:
    return calibrate(teacher / "model.onnx", rows["train"], 32, 0)


@pytest.fixture(scope="module")
def graphs(teacher: Path, activations: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Int8Candidate, Path]:
    folder, found = tmp_path_factory.mktemp("int8"), {}
    for name, candidate in CANDIDATES.items():
        found[name] = folder / f"{name}.onnx"
        quantize_graph(teacher / "model.onnx", found[name], candidate, activations, notes={"made": "here"})
    return found


def operators(path: Path) -> dict[str, int]:
    names = [node.op_type for node in onnx.load(path).graph.node]
    return {name: names.count(name) for name in names}


def test_rows_are_within_half_a_step_of_what_they_were() -> None:
    random = np.random.default_rng(0)
    table = (random.normal(size=(50, 16)) * 10.0 ** random.integers(-6, 4, (50, 1))).astype(np.float32)
    found, scale = quantize_rows(table)
    assert found.dtype == np.int8
    assert (np.abs(found * scale - table) <= scale * 0.5001).all()
    assert np.abs(found).max(axis=1).tolist() == [127] * 50


def test_a_row_of_zeros_stays_zero() -> None:
    found, scale = quantize_rows(np.zeros((2, 4), np.float32))
    assert not (found * scale).any()


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (7, 63)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_columns_use_the_bits_they_have(bits: int, largest: int, per_channel: bool) -> None:
    weight = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32) * np.arange(1, 7, dtype=np.float32)
    found, scale = quantize_columns(weight, bits, per_channel=per_channel)
    assert np.abs(found).max() == largest
    assert scale.shape == ((6,) if per_channel else ())
    assert (np.abs(found * scale - weight) <= scale * 0.5001).all()


def test_large_tables_are_looked_up_in_int8_and_small_ones_left_alone(teacher: Path) -> None:
    model = onnx.load(teacher / "model.onnx")
    before = onnx_graph.constants(model)
    quantize_embeddings(model)
    after = onnx_graph.constants(model)
    name = next(name for name, table in before.items() if table.shape == (tiny.VOCABULARY, 32))
    found, scale = after[f"{name}_int8"], after[f"{name}_scale"]
    assert (np.abs(found * scale - before[name]) <= scale * 0.5001).all()
    assert name not in after
    assert any(table.shape == (64, 32) and table.dtype == np.float32 for table in after.values())  # the positions


def test_dense_products_are_those_with_a_weight_and_the_classifier_is_none_of_them(teacher: Path) -> None:
    found = products(onnx.load(teacher / "model.onnx"))
    assert len(found) == DENSE
    assert all(item.bias_N is not None and item.bias_N.shape == item.weight_KN.shape[1:] for item in found)
    assert "classifier" not in " ".join(item.name for item in found)


@pytest.mark.parametrize("name", list(CANDIDATES))
def test_dense_products_alone_become_int8(graphs: dict[Int8Candidate, Path], name: Int8Candidate) -> None:
    found = operators(graphs[name])
    assert found["MatMulIntegerToFloat"] == DENSE
    assert found["MatMul"] == 4  # those of attention, two in each layer
    assert found["LayerNormalization"] == 5
    assert found["Softmax"] == 2
    assert not [operator for operator in found if operator.startswith("QLinear")]


@pytest.mark.parametrize("name", list(CANDIDATES))
def test_an_int8_graph_is_much_smaller_and_says_nearly_the_same(
    graphs: dict[Int8Candidate, Path], teacher: Path, rows: dict[str, Encoded], name: Int8Candidate
) -> None:
    source, target = teacher / "model.onnx", graphs[name]
    small = 0.4 if CANDIDATES[name].embeddings else 0.99
    assert target.stat().st_size < small * source.stat().st_size
    batch = rows["validation"].batch(np.arange(48))
    theirs, mine = (OnnxPredictor(path, threads=1)(batch.inputs) for path in (source, target))
    assert (theirs.argmax(axis=1) == mine.argmax(axis=1)).mean() > 0.95


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("static", True),
        ("static-smooth", True),
        ("static-u8", True),
        ("per-row", True),
        ("per-row-u8", True),
        ("dynamic", False),
    ],
)
def test_a_row_gets_the_same_logits_in_any_batch_unless_the_scheme_is_dynamic(
    graphs: dict[Int8Candidate, Path], rows: dict[str, Encoded], name: Int8Candidate, exact: bool
) -> None:
    predictor, everything = OnnxPredictor(graphs[name], threads=1), np.arange(len(rows["validation"]))
    found = [
        logits_in_batches(predictor, rows["validation"], everything, size, similar=similar)
        for size, similar in ((1, True), (8, True), (48, False))
    ]
    largest = max(float(np.abs(other - found[0]).max()) for other in found)
    assert (largest <= 1e-5) is exact


def test_smoothing_with_a_method_that_it_would_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match="smooth is for the method min-max, and method is percentile"):
        Static(smooth=True, method="percentile")


def test_excluded_products_stay_in_fp32(teacher: Path, activations: Any, tmp_path: Path) -> None:
    spared = products(onnx.load(teacher / "model.onnx"))[0].name
    quantize_graph(teacher / "model.onnx", tmp_path / "model.onnx", Static(), activations, excluded=[spared])
    model = onnx.load(tmp_path / "model.onnx")
    assert operators(tmp_path / "model.onnx")["MatMulIntegerToFloat"] == DENSE - 1
    assert [item.name for item in products(model)] == [spared]


def test_notes_are_metadata_of_the_file(graphs: dict[Int8Candidate, Path]) -> None:
    assert {item.key: item.value for item in onnx.load(graphs["static"]).metadata_props}["made"] == "here"


@pytest.mark.parametrize("candidate", [Static(), PerRow()])
def test_unsigned_weights_are_the_signed_ones_around_128(
    teacher: Path, activations: Any, rows: dict[str, Encoded], tmp_path: Path, candidate: Static | PerRow
) -> None:
    """And give the answers of signed ones on a processor with VNNI."""
    found = {}
    for weights in ("signed", "unsigned"):
        graph = tmp_path / f"{weights}.onnx"
        quantize_graph(teacher / "model.onnx", graph, replace(candidate, weights=weights), activations, weight_bits=8)
        found[weights] = onnx_graph.constants(onnx.load(graph))
    (name, *_) = (name for name in found["signed"] if name.endswith("MatMul.int8"))
    assert found["unsigned"][name].dtype == np.uint8
    np.testing.assert_array_equal(found["unsigned"][name].astype(int) - 128, found["signed"][name])
    signed_NC, unsigned_NC, exact_NC = (
        predictor(tmp_path / f"{weights}.onnx", threads=1)(rows["validation"].batch(np.arange(48)).inputs)
        for predictor, weights in ((OnnxPredictor, "signed"), (OnnxPredictor, "unsigned"), (ExactPredictor, "signed"))
    )
    np.testing.assert_allclose(exact_NC, unsigned_NC, atol=1e-5)
    if machine.int8_cpu() == "avx2":
        assert np.abs(signed_NC - unsigned_NC).max() > 1e-3  # saturated
    else:
        np.testing.assert_allclose(signed_NC, unsigned_NC, atol=1e-5)


def test_an_activation_that_is_no_number_fails_by_name(teacher: Path, rows: dict[str, Encoded], tmp_path: Path) -> None:
    model = onnx.load(teacher / "model.onnx")
    item = next(item for item in products(model) if item.name.endswith("feed_forward/down/MatMul"))
    weight = next(one for one in model.graph.initializer if one.name == item.nodes[0].input[1])
    weight.CopyFrom(numpy_helper.from_array(np.full_like(numpy_helper.to_array(weight), 3e38), weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(GateError, match=r"finite gate: \S+, which the product /\S+ reads, .*NaN or infinite.* tokens"):
        calibrate(tmp_path / "model.onnx", rows["train"], 4, 0)


def test_7_bit_weights_are_smaller_than_64(teacher: Path, tmp_path: Path) -> None:
    quantize_graph(teacher / "model.onnx", tmp_path / "model.onnx", PerRow(), weight_bits=7)
    weights = [
        item for item in onnx.load(tmp_path / "model.onnx").graph.initializer if item.name.endswith("MatMul.int8")
    ]
    assert max(int(np.abs(numpy_helper.to_array(item)).max()) for item in weights) == 63
    assert {item.data_type for item in weights} == {TensorProto.INT8}


def test_calibration_texts_come_one_by_one_without_padding_fixed_by_the_seed(rows: dict[str, Encoded]) -> None:
    found = list(texts(rows["train"], 5, ["input_ids", "attention_mask"], 0))
    assert len(found) == 5
    assert all(set(feed) == {"input_ids", "attention_mask"} and feed["attention_mask"].all() for feed in found)
    first, again, other = (
        [feed["input_ids"].tolist() for feed in texts(rows["train"], 8, ["input_ids"], seed)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_ranges_are_those_of_the_real_tokens(teacher: Path, rows: dict[str, Encoded], activations: Any) -> None:
    """What the first layer's product reads, worked out from the graph with an output more."""
    model = onnx.load(teacher / "model.onnx")
    name = products(model)[0].input
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [item.name for item in model.graph.input]
    seen = np.concatenate([session.run([name], feed)[0].reshape(-1, 32) for feed in texts(rows["train"], 32, names, 0)])
    found = activations[name]
    np.testing.assert_allclose(found.low_K, seen.min(axis=0), atol=1e-6)
    np.testing.assert_allclose(found.high_K, seen.max(axis=0), atol=1e-6)
    assert found.counts_H.sum() == seen.size


def outlier() -> Activation:
    """A bell within -1 and 1, and one value at 16."""
    values = np.append(np.random.default_rng(0).normal(size=200_000).clip(-4, 4) / 4, 16.0)
    counts, _ = np.histogram(values, bins=BINS, range=(-1, 16))
    return Activation(np.array([-1.0]), np.array([16.0]), counts.astype(np.float64))


def test_methods_of_calibration_differ_in_what_an_outlier_is_worth() -> None:
    assert outlier().range("min-max") == (-1.0, 16.0)
    assert outlier().range("percentile")[1] < 1.1
    low, high = outlier().range("entropy")
    assert (low, high < 8) == (-1.0, True)


def test_entropy_cuts_nothing_off_an_even_histogram() -> None:
    assert entropy_threshold(np.full(BINS, 100.0), 3.0) == pytest.approx(3.0, rel=0.05)


def test_smoothing_keeps_the_product_and_evens_both_sides() -> None:
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(50, 4)) * [1, 100, 1, 0.01], random.normal(size=(4, 6)).astype(np.float32)
    factor = smoothing(Activation(x.min(axis=0), x.max(axis=0), np.zeros(BINS)), weight)
    np.testing.assert_allclose((x / factor) @ (weight * factor[:, None]), x @ weight, rtol=1e-5)
    spread = [np.ptp(np.log(np.abs(value).max(axis=0))) for value in (x, x / factor)]
    assert spread[1] < 0.6 * spread[0]


def test_the_product_that_does_most_harm_is_found(
    teacher: Path,
    activations: Any,
    rows: dict[str, Encoded],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A saturating layer: the range of one activation is a hundredth of what it was."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", -1.0)
    caplog.set_level("INFO")
    item = next(
        item
        for item in products(onnx.load(teacher / "model.onnx"))
        if item.name.endswith("last/feed_forward/down/Gemm")
    )
    narrow = Activation(activations[item.input].low_K / 100, activations[item.input].high_K / 100, np.ones(BINS))

    def write(excluded: tuple[str, ...], target: Path) -> None:
        seen = {**activations, item.input: narrow}
        # With 8 bits all products saturate on a processor without VNNI, and another one may do most harm.
        quantize_graph(teacher / "model.onnx", target, Static(), seen, excluded=excluded, weight_bits=7)

    load, end_s = partial(OnnxPredictor, threads=1), time.monotonic() + 600
    names = likely_first([other.name for other in products(onnx.load(teacher / "model.onnx"))])
    given: dict[str, Any] = {"source": teacher / "model.onnx", "write": write, "load": load, "scratch": tmp_path}
    ranking = Ranking(**given, examples=rows["train"], seed=0)
    found = ranking.by_harm(names[::-1], end_s=end_s)
    assert found[0] == item.name
    assert sorted(found) == sorted(names)
    assert f"quantize ranks products to leave in fp32 (1) {DENSE}/{DENSE}" in caplog.text
    assert not list(tmp_path.iterdir())
    ranking.by_harm(found[1:], spared=(item.name,), end_s=end_s)
    assert f"quantize ranks products to leave in fp32 (2) {DENSE - 1}/{DENSE - 1}" in caplog.text
    assert ranking.by_harm(names, end_s=0.0) == names  # the first is tried, the others are as they came
    assert f"quantize tried 1 of {DENSE} products in the time" in caplog.text


def test_second_products_of_the_last_feed_forward_parts_are_tried_first(teacher: Path) -> None:
    names = [item.name for item in products(onnx.load(teacher / "model.onnx"))]
    found = likely_first(names)
    assert ["last" in name for name in found[:2]] == [True, False]
    assert all("feed_forward/down" in name for name in found[:2])
    assert sorted(found) == sorted(names)


def test_dynamic_is_the_only_scheme_that_computes_ranges_of_a_batch(graphs: dict[Int8Candidate, Path]) -> None:
    for name, path in graphs.items():
        assert ("DynamicQuantizeLinear" in operators(path)) == isinstance(CANDIDATES[name], Dynamic)


def test_a_trimmed_student_answers_the_same_to_texts_of_its_pieces(teacher: Path, tmp_path: Path) -> None:
    tokenizer, few = load_tokenizer(teacher), tiny.encoded(tmp_path / "few", train=4)
    kept = used_pieces(tokenizer, few, ())
    assert 10 < len(kept) < len(tiny.WORDS) < tiny.VOCABULARY
    trim(teacher, kept, tmp_path / "trimmed")
    trimmed = load_tokenizer(tmp_path / "trimmed")
    assert len(trimmed) == len(kept)
    assert trimmed.pad_token_id == tokenizer.pad_token_id == 0
    assert (tmp_path / "trimmed" / "vocab.txt").read_text().split() == [
        tokenizer.convert_ids_to_tokens(int(n)) for n in kept
    ]
    corpus = Artifact.open(tmp_path / "few" / "examples", kind="examples")
    again = encode(corpus, "train", trimmed, tiny.MAX_TOKENS, cache=tmp_path)
    before, after = few.batch(np.arange(4)), again.batch(np.arange(4))
    assert before.inputs.input_ids_BS.max() > after.inputs.input_ids_BS.max()
    mine = OnnxPredictor(tmp_path / "trimmed" / "model.onnx", threads=1)(after.inputs)
    theirs = OnnxPredictor(teacher / "model.onnx", threads=1)(before.inputs)
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    lost = next(word for word in tiny.WORDS if tokenizer.vocab[word] not in kept)
    assert trimmed.tokenize(lost) == ["[UNK]"]


@pytest.mark.parametrize("letter", ["a", "7", "é", "ß", "“", "—", "€", "。", "「", "×"])
def test_characters_of_any_text_are_kept(letter: str) -> None:
    assert in_any_text(letter)


def test_words_of_a_script_that_the_texts_use_can_be_spelt_after_a_trim(tmp_path: Path) -> None:
    russian = "абвгдежзийклмнопрстуфхцчшщъыьэюя"
    letters = (*russian, *(f"##{letter}" for letter in russian), "東", "α", "##α")
    whole = load_tokenizer(tiny.checkpoint(tmp_path / "model", words=(*tiny.WORDS, "фильм", "сюжет", *letters)))
    text, few = tmp_path / "texts.txt", tiny.encoded(tmp_path / "few", train=4)
    text.write_text("фильм\n", encoding="utf-8")

    def kept(*sources: str) -> set[str]:
        return {whole.convert_ids_to_tokens(int(number)) for number in used_pieces(whole, few, sources)}

    assert not kept() & set(letters)
    assert set(letters) - kept(str(text)) == {"東", "α", "##α"}
    assert "сюжет" not in kept(str(text))
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    trim(tmp_path / "onnx", used_pieces(whole, few, (str(text),)), tmp_path / "trimmed")
    assert load_tokenizer(tmp_path / "trimmed").tokenize("фильм сюжет") == ["фильм", "с", *(f"##{x}" for x in "южет")]


def test_pieces_that_are_unknown_are_counted(teacher: Path, tmp_path: Path) -> None:
    tokenizer, few = load_tokenizer(teacher), tiny.encoded(tmp_path / "few", train=4)
    assert unknown_share(tokenizer, few) == 0
    inputs = few.batch(np.arange(4)).inputs
    tokenizer.unk_token = tokenizer.convert_ids_to_tokens(int(inputs.input_ids_BS[0, 1]))
    count = int((inputs.input_ids_BS == inputs.input_ids_BS[0, 1]).sum())
    assert unknown_share(tokenizer, few) == count / inputs.mask_BS.sum()


def test_pieces_of_more_text_are_kept(teacher: Path, tmp_path: Path) -> None:
    tokenizer, few, text = load_tokenizer(teacher), tiny.encoded(tmp_path / "few", train=4), tmp_path / "more.txt"
    kept = used_pieces(tokenizer, few, ())
    extra = next(word for word in tiny.WORDS if tokenizer.vocab[word] not in kept)
    text.write_text(f"{extra}\n", encoding="utf-8")
    assert set(used_pieces(tokenizer, few, (str(text),))) == {*kept, tokenizer.vocab[extra]}
    table = tmp_path / "more.csv"
    table.write_text(f"review\n{extra}\n", encoding="utf-8")
    assert set(used_pieces(tokenizer, few, (str(table),), "review")) == {*kept, tokenizer.vocab[extra]}


def test_a_column_times_100_harms_the_others_unless_columns_have_scales_of_their_own() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    weight[:, 3] *= 100
    errors = {}
    for per_channel in (True, False):
        found, scale = quantize_columns(weight, 8, per_channel=per_channel)
        errors[per_channel] = np.abs(found * scale - weight)[:, :3].mean() / np.abs(weight[:, :3]).mean()
    assert errors[True] < 0.01 < 0.3 < errors[False]
