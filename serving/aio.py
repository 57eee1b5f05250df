"""`AsyncClient`: what `client.Client` does, for programs that wait in an event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Literal, Self, assert_never

from serving.aio_transport import AsyncTransport, GrpcTransport, HttpTransport
from serving.client import FIRST_PAUSE_S, Answer, Result, address_of, answers, asked, check_pairs, encode_all
from serving.errors import UnavailableError
from serving.model import Text
from serving.transport import ModelFacts, Served


class AsyncClient:
    """Classifies texts, or pairs, on a running server, over gRPC or HTTP.

        async with AsyncClient("127.0.0.1:8001") as client:
            (answer,) = await client.classify(["a gripping film"])

    Any number of tasks may share one client. Arguments, answers and errors are those of `Client`; more texts than the
    model takes at once go as several requests at the same time. Made where an event loop runs.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "sst2",
        version: int | None = None,
        protocol: Literal["http", "grpc"] = "grpc",
        timeout_s: float = 10.0,
        retries: int = 0,
    ) -> None:
        """Prepare a connection; nothing is sent before the first call. Raises ServingError if the address is wrong."""
        address = address_of(url, protocol, timeout_s)
        self._served, self._retries = Served(model, "" if version is None else str(version)), retries
        self._transport: AsyncTransport
        match protocol:
            case "grpc":
                self._transport = GrpcTransport(address, timeout_s)
            case "http":
                self._transport = HttpTransport(address, timeout_s)
            case other:
                assert_never(other)
        self._facts: ModelFacts | None = None

    async def classify(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer for each text or (first, second) pair, in order; [] for no texts."""
        raw = encode_all(texts)
        if not raw:
            return []
        facts = await self._known()
        check_pairs(texts, self._served.name, facts.is_pair)
        step = facts.max_batch_size
        parts = await asyncio.gather(
            *(self._request(facts, texts[n : n + step], raw[n : n + step]) for n in range(0, len(raw), step))
        )
        return [answer for part in parts for answer in part]

    async def is_ready(self) -> bool:
        """Say whether the server and the model are ready; False if no server answers."""
        return await self._transport.is_ready(self._served)

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self.close()

    async def _request(
        self, facts: ModelFacts, texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]
    ) -> list[Answer]:
        inputs, outputs = asked(facts, raw)
        return answers(facts, texts, await self._tried(lambda: self._transport.infer(self._served, inputs, outputs)))

    async def _known(self) -> ModelFacts:
        if self._facts is None:
            self._facts = await self._tried(lambda: self._transport.facts(self._served))
        return self._facts

    async def _tried(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        for left in reversed(range(self._retries + 1)):
            try:
                return await ask()
            except UnavailableError:
                if not left:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (self._retries - left))
        raise AssertionError("the last try returns or raises")
