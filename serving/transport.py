"""The border to Triton's client library: what it raises becomes one of `serving.errors` here, and nowhere else."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from serving.errors import DeadlineError, NotFoundError, RequestError, ServingError, UnavailableError
from serving.messages import Column, columns, infer_request

_MAX_MESSAGE_BYTES = 2**31 - 1
_LATE = {"DEADLINE_EXCEEDED", "408", "504"}
_FAILED = {"INTERNAL", "UNKNOWN", "500"}
# Said with the same status when the process of a model, or the server itself, has died: a new one comes.
_COMES_BACK = ("is not healthy", "Stream removed", "RST_STREAM")
# About what was sent; all else of the kind is about who sent it, or how often, and a gateway may have said it.
_REFUSED = {"INVALID_ARGUMENT", "400", "413"}
_TOO_LARGE = "larger than max"
"""What gRPC says, as RESOURCE_EXHAUSTED, of a message that is too large."""
_ABSENT = {"NOT_FOUND", "404"}
_FOR_GOOD = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "OUT_OF_RANGE", "FAILED_PRECONDITION"}
_SLOW_DOWN = "429"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a client must know of a model on the server."""

    labels: tuple[str, ...]
    """Label names in the order of the probabilities; () is a regression."""

    is_pair: bool
    """Whether it reads two texts."""

    max_batch_size: int
    """Most texts, or pairs, in one request."""

    version: str = field(compare=False)
    """The version that was asked for them; "" if the server chose one."""


class Served(NamedTuple):
    """What is asked on a server."""

    name: str
    version: str
    """"" leaves the choice to the server."""


class Answered(NamedTuple):
    """What a server answers to one request."""

    version: str
    """The version that answered."""

    columns: list[Column]
    """The outputs asked for."""


class Transport(Protocol):
    """One protocol of the server."""

    def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""

    def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""

    def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""

    def close(self) -> None:
        """Close the connection."""


class GrpcTransport:
    """Triton's gRPC service."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare a channel; nothing is sent yet."""
        from tritonclient.grpc import service_pb2_grpc

        self._address, self._timeout_s = address, timeout_s
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        request = infer_request(model.name, model.version, inputs, outputs)
        with border(self._address, self._timeout_s):
            response = self._service.ModelInfer(request, timeout=self._timeout_s)
            return Answered(response.model_version, columns(response, outputs))

    def config(self, model: Served) -> pb.ModelConfig:
        """Return the configuration of a model that is ready; raise NotFoundError if there is none."""
        request = service_pb2.ModelConfigRequest(name=model.name, version=model.version)
        with border(self._address, self._timeout_s):
            return self._service.ModelConfig(request, timeout=self._timeout_s).config

    def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""
        return facts_of(model, self.config(model))

    def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        request = service_pb2.ModelReadyRequest(name=model.name, version=model.version)
        try:
            with border(self._address, self._timeout_s):
                server = self._service.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout_s)
                return bool(server.ready and self._service.ModelReady(request, timeout=self._timeout_s).ready)
        except (UnavailableError, DeadlineError):
            return False

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class HttpTransport:
    """Triton's HTTP service; the library's connections are gevent's, plain threads can use them as well."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare a connection; nothing is sent yet."""
        import tritonclient.http as library
        from gevent import Timeout

        self._library, self._limit = library, Timeout
        self._address, self._timeout_s = address, timeout_s
        self._client = library.InferenceServerClient(address, connection_timeout=timeout_s, network_timeout=timeout_s)
        self._is_closed = False

    def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        tensors, asked = http_request(self._library, inputs, outputs)
        with self._asked(), readable(self._address):
            return answered(self._open().infer(model.name, tensors, model.version, outputs=asked), outputs)

    def facts(self, model: Served) -> ModelFacts:
        """Read the configuration of a model."""
        with self._asked(), readable(self._address):
            return facts_of_json(model, self._open().get_model_config(model.name, model.version))

    def is_ready(self, model: Served) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        try:
            with self._asked():
                client = self._open()
                return bool(client.is_server_ready() and client.is_model_ready(model.name, model.version))
        except (UnavailableError, DeadlineError):
            return False

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        self._client.close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Guard what is asked; the library's own limit counts again with each piece of an answer."""
        # An OSError: after any other, the library would count the connection as in use for ever.
        with border(self._address, self._timeout_s), self._limit(self._timeout_s, TimeoutError):
            yield

    def _open(self) -> Any:
        """Return the library's client; closed, it would wait for a connection for ever."""
        if self._is_closed:
            raise closed(self._address)
        return self._client


def served_config(address: str, model: str, version: int, timeout_s: float = 10.0) -> pb.ModelConfig | None:
    """Return the configuration with which a server, asked over gRPC, serves a version; None if it serves none.

    Raises UnavailableError if no server answers.
    """
    transport = GrpcTransport(address, timeout_s)
    try:
        return transport.config(Served(model, str(version)))
    except NotFoundError:
        return None
    finally:
        transport.close()


