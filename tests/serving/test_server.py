"""A real Triton server, asked over both protocols."""

import asyncio
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from serving import (
    Client,
    DeadlineError,
    NotFoundError,
    Queue,
    RequestError,
    ServedModel,
    ServingError,
    TritonServer,
    free_port,
    read,
    write,
)
from serving.aio import AsyncClient
from serving.operations import deploy, rollback
from tests.serving.conftest import classification, wait_until

pytestmark = pytest.mark.triton
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
Protocol = Literal["http", "grpc"]


@pytest.fixture(scope="module")
def server(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Start one server; publish twice before, so that the served version is not the first, with a teacher beside."""
    folder = tmp_path_factory.mktemp("served")
    # A long delay makes requests that come together share a batch.
    model: ServedModel = kit.tiny_model(folder / "model", queue=Queue(max_delay_us=20_000))
    teacher = kit.tiny_model(folder / "teacher", onnx=kit.write_graph(folder / "t.onnx", weights=kit.WEIGHTS * 2))
    write(kit.tiny_model(folder / "model", labels=("old", "older")), folder / "repository")
    write(model, folder / "repository", teacher=teacher)
    assert read(folder / "repository") == ("sst2", "sst2_student", "sst2_teacher")
    with TritonServer(folder / "repository", log=folder / "log", **kit.ports()) as started:
        yield started
    # The ports are free again, and nothing is left in memory.
    for port in (started.http_port, started.grpc_port, started.metrics_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def client_of(server: TritonServer, protocol: Protocol, **options: Any) -> Client:
    """Return a client of the server."""
    return Client(server.grpc_url if protocol == "grpc" else server.http_url, protocol=protocol, **options)


@protocols
def test_answers_are_consistent_for_every_batch_size(server: TritonServer, protocol: Protocol) -> None:
    texts = ["good film", "bad film", "fine", "bad good good", "é", "good " * 40, "unknown words", "bad", "a\tgood\n"]
    with client_of(server, protocol) as client:
        assert client.is_ready()
        assert client.labels == ("negative", "positive")
        alone = [classification(client, text) for text in texts]
        for answer, text in zip(alone, texts, strict=True):
            assert answer.text == text
            assert tuple(answer.probabilities) == client.labels
            assert answer.score == answer.probabilities[answer.label] == max(answer.probabilities.values())
            assert abs(sum(answer.probabilities.values()) - 1) < 1e-6
            assert answer.is_truncated == (text == "good " * 40)
            assert answer.top(1) == [(answer.label, answer.score)]
            assert [label for label, _ in answer.top(2)] == sorted(client.labels, reverse=answer.label == "positive")
        assert [answer.label for answer in alone[:5]] == ["positive", "negative", "positive", "positive", "positive"]
        # 9 texts are more than the 4 that the model takes at once.
        for count in range(1, len(texts) + 1):
            assert client.classify(texts[:count]) == alone[:count]


@protocols
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \n", "white space"),
        ("a\x00b", r"U\+0000"),
        ("é" * 60_000, "120000 bytes"),
        ("\u200b", "nothing"),
    ],
)
def test_bad_text_is_refused_with_its_reason(server: TritonServer, protocol: Protocol, text: str, message: str) -> None:
    with client_of(server, protocol) as client:
        with pytest.raises(RequestError, match=rf"refused the request: TEXT .*{message}"):
            client.classify([text])
        assert classification(client, "good").label == "positive"


def test_bad_text_among_many_is_found(server: TritonServer) -> None:
    with client_of(server, "grpc") as client:
        with pytest.raises(RequestError, match=r"texts 4 to 7: the server .* TEXT\[2\] is empty"):
            client.classify(["good"] * 6 + [""] + ["good"] * 3)
        with pytest.raises(RequestError, match=r"^the server .* TEXT\[1\] is empty"):
            client.classify(["good", ""])


@protocols
def test_bad_requests_do_not_hurt_their_neighbours(server: TritonServer, protocol: Protocol) -> None:
    texts = ["good", "", "bad", "x\x01", "good film", "a" * 100_001, "bad bad", " "]
    found: list[tuple[int, str]] = []
    barrier = threading.Barrier(len(texts))

    def ask(index: int) -> None:
        with client_of(server, protocol) as client:
            assert client.labels
            for _ in range(5):
                barrier.wait(20)
                try:
                    found.append((index, classification(client, texts[index]).label))
                except RequestError:
                    found.append((index, "refused"))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = ["positive", "refused", "negative", "refused", "positive", "refused", "negative", "refused"]
    assert sorted(found) == sorted([(index, label) for index, label in enumerate(expected)] * 5)


def test_requests_that_come_together_share_a_batch(server: TritonServer) -> None:
    def counts() -> tuple[int, int]:
        with urllib.request.urlopen(f"http://{server.http_url}/v2/models/sst2/stats") as answer:
            stats = json.load(answer)["model_stats"][0]
        return stats["inference_count"], stats["execution_count"]

    before = counts()
    barrier = threading.Barrier(4)

    def ask() -> None:
        with client_of(server, "grpc") as client:
            assert client.labels
            for _ in range(5):
                barrier.wait(20)
                client.classify(["good"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts, batches = (after - old for after, old in zip(counts(), before, strict=True))
    # The server counts a little later than it answers, so earlier tests may add to both.
    assert texts >= 20
    assert batches < texts


def raw_infer(server: TritonServer, model: str, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Send a request as a program without our client would, and return the answer or the error."""
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{model}/infer", data=json.dumps({"inputs": inputs}).encode()
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return dict(json.load(error)) | {"status": error.code}


def test_plain_json_works(server: TritonServer) -> None:
    text = {"name": "TEXT", "shape": [2, 1], "datatype": "BYTES", "data": ["good", "bad"]}
    answer = raw_infer(server, "sst2", [text])
    assert (answer["model_name"], answer["model_version"]) == ("sst2", "2")
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["LABEL"] == ["positive", "negative"]
    assert len(outputs["SCORE"]) == 2
    assert len(outputs["PROBABILITIES"]) == 4


@pytest.mark.parametrize(("shape", "data"), [([2], ["a", "b"]), ([1, 2], ["a", "b"]), ([5, 1], ["a"] * 5)])
def test_wrong_shape_is_refused(server: TritonServer, shape: list[int], data: list[str]) -> None:
    text = {"name": "TEXT", "shape": shape, "datatype": "BYTES", "data": data}
    answer = raw_infer(server, "sst2", [text])
    assert answer["status"] == 400
    assert "shape" in answer["error"] or "batch" in answer["error"]


def test_bytes_that_are_no_utf8_are_refused(server: TritonServer) -> None:
    import tritonclient.grpc as library

    tensor = library.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"good \xff"]], dtype=object))
    client = library.InferenceServerClient(server.grpc_url)
    try:
        with pytest.raises(library.InferenceServerException, match=r"INVALID_ARGUMENT.*not UTF-8 \(byte 5"):
            client.infer("sst2", [tensor])
        # Only what is asked for comes back.
        tensor.set_data_from_numpy(np.array([[b"good"]], dtype=object))
        result = client.infer("sst2", [tensor], outputs=[library.InferRequestedOutput("LABEL", class_count=0)])
        assert result.as_numpy("LABEL").tolist() == [[b"positive"]]
        assert result.as_numpy("SCORE") is None
    finally:
        client.close()


