"""Versions change under load without a failed request; what is not fit never answers a client."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import (
    Client,
    RepositoryError,
    RequestError,
    ServingError,
    SmokeError,
    TritonServer,
    UnavailableError,
    operations,
    read,
    versions,
    write,
)
from serving.cascade import Cascade
from serving.control import Control, find_control
from serving.operations import deploy, rollback, status
from serving.verify import verify
from tests.serving.conftest import Served, classification, publish

pytestmark = pytest.mark.triton


@contextmanager
def load(server: TritonServer) -> Iterator[list[float]]:
    """Ask all the while from several clients, over both protocols; any failure is raised at the end."""
    scores: list[float] = []
    end = threading.Event()

    def ask(protocol: Any) -> None:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        with Client(url, protocol=protocol) as client:
            while not end.is_set():
                answer = classification(client, "good")
                assert answer.label == "positive"
                scores.append(answer.score)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, protocol) for protocol in ("grpc", "http") * 2]
        try:
            time.sleep(0.3)
            yield scores
            time.sleep(0.3)
        finally:
            end.set()
        for client in asking:
            client.result()


def test_deploy_and_rollback_under_load_lose_no_request(served: Served) -> None:
    server, kit, folder = served
    publish(kit, folder, 0.5)
    control = find_control(server.grpc_url)
    assert control == server.control
    assert control.live("sst2") == 2
    with load(server) as scores:
        change = deploy(control, "sst2")
        assert (change.before, change.after, change.smoked) == (2, 3, 2)
        assert deploy(control, "sst2").smoked == 0
        time.sleep(0.2)
        back = rollback(control, "sst2")
        assert (back.before, back.after, back.smoked) == (3, 2, 2)
    assert len(scores) > 50
    # Every answer is of one of the two versions, and both have answered.
    assert len({round(score, 4) for score in scores}) == 2
    assert server.deaths() == []
    assert (folder / "repository" / "sst2" / "withdrawn-3").is_dir()
    rows = {row["model"]: row for row in status(control) if row["state"] == "READY"}
    assert {name: row["version"] for name, row in rows.items()} == {"sst2": 2, "sst2_student": 2}
    assert rows["sst2"]["texts"] >= 1
    assert rows["sst2"]["failed"] == 0
    assert 0 < rows["sst2"]["compute_ms"] <= rows["sst2"]["total_ms"]
    assert rollback(control, "sst2").after == 1
    with pytest.raises(RepositoryError, match="has no version before"):
        rollback(control, "sst2")
    # The module's other tests find two versions again.
    publish(kit, folder, 2)
    deploy(control, "sst2")


def kill(server: TritonServer) -> None:
    """Kill the server itself, not the supervisor above it."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, check=True)
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)


def test_a_restart_does_not_bring_what_was_never_deployed(served: Served) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    with Client(server.grpc_url, retries=8) as client:
        (expected,) = client.classify(["good"])
        version = publish(kit, folder, 0.4)
        assert (versions.newest(root / "sst2"), versions.waiting(root / "sst2")) == (before, version)
        assert read(root) == ("sst2", "sst2_student")
        assert verify(root) == []
        kill(server)
        assert client.classify(["good"]) == [expected]
        assert server.control.live("sst2") == before
        change = deploy(server.control, "sst2")
        assert (change.before, change.after, change.smoked) == (before, version, 2)
        assert client.classify(["good"]) != [expected]
    assert versions.waiting(root / "sst2") == versions.waiting(root / "sst2_student") == 0
    assert rollback(server.control, "sst2").after == before


def test_a_restart_does_not_bring_what_a_killed_deployment_tried(served: Served) -> None:
    server, kit, folder = served
    model, version = folder / "repository" / "sst2", publish(kit, folder, 0.55)
    trial = operations._beside(server.control, model, version)
    assert trial.__enter__() in server.control.states()
    kill(server)
    with Client(server.grpc_url, retries=8) as client:
        client.classify(["good"])
    assert "sst2_next" not in server.control.states()
    assert list(Path(server.control.staging).iterdir()) == []
    trial.__exit__(None, None, None)


