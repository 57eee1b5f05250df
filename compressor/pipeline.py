"""build(): the straight line of stages, from text to a model repository. The table of contents of the project."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compressor import __version__, artifact, shapes, sources
from compressor.artifact import RUN_FILE, Artifact
from compressor.config import BuildConfig, Optimisation
from compressor.errors import ArtifactError, ConfigError, SourceError
from compressor.machine import missing_extras
from compressor.steps import Parents, Step, Where, steps
from compressor.world import resolve_device

MODULES = {"export": ("onnxruntime",), "quantize": ("onnxruntime",), "publish": ("onnxruntime", "tritonclient")}
"""What stages import that an extra brings."""

log = logging.getLogger(__name__)


def check_ready(line: list[Step]) -> None:
    """Refuse a source that cannot work, and an installation that lacks a package, before any stage starts.

    Raises SourceError.
    """
    for step in line:
        if missing := missing_extras(MODULES.get(step.stage, ())):
            raise SourceError(
                f"stage {step.stage} needs {' and '.join(MODULES[step.stage])}, which is not installed; "
                f"pip install 'compressor[{','.join(missing)}]'"
            )
        for what, source in step.sources.items():
            sources.check(source, what=what)


def check_recipe(config: BuildConfig, where: Where) -> None:
    """Refuse, before any stage starts, what would end one of them: see `shapes.check_recipe`; and small batches.

    Raises ModelError, and ConfigError for batches with fewer rows than processes.
    """
    shapes.check_recipe(config)
    sections: dict[str, Optimisation | None] = {
        "finetune": config.finetune,
        "adapt": config.adaptation,
        "general": config.general,
    }
    sections |= {f"distill.{number}": item for number, item in enumerate(config.distill)}
    for name, section in sections.items():
        if section is not None and section.batch_size < where.processes:
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

    What is finished stays whatever happens later. Raises CompressorError as the stages do, and ArtifactError if another
    build is at work in `run`.
    """
    line = steps(config, where)
    check_ready(line)
    check_recipe(config, where)
    refuse_foreign_run(run)
    todo = [item.step for item in plan(line, run, overwrite=overwrite) if item.reusable is None]
    for step in todo:
        for what, source in step.sources.items():
            sources.reach_hub(source, what=what)
    if todo and where.device == "cuda":  # PyTorch is needed to ask, and takes seconds to load
        resolve_device(where.device)
    _make_folder(run)
    done: dict[str, Artifact] = {}
    with artifact.alone(run, what=run):
        open_run(run, recipe, config, overwrite=overwrite)
        for number, step in enumerate(line, start=1):
            label = f"[{number}/{len(line)}] {step.name.partition('-')[2]}"
            parents = {role: done[name] for role, name in step.parents.items()}
            done[step.name] = _made(step, parents, run / step.name, label)
    return done


def run_step(step: Step, parents: Mapping[str, Path], out: Path) -> Artifact:
    """Run one stage on finished artifacts, given by role and path, unless `out` holds its result already.

    Raises ArtifactError also if one of them was made from another corpus, and CompressorError as the stage does.
    """
    check_ready([step])
    kinds = {"corpus": "examples", "start": "student", "general": "general-student", "masked_lm": "masked-lm"}
    opened = {role: Artifact.open(path, kind=kinds.get(role, role)) for role, path in parents.items()}
    _refuse_other_corpora(opened)
    return _made(step, opened, out, step.stage)


def _refuse_other_corpora(parents: Parents) -> None:
    """Raise ArtifactError if something was made from other rows than the corpus', which may be those held out there."""
    corpus = parents.get("corpus")
    for role, found in parents.items():
        made_from = found.manifest["parents"].get("corpus", {}).get("content")
        if made_from is None and role == "examples":  # they are a corpus themselves
            made_from = found.content
        if corpus is not None and made_from not in (None, corpus.content):
            raise ArtifactError(
                f"{found.path} belongs to another corpus than {corpus.path}, and may have learnt from its held-out "
                f"rows; give the corpus that it was made from, or make it again from this one"
            )


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
    artifacts = so_far(run)
    if len(artifacts) < len(_names(run)):
        raise ArtifactError(f"{run} holds no finished build; run `compressor build --out {run}` to the end")
    return artifacts


def so_far(run: Path) -> dict[str, Artifact]:
    """The artifacts of a build by step name, in order, up to the first stage that is not finished.

    Raises ArtifactError if `run` is no run folder.
    """
    artifacts = {}
    for name in _names(run):
        found = artifact.read(run / name)
        if found is None:
            break
        artifacts[name] = found
    return artifacts


def _names(run: Path) -> list[str]:
    """The steps of a build. Raises ArtifactError if `run` is no run folder."""
    try:
        facts = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
        config = BuildConfig.model_validate(facts["config"])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{run} holds no {RUN_FILE} of a build; give the run folder of one") from error
    # By the recipe, not by what lies there: an earlier recipe may have left other stages.
    return [step.name for step in steps(config, Where(repository=run))]


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
    _make_folder(run)
    marker = run / RUN_FILE
    try:
        if overwrite and marker.is_file():
            artifact.empty(run)
        facts = {"compressor": __version__, "recipe": recipe, "config": config.model_dump()}
        partial = run / f"{RUN_FILE}.new"
        partial.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        partial.replace(marker)
    except OSError as error:
        raise _unwritable(run, error) from error


def _make_folder(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run, error) from error


def _unwritable(run: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"cannot write --out {run}: {error.strerror}; free space or choose another folder")
