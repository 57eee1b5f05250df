"""What a client says of arguments that cannot work, and of what is no server."""

import math
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from serving.client import Client
from serving.errors import DeadlineError, NotFoundError, ServingError
from serving.exchange import pauses_s


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"url": "localhost:abc"}, "has the port 'abc'; it must be a number from 1 to 65535"),
        ({"url": "localhost:99999"}, "has the port '99999'; it must be a number from 1 to 65535"),
        ({"url": ":8001"}, "write host:port, like 127.0.0.1:8001"),
        ({"url": "::1:8001"}, r"write addresses of version 6 as \[::1\]:8001"),
        (
            {"url": "127.0.0.1:8001", "timeout_s": math.inf},
            "timeout_s is inf; it must be more than 0 and at",
        ),
        ({"url": "127.0.0.1:8001", "retries": -1}, "retries is -1; it must be a whole number of at least 0"),
    ],
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], sentence: str, protocol: Any) -> None:
    with pytest.raises(ServingError, match=sentence):
        Client(**arguments, protocol=protocol)


@pytest.mark.parametrize("body", [b"<html>Log in</html>", b"{}", b"[]", b'{"input": []}'])
def test_a_web_page_is_no_server(body: bytes) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            with (
                Client(f"127.0.0.1:{server.server_port}", protocol="http") as client,
                pytest.raises(NotFoundError, match="is no Triton"),
            ):
                client.classify(["good"])
        finally:
            server.shutdown()


def test_an_answer_that_drips_is_late() -> None:
    def drip() -> None:
        for _ in range(2):
            with server.accept()[0] as connection, suppress(OSError):
                connection.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                for _ in range(60):
                    connection.send(b"x")
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        with Client(f"127.0.0.1:{server.getsockname()[1]}", protocol="http", timeout_s=0.2) as client:
            begun = time.monotonic()
            # The second has the connection that the first gave up.
            for _ in range(2):
                with pytest.raises(DeadlineError, match=r"gave no answer within 0\.2 s"):
                    client.classify(["good"])
            assert time.monotonic() - begun < 2
        thread.join()


def test_pauses_double_up_to_the_longest() -> None:
    assert list(pauses_s(8)) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert list(pauses_s(0)) == []
    assert max(pauses_s(2000)) == 5
