"""Checkpoints in the layouts they were released in: what is loaded, what is reported, what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from compressor.checkpoints import (
    LoadReport,
    adopt_classifier,
    general_student,
    load_classifier,
    load_encoder,
    load_plain_encoder,
    load_tokenizer,
)
from compressor.errors import ModelError
from compressor.models import student_shape
from compressor.tasks import TASKS
from tests import tiny

IDS = torch.tensor([[2, 5, 17, 3], [2, 11, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
TEACHER_WIDTH = 48
Weights = dict[str, torch.Tensor]
HEADS = {
    "cls.predictions.bias": torch.zeros(5),
    "cls.predictions.transform.LayerNorm.gamma": torch.ones(16),
    "cls.seq_relationship.weight": torch.zeros(2, 16),
}
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return found


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.bert(input_ids=IDS, attention_mask=MASK).last_hidden_state
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None takes one out."""
    file = folder / "config.json"
    made = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in made.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def pickled(folder: Path, content: Any, **options: Any) -> Path:
    """Put `content` in place of the folder's weights."""
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin", **options)
    return folder


def named_before(weights: Weights) -> Weights:
    """LayerNorms called gamma and beta."""
    for new, old in OLD_NAMES.items():
        weights = {name.replace(new, old): tensor for name, tensor in weights.items()}
    return weights


def without_prefix(weights: Weights) -> Weights:
    return {name.removeprefix("bert."): tensor for name, tensor in weights.items()}


def encoder_alone(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if not name.startswith("classifier.")}


def linears(*names: str, bias: bool = True) -> Weights:
    """Projections from width 16, each with weights of its own."""
    found = Weights()
    for number, name in enumerate(names, start=1):
        found[f"{name}.weight"] = torch.full((TEACHER_WIDTH, 16), float(number))
        if bias:
            found[f"{name}.bias"] = torch.full((TEACHER_WIDTH,), -float(number))
    return found


def released(folder: Path, model: Any, *, projections: Weights) -> Path:
    """A general TinyBERT as it was released: an old pickle, a bare config.json, and vocab.txt."""
    tiny.checkpoint(folder, model)
    weights = encoder_alone(named_before(model.state_dict()))
    weights |= {"bert.embeddings.position_ids": torch.arange(64)[None]} | HEADS | projections
    pickled(folder, weights, _use_new_zipfile_serialization=False)
    edit_config(folder, **dict.fromkeys(("model_type", "architectures", "id2label", "label2id")), cell={}, structure=[])
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    return folder


def labelled(*names: str) -> Any:
    """A lively classifier with these names for its outputs."""
    model = tiny.bert()
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {}
    return tiny.lively(type(model)(model.config)).eval()


def small() -> Any:
    """A lively encoder of the shape that `general` asks for."""
    return tiny.lively(tiny.bert(layers=1, hidden=16))


def general(folder: Path, *, vocabulary: dict[str, int] | None = None) -> Any:
    """The folder's general student, for a teacher of the same vocabulary."""
    shape = student_shape(tiny.student(), tiny.bert().config)
    known = vocabulary or tiny.tokenizer(folder.parent / "teacher").get_vocab()
    return general_student(folder, shape, known, tiny.TASK)


# What is loaded

PER_LAYER = ("fit_denses.0", "fit_denses.1")


@pytest.mark.parametrize("stems", [("fit_dense",), PER_LAYER])
def test_a_released_tinybert_is_used_whole(tmp_path: Path, stems: tuple[str, ...]) -> None:
    model = small()
    student, projections, report = general(released(tmp_path / "tinybert", model, projections=linears(*stems)))
    assert torch.equal(hidden(student), hidden(model))
    for number, (weight, bias) in enumerate(projections, start=1):
        assert torch.equal(weight, torch.full((TEACHER_WIDTH, 16), float(number)))
        assert torch.equal(bias, torch.full((TEACHER_WIDTH,), -float(number)))
    assert len(projections) == len(stems)
    assert report == LoadReport(
        used=len(model.state_dict()) - 2 + 2 * len(stems),
        ignored=("bert.embeddings.position_ids", *HEADS),
        missing=("classifier.weight", "classifier.bias"),
    )


