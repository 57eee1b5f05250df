"""General students: what is learnt, what is saved, and that a task can start from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import objectives
from compressor.artifact import Artifact
from compressor.checkpoints import general_student, load_plain_encoder, load_tokenizer
from compressor.config import GeneralConfig, StudentConfig
from compressor.dataset import ENCODED
from compressor.errors import DataError, ModelError, SourceError
from compressor.losses import intermediate_loss
from compressor.models import student_shape
from compressor.objectives import Intermediate
from compressor.shapes import layer_map
from compressor.stages.general import general, mean_losses
from compressor.texts import packed
from compressor.world import World
from tests import tiny

WORLD = World(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained teacher in `teacher`, text in `text.txt`, and room for runs that share their packed text."""
    folder = tmp_path_factory.mktemp("general")
    tiny.checkpoint(folder / "teacher", tiny.lively(tiny.bert()))
    lines = "\n".join(text for text, _ in tiny.rows(400))
    (folder / "text.txt").write_text(lines, encoding="utf-8")
    return folder


def run(root: Path, name: str, student: StudentConfig | None = None, processes: int = 1, **changes: Any) -> Artifact:
    given: dict[str, Any] = {"source": str(root / "text.txt"), "block_tokens": 16, "precision": "fp32", "epochs": 3.0}
    config = GeneralConfig(**(given | {"learning_rate": 5e-3, "batch_size": 16, "precision": "fp32"} | changes))
    options: dict[str, Any] = {"base": str(root / "teacher"), "seed": 7, "key": name, "device": "cpu"}
    return general(config, student or tiny.student(), out=root / name, processes=processes, **options)


@pytest.fixture(scope="module")
def made(root: Path) -> Artifact:
    return run(root, "made")


def total(losses: dict[str, float]) -> float:
    return sum(losses.values())


def test_the_losses_fall_on_text_that_was_not_trained_on(made: Artifact) -> None:
    metrics = made.metrics
    assert set(metrics["at_start"]) == set(metrics["at_end"]) == {"embedding", "hidden", "attention"}
    assert total(metrics["at_end"]) < 0.8 * total(metrics["at_start"])


def test_the_manifest_says_what_was_learnt_from(root: Path, made: Artifact) -> None:
    metrics = made.metrics
    assert metrics["provenance"] == f"the text of {root / 'text.txt'}"
    assert (metrics["documents"], metrics["held_out_blocks"]) == (400, -(-metrics["blocks"] // 100))
    assert metrics["tokens"] + 399 == 14 * metrics["blocks"] + metrics["dropped_tokens"]
    assert metrics["parameters"] == sum(
        weights.numel() for weights in load_plain_encoder(made.path)[0].bert.parameters()
    )
    assert metrics["history"]["steps"] == 3 * ((metrics["blocks"] - metrics["held_out_blocks"]) // 16)
    assert metrics["teacher"]["missing"] == ["classifier.weight", "classifier.bias"]


def test_a_task_can_start_from_the_result(root: Path, made: Artifact) -> None:
    teacher, _ = load_plain_encoder(root / "teacher")
    tokenizer = load_tokenizer(made.path)
    shape = student_shape(tiny.student(), teacher.config)
    vocabulary = load_tokenizer(root / "teacher").get_vocab()
    student, projections, report = general_student(made.path, shape, vocabulary, tiny.TASK)
    assert not report.ignored
    assert set(report.missing) == {"classifier.weight", "classifier.bias"}
    config = GeneralConfig(source=str(root / "text.txt"), block_tokens=16, epochs=1.0, learning_rate=1e-3)
    module = Intermediate(student.eval(), teacher, layer_map(1, 2), config, projections)
    where: dict[str, Any] = {"what": "general.source", "cache": root / ENCODED, "world": WORLD}
    blocks = packed(config.source, "text", tokenizer, 16, **where)
    found = mean_losses(module, blocks.held_out, "fp32", WORLD)
    assert found == pytest.approx(made.metrics["at_end"], rel=1e-5)


def test_the_same_seed_gives_the_same_student(root: Path, made: Artifact) -> None:
    torch.manual_seed(1)
    again = run(root, "again")
    assert again.manifest["files"] == made.manifest["files"]


def test_copied_layers_of_the_teachers_width_have_nothing_to_learn(root: Path) -> None:
    student = tiny.student(hidden=32, intermediate=64, layer_map=(1,))
    copied = run(root, "copied", student, init="teacher-layers", epochs=0.1)
    assert total(copied.metrics["at_start"]) < 1e-6


def test_a_projected_start_is_nearer_than_a_random_one(root: Path, made: Artifact) -> None:
    projected = run(root, "projected", init="project", epochs=0.1)
    assert total(projected.metrics["at_start"]) < 0.9 * total(made.metrics["at_start"])


def test_the_recipes_teacher_comes_before_the_base(root: Path) -> None:
    with pytest.raises(SourceError, match="teacher is 'nowhere'"):
        run(root, "elsewhere", teacher="nowhere")


def test_blocks_that_the_teacher_cannot_read_are_refused(root: Path) -> None:
    with pytest.raises(ModelError, match=r"general.block_tokens is 65 and the teacher .* reads at most 64 tokens"):
        run(root, "long", block_tokens=65)


def test_too_little_text_is_refused(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a good film", encoding="utf-8")
    with pytest.raises(DataError, match="3 tokens fill 0 blocks of 16"):
        run(root, "short", source=str(file))


def test_an_interrupted_stage_goes_on_and_ends_the_same(
    root: Path, made: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"left": made.metrics["history"]["steps"]}  # fewer than all: losses are also taken before the first step

    def cut(*arguments: Any, **options: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return intermediate_loss(*arguments, **options)

    monkeypatch.setattr(objectives, "intermediate_loss", cut)
    with pytest.raises(KeyboardInterrupt):
        run(root, "cut")
    calls["left"] = 1000
    resumed = run(root, "cut")
    assert 1000 - calls["left"] < made.metrics["history"]["steps"]
    assert resumed.manifest["files"] == made.manifest["files"]


@pytest.mark.slow
def test_two_processes_come_to_the_student_of_one(root: Path, made: Artifact) -> None:
    both = run(root, "both", processes=2)
    assert both.metrics["history"]["steps"] == made.metrics["history"]["steps"]
    assert both.metrics["at_start"] == pytest.approx(made.metrics["at_start"], rel=1e-6)
    assert both.metrics["at_end"] == pytest.approx(made.metrics["at_end"], rel=1e-2)
