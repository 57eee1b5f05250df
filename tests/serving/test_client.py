"""The client against sockets that misbehave, and the fake. `test_server` asks a real server."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

import serving
from serving import (
    Classification,
    Classifier,
    Client,
    DeadlineError,
    FakeClient,
    Regression,
    RequestError,
    ServingError,
    Text,
    UnavailableError,
    free_port,
)

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
def test_texts_are_checked_before_anything_is_sent(protocol: Protocol) -> None:
    with Client(f"127.0.0.1:{free_port()}", protocol=protocol) as client:
        with pytest.raises(RequestError, match=r"text 1 holds the lone surrogate U\+DC80 at position 2"):
            client.classify(["good", "ab\udc80"])
        with pytest.raises(RequestError, match="texts is one str; pass a list"):
            client.classify("good")
        with pytest.raises(RequestError, match="text 0 is a bytes; each text must be a str"):
            client.classify([b"good"])
        with pytest.raises(RequestError, match=r"text 1\[1\] holds the lone surrogate U\+DC80 at position 0"):
            client.classify([("good", "bad"), ("good", "\udc80")])
        with pytest.raises(
            RequestError, match=r"text 0\[0\] is a NoneType; each text must be a str, or a pair \(tuple\)"
        ):
            client.classify([(None, "good")])
        with pytest.raises(RequestError, match="text 0 is a tuple of 3; each text must be a str, or a pair of them"):
            client.classify([("a", "b", "c")])
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
    errors = [value for value in vars(serving.errors).values() if isinstance(value, type)]
    assert all(issubclass(error, ServingError) for error in errors)
    assert {error for error in errors if error.exit_code == 3} == {serving.SmokeError}
    assert {error.exit_code for error in errors} == {1, 3}
    assert {error.__name__ for error in errors} <= set(serving.__all__)
