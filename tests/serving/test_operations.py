"""Versions change under load without a failed request; what is not fit never answers a client."""

import json
import os
import re
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

from serving import Client, RepositoryError, RequestError, SmokeError, StartError, TritonServer, read, versions, write
from serving.control import Control, find_control
from serving.operations import deploy, rollback, status
from serving.verify import verify

pytestmark = pytest.mark.triton
Served = tuple[TritonServer, Any, Path]


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two versions published, the second one live."""
    folder = tmp_path_factory.mktemp("operated")
    publish(kit, folder, 1)
    publish(kit, folder, 2)
    with TritonServer(folder / "repository", **kit.ports()) as server:
        yield server, kit, folder


def publish(kit: Any, folder: Path, strength: float, **fields: Any) -> int:
    """Publish a model whose scores tell its strength; return its version."""
    onnx = kit.write_graph(folder / f"{strength}.onnx", weights=kit.WEIGHTS * strength)
    written = write(kit.tiny_model(folder / "model", onnx=onnx, **fields), folder / "repository")[0]
    return int(written.name.removeprefix(versions.WAITING))


@contextmanager
def load(server: TritonServer) -> Iterator[list[float]]:
    """Ask all the while from several clients, over both protocols; any failure is raised at the end."""
    scores: list[float] = []
    end = threading.Event()

    def ask(protocol: Any) -> None:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        with Client(url, protocol=protocol) as client:
            while not end.is_set():
                (answer,) = client.classify(["good"])
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


def test_a_restart_does_not_bring_what_was_never_deployed(served: Served) -> None:
    server, kit, folder = served
    before, root = server.control.live("sst2"), folder / "repository"
    with Client(server.grpc_url, retries=8) as client:
        (expected,) = client.classify(["good"])
        version = publish(kit, folder, 0.4)
        assert (versions.newest(root / "sst2"), versions.waiting(root / "sst2")) == (before, version)
        assert read(root) == ("sst2", "sst2_student")
        assert verify(root) == []
        # The server itself, not the supervisor above it.
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, check=True)
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
        assert client.classify(["good"]) == [expected]
        assert server.control.live("sst2") == before
        change = deploy(server.control, "sst2")
        assert (change.before, change.after, change.smoked) == (before, version, 2)
        assert client.classify(["good"]) != [expected]
    assert versions.waiting(root / "sst2") == versions.waiting(root / "sst2_student") == 0
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
        assert client.classify(["good"])[0].label == "positive"


def test_a_version_that_does_not_load_leaves_the_old_one(served: Served) -> None:
    server, kit, folder = served
    before = server.control.live("sst2")
    version = publish(kit, folder, 0.6)
    forge(folder / "repository" / "sst2", version, "model.py", b"raise RuntimeError('no such model')\n")
    with load(server), pytest.raises(RequestError, match="no such model"):
        deploy(server.control, "sst2")
    assert server.control.live("sst2") == before


def test_control_needs_the_key(served: Served) -> None:
    import tritonclient.grpc as library

    server, _, _ = served
    for path in ("repository/index", "repository/models/sst2/unload", "systemsharedmemory/region/a/register"):
        request = urllib.request.Request(f"http://{server.http_url}/v2/{path}", data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        caught.value.close()
        assert caught.value.code == 403
    client = library.InferenceServerClient(server.grpc_url)
    try:
        with pytest.raises(library.InferenceServerException, match="UNAVAILABLE"):
            client.unload_model("sst2")
    finally:
        client.close()
    wrong = Control(grpc_url=server.grpc_url, key="guess", repository="", staging="")
    with pytest.raises(Exception, match="This protocol is restricted"):
        wrong.states()


def test_the_key_is_readable_by_its_user_alone(served: Served) -> None:
    server, _, _ = served
    (file,) = Path(server.control.staging).parent.glob("control.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_only_servers_of_ours_can_be_controlled(served: Served) -> None:
    with pytest.raises(StartError, match=r"no server of yours .* listens at 127.0.0.1:1; these do"):
        find_control("127.0.0.1:1")
    server, _, _ = served
    with pytest.raises(RepositoryError, match="holds no model 'sst2_student' that takes texts"):
        deploy(server.control, "sst2_student")
    assert re.match(r"[\w-]{32}", server.control.key)
