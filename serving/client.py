"""Asks a server for the labels, or the numbers, of texts or pairs of texts.

`Client` talks to Triton; `FakeClient` answers in process, for the tests of programs that use a `Classifier`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, assert_never

from serving.errors import RequestError, ServingError, UnavailableError
from serving.model import Text

if TYPE_CHECKING:
    from serving.transport import ModelFacts, Transport


Result = TypeVar("Result")

FIRST_PAUSE_S = 0.1
"""Pause before the first retry; it doubles each time."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What a model with labels says of one text or pair."""

    text: str
    """The text as it was sent, or the first of the pair."""

    pair: str | None = None
    """The second text of the pair."""

    label: str
    """The most probable label."""

    score: float
    """The probability of `label`, 0 to 1."""

    probabilities: dict[str, float]
    """The probability of each label, in the order of the model's labels; they sum to 1."""

    is_truncated: bool = False
    """Whether the text was longer than the model reads, so that its end was not looked at."""

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the `count` most probable labels, each with its probability, the most probable first."""
        return sorted(self.probabilities.items(), key=lambda item: -item[1])[:count]


@dataclass(frozen=True, kw_only=True)
class Regression:
    """What a model without labels says of one text or pair."""

    text: str
    """The text as it was sent, or the first of the pair."""

    pair: str | None = None
    """The second text of the pair."""

    value: float
    """The number, on the scale of the labels that the model was trained on."""

    is_truncated: bool = False
    """Whether the text was longer than the model reads, so that its end was not looked at."""


Answer = Classification | Regression
"""Which of the two is the model's nature: all answers of one model are of one kind."""


class Classifier(Protocol):
    """What `Client` and `FakeClient` have in common."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that can be answered; () if numbers are."""

    @property
    def is_pair(self) -> bool:
        """Whether each of the texts must be a pair."""

    def classify(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer for each text or pair, in order."""

    def is_ready(self) -> bool:
        """Say whether `classify` can be called now."""

    def close(self) -> None:
        """Let go of the connection."""


class Client:
    """Classifies texts, or pairs, on a running server.

        with Client("127.0.0.1:8001") as client:
            client.classify(["a gripping film"])[0].label
        with Client("127.0.0.1:8001", model="stsb") as client:
            client.classify([("a man sings", "someone is singing")])[0].value

    Nothing is sent before the first call. Use one client per thread. With gevent (locust), call
    `grpc.experimental.gevent.init_gevent()` before the first gRPC client is made.
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
        """Prepare a connection to `url`, host:port of the protocol; one request may take `timeout_s` seconds.

        A request that found no server, or one that cannot answer now, is sent up to `retries` times more, after 0.1,
        0.2, 0.4 ... seconds: to ask twice changes nothing on the server. What was refused, or late, is not sent again.
        `version` asks for one version of the model; None takes the one that the server serves to everybody.

        Raises ServingError if the address or the time is wrong, or if the client library is not installed.
        """
        address = address_of(url, protocol, timeout_s)
        self._model, self._retries = model, retries
        self._transport: Transport = _open(protocol, address, timeout_s)
        from serving.transport import Served

        self._served = Served(model, "" if version is None else str(version))
        self._facts: ModelFacts | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the model, asked of the server once; () if it answers numbers."""
        return self._known().labels

    @property
    def is_pair(self) -> bool:
        """Whether the model reads pairs, asked of the server once."""
        return self._known().is_pair

    def classify(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer for each text or (first, second) pair, in order; [] for no texts.

        A model with labels answers Classifications, one without answers Regressions. More texts than the model takes
        at once go as several requests. Raises RequestError if a text is refused (all of them must be good, and as the
        model reads them: single or pairs), UnavailableError if no server answers or its queue is full, and
        DeadlineError if a request takes longer than `timeout_s`.
        """
        raw = encode_all(texts)
        if not raw:
            return []
        facts = self._known()
        check_pairs(texts, self._model, facts.is_pair)
        found: list[Answer] = []
        for start in range(0, len(raw), facts.max_batch_size):
            stop = start + facts.max_batch_size
            try:
                found += self._request(facts, texts[start:stop], raw[start:stop])
            except RequestError as error:
                # The server counts the texts of one request; the caller has sent more.
                where = f"texts {start} to {min(stop, len(raw)) - 1}: " if len(raw) > facts.max_batch_size else ""
                raise RequestError(f"{where}{error}") from error
        return found

    def is_ready(self) -> bool:
        """Say whether the server and the model are ready; False if no server answers."""
        return self._transport.is_ready(self._served)

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

    def _request(self, facts: "ModelFacts", texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]) -> list[Answer]:
        inputs, outputs = asked(facts, raw)
        return answers(facts, texts, self._tried(lambda: self._transport.infer(self._served, inputs, outputs)))

    def _known(self) -> "ModelFacts":
        if self._facts is None:
            self._facts = self._tried(lambda: self._transport.facts(self._served))
        return self._facts

    def _tried(self, ask: Callable[[], Result]) -> Result:
        pause_s = FIRST_PAUSE_S
        for left in reversed(range(self._retries + 1)):
            try:
                return ask()
            except UnavailableError:
                if not left:
                    raise
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last try returns or raises")


