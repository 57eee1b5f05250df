"""Asks a server for the labels, or the numbers, of texts or pairs of texts.

`Client` talks to Triton; `FakeClient` answers in process, for the tests of programs that use a `Classifier`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, assert_never

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
    classification,
    encode_all,
    listed,
    numbered,
    parts,
    pauses_s,
    regression,
    restless,
)
from serving.model import Text

if TYPE_CHECKING:
    from serving.transport import ModelFacts, Transport


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
        0.2, 0.4 ... seconds, 5 at most: to ask twice changes nothing on the server. What was refused, or late, is not
        sent again.
        `version` asks for one version of the model; None takes the one that the server serves to everybody.

        Raises ServingError if the address or the time is wrong, or if the client library is not installed.
        """
        address = address_of(url, protocol, timeout_s, retries)
        self._retries = retries
        self._transport: Transport = _open(protocol, address, timeout_s)
        from serving.transport import Served

        self._served = Served(model, "" if version is None else str(version))
        self._facts: ModelFacts | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the version that answered last, or would answer first; () if it answers numbers."""
        return self._known().labels

    @property
    def is_pair(self) -> bool:
        """Whether that version reads pairs."""
        return self._known().is_pair

    def classify(self, texts: Iterable[Text]) -> list[Answer]:
        """Return one answer for each text or (first, second) pair, in order; [] for no texts.

        A model with labels answers Classifications, one without answers Regressions. More texts than the model takes
        at once go as several requests. Each answer has the labels of the version that gave it, also while versions
        change. Raises RequestError if a text is refused (all of them must be good, and as the model reads them: single
        or pairs), UnavailableError if no server answers, its queue is full or it wants fewer requests, DeadlineError if
        a request takes longer than `timeout_s`, NotFoundError if there is no such model, and ServingError if the server
        fails on the request or turns this client away.
        """
        sent = listed(texts)
        raw = encode_all(sent)
        if not raw:
            return []
        for _ in range(MOST_CHANGES):
            facts = self._known()
            try:
                with suppress(StaleFactsError):
                    return self._classify(facts, sent, raw)
            except RequestError:
                # Another version may take what this one refuses.
                if not self._has_changed(facts):
                    raise
        raise restless(self._served.name)

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

    def _classify(self, facts: "ModelFacts", texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]) -> list[Answer]:
        check_pairs(texts, self._served.name, facts.is_pair)
        found: list[Answer] = []
        for part in parts(raw, facts.max_batch_size):
            with numbered(part, len(raw)):
                found += self._request(facts, texts[part], raw[part])
        return found

    def _request(self, facts: "ModelFacts", texts: Sequence[Text], raw: Sequence[tuple[bytes, ...]]) -> list[Answer]:
        inputs, outputs = asked(facts, raw)
        version, columns = self._tried(lambda: self._transport.infer(self._served, inputs, outputs))
        return answers(self._facts_of(version), texts, columns)

    def _known(self) -> "ModelFacts":
        if self._facts is None:
            self._facts = self._tried(lambda: self._transport.facts(self._served))
        return self._facts

    def _facts_of(self, version: str) -> "ModelFacts":
        """Return the facts of a version that has answered; raise StaleFactsError if it is gone since."""
        if self._facts is None or self._facts.version != version:
            # Before it is asked: whatever fails, `labels` must not be those of the version before.
            self._facts = None
            try:
                self._facts = self._transport.facts(self._served._replace(version=version))
            except (NotFoundError, RequestError, UnavailableError) as error:
                raise StaleFactsError from error
        return self._facts

    def _has_changed(self, facts: "ModelFacts") -> bool:
        """Say whether the model is other than these facts say, which are then the new ones."""
        try:
            now = self._transport.facts(self._served)
        except ServingError:
            return False
        if now != facts:
            self._facts = now
        return now != facts

    def _tried(self, ask: Callable[[], Result]) -> Result:
        for pause_s in pauses_s(self._retries):
            try:
                return ask()
            except UnavailableError:
                time.sleep(pause_s)
        return ask()


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

    def classify(self, texts: Iterable[Text]) -> list[Answer]:
        """Return one answer for each text or pair, in order; raise RequestError as `Client` does."""
        sent = listed(texts)
        encode_all(sent)
        check_pairs(sent, "fake", self._pair)
        self.calls.append(tuple(sent))
        return [self._answer(text) for text in sent]

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
            return classification(text, answer, 1.0, {label: float(label == answer) for label in self._labels})
        if isinstance(answer, str) or self._labels:
            raise RequestError(f"the fake answers {answer!r}, which is none of its labels {self._labels}")
        return regression(text, float(answer))


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
