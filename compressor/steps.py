"""The stages of a build as values: what each reads, what decides its result, and how it is run.

Nothing is imported or read until a step is run, so that a plan costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor import artifact, machine, sources
from compressor.artifact import Artifact
from compressor.config import ADAPT, ENGLISH, STUDENT_INITS, AdaptConfig, AugmentConfig, BuildConfig, GeneralConfig

# A stage recomputes when the code that decides its result changes; raise this with such a change.
STAGES_VERSION = 7


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
    """The verb: corpus, finetune, adapt, augment, general, distill, export, quantize, publish."""
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
    """The stages of a build in order."""
    line = [_corpus(config)]

    def add(step: Step) -> str:
        line.append(step)
        return step.name

    def name(stage: str) -> str:
        return f"{len(line) + 1}-{stage}"

    roles = {"corpus": line[0].name, "examples": line[0].name}
    roles["teacher"] = add(_finetune(config, where, name("finetune")))
    if config.adaptation is not None:
        roles["masked_lm"] = add(_adapt(config, config.adaptation, where, name("adapt")))
    if config.augment is not None:  # after the teacher, which judges the copies
        roles["examples"] = add(_augment(config, config.augment, where, name("augment"), roles))
    if config.general is not None:
        roles["general"] = add(_general(config, config.general, where, name("general")))
    for number, stage in enumerate(config.distill):
        roles["start"] = add(_distill(config, where, number, name(f"distill-{stage.objective}"), roles))
    roles["student"] = roles["start"]
    roles["onnx"] = add(_export(config, name("export"), roles))
    roles["int8"] = add(_quantize(config, name("quantize"), roles))
    add(_publish(config, where, name("publish"), roles))
    return line


def _chosen(roles: Mapping[str, str], *wanted: str) -> dict[str, str]:
    return {role: roles[role] for role in wanted}


def _corpus(config: BuildConfig) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.corpus import corpus

        return corpus(config.corpus, config.task.row(), seed=config.seed, key=key, out=out)

    section = {**config.corpus.model_dump(), "task": config.task.row().model_dump(), "seed": config.seed}
    found = {"corpus.source": config.corpus.source}
    return Step(name="1-corpus", stage="corpus", kind="examples", section=section, parents={}, sources=found, make=make)


def _adapt(config: BuildConfig, settings: AdaptConfig, where: Where, name: str) -> Step:
    base = config.finetune.base

    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.adapt import adapt

        return adapt(
            settings,
            parents["corpus"],
            base=base,
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    return Step(
        name=name,
        stage="adapt",
        kind="masked-lm",
        section={**settings.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed},
        parents={"corpus": "1-corpus"},
        sources={
            "finetune.base": base,
            **{f"adapt.corpus.{number}": source for number, source in enumerate(settings.corpus)},
        },
        make=make,
    )


def _augment(
    config: BuildConfig, augmentation: AugmentConfig, where: Where, name: str, roles: Mapping[str, str]
) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.augment import augment_examples

        return augment_examples(
            augmentation,
            parents["corpus"],
            masked_lm=parents.get("masked_lm"),
            teacher=parents.get("teacher"),
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    return Step(
        name=name,
        stage="augment",
        kind="examples",
        section={**augmentation.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed},
        parents=_chosen(roles, "corpus", "teacher", *(("masked_lm",) if "masked_lm" in roles else ())),
        sources={
            f"augment.{key}": source
            for key, source in (
                ("vectors", augmentation.vectors),
                ("masked_lm", augmentation.masked_lm),
                ("stop_words", augmentation.stop_words),
            )
            if source not in (None, ADAPT, ENGLISH)
        },
        make=make,
    )


def _finetune(config: BuildConfig, where: Where, name: str) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.dataset import task_of
        from compressor.stages.finetune import finetune

        return finetune(
            config.finetune,
            task_of(parents["corpus"]),
            parents["corpus"],
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    found = {"finetune.base": config.finetune.base}
    if config.finetune.teacher:
        found = {"finetune.teacher": config.finetune.teacher}
    return Step(
        name=name,
        stage="finetune",
        kind="teacher",
        section={**config.finetune.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed},
        parents={"corpus": "1-corpus"},
        sources=found,
        make=make,
    )


def _general(config: BuildConfig, general: GeneralConfig, where: Where, name: str) -> Step:
    base = general.teacher or config.finetune.base

    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.stages.general import general as distill_general

        return distill_general(
            general,
            config.student,
            base=base,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    shape = config.student.model_dump(exclude={"init"})  # what the task's student starts from is no matter here
    return Step(
        name=name,
        stage="general",
        kind="general-student",
        section={**general.model_dump(), "student": shape, "seed": config.seed},
        parents={},
        sources={"general.source": general.source, "general.teacher": base},
        make=make,
    )


def _distill(config: BuildConfig, where: Where, number: int, name: str, roles: Mapping[str, str]) -> Step:
    settings, init = config.distill[number], config.student.init

    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.dataset import task_of
        from compressor.stages.distill import distill

        return distill(
            settings,
            config.student,
            task_of(parents["corpus"]),
            teacher=parents["teacher"],
            examples=parents["examples"],
            corpus=parents["corpus"],
            start=parents.get("start"),
            general=parents.get("general"),
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
            processes=where.processes,
            device=where.device,
        )

    first = number == 0
    wanted = ("start",) if not first else ("general",) if init == "general" else ()
    return Step(
        name=name,
        stage="distill",
        kind="student",
        section={
            **settings.model_dump(),
            "student": config.student.model_dump(),
            "max_tokens": config.max_tokens,
            "seed": config.seed,
        },
        parents=_chosen(roles, "teacher", "examples", "corpus", *wanted),
        sources={"student.init": init} if first and init not in STUDENT_INITS else {},
        make=make,
    )


def _export(config: BuildConfig, name: str, roles: Mapping[str, str]) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.dataset import task_of
        from compressor.stages.export import export

        return export(
            config.export,
            task_of(parents["corpus"]),
            student=parents["student"],
            teacher=parents["teacher"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            key=key,
            out=out,
        )

    return Step(
        name=name,
        stage="export",
        kind="onnx",
        section={**config.export.model_dump(), "max_tokens": config.max_tokens},
        parents=_chosen(roles, "student", "teacher", "corpus"),
        sources={},
        make=make,
    )


def _quantize(config: BuildConfig, name: str, roles: Mapping[str, str]) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.dataset import task_of
        from compressor.stages.quantize import quantize

        return quantize(
            config.quantize,
            task_of(parents["corpus"]),
            onnx_models=parents["onnx"],
            student=parents["student"],
            teacher=parents["teacher"],
            corpus=parents["corpus"],
            max_tokens=config.max_tokens,
            seed=config.seed,
            key=key,
            out=out,
        )

    settings = config.quantize
    target = machine.int8_cpu() if settings.target_cpu == "auto" else settings.target_cpu  # a run may be carried on
    return Step(
        name=name,
        stage="quantize",
        kind="int8",
        section={
            **settings.model_dump(),
            "target_cpu": target,
            "max_tokens": config.max_tokens,
            "seed": config.seed,
        },
        parents=_chosen(roles, "onnx", "student", "teacher", "corpus"),
        sources={
            f"quantize.vocabulary_texts.{number}": source for number, source in enumerate(settings.vocabulary_texts)
        },
        make=make,
    )


def _publish(config: BuildConfig, where: Where, name: str, roles: Mapping[str, str]) -> Step:
    def make(parents: Parents, key: str, out: Path) -> Artifact:
        from compressor.dataset import task_of
        from compressor.stages.publish import publish

        return publish(
            config.publish,
            task_of(parents["corpus"]),
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
        name=name,
        stage="publish",
        kind="publication",
        section={**config.publish.model_dump(), "max_tokens": config.max_tokens},
        parents=_chosen(roles, "int8", "onnx", "corpus"),
        sources={},
        make=make,
        verify=verify,
    )