def test_student_answers_logits(server: TritonServer) -> None:
    def tensors(ids: list[int]) -> list[dict[str, Any]]:
        values = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        return [{"name": name, "shape": [1, len(ids)], "datatype": "INT64", "data": v} for name, v in values.items()]

    assert raw_infer(server, "sst2_student", tensors([2, 4, 3]))["outputs"][0]["data"] == [0, 2]
    assert "the graph refused" in raw_infer(server, "sst2_student", tensors([2, 999, 3]))["error"]
    assert "1 to 12 tokens" in raw_infer(server, "sst2_student", tensors([2] * 13))["error"]


@protocols
def test_teacher_answers_beside_the_student(server: TritonServer, protocol: Protocol) -> None:
    with client_of(server, protocol) as student, client_of(server, protocol, model="sst2_teacher") as teacher:
        assert classification(teacher, "good").score > classification(student, "good").score


@protocols
@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [("rte", NotFoundError, "unknown model: 'rte'"), ("sst2_student", RequestError, "names no labels")],
)
def test_wrong_model_is_named(
    server: TritonServer, protocol: Protocol, model: str, kind: type[ServingError], message: str
) -> None:
    with client_of(server, protocol, model=model) as client:
        assert client.is_ready() == (model == "sst2_student")
        with pytest.raises(kind, match=message):
            client.classify(["good"])


@protocols
def test_pair_is_refused_before_it_is_sent(server: TritonServer, protocol: Protocol) -> None:
    sentence = "^text 1 is a pair and model sst2 reads single texts; send one str for each$"
    with client_of(server, protocol) as client, pytest.raises(RequestError, match=sentence):
        client.classify(["good", ("good", "bad")])


def test_every_error_has_an_exit_code(server: TritonServer) -> None:
    with client_of(server, "grpc") as client, pytest.raises(ServingError) as caught:
        client.classify([""])
    assert caught.value.exit_code == 1


