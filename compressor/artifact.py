"""A stage's result: a folder that is complete or absent, sealed by `manifest.json`.

A stage writes into `<out>.partial`, puts the manifest there last, and renames the folder. So a folder called `<out>`
is always whole; `kill -9` leaves at most the `.partial`, which the next run takes up or throws away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from compressor import machine
from compressor.errors import NO_DISK_ERRORS, ArtifactError, refused_write
from compressor.sources import file_hash
from compressor.world import World, group, refuse_together

MANIFEST = "manifest.json"
RUN_FILE = "run.json"  # in a run folder, beside the artifacts: the recipe that they are made by
BEGUN = "begun.json"
RESULT = "result.json"
CHECKPOINT = "checkpoint"  # folder for what a stage needs only until it is finished
LEADER = "leader"  # file, beside a checkpoint, by which processes on several machines see that they share a disk
SHARED_PATIENCE_S = 30.0  # network file systems show new files late
REPLACED = "replaced"  # where an older artifact of the same name goes until the new one is in its place
FORMAT = 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Artifact:
    """A finished stage."""

    path: Path
    """Its folder."""
    manifest: Mapping[str, Any]
    """What the stage recorded: kind, key, files, parents, section, metrics, seconds, peak memory, machine."""

    @classmethod
    def open(cls, path: Path, *, kind: str) -> Artifact:
        """The artifact in `path`, its files checked against their hashes.

        Raises ArtifactError if it is not sealed, of another kind, or damaged.
        """
        artifact = read(path)
        if artifact is None:
            raise ArtifactError(f"{path} has no {MANIFEST}: the stage did not finish there; run it again")
        if artifact.manifest["kind"] != kind:
            raise ArtifactError(f"{path} holds {artifact.manifest['kind']!r}; this needs an artifact of kind {kind!r}")
        for name, facts in artifact.manifest["files"].items():
            if not (path / name).is_file() or file_hash(path / name) != facts["sha256"]:
                raise ArtifactError(f"{path / name} is missing or was changed since it was made; run its stage again")
        return artifact

    def is_whole(self) -> bool:
        """Whether every file is there with its size; `open` looks at the bytes as well."""
        files = self.manifest["files"].items()
        paths = [(self.path / name, facts["size_bytes"]) for name, facts in files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    @property
    def metrics(self) -> dict[str, Any]:
        """What the stage measured."""
        return dict(self.manifest["metrics"])

    @property
    def content(self) -> str:
        """SHA-256 over the hashes of all files: what later stages were made from."""
        return str(self.manifest["content"])


def begun_key(partial: Path) -> str | None:
    """Key of the stage that was interrupted in a `.partial` folder, if any."""
    found = _begun(partial).get("key")
    return None if found is None else str(found)


def read(path: Path) -> Artifact | None:
    """The artifact in `path` without checking its files, or None if there is none.

    Raises ArtifactError if its manifest cannot be read, or is another tool's.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path / MANIFEST} cannot be read ({error}); delete {path} and run again") from error
    # Web pages and browser extensions have a manifest.json as well.
    if not isinstance(manifest, dict) or not {"kind", "key", "content", "files", "parents"} <= manifest.keys():
        raise ArtifactError(f"{path / MANIFEST} is not a manifest of this tool; choose another --out, or move it away")
    return Artifact(path, manifest)


