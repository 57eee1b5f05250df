"""build(): the straight line of stages, from text to a model repository. The table of contents of the project."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor import __version__, artifact, sources
from compressor.artifact import Artifact
from compressor.config import STUDENT_INITS, BuildConfig
from compressor.errors import ArtifactError, ConfigError
from compressor.tasks import find_task
from compressor.world import resolve_device

RUN_FILE = "run.json"
# A stage recomputes when the code that decides its result changes; raise this with such a change.
STAGES_VERSION = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Where:
    """What flags say: where and how, never what."""

    repository: Path
    """Model repository that publish writes to."""
    processes: int = 1
    """Processes that train together."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""


Parents = Mapping[str, Artifact]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stage of a build, ready to be run."""

    name: str
    """Its folder in the run."""
    stage: str
    """The verb: corpus, augment, finetune, distill, export, quantize, publish."""
    kind: str
    """Kind of artifact it makes."""
    section: Mapping[str, Any]
    """All settings that decide its result."""
    parents: Mapping[str, str]
    """By role: the name of the step whose artifact it reads."""
    sources: Mapping[str, str]
    """By recipe key: what it reads from outside."""
    make: Callable[[Parents, str, Path], Artifact]
    """(parents by role, key, out) -> artifact."""
    verify: Callable[[Artifact], bool] = lambda artifact: True
    """Whether what it made outside its folder is still there."""

    def key(self, parents: Mapping[str, str]) -> str:
        """What decides whether its finished artifact can be reused; `parents` are the parents' keys by role."""
        section = {**self.section, "stages_version": STAGES_VERSION}
        hashes = {name: sources.content_hash(source) for name, source in self.sources.items()}
        return artifact.key(self.kind, section, parents, hashes)


def steps(config: BuildConfig, where: Where) -> list[Step]:
    """The stages of a build in order. Nothing is imported or read until one is run."""
    line = [_corpus(config)]
    examples = line[0].name
    if config.augment is not None:
        line.append(_augment(config, config.augment))
        examples = line[-1].name
    line.append(_finetune(config, where))
    student = None
    for number in range(len(config.distill)):
        line.append(_distill(config, where, number, examples, student))
        student = line[-1].name
    assert student is not None  # the recipe has at least one [[distill]]
    line += [_export(config, student), _quantize(config), _publish(config, where)]
    return line


def _corpus(config: BuildConfig) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.corpus import corpus

        return corpus(config.corpus, find_task(config.task.name), seed=config.seed, key=key, out=out)

    section = {**config.corpus.model_dump(), "task": config.task.name, "seed": config.seed}
    found = {"corpus.source": config.corpus.source}
    return Step(name="1-corpus", stage="corpus", kind="examples", section=section, parents={}, sources=found, make=make)


def _augment(config: BuildConfig, augmentation: Any) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.augment import augment

        return augment(augmentation, parents["corpus"], seed=config.seed, key=key, out=out)

    return Step(
        name="2-augment",
        stage="augment",
        kind="examples",
        section={**augmentation.model_dump(), "seed": config.seed},
        parents={"corpus": "1-corpus"},
        sources={
            f"augment.{name}": source
            for name, source in (("vectors", augmentation.vectors), ("masked_lm", augmentation.masked_lm))
            if source
        },
        make=make,
    )