def test_metrics_are_served_and_count_every_text(server: TritonServer) -> None:
    def page() -> str:
        with urllib.request.urlopen(server.metrics_url) as answer:
            return str(answer.read().decode())

    def counted() -> int:
        found = re.search(r'compressor_texts_total{model="sst2",version="2"} (\d+)', page())
        return int(found[1]) if found else 0

    assert 'nv_inference_count{model="sst2"' in page()
    time.sleep(1.5)  # what other tests have asked is handed over within a second
    before = counted()
    with client_of(server, "grpc") as client:
        for _ in range(57):
            client.classify(["good"])
    # No further request comes that could bring the last of them.
    wait_until(lambda: counted() >= before + 57)
    assert counted() == before + 57
    for name in ("tokenise_seconds", "run_seconds", "tokens", "padded_tokens"):
        assert f'compressor_{name}_total{{model="sst2",version="2"}}' in page()


def test_the_best_labels_can_be_asked_of_triton(server: TritonServer) -> None:
    import tritonclient.grpc as library

    tensor = library.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"good"]], dtype=object))
    client = library.InferenceServerClient(server.grpc_url)
    try:
        asked = [library.InferRequestedOutput("PROBABILITIES", class_count=2)]
        (best, other) = client.infer("sst2", [tensor], outputs=asked).as_numpy("PROBABILITIES")[0]
        assert re.fullmatch(rb"0\.8\d+:1:positive", best)
        assert re.fullmatch(rb"0\.1\d+:0:negative", other)
    finally:
        client.close()


def test_server_listens_on_loopback_alone(server: TritonServer) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {server.http_port, server.grpc_port, server.metrics_port}
    addresses = {
        line[1].split(":")[0] for line in listening if line[3] == "0A" and int(line[1].split(":")[1], 16) in ports
    }
    assert addresses == {"0100007F"}


def test_server_is_not_in_the_session_of_its_caller(server: TritonServer) -> None:
    # A Ctrl-C in the caller's terminal reaches the caller alone.
    assert server.pid is not None
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_a_server_whose_metrics_cannot_be_read_is_not_ready(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wait_ready(5)
    monkeypatch.setattr(server, "metrics_port", free_port())
    with pytest.raises(DeadlineError, match=r"not ready after 0\.5 s"):
        server.wait_ready(0.5)


def test_serving_leaves_the_repository_as_published(server: TritonServer) -> None:
    assert read(server.repository) == ("sst2", "sst2_student", "sst2_teacher")


def test_connected_clients_answer_as_new_ones_do_whatever_is_deployed(kit: Any, tmp_path: Path) -> None:
    root, model = tmp_path / "repository", tmp_path / "model"
    three = kit.write_graph(tmp_path / "three.onnx", weights=np.pad(kit.WEIGHTS, ((0, 0), (0, 1))))
    one = kit.write_graph(tmp_path / "one.onnx", weights=kit.WEIGHTS[:, 1:])
    texts: list[Any] = ["good film", "bad film", "fine"]
    steps: list[tuple[ServedModel, list[Any]]] = [
        # The same graph, its columns named the other way round.
        (kit.tiny_model(model, labels=("positive", "negative")), texts),
        (kit.tiny_model(model, labels=("no", "yes", "maybe"), onnx=three, max_batch_size=2), texts),
        (kit.tiny_model(model, labels=(), onnx=one), texts),
        (kit.pair_model(tmp_path / "pairs", name="sst2"), [("good", "bad film"), ("a film", "é")]),
    ]
    write(kit.tiny_model(model), root)

    async def ask(server: TritonServer) -> None:
        connected = [client_of(server, protocol) for protocol in ("grpc", "http")]
        waiting = [AsyncClient(server.grpc_url), AsyncClient(server.http_url, protocol="http")]

        async def check(asked: list[Any]) -> list[Any]:
            with client_of(server, "grpc") as new:
                expected = new.classify(asked)
            found = [client.classify(asked) for client in connected]
            assert [*found, *[await client.classify(asked) for client in waiting]] == [expected] * 4
            return expected

        try:
            assert [answer.label for answer in await check(texts)] == ["positive", "negative", "positive"]
            for number, (served, asked) in enumerate(steps):
                write(served, root)
                deploy(server.control, "sst2")
                answers = await check(asked)
                if number == 0:
                    assert [answer.label for answer in answers] == ["negative", "positive", "negative"]
                assert all((client.labels, client.is_pair) == (served.labels, served.pair) for client in connected)
            rollback(server.control, "sst2")
            await check(texts)
        finally:
            for client in waiting:
                await client.close()

    with TritonServer(root, **kit.ports()) as server:
        asyncio.run(ask(server))