def key(kind: str, section: Mapping[str, Any], parents: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """What decides whether a finished stage can be reused: its settings, parents' keys and sources' content."""
    parts = [FORMAT, kind, dict(section), dict(parents), dict(sources)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass
class Draft:
    """A stage's folder while it is being written."""

    path: Path
    """The `.partial` folder."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the stage measures; goes into the manifest."""
    peak_memory_gb: float = 0.0
    """Largest peak that processes started by the stage report."""
    world: World | None = None
    """The processes that write it together; None if it is one alone."""

    def take_result(self) -> None:
        """Move what `write_result` left in the folder into the metrics of every process."""
        result, told = self.path / RESULT, dict[str, Any]()
        if self.world is None or self.world.is_leader:
            told = json.loads(result.read_text(encoding="utf-8"))
            result.unlink()
        self.metrics.update(told if self.world is None else self.world.broadcast(told))
        self.peak_memory_gb = self.metrics.pop("peak_memory_gb")


@contextmanager
def write(
    out: Path,
    kind: str,
    *,
    key: str,
    section: Mapping[str, Any],
    parents: Mapping[str, Artifact],
    together: bool = False,
) -> Iterator[Draft]:
    """Write an artifact: yields the folder to fill, seals it and gives it its name on success.

    A `.partial` folder left by an interrupted run of the very same stage is kept, so that training can go on from its
    checkpoint; any other is thrown away. Raises ArtifactError if `out` is not ours, if another process is writing it,
    or if the disk refuses.

    `together`: every process that torchrun started may come here with the same arguments; the leader writes, and all
    leave when the artifact is whole. Raises ConfigError if there are several without it, and ArtifactError if they do
    not share a disk.
    """
    if not out.name:
        raise ArtifactError(f"{out} has no name of its own; choose another --out")
    if not together:
        refuse_together(f"the stage of {out.name}", "run this stage once, without torchrun")
    with group() as world:
        if world is None or world.is_leader:
            with _written(out, kind, key, section, parents, world) as draft:
                yield draft
        else:
            partial = _partial(out)
            _await_leader(partial, world)
            yield Draft(partial, world=world)
        if world is not None:
            world.barrier()


@contextmanager
def _written(
    out: Path,
    kind: str,
    key: str,
    section: Mapping[str, Any],
    parents: Mapping[str, Artifact],
    world: World | None,
) -> Iterator[Draft]:
    """`write` for the process that writes."""
    partial = _partial(out)
    try:
        refuse_foreign(out)
        partial.mkdir(parents=True, exist_ok=True)
        with alone(partial, what=out):
            _begin(partial, kind, key)
            if world is not None:
                _show_leader(partial, world)
            started, earlier_s = time.monotonic(), float(_begun(partial)["seconds"])
            machine.reset_peak_memory()
            draft = Draft(partial, world=world)
            try:
                yield draft
            finally:
                spent_s = earlier_s + time.monotonic() - started
                if partial.is_dir():
                    _note(partial, kind, key, seconds=spent_s)
            _seal(draft, out, kind=kind, key=key, section=section, parents=parents, seconds=spent_s)
    except (OSError, SafetensorError) as error:
        if refused := refused_write(error, partial):
            raise refused from error
        if isinstance(error, NO_DISK_ERRORS):
            raise
        if isinstance(error, FileNotFoundError) and error.errno is not None:  # of what is written, the folder is there
            where = error.filename or partial
            raise ArtifactError(
                f"{out} was not made: there is no {where}; run the stage that writes it again"
            ) from error
        raise ArtifactError(f"{out} was not made: {error}") from error


@contextmanager
def alone(folder: Path, *, what: Path) -> Iterator[None]:
    """Keep other processes from writing in a folder that is there; one that is killed keeps it no longer.

    Raises ArtifactError, which names `what` is written, if another process keeps it.
    """
    # The folder itself is locked: a file for that would be left lying about, and be another one for whoever waits.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(
                f"another compressor is writing {what}; wait for it, or choose another --out"
            ) from error
        except OSError:
            log.debug("%s is on a file system without locks", folder)  # as some network file systems are
        yield
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Delete what is in a folder; it stays itself, with its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _show_leader(partial: Path, world: World) -> None:
    """Leave a token where the other processes look for it."""
    token = uuid.uuid4().hex
    (partial / CHECKPOINT).mkdir(exist_ok=True)
    (partial / CHECKPOINT / LEADER).write_text(token, encoding="utf-8")
    world.broadcast(token)


def _await_leader(partial: Path, world: World) -> None:
    """Wait for the leader's token. Raises ArtifactError if it does not appear."""
    token, shown = world.broadcast(None), partial / CHECKPOINT / LEADER
    await_shown(partial, world, lambda: shown.is_file() and shown.read_text(encoding="utf-8") == token)


def await_shown(path: Path, world: World, is_shown: Callable[[], bool]) -> None:
    """Wait until this process sees what the leader wrote. Raises ArtifactError if it does not come to that."""
    until = time.monotonic() + SHARED_PATIENCE_S
    while not is_shown():
        if time.monotonic() > until:
            raise ArtifactError(
                f"process {world.rank} does not see {path} as process 0 wrote it; all machines must share the disk "
                "that --out is on"
            )
        time.sleep(0.1)


def write_result(folder: Path, metrics: Mapping[str, Any]) -> None:
    """Hand a stage's metrics from the process that measured them to the one that seals, with its peak memory."""
    text = json.dumps({**metrics, "peak_memory_gb": machine.peak_memory_gb()})
    (folder / RESULT).write_text(text, encoding="utf-8")


def refuse_foreign(out: Path) -> None:
    """Raise ArtifactError if `out` exists and is not an artifact."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and read(out) is None)):
        raise ArtifactError(f"{out} exists and is not an artifact of this tool; choose another --out, or move it away")


def _begin(partial: Path, kind: str, key: str) -> None:
    """Begin in the partial folder, or go on with what the same stage left there."""
    names = {path.name for path in partial.iterdir()}
    # A sealed .partial is one that was killed before it got its name; one without a note was killed at its birth.
    if not (BEGUN in names or names <= {BEGUN + ".new"} or read(partial) is not None):
        raise ArtifactError(f"{partial} exists and is not an unfinished artifact; move it away")
    if _begun(partial).get("key") == key:
        (partial / MANIFEST).unlink(missing_ok=True)  # killed between the manifest and the name
        return
    empty(partial)
    _note(partial, kind, key, seconds=0.0)


def _note(partial: Path, kind: str, key: str, *, seconds: float) -> None:
    """Say in the partial folder what it is and how long it has taken."""
    draft = partial / (BEGUN + ".new")
    draft.write_text(json.dumps({"kind": kind, "key": key, "seconds": seconds}), encoding="utf-8")
    draft.replace(partial / BEGUN)


def _begun(partial: Path) -> dict[str, Any]:
    """What `_note` wrote; nothing if it was not reached or did not get to the disk."""
    try:
        return dict(json.loads((partial / BEGUN).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def _seal(
    draft: Draft,
    out: Path,
    *,
    kind: str,
    key: str,
    section: Mapping[str, Any],
    parents: Mapping[str, Artifact],
    seconds: float,
) -> None:
    """Write the manifest last, then give the folder its name."""
    files = {}
    for path in sorted(draft.path.rglob("*")):
        name = path.relative_to(draft.path)
        if path.is_file() and name.parts[0] not in (BEGUN, CHECKPOINT):
            files[name.as_posix()] = {
                "sha256": file_hash(path),
                "size_bytes": path.stat().st_size,
            }
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "key": key,
        "content": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        "files": files,
        "parents": {
            name: {"key": parent.manifest["key"], "content": parent.content} for name, parent in parents.items()
        },
        "section": dict(section),
        "metrics": draft.metrics,
        "seconds": round(seconds, 1),
        "peak_memory_gb": round(max(machine.peak_memory_gb(), draft.peak_memory_gb), 2),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.fingerprint(),
        "versions": machine.versions(),
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    with (draft.path / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if out.exists():
        out.rename(draft.path / REPLACED)
    draft.path.rename(out)
    # Only now: killed before the rename, the stage goes on from its checkpoint.
    (out / BEGUN).unlink()
    for scaffold in (CHECKPOINT, REPLACED):
        shutil.rmtree(out / scaffold, ignore_errors=True)