def _finetune(config: BuildConfig, where: Where) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.finetune import finetune

        return finetune(
            config.finetune,
            find_task(config.task.name),
            parents["corpus"],
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    name, source = "finetune.base", config.finetune.base
    if config.finetune.teacher:
        name, source = "finetune.teacher", config.finetune.teacher
    return Step(
        name="3-finetune",
        stage="finetune",
        kind="teacher",
        section={**config.finetune.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed},
        parents={"corpus": "1-corpus"},
        sources={name: source},
        make=make,
    )


def _distill(config: BuildConfig, where: Where, number: int, examples: str, student: str | None) -> Step:
    settings = config.distill[number]

    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.distill import distill

        return distill(
            settings,
            parents.get("student", config.student),
            find_task(config.task.name),
            teacher=parents["teacher"],
            examples=parents["examples"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    parents = {"teacher": "3-finetune", "examples": examples, "corpus": "1-corpus"}
    section = {**settings.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed}
    found = {}
    if student is not None:
        parents["student"] = student
    else:
        section["student"] = config.student.model_dump()
        if config.student.init not in STUDENT_INITS:
            found["student.init"] = config.student.init
    return Step(
        name=f"{4 + number}-distill-{settings.objective}",
        stage="distill",
        kind="student",
        section=section,
        parents=parents,
        sources=found,
        make=make,
    )


def _export(config: BuildConfig, student: str) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.export import export

        return export(
            config.export,
            find_task(config.task.name),
            student=parents["student"],
            teacher=parents["teacher"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            key=key,
            out=out,
        )

    return Step(
        name=f"{4 + len(config.distill)}-export",
        stage="export",
        kind="onnx",
        section={**config.export.model_dump(), "max_tokens": config.max_tokens},
        parents={"student": student, "teacher": "3-finetune", "corpus": "1-corpus"},
        sources={},
        make=make,
    )


def _quantize(config: BuildConfig) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.quantize import quantize

        return quantize(
            config.quantize,
            find_task(config.task.name),
            onnx_models=parents["onnx"],
            teacher=parents["teacher"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
        )

    return Step(
        name=f"{5 + len(config.distill)}-quantize",
        stage="quantize",
        kind="int8",
        section={**config.quantize.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed},
        parents={"onnx": f"{4 + len(config.distill)}-export", "teacher": "3-finetune", "corpus": "1-corpus"},
        sources={},
        make=make,
    )


def _publish(config: BuildConfig, where: Where) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.publish import publish

        return publish(
            config.publish,
            find_task(config.task.name),
            int8=parents["int8"],
            onnx_models=parents["onnx"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            key=key,
            out=out,
            root=where.repository,
        )

    def verify(publication: Artifact) -> bool:
        from compressor.stages.publish import is_published

        return is_published(publication, where.repository)

    return Step(
        name=f"{6 + len(config.distill)}-publish",
        stage="publish",
        kind="publication",
        section={**config.publish.model_dump(), "max_tokens": config.max_tokens},
        parents={
            "int8": f"{5 + len(config.distill)}-quantize",
            "onnx": f"{4 + len(config.distill)}-export",
            "corpus": "1-corpus",
        },
        sources={},
        make=make,
        verify=verify,
    )


def check_sources(line: list[Step]) -> None:
    """Refuse a source that cannot work before any stage starts. Raises SourceError."""
    for step in line:
        for what, source in step.sources.items():
            sources.check(source, what=what)


def _check_batches(config: BuildConfig, where: Where) -> None:
    """Refuse batches with fewer rows than processes. Raises ConfigError."""
    sections = {"finetune": config.finetune} | {f"distill.{number}": item for number, item in enumerate(config.distill)}
    for name, section in sections.items():
        if section.batch_size < where.processes:
            raise ConfigError(
                f"{name}.batch_size is {section.batch_size} rows over all processes and --processes is "
                f"{where.processes}; each process needs a row; use fewer processes or larger batches"
            )


@dataclass(frozen=True)
class Planned:
    """A step and what a build would do with it."""

    step: Step
    key: str
    reusable: Artifact | None
    """The finished artifact that would be reused."""
    begun: bool
    """Whether an interrupted run of this very stage would be gone on with."""
    seconds_last_time: float | None
    """Seconds that the stage took when it was last finished in this run folder."""


def plan(line: list[Step], run: Path, *, overwrite: bool = False) -> list[Planned]:
    """What a build into `run` would do, without doing it; with `overwrite` nothing there is used."""
    planned: dict[str, Planned] = {}
    for step in line:
        parents = {role: planned[name] for role, name in step.parents.items()}
        key = step.key({role: parent.key for role, parent in parents.items()})
        reusable = None
        if not overwrite and all(parent.reusable for parent in parents.values()):
            artifacts = {role: parent.reusable for role, parent in parents.items() if parent.reusable}
            reusable = _reusable(step, key, artifacts, run / step.name)
        partial = run / f"{step.name}.partial"
        last = artifact.read(run / step.name)
        seconds = float(last.manifest["seconds"]) if last else None
        begun = not overwrite and artifact.begun_key(partial) == key
        planned[step.name] = Planned(step, key, reusable, begun=begun, seconds_last_time=seconds)
    return list(planned.values())


def _reusable(step: Step, key: str, parents: Parents, path: Path) -> Artifact | None:
    """The finished artifact in `path` if it was made with this key, from just these parents, and is whole."""
    found = artifact.read(path)
    if found is None or found.manifest["key"] != key or not found.is_whole():
        return None
    made_from = {role: facts["content"] for role, facts in found.manifest["parents"].items()}
    same = all(made_from.get(role) == parent.content for role, parent in parents.items())
    return found if same and step.verify(found) else None


def build(config: BuildConfig, recipe: str, run: Path, where: Where, *, overwrite: bool = False) -> dict[str, Artifact]:
    """Run every stage that is not there already; returns the artifacts by step name.

    What is finished stays whatever happens later. Raises CompressorError as the stages do.
    """
    line = steps(config, where)
    check_sources(line)
    _check_batches(config, where)
    refuse_foreign_run(run)
    todo = [item.step for item in plan(line, run, overwrite=overwrite) if item.reusable is None]
    for step in todo:
        for what, source in step.sources.items():
            sources.reach_hub(source, what=what)
    if todo and where.device == "cuda":  # PyTorch is needed to ask, and takes seconds to load
        resolve_device(where.device)
    open_run(run, recipe, config, overwrite=overwrite)
    done: dict[str, Artifact] = {}
    for number, step in enumerate(line, start=1):
        label = f"[{number}/{len(line)}] {step.name.partition('-')[2]}"
        parents = {role: done[name] for role, name in step.parents.items()}
        done[step.name] = _made(step, parents, run / step.name, label)
    return done


def run_step(step: Step, parents: Mapping[str, Path], out: Path) -> Artifact:
    """Run one stage on finished artifacts, given by role and path, unless `out` holds its result already."""
    check_sources([step])
    kinds = {"corpus": "examples", "examples": "examples", "teacher": "teacher", "student": "student"}
    opened = {role: Artifact.open(path, kind=kinds.get(role, role)) for role, path in parents.items()}
    return _made(step, opened, out, step.stage)


def _made(step: Step, parents: Parents, out: Path, label: str) -> Artifact:
    """The artifact of a step in `out`: reused, or made now."""
    key = step.key({role: parent.manifest["key"] for role, parent in parents.items()})
    reusable = _reusable(step, key, parents, out)
    if reusable is not None:
        log.info("%s: cached", label)
        return reusable
    log.info("%s ...", label)
    began = time.monotonic()
    made = step.make(parents, key, out)
    log.info("%s: done in %.0f s", label, time.monotonic() - began)
    return made


def finished(run: Path) -> dict[str, Artifact]:
    """The artifacts of a finished build by step name, in order. Raises ArtifactError if it is not finished."""
    try:
        facts = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
        config = BuildConfig.model_validate(facts["config"])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{run} holds no {RUN_FILE} of a build; give the run folder of one") from error
    # By the recipe, not by what lies there: an earlier recipe may have left other stages.
    names = [step.name for step in steps(config, Where(repository=run))]
    artifacts = {name: found for name in names if (found := artifact.read(run / name))}
    if len(artifacts) < len(names):
        raise ArtifactError(f"{run} holds no finished build; run `compressor build --out {run}` to the end")
    return artifacts


def refuse_foreign_run(run: Path) -> None:
    """Raise ArtifactError if `run` exists and is no run folder of ours."""
    if run.exists() and not run.is_dir():
        raise ArtifactError(f"--out {run} is a file; it must be a folder that is new, empty, or an earlier run's")
    if run.is_dir() and any(run.iterdir()) and not (run / RUN_FILE).is_file():
        raise ArtifactError(
            f"--out {run} holds files and no {RUN_FILE}: it belongs to something else; choose another folder"
        )


def open_run(run: Path, recipe: str, config: BuildConfig, *, overwrite: bool) -> None:
    """Make the run folder, or take up our own. Raises ArtifactError if it belongs to something else."""
    refuse_foreign_run(run)
    marker = run / RUN_FILE
    try:
        if overwrite and marker.is_file():
            shutil.rmtree(run)
        run.mkdir(parents=True, exist_ok=True)
        facts = {"compressor": __version__, "recipe": recipe, "config": config.model_dump()}
        partial = run / f"{RUN_FILE}.new"
        partial.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        partial.replace(marker)
    except OSError as error:
        raise ArtifactError(
            f"cannot write --out {run}: {error.strerror}; free space or choose another folder"
        ) from error
