"""The page's server, asked over HTTP as a browser asks it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from compressor.errors import ArtifactError, CompressorError, ConfigError, ModelError
from compressor.tasks import TASKS
from compressor.ui import CHUNK, MOST_BYTES, STUDENT, TEACHER, Comparison, PageServer, Run, read_run
from serving.client import FakeClient
from serving.errors import DeadlineError, RequestError, ServingError, UnavailableError
from serving.exchange import Answer, Classification
from tests.reporting import make_run

# What each says positive to, with these probabilities.
TEACHER_SAYS = {"a good film": 0.9, "a long film": 0.6, "a bad film": 0.1, "an odd film": 0.7}
STUDENT_SAYS = {"a good film": 0.8, "a long film": 0.3, "a bad film": 0.2, "an odd film": 0.05}
RIGHT = [1, 1, 0, 1]


def client(positive: Mapping[str, float]) -> FakeClient:
    def answer(text: str) -> Answer:
        share = positive[text]
        label, both = ("positive" if share > 0.5 else "negative"), {"negative": 1 - share, "positive": share}
        return Classification(text=text, label=label, score=max(both.values()), probabilities=both)

    return FakeClient({text: answer(text) for text in positive})


def changing(positive: Mapping[str, float]) -> FakeClient:
    """A client that answers what `positive` holds at the time."""
    return FakeClient(lambda text: client(positive).classify([text])[0])


def failing(error: ServingError) -> FakeClient:
    def fail(text: Any) -> str:
        raise error

    return FakeClient(fail)


def a_run() -> Run:
    texts = [(text,) for text in TEACHER_SAYS]
    sizes = {TEACHER: 90_000_000, STUDENT: 15_000_000}
    return Run(task=TASKS["sst2"], size_bytes=sizes, texts=texts, label_N=np.array(RIGHT))


def comparison(**changes: Any) -> Comparison:
    clients = {TEACHER: client(TEACHER_SAYS), STUDENT: client(STUDENT_SAYS)}
    given: dict[str, Any] = {"name": "sst2", "clients": clients, "run": a_run()}
    return Comparison(**(given | changes))


@contextmanager
def serving(compared: Comparison, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(compared, host=host, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving(comparison()) as started:
        yield started


def call(
    server: PageServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def classify(server: PageServer, given: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    body = given if isinstance(given, bytes) else json.dumps(given).encode()
    status, _, text = call(server, "POST", "/classify", body, **({"Content_Type": "application/json"} | headers))
    return status, json.loads(text)


def test_a_text_gets_labels_probabilities_and_times_of_both(server: PageServer) -> None:
    status, found = classify(server, {"texts": ["a long film"]})
    assert status == 200
    assert list(found) == [TEACHER, STUDENT]
    assert (found[TEACHER]["label"], found[STUDENT]["label"]) == ("positive", "negative")
    assert found[STUDENT]["probabilities"] == {"negative": 0.7, "positive": 0.3}
    assert all(0 < model["latency_ms"] < 1000 and model["is_truncated"] is False for model in found.values())


def test_a_pair_gets_numbers_of_a_regression() -> None:
    clients = {
        name: FakeClient({("a man", "a song"): value}, labels=(), pair=True)
        for name, value in ((TEACHER, 3.5), (STUDENT, 3.25))
    }
    with serving(comparison(name="stsb", clients=clients, run=None)) as server:
        status, found = classify(server, {"texts": ["a man", "a song"]})
        assert (status, found[TEACHER]["value"], found[STUDENT]["value"]) == (200, 3.5, 3.25)
        page = call(server, "GET", "/")[2]
        assert page.count("<textarea") == 2
        assert "Start the page with --run" in page


def test_disagreements_come_surest_first_with_who_is_right(server: PageServer) -> None:
    status, _, text = call(server, "GET", "/disagreements")
    found = json.loads(text)
    assert (status, found["split"], found["count"], found["rows"]) == (200, "validation", 2, 4)
    assert [(row["text"], row["label"], row["teacher"], row["int8"]) for row in found["examples"]] == [
        ("an odd film", "positive", "positive, 70.0 %", "negative, 95.0 %"),
        ("a long film", "positive", "positive, 60.0 %", "negative, 70.0 %"),
    ]
    assert (found["only_first_right"], found["only_second_right"], found["p_value"]) == (2, 0, 0.5)


def test_the_validation_set_is_asked_at_the_first_look_and_once() -> None:
    clients = {TEACHER: client(TEACHER_SAYS), STUDENT: client(STUDENT_SAYS)}
    with serving(comparison(clients=clients)) as server:
        asked = [client.calls for client in clients.values()]
        call(server, "GET", "/")
        assert asked == [[], []]
        looks = [call(server, "GET", "/disagreements")[2] for _ in range(2)]
        assert looks[0] == looks[1]
        first, all_of_them = tuple(TEACHER_SAYS)[:1], tuple(TEACHER_SAYS)
        assert asked == [[first, all_of_them, first]] * 2


def test_another_version_of_a_model_is_asked_anew() -> None:
    says = dict(STUDENT_SAYS)
    compared = comparison(clients={TEACHER: client(TEACHER_SAYS), STUDENT: changing(says)})
    assert compared.disagreements()["count"] == 2
    # As after a deploy: the student says what the teacher says.
    says.update(TEACHER_SAYS)
    assert compared.disagreements()["count"] == 0


def test_disagreements_of_scores_are_those_that_are_far_apart() -> None:
    texts = [("a man", "a song"), ("a dog", "a cat")]
    answers = ((TEACHER, (3.5, 1.0)), (STUDENT, (3.45, 2.0)))
    clients = {
        name: FakeClient(dict(zip(texts, values, strict=True)), labels=(), pair=True) for name, values in answers
    }
    run = Run(task=TASKS["stsb"], size_bytes={}, texts=texts, label_N=np.array([3.0, 1.5], dtype=np.float32))
    found = comparison(name="stsb", clients=clients, run=run).disagreements()
    assert found["count"] == 1
    assert found["examples"] == [
        {"row": 1, "text": "a dog / a cat", "label": "1.50", "teacher": "1.00", "int8": "2.00"}
    ]
    assert "p_value" not in found


def test_without_a_run_there_is_no_validation_set() -> None:
    with serving(comparison(run=None)) as server:
        status, _, text = call(server, "GET", "/disagreements")
        assert status == 400
        assert "start the page with --run" in json.loads(text)["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("text 0 is empty; send a text"), 400),
        (UnavailableError("no server answers at 127.0.0.1:8001; start one"), 503),
        (DeadlineError("no answer within 10 s; give more time"), 504),
        (ServingError("something else"), 500),
    ],
)
def test_an_error_is_its_sentence_and_the_next_text_is_answered(error: ServingError, status: int) -> None:
    compared = comparison(clients={TEACHER: failing(error), STUDENT: client(STUDENT_SAYS)})
    with serving(compared) as server:
        assert classify(server, {"texts": ["a good film"]}) == (status, {"error": str(error)})
        assert classify(server, {"texts": ["a good film"]})[0] == status


@pytest.mark.parametrize(
    "given",
    [b"", b"{", b"[" * 100_000, b"null", b'"texts"', {}, {"texts": "a"}, {"texts": [1]}, {"texts": []},
     {"texts": ["a", "b"]}, b"\xff\xfe", {"texts": ["\ud800"]}],
)  # fmt: skip
def test_a_malformed_request_is_refused_in_a_sentence(server: PageServer, given: Any) -> None:
    status, found = classify(server, given)
    assert status == 400
    assert "send" in found["error"] or "decode it again" in found["error"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8080", "localhost:8080", "[::1]:8080", "LOCALHOST", socket.gethostname()]
)
def test_who_calls_it_by_an_address_or_its_name_is_answered(server: PageServer, host: str) -> None:
    assert call(server, "GET", "/", Host=host)[0] == 200


def test_who_calls_it_by_its_full_name_is_answered(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Models.example.com")
    assert call(server, "GET", "/", Host="models.example.com:8080")[0] == 200
    assert call(server, "GET", "/", Host="example.com:8080")[0] == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8080",
        "localhost.evil.example",
        "",
        "[",
        "evil@127.0.0.1",
        "[::1].evil.example",
    ],
)
def test_a_foreign_name_that_points_here_is_refused(server: PageServer, host: str) -> None:
    for path in ("/", "/disagreements"):
        status, _, text = call(server, "GET", path, Host=host)
        assert (status, "which is not this one" in text) == (403, True)
    assert classify(server, {"texts": ["a good film"]}, Host=host)[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_foreign_form_can_send_is_refused(server: PageServer, kind: str) -> None:
    assert classify(server, {"texts": ["a good film"]}, Content_Type=kind)[0] == 415


def test_a_body_beyond_the_limit_is_refused_unread(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
        head = f"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MOST_BYTES + 1}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"1,000,001 bytes; at most 1,000,000" in answer


@pytest.mark.parametrize("length", ["", "-1", "1e3", "²"])
def test_a_body_of_unknown_length_is_refused(server: PageServer, length: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
        head = f"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        assert b"".join(iter(lambda: raw.recv(65536), b"")).startswith(b"HTTP/1.1 411 ")


def test_the_page_allows_no_foreign_part(server: PageServer) -> None:
    first, second = (call(server, "GET", "/") for _ in range(2))
    policies = [headers["Content-Security-Policy"] for _, headers, _ in (first, second)]
    assert all(policy.startswith("default-src 'none'; script-src 'nonce-") for policy in policies)
    assert policies[0] != policies[1]
    assert "http" not in first[2]


def test_names_from_the_models_are_no_markup() -> None:
    name = "</script><script>alert(1)</script>"
    with serving(comparison(name=name, run=None)) as server:
        page = call(server, "GET", "/")[2]
    assert page.count("</script>") == 2
    assert "alert(1)</h1>" not in page


def test_other_paths_are_not_found(server: PageServer) -> None:
    assert [call(server, "GET", path)[0] for path in ("/../etc/passwd", "//[", "/x?y")] == [404] * 3
    assert call(server, "POST", "/", b"{}", Content_Type="application/json")[0] == 404


def test_a_connection_is_used_again_after_an_error(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    for text, status in (("unknown", 400), ("a good film", 200)):
        body = json.dumps({"texts": [text]})
        connection.request("POST", "/classify", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
        assert not answer.will_close
    connection.close()


def test_texts_are_asked_one_after_the_other() -> None:
    together: list[int] = []
    inside = threading.Semaphore(1)

    def answer(text: str) -> str:
        together.append(inside.acquire(blocking=False))
        inside.release()
        return "positive"

    compared = comparison(clients={TEACHER: FakeClient(answer), STUDENT: FakeClient(answer)}, run=None)
    with serving(compared) as server:
        threads = [threading.Thread(target=classify, args=(server, {"texts": ["a"]})) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == [True] * 16


def test_a_typed_text_waits_for_one_part_of_the_validation_set() -> None:
    begun = threading.Event()

    def answer(text: str) -> str:
        begun.set()
        time.sleep(0.0003)
        return "positive"

    many = 8 * CHUNK
    run = Run(task=TASKS["sst2"], size_bytes={}, texts=[("a",)] * many, label_N=np.zeros(many, dtype=int))
    clients = {TEACHER: FakeClient(answer), STUDENT: FakeClient(answer)}
    compared = comparison(clients=clients, run=run)
    look = threading.Thread(target=compared.disagreements)
    look.start()
    begun.wait()
    compared.classify(["typed"])
    look.join()
    calls = [texts[0] for client in clients.values() for texts in client.calls]
    assert calls.index("typed") <= 2


def test_a_port_in_use_is_one_sentence(server: PageServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on port \d+ of 127.0.0.1: .* in use; stop what holds it"):
        PageServer(server.comparison, host="127.0.0.1", port=server.server_port)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            lambda: {"clients": {TEACHER: FakeClient({}, labels=("a", "b")), STUDENT: client(STUDENT_SAYS)}},
            ConfigError,
            "serve a teacher and a student of one task",
        ),
        (
            lambda: {"clients": dict.fromkeys((TEACHER, STUDENT), FakeClient({}, labels=("a", "b")))},
            ModelError,
            "give the address of a server of this task",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_at_the_start(
    change: Callable[[], dict[str, Any]], error: type[CompressorError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        comparison(**change())


def test_sizes_and_validation_texts_come_from_the_run(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    table = pa.table(
        {"text": ["a", "b"], "label": pa.array([1, 0], pa.int32()), "origin": pa.array([0, 1], pa.int32())}
    )
    path = tmp_path / "1-corpus" / "validation.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    run = read_run(artifacts)
    assert run.size_bytes == {TEACHER: 90_000_000, STUDENT: 15_000_000}
    assert (list(run.texts), run.label_N.tolist(), run.task.name) == ([("a",), ("b",)], [1, 0], "sst2")


def test_a_run_without_an_int8_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no corpus, ONNX models or INT8 model; run `compressor build`"):
        read_run(make_run(tmp_path, leave_out=("7-quantize", "8-publish")))
