"""Options that several commands share, and the recipe that they choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.errors import ConfigError
from compressor.world import check_device

if TYPE_CHECKING:
    from compressor.config import BuildConfig
    from compressor.tasks import Task, TaskConfig

TaskOption = Annotated[str | None, typer.Option("--task", help="Task, one of `compressor tasks`.")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="auto, laptop, paper, or the path of a .toml file.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one value: section.key=value.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Labelled text in place of the recipe's: file or folder.")
]
TeacherOption = Annotated[
    str | None, typer.Option("--teacher", help="Adopt this fine-tuned checkpoint as the teacher.")
]
ProcessesOption = Annotated[int, typer.Option("--processes", min=1, help="Processes that train together.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
TritonReleaseOption = Annotated[
    str | None, typer.Option("--triton-release", help="Container release that will serve, as 25.01.")
]
TargetCpuOption = Annotated[
    str | None, typer.Option("--target-cpu", help="Processor that will serve: auto, avx2, avx512_vnni, amx or neon.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder of the result.")]
CorpusOption = Annotated[Path, typer.Option("--corpus", help="Folder made by `compressor corpus`.")]
RepositoryOption = Annotated[Path, typer.Option("--repository", help="Triton model repository.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def auto_recipe(device: str) -> tuple[str, str]:
    """Recipe that `auto` means here, and why."""
    from compressor.machine import has_accelerator

    if device == "cuda":
        return "paper", "auto: --device is cuda"
    if device == "auto" and has_accelerator():
        return "paper", "auto: there is an accelerator"
    return "laptop", "auto: --device is cpu" if device == "cpu" else "auto: there is no accelerator here"


def chosen_recipe(
    task: str | None,
    recipe: str,
    device: str,
    overrides: list[str] | None,
    *,
    data: str | None = None,
    teacher: str | None = None,
    corpus: Path | None = None,
) -> tuple[BuildConfig, str, str]:
    """The recipe with its overrides, its name, and why it was chosen.

    The folder `corpus` of a stage of that name says what was read already: source, and the task with its labels.
    Raises ConfigError if the recipe is for another task than that.
    """
    from compressor import artifact
    from compressor.dataset import task_of
    from compressor.recipe import RECIPES, load_recipe

    check_device(device)
    name, why = auto_recipe(device) if recipe == "auto" else (recipe, "as given")
    found = None if corpus is None else artifact.read(corpus)
    known = task_of(found) if found is not None and found.manifest["kind"] == "examples" else None
    if found is not None and known is not None:
        data = data or found.manifest["section"].get("source")
        if task is None and name in RECIPES and not known.is_own:
            task = known.name
    applied = with_options(overrides, {"corpus.source": data, "finetune.teacher": teacher})
    config = load_recipe(task, name, tuple(applied))
    if known is not None:
        return config.model_copy(update={"task": _task_of_corpus(config.task, known, corpus)}), name, why
    if config.task.is_own and not config.task.is_regression and config.task.labels is None:
        from compressor.stages.corpus import find_labels

        named = config.task.model_copy(update={"labels": find_labels(config.corpus, config.task)})
        config = config.model_copy(update={"task": named})
    return config, name, why


def _task_of_corpus(task: TaskConfig, known: Task, corpus: Path | None) -> TaskConfig:
    """A recipe's task, with the labels of a corpus' if it is to find them. Raises ConfigError if the tasks differ."""
    if task.is_own and not task.is_regression and task.labels is None:
        task = task.model_copy(update={"labels": known.labels})
    wanted = task.row()
    for what, theirs, ours in (
        ("of task", known.name, wanted.name),
        ("with the text columns", known.columns, wanted.columns),
        ("with the metrics", known.metrics, wanted.metrics),
        ("with the labels", known.labels, wanted.labels),
    ):
        if theirs != ours:
            raise ConfigError(
                f"--corpus {corpus} holds examples {what} {theirs!r}, and the recipe is for {ours!r}; give the recipe "
                "that the corpus was made by, or a corpus made by this one"
            )
    return task


def with_options(overrides: list[str] | None, given: Mapping[str, Any]) -> list[str]:
    """The overrides, then those of options by the setting that each stands for; None where one is not given."""
    # A value of JSON is one of TOML as well.
    return [*(overrides or []), *(f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None)]


def check_files(source: Path, out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a table can be read from `source` and another written to `out`."""
    if not source.is_file():
        raise ConfigError(f"{source} is no file; give a .csv, .tsv, .jsonl or .parquet file")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT is {out}, and there is no folder {out.parent}; make it, or give another OUT")
    if out.exists() and out.samefile(source):
        raise ConfigError(f"IN and OUT are both {source}; give another OUT")
    if out.exists() and not (overwrite and out.is_file()):
        raise ConfigError(f"{out} is there already; give another OUT, or --overwrite to replace a file")
