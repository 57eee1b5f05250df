"""Writes a model as a Triton repository, and says what a repository holds.

    <root>/
      sst2/           TEXT (and TEXT_PAIR) in -> LABEL, SCORE, PROBABILITIES, or VALUE of a regression;
                      opens the graph of the same version of sst2_student
      sst2_student/   token ids in -> logits; holds model.onnx
      sst2_teacher/   text in, like sst2, with a graph of its own; optional
      sst2_cascade/   text in, like sst2: asks sst2, and sst2_teacher where that one is unsure; optional

`versions` says what a model folder looks like inside.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from serving import versions
from serving.cascade import Cascade
from serving.errors import ModelError, RepositoryError
from serving.inprocess import Files
from serving.model import ServedModel
from serving.sources import Source, read_source
from serving.versions import MARKER, PARTIAL, Content, read_marker

if TYPE_CHECKING:
    from serving import triton

EXPECTED = "expected.json"
"""In the version folder of a model that takes texts: its warm-up texts, and what they were answered when published."""

_BATCH_ROWS = 8
"""Rows of the warm-up request that stands for a batch."""


def write(
    student: ServedModel, root: Path, *, teacher: ServedModel | None = None, cascade: Cascade | None = None
) -> tuple[Path, ...]:
    """Publish a student, a teacher to compare it with, and a cascade of both; return the served version folders.

    They come sorted by name: entry, cascade, student, teacher.
    The same content published again changes nothing; other content becomes the next version, and the older ones stay.
    The entry model and its student always carry the same number. Every folder appears by a rename, complete or not at
    all. Raises ModelError if a file cannot be served, and RepositoryError if a folder was not written by this function
    or the disk refuses; nothing half-written is left.
    """
    contents = _contents(student, teacher, cascade)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            _sweep(root)
            _refuse_foreign(root)
            for content in contents:
                _refuse_unmarked(root / content.name)
            return _publish(contents, root)
    except OSError as error:
        raise RepositoryError(
            f"cannot write the model repository {root}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; free space or choose a folder that can be written"
        ) from error


def read(root: Path) -> tuple[str, ...]:
    """Return the names of the models published in `root`, sorted.

    Raises RepositoryError if the folder is missing, empty, foreign or damaged.
    """
    remedy = "run `compressor build` or `compressor publish`"
    if not root.is_dir():
        raise RepositoryError(
            f"model repository {root} {'is no folder' if root.exists() else 'does not exist'}; {remedy}"
        )
    try:
        _refuse_foreign(root)
        markers = {path.name: marker for path in _folders(root) if (marker := read_marker(path))}
        if not markers:
            raise RepositoryError(f"model repository {root} holds no model that compressor published; {remedy}")
        faults = [fault for name in markers for fault in versions.faults(root / name)] + unpaired(root, markers)
    except OSError as error:
        raise RepositoryError(f"cannot read the model repository {root}: {error.strerror or error}") from error
    if faults:
        raise RepositoryError(f"model repository {root} is damaged: {'; '.join(faults)}; publish it again")
    return tuple(sorted(markers))


def rollback(root: Path, name: str) -> int:
    """Withdraw the newest version of a model, and return the older one that a server will serve from its next start.

    An entry model and its student go back together. The withdrawn version stays beside under another name, and its
    number is not used again. Raises RepositoryError if `name` is not such a model or has no older version.
    """
    marker = read_marker(root / name)
    if marker is None or marker["role"] == "student":
        raise RepositoryError(
            f"{root} holds no model {name!r} that can go back; `read` lists them, students follow theirs"
        )
    group = [root / name, *([root / marker["student"]] if "student" in marker else [])]
    try:
        with _locked(root):
            top = max(versions.newest(model) for model in group)
            common = set.intersection(*(set(versions.published(model)) for model in group))
            older = max((version for version in common if version < top), default=0)
            if not older:
                raise RepositoryError(f"{root / name} has no version before {top}; publish another one instead")
            for model in group:
                versions.withdraw(model, top, older)
            return older
    except OSError as error:
        raise RepositoryError(
            f"cannot roll {root / name} back: {error.strerror or error}; free space and try again"
        ) from error


def unpaired(root: Path, markers: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return each student without its entry model, and each pair whose versions differ, each as half a sentence."""
    pairs = {marker["student"]: name for name, marker in markers.items() if marker["role"] == "entry"}
    students = {name for name, marker in markers.items() if marker["role"] == "student"}
    found = [f"{name} has no entry model beside it" for name in sorted(students - set(pairs))]
    for student, entry in pairs.items():
        numbers = versions.newest(root / entry), versions.newest(root / student)
        if numbers[0] != numbers[1]:
            found.append(f"{entry} is at version {numbers[0]} but {student} at {numbers[1]}")
    return found


