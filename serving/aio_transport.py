"""The two protocols of `aio.AsyncClient`: what `transport` has, for event loops."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import aiohttp
import grpc.aio
import tritonclient.http.aio as library
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.errors import DeadlineError, UnavailableError
from serving.messages import columns, infer_request
from serving.transport import (
    Answered,
    ModelFacts,
    Served,
    answered,
    border,
    channel_options,
    closed,
    facts_of,
    facts_of_json,
    http_request,
    no_server,
    readable,
)

_CONNECTIONS = 100


class AsyncTransport(Protocol):
    """One protocol of the server."""

    async def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""

    async def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""

    async def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""

    async def close(self) -> None:
        """Close the connection."""


class GrpcTransport:
    """Triton's gRPC service."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare a channel; nothing is sent yet."""
        self._address, self._timeout_s = address, timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        request = infer_request(model.name, model.version, inputs, outputs)
        with _grpc_border(self._address, self._timeout_s):
            response = await self._service.ModelInfer(request, timeout=self._timeout_s)
            return Answered(response.model_version, columns(response, outputs))

    async def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""
        request = service_pb2.ModelConfigRequest(name=model.name, version=model.version)
        with _grpc_border(self._address, self._timeout_s):
            return facts_of(model, (await self._service.ModelConfig(request, timeout=self._timeout_s)).config)

    async def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        request = service_pb2.ModelReadyRequest(name=model.name, version=model.version)
        try:
            with _grpc_border(self._address, self._timeout_s):
                server = await self._service.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout_s)
                found = await self._service.ModelReady(request, timeout=self._timeout_s)
                return bool(server.ready and found.ready)
        except (UnavailableError, DeadlineError):
            return False

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class HttpTransport:
    """Triton's HTTP service."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare connections, a hundred at most; nothing is sent yet."""
        self._address, self._timeout_s = address, timeout_s
        self._client = library.InferenceServerClient(address, conn_limit=_CONNECTIONS, conn_timeout=timeout_s)

    async def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        tensors, wanted = http_request(library, inputs, outputs)
        with _http_border(self._address, self._timeout_s):
            return answered(await self._client.infer(model.name, tensors, model.version, outputs=wanted), outputs)

    async def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""
        with _http_border(self._address, self._timeout_s):
            return facts_of_json(model, await self._client.get_model_config(model.name, model.version))

    async def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        try:
            with _http_border(self._address, self._timeout_s):
                return bool(
                    await self._client.is_server_ready()
                    and await self._client.is_model_ready(model.name, model.version)
                )
        except (UnavailableError, DeadlineError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


@contextmanager
def _grpc_border(address: str, timeout_s: float) -> Iterator[None]:
    """Turn the errors of gRPC into those of this package."""
    try:
        with border(address, timeout_s):
            yield
    except grpc.aio.UsageError as error:
        raise closed(address) from error


@contextmanager
def _http_border(address: str, timeout_s: float) -> Iterator[None]:
    """Turn the errors of HTTP into those of this package; some of its own have no base in the standard library."""
    with border(address, timeout_s), readable(address):
        try:
            yield
        except RuntimeError as error:
            # aiohttp has no type of its own for it.
            if "Session is closed" not in str(error):
                raise
            raise closed(address) from error
        except aiohttp.ClientError as error:
            if isinstance(error, TimeoutError | OSError):
                raise
            raise UnavailableError(no_server(address, str(error) or type(error).__name__)) from error