def test_projections_are_in_the_order_of_layers(tmp_path: Path) -> None:
    model = tiny.bert(layers=10, hidden=16)
    stems = [f"fit_denses.{number}" for number in range(11)]
    shape = student_shape(tiny.student(layers=10), model.config)
    folder = released(tmp_path, model, projections=dict(sorted(linears(*stems).items())))  # 0, 1, 10, 2
    _, projections, _ = general_student(folder, shape, load_tokenizer(folder).get_vocab(), tiny.TASK)
    assert projections is not None
    assert [int(weight[0, 0]) for weight, _ in projections] == list(range(1, 12))


def test_projections_without_biases_get_zeros(tmp_path: Path) -> None:
    folder = released(tmp_path / "tinybert", small(), projections=linears("fit_dense", bias=False))
    _, projections, _ = general(folder)
    assert torch.equal(projections[0][1], torch.zeros(TEACHER_WIDTH))


def test_projections_in_a_file_of_their_own_are_read(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "general", small())
    save_file(linears("projections.0", "projections.1"), folder / "projections.safetensors")
    _, projections, report = general(folder)
    assert [int(weight[0, 0]) for weight, _ in projections] == [1, 2]
    assert report.ignored == ("classifier.bias", "classifier.weight")


def test_a_general_student_without_projections_has_none(tmp_path: Path) -> None:
    assert general(tiny.checkpoint(tmp_path / "general", small()))[1] is None


def test_a_general_student_has_no_dropout(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "general", small())
    edit_config(folder, classifier_dropout=0.5)
    student, _, _ = general(folder)
    student.train()
    assert torch.equal(logits(student), logits(student))


def test_projections_are_ignored_by_an_encoder_and_said_so(tmp_path: Path) -> None:
    folder = released(tmp_path, small(), projections=linears("fit_dense"))
    assert set(linears("fit_dense")) < set(load_encoder(folder, tiny.TASK)[1].ignored)


