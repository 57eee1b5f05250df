"""What the clients have in common: texts are checked and encoded, and answers get their types."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from serving.errors import RequestError, ServingError, UnavailableError
from serving.model import Text

if TYPE_CHECKING:
    from serving.transport import ModelFacts

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.1
"""Pause before the first retry; it doubles each time."""

MAX_PAUSE_S = 5.0
"""Longest pause before a retry."""

MAX_TIMEOUT_S = 86_400
"""Longest time to wait for an answer, a day: gRPC takes an endless one for none."""

MAX_REQUEST_BYTES = 500_000
"""Most that the texts of one request may hold; `serving.entry.model`, which stands alone, has the same bound."""

MOST_CHANGES = 4
"""So often at most are texts sent because the version that they were sent for has changed meanwhile."""


class StaleFactsError(Exception):
    """A version has answered that cannot be asked for its labels any more: ask again. No caller sees this error."""


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


def address_of(url: str, protocol: str, timeout_s: float, retries: int = 0) -> str:
    """Return host:port of a server's address; raise ServingError if it, the time or the number of retries is none."""
    scheme, _, rest = url.rpartition("://")
    address = rest.rstrip("/")
    host, _, port = address.rpartition(":")
    if scheme not in ("", protocol) or not host or "/" in address:
        raise ServingError(f"server address {url!r} with protocol {protocol}; write host:port, like 127.0.0.1:8001")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ServingError(f"server address {url!r} has the port {port!r}; it must be a number from 1 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ServingError(f"server address {url!r} is ambiguous; write addresses of version 6 as [{host}]:{port}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ServingError(f"timeout_s is {timeout_s}; it must be more than 0 and at most {MAX_TIMEOUT_S} seconds")
    if not isinstance(retries, int) or retries < 0:
        raise ServingError(f"retries is {retries!r}; it must be a whole number of at least 0")
    return address


def pauses_s(retries: int) -> Iterator[float]:
    """Yield how long to wait before each retry: twice as long each time, up to `MAX_PAUSE_S`."""
    pause_s = FIRST_PAUSE_S
    for _ in range(retries):
        yield pause_s
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def asked(facts: "ModelFacts", raw: Sequence[tuple[bytes, ...]]) -> tuple[dict[str, Sequence[bytes]], tuple[str, ...]]:
    """Return the inputs of a request for these texts, by name, and the outputs to ask for."""
    names = ("TEXT", "TEXT_PAIR") if facts.is_pair else ("TEXT",)
    inputs: dict[str, Sequence[bytes]] = dict(zip(names, zip(*raw, strict=True), strict=True))
    # The label and its score are in the probabilities, and each output costs the server time.
    return inputs, ("PROBABILITIES" if facts.labels else "VALUE", "TRUNCATED")


def parts(raw: Sequence[tuple[bytes, ...]], max_batch_size: int) -> list[slice]:
    """Return which texts each request takes: `max_batch_size` at most, and no more bytes than a server takes."""
    found, start, size = [], 0, 0
    for index, row in enumerate(raw):
        more = sum(map(len, row))
        if index > start and (index - start == max_batch_size or size + more > MAX_REQUEST_BYTES):
            found.append(slice(start, index))
            start, size = index, 0
        size += more
    return [*found, slice(start, len(raw))]


@contextmanager
def numbered(part: slice, count: int) -> Iterator[None]:
    """Say in a refusal which texts of `count` were sent: the server numbers those of one request."""
    try:
        yield
    except RequestError as error:
        if part.stop - part.start == count:
            raise
        raise RequestError(f"texts {part.start} to {part.stop - 1}: {error}") from error


def restless(model: str) -> UnavailableError:
    """Return the error for a model whose versions change faster than it can be asked."""
    return UnavailableError(
        f"model {model} was another version each of the {MOST_CHANGES} times that it was asked; "
        "try later, or ask for one version"
    )


def answers(facts: "ModelFacts", texts: Sequence[Text], columns: Sequence[list[list[Any]]]) -> list[Answer]:
    """Return the answers that the outputs of a request hold."""
    found: list[Answer] = []
    for text, row, (is_cut,) in zip(texts, *columns, strict=True):
        if not facts.labels:
            found.append(regression(text, row[0], is_cut))
            continue
        score = max(row)
        probabilities = dict(zip(facts.labels, row, strict=True))
        found.append(classification(text, facts.labels[row.index(score)], score, probabilities, is_cut))
    return found


def check_answers(answers: Sequence[Answer], labels: Sequence[str], count: int) -> None:
    """Raise ServingError unless there are `count` answers that the model can give.

    Each is a known label with its probabilities or, where there are no labels, a finite number.
    """
    if len(answers) != count:
        raise ServingError(f"{count} texts got {len(answers)} answers")
    for answer in answers:
        if isinstance(answer, Regression):
            if labels or not math.isfinite(answer.value):
                raise ServingError(f"value {answer.value} is no answer of a model with the labels {list(labels)}")
            continue
        total = math.fsum(answer.probabilities.values())
        if answer.label not in labels:
            raise ServingError(f"label {answer.label!r} is none of {list(labels)}")
        if not abs(total - 1) < 1e-3 or answer.score != max(answer.probabilities.values()):
            raise ServingError(f"score {answer.score} does not fit probabilities {list(answer.probabilities.values())}")


def classification(
    text: Text, label: str, score: float, probabilities: dict[str, float], is_truncated: bool = False
) -> Classification:
    """Return the answer of a model with labels."""
    first, second = _parts(text)
    return Classification(
        text=first, pair=second, label=label, score=score, probabilities=probabilities, is_truncated=is_truncated
    )


def regression(text: Text, value: float, is_truncated: bool = False) -> Regression:
    """Return the answer of a model without labels."""
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


def listed(texts: Iterable[Text]) -> list[Text]:
    """Return texts or pairs that may come only once, as of a generator; raise RequestError for one str."""
    if isinstance(texts, str):
        raise RequestError("texts is one str; pass a list of them: [text]")
    return list(texts)


def encode_all(texts: Sequence[Text]) -> list[tuple[bytes, ...]]:
    """Return texts or pairs as UTF-8; raise RequestError if one is none, or cannot be encoded."""
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
