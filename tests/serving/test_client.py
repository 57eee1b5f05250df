"""The client against sockets that misbehave, and the fake. `test_server` asks a real server."""

import math
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import pytest
from tritonclient.utils import InferenceServerException

import serving
from serving import (
    Answer,
    Classification,
    Classifier,
    Client,
    DeadlineError,
    FakeClient,
    NotFoundError,
    Regression,
    RequestError,
    ServingError,
    Text,
    UnavailableError,
    free_port,
)
from serving.exchange import MOST_CHANGES, check_answers
from serving.transport import Answered, ModelFacts, Served, border

Protocol = Literal["http", "grpc"]
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@protocols
def test_nobody_there(protocol: Protocol) -> None:
    with Client(f"127.0.0.1:{free_port()}", protocol=protocol) as client:
        assert not client.is_ready()
        with pytest.raises(
            UnavailableError, match=r"no server answers at 127.0.0.1:\d+ .*start one with `compressor serve`"
        ):
            client.classify(["good"])


@protocols
def test_nobody_answers_in_time(protocol: Protocol, silent: str) -> None:
    with Client(silent, protocol=protocol, timeout_s=0.2) as client:
        assert not client.is_ready()
        with pytest.raises(DeadlineError, match=r"gave no answer within 0.2 s; allow more \(timeout_s\)"):
            client.classify(["good"])


def test_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"this is no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            Client(address, protocol="http", timeout_s=2) as client,
            pytest.raises(UnavailableError, match="no server"),
        ):
            client.classify(["good"])
        thread.join()


def test_unknown_host_is_said() -> None:
    client = Client("no-such-host.invalid:8000", protocol="http", timeout_s=2)
    with client, pytest.raises(UnavailableError, match="the name is unknown"):
        client.classify(["good"])


@protocols
def test_a_closed_client_says_so(protocol: Protocol, silent: str) -> None:
    client = Client(silent, protocol=protocol, timeout_s=0.2, retries=3)
    client.close()
    for ask in (lambda: client.classify(["good"]), client.is_ready) * 2:
        with pytest.raises(ServingError, match=r"the client of the server at .* is closed; make another one") as found:
            ask()
        assert type(found.value) is ServingError


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        ("StatusCode.INTERNAL", "the model answered a number that is not finite", ServingError),
        ("500", "the model answered a number that is not finite", ServingError),
        ("StatusCode.UNKNOWN", "what", ServingError),
        ("StatusCode.INTERNAL", "Stub process 'sst2_0_0' is not healthy.", UnavailableError),
        ("500", "Stub process 'sst2_0_0' is not healthy.", UnavailableError),
        ("StatusCode.UNKNOWN", "Stream removed", UnavailableError),
        ("StatusCode.UNAVAILABLE", "the queue is full", UnavailableError),
        ("503", "the queue is full", UnavailableError),
        ("StatusCode.INVALID_ARGUMENT", "TEXT is empty", RequestError),
        ("400", "TEXT is empty", RequestError),
        ("413", "the body is too large", RequestError),
        ("StatusCode.RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", RequestError),
        ("404", "no such model", NotFoundError),
        ("StatusCode.NOT_FOUND", "no such model", NotFoundError),
        # What a gateway says of who asks, and how often, is not about the texts.
        ("429", "slow down", UnavailableError),
        ("StatusCode.RESOURCE_EXHAUSTED", "slow down", UnavailableError),
        ("401", "who are you", ServingError),
        ("403", "not for you", ServingError),
        ("405", "not this way", ServingError),
        ("StatusCode.UNAUTHENTICATED", "who are you", ServingError),
        ("StatusCode.PERMISSION_DENIED", "not for you", ServingError),
        ("StatusCode.UNIMPLEMENTED", "no such service", ServingError),
    ],
)
def test_what_may_succeed_later_is_told_from_what_fails_again(
    status: str, message: str, kind: type[ServingError]
) -> None:
    with pytest.raises(ServingError, match=re.escape(message)) as found, border("127.0.0.1:1", 1):
        raise InferenceServerException(f"{message}\n\nAt:\n  model.py(1)", status)
    assert type(found.value) is kind


def test_other_errors_pass_the_border() -> None:
    with pytest.raises(ValueError, match=r"^a defect$"), border("127.0.0.1:1", 1):
        raise ValueError("a defect")


