"""What a student is trained on: which weights take part, what the terms are, which teachers can be imitated.

Shape legend: B batch, S sequence, D teacher width, d student width, C outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from compressor.config import DistillConfig, Imitation
from compressor.errors import ModelError
from compressor.objectives import Intermediate, Prediction
from compressor.training import Tensors
from tests import tiny

MASK_BS = torch.arange(8) < torch.tensor([3, 8, 1, 5])[:, None]
SMALL = {"hidden": 16, "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def batch(*, size: int = 8) -> Tensors:
    """Four rows of 3, 8, 1 and 5 tokens, some with a second text, padded to `size`."""
    draw = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(5, 30, (4, 8), generator=draw) * MASK_BS
    segment_BS = (torch.arange(8) >= torch.tensor([2, 5, 9, 3])[:, None]) & MASK_BS
    ids_BS, segment_BS, mask_BS = (
        nn.functional.pad(part.long(), (0, size - 8)) for part in (ids_BS, segment_BS, MASK_BS)
    )
    return Tensors(ids_BS, segment_BS, mask_BS, label_B=torch.tensor([0, 1, 1, 0]), row_B=torch.tensor([5, 3, 9, 0]))


def imitation(**changes: Any) -> Imitation:
    heads = {"relation_heads": 4} if changes.get("attention") == "relations" else {}
    return Imitation(**({"epochs": 1.0, "learning_rate": 1e-3} | heads | changes))


def prediction(**changes: Any) -> DistillConfig:
    return tiny.distilling("prediction", **changes)


def small(*, layers: int = 2, seed: int = 1, **shape: Any) -> Any:
    return tiny.lively(tiny.bert(layers=layers, seed=seed, **(SMALL | shape)), seed=seed)


def large(*, layers: int = 4, **shape: Any) -> Any:
    return tiny.lively(tiny.bert(layers=layers, **shape))


def total(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum()


def without_gradient(module: nn.Module) -> list[str]:
    return [name for name, weights in module.named_parameters() if weights.requires_grad and weights.grad is None]


@pytest.mark.parametrize("layers", [(1, 3), (0, 1), (1, 2)])
@pytest.mark.parametrize("projection", ["per-layer", "shared"])
@pytest.mark.parametrize("attention", ["scores", "relations"])
@pytest.mark.parametrize("normalisation", ["tokens", "published"])
def test_every_weight_that_is_trained_gets_a_gradient(
    layers: tuple[int, ...], projection: str, attention: str, normalisation: str
) -> None:
    config = imitation(projection=projection, attention=attention, normalisation=normalisation)
    module = Intermediate(small(), large(), layers, config).train()
    total(module(batch())).backward()
    assert not without_gradient(module)
    assert all(weights.grad.isfinite().all() for weights in module.parameters() if weights.grad is not None)


def test_every_weight_of_a_classifier_gets_a_gradient_from_the_teachers_answers() -> None:
    module = Prediction(small(), np.zeros((10, 2), dtype=np.float32), prediction()).train()
    total(module(batch())).backward()
    assert not without_gradient(module)


def test_pooler_and_head_are_no_part_of_the_intermediate_objective() -> None:
    student = small()
    module = Intermediate(student, large(), (1, 3), imitation())
    trained = {id(weights) for weights in module.parameters()}
    inside, outside = (student.bert.embeddings, student.bert.encoder), (student.bert.pooler, student.classifier)
    assert {id(weights) for part in inside for weights in part.parameters()} <= trained
    assert not {id(weights) for part in outside for weights in part.parameters()} & trained


def test_the_teacher_is_no_part_of_the_module_and_stays_in_evaluation_mode() -> None:
    teacher = large(hidden_dropout_prob=0.5).train()
    module = Intermediate(small(), teacher, (1, 3), imitation()).train()
    assert not {id(weights) for weights in teacher.parameters()} & {id(weights) for weights in module.parameters()}
    assert not [name for name in module.state_dict() if "teacher" in name]
    first, second = module(batch()), module(batch())
    total(first).backward()
    assert torch.equal(total(first), total(second))  # no dropout in either model
    assert not any(part.training for part in teacher.modules())
    assert all(weights.grad is None for weights in teacher.parameters())


def test_layers_of_the_teacher_beyond_the_last_one_wanted_are_not_computed() -> None:
    teacher, seen = large(), list[int]()
    for number, layer in enumerate(teacher.bert.encoder.layer):
        layer.register_forward_hook(lambda *_, number=number: seen.append(number))
    Intermediate(small(), teacher, (0, 1), imitation())(batch())
    assert seen == [0, 1]


@pytest.mark.parametrize("attention", ["scores", "relations"])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(attention: str) -> None:
    twins = large(hidden_dropout_prob=0.0), large()
    start = [(torch.eye(32), torch.zeros(32))]
    module = Intermediate(*twins, (0, 1, 2, 3), imitation(attention=attention), start)
    assert all(term < 1e-8 for term in module(batch()).values())
    other = Intermediate(*twins, (1, 1, 2, 3), imitation(attention=attention), start)
    assert other(batch())["attention" if attention == "scores" else "relations"] > 1e-3


def published_loss(student: Any, teacher: Any, fit_dense: nn.Linear, given: Tensors, layers: tuple[int, ...]) -> Tensor:
    """The published intermediate loss, transcribed over the library's eager models: plain means of padded tensors."""
    mse = nn.MSELoss()
    inputs = {"input_ids": given.input_ids_BS, "token_type_ids": given.segment_BS, "attention_mask": given.mask_BS}
    hidden: dict[str, Any] = {}
    scores: dict[str, list[Tensor]] = {}
    for name, model in (("student", student), ("teacher", teacher)):
        model.set_attn_implementation("eager")
        hidden[name] = model(**inputs, output_hidden_states=True).hidden_states
        scores[name] = []
        for layer, states in zip(model.bert.encoder.layer, hidden[name], strict=False):
            query, key = (
                part(states).unflatten(2, (4, -1)).transpose(1, 2)
                for part in (layer.attention.self.query, layer.attention.self.key)
            )
            scored = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
            scored = scored + (1.0 - given.mask_BS[:, None, None, :].float()) * -10000.0
            scores[name].append(torch.where(scored <= -1e2, torch.zeros_like(scored), scored))
    loss = mse(fit_dense(hidden["student"][0]), hidden["teacher"][0])
    for number, layer in enumerate(layers):
        loss = loss + mse(fit_dense(hidden["student"][number + 1]), hidden["teacher"][layer + 1])
        loss = loss + mse(scores["student"][number], scores["teacher"][layer])
    return loss


