"""The client of event loops, and retries, against a real server."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from serving import (
    Classification,
    Client,
    DeadlineError,
    RequestError,
    ServingError,
    TritonServer,
    UnavailableError,
    write,
)
from serving.aio import AsyncClient


@pytest.fixture(scope="module")
def server(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of one tiny model, which takes 4 texts at once."""
    folder = tmp_path_factory.mktemp("aio")
    write(kit.tiny_model(folder / "model"), folder / "repository")
    with TritonServer(folder / "repository", **kit.ports()) as started:
        yield started


@pytest.mark.triton
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_it_answers_as_the_other_client_does(server: TritonServer, protocol: Any) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    texts = ["good film", "bad", "fine", "bad good good", "é", "good " * 40]

    async def ask() -> list[Any]:
        async with AsyncClient(url, protocol=protocol) as client:
            assert await client.is_ready()
            assert await client.classify([]) == []
            with pytest.raises(RequestError, match="TEXT is empty"):
                await client.classify([""])
            with pytest.raises(RequestError, match="text 0 is a pair and model sst2 reads single texts"):
                await client.classify([("a", "b")])
            async with AsyncClient(url, protocol=protocol, model="absent") as absent:
                assert not await absent.is_ready()
                with pytest.raises(RequestError, match="absent"):
                    await absent.classify(["good"])
            async with AsyncClient(url, protocol=protocol, version=7) as other:
                assert not await other.is_ready()
            together = await asyncio.gather(*(client.classify([text]) for text in texts))
            assert [answer for (answer,) in together] == await client.classify(texts)
            return await client.classify(texts)

    with Client(server.grpc_url) as client:
        assert asyncio.run(ask()) == client.classify(texts)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_server_is_an_error_of_the_tree(protocol: Any) -> None:
    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1", protocol=protocol, timeout_s=2) as client:
            assert not await client.is_ready()
            await client.classify(["good"])

    with pytest.raises(UnavailableError, match=r"no server answers at 127\.0\.0\.1:1"):
        asyncio.run(ask())
    with pytest.raises(ServingError, match="write host:port"):
        AsyncClient("nowhere")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_says_nothing_is_late(protocol: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"

        async def ask() -> None:
            async with AsyncClient(url, protocol=protocol, timeout_s=0.3) as client:
                assert not await client.is_ready()
                await client.classify(["good"])

        with pytest.raises(DeadlineError, match=r"gave no answer within 0\.3 s"):
            asyncio.run(ask())


def test_a_server_that_hangs_up_cannot_be_reached() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, AsyncClient(url, protocol="http", timeout_s=2) as client:
            assert not await client.is_ready()
            await client.classify(["good"])

    with pytest.raises(UnavailableError, match="no server answers at"):
        asyncio.run(ask())


@pytest.mark.triton
def test_retries_bridge_the_restart_of_a_server(server: TritonServer) -> None:
    async def ask(client: AsyncClient) -> str:
        (answer,) = await client.classify(["good"])
        assert isinstance(answer, Classification)
        return answer.label

    async def bridge() -> list[str]:
        async with AsyncClient(server.grpc_url, retries=8) as client:
            await ask(client)
            pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, check=True)
            os.kill(int(pids.stdout.split()[0]), signal.SIGKILL)
            return await asyncio.gather(*(ask(client) for _ in range(3)))

    assert asyncio.run(bridge()) == ["positive"] * 3
    with Client(server.grpc_url, retries=8) as client:
        assert client.classify(["bad"])[0].label == "negative"
    assert len(server.deaths()) == 1
