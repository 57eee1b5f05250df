"""The border to Triton's client library: what it raises becomes one of `serving.errors` here, and nowhere else."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from serving.errors import DeadlineError, RequestError, UnavailableError

Column = list[list[Any]]
"""One output of a request: a list of values for each text."""

_MAX_MESSAGE_BYTES = 2**31 - 1
_LATE = {"DEADLINE_EXCEEDED", "408", "504"}
_REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE"}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a client must know of a model on the server."""

    labels: tuple[str, ...]
    """Label names in the order of the probabilities; () is a regression."""

    is_pair: bool
    """Whether it reads two texts."""

    max_batch_size: int
    """Most texts, or pairs, in one request."""


class Transport(Protocol):
    """One protocol of the server."""

    def infer(self, model: str, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> list[Column]:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""

    def facts(self, model: str) -> ModelFacts:
        """Read the configuration of a model."""

    def is_ready(self, model: str) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""

    def close(self) -> None:
        """Close the connection."""


class GrpcTransport:
    """Triton's gRPC service."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare a channel; nothing is sent yet."""
        import tritonclient.grpc as library

        options: list[tuple[str, int]] = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            # A client that waits for a server to come up must notice it soon, not minutes later.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if _is_loopback(address):
            # A proxy that the environment names for the internet cannot reach this machine's own loopback.
            options.append(("grpc.enable_http_proxy", 0))
        self._library = library
        self._address, self._timeout_s = address, timeout_s
        self._client = library.InferenceServerClient(address, channel_args=options)

    def infer(self, model: str, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> list[Column]:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        tensors = []
        for name, texts in inputs.items():
            tensors.append(self._library.InferInput(name, [len(texts), 1], "BYTES"))
            tensors[-1].set_data_from_numpy(_column(texts))
        asked = [self._library.InferRequestedOutput(name) for name in outputs]
        with _border(self._address, self._timeout_s):
            result = self._client.infer(model, tensors, outputs=asked, client_timeout=self._timeout_s)
        return [result.as_numpy(name).tolist() for name in outputs]

    def facts(self, model: str) -> ModelFacts:
        """Read the configuration of a model."""
        with _border(self._address, self._timeout_s):
            config = self._client.get_model_config(model, client_timeout=self._timeout_s).config
        inputs = [tensor.name for tensor in config.input]
        return _facts(model, config.parameters["labels"].string_value, inputs, config.max_batch_size)

    def is_ready(self, model: str) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        seconds = {"client_timeout": self._timeout_s}
        try:
            with _border(self._address, self._timeout_s):
                return bool(self._client.is_server_ready(**seconds) and self._client.is_model_ready(model, **seconds))
        except (UnavailableError, DeadlineError):
            return False

    def close(self) -> None:
        """Close the channel."""
        self._client.close()


class HttpTransport:
    """Triton's HTTP service; the library's connections are gevent's, plain threads can use them as well."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Prepare a connection; nothing is sent yet."""
        import tritonclient.http as library

        self._library = library
        self._address, self._timeout_s = address, timeout_s
        self._client = library.InferenceServerClient(address, connection_timeout=timeout_s, network_timeout=timeout_s)

    def infer(self, model: str, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> list[Column]:
        """Send one request, the texts of each input by its name, and return the outputs asked for."""
        tensors = []
        for name, texts in inputs.items():
            tensors.append(self._library.InferInput(name, [len(texts), 1], "BYTES"))
            tensors[-1].set_data_from_numpy(_column(texts), binary_data=True)
        asked = [self._library.InferRequestedOutput(name, binary_data=True) for name in outputs]
        with _border(self._address, self._timeout_s):
            result = self._client.infer(model, tensors, outputs=asked)
        return [result.as_numpy(name).tolist() for name in outputs]

    def facts(self, model: str) -> ModelFacts:
        """Read the configuration of a model."""
        with _border(self._address, self._timeout_s):
            config = self._client.get_model_config(model)
        labels = config.get("parameters", {}).get("labels", {}).get("string_value", "")
        inputs = [tensor["name"] for tensor in config["input"]]
        return _facts(model, labels, inputs, config["max_batch_size"])

    def is_ready(self, model: str) -> bool:
        """Say whether the server and a model are ready; False if no server answers."""
        try:
            with _border(self._address, self._timeout_s):
                return bool(self._client.is_server_ready() and self._client.is_model_ready(model))
        except (UnavailableError, DeadlineError):
            return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _column(texts: Sequence[bytes]) -> NDArray[np.object_]:
    """Return texts as [texts, 1]; an object array, because numpy's own byte strings lose zeros at the end."""
    column = np.empty((len(texts), 1), dtype=np.object_)
    column[:, 0] = texts
    return column


def _facts(model: str, labels: str, inputs: Sequence[str], max_batch_size: int) -> ModelFacts:
    # A regression has an empty list there; a model that takes no texts has nothing.
    if not labels:
        raise RequestError(
            f"model {model} names no labels in its configuration; ask for one that takes texts, not for its student"
        )
    return ModelFacts(labels=tuple(json.loads(labels)), is_pair="TEXT_PAIR" in inputs, max_batch_size=max_batch_size)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


@contextmanager
def _border(address: str, timeout_s: float) -> Iterator[None]:
    """Turn the errors of the client library and of its sockets into those of this package."""
    late = f"the server at {address} gave no answer within {timeout_s:g} s; allow more (timeout_s) or send fewer texts"
    try:
        yield
    except InferenceServerException as error:
        status, message = (error.status() or "").removeprefix("StatusCode."), error.message()
        if status in _LATE:
            raise DeadlineError(late) from error
        if status in _REFUSED or (status.startswith("4") and status.isdigit()):
            raise RequestError(f"the server at {address} refused the request: {message}") from error
        if status == "UNAVAILABLE" and "connect" in message:
            raise UnavailableError(_no_server(address, message)) from error
        raise UnavailableError(
            f"the server at {address} cannot answer now: {message}; try later, or send less"
        ) from error
    except TimeoutError as error:
        raise DeadlineError(late) from error
    except (OSError, HTTPException) as error:
        reason = "the name is unknown" if isinstance(error, socket.gaierror) else str(error) or type(error).__name__
        raise UnavailableError(_no_server(address, reason)) from error


def _no_server(address: str, reason: str) -> str:
    return f"no server answers at {address} ({reason}); start one with `compressor serve`, or check host and port"