def test_the_published_normalisation_gives_the_published_loss() -> None:
    student, teacher, given = small(), large(), batch(size=16)
    config = imitation(normalisation="published", projection="shared")
    module = Intermediate(student, teacher, (1, 3), config)
    projection: Any = module.projections[0]
    with torch.no_grad():
        projection.bias.normal_()
        found = total(module(given))
        assert_close(found, published_loss(student, teacher, projection, given, (1, 3)))


@pytest.mark.parametrize("attention", ["scores", "relations"])
def test_padding_leaves_the_terms_unchanged(attention: str) -> None:
    module = Intermediate(small(), large(), (1, 3), imitation(attention=attention))
    with torch.no_grad():
        assert_close(module(batch(size=16)), module(batch()))


def test_padding_changes_the_published_terms() -> None:
    module = Intermediate(small(), large(), (1, 3), imitation(normalisation="published"))
    with torch.no_grad():
        assert module(batch(size=16))["attention"] < 0.9 * module(batch())["attention"]


def test_segments_reach_both_models() -> None:
    given = batch()
    module = Intermediate(small(), large(), (1, 3), imitation())
    models: tuple[Any, ...] = (module.student, module._teacher[0])
    with torch.no_grad():
        before = module(given)
        for model in models:
            kept = model.embeddings.token_type_embeddings.weight.clone()
            model.embeddings.token_type_embeddings.weight[1].normal_()
            assert not torch.equal(module(given)["hidden"], before["hidden"])
            model.embeddings.token_type_embeddings.weight.copy_(kept)


def test_pretrained_encoders_without_a_head_can_be_imitated() -> None:
    student, teacher = small(), large()
    torch.manual_seed(0)
    whole = Intermediate(student, teacher, (1, 3), imitation())
    torch.manual_seed(0)
    bare = Intermediate(student.bert, teacher.bert, (1, 3), imitation())
    with torch.no_grad():
        assert torch.equal(total(whole(batch())), total(bare(batch())))