def http_request(
    library: Any, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """Return the inputs and outputs of one request as `library`, Triton's for HTTP, takes them."""
    tensors = []
    for name, texts in inputs.items():
        tensors.append(library.InferInput(name, [len(texts), 1], "BYTES"))
        tensors[-1].set_data_from_numpy(_column(texts), binary_data=True)
    return tensors, [library.InferRequestedOutput(name, binary_data=True) for name in outputs]


def _column(texts: Sequence[bytes]) -> NDArray[np.object_]:
    """Return texts as [texts, 1]; an object array, because numpy's own byte strings lose zeros at the end."""
    column = np.empty((len(texts), 1), dtype=np.object_)
    column[:, 0] = texts
    return column


def answered(result: Any, outputs: Sequence[str]) -> Answered:
    """Return what Triton's library for HTTP has read of an answer."""
    columns = [result.as_numpy(name).tolist() for name in outputs]
    return Answered(result.get_response()["model_version"], columns)


def facts_of(model: Served, config: pb.ModelConfig) -> ModelFacts:
    """Return what a client must know of a model with this configuration."""
    inputs = [tensor.name for tensor in config.input]
    return _facts(model, config.parameters["labels"].string_value, inputs, config.max_batch_size)


def facts_of_json(model: Served, config: Mapping[str, Any]) -> ModelFacts:
    """Return what a client must know of a model with this configuration, as HTTP gives it."""
    labels = config.get("parameters", {}).get("labels", {}).get("string_value", "")
    inputs = [tensor["name"] for tensor in config["input"]]
    return _facts(model, labels, inputs, config["max_batch_size"])


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return how a gRPC channel to a server is set up."""
    options = [
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        # A client that waits for a server to come up must notice it soon, not minutes later.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
        # Channels of one process otherwise share a connection, and what one of them was refused the others are told.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    # A proxy that the environment names for the internet cannot reach this machine's own loopback.
    return [*options, ("grpc.enable_http_proxy", 0)] if _is_loopback(address) else options


def _facts(model: Served, labels: str, inputs: Sequence[str], max_batch_size: int) -> ModelFacts:
    # A regression has an empty list there; a model that takes no texts has nothing.
    if not labels:
        raise RequestError(
            f"model {model.name} names no labels in its configuration; "
            "ask for one that takes texts, not for its student"
        )
    return ModelFacts(
        labels=tuple(json.loads(labels)),
        is_pair="TEXT_PAIR" in inputs,
        max_batch_size=max_batch_size,
        version=model.version,
    )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


@contextmanager
def border(
    address: str, timeout_s: float, remedy: str = "allow more (timeout_s) or send fewer texts"
) -> Iterator[None]:
    """Turn the errors of the client library and of its sockets into those of this package.

    `remedy` is what to do about an answer that is late.
    """
    late = f"the server at {address} gave no answer within {timeout_s:g} s; {remedy}"
    try:
        yield
    except (InferenceServerException, grpc.RpcError) as error:
        status, message = _cause(error)
        if status in _LATE:
            raise DeadlineError(late) from error
        if status in _REFUSED or (status == "RESOURCE_EXHAUSTED" and _TOO_LARGE in message):
            raise RequestError(f"the server at {address} refused the request: {message}") from error
        if status in _ABSENT:
            raise NotFoundError(
                f"the server at {address} lacks what is asked for: {message}; check name, version and address"
            ) from error
        if status in _FOR_GOOD or (status.startswith("4") and status.isdigit() and status != _SLOW_DOWN):
            raise ServingError(
                f"the server at {address} turned this client away ({status}): {message}; check the address, and what "
                "the client may do there"
            ) from error
        if status in _FAILED and not any(words in message for words in _COMES_BACK):
            reason = message.partition("\n")[0]
            raise ServingError(
                f"the server at {address} failed on the request: {reason}; it would fail again, look into its log"
            ) from error
        if status == "UNAVAILABLE" and "connect" in message:
            raise UnavailableError(no_server(address, message)) from error
        raise UnavailableError(
            f"the server at {address} cannot answer now: {message}; try later, or send less"
        ) from error
    except TimeoutError as error:
        raise DeadlineError(late) from error
    except ValueError as error:
        # gRPC has no type of its own for it.
        if "closed channel" not in str(error):
            raise
        raise closed(address) from error
    except (OSError, HTTPException) as error:
        reason = "the name is unknown" if isinstance(error, socket.gaierror) else str(error) or type(error).__name__
        raise UnavailableError(no_server(address, reason)) from error


@contextmanager
def readable(address: str) -> Iterator[None]:
    """Turn what comes of a web page, or of other JSON, in place of what Triton writes over HTTP, into NotFoundError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotFoundError(f"what answers at {address} is no Triton; check host and port") from error


def _cause(error: Any) -> tuple[str, str]:
    """Return the status, gRPC's name or HTTP's number, and the message of an error of the client library or of gRPC."""
    if isinstance(error, InferenceServerException):
        return (error.status() or "").removeprefix("StatusCode."), error.message()
    return error.code().name, error.details() or ""


def closed(address: str) -> ServingError:
    """Return the error for a client that was closed."""
    return ServingError(f"the client of the server at {address} is closed; make another one")


def no_server(address: str, reason: str) -> str:
    """Return the sentence for a server that cannot be reached."""
    return f"no server answers at {address} ({reason}); start one with `compressor serve`, or check host and port"
