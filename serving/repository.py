"""Writes a model as a Triton repository, and says what a repository holds.

    <root>/
      sst2/           TEXT (and TEXT_PAIR) in -> LABEL, SCORE, PROBABILITIES, or VALUE of a regression;
                      opens the graph of the same version of sst2_student, or asks that model (runtime onnxruntime)
      sst2_student/   token ids in -> logits; holds model.onnx
      sst2_teacher/   text in, like sst2, with a graph of its own; optional
      sst2_teacher_graph/   that graph, like sst2_student; with the runtime onnxruntime only
      sst2_cascade/   text in, like sst2: asks sst2, and sst2_teacher where that one is unsure; optional

`versions` says what a model folder looks like inside.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving import versions
from serving.cascade import Cascade
from serving.contents import contents_of
from serving.control import SERVED, is_served
from serving.errors import RepositoryError
from serving.model import Runtime, ServedModel
from serving.versions import MARKER, PARTIAL, Content, read_marker

NOTE = ".compressor-deploying.json"
"""File in a repository while a version of it is being made live, or withdrawn: what is to be undone after a kill."""

_SETTLE_S = 5.0
_POLL_S = 0.05

log = logging.getLogger(__name__)


def write(
    student: ServedModel, root: Path, *, teacher: ServedModel | None = None, cascade: Cascade | None = None
) -> tuple[Path, ...]:
    """Publish a student, a teacher to compare it with, and a cascade of both; return the version folders, by name.

    The same content published again changes nothing; other content becomes the next version, and the older ones stay.
    While a server that `TritonServer` started serves the repository, the next version of a model waits for
    `operations.deploy`: should the server start again before, it goes on with the version that was live.
    The entry model and its student always carry the same number. Every folder appears by a rename, complete or not at
    all. Raises ModelError if a file cannot be served, and RepositoryError if a folder was not written by this function
    or the disk refuses; nothing half-written is left.
    """
    contents = contents_of(student, teacher, cascade)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            _sweep(root)
            _refuse_foreign(root)
            for content in contents:
                _refuse_unfit(root / content.name, student.runtime)
            written = _publish(contents, root, hold=is_served(root))
            # By whoever can write here: the user of a server may only be able to read, and so to lock, what is there.
            if not (root / SERVED).exists():
                (root / SERVED).touch()
            return written
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
    number is not used again. Raises RepositoryError if `name` is not such a model, or has no older version, or if that
    one is damaged.
    """
    models = [root / member for member in group(root, name)]
    with locked(root, f"roll {root / name} back"):
        return go_back(models)


def group(root: Path, name: str) -> list[str]:
    """Return the models that change together with one that takes texts, each after those that it opens.

    Raises RepositoryError if `name` is no such model.
    """
    marker = read_marker(root / name)
    if marker is None or marker["role"] == "student":
        raise RepositoryError(
            f"{root} holds no model {name!r} that takes texts and can be deployed or go back; "
            "`compressor status` lists them, students follow theirs"
        )
    return [*([marker["student"]] if "student" in marker else []), name]


def go_back(models: Sequence[Path]) -> int:
    """Do what `rollback` does; whoever calls it has the folder `locked`. `models` are those of one `group`."""
    top, older = way_back(models)
    versions.withdraw(models, top, older)
    return older


def way_back(models: Sequence[Path]) -> tuple[int, int]:
    """Return the newest version of a group, and the one to go back to; raise RepositoryError as `rollback` does."""
    name, top = models[-1], max(versions.newest(model) for model in models)
    older = before(models, top)
    if not older:
        raise RepositoryError(f"{name} has no version before {top}; publish another one instead")
    if faults := damage(models, older):
        raise RepositoryError(
            f"{name} cannot go back from version {top} to {older}, which has faults: {'; '.join(faults)}; "
            "publish another one instead"
        )
    return top, older


def before(models: Sequence[Path], version: int) -> int:
    """Return the newest version before one that all of a group have; 0 if there is none."""
    common = set.intersection(*(set(versions.published(model)) for model in models))
    return max((older for older in common if older < version), default=0)


def damage(models: Sequence[Path], version: int) -> list[str]:
    """Return what is not as it was published in a version of a group, waiting or not, each as half a sentence."""
    return [fault for model in models for fault in versions.damage(model, version)] + [
        f"a checksum of {model.name} differs" for model in models if not versions.is_as_published(model, version)
    ]