def test_who_publishes_waits_for_a_deployment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server, kit, folder = served
    model, version = folder / "repository" / "sst2", publish(kit, folder, 0.3)
    smoke = operations._smoke
    with ThreadPoolExecutor(1) as pool:
        publishing = []

        def smoke_meanwhile(*arguments: Any) -> int:
            publishing.append(pool.submit(publish, kit, folder, 0.35))
            with pytest.raises(TimeoutError):
                publishing[0].result(timeout=1)
            return smoke(*arguments)

        monkeypatch.setattr(operations, "_smoke", smoke_meanwhile)
        change = deploy(server.control, "sst2")
        later = publishing[0].result()
    assert change.after == version == versions.newest(model) == server.control.live("sst2")
    assert versions.waiting(model) == later == version + 1
    assert verify(model.parent) == []


@pytest.mark.parametrize("at", ["sst2_next", "sst2"])
@pytest.mark.parametrize(
    ("error", "prefix"),
    [
        # One that makes a version unfit and one that does not; `test_killed` has all of them.
        (RequestError("no memory"), versions.WITHDRAWN),
        (UnavailableError("no server answers"), versions.WAITING),
    ],
)
def test_a_load_that_fails_leaves_the_old_version_on_disk_and_server(
    served: Served, monkeypatch: pytest.MonkeyPatch, at: str, error: ServingError, prefix: str
) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    version, load_model = publish(kit, folder, 0.65), Control.load
    failed: list[str] = []

    def fail_once(control: Control, model: str) -> None:
        if model == at and not failed:
            failed.append(model)
            raise error
        load_model(control, model)

    monkeypatch.setattr(Control, "load", fail_once)
    with pytest.raises(type(error), match=str(error)):
        deploy(server.control, "sst2")
    for name in ("sst2", "sst2_student"):
        assert server.control.live(name) == versions.newest(root / name) == before
        assert (root / name / f"{prefix}{version}").is_dir()
    assert verify(root) == []
    if prefix == versions.WAITING:
        assert deploy(server.control, "sst2").after == version
        # As if the server could not be told to go back: it answers with what waits, until that fails again.
        versions.withdraw([root / "sst2_student", root / "sst2"], version, before, prefix=versions.WAITING)
        failed.clear()
        with pytest.raises(type(error), match=str(error)):
            deploy(server.control, "sst2")
        assert server.control.live("sst2") == before
        assert deploy(server.control, "sst2").after == version
        assert rollback(server.control, "sst2").after == before


def test_a_version_that_did_not_wait_is_withdrawn_only_if_it_is_unfit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kit, folder = served
    before, model = server.control.live("sst2"), folder / "repository" / "sst2"
    with monkeypatch.context() as other_user:
        other_user.setattr("serving.repository.is_served", lambda _: False)
        version = publish(kit, folder, 0.85)
    for error, newest in ((UnavailableError("no server answers"), version), (RequestError("no memory"), before)):

        def fail(control: Control, name: str, error: ServingError = error) -> None:
            raise error

        with monkeypatch.context() as failing:
            failing.setattr(Control, "load", fail)
            with pytest.raises(type(error), match=str(error)):
                deploy(server.control, "sst2")
        assert versions.newest(model) == newest
        assert server.control.live("sst2") == before
    assert (model / f"withdrawn-{version}").is_dir()
    assert verify(model.parent) == []


def test_a_full_disk_leaves_the_old_version_and_the_new_one_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    version, write_file = publish(kit, folder, 0.7, max_batch_size=3), versions._write

    def write_until_full(source: Any, target: Path) -> None:
        if target.parent == root / "sst2":
            raise OSError(28, "No space left on device")
        write_file(source, target)

    with monkeypatch.context() as full:
        full.setattr(versions, "_write", write_until_full)
        with pytest.raises(RepositoryError, match=r"cannot deploy .*sst2: No space left on device; free space and try"):
            deploy(server.control, "sst2")
    assert verify(root) == []
    assert [versions.waiting(root / name) for name in ("sst2", "sst2_student")] == [version, version]
    assert server.control.live("sst2") == before
    assert deploy(server.control, "sst2").after == version
    assert rollback(server.control, "sst2").after == before


