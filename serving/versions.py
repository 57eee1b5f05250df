"""One version of one published model: what it holds, how it is written, how it is checked.

<model>/                     marked as ours by .compressor.json
  config.pbtxt  labels.txt  configs/
                             copies of the newest version's, where Triton looks for them; a regression has no labels,
                             and other configurations are there for GPUs alone
  warmup/<sha>.bin           named by content, so a new version never changes what an older one uses
  <version>/                 immutable once renamed into place: files, config.pbtxt, labels.txt, manifest.json
  waiting-<version>/         the same, until `deploy` makes it a version: Triton does not look at it
  withdrawn-<version>/       was a version before it was rolled back
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from serving.errors import RepositoryError

MARKER = ".compressor.json"
"""The file that says that a model folder was written by `repository.write`."""

PARTIAL = ".partial-"
"""Temporary names begin with this; whoever publishes next removes what an interrupted run left."""

_MANIFEST = "manifest.json"
WITHDRAWN = "withdrawn-"
"""A version that was rolled back is named by this and its number."""

WAITING = "waiting-"
"""A version that no server serves before it is deployed is named by this and its number."""

CONFIGS = "configs"
"""Folder of the configurations that a server can be told to take instead of `config.pbtxt`."""

_SHARED = ("labels.txt", f"{CONFIGS}/gpu.pbtxt", f"{CONFIGS}/tensorrt.pbtxt", "config.pbtxt")


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one version of a model holds."""

    name: str
    """The model, and its folder."""

    marker: Mapping[str, str]
    """What the model's marker file says."""

    files: Mapping[str, Path | bytes]
    """File in the version folder, relative to it -> where it is copied from, or its bytes."""

    warmup: Mapping[str, bytes]
    """File name in the model's warm-up folder -> its bytes."""

    depends_on: str = ""
    """Digest of the version of another model that this one opens; "" if it opens none."""

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file in `files` and `warmup`."""
        return {name: sha256(source) for name, source in {**self.files, **self.warmup}.items()}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files, and over what they depend on."""
        return digest_of(self.hashes, self.depends_on)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a version folder says of itself; written last."""

    digest: str
    """The digest of its content."""

    files: dict[str, int]
    """Size in bytes of each file in the version folder."""

    warmup: dict[str, int]
    """Size in bytes of each warm-up file that it needs."""


def published(model: Path) -> list[int]:
    """Return the versions in a model folder that Triton may serve, oldest first."""
    # A name that begins with 0 is no version to Triton.
    return sorted(int(name) for name in _folder_names(model) if name.isascii() and name.isdigit() and name[0] != "0")


def newest(model: Path) -> int:
    """Return the newest version in a model folder; 0 if there is none."""
    return max(published(model), default=0)


def waiting(model: Path) -> int:
    """Return the newest version in a model folder that waits to be deployed; 0 if there is none."""
    return max(all_waiting(model), default=0)


def all_waiting(model: Path) -> list[int]:
    """Return the versions in a model folder that wait to be deployed."""
    return _named(model, WAITING)


def last_used(model: Path) -> int:
    """Return the highest number that a version in a model folder ever had, withdrawn ones included; 0 if none."""
    return max([newest(model), *_named(model, WITHDRAWN), *all_waiting(model)])


def place(model: Path, version: int, *, prefix: str = WAITING) -> Path:
    """Return the folder of a version, which may be waiting, or have the name that `prefix` begins."""
    live, held = model / str(version), model / f"{prefix}{version}"
    return held if held.is_dir() and not live.exists() else live


def promote(models: Sequence[Path], version: int, *, prefix: str = WAITING) -> None:
    """Make a version of models that change together one that Triton serves from its next load.

    It may have the name that `prefix` begins, or not; the shared files become those of it. `models` begins with those
    that the others open. Raises RepositoryError if one of them has no such version; then, and when the disk is full,
    nothing is changed.
    """
    folders = {model: place(model, version, prefix=prefix) for model in models}
    for model, folder in folders.items():
        if not folder.is_dir():
            raise RepositoryError(f"{model} has no version {version} any more; publish it again")
    with contextlib.ExitStack() as stack:
        puts = [stack.enter_context(_staged_files(model, _shared(folder))) for model, folder in folders.items()]
        for (model, folder), put in zip(folders.items(), puts, strict=True):
            _rename(folder, model / str(version))
            put()


def forget_waiting(model: Path, *, but: int) -> None:
    """Remove the versions that wait, apart from number `but`: whoever publishes another wants that one."""
    for number in all_waiting(model):
        if number != but:
            shutil.rmtree(model / f"{WAITING}{number}")


def _named(model: Path, prefix: str) -> list[int]:
    numbers = [name.removeprefix(prefix) for name in _folder_names(model) if name.startswith(prefix)]
    return [int(number) for number in numbers if number.isdigit()]


def withdraw(models: Sequence[Path], version: int, older: int, *, prefix: str = WITHDRAWN) -> None:
    """Put a version of models that change together aside; where it does not wait, the shared files become `older`'s.

    `prefix` is that of its new name, which Triton does not serve. `models` is as for `promote`. Raises RepositoryError
    if `older` has no configuration; then, and when the disk is full, nothing is changed.
    """
    with contextlib.ExitStack() as stack:
        puts = [
            stack.enter_context(_staged_files(model, _shared(model / str(older))))
            for model in models
            if (model / str(version)).is_dir()
        ]
        # The shared files come first: a second call completes what a killed one began.
        for put in puts:
            put()
        for model in reversed(models):
            if place(model, version).is_dir():
                _rename(place(model, version), model / f"{prefix}{version}")


def _rename(folder: Path, target: Path) -> None:
    if folder != target:
        folder.rename(target)
        _sync(target.parent)


def _shared(version: Path) -> dict[Path, bytes]:
    """Return the files of a version that its model's folder holds as well, without bytes where it has none.

    Raises RepositoryError if it has no configuration, without which the model could not be served at all.
    """
    if not (version / "config.pbtxt").is_file():
        raise RepositoryError(f"{version} has no config.pbtxt; publish it again")
    return {Path(name): _bytes(version / name) for name in _SHARED}


def holds(model: Path, version: int, content: Content) -> bool:
    """Say whether a version is published, or waits, undamaged, with exactly this content."""
    folder = place(model, version)
    manifest = read_manifest(folder)
    if manifest is None or manifest.digest != content.digest:
        return False
    paths = {file: folder / file for file in content.files}
    paths |= {file: model / "warmup" / file for file in content.warmup}
    return all(path.is_file() and sha256(path) == content.hashes[file] for file, path in paths.items())


def is_as_published(model: Path, version: int) -> bool:
    """Say whether every file of a published version still has the bytes that its manifest's digest was made of."""
    folder = place(model, version)
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    paths = {name: folder / name for name in manifest.files}
    paths |= {name: model / "warmup" / name for name in manifest.warmup}
    if not all(path.is_file() for path in paths.values()):
        return False
    student = (read_marker(model) or {}).get("student")
    opened = read_manifest(place(model.parent / student, version)) if student else None
    if student and opened is None:
        return False
    hashes = {name: sha256(path) for name, path in paths.items()}
    return manifest.digest == digest_of(hashes, opened.digest if opened else "")


