"""Commands that run one stage on the results of others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor.cli_verify import check_repository
from compressor.errors import ConfigError
from compressor.options import (
    CorpusOption,
    DataOption,
    DeviceOption,
    OutOption,
    ProcessesOption,
    RecipeOption,
    RepositoryOption,
    SetOption,
    TargetCpuOption,
    TaskOption,
    TeacherOption,
    TritonReleaseOption,
    chosen_recipe,
    with_options,
)

if TYPE_CHECKING:
    from compressor.config import BuildConfig
    from compressor.steps import Step


def corpus(
    out: OutOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    data: DataOption = None,
    overrides: SetOption = None,
) -> None:
    """Read labelled text into Arrow examples in three splits."""
    config, _, _ = chosen_recipe(task, recipe, "auto", overrides, data=data)
    _run_stage(_step(config, "corpus"), {}, out)


def augment(
    out: OutOption,
    corpus: CorpusOption,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="Folder made by `compressor finetune`, to judge the copies.")
    ] = None,
    masked_lm: Annotated[
        Path | None, typer.Option("--masked-lm", help='Folder made by `compressor adapt`, for masked_lm = "adapt".')
    ] = None,
    max_disagreement: Annotated[
        float | None,
        typer.Option("--max-disagreement", min=0, max=1, help="Drop copies that the teacher doubts by more than this."),
    ] = None,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Make more training text by replacing words, and report how far it can be trusted."""
    wanted = with_options(overrides, {"augment.max_disagreement": max_disagreement})
    config, name, _ = chosen_recipe(task, recipe, device, wanted, corpus=corpus)
    if config.augment is None:
        raise ConfigError(f"recipe {name} has no [augment] section; add one, or leave the stage out")
    if config.augment.max_disagreement is not None and teacher is None:
        raise ConfigError("the copies to drop are those that a teacher doubts; give the folder of one with --teacher")
    if (config.adaptation is None) != (masked_lm is None):
        raise ConfigError(
            f"augment.masked_lm is {config.augment.masked_lm!r} and --masked-lm is {masked_lm}; the folder made by "
            '`compressor adapt` is for "adapt", which needs it'
        )
    parents = {"corpus": corpus, "teacher": teacher, "masked_lm": masked_lm}
    given = {role: path for role, path in parents.items() if path is not None}
    _run_stage(_step(config, "augment", processes=processes, device=device), given, out)


