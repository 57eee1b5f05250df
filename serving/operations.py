"""Replaces the version that a running server answers with, without a request that fails, and goes back."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import repository, triton, versions
from serving.client import Client
from serving.contents import CASCADE
from serving.control import Control
from serving.errors import DeadlineError, RepositoryError, ServingError, SmokeError, UnavailableError
from serving.online import gap_of, numbers_of, stored_answers
from serving.verify import CONFIG, Finding, asked_faults, verify
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


class _EarlyError(RepositoryError):
    """A version does not fit the models that it asks as they are live now."""


def deploy(control: Control, model: str, version: int | None = None) -> Change:
    """Make a server answer with a published version of a model that takes texts; the newest if none is given.

    The version is loaded beside under another name and asked its stored texts first; the old one answers meanwhile, and
    stays published. Only then does the version get a name that a server loads. Who publishes meanwhile waits. What a
    deploy that is killed leaves is undone by whoever next deploys, publishes or starts the server.
    Raises SmokeError, RepositoryError or another ServingError if the new version is not fit; then the old one goes on,
    and the new one is withdrawn. Raises UnavailableError or DeadlineError if the server does not answer, and
    RepositoryError if the disk refuses or another model has to be deployed before; then the old one goes on as well,
    and the new one waits for another try. A given version that is not there, or is older than the newest, is refused
    with RepositoryError.
    """
    root = Path(control.repository)
    models = [root / name for name in repository.group(root, model)]
    with repository.locked(root, f"deploy {root / model}"):
        before = control.live(model)
        version = _published(root / model) if version is None else _chosen(root / model, version, before)
        waits = version in versions.all_waiting(root / model)
        # One that is live and waits was taken back when the server could not be told.
        if before == version and not waits:
            return Change(model, before, version, 0)
        try:
            smoked = _replace(control, models, version)
        except BaseException as error:
            is_unfit = isinstance(error, ServingError) and not isinstance(
                error, (UnavailableError, DeadlineError, _EarlyError)
            )
            if waits or (is_unfit and before):
                _take_back(control, models, version, before, is_unfit=is_unfit)
            raise
        _warn_of_cascades(root, model)
    return Change(model, before, version, smoked)


def _chosen(folder: Path, version: int, live: int) -> int:
    """Return a version that can be made live; raise RepositoryError if it cannot."""
    known = sorted({*versions.published(folder), *versions.all_waiting(folder)})
    if version not in known:
        raise RepositoryError(f"{folder} holds no version {version}; it has {', '.join(map(str, known))}")
    newest = max(live, versions.newest(folder))
    if version < newest:
        raise RepositoryError(
            f"version {version} of {folder.name} is older than version {newest}; `compressor rollback` goes back"
        )
    return version


def _replace(control: Control, models: list[Path], version: int) -> int:
    """Try a version, and make it live; return how many texts it was asked."""
    root, model = models[-1].parent, models[-1].name
    _refuse(model, version, repository.damage(models, version))
    smoked = _try_out(control, models[-1], version)
    older = repository.before(models, version)
    if older and any(version in versions.all_waiting(folder) for folder in models):
        repository.leave_note(models, version, older, versions.WAITING)
    versions.promote(models, version)
    findings = verify(root)
    ours = [finding for finding in findings if _is_about(finding, models, version)]
    _refuse(model, version, [" ".join(finding) for finding in ours])
    for folder in models:
        control.load(folder.name)
    _check_live(control, model, version)
    repository.remove_note(root)
    for finding in findings:
        log.warning("beside version %d of %s the repository has a fault: %s", version, model, " ".join(finding))
    return smoked


def _try_out(control: Control, folder: Path, version: int) -> int:
    """Ask a version its stored texts while another one answers; return how many, or raise what makes it unfit."""
    config = triton.from_text((versions.place(folder, version) / CONFIG).read_text("utf-8"))
    if misfits := list(asked_faults(folder, config)):
        raise _EarlyError(
            f"version {version} of {folder.name} does not fit what it asks: {'; '.join(misfits)}; "
            "deploy those, or roll them back, first"
        )
    with _beside(control, folder, version) as trial:
        return _smoke(control, trial, folder, version)


def _is_about(finding: Finding, models: list[Path], version: int) -> bool:
    """Say whether a finding is about the newest version of some models: a damaged older one says nothing of it."""
    is_shared = finding.place in (".", CONFIG) or finding.place.startswith(f"{versions.CONFIGS}/")
    return finding.model in [model.name for model in models] and (is_shared or finding.place == str(version))


def _take_back(control: Control, models: list[Path], version: int, before: int, *, is_unfit: bool) -> None:
    """Undo what became of a version that is not to be live, on the disk first: the server may start again any time."""
    older = repository.before(models, version)
    if not older:
        return
    prefix = versions.WITHDRAWN if is_unfit else versions.WAITING
    if is_unfit:
        repository.leave_note(models, version, older, prefix)
    versions.withdraw(models, version, older, prefix=prefix)
    repository.remove_note(models[-1].parent)
    fate = "is withdrawn" if is_unfit else "waits on, to be deployed again"
    log.warning("version %d of %s %s; version %d goes on", version, models[-1].name, fate, older)
    _load_again(control, models, before if before != version else None)


def _load_again(control: Control, models: list[Path], before: int | None) -> None:
    """Make a server answer with what the disk holds, where it does not answer with version `before` anyway."""
    # A server that cannot be told now takes what the disk holds at its next start.
    with contextlib.suppress(ServingError):
        for model in models:
            if before is None or control.live(model.name) != before:
                control.load(model.name)


def _refuse(model: str, version: int, faults: list[str]) -> None:
    if faults:
        raise RepositoryError(f"version {version} of {model} has faults: {'; '.join(faults)}")


def rollback(control: Control, model: str) -> Change:
    """Withdraw the newest version of a model, and make the server answer with the one before.

    The older one is loaded beside and asked its stored texts first, as `deploy` does it. Raises RepositoryError if
    there is none before, or if that one is damaged, and what `deploy` raises if it is not fit or the server does not
    answer; then nothing is changed.
    """
    root = Path(control.repository)
    models = [root / name for name in repository.group(root, model)]
    with repository.locked(root, f"roll {root / model} back"):
        before = control.live(model)
        top, older = repository.way_back(models)
        try:
            smoked = _try_out(control, models[-1], older)
            _go_back(control, models, top, older, before)
        except ServingError as error:
            raise type(error)(f"{model} stays at version {top}, nothing is changed: {error}") from error
        _warn_of_cascades(root, model)
    return Change(model, before, older, smoked)


def _go_back(control: Control, models: list[Path], top: int, older: int, before: int) -> None:
    """Make an older version live, or else change nothing: neither the disk nor the server."""
    root = models[-1].parent
    repository.leave_note(models, top, 0, versions.WITHDRAWN)
    try:
        versions.withdraw(models, top, older)
        for model in models:
            control.load(model.name)
        _check_live(control, models[-1].name, older)
    except BaseException:
        try:
            versions.promote(models, top, prefix=versions.WITHDRAWN)
            repository.remove_note(root)
        finally:
            _load_again(control, models, before)
        raise
    repository.remove_note(root)


def _warn_of_cascades(root: Path, model: str) -> None:
    """Warn of each cascade whose threshold was chosen for another version of a model than the one that is live now."""
    live = versions.read_manifest(root / model / str(versions.newest(root / model)))
    for folder in sorted(root.iterdir()):
        version = versions.newest(folder)
        file = folder / str(version) / CASCADE
        asked = json.loads(file.read_text("utf-8")).get("models", {}) if file.is_file() else {}
        if model in asked and (live is None or live.digest != asked[model]):
            log.warning(
                "version %d of %s was published with another version of %s than the live one: its threshold, and the "
                "accuracy that it was chosen for, are not those of this pair; deploy or publish a cascade of it",
                version,
                folder.name,
                model,
            )


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
            same = set(found) == set(wanted) and max(found, key=lambda name: found[name]) == best
            if not same or gap_of(found, wanted) > SMOKE_BOUND:
                raise SmokeError(
                    f"version {version} of {folder.name} answers {text!r} with {found}; when it was published it was "
                    f"{wanted} (bound {SMOKE_BOUND:g}); publish it again on this kind of machine"
                )
    return len(rows)


def _check_live(control: Control, model: str, version: int) -> None:
    live = control.live(model)
    if live != version:
        raise RepositoryError(f"the server answers with version {live} of {model} and not with {version}; see its log")
