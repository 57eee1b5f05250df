"""Checkpoints that are refused: heads, pickles, weights and configurations that are not what they should be."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.checkpoints import (
    load_classifier,
    load_encoder,
    load_tokenizer,
    read_weights,
)
from compressor.errors import ModelError
from tests import tiny
from tests.compressor.test_checkpoints import (
    PER_LAYER,
    TEACHER_WIDTH,
    Weights,
    edit_config,
    edit_weights,
    general,
    hidden,
    linears,
    named_before,
    pickled,
    released,
    small,
)

# What is refused


@pytest.mark.parametrize("stems", [("fit_dense",), PER_LAYER])
def test_the_published_head_is_refused_with_its_remedy(tmp_path: Path, stems: tuple[str, ...]) -> None:
    folder = tiny.checkpoint(tmp_path, small())
    edit_weights(folder, lambda weights: weights | linears(*stems))
    with pytest.raises(ModelError, match=r"there was a ReLU before it .* would be wrong; use it as student.init"):
        load_classifier(folder, tiny.TASK)


def test_the_published_head_does_no_harm_to_a_general_student(tmp_path: Path) -> None:
    model = small()
    folder = tiny.checkpoint(tmp_path / "general", model)
    edit_weights(folder, lambda weights: weights | linears("fit_dense"))
    student, projections, report = general(folder)
    assert torch.equal(hidden(student), hidden(model))
    assert not torch.equal(student.classifier.weight, model.classifier.weight)
    assert len(projections) == 1
    assert report.ignored == ("classifier.bias", "classifier.weight")


@pytest.mark.parametrize("name", ["is_decoder", "add_cross_attention"])
def test_a_decoder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tiny.checkpoint(tmp_path, small())
    edit_config(folder, **{name: True})
    with pytest.raises(ModelError, match=rf"config.json gives {name} true, and only encoders are supported; use one"):
        load_encoder(folder, tiny.TASK)


def test_a_model_that_was_not_fine_tuned_is_no_teacher(tmp_path: Path) -> None:
    tiny.bert().bert.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no classifier, so it was not fine-tuned; give it as finetune.base"):
        load_classifier(tmp_path, tiny.TASK)


class Harmful:
    """Unpickled without care, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


REFUSED = r"pytorch_model.bin is damaged or holds more than tensors by name, .* can run code; save the model again"


@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path, how: str) -> None:
    ran, model = tmp_path / "ran", tiny.bert()
    folder = tiny.checkpoint(tmp_path / "model", model)
    content = {"bert.more": Harmful(ran), **model.state_dict()}
    pickled(folder, content, _use_new_zipfile_serialization=how == "zip")
    if how == "plain":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"bert.more": Harmful(ran)}, protocol=2))
    with pytest.raises(ModelError, match=REFUSED):
        load_classifier(folder, tiny.TASK)
    assert not ran.exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"model": {"a": torch.zeros(1)}}, {"epoch": 3}])
def test_a_pickle_of_anything_but_tensors_by_name_is_refused(tmp_path: Path, content: Any) -> None:
    tiny.checkpoint(tmp_path)
    with pytest.raises(ModelError, match=REFUSED):
        read_weights(pickled(tmp_path, content))


@pytest.mark.parametrize("damage", [b"", b"no pickle at all", b"\x80\x02}q\x00(X\x01\x00\x00\x00\xff", b"\x80\x02u."])
def test_a_damaged_pickle_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(damage)
    with pytest.raises(ModelError, match=REFUSED):
        read_weights(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be loaded \(.*pytorch_model.bin.*\); save it again"):
        read_weights(tmp_path)


@pytest.mark.parametrize("load", [load_classifier, load_encoder])
def test_missing_weights_are_refused(tmp_path: Path, load: Any) -> None:
    tiny.checkpoint(tmp_path)
    lost = "bert.encoder.layer.1.output.dense.bias"
    edit_weights(tmp_path, lambda weights: {name: weights[name] for name in weights if name != lost})
    with pytest.raises(ModelError, match=rf"lacks 1 weights .*first: {lost}\).*use a complete checkpoint"):
        load(tmp_path, tiny.TASK)


def test_a_classifier_needs_its_pooler_and_bias(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    lost = ("bert.pooler.dense.bias", "classifier.bias")
    edit_weights(tmp_path, lambda weights: {name: weights[name] for name in weights if name not in lost})
    with pytest.raises(ModelError, match=r"lacks 2 weights that a BERT classifier needs \(first: bert.pooler"):
        load_classifier(tmp_path, tiny.TASK)


def test_layers_that_the_config_does_not_know_are_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"has bert.encoder.layer.1.* of shape .*, which is no part of the model in"):
        load_encoder(tmp_path, tiny.TASK)


def test_weights_of_another_shape_than_the_config_are_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, intermediate_size=48)
    with pytest.raises(ModelError, match=r"of shape \(64,\), which is no part of the model in its config.json; use"):
        load_classifier(tmp_path, tiny.TASK)