def finetune(
    out: OutOption,
    corpus: CorpusOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    teacher: TeacherOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Train a teacher, or adopt a checkpoint with --teacher."""
    config, _, _ = chosen_recipe(task, recipe, device, overrides, teacher=teacher, corpus=corpus)
    _run_stage(_step(config, "finetune", processes=processes, device=device), {"corpus": corpus}, out)


def adapt(
    out: OutOption,
    corpus: CorpusOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Make the masked language model of augment.masked_lm = "adapt" from the teacher's base and the task's text."""
    config, name, _ = chosen_recipe(task, recipe, device, overrides, corpus=corpus)
    if config.adaptation is None:
        raise ConfigError(f'recipe {name} has no augment.masked_lm = "adapt"; set it, or leave the stage out')
    _run_stage(_step(config, "adapt", processes=processes, device=device), {"corpus": corpus}, out)


def general(
    out: OutOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Make a general student from a pretrained teacher and any text, as the recipe's general section says.

    Its folder can be a recipe's student.init, for every task with the same vocabulary.
    """
    config, name, _ = chosen_recipe(task, recipe, device, overrides)
    if config.general is None:
        raise ConfigError(f"recipe {name} has no [general] section; add one with a source of text")
    _run_stage(_step(config, "general", processes=processes, device=device), {}, out)


def distill(
    out: OutOption,
    corpus: CorpusOption,
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`.")],
    examples: Annotated[
        Path | None, typer.Option("--examples", help="Training rows; those of --corpus if not given.")
    ] = None,
    student: Annotated[
        Path | None, typer.Option("--student", help="Student of an earlier stage; a new one if not given.")
    ] = None,
    general: Annotated[
        Path | None,
        typer.Option("--general", help='Folder made by `compressor general`, for student.init = "general".'),
    ] = None,
    stage: Annotated[int, typer.Option("--stage", min=0, help="Which distill stage of the recipe, from 0.")] = 0,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Teach a student, by one of the recipe's distill stages."""
    config, name, _ = chosen_recipe(task, recipe, device, overrides, corpus=corpus)
    if stage >= len(config.distill):
        raise ConfigError(f"--stage is {stage}; recipe {name} has [[distill]] stages 0 to {len(config.distill) - 1}")
    if (student is None) != (stage == 0):
        rule = "stage 0 makes a new student; later stages need the student of the stage before"
        raise ConfigError(f"--stage is {stage} and --student is {student}; {rule}")
    parents = {"teacher": teacher, "examples": examples or corpus, "corpus": corpus}
    if student is not None:
        parents["start"] = student
    elif config.student.init == "general":
        if general is None:
            raise ConfigError('student.init is "general"; give the folder made by `compressor general` with --general')
        parents["general"] = general
    _run_stage(_step(config, "distill", number=stage, processes=processes, device=device), parents, out)


def export(
    out: OutOption,
    corpus: CorpusOption,
    student: Annotated[Path, typer.Option("--student", help="Folder made by `compressor distill`.")],
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`.")],
    triton_release: TritonReleaseOption = None,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Export student and teacher to ONNX; fails with 3 if the logits differ from PyTorch's by more than the bound."""
    wanted = with_options(overrides, {"export.triton_release": triton_release})
    config, _, _ = chosen_recipe(task, recipe, "auto", wanted, corpus=corpus)
    _run_stage(_step(config, "export"), {"student": student, "teacher": teacher, "corpus": corpus}, out)


def quantize(
    out: OutOption,
    corpus: CorpusOption,
    onnx: Annotated[Path, typer.Option("--onnx", help="Folder made by `compressor export`.")],
    student: Annotated[
        Path, typer.Option("--student", help="Folder made by `compressor distill`: what static-qat would train.")
    ],
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`, to compare with.")],
    target_cpu: TargetCpuOption = None,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Quantize the student to INT8; fails with 3 if every candidate loses more accuracy than the bound."""
    wanted = with_options(overrides, {"quantize.target_cpu": target_cpu})
    config, _, _ = chosen_recipe(task, recipe, "auto", wanted, corpus=corpus)
    parents = {"onnx": onnx, "student": student, "teacher": teacher, "corpus": corpus}
    _run_stage(_step(config, "quantize"), parents, out)


def publish(
    out: OutOption,
    corpus: CorpusOption,
    onnx: Annotated[Path, typer.Option("--onnx", help="Folder made by `compressor export`.")],
    int8: Annotated[Path, typer.Option("--int8", help="Folder made by `compressor quantize`.")],
    repository: RepositoryOption = Path("model_repository"),
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check the repository afterwards as `compressor verify` does, and a server of it."
        ),
    ] = False,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Write the models into a Triton model repository."""
    from compressor import world
    from serving.control import served_at

    config, _, _ = chosen_recipe(task, recipe, "auto", overrides, corpus=corpus)
    step = _step(config, "publish", repository=repository)
    _run_stage(step, {"int8": int8, "onnx": onnx, "corpus": corpus}, out)
    if verify and world.leads():
        # The embedded server lacks that backend: what is published for it is checked for the container.
        release = config.export.triton_release if config.publish.runtime == "onnxruntime" else None
        check_repository(repository, release=release, url=served_at(repository))


def _step(
    config: BuildConfig,
    stage: str,
    *,
    number: int = 0,
    repository: Path = Path("model_repository"),
    processes: int = 1,
    device: str = "auto",
) -> Step:
    """The `number`-th step of a stage in a build of `config`."""
    from compressor.steps import Where, steps

    where = Where(repository=repository, processes=processes, device=device)
    return [step for step in steps(config, where) if step.stage == stage][number]


def _run_stage(step: Step, parents: Mapping[str, Path], out: Path) -> None:
    """Run one stage on artifacts given by path, and print where its result is."""
    from compressor import pipeline, world

    with world.group():  # joined early: an error in one process, whatever it is at, ends the others too
        made = pipeline.run_step(step, parents, out)
    if world.leads():
        typer.echo(made.path)