def _contents(student: ServedModel, teacher: ServedModel | None, cascade: Cascade | None) -> list[Content]:
    """Return what to publish, the entry model last: what it opens must be there before it."""
    runner_name, teacher_name = f"{student.name}_student", f"{student.name}_teacher"
    source = read_source(student)
    runner = _runner(student, source, runner_name)
    found = [runner]
    if teacher is not None:
        if teacher.name not in (student.name, teacher_name):
            raise ModelError(f"teacher is named {teacher.name!r}; beside {student.name} it must be {teacher_name!r}")
        if sorted(teacher.labels) != sorted(student.labels):
            raise ModelError(f"teacher answers {teacher.labels} but student {student.labels}; they cannot be compared")
        if teacher.pair != student.pair:
            raise ModelError(f"teacher has pair {teacher.pair} but student {student.pair}; they cannot be compared")
        found.append(_teacher(teacher, read_source(teacher), teacher_name))
    found.append(_entry(student, source, runner))
    if cascade is not None:
        if teacher is None or not student.labels:
            raise ModelError(f"{student.name} can have no cascade: that takes a teacher, and labels to be sure of")
        found.append(_cascade(student, teacher, teacher_name, cascade))
    return found


def _cascade(student: ServedModel, teacher: ServedModel, teacher_name: str, cascade: Cascade) -> Content:
    from serving import triton

    config = triton.cascade_config(student, teacher, teacher_name=teacher_name, threshold=cascade.threshold)
    facts = json.dumps(asdict(cascade), indent=1).encode()
    return Content(
        name=config.name,
        marker={"role": "cascade"},
        files=_files(student, triton.to_text(config), "cascade.py") | {"cascade.json": facts},
        warmup={},
    )


def _entry(model: ServedModel, source: Source, runner: Content) -> Content:
    from serving import triton

    warmup, requests = _text_warmups(model)
    config = triton.entry_config(model, student=runner.name, pad_id=source.pad_id, warmups=requests)
    return Content(
        name=model.name,
        marker={"role": "entry", "student": runner.name},
        files=_text_files(model, triton.to_text(config), source),
        warmup=warmup,
        depends_on=runner.digest,
    )


def _teacher(model: ServedModel, source: Source, name: str) -> Content:
    from serving import triton

    warmup, requests = _text_warmups(model)
    config = triton.teacher_config(model, name=name, pad_id=source.pad_id, warmups=requests)
    return Content(
        name=name,
        marker={"role": "teacher"},
        files=_text_files(model, triton.to_text(config), source) | {"model.onnx": model.onnx},
        warmup=warmup,
    )


def _runner(model: ServedModel, source: Source, name: str) -> Content:
    import numpy as np

    from serving import triton

    warmup: dict[str, bytes] = {}
    requests = []
    for number, (ids, type_ids) in enumerate(source.warmups):
        tensors = {
            "input_ids": np.array(ids),
            "attention_mask": np.ones(len(ids)),
            "token_type_ids": np.array(type_ids),
        }
        inputs = {}
        for tensor in source.inputs:
            raw = tensors[tensor].astype("<i8").tobytes()
            inputs[tensor] = (_file_name(raw), (len(ids),))
            warmup[_file_name(raw)] = raw
        requests.append(triton.Warmup(name=f"text{number}", batch_size=1, inputs=inputs))
    config = triton.runner_config(model, name=name, inputs=source.inputs, warmups=requests)
    return Content(
        name=name,
        marker={"role": "student"},
        files=_files(model, triton.to_text(config), "runner.py") | {"model.onnx": model.onnx},
        warmup=warmup,
    )


def _text_warmups(model: ServedModel) -> "tuple[dict[str, bytes], list[triton.Warmup]]":
    """Return the warm-up files by name, and the requests: each text or pair alone, and the longest as a batch."""
    from serving import triton

    examples = [
        [triton.text_bytes(part) for part in (text if isinstance(text, tuple) else (text,))]
        for text in model.warmup_texts
    ]
    named = [(f"text{number}", 1, raws) for number, raws in enumerate(examples)]
    rows = min(_BATCH_ROWS, model.max_batch_size)
    if examples and rows > 1:
        named.append(("batch", rows, max(examples, key=lambda raws: sum(map(len, raws)))))
    requests = [
        triton.Warmup(
            name=name,
            batch_size=size,
            # A single text fills the first input alone.
            inputs={tensor: (_file_name(raw), (1,)) for tensor, raw in zip(triton.TEXTS, raws, strict=False)},
        )
        for name, size, raws in named
    ]
    return {_file_name(raw): raw for raws in examples for raw in raws}, requests


