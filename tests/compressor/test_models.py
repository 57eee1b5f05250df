"""Loading classifiers, new students, and what one forward pass shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from compressor.errors import ModelError, SourceError
from compressor.models import (
    Observed,
    check_vocabulary,
    copied_student,
    general_student,
    layer_map,
    load_classifier,
    load_encoder,
    load_tokenizer,
    random_student,
    student_shape,
)
from tests import tiny

IDS = torch.tensor([[2, 5, 17, 3], [2, 11, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_observed_scores_are_the_scaled_products_of_query_and_key() -> None:
    model = tiny.lively(tiny.bert())
    seen = Observed(model, [1])(IDS, MASK)
    attention = model.bert.encoder.layer[1].attention.self
    query, key = (part(seen.hidden[1]) for part in (attention.query, attention.key))
    by_hand = torch.stack(
        [query[..., first : first + 8] @ key[..., first : first + 8].mT / 8**0.5 for first in (0, 8, 16, 24)], dim=1
    )
    assert_close(seen.scores[1], by_hand)


def test_observed_scores_are_what_eager_attention_gives_before_softmax() -> None:
    model = tiny.lively(tiny.bert())
    seen = Observed(model, [0, 1])(IDS, MASK)
    model.set_attn_implementation("eager")
    attentions = model(input_ids=IDS, attention_mask=MASK, output_attentions=True).attentions
    hidden_keys = (MASK == 0)[:, None, None, :]
    for layer in (0, 1):
        scores = seen.scores[layer].masked_fill(hidden_keys, -torch.inf)
        assert_close(scores.softmax(dim=-1), attentions[layer])


def test_only_the_layers_asked_for_are_observed() -> None:
    assert list(Observed(tiny.bert(layers=3), [2])(IDS, MASK).scores) == [2]


def test_observing_changes_no_logits() -> None:
    model = tiny.lively(tiny.bert())
    before = logits(model)
    seen = Observed(model, [0, 1])(IDS, MASK)
    assert torch.equal(seen.logits_BC, before)


def test_hidden_states_start_with_the_embedding_output() -> None:
    model = tiny.bert()
    seen = Observed(model, [])(IDS, MASK)
    assert len(seen.hidden) == 3
    assert_close(seen.hidden[0], model.bert.embeddings(IDS))


@pytest.mark.parametrize(
    ("student", "teacher", "layers"),
    [(4, 12, (2, 5, 8, 11)), (6, 12, (1, 3, 5, 7, 9, 11)), (4, 6, (1, 2, 4, 5)), (1, 6, (5,)), (3, 3, (0, 1, 2))],
)
def test_layer_map_takes_the_last_layer_of_equal_parts(student: int, teacher: int, layers: tuple[int, ...]) -> None:
    assert layer_map(student, teacher) == layers


@pytest.mark.parametrize("teacher", range(1, 25))
def test_layer_map_is_rising_and_ends_at_the_last_layer(teacher: int) -> None:
    for student in range(1, teacher + 1):
        found = layer_map(student, teacher)
        assert len(set(found)) == student
        assert list(found) == sorted(found)
        assert found[-1] == teacher - 1


def test_layer_map_refuses_a_deeper_student() -> None:
    with pytest.raises(ModelError, match=r"student.layers is 4 and the teacher has 3; give the student at most"):
        layer_map(4, 3)


def test_student_shape_keeps_vocabulary_and_labels_and_drops_dropout() -> None:
    teacher = tiny.bert()
    shape = student_shape(tiny.student(), teacher.config)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size) == (1, 16, 32)
    assert (shape.vocab_size, shape.id2label) == (teacher.config.vocab_size, teacher.config.id2label)
    assert (shape.hidden_dropout_prob, shape.attention_probs_dropout_prob) == (0, 0)


def test_student_shape_leaves_the_teacher_as_it_is() -> None:
    teacher = tiny.bert()
    student_shape(tiny.student(), teacher.config)
    assert teacher.config.hidden_size == 32
    assert teacher.config.hidden_dropout_prob == 0.1


def test_random_student_is_fixed_by_its_seed() -> None:
    shape = student_shape(tiny.student(), tiny.bert().config)
    first, again, other = (random_student(shape, seed).bert.embeddings.word_embeddings.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_copied_student_of_full_depth_answers_like_the_teacher() -> None:
    teacher = tiny.lively(tiny.bert())
    same = tiny.student(layers=2, hidden=32, intermediate=64)
    student = copied_student(student_shape(same, teacher.config), teacher).eval()
    assert torch.equal(logits(student), logits(teacher))


def test_copied_student_holds_the_mapped_layers() -> None:
    teacher = tiny.lively(tiny.bert(layers=4))
    shape = student_shape(tiny.student(layers=2, hidden=32, intermediate=64), teacher.config)
    student = copied_student(shape, teacher)
    for mine, theirs in ((0, 1), (1, 3)):
        expected = teacher.bert.encoder.layer[theirs].state_dict()
        for name, weights in student.bert.encoder.layer[mine].state_dict().items():
            assert torch.equal(weights, expected[name])


def test_copied_student_shares_no_weights_with_the_teacher() -> None:
    teacher = tiny.bert()
    shape = student_shape(tiny.student(layers=2, hidden=32, intermediate=64), teacher.config)
    student = copied_student(shape, teacher)
    with torch.no_grad():
        student.classifier.weight.zero_()
    assert teacher.classifier.weight.any()


def test_copied_student_of_another_width_is_refused() -> None:
    teacher = tiny.bert()
    with pytest.raises(ModelError, match=r"needs the teacher's hidden_size: 32, not 16; use init = \"project\""):
        copied_student(student_shape(tiny.student(), teacher.config), teacher)


def general(folder: Path, **shape: Any) -> Path:
    return tiny.checkpoint(folder, tiny.bert(**({"layers": 1, "hidden": 16} | shape)))


def test_general_student_has_no_dropout(tmp_path: Path) -> None:
    folder = general(tmp_path)
    shape, vocabulary = student_shape(tiny.student(), tiny.bert().config), load_tokenizer(folder).get_vocab()
    student = general_student(folder, shape, vocabulary, tiny.TASK)
    assert {module.p for module in student.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


@pytest.mark.parametrize(
    ("made", "message"),
    [({"layers": 2}, "num_hidden_layers 2; .* asks for 1"), ({"hidden": 32}, "hidden_size 32; .* asks for 16")],
)
def test_general_student_of_another_shape_is_refused(tmp_path: Path, made: dict[str, int], message: str) -> None:
    folder = general(tmp_path, **made)
    shape = student_shape(tiny.student(), tiny.bert().config)
    with pytest.raises(ModelError, match=message):
        general_student(folder, shape, load_tokenizer(folder).get_vocab(), tiny.TASK)


def test_general_student_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = general(tmp_path)
    shape, vocabulary = student_shape(tiny.student(), tiny.bert().config), load_tokenizer(folder).get_vocab()
    swapped = vocabulary | {"good": vocabulary["bad"], "bad": vocabulary["good"]}
    with pytest.raises(ModelError, match=r"another vocabulary than the teacher; their token ids would not mean"):
        general_student(folder, shape, swapped, tiny.TASK)


def test_labels_in_the_other_order_give_the_same_answer_by_name(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    theirs = logits(model)
    names = {"0": "POSITIVE", "1": "NEGATIVE"}
    tiny.checkpoint(tmp_path, model)
    edit_config(tmp_path, id2label=names, label2id={name: int(index) for index, name in names.items()})
    loaded = load_classifier(tmp_path, tiny.TASK).eval()
    assert loaded.config.id2label == {0: "negative", 1: "positive"}
    assert_close(logits(loaded), theirs.flip(-1))


def test_saved_and_loaded_classifier_keeps_its_order(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    loaded = load_classifier(tiny.checkpoint(tmp_path, model), tiny.TASK).eval()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "names", [{"0": "LABEL_0", "1": "LABEL_1"}, {"0": "negative", "1": "neutral", "2": "positive"}]
)
def test_other_labels_are_refused(tmp_path: Path, names: dict[str, str]) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, id2label=names)
    with pytest.raises(ModelError, match=r"has labels \[.*\]; sst2 has \['negative', 'positive'\]; name its classes"):
        load_classifier(tmp_path, tiny.TASK)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    file = tiny.checkpoint(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights.pop("bert.encoder.layer.1.output.dense.bias")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .*layer.1.output.dense.bias.*use a complete checkpoint"):
        load_classifier(tmp_path, tiny.TASK)


def test_an_encoder_may_lack_its_head_alone(tmp_path: Path) -> None:
    tiny.bert().bert.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, tiny.TASK)
    assert encoder.config.num_labels == 2
    assert encoder.config.label2id == {"negative": 0, "positive": 1}
    edit_config(tmp_path, id2label={"0": "negative", "1": "positive"})
    with pytest.raises(ModelError, match=r"lacks 2 weights .*classifier"):
        load_classifier(tmp_path, tiny.TASK)


def test_other_model_types_are_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, model_type="distilbert")
    with pytest.raises(ModelError, match=r"is a 'distilbert' model; only 'bert' is supported"):
        load_classifier(tmp_path, tiny.TASK)


def test_truncated_weights_are_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tiny.checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_classifier(tmp_path, tiny.TASK)


def test_a_broken_config_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_encoder(tmp_path, tiny.TASK)


def test_weights_of_another_shape_than_the_config_are_refused_in_one_sentence(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    edit_config(tmp_path, intermediate_size=48)
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_classifier(tmp_path, tiny.TASK)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    model = tiny.bert()
    tiny.checkpoint(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded .*; save it again"):
        load_classifier(tmp_path, tiny.TASK)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    model = tiny.bert(vocab_size=len(tiny.WORDS) - 1)
    message = rf"has {len(tiny.WORDS)} tokens and the model {len(tiny.WORDS) - 1} word embeddings"
    with pytest.raises(ModelError, match=message):
        check_vocabulary(model, tiny.tokenizer(tmp_path), tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.bert().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"holds no tokenizer that can be loaded; save it with save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
