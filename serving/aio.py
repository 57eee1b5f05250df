"""`AsyncClient`: what `client.Client` does, for programs that wait in an event loop."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.client import FIRST_PAUSE_S, Answer, address_of, answers, asked, check_pairs, encode_all
from serving.errors import UnavailableError
from serving.messages import columns, infer_request
from serving.model import Text
from serving.transport import ModelFacts, border, channel_options, facts_of


class AsyncClient:
    """Classifies texts, or pairs, on a running server, over gRPC.

        async with AsyncClient("127.0.0.1:8001") as client:
            (answer,) = await client.classify(["a gripping film"])

    Any number of tasks may share one client. Arguments, answers and errors are those of `Client`; more texts than the
    model takes at once go as several requests at the same time.
    """

    def __init__(self, url: str, *, model: str = "sst2", timeout_s: float = 10.0, retries: int = 0) -> None:
        """Prepare a connection; nothing is sent before the first call. Raises ServingError if the address is wrong."""
        self._address, self._timeout_s = address_of(url, "grpc", timeout_s), timeout_s
        self._model, self._retries = model, retries
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options(self._address))
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._facts: ModelFacts | None = None

    async def classify(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer for each text or (first, second) pair, in order; [] for no texts."""
        raw = encode_all(texts)
        if not raw:
            return []
        facts = await self._known()
        check_pairs(texts, self._model, facts.is_pair)
        step = facts.max_batch_size
        parts = await asyncio.gather(
            *(self._request(facts, texts[n : n + step], raw[n : n + step]) for n in range(0, len(raw), step))
        )
        return [answer for part in parts for answer in part]

    async def is_ready(self) -> bool:
        """Say whether the server and the model are ready; False if no server answers."""
        request = service_pb2.ModelReadyRequest(name=self._model)
        try:
            with border(self._address, self._timeout_s):
                return bool((await self._service.ModelReady(request, timeout=self._timeout_s)).ready)
        except UnavailableError:
            return False

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

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
        request = infer_request(self._model, "", inputs, outputs)
        for left in reversed(range(self._retries + 1)):
            try:
                with border(self._address, self._timeout_s):
                    response = await self._service.ModelInfer(request, timeout=self._timeout_s)
                return answers(facts, texts, columns(response, outputs))
            except UnavailableError:
                if not left:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (self._retries - left))
        raise AssertionError("the last try returns or raises")

    async def _known(self) -> ModelFacts:
        if self._facts is None:
            request = service_pb2.ModelConfigRequest(name=self._model)
            with border(self._address, self._timeout_s):
                self._facts = facts_of((await self._service.ModelConfig(request, timeout=self._timeout_s)).config)
        return self._facts