def files_of(model: ServedModel, *, pad_id: int | None = None) -> Files:
    """Return what answers as a model will, before it is published; `pad_id` is read from its tokenizer if not given."""
    return Files(
        onnx=model.onnx,
        tokenizer=model.tokenizer,
        labels=model.labels,
        is_pair=model.pair,
        max_tokens=model.max_tokens,
        pad_id=read_source(model).pad_id if pad_id is None else pad_id,
    )


def _text_files(model: ServedModel, config: str, source: Source) -> dict[str, Path | bytes]:
    """Return what a model that takes texts needs, and what it must answer: whoever deploys it asks for that first."""
    numbers = files_of(model, pad_id=source.pad_id).answers(model.warmup_texts)
    rows = [{"text": text, "answer": answer} for text, answer in zip(model.warmup_texts, numbers, strict=True)]
    expected = json.dumps(rows, ensure_ascii=False, indent=1).encode()
    return _files(model, config, "model.py") | {"tokenizer.json": model.tokenizer, EXPECTED: expected}


def _files(model: ServedModel, config: str, module: str) -> dict[str, Path | bytes]:
    code = resources.files("serving.entry").joinpath(module).read_bytes()
    labels = "".join(f"{label}\n" for label in model.labels).encode()
    return {"model.py": code, **({"labels.txt": labels} if labels else {}), "config.pbtxt": config.encode()}


def _file_name(raw: bytes) -> str:
    return f"{hashlib.sha256(raw).hexdigest()[:16]}.bin"


def _publish(contents: list[Content], root: Path) -> tuple[Path, ...]:
    """Stage everything first, so that a full disk changes nothing, then rename."""
    numbers = _numbers(contents, root)
    staged: dict[str, Path] = {}
    try:
        for content in contents:
            if not versions.holds(root / content.name, numbers[content.name], content):
                staged[content.name] = versions.stage(content, numbers[content.name], root / content.name)
        for content in contents:
            if content.name in staged:
                versions.commit(staged[content.name], numbers[content.name], root / content.name)
            versions.refresh(content, root / content.name)
    except BaseException:
        for folder in staged.values():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    entry_first = sorted(contents, key=lambda content: content.name)
    return tuple(root / content.name / str(numbers[content.name]) for content in entry_first)


def _numbers(contents: list[Content], root: Path) -> dict[str, int]:
    """Return the version number of each model: the newest one if its content is this, otherwise the next."""
    numbers: dict[str, int] = {}
    pair = [content for content in contents if content.marker["role"] in ("entry", "student")]
    for group in (pair, *([content] for content in contents if content not in pair)):
        top = max((versions.newest(root / content.name) for content in group), default=0)
        # A member that lacks the newest version is what an interrupted run leaves: it is completed, not superseded.
        same = all(
            versions.holds(root / content.name, top, content) or not (root / content.name / str(top)).exists()
            for content in group
        )
        used = max((versions.last_used(root / content.name) for content in group), default=0)
        numbers |= {content.name: top if top and same else used + 1 for content in group}
    return numbers


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the folder against a second writer; the kernel lets go when this process ends, however it ends."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(root: Path) -> None:
    """Remove what an interrupted run left; the lock says that no other run is at work."""
    ours = [path for path in _folders(root) if read_marker(path)]
    for folder in (root, *ours):
        for path in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _refuse_foreign(root: Path) -> None:
    """Raise RepositoryError if the folder holds something that Triton would stop at."""
    for path in _folders(root):
        if path.name.startswith(PARTIAL):
            raise RepositoryError(f"{path} was left by an interrupted run; publish again, that removes it")
        if not read_marker(path) and not (path / "config.pbtxt").is_file():
            raise RepositoryError(
                f"{root} holds the folder {path.name!r}, which is no model, so Triton cannot serve it; "
                "choose a folder of its own for the model repository (`compressor publish`), or move that one"
            )


def refuse_foreign(root: Path, name: str) -> None:
    """Raise RepositoryError if `write` would refuse to publish model `name` into `root`: to be asked before work."""
    if root.exists() and not root.is_dir():
        raise RepositoryError(f"{root} is a file; a model repository is a folder; choose another")
    for model in (root / name, *(root / f"{name}_{part}" for part in ("student", "teacher", "cascade"))):
        _refuse_unmarked(model)


def _refuse_unmarked(model: Path) -> None:
    if model.exists() and not read_marker(model):
        raise RepositoryError(
            f"{model} was not written by compressor ({MARKER} is missing) and is left as it is; "
            "move it, or publish elsewhere"
        )


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())
