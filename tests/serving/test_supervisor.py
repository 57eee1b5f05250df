"""What the supervisor makes of a death: of a server, of a model's process, of a log."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from serving import (
    Client,
    ServedModel,
    ServingError,
    StartError,
    TritonServer,
    UnavailableError,
    supervisor,
    write,
)
from tests.serving.conftest import classification, regions, wait_until


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
                    self.answers.append(classification(client, "good film").label)
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


WAITS = 20.0  # seconds for what takes one

PATIENT = f"""
import os, sys
sys.path.append(os.path.dirname(sys.argv[1]))
import supervisor
supervisor._PAUSE_S = {3 * WAITS}
sys.exit(supervisor.main(sys.argv[2:]))
"""


def supervised(log: Path, script: str, orders: bytes, *, stop_after: str = "") -> int:
    """Run a shell script as the server, give orders after a moment, and return the status.

    Once the log says `stop_after`, it is stopped; between two lives there is time for that, more than is waited here.
    """
    (log.parent / "run").mkdir()
    program = ["-c", PATIENT, supervisor.__file__] if stop_after else [supervisor.__file__]
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", *program, str(log.parent / "run"), str(log), "1", str(log.parent)),
            *("sh", "-c", script),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(orders)
        process.stdin.flush()
        if stop_after:
            wait_until(lambda: log.exists() and stop_after in log.read_text(), WAITS)
            process.stdin.write(supervisor.STOP)
            process.stdin.flush()
        return process.wait(WAITS)
    finally:
        process.stdin.close()
        process.wait(WAITS)  # it ends then, and is nobody's dead child in the tests that follow


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
    # Ready before it dies, or it would not be started again.
    script = "echo started; sleep 0.2; exit 3"
    assert supervised(log, script, supervisor.READY, stop_after="(death 1 within") == 3
    assert messages(log, "") == ["started"]
    assert len(messages(log, supervisor.SOURCE)) == 1


def test_a_log_that_takes_no_more_costs_no_restart(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    # After a line that is lost, more than a pipe holds, which somebody must read.
    much = r"echo lost; head -c 200000 /dev/zero | tr '\0' x; echo"
    script = f"echo started >> {tmp_path}/starts; {much}; sleep 0.1; exit 3"
    assert supervised(tmp_path / "log", script, supervisor.READY) == 3
    assert (tmp_path / "starts").read_text().count("started") == supervisor.MOST_DEATHS


def test_lines_that_were_cut_short_are_passed_over(tmp_path: Path) -> None:
    def line(message: str) -> bytes:
        return json.dumps({"source": supervisor.SOURCE, "level": "error", "message": message}).encode() + b"\n"

    log = tmp_path / "log"
    server = TritonServer(tmp_path)
    with log.open("ab", buffering=0) as file, log.open("rb") as server._log:
        file.write(line("first") + line("cut")[:20] + line("lost") + b"\n" + line("second")[:30])
        assert server.deaths() == ["first"]
        file.write(line("second")[30:])
        assert server.deaths() == server.deaths() == ["first", "second"]
        assert server.log_tail() == "first\nsecond"


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


def test_children_that_have_died_are_found_whichever_thread_began_them() -> None:
    begun: list[subprocess.Popen[bytes]] = []
    begin = threading.Thread(target=lambda: begun.append(subprocess.Popen(["true"])))
    begin.start()
    begin.join()
    begun += [subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])]
    try:
        wait_until(lambda: supervisor._dead_children(os.getpid()) == {child.pid for child in begun[:2]})
    finally:
        begun[2].kill()
        for child in begun:
            child.wait()
    assert supervisor._dead_children(os.getpid()) == set()
    assert supervisor._dead_children(begun[0].pid) == set()
