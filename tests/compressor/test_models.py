"""New students, and what one forward pass shows."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from compressor.errors import ModelError
from compressor.losses import attention_scores
from compressor.models import Observed, copied_student, random_student, student_shape
from tests import tiny

IDS = torch.tensor([[2, 5, 17, 3], [2, 11, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
SEGMENT = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return found


def hidden_states(model: Any, **inputs: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_observed_states_are_the_model_s_own(kernel: str) -> None:
    model = tiny.lively(tiny.bert())
    model.set_attn_implementation(kernel)
    expected = hidden_states(model, input_ids=IDS, attention_mask=MASK, token_type_ids=SEGMENT)
    with torch.no_grad():
        seen = Observed(model, [])(IDS, MASK, SEGMENT)
    assert len(seen.hidden) == 3
    for mine, theirs in zip(seen.hidden, expected, strict=True):
        assert_close(mine, theirs)


def test_without_segments_every_token_is_of_the_first_text() -> None:
    model = tiny.lively(tiny.bert())
    encoder = Observed(model, [])
    plain, first, second = encoder(IDS, MASK), encoder(IDS, MASK, torch.zeros_like(IDS)), encoder(IDS, MASK, SEGMENT)
    assert torch.equal(plain.hidden[-1], first.hidden[-1])
    assert not torch.equal(plain.hidden[-1], second.hidden[-1])


def test_what_goes_into_the_attention_is_what_its_linears_give() -> None:
    model = tiny.lively(tiny.bert())
    seen = Observed(model, [1], ("query", "key", "value"))(IDS, MASK)
    attention = model.bert.encoder.layer[1].attention.self
    for found, linear in zip(seen.attention[1], (attention.query, attention.key, attention.value), strict=True):
        assert_close(found, linear(seen.hidden[1]))


def test_scores_of_what_was_observed_are_what_eager_attention_gives_before_softmax() -> None:
    model = tiny.lively(tiny.bert())
    seen = Observed(model, [0, 1])(IDS, MASK)
    model.set_attn_implementation("eager")
    attentions = model(input_ids=IDS, attention_mask=MASK, output_attentions=True).attentions
    hidden_keys = (MASK == 0)[:, None, None, :]
    for layer in (0, 1):
        query, key = seen.attention[layer]
        scores = attention_scores(query, key, heads=4).masked_fill(hidden_keys, -torch.inf)
        assert_close(scores.softmax(dim=-1), attentions[layer])


def test_only_the_layers_asked_for_are_observed() -> None:
    assert list(Observed(tiny.bert(layers=3), [2])(IDS, MASK).attention) == [2]


def test_observing_leaves_nothing_behind() -> None:
    model = tiny.bert()
    encoder = Observed(model, [0, 1])
    seen = weakref.ref(encoder(IDS, MASK).attention[0][0])
    assert seen() is None
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="size"):
        encoder(IDS, MASK[:, :3])
    assert not any(module._forward_hooks for module in model.modules())


def test_pooler_head_and_deeper_layers_are_no_part_of_what_is_observed() -> None:
    model = tiny.bert(layers=3)
    encoder: Any = Observed(model, [0], depth=2)
    names = {name for name, _ in encoder.named_parameters()}
    assert not [name for name in names if "pooler" in name or "classifier" in name or name.startswith("layers.2.")]
    assert "layers.1.output.dense.weight" in names
    assert len(encoder(IDS, MASK).hidden) == 3
    assert len(model.bert.encoder.layer) == 3
    assert encoder.layers[1].output.dense.weight is model.bert.encoder.layer[1].output.dense.weight


def test_a_bare_encoder_can_be_observed() -> None:
    model = tiny.lively(tiny.bert())
    assert torch.equal(Observed(model.bert, [])(IDS, MASK).hidden[-1], Observed(model, [])(IDS, MASK).hidden[-1])


def test_student_shape_keeps_vocabulary_and_labels_and_drops_dropout() -> None:
    teacher = tiny.bert(classifier_dropout=0.3)
    shape = student_shape(tiny.student(), teacher.config)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size) == (1, 16, 32)
    assert (shape.vocab_size, shape.id2label) == (teacher.config.vocab_size, teacher.config.id2label)
    assert (shape.hidden_dropout_prob, shape.attention_probs_dropout_prob, shape.classifier_dropout) == (0, 0, None)


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
    student = copied_student(student_shape(same, teacher.config), teacher, (0, 1)).eval()
    assert torch.equal(logits(student), logits(teacher))


def test_copied_student_holds_the_layers_asked_for() -> None:
    teacher = tiny.lively(tiny.bert(layers=4))
    shape = student_shape(tiny.student(layers=2, hidden=32, intermediate=64), teacher.config)
    student = copied_student(shape, teacher, (0, 3))
    for mine, theirs in ((0, 0), (1, 3)):
        expected = teacher.bert.encoder.layer[theirs].state_dict()
        for name, weights in student.bert.encoder.layer[mine].state_dict().items():
            assert torch.equal(weights, expected[name])


def test_copied_student_shares_no_weights_with_the_teacher() -> None:
    teacher = tiny.bert()
    shape = student_shape(tiny.student(layers=2, hidden=32, intermediate=64), teacher.config)
    student = copied_student(shape, teacher, (0, 1))
    with torch.no_grad():
        student.classifier.weight.zero_()
    assert teacher.classifier.weight.any()


def test_copied_student_of_another_width_is_refused() -> None:
    teacher = tiny.bert()
    with pytest.raises(ModelError, match=r"needs the teacher's hidden_size: 32, not 16; use init = \"project\""):
        copied_student(student_shape(tiny.student(), teacher.config), teacher, (1,))