def read_manifest(version: Path) -> Manifest | None:
    """Return the manifest of a version folder; None if it has none that can be read."""
    try:
        return Manifest(**json.loads((version / _MANIFEST).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def faults(model: Path) -> list[str]:
    """Return what is wrong with the newest version of a model folder of ours, each as half a sentence."""
    version = newest(model)
    if not version:
        return [f"{model} has no version"]
    stale = [name for name in _SHARED if _bytes(model / name) != _bytes(model / str(version) / name)]
    return damage(model, version) + [f"{model / name} is not the one of version {version}" for name in stale]


def damage(model: Path, version: int) -> list[str]:
    """Return which files of a version are not of the size that they had, each as half a sentence."""
    folder = place(model, version)
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{folder} has no {_MANIFEST}"]
    sizes = {folder / name: size for name, size in manifest.files.items()}
    sizes |= {model / "warmup" / name: size for name, size in manifest.warmup.items()}
    found = [f"{path} is missing" for path in sizes if not path.is_file()]
    return found + [
        f"{path} has {path.stat().st_size} bytes instead of {size}"
        for path, size in sizes.items()
        if path.is_file() and path.stat().st_size != size
    ]


def read_marker(model: Path) -> dict[str, str] | None:
    """Return what the marker of a model folder says; None if the folder is not ours."""
    try:
        found = json.loads((model / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "role" in found else None


def stage(content: Content, version: int, model: Path) -> Path:
    """Write a version under a temporary name beside its final place, and return the folder to `commit`.

    A model that is new is staged whole. The caller removes the folder if a later step fails.
    """
    new = not model.exists()
    temporary = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{content.name}-", dir=model.parent if new else model))
    temporary.chmod(0o755)
    try:
        if new:
            folder = temporary / str(version)
            folder.mkdir()
            _write_shared(content, temporary)
        else:
            folder = temporary
        for name, source in content.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            _write(source, folder / name)
        manifest = Manifest(
            digest=content.digest,
            files={name: (folder / name).stat().st_size for name in content.files},
            warmup={name: len(raw) for name, raw in content.warmup.items()},
        )
        _write(json.dumps(asdict(manifest), indent=1).encode(), folder / _MANIFEST)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return temporary


def commit(temporary: Path, name: str, model: Path) -> None:
    """Give a staged folder its final name in one step."""
    temporary.rename(model if temporary.parent == model.parent else model / name)
    _sync(temporary.parent)


def refresh(content: Content, model: Path, *, live: bool) -> None:
    """Make the files that all versions of a model share those of `content`; the config comes last.

    Of one that is not live only the warm-up files are written, which no other version has under the same names.
    """
    if live:
        _write_shared(content, model)
    else:
        _write_warmups(content, model)


def _write_warmups(content: Content, model: Path) -> None:
    (model / "warmup").mkdir(exist_ok=True)
    write_files(model, {Path("warmup") / name: raw for name, raw in content.warmup.items()})


def _write_shared(content: Content, model: Path) -> None:
    _write_warmups(content, model)
    wanted = {Path(name): _bytes(content.files.get(name, b"")) for name in _SHARED}
    wanted[Path(MARKER)] = json.dumps(content.marker, indent=1).encode()
    write_files(model, wanted)


def write_files(model: Path, wanted: Mapping[Path, bytes]) -> None:
    """Replace the files of a folder that differ, each in one step; one that shall have no bytes goes."""
    with _staged_files(model, wanted) as put:
        put()


@contextlib.contextmanager
def _staged_files(model: Path, wanted: Mapping[Path, bytes]) -> Iterator[Callable[[], None]]:
    """Write files of a model folder under temporary names; yield what puts them in their places, in order."""
    staged: dict[Path, Path | None] = {}

    def put() -> None:
        for name, temporary in staged.items():
            if temporary is None:
                (model / name).unlink()
            else:
                temporary.rename(model / name)
        for folder in {(model / name).parent for name in staged}:
            _sync(folder)

    try:
        for name, raw in wanted.items():
            if _bytes(model / name) == raw:
                continue
            staged[name] = None
            if raw:
                (model / name).parent.mkdir(exist_ok=True)
                # It is in the model's folder: Triton takes every file in `warmup` for what it says it is.
                descriptor, temporary = tempfile.mkstemp(prefix=PARTIAL, dir=model)
                os.close(descriptor)
                staged[name] = Path(temporary)
                _write(raw, Path(temporary))
                Path(temporary).chmod(0o644)
        yield put
    finally:
        for partial in staged.values():
            if partial is not None:
                partial.unlink(missing_ok=True)


def _write(source: Path | bytes, target: Path) -> None:
    """Write a file through to the disk: a rename must never become durable before what it names."""
    if isinstance(source, bytes):
        target.write_bytes(source)
    else:
        shutil.copyfile(source, target)
    _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_names(model: Path) -> list[str]:
    return [entry.name for entry in model.iterdir() if entry.is_dir()] if model.is_dir() else []


def _bytes(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    return source.read_bytes() if source.is_file() else b""


def digest_of(hashes: Mapping[str, str], depends_on: str) -> str:
    """Return the digest of a version: of its files' SHA-256 by name, and of the digest of what it opens."""
    return hashlib.sha256(json.dumps([hashes, depends_on], sort_keys=True).encode()).hexdigest()


def sha256(source: Path | bytes) -> str:
    """Return the SHA-256 of a file, or of bytes."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
