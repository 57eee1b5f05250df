"""The client of event loops, and retries, against a real server."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from serving import (
    Classification,
    Client,
    DeadlineError,
    NotFoundError,
    RequestError,
    ServingError,
    TritonServer,
    UnavailableError,
    write,
)
from serving.aio import IN_FLIGHT, AsyncClient
from serving.transport import Answered, ModelFacts, Served
from tests.serving.conftest import classification


@pytest.fixture(scope="module")
def server(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of a tiny model, which takes 4 texts at once, and of one that fails on each text with "film"."""
    folder = tmp_path_factory.mktemp("aio")
    write(kit.tiny_model(folder / "model"), folder / "repository")
    weights = kit.WEIGHTS.copy()
    weights[kit.WORDS.index("film")] = np.inf
    onnx = kit.write_graph(folder / "infinite.onnx", weights=weights)
    failing = kit.tiny_model(folder / "model", name="failing", onnx=onnx, warmup_texts=())
    write(failing, folder / "repository")
    with TritonServer(folder / "repository", **kit.ports()) as started:
        yield started


class SlowServer:
    """A transport to a server that needs a moment for each request, and refuses the text "bad"."""

    def __init__(self) -> None:
        self.live, self.gone = "1", list[str]()
        self.asked = self.answered = self.now = self.most = 0

    async def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Answer each text with "b", the last label."""
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        live = self.live
        try:
            await asyncio.sleep(0.001)
            if b"bad" in inputs["TEXT"]:
                raise RequestError("TEXT is bad") from KeyError("status")
            await asyncio.sleep(0.001)
        finally:
            self.now -= 1
        self.answered += 1
        return Answered(live, [[[0.0, 1.0] for _ in inputs["TEXT"]], [[False] for _ in inputs["TEXT"]]])

    async def facts(self, model: Served) -> ModelFacts:
        """Version 1 has the labels a and b, all others b and a."""
        if model.version in self.gone:
            raise NotFoundError("not ready")
        labels = ("a", "b") if (model.version or self.live) == "1" else ("b", "a")
        return ModelFacts(labels=labels, is_pair=False, max_batch_size=4, version=model.version)

    async def is_ready(self, model: Served) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Do nothing."""


async def slow_client() -> tuple[AsyncClient, SlowServer]:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    client._transport = server = SlowServer()
    return client, server


def test_a_long_list_goes_few_requests_at_a_time() -> None:
    async def ask() -> None:
        client, server = await slow_client()
        texts = [str(number) for number in range(403)]
        assert [answer.text for answer in await client.classify(iter(texts))] == texts
        assert (server.asked, server.most) == (101, IN_FLIGHT)
        # What others ask does not wait for a long list.
        server.most = 0
        await asyncio.gather(client.classify(texts), *(client.classify(["x"]) for _ in range(20)))
        assert server.most > IN_FLIGHT

    asyncio.run(ask())


def test_the_first_error_is_raised_itself_once_the_requests_under_way_are_answered() -> None:
    async def ask() -> None:
        client, server = await slow_client()
        with pytest.raises(RequestError, match=r"^texts 4 to 7: TEXT is bad$") as found:
            await client.classify(["x"] * 5 + ["bad"] + ["x"] * 400)
        assert isinstance(found.value.__cause__, RequestError)
        assert isinstance(found.value.__cause__.__cause__, KeyError)
        assert found.value.__context__ is found.value.__cause__
        # The server had as many requests as it may, and all but the refused one are answered: none is given up.
        assert (server.asked, server.answered, server.now) == (IN_FLIGHT, IN_FLIGHT - 1, 0)

    asyncio.run(ask())


def test_a_task_that_is_cancelled_gives_its_requests_up() -> None:
    async def ask() -> None:
        client, server = await slow_client()
        asking = asyncio.create_task(client.classify(["x"] * 400))
        while server.now < IN_FLIGHT:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (server.asked, server.answered, server.now) == (IN_FLIGHT, 0, 0)

    asyncio.run(ask())


def test_an_answer_has_the_labels_of_the_version_that_gave_it() -> None:
    async def ask() -> None:
        client, server = await slow_client()

        async def label() -> str:
            return str(vars((await client.classify(["x"]))[0])["label"])

        assert await label() == "b"
        waiting = [asyncio.create_task(label()) for _ in range(3)]
        while server.now < len(waiting):
            await asyncio.sleep(0)
        server.live = "2"
        # Asked of version 1 and of version 2, and answered in any order.
        assert await asyncio.gather(*waiting, label(), label()) == ["b", "b", "b", "a", "a"]
        assert await label() == "a"
        server.live, server.gone = "3", ["3"]
        waiting = [asyncio.create_task(label())]
        while not server.now:
            await asyncio.sleep(0)
        server.live = "1"
        assert await waiting[0] == "b"
        server.live = "3"
        with pytest.raises(UnavailableError, match="model sst2 was another version each of the 4 times"):
            await label()

    asyncio.run(ask())


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
                with pytest.raises(NotFoundError, match="absent"):
                    await absent.classify(["good"])
            async with AsyncClient(url, protocol=protocol, version=7) as other:
                assert not await other.is_ready()
            for bad, where in ((["good"] * 6 + [""] + ["good"] * 3, "texts 4 to 7: the"), (["good", ""], "the")):
                with Client(url, protocol=protocol) as other, pytest.raises(RequestError) as wanted:
                    other.classify(bad)
                with pytest.raises(RequestError, match=rf"^{where} server .* TEXT\[\d\] is empty") as found:
                    await client.classify(bad)
                assert str(found.value) == str(wanted.value)
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


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_closed_client_says_so(protocol: Any) -> None:
    async def ask() -> None:
        client = AsyncClient("127.0.0.1:1", protocol=protocol, retries=3)
        await client.close()
        for _ in range(2):
            with pytest.raises(ServingError, match=r"at 127\.0\.0\.1:1 is closed; make another one"):
                await client.is_ready()
        await client.classify(["good"])

    with pytest.raises(ServingError, match=r"the client of the server at 127.0.0.1:1 is closed") as found:
        asyncio.run(ask())
    assert type(found.value) is ServingError


@pytest.mark.triton
def test_a_request_on_which_the_model_fails_is_not_sent_again(server: TritonServer) -> None:
    async def ask() -> None:
        async with AsyncClient(server.grpc_url, model="failing", retries=3) as client:
            await client.classify(["film"])

    def ask_in_turn(url: str, protocol: Any) -> None:
        with Client(url, model="failing", protocol=protocol, retries=3) as client:
            assert client.classify(["good"])
            client.classify(["film"])

    for fail in (
        lambda: asyncio.run(ask()),
        lambda: ask_in_turn(server.grpc_url, "grpc"),
        lambda: ask_in_turn(server.http_url, "http"),
    ):
        with pytest.raises(ServingError, match="failed on the request: the model answered a number") as found:
            fail()
        assert type(found.value) is ServingError
    (row,) = [row for row in server.control.statistics() if row["name"] == "failing"]
    # Two good ones, and each bad one once: Triton counts a request that the model itself refuses as answered.
    assert int(row["inference_stats"]["success"]["count"]) == 2 + 3


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
        assert classification(client, "bad").label == "negative"
    assert len(server.deaths()) == 1