class FakeClient:
    """A Classifier without a server: it answers from a mapping or a function, and keeps what it was asked.

    fake = FakeClient({"a gripping film": "positive"}, labels=("negative", "positive"))
    fake.classify(["a gripping film"])[0].label     # "positive"
    fake.calls                                      # [("a gripping film",)]

    Without labels it is a regression: FakeClient({("a man sings", "a song"): 3.5}, labels=(), pair=True).
    """

    def __init__(
        self,
        # A mapping's key type is invariant: `Text` here would refuse one of plain strings.
        answers: Mapping[Any, str | float | Answer] | Callable[[Any], str | float | Answer],
        *,
        labels: Sequence[str] = ("negative", "positive"),
        pair: bool = False,
        ready: bool = True,
    ) -> None:
        """Answer with `answers`: a bare label gets the score 1. A text or pair that a mapping lacks is refused."""
        self._answers = answers
        self._labels = tuple(labels)
        self._pair = pair
        self._ready = ready
        self.calls: list[tuple[Text, ...]] = []
        """The texts of each call of `classify`."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that were given."""
        return self._labels

    @property
    def is_pair(self) -> bool:
        """What `pair` said."""
        return self._pair

    def classify(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer for each text or pair, in order; raise RequestError as `Client` does."""
        encode_all(texts)
        check_pairs(texts, "fake", self._pair)
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

    def _answer(self, text: Text) -> Answer:
        if callable(self._answers):
            answer = self._answers(text)
        elif text in self._answers:
            answer = self._answers[text]
        else:
            raise RequestError(f"the fake has no answer for {text!r}; add it to its answers")
        if isinstance(answer, Answer):
            return answer
        if isinstance(answer, str) and answer in self._labels:
            return _classification(text, answer, 1.0, {label: float(label == answer) for label in self._labels})
        if isinstance(answer, str) or self._labels:
            raise RequestError(f"the fake answers {answer!r}, which is none of its labels {self._labels}")
        return _regression(text, float(answer))


def address_of(url: str, protocol: str, timeout_s: float) -> str:
    """Return host:port of a server's address; raise ServingError if it, or the time, is none."""
    scheme, _, rest = url.rpartition("://")
    address = rest.rstrip("/")
    if scheme not in ("", protocol) or ":" not in address or "/" in address:
        raise ServingError(f"server address {url!r} with protocol {protocol}; write host:port, like 127.0.0.1:8001")
    if not timeout_s > 0:
        raise ServingError(f"timeout_s is {timeout_s}; it must be more than 0 seconds")
    return address


def asked(facts: "ModelFacts", raw: Sequence[tuple[bytes, ...]]) -> tuple[dict[str, Sequence[bytes]], tuple[str, ...]]:
    """Return the inputs of a request for these texts, by name, and the outputs to ask for."""
    names = ("TEXT", "TEXT_PAIR") if facts.is_pair else ("TEXT",)
    inputs: dict[str, Sequence[bytes]] = dict(zip(names, zip(*raw, strict=True), strict=True))
    # The label and its score are in the probabilities, and each output costs the server time.
    return inputs, ("PROBABILITIES" if facts.labels else "VALUE", "TRUNCATED")


def answers(facts: "ModelFacts", texts: Sequence[Text], columns: Sequence[list[list[Any]]]) -> list[Answer]:
    """Return the answers that the outputs of a request hold."""
    found: list[Answer] = []
    for text, row, (is_cut,) in zip(texts, *columns, strict=True):
        if not facts.labels:
            found.append(_regression(text, row[0], is_cut))
            continue
        score = max(row)
        probabilities = dict(zip(facts.labels, row, strict=True))
        found.append(_classification(text, facts.labels[row.index(score)], score, probabilities, is_cut))
    return found


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


def _classification(
    text: Text, label: str, score: float, probabilities: dict[str, float], is_truncated: bool = False
) -> Classification:
    first, second = _parts(text)
    return Classification(
        text=first, pair=second, label=label, score=score, probabilities=probabilities, is_truncated=is_truncated
    )


def _regression(text: Text, value: float, is_truncated: bool = False) -> Regression:
    first, second = _parts(text)
    return Regression(text=first, pair=second, value=value, is_truncated=is_truncated)


def _parts(text: Text) -> tuple[str, str | None]:
    return text if isinstance(text, tuple) else (text, None)


def check_pairs(texts: Sequence[Text], model: str, is_pair: bool) -> None:
    """Raise RequestError unless each text is a pair, or none is."""
    for index, text in enumerate(texts):
        if isinstance(text, tuple) and not is_pair:
            raise RequestError(f"text {index} is a pair and model {model} reads single texts; send one str for each")
        if is_pair and not isinstance(text, tuple):
            raise RequestError(f"text {index} is a single one and model {model} reads pairs; send (first, second)")


def encode_all(texts: Sequence[Text]) -> list[tuple[bytes, ...]]:
    """Return texts or pairs as UTF-8; raise RequestError if one is none, or cannot be encoded."""
    if isinstance(texts, str):
        raise RequestError("texts is one str; pass a list of them: [text]")
    return [_encode(index, text) for index, text in enumerate(texts)]


def _encode(index: int, text: Text) -> tuple[bytes, ...]:
    if not isinstance(text, tuple):
        return (_encode_str(f"text {index}", text),)
    if len(text) != 2:
        raise RequestError(f"text {index} is a tuple of {len(text)}; each text must be a str, or a pair of them")
    return tuple(_encode_str(f"text {index}[{part}]", value) for part, value in enumerate(text))


def _encode_str(name: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise RequestError(f"{name} is a {type(text).__name__}; each text must be a str, or a pair (tuple) of them")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, "
            "which UTF-8 cannot carry; it was read with errors='surrogateescape' or cut inside a pair: decode it again"
        ) from error
