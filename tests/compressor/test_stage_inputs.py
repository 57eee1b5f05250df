"""What one stage is given: artifacts that belong together, a task that is the corpus', and folders nobody writes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor import artifact, options, pipeline
from compressor.artifact import Artifact
from compressor.errors import ArtifactError, ConfigError
from compressor.pipeline import run_step
from compressor.recipe import read_recipe
from compressor.steps import Step, Where
from compressor.tasks import TaskConfig
from tests import tiny

OWN = """\
[task]
name = "topics"
columns = ["title"]
label = "topic"

[corpus]
source = "absent.csv"

[finetune]
base = "base"
epochs = 1
learning_rate = 1e-3

[student]

[[distill]]
objective = "prediction"
epochs = 1
learning_rate = 1e-3
"""


def made_from(out: Path, kind: str, corpus: Artifact) -> Path:
    with tiny.sealed(out, kind, parents={"corpus": corpus}):
        pass
    return out


def any_step(make: Callable[..., Any]) -> Step:
    return Step(name="4-distill", stage="distill", kind="student", section={}, parents={}, sources={}, make=make)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Artifact, Artifact]:
    return tiny.examples(tmp_path / "a", train=8, held_out=4), tiny.examples(tmp_path / "b", train=10, held_out=4)


@pytest.mark.parametrize("stranger", ["examples", "teacher", "start"])
def test_what_was_made_from_another_corpus_is_refused(
    corpora: tuple[Artifact, Artifact], stranger: str, tmp_path: Path
) -> None:
    mine, other = corpora
    kinds = {"examples": "examples", "teacher": "teacher", "start": "student"}
    paths = {
        role: made_from(tmp_path / role, kind, other if role == stranger else mine) for role, kind in kinds.items()
    }
    with pytest.raises(ArtifactError, match=rf"{stranger} belongs to another corpus than .*a, and may have learnt"):
        run_step(any_step(lambda *_: pytest.fail("it ran")), {"corpus": mine.path, **paths}, tmp_path / "out")


def test_a_corpus_is_no_examples_of_another(corpora: tuple[Artifact, Artifact], tmp_path: Path) -> None:
    mine, other = corpora
    with pytest.raises(ArtifactError, match=r"b belongs to another corpus than .*a, and may have learnt"):
        run_step(any_step(lambda *_: None), {"corpus": mine.path, "examples": other.path}, tmp_path / "out")


def test_what_comes_from_no_corpus_or_from_an_equal_one_is_taken(
    corpora: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    mine, _ = corpora
    again = tiny.examples(tmp_path / "again", train=8, held_out=4)
    with tiny.sealed(tmp_path / "general", "general-student"):
        pass
    paths = {"corpus": mine.path, "examples": again.path, "general": tmp_path / "general"}
    assert run_step(any_step(lambda *_: mine), paths, tmp_path / "out") == mine


# The task


def own_corpus(out: Path, *, labels: tuple[str, ...] = ("b", "a"), name: str = "topics") -> Path:
    task = TaskConfig(name=name, columns=("title",), label="topic", labels=labels).row()
    with tiny.sealed(out, "examples", section={"source": "mine.csv", "task": task.model_dump(mode="json")}):
        pass
    return out


def test_a_stage_takes_source_and_labels_from_its_corpus(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN, encoding="utf-8")
    corpus = own_corpus(tmp_path / "corpus")
    config, _, _ = options.chosen_recipe(None, str(tmp_path / "own.toml"), "cpu", None, corpus=corpus)
    assert (config.corpus.source, config.task.labels) == ("mine.csv", ("b", "a"))


def test_a_recipe_by_name_needs_neither_task_nor_data_beside_a_corpus(tmp_path: Path) -> None:
    section = {"source": "glue/MRPC", "task": task_named("mrpc")}
    with tiny.sealed(tmp_path / "corpus", "examples", section=section):
        pass
    config, _, _ = options.chosen_recipe(None, "laptop", "cpu", None, corpus=tmp_path / "corpus")
    assert (config.task.name, config.corpus.source) == ("mrpc", "glue/MRPC")


def task_named(name: str) -> dict[str, Any]:
    return TaskConfig(name=name).row().model_dump(mode="json")


def test_a_corpus_of_another_task_is_refused(tmp_path: Path) -> None:
    with tiny.sealed(tmp_path / "corpus", "examples", section={"source": "x", "task": task_named("sst2")}):
        pass
    with pytest.raises(ConfigError, match=r"holds examples of task 'sst2', and the recipe is for 'rte'; give the rec"):
        options.chosen_recipe("rte", "laptop", "cpu", None, corpus=tmp_path / "corpus")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ('task.labels=["a", "b"]', r"with the labels \('b', 'a'\), and the recipe is for \('a', 'b'\)"),
        ('task.columns=["body"]', r"with the text columns \(\('title',\),\), and the recipe is for \(\('body',\),\)"),
        ("task.metric=f1", r"with the metrics \('accuracy',\), and the recipe is for \('f1',\)"),
        ("task.metric=pearson", r"with the metrics \('accuracy',\), and the recipe is for \('pearson',\)"),
    ],
)
def test_a_corpus_of_another_form_of_the_task_is_refused(setting: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN, encoding="utf-8")
    corpus = own_corpus(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=sentence):
        options.chosen_recipe(None, str(tmp_path / "own.toml"), "cpu", [setting], corpus=corpus)


# One writer


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_build_in_a_run_folder_is_refused_and_changes_nothing(
    overwrite: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, run = read_recipe(OWN, ('task.labels=["a", "b"]',), name="own"), tmp_path / "run"
    for check in ("check_ready", "check_recipe"):
        monkeypatch.setattr(pipeline, check, lambda *_: None)
    monkeypatch.setattr(pipeline, "plan", lambda *_, **__: [])
    run.mkdir()
    (run / artifact.RUN_FILE).write_text(json.dumps("the first"), encoding="utf-8")
    where = Where(repository=tmp_path / "repository")
    with artifact.alone(run, what=run), pytest.raises(ArtifactError, match=r"another compressor is writing .*run; "):
        pipeline.build(config, "own", run, where, overwrite=overwrite)
    assert (run / artifact.RUN_FILE).read_text(encoding="utf-8") == json.dumps("the first")
