"""The stage: which candidate wins, what a server's batches change, and a folder that serves by itself."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor import machine, onnx_graph
from compressor.artifact import Artifact
from compressor.bounds import Bounds
from compressor.config import QuantizeConfig
from compressor.errors import ArtifactError, ConfigError, DataError, GateError
from compressor.stages.quantize import quantize, search
from compressor.stages.quantize.calibration import Activation, calibrate
from compressor.stages.quantize.candidates import CANDIDATES
from compressor.stages.quantize.choice import choose, evidence, slower_than_fp32, speed
from compressor.stages.quantize.exclusion import Ranking
from compressor.stages.quantize.rewriting import products, quantize_graph
from compressor.stages.quantize.scoring import ExactPredictor, latency_shapes
from compressor.stages.quantize.search import Host
from compressor.stages.quantize.stage import teacher_logits
from compressor.statistics import wilson
from tests import tiny
from tests.conftest import Line

pytestmark = pytest.mark.filterwarnings("ignore")  # ONNX Runtime's own
BOUNDS = Bounds(max_metric_drop=0.005, max_label_flips=0.0, min_agreement=0.97)


def row(scheme: str, drop: float, ms: float, flips: float = 0.0, agreement: float = 0.99) -> dict[str, Any]:
    times = dict.fromkeys(("1x16", "1x32", "8x32"), ms)
    facts = {"scheme": scheme, "metric": "accuracy", "score": 0.9 - drop, "drop": drop, "flips": flips}
    facts |= {"agreement_fp32": agreement, "agreement_fp32_95": wilson(round(1000 * agreement), 1000), "rows": 1000}
    facts |= {"fp32_logit_difference": 0.1, "batch_logit_difference": 0.0}
    return {**facts, "size_bytes": 10**6, "p50_ms": times}


def test_the_fastest_within_the_bounds_wins() -> None:
    table = [row("fp32", 0, 10), row("per-row", 0, 6), row("static", 0.005, 3), row("static-entropy", 0.02, 1)]
    assert choose(table, BOUNDS) == "static"
    assert choose(table, replace(BOUNDS, max_metric_drop=0.004)) == "per-row"


def test_a_candidate_whose_answers_depend_on_the_batch_does_not_win() -> None:
    table = [row("fp32", 0, 10), row("dynamic", 0, 1, flips=0.001), row("static", 0, 3)]
    assert choose(table, BOUNDS) == "static"
    assert choose(table, replace(BOUNDS, max_label_flips=0.001)) == "dynamic"


def test_a_candidate_whose_logits_depend_on_the_batch_does_not_win_because_no_flip_was_seen() -> None:
    table = [row("fp32", 0, 10), row("dynamic", 0, 1) | {"batch_logit_difference": 0.13}, row("static", 0, 3)]
    assert choose(table, BOUNDS) == "static"
    table[2]["batch_logit_difference"] = 1e-5
    assert choose(table, BOUNDS) == "static"
    assert choose(table, replace(BOUNDS, max_label_flips=0.001)) == "dynamic"
    message = r"nearest miss is dynamic: .* logits differ between batches by 1\.3e-01, the bound is 1e-05 where max_lab"
    with pytest.raises(GateError, match=message):
        choose(table[:2], BOUNDS)


def test_a_candidate_that_answers_otherwise_than_fp32_does_not_win_if_the_rows_can_show_it() -> None:
    table = [row("fp32", 0, 10), row("static", 0, 1, agreement=0.95), row("per-row", 0, 3)]
    assert choose(table, BOUNDS) == "per-row"
    table[1]["agreement_fp32_95"] = wilson(38, 40)
    assert choose(table, BOUNDS) == "static"
    del table[1]["agreement_fp32_95"]  # of a regression
    assert choose(table, BOUNDS) == "static"


def test_a_failing_agreement_is_named_with_its_bound() -> None:
    table = [row("fp32", 0, 10), row("static", 0, 1, agreement=0.95)]
    message = r"95\.00 % of answers are those of fp32 \(95 % interval 93\.\d+ to 96\.\d+\), the bound is 97\.00"
    with pytest.raises(GateError, match=message):
        choose(table, BOUNDS)


def test_a_loss_is_told_with_its_rows_and_whether_they_can_show_it() -> None:
    lost = {"metric": "accuracy", "rows": 200, "mcnemar_fp32": 0.5}
    assert evidence(lost) == (
        "200 validation rows (one is 0.50 points; McNemar's p = 0.5: they cannot tell it from chance)"
    )
    assert "p = 0.001: more than chance" in evidence(lost | {"mcnemar_fp32": 0.001})
    assert evidence({"metric": "pearson", "rows": 200}) == "200 validation rows"


def test_a_winner_that_is_slower_than_fp32_is_told() -> None:
    table = [row("fp32", 0, 2), row("static", 0, 3)]
    assert choose(table, BOUNDS) == "static"
    assert slower_than_fp32(table, "static").startswith(
        "static takes 1.50 times as long as fp32 on this machine, over all shapes (3.00 ms at 1x32 against 2.00 ms"
    )
    assert slower_than_fp32([row("fp32", 0, 3), row("static", 0, 2)], "static") == ""


def test_a_model_too_short_for_the_usual_shape_is_told_with_another() -> None:
    table = [row("fp32", 0, 10), row("static", 0.02, 3)]
    for item in table:
        item["p50_ms"] = {"1x16": 1.0}
    with pytest.raises(GateError, match=r"1\.00 ms at 1x16"):
        choose(table, BOUNDS)


def test_of_equally_fast_ones_the_one_that_agrees_most_with_fp32_wins() -> None:
    table = [row("fp32", 0, 10), row("static", 0, 5.0), row("static-smooth", 0.001, 5.4, agreement=0.995)]
    assert choose(table, BOUNDS) == "static-smooth"
    table[1] = row("static", 0, 4.0)
    assert choose(table, BOUNDS) == "static"


def test_speed_is_the_geometric_mean_of_all_shapes() -> None:
    assert speed({"p50_ms": {"1x16": 1.0, "1x32": 2.0, "8x32": 4.0}}) == pytest.approx(2.0)


def test_none_within_the_bounds_fails_with_the_table_and_the_nearest_miss() -> None:
    table = [row("fp32", 0, 10), row("dynamic", 0, 6, flips=0.02), row("static", 0.01, 3)]
    message = (
        r"nearest miss is static: it loses 1\.00 points on 1000 validation rows .* bound is 0\.50 "
        r"\(quantize.max_metric_drop\), 0\.00 % .*"
        r"fp32: accuracy 90\.00 .*; dynamic: accuracy 90\.00 .* 2\.00 % .*; static: accuracy 89\.00 .*; no luck"
    )
    with pytest.raises(GateError, match=message) as caught:
        choose(table, BOUNDS, "; no luck")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["avx2", "avx512f", "avx512_vnni", "amx_int8"], "amx"),
        (["avx2", "avx512f", "avx512_vnni"], "avx512_vnni"),
        (["avx2", "avx_vnni"], "avx512_vnni"),
        (["avx2", "avx512f"], "avx2"),
        (["asimd", "asimddp"], "neon"),
    ],
)
def test_the_kind_of_processor_follows_from_its_flags(flags: list[str], kind: machine.TargetCpu) -> None:
    assert machine.int8_cpu(flags) == kind


def test_without_vnni_weights_get_7_bits_and_a_foreign_target_is_warned_of() -> None:
    assert (Host("avx2", "amx").weight_bits, Host("amx", "amx").weight_bits, Host("neon", "amx").weight_bits) == (
        7,
        8,
        8,
    )
    assert Host("amx", "amx").warning() == ""
    assert "kind amx: times are not those of the target" in Host("avx2", "amx").warning()
    assert "products may saturate" in Host("amx", "avx2").warning()


def test_unsigned_weights_have_8_bits_everywhere() -> None:
    for host in (Host("avx2", "avx2"), Host("amx", "amx")):
        assert host.bits(CANDIDATES["static-u8"]) == host.bits(CANDIDATES["per-row-u8"]) == 8
    assert Host("avx2", "avx2").bits(CANDIDATES["static"]) == 7


def test_answers_of_a_target_with_vnni_are_scored_without_saturation_where_there_is_none() -> None:
    assert Host("amx", "avx2").predictor is Host("neon", "avx2").predictor is ExactPredictor
    assert Host("avx2", "avx2").predictor is Host("amx", "amx").predictor is Host("avx2", "amx").predictor
    assert Host("avx2", "amx").predictor is not ExactPredictor
    assert "x64quantprecision and are those of the target" in Host("amx", "avx2").warning()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time little."""
    tiny.hurry(monkeypatch)


