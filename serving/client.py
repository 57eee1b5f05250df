"""Asks a server for the labels of texts.

`Client` talks to Triton; `FakeClient` answers in process, for the tests of programs that use a `Classifier`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, assert_never

from serving.errors import RequestError, ServingError

if TYPE_CHECKING:
    from serving.transport import ModelFacts, Transport


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What a model says of one text."""

    text: str
    """The text as it was sent."""

    label: str
    """The most probable label."""

    score: float
    """The probability of `label`, 0 to 1."""

    probabilities: dict[str, float]
    """The probability of each label, in the order of the model's labels; they sum to 1."""


class Classifier(Protocol):
    """What `Client` and `FakeClient` have in common."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that can be answered."""

    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """Return one answer for each text, in order."""

    def is_ready(self) -> bool:
        """Say whether `classify` can be called now."""

    def close(self) -> None:
        """Let go of the connection."""


class Client:
    """Classifies texts on a running server.

        with Client("127.0.0.1:8001") as client:
            client.classify(["a gripping film"])[0].label

    Nothing is sent before the first call. Use one client per thread. With gevent (locust), call
    `grpc.experimental.gevent.init_gevent()` before the first gRPC client is made.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "sst2",
        protocol: Literal["http", "grpc"] = "grpc",
        timeout_s: float = 10.0,
    ) -> None:
        """Prepare a connection to `url`, host:port of the protocol; one request may take `timeout_s` seconds.

        Raises ServingError if the address or the time is wrong, or if the client library is not installed.
        """
        scheme, _, rest = url.rpartition("://")
        address = rest.rstrip("/")
        if scheme not in ("", protocol) or ":" not in address or "/" in address:
            raise ServingError(f"server address {url!r} with protocol {protocol}; write host:port, like 127.0.0.1:8001")
        if not timeout_s > 0:
            raise ServingError(f"timeout_s is {timeout_s}; it must be more than 0 seconds")
        self._model = model
        self._transport: Transport = _open(protocol, address, timeout_s)
        self._facts: ModelFacts | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the model, asked of the server once."""
        return self._known().labels

    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """Return one answer for each text, in order; [] for no texts.

        More texts than the model takes at once go as several requests. Raises RequestError if a text is refused (all
        of them must be good), UnavailableError if no server answers or its queue is full, and DeadlineError if a
        request takes longer than `timeout_s`.
        """
        if isinstance(texts, str):
            raise RequestError("texts is one str; pass a list of them: [text]")
        raw = [_encode(index, text) for index, text in enumerate(texts)]
        if not raw:
            return []
        facts = self._known()
        found: list[Classification] = []
        for start in range(0, len(raw), facts.max_batch_size):
            stop = start + facts.max_batch_size
            try:
                answers = self._transport.infer(self._model, raw[start:stop])
            except RequestError as error:
                # The server counts the texts of one request; the caller has sent more.
                where = f"texts {start} to {min(stop, len(raw)) - 1}: " if len(raw) > facts.max_batch_size else ""
                raise RequestError(f"{where}{error}") from error
            found += [
                Classification(
                    text=text, label=label, score=score, probabilities=dict(zip(facts.labels, row, strict=True))
                )
                for text, (label, score, row) in zip(texts[start:stop], answers, strict=True)
            ]
        return found

    def is_ready(self) -> bool:
        """Say whether the server and the model are ready; False if no server answers."""
        return self._transport.is_ready(self._model)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def _known(self) -> "ModelFacts":
        if self._facts is None:
            self._facts = self._transport.facts(self._model)
        return self._facts


class FakeClient:
    """A Classifier without a server: it answers from a mapping or a function, and keeps what it was asked.

    fake = FakeClient({"a gripping film": "positive"}, labels=("negative", "positive"))
    fake.classify(["a gripping film"])[0].label     # "positive"
    fake.calls                                      # [("a gripping film",)]
    """

    def __init__(
        self,
        answers: Mapping[str, str | Classification] | Callable[[str], str | Classification],
        *,
        labels: Sequence[str] = ("negative", "positive"),
        ready: bool = True,
    ) -> None:
        """Answer with `answers`: a bare label gets the score 1. A text that a mapping lacks is refused."""
        self._answers = answers
        self._labels = tuple(labels)
        self._ready = ready
        self.calls: list[tuple[str, ...]] = []
        """The texts of each call of `classify`."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that were given."""
        return self._labels

    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """Return one answer for each text, in order; raise RequestError as `Client` does."""
        if isinstance(texts, str):
            raise RequestError("texts is one str; pass a list of them: [text]")
        for index, text in enumerate(texts):
            _encode(index, text)
        self.calls.append(tuple(texts))
        return [self._answer(text) for text in texts]

    def is_ready(self) -> bool:
        """Say what `ready` said."""
        return self._ready

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        """Return the fake."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def _answer(self, text: str) -> Classification:
        if callable(self._answers):
            answer = self._answers(text)
        elif text in self._answers:
            answer = self._answers[text]
        else:
            raise RequestError(f"the fake has no answer for {text!r}; add it to its answers")
        if isinstance(answer, Classification):
            return answer
        if answer not in self._labels:
            raise RequestError(f"the fake answers {answer!r}, which is none of its labels {self._labels}")
        probabilities = {label: float(label == answer) for label in self._labels}
        return Classification(text=text, label=answer, score=1.0, probabilities=probabilities)


def _open(protocol: Literal["http", "grpc"], address: str, timeout_s: float) -> "Transport":
    # Loaded here, so that a program that only uses the fake or the types needs no client library.
    try:
        from serving import transport
    except ImportError as error:
        raise ServingError(
            f"the client needs the package {error.name}, which is not installed; pip install 'compressor[serve]'"
        ) from error
    match protocol:
        case "grpc":
            return transport.GrpcTransport(address, timeout_s)
        case "http":
            return transport.HttpTransport(address, timeout_s)
        case other:
            assert_never(other)


def _encode(index: int, text: str) -> bytes:
    """Return a text as UTF-8; raise RequestError if it is none, or cannot be encoded."""
    if not isinstance(text, str):
        raise RequestError(f"text {index} is a {type(text).__name__}; each text must be a str")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text {index} holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, "
            "which UTF-8 cannot carry; it was read with errors='surrogateescape' or cut inside a pair: decode it again"
        ) from error
