"""Students: what is trained, what is not, and that they come near their teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor import training
from compressor.artifact import Artifact
from compressor.config import DistillConfig, StudentConfig
from compressor.dataset import Encoded, encode
from compressor.models import load_classifier, load_tokenizer
from compressor.stages import distill as stage
from compressor.stages.distill import Intermediate, Prediction, distill, new_student, teacher_logits
from compressor.training import Tensors, fit
from compressor.world import World
from tests import tiny
from tests.conftest import Line

WORLD = World(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def teacher(line: Line) -> Artifact:
    return Artifact.open(line.run / "3-finetune", kind="teacher")


@pytest.fixture(scope="module")
def corpus(line: Line) -> Artifact:
    return Artifact.open(line.run / "1-corpus", kind="examples")


@pytest.fixture(scope="module")
def rows(corpus: Artifact, teacher: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    tokenizer = load_tokenizer(teacher.path)
    return encode(corpus, "train", tokenizer, tiny.MAX_TOKENS, cache=tmp_path_factory.mktemp("encoded"))


@pytest.fixture
def model(teacher: Artifact) -> Any:
    """The teacher as the stage holds it."""
    return load_classifier(teacher.path, tiny.TASK).eval().requires_grad_(False)


def run(
    config: DistillConfig,
    student: StudentConfig | Artifact,
    teacher: Artifact,
    corpus: Artifact,
    out: Path,
    **more: Any,
) -> Artifact:
    options: dict[str, Any] = {"max_tokens": tiny.MAX_TOKENS, "seed": 7, "key": out.name, "device": "cpu"}
    return distill(
        config, student, tiny.TASK, teacher=teacher, examples=corpus, corpus=corpus, out=out, **(options | more)
    )


def batch(rows: Encoded) -> Tensors:
    return Tensors.of(rows.batch(np.arange(16)), WORLD.device)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: weights.detach().clone() for name, weights in model.state_dict().items()}


def changed(model: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weights in model.state_dict().items() if not torch.equal(weights, before[name])}


def test_the_teacher_is_no_part_of_the_trained_module(model: Any) -> None:
    module = Intermediate(tiny.bert(layers=1, hidden=16), model, None)
    assert id(model) not in {id(part) for part in module.modules()}
    weights = {id(parameter) for parameter in model.parameters()}
    assert not weights & {id(parameter) for parameter in module.parameters()}
    assert not [name for name in module.state_dict() if "teacher" in name]


def test_the_teacher_stays_in_evaluation_mode_and_gets_no_gradient(model: Any, rows: Encoded) -> None:
    module = Intermediate(tiny.bert(layers=1, hidden=16), model, None).train()
    torch.stack(list(module(batch(rows)).values())).sum().backward()
    assert not any(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_trained_parameter_gets_a_gradient(model: Any, rows: Encoded) -> None:
    module = Intermediate(tiny.bert(layers=1, hidden=16), model, None).train()
    torch.stack(list(module(batch(rows)).values())).sum().backward()
    without = [name for name, weights in module.named_parameters() if weights.requires_grad and weights.grad is None]
    assert not without


def test_the_intermediate_stage_leaves_the_head_alone(model: Any, rows: Encoded, tmp_path: Path) -> None:
    student = tiny.bert(layers=1, hidden=16)
    before = snapshot(student)
    module = Intermediate(student, model, None)
    fit(module, rows, tiny.distilling("intermediate", epochs=0.5), world=WORLD, seed=7, folder=tmp_path)
    names = changed(student, before)
    assert not [name for name in names if name.startswith(("classifier", "bert.pooler"))]
    assert "bert.encoder.layer.0.attention.self.query.weight" in names


def test_the_prediction_stage_trains_the_head(model: Any, rows: Encoded, tmp_path: Path) -> None:
    student = tiny.bert(layers=1, hidden=16)
    before = snapshot(student)
    logits_NC = torch.from_numpy(teacher_logits(model, rows, WORLD, tmp_path))
    module = Prediction(student, logits_NC, 1.0)
    fit(module, rows, tiny.distilling(epochs=0.5), world=WORLD, seed=7, folder=tmp_path)
    assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight"} <= changed(student, before)


def test_a_student_that_is_the_teacher_has_nothing_to_learn(model: Any, rows: Encoded, teacher: Artifact) -> None:
    twin = load_classifier(teacher.path, tiny.TASK).eval()
    with torch.no_grad():
        terms = Intermediate(twin, model, torch.eye(32))(batch(rows))
    assert set(terms) == {"embedding", "hidden", "attention"}
    assert all(float(term) < 1e-8 for term in terms.values())


def test_projections_start_at_the_basis_of_the_student(model: Any) -> None:
    basis_Dd = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    module = Intermediate(tiny.bert(layers=2, hidden=16), model, basis_Dd)
    assert len(module.projections) == 3
    assert all(torch.equal(part.weight, basis_Dd) for part in module.projections)


def test_cached_logits_are_the_teachers(
    model: Any, rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_precision", lambda world: torch.float32)
    found = teacher_logits(model, rows, WORLD, tmp_path)
    with torch.no_grad():
        for row in range(0, len(rows), 17):
            alone = Tensors.of(rows.batch(np.array([row])), WORLD.device)
            expected = model(input_ids=alone.input_ids_BS, attention_mask=alone.mask_BS).logits
            np.testing.assert_allclose(found[row], expected[0].numpy(), atol=1e-5)


def test_cached_logits_are_worked_out_once(model: Any, rows: Encoded, tmp_path: Path) -> None:
    found = teacher_logits(model, rows, WORLD, tmp_path)
    again = teacher_logits(None, rows, WORLD, tmp_path)  # type: ignore[arg-type]
    assert np.array_equal(found, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher_logits.npy"]


def test_unfinished_logits_are_worked_out_anew(model: Any, rows: Encoded, tmp_path: Path) -> None:
    (tmp_path / "teacher_logits.partial.npy").write_bytes(b"cut")
    assert np.isfinite(teacher_logits(model, rows, WORLD, tmp_path)).all()


def test_targets_are_those_of_the_rows_of_the_batch(rows: Encoded) -> None:
    targets_NC = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(0))
    student = tiny.bert(layers=1, hidden=16)
    some = Tensors.of(rows.batch(np.array([5, 3, 9])), WORLD.device)
    loss = Prediction(student, targets_NC, 1.0)(some)["soft_label"]
    logits_BC = student(input_ids=some.input_ids_BS, attention_mask=some.mask_BS).logits
    expected = -(targets_NC[[5, 3, 9]].softmax(-1) * logits_BC.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, expected)


def test_losses_of_the_intermediate_stage_fall(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    config = tiny.distilling("intermediate", epochs=4.0)
    made = run(config, tiny.student(init="random"), teacher, corpus, tmp_path / "student")
    first, *_, last = (entry["losses"] for entry in made.metrics["history"]["epochs"])
    assert all(last[name] < first[name] for name in ("embedding", "hidden", "attention"))


def test_a_student_comes_near_its_teacher(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    first = run(tiny.distilling("intermediate"), tiny.student(layers=2, hidden=24), teacher, corpus, tmp_path / "1")
    config = tiny.distilling(epochs=6.0, learning_rate=5e-3)
    made = run(config, first, teacher, corpus, tmp_path / "2")
    assert made.metrics["test"]["accuracy"] > teacher.metrics["test"]["accuracy"] - 0.1
    assert made.manifest["parents"]["student"]["content"] == first.content
    assert "at_start" in first.metrics
    assert "at_start" not in made.metrics


@pytest.mark.parametrize("init", ["random", "project"])
def test_the_same_seed_gives_the_same_student(teacher: Artifact, corpus: Artifact, tmp_path: Path, init: str) -> None:
    found = []
    for number in (1, 2):
        torch.manual_seed(number)
        shape = tiny.student(init=init, intermediate=80)
        made = run(tiny.distilling("intermediate", epochs=0.2), shape, teacher, corpus, tmp_path / str(number))
        found.append(made.manifest["files"]["model.safetensors"]["sha256"])
    assert found[0] == found[1]


def test_a_general_student_gets_the_same_fresh_parts_for_the_same_seed(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    general = tmp_path / "general"
    tiny.bert(layers=1, hidden=16, intermediate_size=32).bert.save_pretrained(general)
    load_tokenizer(teacher.path).save_pretrained(general)
    found = []
    for number in (1, 2):
        torch.manual_seed(number)
        shape = tiny.student(init=str(general))
        made = run(tiny.distilling("intermediate", epochs=0.2), shape, teacher, corpus, tmp_path / str(number))
        found.append(made.manifest["files"]["model.safetensors"]["sha256"])
    assert found[0] == found[1]


def test_copied_layers_start_from_the_teachers_width(model: Any, rows: Encoded, teacher: Artifact) -> None:
    shape = tiny.student(hidden=32, intermediate=64, init="teacher-layers")
    _, basis_Dd = new_student(shape, model, load_tokenizer(teacher.path), rows, tiny.TASK, 7)
    assert basis_Dd is not None
    assert torch.equal(basis_Dd, torch.eye(32))


def test_a_projected_student_comes_with_its_basis(model: Any, rows: Encoded, teacher: Artifact) -> None:
    _, basis_Dd = new_student(tiny.student(), model, load_tokenizer(teacher.path), rows, tiny.TASK, 7)
    assert basis_Dd is not None
    assert basis_Dd.shape == (32, 16)


def test_the_student_is_saved_with_the_teachers_tokenizer(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    made = run(tiny.distilling("intermediate", epochs=0.1), tiny.student(), teacher, corpus, tmp_path / "student")
    assert load_tokenizer(made.path).get_vocab() == load_tokenizer(teacher.path).get_vocab()
    assert load_classifier(made.path, tiny.TASK).config.hidden_size == 16


def test_an_interrupted_stage_goes_on_and_ends_the_same(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.distilling(epochs=2.0)
    whole = run(config, tiny.student(), teacher, corpus, tmp_path / "whole")
    calls = {"left": 20}
    loss = stage.soft_cross_entropy

    def cut(*arguments: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return loss(*arguments)

    monkeypatch.setattr(stage, "soft_cross_entropy", cut)
    with pytest.raises(KeyboardInterrupt):
        run(config, tiny.student(), teacher, corpus, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    calls["left"] = 1000
    resumed = run(config, tiny.student(), teacher, corpus, tmp_path / "cut")
    assert 1000 - calls["left"] == 24 - 18  # a checkpoint comes with each validation, four an epoch of 12 steps
    name = "model.safetensors"
    assert resumed.manifest["files"][name]["sha256"] == whole.manifest["files"][name]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["intermediate", "prediction"])
def test_two_processes_distill(teacher: Artifact, corpus: Artifact, tmp_path: Path, objective: str) -> None:
    shape = tiny.student(layers=2, hidden=24)
    config = tiny.distilling(objective, epochs=4.0, learning_rate=5e-3)
    made = run(config, shape, teacher, corpus, tmp_path / "student", processes=2)
    assert made.metrics["history"]["steps"] == 48
    if objective == "prediction":
        assert made.metrics["test"]["accuracy"] > 0.8