def unpaired(root: Path, markers: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return each student without its entry model, and each pair whose versions differ, each as half a sentence."""
    pairs = {marker["student"]: name for name, marker in markers.items() if "student" in marker}
    students = {name for name, marker in markers.items() if marker["role"] == "student"}
    found = [f"{name} has no entry model beside it" for name in sorted(students - set(pairs))]
    for student, entry in pairs.items():
        numbers = versions.newest(root / entry), versions.newest(root / student)
        if numbers[0] != numbers[1]:
            found.append(f"{entry} is at version {numbers[0]} but {student} at {numbers[1]}")
    return found


def settle(root: Path) -> None:
    """Put a repository right again, before a server reads it, where a deploy or a rollback was killed in the middle.

    One that lives, and has found its server dead, is waited for: for `_SETTLE_S` seconds at most. Raises
    RepositoryError if the disk refuses.
    """
    if not root.is_dir():
        return
    try:
        with _locked(root, timeout_s=_SETTLE_S):
            pass
    except TimeoutError:
        log.warning("somebody has been changing %s for %g s; a server reads it as it is now", root, _SETTLE_S)
    except OSError as error:
        raise RepositoryError(
            f"cannot undo in {root} what a killed deploy began: {error.strerror or error}; free space and try again"
        ) from error


def leave_note(models: Sequence[Path], version: int, older: int, prefix: str) -> None:
    """Say on the disk that a change of a group is under way, until `remove_note`.

    Whoever next takes the repository undoes it, should this process be killed: the version is withdrawn with `prefix`
    for `older`, or, if that is 0, promoted from it.
    """
    facts = {"models": [model.name for model in models], "version": version, "older": older, "prefix": prefix}
    versions.write_files(models[0].parent, {Path(NOTE): json.dumps(facts).encode()})


def remove_note(root: Path) -> None:
    """Say that nothing is to be undone any more."""
    versions.write_files(root, {Path(NOTE): b""})


def _mend(root: Path) -> None:
    """Undo what a killed process has left a note of; the lock says that it is gone."""
    try:
        note = json.loads((root / NOTE).read_text("utf-8"))
    except FileNotFoundError:
        return
    models, version, older = [root / name for name in note["models"]], note["version"], note["older"]
    try:
        if older:
            versions.withdraw(models, version, older, prefix=note["prefix"])
        else:
            versions.promote(models, version, prefix=note["prefix"])
        fate = f"it is at version {older or version} again"
    except RepositoryError as error:
        fate = f"nothing can be undone: {error}"  # somebody has removed a version since
    remove_note(root)
    log.warning("a change of %s was killed in the middle; on the disk %s", models[-1], fate)


def _publish(contents: list[Content], root: Path, *, hold: bool) -> tuple[Path, ...]:
    """Stage everything first, so that a full disk changes nothing, then rename."""
    numbers = _numbers(contents, root)
    held = {content.name for group in _groups(contents) if hold and _is_new(group, root, numbers) for content in group}
    staged: dict[str, Path] = {}
    try:
        for content in contents:
            if not versions.holds(root / content.name, numbers[content.name], content):
                staged[content.name] = versions.stage(content, numbers[content.name], root / content.name)
        for content in contents:
            name, model = content.name, root / content.name
            if name in staged:
                prefix = versions.WAITING if name in held else ""
                versions.commit(staged[name], f"{prefix}{numbers[name]}", model)
            elif name not in held:
                versions.promote([model], numbers[name])
            versions.refresh(content, model, live=name not in held)
            versions.forget_waiting(model, but=numbers[name])
    except BaseException:
        for folder in staged.values():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return tuple(versions.place(root / name, numbers[name]) for name in sorted(numbers))


def _groups(contents: list[Content]) -> list[list[Content]]:
    """Return the models that have the same number: one that takes texts and the one that holds its graph, or one."""
    named = {content.name: content for content in contents}
    pairs = [[named[c.marker["student"]], c] for c in contents if "student" in c.marker]
    return pairs + [[content] for content in contents if not any(content in pair for pair in pairs)]


def _is_new(group: list[Content], root: Path, numbers: Mapping[str, int]) -> bool:
    """Say whether each model of a group has a version that is served, and will have a later one."""
    return all(0 < versions.newest(root / content.name) < numbers[content.name] for content in group)


def _numbers(contents: list[Content], root: Path) -> dict[str, int]:
    """Return the version of each model: the newest or the waiting one if its content is this, otherwise the next."""
    numbers: dict[str, int] = {}
    for group in _groups(contents):
        models = [(root / content.name, content) for content in group]
        top = max(versions.newest(model) for model, _ in models)
        waiting = max(versions.waiting(model) for model, _ in models)
        # A member that lacks a version is what an interrupted run leaves: it is completed, not superseded.
        same = [
            number
            for number in (top, waiting)
            if number
            and all(
                versions.holds(model, number, content) or not versions.place(model, number).exists()
                for model, content in models
            )
        ]
        used = max(versions.last_used(model) for model, _ in models)
        numbers |= {content.name: same[0] if same else used + 1 for content in group}
    return numbers


@contextmanager
def locked(root: Path, doing: str) -> Iterator[None]:
    """Hold a repository against every other writer, which waits; raise RepositoryError if the disk refuses.

    `doing` completes its sentence: cannot ...
    """
    try:
        with _locked(root):
            yield
    except OSError as error:
        raise RepositoryError(f"cannot {doing}: {error.strerror or error}; free space and try again") from error


@contextmanager
def _locked(root: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the folder against a second writer; the kernel lets go when this process ends, however it ends.

    Raises TimeoutError if another one holds it for longer than `timeout_s`.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _lock(descriptor, timeout_s)
        _mend(root)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, timeout_s: float | None) -> None:
    if timeout_s is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError from None
        time.sleep(_POLL_S)


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


def refuse_foreign(root: Path, name: str, runtime: Runtime = "embedded") -> None:
    """Raise RepositoryError if `write` would refuse to publish model `name` into `root`: to be asked before work."""
    if root.exists() and not root.is_dir():
        raise RepositoryError(f"{root} is a file; a model repository is a folder; choose another")
    for model in (root / name, *(root / f"{name}_{part}" for part in ("student", "teacher", "cascade"))):
        _refuse_unfit(model, runtime)


def _refuse_unfit(model: Path, runtime: Runtime) -> None:
    marker = read_marker(model)
    if marker and marker.get("runtime", "embedded") != runtime:
        raise RepositoryError(
            f"{model} was published for the runtime {marker.get('runtime', 'embedded')} and is now to be {runtime}, "
            "which another server serves; publish into another folder"
        )
    if model.exists() and not marker:
        raise RepositoryError(
            f"{model} was not written by compressor ({MARKER} is missing) and is left as it is; "
            "move it, or publish elsewhere"
        )


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())
