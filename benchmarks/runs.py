"""Opens the folder of a finished build."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.forms import Forms
from compressor import artifact
from compressor.artifact import RUN_FILE, Artifact
from compressor.config import BuildConfig
from compressor.dataset import task_of
from compressor.errors import ArtifactError
from compressor.evaluate import MODEL_FILE
from compressor.tasks import Task

REMEDY = "run `compressor build` to its end first"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The artifacts of one build, each made from the others here."""

    path: Path
    task: Task
    max_tokens: int
    """Longest input in tokens; longer texts are cut."""
    corpus: Artifact
    teacher: Artifact
    student: Artifact
    onnx: Artifact
    int8: Artifact
    publication: Artifact | None
    """None if the build was not published."""


def forms_of(run: Run) -> Forms:
    """Where each form of the run's classifier is."""
    from compressor.checkpoints import load_tokenizer

    return Forms(
        teacher=run.teacher.path.absolute(),
        student=run.student.path.absolute(),
        teacher_onnx=(run.onnx.path / "teacher" / MODEL_FILE).absolute(),
        student_onnx=(run.onnx.path / "student" / MODEL_FILE).absolute(),
        int8=run.int8.path.absolute(),
        labels=run.task.labels,
        is_pair=run.task.is_pair,
        max_tokens=run.max_tokens,
        pad_id=load_tokenizer(run.int8.path).pad_token_id,
    )


def read_config(path: Path) -> BuildConfig:
    """The recipe that the build in `path` was made with. Raises ArtifactError if it is no run folder."""
    try:
        facts = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        return BuildConfig.model_validate(facts["config"])
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot be read ({type(error).__name__})" if (path / RUN_FILE).exists() else "is missing"
        raise ArtifactError(f"--run {path} is no run folder: {path / RUN_FILE} {what}; {REMEDY}") from error


def open_run(path: Path) -> Run:
    """The build in `path`, every file checked against its hash.

    Raises ArtifactError if it is missing or unfinished, or if its stages come from different builds.
    """
    config = read_config(path)
    found = by_kind(path)
    corpus, teacher, student, onnx, int8 = (
        required(found, kind, path) for kind in ("examples", "teacher", "student", "onnx", "int8")
    )
    publication = found.get("publication")
    _check_parents(onnx, {"student": student, "teacher": teacher, "corpus": corpus})
    _check_parents(int8, {"onnx": onnx, "teacher": teacher, "corpus": corpus})
    if publication is not None:
        _check_parents(publication, {"int8": int8, "onnx": onnx})
    return Run(
        path=path,
        task=task_of(corpus),
        max_tokens=config.max_tokens,
        corpus=corpus,
        teacher=teacher,
        student=student,
        onnx=onnx,
        int8=int8,
        publication=publication,
    )


def by_kind(path: Path) -> dict[str, Artifact]:
    """The artifact of each kind: the first of the examples, which is the corpus, and the last of any other."""
    numbered = [folder for folder in path.iterdir() if folder.is_dir() and folder.name.partition("-")[0].isdigit()]
    found: dict[str, Artifact] = {}
    for folder in sorted(numbered, key=lambda folder: int(folder.name.partition("-")[0])):
        sealed = None if folder.suffix in (".partial", ".old") else artifact.read(folder)
        if sealed is not None:
            kind = sealed.manifest["kind"]
            if kind != "examples" or kind not in found:
                found[kind] = sealed
    return found


def required(found: dict[str, Artifact], kind: str, path: Path) -> Artifact:
    """The artifact of a kind, its files checked. Raises ArtifactError if the run in `path` has none."""
    if kind not in found:
        raise ArtifactError(f"--run {path} holds no finished artifact of kind {kind!r}; {REMEDY}")
    return Artifact.open(found[kind].path, kind=kind)


def _check_parents(child: Artifact, parents: dict[str, Artifact]) -> None:
    """Raise ArtifactError unless `child` was made from just these `parents`: figures of mixed builds mean nothing."""
    for role, parent in parents.items():
        if child.manifest["parents"][role]["content"] != parent.content:
            raise ArtifactError(f"{child.path} was not made from the {role} in {parent.path}; {REMEDY}")
