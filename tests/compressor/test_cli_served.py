"""The command line on a server that it started: what is answered, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest

from serving import free_port
from tests import tiny
from tests.conftest import Line
from tests.tiny import sentence


@dataclass(frozen=True)
class Server:
    """A server started by the command line."""

    process: subprocess.Popen[bytes]
    said: list[str]
    http: str
    grpc: str


@pytest.fixture(scope="module")
def server(line: Line) -> Iterator[Server]:
    """Serve the build with the real Triton; it ends on Ctrl-C, with nothing to say."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    flags = [part for name, port in ports.items() for part in (f"--{name}-port", port)]
    program = tiny.command("serve", line.repository, *flags)
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    said = [process.stdout.readline().decode() for _ in range(3)]
    if not said[0]:
        raise AssertionError(process.communicate()[1].decode())
    yield Server(process, said, f"127.0.0.1:{ports['http']}", f"127.0.0.1:{ports['grpc']}")
    process.send_signal(signal.SIGINT)
    _, heard = process.communicate(timeout=60)
    assert process.returncode == 0, heard.decode()
    assert heard.decode() == "stopping\n"
    for port in ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


@pytest.mark.triton
def test_a_server_says_that_it_is_ready_and_where(server: Server) -> None:
    assert server.said[0] == "ready: sst2, sst2_student, sst2_teacher\n"
    assert f"HTTP {server.http}, gRPC {server.grpc}, metrics http://127.0.0.1:" in server.said[1]


@pytest.mark.triton
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_texts_are_classified(
    server: Server, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    texts = ("a superb film", "a dull story")
    done = tiny.main(monkeypatch, capsys, "classify", *texts, "--url", url, "--protocol", protocol)
    assert done.code == 0, done.err
    rows = [text.split("\t") for text in done.out.splitlines()]
    assert [(label, text) for label, _, text in rows] == [("positive", texts[0]), ("negative", texts[1])]
    assert all(0.5 <= float(score) <= 1 for _, score, _ in rows)


@pytest.mark.triton
def test_a_program_classifies_the_lines_of_its_standard_input(server: Server) -> None:
    lines = b"a superb film\r\n\n  \na dull story"
    done = tiny.run("classify", "-", "--url", server.grpc, "--json", stdin=lines)
    answers = [json.loads(text) for text in done.stdout.decode().splitlines()]
    assert [answer["text"] for answer in answers] == ["a superb film", "a dull story"]
    assert [answer["label"] for answer in answers] == ["positive", "negative"]
    assert set(answers[0]["probabilities"]) == {"negative", "positive"}


@pytest.mark.triton
def test_a_served_model_is_evaluated(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--corpus", line.run / "1-corpus", "--url", server.grpc, "--json")
    found = json.loads(tiny.main(monkeypatch, capsys, "evaluate", *asked).out)
    expected = json.loads((line.run / "7-quantize" / "manifest.json").read_text())["metrics"]["test"]
    assert found["rows"] == 48
    # Dynamic INT8 depends a little on what shares a batch.
    assert abs(found["score"] - expected["score"]) <= 1 / 48 + 1e-9


@pytest.mark.triton
def test_the_page_asks_the_server_for_both(server: Server, line: Line) -> None:
    page = f"http://127.0.0.1:{free_port()}/"
    program = tiny.command("ui", "--url", server.grpc, "--run", line.run, "--port", page[:-1].rpartition(":")[2])
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().decode() == f"page {page}; stop with Ctrl-C\n"
        text = Request(f"{page}classify", b'{"texts": ["a superb film"]}', {"Content-Type": "application/json"})
        with urlopen(text, timeout=20) as first, urlopen(f"{page}disagreements", timeout=60) as second:
            found, apart = json.load(first), json.load(second)
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=20)[1], process.returncode) == (b"stopping\n", 0)
    assert [found[name]["label"] for name in ("teacher", "student")] == ["positive"] * 2
    pairs = json.loads((line.run / "7-quantize" / "manifest.json").read_text())["metrics"]["validation_pairs"]
    assert abs(1 - apart["count"] / apart["rows"] - pairs["teacher"]["agreement"]) <= 1 / apart["rows"] + 1e-9


@pytest.mark.triton
def test_an_empty_text_is_refused_in_a_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "empty" in sentence(tiny.main(monkeypatch, capsys, "classify", "", "--url", server.grpc))


@pytest.mark.triton
def test_a_port_in_use_is_said_in_a_sentence(server: Server, line: Line) -> None:
    port = server.grpc.rpartition(":")[2]
    done = tiny.run("serve", line.repository, "--grpc-port", port, "--http-port", free_port())
    assert (done.returncode, done.stdout) == (1, b"")
    assert f"port {port} on 127.0.0.1 is in use; stop what holds it" in done.stderr.decode().splitlines()[-1]


@pytest.mark.triton
def test_a_server_started_by_a_script_ends_on_sigterm(line: Line) -> None:
    flags = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", free_port())]
    # A shell without job control starts what it sends to the background with SIGINT ignored.
    program = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *tiny.command("serve", line.repository, *flags)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"ready")
    process.terminate()
    _, heard = process.communicate(timeout=60)
    assert (process.returncode, heard) == (0, b"stopping\n")