def test_a_damaged_old_version_is_told_and_not_gone_back_to(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    file = root / "sst2_student" / str(before) / "model.onnx"
    raw = file.read_bytes()
    version = publish(kit, folder, 0.8)
    file.write_bytes(raw[:-1])
    assert deploy(server.control, "sst2").after == version
    assert f"the repository has a fault: sst2_student {before} holds files that are not" in caplog.text
    with pytest.raises(RepositoryError, match=rf"sst2 cannot go back from version {version} to {before}, which has"):
        rollback(server.control, "sst2")
    assert server.control.live("sst2") == versions.newest(root / "sst2") == version
    file.write_bytes(raw)
    assert rollback(server.control, "sst2").after == before


def test_a_version_that_answers_otherwise_is_not_deployed(served: Served) -> None:
    server, kit, folder = served
    before = server.control.live("sst2")
    version = publish(kit, folder, 0.25)
    model = folder / "repository" / "sst2"
    file = versions.place(model, version) / "expected.json"
    rows = json.loads(file.read_text())
    rows[1]["answer"] = dict(zip(rows[1]["answer"], (0.9, 0.1), strict=True))
    forge(model, version, "expected.json", json.dumps(rows).encode())
    with load(server) as scores, pytest.raises(SmokeError, match=rf"version {version} of sst2 answers 'a bad film, é'"):
        deploy(server.control, "sst2")
    assert len(scores) > 10
    assert server.control.live("sst2") == before == versions.newest(model)
    assert [name for name in server.control.states() if "next" in name] == []


def forge(model: Path, version: int, name: str, raw: bytes) -> None:
    """Replace a file of a published version, manifest included: as a builder with a defect would have written it."""
    place = versions.place(model, version)
    (place / name).write_bytes(raw)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][name] = len(raw)
    student = versions.read_manifest(versions.place(model.parent / "sst2_student", version))
    assert student is not None
    paths = {file: place / file for file in manifest["files"]} | {
        file: model / "warmup" / file for file in manifest["warmup"]
    }
    hashes = {file: versions.sha256(path) for file, path in paths.items()}
    manifest["digest"] = versions.digest_of(hashes, student.digest)
    (place / "manifest.json").write_text(json.dumps(manifest))