@protocols
def test_texts_are_checked_before_anything_is_sent(protocol: Protocol) -> None:
    with Client(f"127.0.0.1:{free_port()}", protocol=protocol) as client:
        with pytest.raises(RequestError, match=r"text 1 holds the lone surrogate U\+DC80 at position 2"):
            client.classify(["good", "ab\udc80"])
        with pytest.raises(RequestError, match="texts is one str; pass a list"):
            client.classify("good")
        with pytest.raises(RequestError, match=r"text 1\[1\] holds the lone surrogate U\+DC80 at position 0"):
            client.classify([("good", "bad"), ("good", "\udc80")])
        wrong: tuple[tuple[Any, str], ...] = (
            (b"good", "text 0 is a bytes; each text must be a str"),
            ((None, "good"), r"text 0\[0\] is a NoneType; each text must be a str, or a pair \(tuple\)"),
            (("a", "b", "c"), "text 0 is a tuple of 3; each text must be a str, or a pair of them"),
        )
        for text, message in wrong:
            with pytest.raises(RequestError, match=message):
                client.classify([text])
        assert client.classify([]) == []


@pytest.mark.parametrize(
    ("url", "protocol"), [("localhost", "grpc"), ("https://a:1", "http"), ("http://a:1", "grpc"), ("a:1/v2", "http")]
)
def test_wrong_address_is_named(url: str, protocol: Protocol) -> None:
    with pytest.raises(ServingError, match=rf"server address '{url}' with protocol {protocol}; write host:port"):
        Client(url, protocol=protocol)


def test_scheme_of_the_protocol_is_taken() -> None:
    Client("http://127.0.0.1:8000/", protocol="http").close()
    Client("grpc://127.0.0.1:8001").close()


def test_timeout_must_be_positive() -> None:
    with pytest.raises(ServingError, match="timeout_s is 0; it must be more than 0"):
        Client("127.0.0.1:8001", timeout_s=0)


