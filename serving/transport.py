"""The border to Triton's client library: what it raises becomes one of `serving.errors` here, and nowhere else."""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from serving.errors import DeadlineError, RequestError, UnavailableError

Answer = tuple[str, float, list[float]]
"""Label, its probability, and the probabilities of all labels in the model's order."""

_OUTPUTS = ("LABEL", "SCORE", "PROBABILITIES")
_MAX_MESSAGE_BYTES = 2**31 - 1
_LATE = {"DEADLINE_EXCEEDED", "408", "504"}
_REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE"}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a client must know of a model on the server."""

    labels: tuple[str, ...]
    """Label names in the order of the probabilities."""

    max_batch_size: int
    """Most texts in one request."""


class Transport(Protocol):
    """One protocol of the server."""

    def infer(self, model: str, texts: Sequence[bytes]) -> list[Answer]:
        """Send one request and return one answer for each text."""

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

    def infer(self, model: str, texts: Sequence[bytes]) -> list[Answer]:
        """Send one request and return one answer for each text."""
        tensor = self._library.InferInput("TEXT", [len(texts), 1], "BYTES")
        tensor.set_data_from_numpy(_column(texts))
        outputs = [self._library.InferRequestedOutput(name) for name in _OUTPUTS]
        with _border(self._address, self._timeout_s):
            result = self._client.infer(model, [tensor], outputs=outputs, client_timeout=self._timeout_s)
        return _answers(result)

    def facts(self, model: str) -> ModelFacts:
        """Read the configuration of a model."""
        with _border(self._address, self._timeout_s):
            config = self._client.get_model_config(model, client_timeout=self._timeout_s).config
        return _facts(model, config.parameters["labels"].string_value, config.max_batch_size)

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

    def infer(self, model: str, texts: Sequence[bytes]) -> list[Answer]:
        """Send one request and return one answer for each text."""
        tensor = self._library.InferInput("TEXT", [len(texts), 1], "BYTES")
        tensor.set_data_from_numpy(_column(texts), binary_data=True)
        outputs = [self._library.InferRequestedOutput(name, binary_data=True) for name in _OUTPUTS]
        with _border(self._address, self._timeout_s):
            result = self._client.infer(model, [tensor], outputs=outputs)
        return _answers(result)

    def facts(self, model: str) -> ModelFacts:
        """Read the configuration of a model."""
        with _border(self._address, self._timeout_s):
            config = self._client.get_model_config(model)
        labels = config.get("parameters", {}).get("labels", {}).get("string_value", "")
        return _facts(model, labels, config["max_batch_size"])

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


def _answers(result: Any) -> list[Answer]:
    labels, scores, rows = (result.as_numpy(name) for name in _OUTPUTS)
    return [
        (label.decode("utf-8"), score, row)
        for label, score, row in zip(labels[:, 0], scores[:, 0].tolist(), rows.tolist(), strict=True)
    ]


def _facts(model: str, labels: str, max_batch_size: int) -> ModelFacts:
    if not labels:
        raise RequestError(
            f"model {model} names no labels in its configuration; ask for one that takes texts, not for its student"
        )
    return ModelFacts(labels=tuple(json.loads(labels)), max_batch_size=max_batch_size)


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