def test_one_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_weights(
        tmp_path, lambda weights: {name: tensor.clone() for name, tensor in (named_before(weights) | weights).items()}
    )
    with pytest.raises(ModelError, match=r"has bert.encoder.layer.0.*LayerNorm.*, which is no part of the model"):
        load_classifier(tmp_path, tiny.TASK)


def test_truncated_weights_are_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tiny.checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_classifier(tmp_path, tiny.TASK)


def test_other_model_types_are_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, model_type="distilbert")
    with pytest.raises(ModelError, match=r"is a 'distilbert' model; only 'bert' is supported"):
        load_classifier(tmp_path, tiny.TASK)


def test_a_config_without_the_number_of_heads_is_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, num_attention_heads=None)
    with pytest.raises(ModelError, match=r"config.json gives no num_attention_heads; use the one that the weights"):
        load_encoder(tmp_path, tiny.TASK)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "nope"}, r"gives hidden_act 'nope', which the library does not know"),
        ({"hidden_size": "32"}, r"gives hidden_size '32', which is no whole number above 0"),
        ({"num_attention_heads": 0}, r"gives num_attention_heads 0, which is no whole number above 0"),
        (
            {"num_attention_heads": 5},
            r"describes no model \(The hidden size \(32\) is not a multiple of .* heads \(5\)\)",
        ),
        ({"hidden_dropout_prob": "x"}, r"describes no model \(.*\)"),
        ({"id2label": {"a": "b"}}, r"cannot be used \(.*'a'\)"),
    ],
)
@pytest.mark.parametrize("load", [load_classifier, load_encoder])
def test_a_config_of_no_model_is_refused(tmp_path: Path, load: Any, changes: dict[str, Any], sentence: str) -> None:
    edit_config(tiny.checkpoint(tmp_path), **changes)
    with pytest.raises(ModelError, match=f"config.json {sentence}; use the one that the weights were saved with"):
        load(tmp_path, tiny.TASK)


def test_a_config_that_is_a_list_is_refused(tmp_path: Path) -> None:
    (tiny.checkpoint(tmp_path) / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config.json holds JSON but no table; use the one that the weights"):
        load_classifier(tmp_path, tiny.TASK)


def test_a_broken_config_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_encoder(tmp_path, tiny.TASK)


@pytest.mark.parametrize(
    ("made", "message"),
    [({"layers": 2}, "num_hidden_layers 2; .* asks for 1"), ({"hidden": 32}, "hidden_size 32; .* asks for 16")],
)
def test_a_general_student_of_another_shape_is_refused(tmp_path: Path, made: dict[str, int], message: str) -> None:
    shape: dict[str, Any] = {"layers": 1, "hidden": 16} | made
    folder = tiny.checkpoint(tmp_path / "general", tiny.bert(**shape))
    with pytest.raises(ModelError, match=message):
        general(folder)


def test_a_general_student_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "general", small())
    vocabulary = load_tokenizer(folder).get_vocab()
    swapped = vocabulary | {"good": vocabulary["bad"], "bad": vocabulary["good"]}
    with pytest.raises(ModelError, match=r"another vocabulary than the teacher; their token ids would not mean"):
        general(folder, vocabulary=swapped)


@pytest.mark.parametrize(
    "projections",
    [
        linears("fit_denses.0", "fit_denses.1", "fit_denses.2"),
        {"fit_dense.weight": torch.zeros(TEACHER_WIDTH, 15)},
        {"fit_denses.0.weight": torch.zeros(TEACHER_WIDTH, 16), "fit_denses.1.weight": torch.zeros(40, 16)},
    ],
)
def test_projections_that_do_not_fit_are_refused(tmp_path: Path, projections: Weights) -> None:
    folder = released(tmp_path / "tinybert", small(), projections=projections)
    message = r"projections of shapes \[.*\]; a student of 1 layers has 1 or 2, all \(teacher width, 16\)"
    with pytest.raises(ModelError, match=message):
        general(folder)
