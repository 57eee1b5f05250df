"""A real Triton server with a classifier and a regression on pairs, against ONNX Runtime in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer

from serving import Classification, Client, Queue, Regression, RequestError, TritonServer, read, write

pytestmark = pytest.mark.triton
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
Protocol = Literal["http", "grpc"]
LABELS = ("entailment", "neutral", "contradiction")
MAX_TOKENS = 12
PAIRS = [
    ("good film", "bad film"),
    ("a film", "é"),
    ("good " * 40, "bad"),
    ("é", "fine bad good " * 30),
    ("good bad good bad good bad", "fine fine fine fine fine fine"),
    ("unknown words", "good"),
    ("bad", "a\tgood\n"),
    # Both longer than is read: the longer one keeps one token more, here the first.
    ("good bad " * 61, "fine film " * 60),
    ("é", "fine 👩\u200d👧 film é" * 90),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def server(kit: Any, folder: Path) -> Iterator[TritonServer]:
    """Start one server for both; a delay makes requests that come together share a batch."""
    draw = np.random.default_rng(0)
    shared = {"max_tokens": MAX_TOKENS, "queue": Queue(max_delay_us=5_000)}
    for name, labels in (("mnli", LABELS), ("stsb", ())):
        weights = draw.normal(size=(len(kit.WORDS), len(labels) or 1)).astype(np.float32)
        segments = draw.normal(size=(2, weights.shape[1])).astype(np.float32)
        graph = kit.write_graph(folder / f"{name}.onnx", weights=weights, segments=segments)
        write(kit.pair_model(folder, name=name, labels=labels, onnx=graph, **shared), folder / "repository")
    assert read(folder / "repository") == ("mnli", "mnli_student", "stsb", "stsb_student")
    with TritonServer(folder / "repository", log=folder / "log", **kit.ports()) as started:
        yield started


def client_of(server: TritonServer, protocol: Protocol, model: str) -> Client:
    """Return a client of the server."""
    return Client(server.grpc_url if protocol == "grpc" else server.http_url, protocol=protocol, model=model)


def logits(folder: Path, model: str) -> np.ndarray:
    """Return what the graph says of each pair, [pairs, columns]: one at a time, without padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    session = onnxruntime.InferenceSession(str(folder / f"{model}.onnx"), providers=["CPUExecutionProvider"])
    found = []
    for first, second in PAIRS:
        row = tokenizer.encode(first, second)
        names = {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        found.append(session.run(["logits"], {name: np.array([ids]) for name, ids in names.items()})[0][0])
    return np.array(found)


@protocols
def test_classifier_of_pairs_answers_what_the_graph_says(
    server: TritonServer, folder: Path, protocol: Protocol
) -> None:
    expected = np.exp(logits(folder, "mnli"))
    expected /= expected.sum(axis=1, keepdims=True)
    with client_of(server, protocol, "mnli") as client:
        assert (client.labels, client.is_pair) == (LABELS, True)
        # 9 pairs are more than the 4 that the model takes at once.
        for count in range(1, len(PAIRS) + 1):
            found = client.classify(PAIRS[:count])
            assert [(answer.text, answer.pair) for answer in found] == PAIRS[:count]
            for answer, row in zip(found, expected, strict=False):
                assert isinstance(answer, Classification)
                assert list(answer.probabilities) == list(LABELS)
                np.testing.assert_allclose(list(answer.probabilities.values()), row, rtol=1e-5)
                assert answer.label == LABELS[row.argmax()]
                assert answer.score == answer.probabilities[answer.label]


@protocols
def test_regression_answers_what_the_graph_says(server: TritonServer, folder: Path, protocol: Protocol) -> None:
    expected = logits(folder, "stsb")[:, 0]
    with client_of(server, protocol, "stsb") as client:
        assert (client.labels, client.is_pair) == ((), True)
        for count in range(1, len(PAIRS) + 1):
            found = client.classify(PAIRS[:count])
            assert all(isinstance(answer, Regression) for answer in found)
            assert [(answer.text, answer.pair) for answer in found] == PAIRS[:count]
            values = [answer.value for answer in found if isinstance(answer, Regression)]
            np.testing.assert_allclose(values, expected[:count], rtol=1e-5, atol=1e-6)


@protocols
def test_bad_half_is_refused_with_its_reason(server: TritonServer, protocol: Protocol) -> None:
    with client_of(server, protocol, "stsb") as client:
        with pytest.raises(RequestError, match=r"refused the request: TEXT_PAIR\[1\] is empty"):
            client.classify([("good", "bad"), ("good", " ")])
        with pytest.raises(RequestError, match=r"texts 4 to 4: the server .* TEXT .* holds nothing"):
            client.classify([*PAIRS[:4], ("\u200b", "good")])
        assert len(client.classify([("good", "bad")])) == 1


@protocols
def test_single_text_is_refused_before_it_is_sent(server: TritonServer, protocol: Protocol) -> None:
    sentence = r"^text 1 is a single one and model mnli reads pairs; send \(first, second\)$"
    with client_of(server, protocol, "mnli") as client, pytest.raises(RequestError, match=sentence):
        client.classify([("good", "bad"), "good"])


def test_student_of_pairs_answers_logits(server: TritonServer, folder: Path) -> None:
    import tritonclient.grpc as library

    values = {"input_ids": [2, 4, 7, 3, 5, 7, 3], "attention_mask": [1] * 7, "token_type_ids": [0, 0, 0, 0, 1, 1, 1]}
    tensors = []
    for name, ids in values.items():
        tensors.append(library.InferInput(name, [1, 7], "INT64"))
        tensors[-1].set_data_from_numpy(np.array([ids]))
    client = library.InferenceServerClient(server.grpc_url)
    try:
        for model in ("mnli", "stsb"):
            found = client.infer(f"{model}_student", tensors).as_numpy("logits")
            np.testing.assert_allclose(found[0], logits(folder, model)[0], rtol=1e-5)
    finally:
        client.close()