@pytest.mark.parametrize("attention", ["scores", "relations"])
def test_terms_are_finite_in_bfloat16(attention: str) -> None:
    module = Intermediate(small(), large(), (1, 3), imitation(attention=attention)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = module(batch())
    total(terms).backward()
    assert all(term.dtype == torch.float32 and term.isfinite() for term in terms.values())
    assert all(weights.grad is not None and weights.grad.isfinite().all() for weights in module.parameters())
    exact = module(batch())
    assert all(abs(terms[name] - exact[name]) < 0.05 * exact[name] for name in terms)


@pytest.mark.parametrize(("projection", "count"), [("per-layer", 3), ("shared", 1)])
def test_projections_start_at_the_one_that_is_given(projection: str, count: int) -> None:
    weight_Dd, bias_D = torch.randn(32, 16), torch.randn(32)
    module = Intermediate(small(), large(), (1, 3), imitation(projection=projection), [(weight_Dd, bias_D)])
    parts: Any = module.projections
    assert len(parts) == count
    for part in parts:
        assert torch.equal(part.weight, weight_Dd)
        assert torch.equal(part.bias, bias_D)
    assert len({part.weight.data_ptr() for part in parts} | {weight_Dd.data_ptr()}) == count + 1


def test_projections_of_a_checkpoint_start_at_their_own() -> None:
    start = [(torch.randn(32, 16), torch.randn(32)) for _ in range(3)]
    module = Intermediate(small(), large(), (1, 3), imitation(), start)
    parts: Any = module.projections
    for part, (weight_Dd, bias_D) in zip(parts, start, strict=True):
        assert torch.equal(part.weight, weight_Dd)
        assert torch.equal(part.bias, bias_D)


def test_projections_from_nothing_have_biases_of_0() -> None:
    parts: Any = Intermediate(small(), large(), (1, 3), imitation()).projections
    assert all(part.weight.any() and not part.bias.any() for part in parts)


def test_projections_of_each_layer_cannot_be_shared() -> None:
    start = [(torch.randn(32, 16), torch.randn(32)) for _ in range(3)]
    with pytest.raises(ModelError, match=r'comes with 3 projections and projection is "shared"; set it to "per-layer"'):
        Intermediate(small(), large(), (1, 3), imitation(projection="shared"), start)


def test_other_head_counts_are_refused_for_scores() -> None:
    with pytest.raises(ModelError, match=r'2 attention heads and the teacher 4; .* set attention = "relations", or'):
        Intermediate(small(heads=2), large(), (1, 3), imitation())


def test_other_head_counts_can_be_imitated_by_relations() -> None:
    module = Intermediate(small(heads=2), large(), (1, 3), imitation(attention="relations")).train()
    terms = module(batch())
    total(terms).backward()
    assert set(terms) == {"embedding", "hidden", "relations"}
    assert terms["relations"] > 0
    assert not without_gradient(module)


@pytest.mark.parametrize("heads", [12, 32])
def test_relation_heads_that_divide_no_width_are_refused(heads: int) -> None:
    sentence = rf"relation_heads is {heads}, which does not divide .* 16 and 32; choose a divisor of 16"
    with pytest.raises(ModelError, match=sentence):
        Intermediate(small(), large(), (1, 3), imitation(attention="relations", relation_heads=heads))


@pytest.mark.parametrize(("normalisation", "divisor"), [("tokens", 1), ("published", 2)])
def test_targets_are_those_of_the_rows_of_the_batch(tmp_path: Path, normalisation: str, divisor: int) -> None:
    targets_NC = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)
    np.save(tmp_path / "logits.npy", targets_NC)
    stored_NC = np.load(tmp_path / "logits.npy", mmap_mode="r")
    student, given = small(), batch()
    module = Prediction(student, stored_NC, prediction(temperature=2.0, normalisation=normalisation))
    logits_BC = student(
        input_ids=given.input_ids_BS, token_type_ids=given.segment_BS, attention_mask=given.mask_BS
    ).logits
    wanted_BC = torch.from_numpy(targets_NC)[[5, 3, 9, 0]]
    expected = -((wanted_BC / 2).softmax(-1) * (logits_BC / 2).log_softmax(-1)).sum(-1).mean() / divisor
    assert_close(module(given), {"soft_label": expected})


def test_a_regression_learns_the_teachers_scores() -> None:
    student, given = small(task=tiny.pair_task(labels=())), batch()
    targets_N1 = np.linspace(0.0, 5.0, 10, dtype=np.float32)[:, None]
    module = Prediction(student, targets_N1, prediction())
    scores_B1 = student(
        input_ids=given.input_ids_BS, token_type_ids=given.segment_BS, attention_mask=given.mask_BS
    ).logits
    expected = (scores_B1 - torch.from_numpy(targets_N1)[[5, 3, 9, 0]]).square().mean()
    assert_close(module(given), {"score": expected})


def test_only_the_rows_of_a_batch_are_read(tmp_path: Path) -> None:
    """A hole of 40 GB on the disk stands for the answers to more rows than memory holds."""
    stored_NC = np.lib.format.open_memmap(tmp_path / "logits.npy", mode="w+", dtype=np.float32, shape=(5 * 10**9, 2))
    stored_NC[[5, 3, 9, 0]] = 1.0
    stored_NC = np.load(tmp_path / "logits.npy", mmap_mode="r")
    assert Prediction(small(), stored_NC, prediction())(batch())["soft_label"].isfinite()
