"""The shared build of tiny models, published and served."""

from collections.abc import Iterator
from typing import Any

import pytest

from serving.runtime import TritonServer, free_port
from tests.conftest import Line

TEXTS = tuple(
    f"a {opinion} film{tail}"
    for opinion in ("good", "bad", "fine")
    for tail in ("", " with some scenes", " with a bad film")
)


@pytest.fixture(scope="session")
def tiny_server(line: Line) -> Iterator[TritonServer]:
    """A real Triton that serves the shared build. One that dies is started again on its ports; `still_alive` tells."""
    ports: dict[str, Any] = {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}
    with TritonServer(line.repository, **ports) as server:
        yield server


@pytest.fixture(autouse=True)
def still_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail each test under which the server of the session died, with what its log says."""
    server: TritonServer | None = None
    if "tiny_server" in request.fixturenames:
        server = request.getfixturevalue("tiny_server")
    known = len(server.deaths()) if server else 0
    yield
    if server and server.deaths()[known:]:
        pytest.fail(f"{server.deaths()[known:]}; its log says:\n{server.log_tail(40)}")
