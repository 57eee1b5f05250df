"""Text models that ask another model of the server for their logits answer as those that open the graph themselves."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Client, RequestError, StartError, TritonServer, UnavailableError, write
from serving.cascade import Cascade

TEXTS = ["good", "bad film", "a fine film, é", "good " * 40, "fine bad good", "bad " * 9, "é", "film"]
CASCADE = Cascade(threshold=0.8, accuracy=1.0, student_accuracy=1.0, teacher_accuracy=1.0, escalated=0.5, rows=2)


def publish(kit: Any, folder: Path, runtime: str) -> Path:
    """Write a student, a teacher of other weights and a cascade of both for a runtime."""
    student = kit.tiny_model(folder / "model", runtime=runtime)
    onnx = kit.write_graph(folder / "t.onnx", weights=kit.WEIGHTS * 3)
    teacher = kit.tiny_model(folder / "teacher", onnx=onnx, runtime=runtime)
    write(student, folder / runtime, teacher=teacher, cascade=CASCADE)
    return folder / runtime


def with_runners(asking: Path, embedded: Path, root: Path) -> Path:
    """Return the models that ask, with Python runners of the same tensors in place of the onnxruntime backend.

    The installed server has no such backend; a Python model cannot be told from it by who asks.
    """
    shutil.copytree(asking, root)
    for marker in root.glob("*/.compressor.json"):
        marker.unlink()
    for graph, runner in (("sst2_student", "sst2_student"), ("sst2_teacher_graph", "sst2_student")):
        shutil.copy(embedded / runner / "1" / "model.py", root / graph / "1")
        config = (embedded / runner / "config.pbtxt").read_text().replace(f'name: "{runner}"', f'name: "{graph}"')
        (root / graph / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module")
def servers(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, TritonServer]]:
    """A server whose models ask, and one whose models open their graphs."""
    folder = tmp_path_factory.mktemp("bls")
    embedded = publish(kit, folder, "embedded")
    asking = with_runners(publish(kit, folder, "onnxruntime"), embedded, folder / "asking")
    with TritonServer(asking, **kit.ports()) as first, TritonServer(embedded, **kit.ports()) as second:
        yield first, second


def test_the_embedded_server_says_that_it_lacks_the_backend(kit: Any, tmp_path: Path) -> None:
    server = TritonServer(publish(kit, tmp_path, "onnxruntime"), **kit.ports())
    with pytest.raises(
        StartError,
        match=r"sst2 was published for the runtime onnxruntime, which .* container \(`compressor deploy-files`\)",
    ):
        server.start()


@pytest.mark.triton
@pytest.mark.parametrize("model", ["sst2", "sst2_teacher", "sst2_cascade"])
def test_asking_another_model_gives_the_same_answers(servers: tuple[TritonServer, TritonServer], model: str) -> None:
    asking, embedded = (Client(server.grpc_url, model=model) for server in servers)
    with asking, embedded:
        assert asking.labels == embedded.labels
        assert asking.classify(TEXTS) == embedded.classify(TEXTS)
        for text in TEXTS:
            assert asking.classify([text]) == embedded.classify([text])
        with pytest.raises(RequestError, match="TEXT is empty"):
            asking.classify([""])


@pytest.mark.triton
def test_a_student_that_is_gone_is_said_and_comes_back(servers: tuple[TritonServer, TritonServer]) -> None:
    server, _ = servers
    with Client(server.grpc_url) as client:
        expected = client.classify(["good"])
        server.control.unload("sst2_student")
        with pytest.raises(UnavailableError, match="sst2_student gave no answer"):
            client.classify(["good"])
        # What is wrong with a request is still said to its sender.
        with pytest.raises(RequestError, match="TEXT is empty"):
            client.classify([""])
        server.control.load("sst2_student")
        assert client.classify(["good"]) == expected