def test_a_damaged_version_is_refused_before_it_is_loaded(served: Served) -> None:
    server, kit, folder = served
    before = server.control.live("sst2")
    version = publish(kit, folder, 0.75)
    with (versions.place(folder / "repository" / "sst2", version) / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(RepositoryError, match=rf"version {version} of sst2 has faults: .*bytes instead of"):
        deploy(server.control, "sst2")
    assert server.control.live("sst2") == before
    with Client(server.grpc_url) as client:
        assert classification(client, "good").label == "positive"


def test_a_version_that_does_not_load_leaves_the_old_one(served: Served) -> None:
    server, kit, folder = served
    before = server.control.live("sst2")
    version = publish(kit, folder, 0.6)
    forge(folder / "repository" / "sst2", version, "model.py", b"raise RuntimeError('no such model')\n")
    with load(server), pytest.raises(RequestError, match="no such model"):
        deploy(server.control, "sst2")
    assert server.control.live("sst2") == before
    # Nor does a load balancer take the server for one that is not ready.
    with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready") as health:
        assert health.status == 200
    with Client(server.grpc_url) as client, Client(server.http_url, protocol="http") as other:
        assert client.is_ready()
        assert other.is_ready()
    server.wait_ready(5)


@pytest.mark.parametrize("fault", ["does not load", "answers otherwise"])
def test_an_older_version_that_is_not_fit_any_more_is_not_gone_back_to(served: Served, fault: str) -> None:
    server, kit, folder = served
    older, model = server.control.live("sst2"), folder / "repository" / "sst2"
    version = publish(kit, folder, 0.45)
    assert deploy(server.control, "sst2").after == version
    error: type[ServingError]
    if fault == "does not load":
        name, error, reason = "model.py", RequestError, "no such model"
        raw = b"raise RuntimeError('no such model')\n"
    else:
        name, error, reason = "expected.json", SmokeError, rf"version {older} of sst2 answers 'a bad film, é'"
        rows = json.loads((model / str(older) / name).read_text())
        rows[1]["answer"] = dict(zip(rows[1]["answer"], (0.9, 0.1), strict=True))
        raw = json.dumps(rows).encode()
    saved = (model / str(older) / name).read_bytes()
    forge(model, older, name, raw)
    before = sorted(path.name for path in model.iterdir())
    with Client(server.grpc_url, retries=8) as client:
        expected = client.classify(["good"])
        with pytest.raises(error, match=rf"sst2 stays at version {version}, nothing is changed: .*{reason}"):
            rollback(server.control, "sst2")
        assert client.is_ready()
        assert client.classify(["good"]) == expected
        assert [server.control.live(name) for name in ("sst2", "sst2_student")] == [version, version]
        assert sorted(path.name for path in model.iterdir()) == before
        assert versions.newest(model) == version
        assert read(model.parent) == ("sst2", "sst2_student")
        kill(server)
        assert client.classify(["good"]) == expected
    forge(model, older, name, saved)
    assert rollback(server.control, "sst2").after == older


@pytest.mark.parametrize("at", ["sst2_student", "sst2"])
def test_a_rollback_whose_last_load_fails_changes_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    server, kit, folder = served
    older, root = server.control.live("sst2"), folder / "repository"
    version = publish(kit, folder, 0.95, max_batch_size=3)
    assert deploy(server.control, "sst2").after == version
    load_model = Control.load
    failed: list[str] = []

    def fail_once(control: Control, model: str) -> None:
        if model == at and not failed:
            failed.append(model)
            raise RequestError("no memory")
        load_model(control, model)

    with monkeypatch.context() as failing:
        failing.setattr(Control, "load", fail_once)
        with pytest.raises(RequestError, match=rf"sst2 stays at version {version}, nothing is changed: no memory"):
            rollback(server.control, "sst2")
    for name in ("sst2", "sst2_student"):
        assert server.control.live(name) == versions.newest(root / name) == version
    assert verify(root) == []
    assert rollback(server.control, "sst2").after == older


def test_a_version_is_deployed_by_its_number(served: Served) -> None:
    server, kit, folder = served
    before, model = server.control.live("sst2"), folder / "repository" / "sst2"
    version = publish(kit, folder, 0.15)
    there = ", ".join(map(str, [*versions.published(model), version]))
    with pytest.raises(RepositoryError, match=rf"sst2 holds no version {version + 1}; it has {there}$"):
        deploy(server.control, "sst2", version + 1)
    with pytest.raises(RepositoryError, match=rf"version 1 of sst2 is older than version {before}; `compressor rollb"):
        deploy(server.control, "sst2", 1)
    assert deploy(server.control, "sst2", before).smoked == 0
    assert (server.control.live("sst2"), versions.waiting(model)) == (before, version)
    assert deploy(server.control, "sst2", version).after == version
    assert rollback(server.control, "sst2").after == before


def test_a_cascade_is_deployed_after_those_that_it_asks(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def publish_all(*labels: str) -> None:
        student, teacher = (kit.tiny_model(tmp_path / name, labels=labels) for name in ("student", "teacher"))
        write(student, tmp_path / "repository", teacher=teacher, cascade=cascade)

    cascade = Cascade(threshold=0.5, accuracy=1, student_accuracy=1, teacher_accuracy=1, escalated=0, rows=1)
    publish_all("negative", "positive")
    with TritonServer(tmp_path / "repository", **kit.ports()) as server:
        publish_all("positive", "negative")
        deploy(server.control, "sst2")
        assert "fault: sst2_cascade config.pbtxt the model takes the answers of sst2 for ['negative'," in caplog.text
        with pytest.raises(RepositoryError, match=r"does not fit .* the answers of sst2_teacher for .*; deploy those"):
            deploy(server.control, "sst2_cascade")
        assert versions.waiting(tmp_path / "repository" / "sst2_cascade") == 2
        deploy(server.control, "sst2_teacher")
        assert deploy(server.control, "sst2_cascade").after == 2
    assert verify(tmp_path / "repository") == []
