"""Replaces the version that a running server answers with, without a request that fails, and goes back."""

import contextlib
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import repository, triton, versions
from serving.client import Client
from serving.control import Control
from serving.errors import RepositoryError, ServingError, SmokeError
from serving.online import numbers_of, stored_answers
from serving.verify import CONFIG, verify
from serving.versions import read_marker

SMOKE_BOUND = 0.05
"""Largest difference of a probability, or of a number in units of 1: other processors round INT8 otherwise."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """What became of a model on a server."""

    model: str
    before: int
    """The version that was live; 0 if none was."""
    after: int
    """The version that is live."""
    smoked: int
    """Stored texts that were asked before."""


def deploy(control: Control, model: str) -> Change:
    """Make a server answer with the newest published version of a model that takes texts.

    The version is loaded beside under another name and asked its stored texts first; the old one answers meanwhile, and
    stays published. Only then does the version get a name that a server loads. Raises SmokeError, RequestError or
    RepositoryError if the new version is not fit; then the old one goes on, and the new one is withdrawn.
    """
    root = Path(control.repository)
    group = _group(root, model)
    waiting, before = versions.waiting(root / model), control.live(model)
    version = _published(root / model)
    if before == version:
        return Change(model, before, version, 0)
    try:
        faults = [fault for name in group for fault in versions.damage(root / name, version)]
        faults += [
            f"a checksum of {name} differs" for name in group if not versions.is_as_published(root / name, version)
        ]
        _refuse(model, version, faults)
        with _beside(control, root / model, version) as trial:
            smoked = _smoke(control, trial, root / model, version)
        for name in group:
            versions.promote(root / name, version)
        waiting = 0
        _refuse(model, version, [" ".join(finding) for finding in verify(root) if finding.model in group])
    except (ServingError, OSError) as error:
        if waiting:
            for name in reversed(group):
                versions.discard(root / name, version)
        elif before:
            repository.rollback(root, model)
        if before:
            log.warning("version %d of %s is withdrawn; version %d goes on", version, model, before)
        raise error
    for name in group:
        control.load(name)
    _check_live(control, model, version)
    return Change(model, before, version, smoked)


def _refuse(model: str, version: int, faults: list[str]) -> None:
    if faults:
        raise RepositoryError(f"version {version} of {model} has faults: {'; '.join(faults)}")


def rollback(control: Control, model: str) -> Change:
    """Withdraw the newest version of a model, and make the server answer with the one before.

    Raises RepositoryError if there is none before.
    """
    root = Path(control.repository)
    before = control.live(model)
    older = repository.rollback(root, model)
    for name in _group(root, model):
        control.load(name)
    smoked = _smoke(control, model, root / model, older)
    _check_live(control, model, older)
    return Change(model, before, older, smoked)


def status(control: Control) -> list[dict[str, Any]]:
    """Return one row for each model on the server: versions, state, what it has answered, mean times in ms."""
    counted = {(row["name"], int(row["version"])): row for row in control.statistics()}
    rows = []
    for model, states in sorted(control.states().items()):
        for version, state in sorted(states.items()):
            row = counted.get((model, version), {})
            times = row.get("inference_stats", {})
            rows.append(
                {
                    "model": model,
                    "version": version or None,
                    "state": state,
                    "published": _published(Path(control.repository) / model) or None,
                    "texts": int(row.get("inference_count", 0)),
                    "executions": int(row.get("execution_count", 0)),
                    "failed": int(times.get("fail", {}).get("count", 0)),
                    **{f"{name}_ms": _mean_ms(times.get(key, {})) for name, key in _TIMES.items()},
                }
            )
    return rows


def _published(model: Path) -> int:
    """Return the version that `deploy` would make live."""
    return versions.waiting(model) or versions.newest(model)


_TIMES = {"queue": "queue", "compute": "compute_infer", "total": "success"}


def _mean_ms(counted: dict[str, Any]) -> float | None:
    count = int(counted.get("count", 0))
    return int(counted["ns"]) / count / 1e6 if count else None


def _group(root: Path, model: str) -> list[str]:
    """Return the models that change together, the one that clients ask last."""
    marker = read_marker(root / model)
    if marker is None or marker["role"] == "student":
        raise RepositoryError(f"{root} holds no model {model!r} that takes texts; `compressor status` lists them")
    return [*([marker["student"]] if "student" in marker else []), model]


@contextlib.contextmanager
def _beside(control: Control, folder: Path, version: int) -> Iterator[str]:
    """Load one version of a model under another name, beside the one that answers; yield that name."""
    trial = f"{folder.name}_next"
    place = Path(control.staging) / trial
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    published = versions.place(folder, version).absolute()
    config = triton.from_text((published / CONFIG).read_text("utf-8"))
    config.name = trial
    student = (read_marker(folder) or {}).get("student")
    if student:
        # Its place beside the model is another until both are deployed. The model fills in what is in braces.
        graph = str(versions.place(folder.parent / student, version).absolute() / "model.onnx")
        config.parameters["onnx"].string_value = graph.replace("{", "{{").replace("}", "}}")
    # One is enough to ask it a few texts, and the cores are busy.
    config.instance_group[0].count = 1
    (place / CONFIG).write_text(triton.to_text(config), "utf-8")
    links = {"labels.txt": published / "labels.txt", "warmup": folder.absolute() / "warmup", str(version): published}
    for name, target in links.items():
        if target.exists():
            (place / name).symlink_to(target)
    try:
        control.load(trial)
        yield trial
    finally:
        with contextlib.suppress(ServingError):
            control.unload(trial)
        shutil.rmtree(place, ignore_errors=True)


def _smoke(control: Control, served: str, folder: Path, version: int) -> int:
    """Ask a served version its stored texts; return how many, or raise SmokeError at the first wrong answer."""
    rows = stored_answers(versions.place(folder, version))
    with Client(control.grpc_url, model=served, version=version) as client:
        for text, wanted in rows:
            found = numbers_of(client.classify([text])[0])
            best = max(wanted, key=lambda name: wanted[name])
            gap = max((abs(found[name] - wanted[name]) for name in wanted if name in found), default=math.inf)
            if set(found) != set(wanted) or max(found, key=lambda name: found[name]) != best or gap > SMOKE_BOUND:
                raise SmokeError(
                    f"version {version} of {folder.name} answers {text!r} with {found}; when it was published it was "
                    f"{wanted} (bound {SMOKE_BOUND:g}); publish it again on this kind of machine"
                )
    return len(rows)


def _check_live(control: Control, model: str, version: int) -> None:
    live = control.live(model)
    if live != version:
        raise RepositoryError(f"the server answers with version {live} of {model} and not with {version}; see its log")
