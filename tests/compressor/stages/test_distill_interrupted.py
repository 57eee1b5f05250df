"""Distillation that is interrupted or killed, and by two processes: the same students."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import objectives, training
from compressor.artifact import Artifact
from compressor.checkpoints import PROJECTIONS_FILE
from compressor.losses import soft_cross_entropy
from compressor.objectives import Intermediate
from compressor.stages import distill as stage
from compressor.training import fit
from compressor.world import World, launch
from tests import tiny
from tests.compressor.stages.test_distill import corpus, run, teacher, weights_hash
from tests.processes import Killed, in_new_process

__all__ = ["corpus", "teacher"]  # fixtures


def test_an_interrupted_stage_goes_on_and_ends_the_same(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.distilling(epochs=2.0)
    whole = run(config, tiny.student(), teacher, corpus, tmp_path / "whole")
    calls = {"left": 20}

    def cut(*arguments: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return soft_cross_entropy(*arguments)

    monkeypatch.setattr(objectives, "soft_cross_entropy", cut)
    with pytest.raises(KeyboardInterrupt):
        run(config, tiny.student(), teacher, corpus, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    calls["left"] = 1000
    resumed = run(config, tiny.student(), teacher, corpus, tmp_path / "cut")
    assert 1000 - calls["left"] == 24 - 18  # a checkpoint comes with each validation, four an epoch of 12 steps
    assert weights_hash(resumed) == weights_hash(whole)


def distill_and_be_killed(folder: Path) -> None:
    """Distill whole, and killed after each of three counts of the 30 steps, after those that were kept."""
    patch = pytest.MonkeyPatch()  # in this process, which ends with the work
    patch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    corpus = tiny.examples(folder / "corpus", train=96)
    teacher = tiny.saved(folder / "teacher", "teacher", tiny.lively(tiny.bert()))
    config = tiny.distilling("intermediate", epochs=5.0, precision="fp32")

    def distilled(name: str) -> None:
        made = run(config, tiny.student(), teacher, corpus, folder / name / "student")
        assert made.metrics["history"]["steps"] == 30

    killed, forward = Killed(), Intermediate.forward
    killed.complete(lambda: distilled("whole"))

    def telling(self: Intermediate, batch: Any) -> Any:
        killed.tell()
        return forward(self, batch)

    patch.setattr(Intermediate, "forward", telling)
    for steps in (2, 14, 9):
        child = killed.fork(lambda: distilled("cut"))
        killed.hear(steps)
        killed.kill(child)
        assert not (folder / "cut" / "student").exists()
    assert 0 < killed.complete(lambda: distilled("cut")) < 12, "it did not go on from a checkpoint"


@pytest.mark.slow
def test_a_stage_that_is_killed_three_times_ends_with_the_same_files(tmp_path: Path) -> None:
    assert in_new_process(distill_and_be_killed, tmp_path) == 0
    whole, cut = (Artifact.open(tmp_path / name / "student", kind="student") for name in ("whole", "cut"))
    assert whole.manifest["files"] == cut.manifest["files"]  # weights, projections, answers
    assert PROJECTIONS_FILE in whole.manifest["files"]


def kept(world: World, work: Any, job: Any, folder: Path) -> None:
    """What each of two processes does: the stage, and it keeps the weights that it holds at the end."""

    def fit_and_keep(module: Any, *arguments: Any, **options: Any) -> Any:
        history = fit(module, *arguments, **options)
        save_file(module.state_dict(), folder / f"{world.rank}.safetensors")
        return history

    pytest.MonkeyPatch().setattr(stage, "fit", fit_and_keep)  # in this process, which ends with the work
    work(world, job)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["intermediate", "prediction"])
def test_two_processes_distill_and_hold_the_same_weights(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    shape = tiny.student(layers=2, hidden=24)
    config = tiny.distilling(objective, epochs=4.0, learning_rate=5e-3)
    monkeypatch.setattr(stage, "launch", lambda work, job, **more: launch(kept, work, job, tmp_path, **more))
    made = run(config, shape, teacher, corpus, tmp_path / "student", processes=2)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert len(first) > 30
    assert all(torch.equal(weights, second[name]) for name, weights in first.items())
    assert made.metrics["history"]["steps"] == 48
    if objective == "prediction":
        assert made.metrics["test"]["score"] > 0.8


@pytest.mark.slow
def test_two_processes_distill_by_relations_with_one_projection(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    shape = tiny.student(heads=2, init="random", layer_map=(1,))  # the teacher has a second layer
    config = tiny.distilling("intermediate", attention="relations", relation_heads=8, projection="shared", epochs=1.0)
    made = run(config, shape, teacher, corpus, tmp_path / "student", processes=2)
    assert made.metrics["history"]["steps"] == 12
