"""A deploy or a rollback that is killed at any moment leaves a repository that the next server starts with."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import (
    Client,
    DeadlineError,
    RepositoryError,
    RequestError,
    ServingError,
    UnavailableError,
    operations,
    read,
    repository,
    versions,
)
from serving.control import Control
from serving.operations import deploy, rollback
from serving.verify import verify
from tests.serving.conftest import Served, publish
from tests.serving.test_operations import kill

KILLED = """
import itertools, os, shutil, sys
from pathlib import Path
from serving import operations, versions
from serving.control import Control

source, folder, change = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
for steps in itertools.count():
    root = shutil.copytree(source, folder / str(steps))
    if not os.fork():
        break
    if os.waitstatus_to_exitcode(os.wait()[1]) != 9:
        os._exit(0)

def dying(act):
    def step(*arguments, **fields):
        global steps
        if not steps:
            os._exit(9)
        steps -= 1
        return act(*arguments, **fields)
    return step

started = versions.newest(root / "sst2")
operations._try_out = lambda *_: 2
operations.verify = lambda _: []
Control.live = lambda _, name: versions.newest(root / name) or started
Control.load = dying(lambda *_: None)
Path.rename, Path.unlink = dying(Path.rename), dying(Path.unlink)
control = Control(grpc_url="", key="", repository=str(root), staging="")
getattr(operations, change)(control, "sst2")
"""


@pytest.fixture
def waits(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose version 1 is live and whose version 2, with its labels the other way round, waits."""
    publish(kit, tmp_path, 1)
    with monkeypatch.context() as served:
        served.setattr(repository, "is_served", lambda _: True)
        publish(kit, tmp_path, 2, labels=kit.LABELS[::-1])
    return tmp_path / "repository"


def state(root: Path) -> list[tuple[list[int], list[int]]]:
    """Return the versions of each model that are published, and that wait; all that is there must be sound."""
    assert read(root) == ("sst2", "sst2_student")
    assert verify(root) == []
    assert not (root / repository.NOTE).exists()
    return [(versions.published(root / name), versions.all_waiting(root / name)) for name in ("sst2", "sst2_student")]


@pytest.mark.parametrize("change", ["deploy", "rollback"])
def test_what_was_killed_at_any_step_is_undone_before_a_server_reads_it(
    waits: Path, tmp_path: Path, change: str
) -> None:
    if change == "rollback":
        versions.promote([waits / "sst2_student", waits / "sst2"], 2)
    before, left = state(waits), set()
    subprocess.run([sys.executable, "-c", KILLED, waits, tmp_path / "killed", change], check=True)
    *killed, done = sorted((tmp_path / "killed").iterdir(), key=lambda root: int(root.name))
    for root in killed:
        left.add(tuple(versions.newest(root / name) for name in ("sst2", "sst2_student")))
        repository.settle(root)
        assert state(root) == before
    # Both models were caught before, between and after their renames; without a kill it is done.
    assert left == {(1, 1), (1, 2), (2, 2)}
    assert len(killed) > 8
    assert state(done) == ([([1, 2], [])] * 2 if change == "deploy" else [([1], [])] * 2)


def test_whoever_publishes_or_goes_back_undoes_it_too(kit: Any, waits: Path, tmp_path: Path) -> None:
    models = [waits / "sst2_student", waits / "sst2"]

    def leave() -> None:
        repository.leave_note(models, 2, 1, versions.WAITING)
        versions.promote(models[:1], 2)

    leave()
    with pytest.raises(RepositoryError, match="sst2 has no version before 1"):
        repository.rollback(waits, "sst2")
    assert state(waits) == [([1], [2])] * 2
    leave()
    assert publish(kit, tmp_path, 3) == 3
    assert state(waits) == [([1, 3], [])] * 2


def test_what_cannot_be_undone_is_left(waits: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = [waits / "sst2_student", waits / "sst2"]
    repository.leave_note(models, 2, 1, versions.WAITING)
    versions.promote(models, 2)
    for model in models:
        shutil.rmtree(model / "1")
    repository.settle(waits)
    assert state(waits) == [([2], [])] * 2
    assert "nothing can be undone: " in caplog.text


def test_a_start_waits_a_while_for_who_changes_the_repository(
    waits: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repository, "_SETTLE_S", 0.2)
    descriptor = os.open(waits, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        repository.settle(waits)
    finally:
        os.close(descriptor)
    assert f"somebody has been changing {waits} for 0.2 s" in caplog.text
    repository.settle(waits / "absent")


@pytest.mark.parametrize(
    ("error", "is_unfit"),
    [
        (RequestError("no memory"), True),
        (ServingError("the server failed"), True),
        (UnavailableError("no server answers"), False),
        (DeadlineError("too late"), False),
    ],
)
def test_what_is_taken_back_leaves_no_note_and_waits_unless_it_is_unfit(
    waits: Path, monkeypatch: pytest.MonkeyPatch, error: ServingError, is_unfit: bool
) -> None:
    def fail(*_: object) -> None:
        assert json.loads((waits / repository.NOTE).read_text())["older"] == 1
        raise error

    control = Control(grpc_url="", key="", repository=str(waits), staging="")
    monkeypatch.setattr(operations, "_try_out", lambda *_: 2)
    monkeypatch.setattr(Control, "live", lambda _, name: versions.newest(waits / name))
    monkeypatch.setattr(Control, "load", fail)
    with pytest.raises(type(error), match=str(error)):
        deploy(control, "sst2")
    assert state(waits) == [([1], [] if is_unfit else [2])] * 2


@pytest.mark.triton
def test_a_restart_does_not_bring_what_a_killed_deployment_promoted(served: Served) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    version = publish(kit, folder, 0.55)
    models = [root / "sst2_student", root / "sst2"]
    repository.leave_note(models, version, before, versions.WAITING)
    versions.promote(models, version)
    kill(server)
    with Client(server.grpc_url, retries=8) as client:
        client.classify(["good"])
    assert server.control.live("sst2") == before
    assert state(root)[0][1] == [version]
    assert f"on the disk it is at version {before} again" in server.log_tail(1000)


@pytest.mark.triton
def test_a_restart_waits_for_the_deployment_that_finds_its_server_dead(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    version = publish(kit, folder, 0.45)

    def die_meanwhile(*_: object) -> list[Any]:
        kill(server)
        # The next server would be there long before this ends.
        with pytest.raises(DeadlineError):
            server.wait_ready(2)
        return []

    with monkeypatch.context() as dying:
        dying.setattr(operations, "verify", die_meanwhile)
        with pytest.raises(UnavailableError):
            deploy(server.control, "sst2")
    with Client(server.grpc_url, retries=8) as client:
        client.classify(["good"])
    assert server.control.live("sst2") == before
    assert state(root)[0][1] == [version]
    assert deploy(server.control, "sst2").after == version
    assert rollback(server.control, "sst2").after == before
