"""`AsyncClient`: what `client.Client` does, for programs that wait in an event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, assert_never

from serving.aio_transport import AsyncTransport, GrpcTransport, HttpTransport
from serving.errors import NotFoundError, RequestError, ServingError, UnavailableError
from serving.exchange import (
    MOST_CHANGES,
    Answer,
    Result,
    StaleFactsError,
    address_of,
    answers,
    asked,
    check_pairs,
    encode_all,
    listed,
    numbered,
    parts,
    pauses_s,
    restless,
)
from serving.model import Text
from serving.transport import ModelFacts, Served

IN_FLIGHT = 4
"""Requests of one call of `classify` that the server has at a time: with more, the last would be late for waiting."""


class AsyncClient:
    """Classifies texts, or pairs, on a running server, over gRPC or HTTP.

        async with AsyncClient("127.0.0.1:8001") as client:
            (answer,) = await client.classify(["a gripping film"])

    Any number of tasks may share one client. Arguments, answers and errors are those of `Client`; more texts than the
    model takes at once go as several requests, `IN_FLIGHT` of them at the same time. Made where an event loop runs.
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
        address = address_of(url, protocol, timeout_s, retries)
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

    async def classify(self, texts: Iterable[Text]) -> list[Answer]:
        """Return one answer for each text or (first, second) pair, in order; [] for no texts.

        Raises what `Client.classify` does. After the first error no more requests are sent, and those under way are
        waited for: Triton 2.51 can die of a gRPC request that is given up. A task that is cancelled gives them up.
        """
        sent = listed(texts)
        raw = encode_all(sent)
        if not raw:
            return []
        for _ in range(MOST_CHANGES):
            facts = await self._known()
            try:
                with suppress(StaleFactsError):
                    return await self._classify(facts, sent, raw)
            except RequestError:
                # Another version may take what this one refuses.
                if not await self._has_changed(facts):
                    raise
        raise restless(self._served.name)

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

    async def _classify(
        self, facts: ModelFacts, texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]
    ) -> list[Answer]:
        check_pairs(texts, self._served.name, facts.is_pair)
        wanted = parts(raw, facts.max_batch_size)
        found: dict[int, list[Answer]] = {}
        errors: list[Exception] = []
        waiting = iter(wanted)

        async def ask() -> None:
            for part in waiting:
                try:
                    with numbered(part, len(raw)):
                        found[part.start] = await self._request(facts, texts[part], raw[part])
                except Exception as error:
                    errors.append(error)
                if errors:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(ask())
        if errors:
            raise errors[0]
        return [answer for part in wanted for answer in found[part.start]]

    async def _request(
        self, facts: ModelFacts, texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]
    ) -> list[Answer]:
        inputs, outputs = asked(facts, raw)
        version, columns = await self._tried(lambda: self._transport.infer(self._served, inputs, outputs))
        return answers(await self._facts_of(version), texts, columns)

    async def _known(self) -> ModelFacts:
        if self._facts is None:
            self._facts = await self._tried(lambda: self._transport.facts(self._served))
        return self._facts

    async def _facts_of(self, version: str) -> ModelFacts:
        """Return the facts of a version that has answered; raise StaleFactsError if it is gone since."""
        if self._facts is not None and self._facts.version == version:
            return self._facts
        try:
            facts = await self._transport.facts(self._served._replace(version=version))
        except (NotFoundError, RequestError, UnavailableError) as error:
            self._facts = None
            raise StaleFactsError from error
        self._facts = facts
        return facts

    async def _has_changed(self, facts: ModelFacts) -> bool:
        """Say whether the model is other than these facts say, which are then the new ones."""
        try:
            now = await self._transport.facts(self._served)
        except ServingError:
            return False
        if now != facts:
            self._facts = now
        return now != facts

    async def _tried(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        for pause_s in pauses_s(self._retries):
            try:
                return await ask()
            except UnavailableError:
                await asyncio.sleep(pause_s)
        return await ask()
