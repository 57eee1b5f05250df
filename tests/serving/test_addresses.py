"""Where a server listens, and how it is found there."""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from serving import ServingError, StartError, TritonServer, free_port
from serving.control import Control, find_control


@pytest.mark.parametrize(
    ("host", "http", "grpc", "url"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1:1"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "127.0.0.1:1"),
        ("localhost", "127.0.0.1", "127.0.0.1", "127.0.0.1:1"),
        ("::1", "ipv6:::1", "[::1]", "[::1]:1"),
        ("[::]", "ipv6:::", "[::]", "[::1]:1"),
        ("192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.1:1"),
    ],
)
def test_an_address_is_written_as_each_service_reads_it(
    tmp_path: Path, host: str, http: str, grpc: str, url: str
) -> None:
    server = TritonServer(tmp_path, host=host, http_port=1, grpc_port=1, metrics_port=1)
    command = server._command(tmp_path, tmp_path, "")
    assert {f"--http-address={http}", f"--metrics-address={http}", f"--grpc-address={grpc}"} <= set(command)
    assert {server.http_url, server.grpc_url, server.metrics_url} == {url, f"http://{url}/metrics"}


@pytest.mark.parametrize("host", ["", "nowhere.invalid", "a..b"])
def test_a_host_without_an_address_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(StartError, match=rf"host '{host}' has no address \(.*\); give one, such as 127.0.0.1 or ::1"):
        TritonServer(tmp_path, host=host)


def test_ports_of_version_6_are_probed_as_well(kit: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
            taken.listen()
            port, reason = taken.getsockname()[1], "is in use"
            assert free_port("::1") != port
        except OSError:  # a machine without IPv6 has no such address at all
            port, reason = free_port(), "cannot be used"
        with pytest.raises(StartError, match=rf"port {port} on ::1 {reason}"):
            TritonServer(tmp_path, host="::1", **(kit.ports() | {"http_port": port})).start()


def test_what_a_dead_server_left_is_not_asked(temporary: Path) -> None:
    run = temporary / "compressor-left"
    run.mkdir(parents=True)
    Control(grpc_url="127.0.0.1:1", key="secret", repository="", staging="").save(run)
    with pytest.raises(
        StartError, match=rf"listens at 127.0.0.1:1; start one, or set TMPDIR .*: {temporary} names none"
    ):
        find_control("127.0.0.1:1")


def test_servers_are_found_by_every_address_that_clients_take(temporary: Path) -> None:
    run = temporary / "compressor-alive"
    run.mkdir(parents=True)
    Control(grpc_url="127.0.0.1:1", key="secret", repository="", staging="").save(run)
    lock = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for url in ("127.0.0.1:1", "grpc://127.0.0.1:1", "localhost:1", "0.0.0.0:1"):
            assert find_control(url).key == "secret"
        with pytest.raises(ServingError, match=r"'http://127.0.0.1:1' with protocol grpc; write host:port"):
            find_control("http://127.0.0.1:1")
    finally:
        os.close(lock)