@pytest.fixture
def models(line: Line) -> Artifact:
    return Artifact.open(line.run / "6-export", kind="onnx")


def run(config: QuantizeConfig, line: Line, models: Artifact, out: Path, student: Artifact | None = None) -> Artifact:
    return quantize(
        config,
        tiny.TASK,
        onnx_models=models,
        student=student or Artifact.open(line.run / "5-distill-prediction", kind="student"),
        teacher=Artifact.open(line.run / "2-finetune", kind="teacher"),
        corpus=Artifact.open(line.run / "1-corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        seed=7,
        key=out.name,
        out=out,
    )


def settings(**changes: Any) -> QuantizeConfig:
    given: dict[str, Any] = {"candidates": ("static",), "calibration_rows": 8, "max_metric_drop": 0.1}
    return QuantizeConfig(**(given | changes))


@pytest.fixture
def saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, by ranges of activations that are far too narrow."""

    def saturating(*arguments: Any) -> dict[str, Activation]:
        seen = calibrate(*arguments)
        return {
            name: Activation(-1e-4 + 0 * item.low_K, 1e-4 + 0 * item.high_K, item.counts_H)
            for name, item in seen.items()
        }

    monkeypatch.setattr(search, "calibrate", saturating)


@pytest.mark.usefixtures("hasty", "saturated")
def test_a_layer_that_saturates_fails_the_accuracy_gate_which_names_products(
    line: Line, models: Artifact, tmp_path: Path
) -> None:
    message = r"accuracy gate: no INT8 candidate .* bound is 5\.00 .*static less 1.*that do most harm in static: /l.*"
    with pytest.raises(GateError, match=message):
        run(settings(max_metric_drop=0.05, max_excluded=1), line, models, tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


def test_a_weight_that_is_no_number_fails_the_finite_gate_by_name(models: Artifact, tmp_path: Path) -> None:
    model = onnx.load(models.path / "student" / "model.onnx")
    weight = next(item for item in model.graph.initializer if len(item.dims) == 2)
    values = numpy_helper.to_array(weight).copy()
    values[0, 0] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(GateError, match=f"finite gate: .*NaN or infinite.* in {weight.name}; the bound is 0"):
        onnx_graph.refuse_broken(tmp_path / "model.onnx")


@pytest.mark.usefixtures("hasty")
def test_a_candidate_whose_logits_are_no_numbers_is_left_out(
    line: Line, models: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(source: Path, target: Path, *arguments: Any, **options: Any) -> None:
        quantize_graph(source, target, *arguments, **options)
        if target.name == "static.onnx":
            model = onnx.load(target)
            bias = next(item for item in model.graph.initializer if list(item.dims) == [len(tiny.TASK.labels)])
            bias.CopyFrom(numpy_helper.from_array(np.full(bias.dims, np.nan, np.float32), bias.name))
            onnx.save(model, target)

    monkeypatch.setattr(search, "quantize_graph", broken)
    made = run(settings(candidates=("static", "per-row"), max_excluded=0), line, models, tmp_path / "int8")
    assert [item["scheme"] for item in made.metrics["candidates"]] == ["fp32", "per-row"]
    assert "quantize leaves static out: accuracy gate: static gives logits that are no numbers" in caplog.text
    assert [path.name for path in made.path.glob("*.onnx")] == ["model.onnx"]
    message = r"no INT8 candidate is left to choose from; static is out: its logits are no numbers$"
    with pytest.raises(GateError, match=message):
        run(settings(max_excluded=0), line, models, tmp_path / "none")


@pytest.mark.usefixtures("hasty", "saturated")
def test_the_search_for_harmful_products_ends_in_time(
    line: Line,
    models: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Ranking, "by_harm", lambda self, names, **_: names)
    monkeypatch.setattr(search, "EXCLUSION_S", 0.0)
    with pytest.raises(GateError, match=r"static less 1.*do most harm in static: /") as caught:
        run(settings(max_metric_drop=0.05, max_excluded=2), line, models, tmp_path / "int8")
    assert "static less 2" not in str(caught.value)
    assert "no more than 1 products of static in fp32: time is up" in caplog.text


@pytest.mark.usefixtures("hasty", "saturated")
def test_products_are_ranked_again_beside_those_that_are_spared_and_each_kind_gives_its_hint(
    line: Line, models: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = onnx.load(models.path / "student" / "model.onnx"), list[tuple[str, ...]]()
    names = sorted(item.name for item in products(model))

    def by_harm(_self: Any, left: list[str], *, spared: tuple[str, ...], **_: Any) -> list[str]:
        asked.append(spared)
        return sorted(left)

    monkeypatch.setattr(Ranking, "by_harm", by_harm)
    monkeypatch.setattr(Bounds, "faults", lambda *_: ["none holds"])
    given = settings(candidates=("static", "per-row"), max_excluded=2)
    hints = "".join(f"; the products that do most harm in {name}: {names[0]}, {names[1]}" for name in given.candidates)
    with pytest.raises(GateError, match=re.escape(hints) + "$"):
        run(given, line, models, tmp_path / "int8")
    assert asked == [(), (names[0],)] * 2


@pytest.mark.usefixtures("hasty")
def test_the_column_of_the_vocabularys_texts_is_the_settings(line: Line, models: Artifact, tmp_path: Path) -> None:
    texts = tmp_path / "texts.csv"
    texts.write_text("review\na good film\n", encoding="utf-8")
    given: dict[str, Any] = {"trim_vocabulary": True, "vocabulary_texts": (str(texts),)}
    run(settings(**given, vocabulary_column="review"), line, models, tmp_path / "int8")
    with pytest.raises(DataError, match="text"):
        run(settings(**given), line, models, tmp_path / "other")
    with pytest.raises(ValueError, match="vocabulary_column is 'review' and there are no vocabulary_texts"):
        settings(vocabulary_column="review")


@pytest.mark.usefixtures("hasty")
def test_unsigned_weights_are_for_targets_without_vnni(line: Line, models: Artifact, tmp_path: Path) -> None:
    made = run(settings(candidates=("static-u8",), target_cpu="avx2"), line, models, tmp_path / "avx2")
    assert (made.metrics["scheme"], made.metrics["weight_bits"]) == ("static-u8", 8)
    assert onnx_graph.notes(made.path / "model.onnx")["weight_bits"] == "8"
    made = run(settings(candidates=("static", "static-u8"), target_cpu="amx"), line, models, tmp_path / "amx")
    assert [item["scheme"] for item in made.metrics["candidates"]] == ["fp32", "static"]
    with pytest.raises(
        ConfigError, match=r"candidates are per-row-u8, all for processors without VNNI, .*target is amx"
    ):
        run(settings(candidates=("per-row-u8",), target_cpu="amx"), line, models, tmp_path / "none")


@pytest.mark.usefixtures("hasty")
def test_a_trimmed_vocabulary_is_used_by_every_file_of_the_folder(line: Line, models: Artifact, tmp_path: Path) -> None:
    made = run(settings(trim_vocabulary=True, target_cpu="avx2"), line, models, tmp_path / "int8")
    pieces = made.metrics["vocabulary"]["pieces"]
    assert pieces == made.metrics["vocabulary"]["pieces_before"] == len(tiny.WORDS) < tiny.VOCABULARY
    assert json.loads((made.path / "config.json").read_text())["vocab_size"] == pieces
    assert len(json.loads((made.path / "tokenizer.json").read_text())["model"]["vocab"]) == pieces
    assert [item["scheme"] for item in made.metrics["candidates"]] == ["fp32", "fp32 trimmed", "static"]
    assert made.metrics["vocabulary"]["unknown"] == made.metrics["vocabulary"]["unknown_before"] == 0
    assert made.metrics["candidates"][1]["agreement_fp32"] > 0.9
    assert made.metrics["size_by_part"]["int8"]["embeddings"] < 0.1 * made.metrics["size_by_part"]["fp32"]["embeddings"]
    assert (made.metrics["target_cpu"], made.metrics["weight_bits"]) == ("avx2", 7)
    assert not (made.path / "trimmed").exists()
    notes = {item.key: item.value for item in onnx.load(made.path / "model.onnx").metadata_props}
    assert (notes["compressor.target_cpu"], notes["compressor.weight_bits"]) == ("avx2", "7")


def test_the_stage_keeps_the_chosen_graph_alone(line: Line) -> None:
    made = Artifact.open(line.run / "7-quantize", kind="int8")
    assert [name for name in made.manifest["files"] if name.endswith(".onnx")] == ["model.onnx"]
    assert made.metrics["size_bytes"] == (made.path / "model.onnx").stat().st_size
    assert made.metrics["scheme"] in ("static", "per-row")  # dynamic is the fastest, and depends on the batch
    assert set(made.metrics["validation_pairs"]) == {"student fp32", "teacher"}


def test_the_table_has_the_metric_in_every_batch_a_server_makes(line: Line) -> None:
    found = Artifact.open(line.run / "7-quantize", kind="int8").metrics["candidates"]
    assert [item["scheme"] for item in found] == ["fp32", "static", "per-row", "dynamic"]
    assert (found[0]["agreement_fp32"], found[0]["drop"]) == (1.0, 0.0)
    for item in found:
        assert list(item["scores"]) == ["1", "8", "64", "64 mixed"]
        assert item["score"] == min(item["scores"].values())
        drops = [found[0]["scores"][name] - score for name, score in item["scores"].items()]
        assert item["drop"] == pytest.approx(max(drops))
        assert 0.9 < item["agreement_teacher"] <= 1
    assert [item["batch_logit_difference"] <= 1e-5 for item in found] == [True, True, True, False]


def test_the_latency_table_has_every_system_at_every_shape_the_model_takes(line: Line) -> None:
    found = Artifact.open(line.run / "7-quantize", kind="int8").metrics["latency"]
    assert set(found) == {"teacher PyTorch", "teacher ONNX", "student fp32", "student INT8"}
    for shapes in found.values():
        assert set(shapes) == {"1x16", "1x32", "8x32"}  # the tiny model has 64 positions
        assert all(0 < times["min_ms"] <= times["p50_ms"] for times in shapes.values())
    assert latency_shapes(line.run / "6-export" / "student") == [(1, 16), (1, 32), (8, 32)]


def test_a_model_with_very_few_positions_is_timed_at_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    assert latency_shapes(tmp_path) == [(1, 8)]


def test_teacher_logits_must_fit_the_rows(line: Line, tmp_path: Path) -> None:
    teacher = Artifact.open(line.run / "2-finetune", kind="teacher")
    assert teacher_logits(teacher, 48).shape == (48, 2)
    with pytest.raises(ArtifactError, match="has 48 rows, the validation split 47"):
        teacher_logits(teacher, 47)
    with pytest.raises(ArtifactError, match="cannot be read"):
        teacher_logits(Artifact(tmp_path, teacher.manifest), 48)


def test_the_folder_loads_by_itself_in_optimum_and_a_pipeline(line: Line, tmp_path: Path) -> None:
    from optimum.onnxruntime import ORTModelForSequenceClassification
    from transformers import AutoTokenizer, pipeline

    folder = tmp_path / "elsewhere"
    shutil.copytree(line.run / "7-quantize", folder)
    model = ORTModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.model_max_length == tiny.MAX_TOKENS
    found = pipeline("text-classification", model=model, tokenizer=tokenizer)(
        ["a good film", "a dull plot"], batch_size=2
    )
    assert {answer["label"] for answer in found} == set(tiny.TASK.labels)
    assert found[0]["label"] == "positive"


def test_card_and_provenance_hold_the_measured_numbers(line: Line) -> None:
    from huggingface_hub import ModelCard

    made = Artifact.open(line.run / "7-quantize", kind="int8")
    card = ModelCard.load(made.path / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    result = card.data.eval_results[0]
    assert (result.metric_type, result.metric_value) == (
        "accuracy",
        pytest.approx(made.metrics["test"]["score"], abs=1e-4),
    )
    assert f"scheme `{made.metrics['scheme']}`" in card.text
    provenance = json.loads((made.path / "provenance.json").read_text())
    assert provenance["labels"] == list(tiny.TASK.labels)
    parents = made.manifest["parents"]
    assert provenance["made_from"] == {
        "data": "files in data",  # of the recipe's own, although the task is GLUE's
        **{name: parents[name]["content"] for name in ("student", "teacher", "corpus")},
    }
    assert result.dataset_name == "files in data"
    assert provenance["made_for_cpu"] == machine.int8_cpu()