@pytest.mark.parametrize(
    "change", [named_before, without_prefix, encoder_alone, lambda weights: without_prefix(named_before(weights))]
)
def test_every_way_to_name_the_weights_gives_the_same_encoder(
    tmp_path: Path, change: Callable[[Weights], Weights]
) -> None:
    model = tiny.lively(tiny.bert())
    tiny.checkpoint(tmp_path, model)
    edit_weights(tmp_path, change)
    encoder, report = load_plain_encoder(tmp_path)
    assert torch.equal(hidden(encoder), hidden(model))
    assert report.used == len(model.bert.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("prefix", ["", "module."])  # of DataParallel
def test_a_pickle_of_tensors_is_read(tmp_path: Path, zipped: bool, prefix: str) -> None:
    model = tiny.lively(tiny.bert())
    tiny.checkpoint(tmp_path, model)
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    pickled(tmp_path, weights, _use_new_zipfile_serialization=zipped)
    assert torch.equal(logits(load_classifier(tmp_path, tiny.TASK)), logits(model))


def test_safetensors_are_preferred_and_the_pickle_is_not_opened(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    tiny.checkpoint(tmp_path, model)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert torch.equal(logits(load_classifier(tmp_path, tiny.TASK)), logits(model))


def test_half_precision_is_loaded_as_single(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tiny.bert().half())
    model = load_classifier(tmp_path, tiny.TASK)
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}


def test_projections_in_half_precision_are_loaded_as_single(tmp_path: Path) -> None:
    halves = {name: tensor.half() for name, tensor in linears("fit_dense").items()}
    _, projections, _ = general(released(tmp_path / "tinybert", small(), projections=halves))
    assert {tensor.dtype for tensor in projections[0]} == {torch.float32}


def test_an_encoder_s_own_head_is_not_taken(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    encoder, report = load_encoder(tiny.checkpoint(tmp_path, model), TASKS["mnli"])
    assert encoder.classifier.weight.std() < model.classifier.weight.std() / 2  # 0.02 is a fresh one's
    assert encoder.config.id2label == dict(enumerate(TASKS["mnli"].labels))
    assert report.ignored == report.missing[::-1] == ("classifier.bias", "classifier.weight")


def test_the_fresh_head_is_fixed_by_the_seed(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(load_encoder(tmp_path, tiny.TASK)[0].classifier.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_an_encoder_may_lack_its_pooler(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_weights(tmp_path, lambda weights: {name: weights[name] for name in weights if "pooler" not in name})
    assert "bert.pooler.dense.weight" in load_encoder(tmp_path, tiny.TASK)[1].missing


# Labels


@pytest.mark.parametrize("names", [("POSITIVE", "NEGATIVE"), ("positive", "Negative")])
def test_labels_in_the_other_order_give_the_same_answer_by_name(tmp_path: Path, names: tuple[str, str]) -> None:
    model = tiny.lively(tiny.bert())
    theirs = logits(model)
    tiny.checkpoint(tmp_path, model)
    edit_config(tmp_path, id2label=dict(enumerate(names)), label2id={name: index for index, name in enumerate(names)})
    loaded = load_classifier(tmp_path, tiny.TASK)
    assert loaded.config.id2label == {0: "negative", 1: "positive"}
    assert loaded.config.label2id == {"negative": 0, "positive": 1}
    assert_close(logits(loaded), theirs.flip(-1))


def test_three_labels_are_matched_by_name_in_any_case_of_either_side(tmp_path: Path) -> None:
    names = ("contradiction", "entailment", "neutral")
    task = TASKS["mnli"].model_copy(update={"labels": ("Entailment", "Neutral", "Contradiction")})
    model = labelled(*names)
    theirs = logits(model)
    loaded = load_classifier(tiny.checkpoint(tmp_path, model), task)
    assert loaded.config.id2label == dict(enumerate(task.labels))
    assert_close(logits(loaded), theirs[:, [1, 2, 0]])


def test_saved_and_loaded_classifier_keeps_its_order(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    loaded = load_classifier(tiny.checkpoint(tmp_path, model), tiny.TASK)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "names",
    [
        {"0": "LABEL_0", "1": "LABEL_1"},
        {"0": "negative", "1": "neutral", "2": "positive"},
        {"0": "negative", "1": "negative"},
        {"0": "negative"},
    ],
)
def test_other_labels_are_refused(tmp_path: Path, names: dict[str, str]) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, id2label=names)
    with pytest.raises(ModelError, match=r"has labels \[.*\]; sst2 has \['negative', 'positive'\]; name its classes"):
        load_classifier(tmp_path, tiny.TASK)


def test_a_regression_needs_no_label_names(tmp_path: Path) -> None:
    model = labelled("LABEL_0")
    tiny.checkpoint(tmp_path, model)
    loaded = load_classifier(tmp_path, TASKS["stsb"])
    assert (loaded.config.num_labels, loaded.config.problem_type) == (1, "regression")
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)  # a bit can hang on where weights lie in memory


def test_an_encoder_for_a_regression_has_one_output(tmp_path: Path) -> None:
    encoder, _ = load_encoder(tiny.checkpoint(tmp_path), TASKS["stsb"])
    assert logits(encoder).shape == (2, 1)
    assert (encoder.config.num_labels, encoder.config.problem_type) == (1, "regression")


def test_a_classifier_is_refused_for_a_regression(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has 2 outputs; stsb is a regression and needs 1; use a checkpoint"):
        load_classifier(tiny.checkpoint(tmp_path), TASKS["stsb"])


def test_a_regression_is_refused_for_labels(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has labels \['LABEL_0'\]; sst2 has"):
        load_classifier(tiny.checkpoint(tmp_path, labelled("LABEL_0")), tiny.TASK)


# The report


def test_the_report_says_what_was_used_ignored_and_missing() -> None:
    names = tuple(f"cls.{number}" for number in range(6))
    report = LoadReport(used=71, ignored=names, missing=())
    assert report.sentence() == ("used 71 of 77 tensors; ignored cls.0, cls.1, cls.2, cls.3 and 2 more; missing none")
    assert json.loads(json.dumps(report.as_dict())) == {"used": 71, "ignored": list(names), "missing": []}


@pytest.mark.parametrize(("load", "level"), [(load_encoder, logging.INFO), (adopt_classifier, logging.DEBUG)])
def test_every_load_is_logged(tmp_path: Path, caplog: Any, load: Any, level: int) -> None:
    folder = tiny.checkpoint(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="compressor"):
        _, report = load(folder, tiny.TASK)
    assert (f"checkpoint {folder}: {report.sentence()}", level) in [
        (record.getMessage(), record.levelno) for record in caplog.records
    ]


def test_a_whole_classifier_leaves_nothing_over(tmp_path: Path) -> None:
    model = tiny.bert()
    _, report = adopt_classifier(tiny.checkpoint(tmp_path, model), tiny.TASK)
    assert asdict(report) == {"used": len(model.state_dict()), "ignored": (), "missing": ()}