class ChangingServer:
    """A transport to a server that comes to another version, once or with every answer."""

    def __init__(self, *versions: ModelFacts, gone: Sequence[str] = ()) -> None:
        """The first version is live until it has answered once, and so on; those in `gone` go when they have."""
        self.versions, self.gone = list(versions), gone
        self.calls: list[str] = []

    def infer(self, model: Served, inputs: Mapping[str, Sequence[bytes]], outputs: Sequence[str]) -> Answered:
        """Answer each text with 1, 2, ... for the columns; refuse an empty one."""
        self.calls.append("infer")
        facts = self.versions[0]
        if b"" in inputs["TEXT"]:
            raise RequestError("TEXT is empty")
        if len(inputs["TEXT"]) > facts.max_batch_size:
            raise RequestError("the batch is too large")
        if len(self.versions) > 1:
            self.versions.pop(0)
        row = [float(number) for number in range(len(facts.labels))]
        return Answered(facts.version, [[row for _ in inputs["TEXT"]], [[False] for _ in inputs["TEXT"]]])

    def facts(self, model: Served) -> ModelFacts:
        """Return the facts of the live version, as one that the server chose, or of the one asked for."""
        self.calls.append(f"facts {model.version}".rstrip())
        if model.version in self.gone:
            raise NotFoundError(f"version {model.version} is not ready")
        return (
            facts(model.version, *FACTS[model.version])
            if model.version
            else facts("", *FACTS[self.versions[0].version])
        )

    def is_ready(self, model: Served) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Do nothing."""


FACTS: dict[str, tuple[str, int]] = {"1": ("ab", 4), "2": ("ba", 4), "3": ("abc", 2)}
"""Labels and rows at once of each version."""


def facts(version: str, labels: str, rows: int) -> ModelFacts:
    return ModelFacts(labels=tuple(labels), is_pair=False, max_batch_size=rows, version=version)


def client_of(*versions: str, gone: Sequence[str] = ()) -> tuple[Client, ChangingServer]:
    """Return a client of a server with these versions, one after the other."""
    client = Client("127.0.0.1:8001")
    client.close()
    server = ChangingServer(*(facts(version, *FACTS[version]) for version in versions), gone=gone)
    client._transport = server
    return client, server


def labels_of(client: Client, *texts: str) -> list[str]:
    return [vars(answer)["label"] for answer in client.classify(texts)]


def test_a_version_is_asked_for_its_labels_once() -> None:
    client, server = client_of("1")
    assert [labels_of(client, "x") for _ in range(3)] == [["b"]] * 3
    assert server.calls == ["facts", "infer", "facts 1", "infer", "infer"]


def test_an_answer_has_the_labels_of_the_version_that_gave_it() -> None:
    client, _ = client_of("1", "1", "2", "3", "2")
    assert [labels_of(client, "x") for _ in range(6)] == [["b"], ["b"], ["a"], ["c"], ["a"], ["a"]]
    assert client.labels == ("b", "a")
    # Also within one call: more texts than are taken at once.
    client, _ = client_of("1", "2")
    assert labels_of(client, *"xxxxx") == ["b", "b", "b", "b", "a"]


def test_a_version_that_is_gone_when_it_is_asked_for_its_labels_is_not_believed() -> None:
    client, server = client_of("1", "2", "1", gone=("2",))
    assert [labels_of(client, "x") for _ in range(2)] == [["b"], ["b"]]
    assert server.calls == ["facts", "infer", "facts 1", "infer", "facts 2", "facts", "infer", "facts 1"]
    client, server = client_of("2", gone=("2",))
    with pytest.raises(UnavailableError, match="model sst2 was another version each of the 4 times that it was asked"):
        client.classify(["x"])
    assert server.calls.count("infer") == MOST_CHANGES


def test_labels_are_never_those_of_a_version_before_the_one_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = client_of("1", "2")
    assert labels_of(client, "x") == ["b"]

    def be_late(model: Served) -> ModelFacts:
        raise DeadlineError("late")

    with monkeypatch.context() as late:
        late.setattr(server, "facts", be_late)
        with pytest.raises(DeadlineError):
            client.classify(["x"])
    assert client.labels == ("b", "a")


def test_texts_that_another_version_takes_are_sent_again() -> None:
    client, server = client_of("1", "3")
    assert labels_of(client, "x") == ["b"]
    # Version 3 takes 2 texts at once.
    assert labels_of(client, *"xxxx") == ["c"] * 4
    server.calls.clear()
    with pytest.raises(RequestError, match=r"^texts 2 to 2: TEXT is empty$"):
        client.classify(["x", "x", ""])
    assert server.calls == ["infer", "infer", "facts"]


def label(name: str, score: float, *probabilities: float) -> Classification:
    given = dict(zip(("negative", "positive"), probabilities, strict=True))
    return Classification(text="a", label=name, score=score, probabilities=given)


@pytest.mark.parametrize(
    ("answer", "labels", "count", "sentence"),
    [
        (label("positive", 0.75, 0.25, 0.75), ("negative", "positive"), 1, ""),
        (label("other", 0.75, 0.25, 0.75), ("negative", "positive"), 1, "label 'other' is none of ['negative', 'pos"),
        (label("positive", 0.75, 0.25, 0.75), ("negative", "positive"), 2, "2 texts got 1 answers"),
        (
            label("positive", 0.25, 0.25, 0.75),
            ("negative", "positive"),
            1,
            "score 0.25 does not fit probabilities [0.2",
        ),
        (label("positive", 0.75, 0.5, 0.75), ("negative", "positive"), 1, "score 0.75 does not fit probabilities [0.5"),
        (label("positive", math.nan, math.nan, 0.5), ("negative", "positive"), 1, "score nan does not fit probabili"),
        (Regression(text="a", pair="b", value=2.5), (), 1, ""),
        (Regression(text="a", pair="b", value=math.nan), (), 1, "value nan is no answer of a model with the labels []"),
        (
            Regression(text="a", value=2.5),
            ("negative", "positive"),
            1,
            "value 2.5 is no answer of a model with the lab",
        ),
    ],
)
def test_what_cannot_be_an_answer_is_an_error(
    answer: Answer, labels: tuple[str, ...], count: int, sentence: str
) -> None:
    with pytest.raises(ServingError, match=re.escape(sentence)) if sentence else nullcontext():
        check_answers([answer], labels, count)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "serving.transport", raising=False)
    monkeypatch.delattr(serving, "transport", raising=False)
    monkeypatch.setitem(sys.modules, "tritonclient.utils", None)
    with pytest.raises(
        ServingError, match=r"tritonclient.utils, which is not installed; pip install 'compressor\[serve\]'"
    ):
        Client("127.0.0.1:8001")


def test_fake_is_a_classifier_like_the_client() -> None:
    fake: Classifier = FakeClient({"good": "positive"})
    real: Classifier = Client("127.0.0.1:8001")
    for name in ("classify", "is_ready", "labels", "is_pair", "close"):
        assert name in dir(fake)
        assert name in dir(real)
    real.close()


def test_fake_answers_from_a_mapping_and_keeps_the_calls() -> None:
    full = Classification(text="so so", label="negative", score=0.6, probabilities={"negative": 0.6, "positive": 0.4})
    with FakeClient({"good": "positive", "so so": full}) as fake:
        assert fake.classify(["good", "so so"]) == [
            Classification(text="good", label="positive", score=1.0, probabilities={"negative": 0.0, "positive": 1.0}),
            full,
        ]
        assert fake.classify([]) == []
        assert fake.calls == [("good", "so so"), ()]
        assert fake.is_ready()
        assert fake.labels == ("negative", "positive")
        assert not fake.is_pair
    assert not FakeClient({}, ready=False).is_ready()


def test_fake_answers_from_a_function() -> None:
    fake = FakeClient(lambda text: "long" if len(text) > 3 else "short", labels=("short", "long"))
    assert [vars(answer)["label"] for answer in fake.classify(["ab", "abcd"])] == ["short", "long"]


def test_fake_of_pairs_answers_labels_or_numbers() -> None:
    pair = ("a man sings", "a song")
    certain = {"no": 0.0, "yes": 1.0}
    assert FakeClient({pair: "yes"}, labels=("no", "yes"), pair=True).classify([pair]) == [
        Classification(text=pair[0], pair=pair[1], label="yes", score=1.0, probabilities=certain)
    ]
    full = Regression(text="a", pair="b", value=0.5)
    with FakeClient({pair: 3, ("a", "b"): full}, labels=(), pair=True) as fake:
        assert fake.classify([pair, ("a", "b")]) == [Regression(text=pair[0], pair=pair[1], value=3.0), full]
        assert (fake.labels, fake.is_pair, fake.calls) == ((), True, [(pair, ("a", "b"))])
        with pytest.raises(RequestError, match="text 0 is a single one and model fake reads pairs"):
            fake.classify(["good"])
    assert FakeClient({"good": 2.5}, labels=()).classify(["good"]) == [Regression(text="good", value=2.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other", "no answer for 'other'"),
        ("odd", "'blue', which is none of its labels"),
        ("number", "0.5, which is none of its labels"),
        ("\ud800", "surrogate"),
        (("good", "bad"), "text 0 is a pair and model fake reads single texts"),
    ],
)
def test_fake_refuses_what_the_server_would(text: Text, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FakeClient({"odd": "blue", "number": 0.5}).classify([text])


def test_fake_of_a_regression_answers_no_label() -> None:
    with pytest.raises(RequestError, match=r"the fake answers 'blue', which is none of its labels \(\)"):
        FakeClient({"odd": "blue"}, labels=()).classify(["odd"])


@pytest.mark.parametrize("make", [iter, dict.fromkeys, deque, tuple])
def test_texts_come_as_anything_that_gives_them(make: Callable[[list[str]], Iterable[str]]) -> None:
    given = ["x", "y", "z"]
    client, _ = client_of("1")
    fake = FakeClient(lambda _: "positive")
    for each in (client, fake):
        assert [answer.text for answer in each.classify(make(given))] == given
    assert fake.calls == [tuple(given)]


def test_fake_takes_a_list_as_the_client_does() -> None:
    with pytest.raises(RequestError, match="pass a list"):
        FakeClient({}).classify("good")


@pytest.mark.parametrize(
    "heavy", ["onnxruntime", "onnx", "tokenizers", "tritonclient", "grpc", "torch", "transformers"]
)
def test_package_imports_nothing_heavy(heavy: str, imported: set[str]) -> None:
    assert heavy not in imported


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Return the top-level modules that `import serving` loads in a fresh process."""
    code = "import sys, serving; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_public_names_are_sorted_and_exist() -> None:
    assert list(serving.__all__) == sorted(serving.__all__)
    for name in serving.__all__:
        found: Any = vars(serving)[name]
        assert found.__doc__
    errors: list[Any] = [value for value in vars(serving.errors).values() if isinstance(value, type)]
    assert all(issubclass(error, ServingError) for error in errors)
    assert {error for error in errors if error.exit_code == 3} == {serving.SmokeError}
    assert {error.exit_code for error in errors} == {1, 3}
    assert {error.__name__ for error in errors} <= set(serving.__all__)
