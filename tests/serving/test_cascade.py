"""The student answers where it is sure, the teacher where not."""

import json
import math
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import (
    Classification,
    Client,
    ModelError,
    RequestError,
    SmokeError,
    TritonServer,
    UnavailableError,
    contents,
    operations,
    read,
    versions,
    write,
)
from serving.cascade import Cascade, cascade_answers, choose_threshold
from serving.contents import files_of
from serving.control import Control
from serving.online import stored_answers, verify_served
from serving.operations import deploy, rollback
from serving.verify import verify
from tests.serving.conftest import classification


def rows(*probabilities: float) -> list[dict[str, float]]:
    """Rows by the probability of "yes"."""
    return [{"no": 1 - p, "yes": p} for p in probabilities]


def test_the_least_sure_rows_are_handed_over_until_it_is_good_enough() -> None:
    labels = ["yes", "yes", "no", "no", "yes"]
    student = rows(0.9, 0.4, 0.45, 0.2, 0.3)  # wrong at the second and the last
    teacher = rows(0.9, 0.9, 0.1, 0.9, 0.9)  # wrong at the fourth
    found = choose_threshold(student, teacher, labels, None)
    assert (found.student_accuracy, found.teacher_accuracy) == (0.6, 0.8)
    # The two least sure rows, 0.45 and 0.4, are the teacher's; the next one is as sure as 0.7.
    assert (found.escalated, found.accuracy, found.rows) == (0.4, 0.8, 5)
    assert found.threshold == pytest.approx((0.6 + 0.7) / 2)
    better = choose_threshold(student, teacher, labels, 1.0)
    assert (better.escalated, better.accuracy) == (0.6, 1.0)
    assert better.threshold == pytest.approx((0.7 + 0.8) / 2)
    assert choose_threshold(student, teacher, labels, 0.6).threshold == 0.0
    with pytest.raises(
        ModelError, match=r"no cascade of these models reaches an accuracy of 1.0000 on 1 rows; .* 0.0000"
    ):
        choose_threshold(rows(0.4), rows(0.3), ["yes"], 1.0)


def test_a_teacher_that_must_answer_all_is_always_asked() -> None:
    found = choose_threshold(rows(1.0, 1.0), rows(0.1, 0.2), ["no", "no"], None)
    assert (found.escalated, found.accuracy) == (1.0, 1.0)
    assert found.threshold > 1


@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.booleans()), min_size=1, max_size=30))
def test_the_threshold_does_what_it_says(found: list[tuple[float, float, bool]]) -> None:
    student, teacher = (rows(*(item[place] for item in found)) for place in (0, 1))
    labels = ["yes" if item[2] else "no" for item in found]
    cascade = choose_threshold(student, teacher, labels, None)
    asked = [max(row.values()) < cascade.threshold for row in student]
    answers = cascade_answers(student, teacher, cascade.threshold)
    assert answers == [b if handed else a for a, b, handed in zip(student, teacher, asked, strict=True)]
    right = [max(row, key=lambda name: row[name]) == label for row, label in zip(answers, labels, strict=True)]
    assert math.isclose(sum(right) / len(right), cascade.accuracy)
    assert math.isclose(sum(asked) / len(asked), cascade.escalated)
    assert cascade.accuracy >= cascade.teacher_accuracy - 1e-9


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Any]]:
    """A server of a cascade whose teacher names its labels in the other order, and contradicts the student."""
    folder = tmp_path_factory.mktemp("cascade")
    student = kit.tiny_model(folder / "model")
    onnx = kit.write_graph(folder / "t.onnx", weights=kit.WEIGHTS * 3)
    teacher = kit.tiny_model(folder / "teacher", onnx=onnx, labels=("positive", "negative"))
    # "good" has 0.88 in the student, "fine" 0.73, "good good" 0.98.
    cascade = Cascade(threshold=0.8, accuracy=1.0, student_accuracy=1.0, teacher_accuracy=1.0, escalated=0.5, rows=2)
    write(student, folder / "repository", teacher=teacher, cascade=cascade)
    assert read(folder / "repository") == ("sst2", "sst2_cascade", "sst2_student", "sst2_teacher")
    assert verify(folder / "repository") == []
    with TritonServer(folder / "repository", **kit.ports()) as server:
        yield server, (student, teacher)


@pytest.mark.triton
def test_each_row_is_answered_by_who_must(served: tuple[TritonServer, Any]) -> None:
    server, (student, teacher) = served
    texts = ["good", "fine", "good good", "bad", "fine fine", "fine bad", "bad bad bad"]
    own, asked = files_of(student).answers(texts), files_of(teacher).answers(texts)
    with Client(server.grpc_url, model="sst2_cascade") as client:
        assert client.labels == ("negative", "positive")
        expected = [a if max(a.values()) >= 0.8 else b for a, b in zip(own, asked, strict=True)]
        assert [a is e for a, e in zip(own, expected, strict=True)] == [True, False, True, True, True, False, True]
        answers = [*client.classify(texts[:4]), *client.classify(texts[4:])]
        for answer, wanted in zip(answers, expected, strict=True):
            assert isinstance(answer, Classification)
            assert answer.probabilities == pytest.approx(wanted, abs=1e-6)
            assert answer.label == max(wanted, key=lambda name: wanted[name])
        with pytest.raises(RequestError, match="TEXT is empty"):
            client.classify([""])
    with urllib.request.urlopen(server.metrics_url) as page:
        lines = page.read().decode()
    counted = {
        name: [float(value) for value in re.findall(rf"compressor_cascade_{name}_total{{.*}} (\d+)", lines)]
        for name in ("texts", "escalated_texts")
    }
    assert counted == {"texts": [7], "escalated_texts": [2]}


def test_a_cascade_needs_a_teacher_and_labels(kit: Any, tmp_path: Path) -> None:
    cascade = Cascade(threshold=0.5, accuracy=1, student_accuracy=1, teacher_accuracy=1, escalated=0, rows=1)
    with pytest.raises(ModelError, match="sst2 can have no cascade: that takes a teacher"):
        write(kit.tiny_model(tmp_path / "m"), tmp_path / "repository", cascade=cascade)
    score = kit.score_model(tmp_path / "s")
    with pytest.raises(ModelError, match="stsb can have no cascade"):
        write(score, tmp_path / "repository", teacher=score, cascade=cascade)


def test_a_cascade_without_its_teacher_is_found(kit: Any, tmp_path: Path) -> None:
    cascade = Cascade(threshold=0.5, accuracy=1, student_accuracy=1, teacher_accuracy=1, escalated=0, rows=1)
    model = kit.tiny_model(tmp_path / "m")
    root = tmp_path / "repository"
    folders = write(model, root, teacher=model, cascade=cascade)
    assert [folder.parent.name for folder in folders] == ["sst2", "sst2_cascade", "sst2_student", "sst2_teacher"]
    assert np.isclose(float((folders[1] / "cascade.json").read_text().split('"threshold": ')[1].split(",")[0]), 0.5)
    shutil.rmtree(root / "sst2_teacher")
    (finding,) = verify(root)
    assert "asks sst2_teacher, which the repository lacks; a server would say READY" in finding.fault


def publish(kit: Any, folder: Path, strength: float, threshold: float = 0.8) -> list[tuple[str, dict[str, float]]]:
    """Publish a student of this strength, a teacher and their cascade; return what the cascade must answer."""
    texts = ("good", "fine", "a bad film, \u00e9")
    onnx = kit.write_graph(folder / f"{strength}.onnx", weights=kit.WEIGHTS * strength)
    student = kit.tiny_model(folder / "model", onnx=onnx, warmup_texts=texts)
    onnx = kit.write_graph(folder / "t.onnx", weights=kit.WEIGHTS * -3)
    teacher = kit.tiny_model(folder / "teacher", onnx=onnx, labels=("positive", "negative"), warmup_texts=texts)
    cascade = Cascade(threshold=threshold, accuracy=1, student_accuracy=1, teacher_accuracy=1, escalated=0.5, rows=2)
    write(student, folder / "repository", teacher=teacher, cascade=cascade)
    own, asked = files_of(student).answers(texts), files_of(teacher).answers(texts)
    return [(text, a if max(a.values()) >= threshold else b) for text, a, b in zip(texts, own, asked, strict=True)]


def test_what_a_cascade_must_answer_is_stored_with_it(kit: Any, tmp_path: Path) -> None:
    expected = publish(kit, tmp_path, 1)
    # By hand: "fine" has the logits 0 and 1 in the student, which is not sure enough, and 0 and -3 in the teacher,
    # which names its labels the other way round.
    assert expected[1][1]["positive"] == pytest.approx(1 / (1 + math.exp(-3)))
    version = tmp_path / "repository" / "sst2_cascade" / "1"
    assert stored_answers(version) == expected
    rows = json.loads((version / "expected.json").read_text())
    assert [tuple(row["answer"]) for row in rows] == [kit.LABELS] * 3
    publish(kit, tmp_path, 1)
    assert not version.with_name("2").exists()
    # Another student changes what the same cascade answers.
    write(kit.tiny_model(tmp_path / "other", onnx=tmp_path / "t.onnx"), tmp_path / "repository")
    assert [set(answer.values()) for _, answer in stored_answers(version)] != [
        set(answer.values()) for _, answer in expected
    ]


@pytest.mark.parametrize("replaced", ["sst2", "sst2_teacher"])
def test_a_cascade_whose_threshold_was_chosen_for_another_model_is_warned_of(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replaced: str
) -> None:
    root = tmp_path / "repository"
    publish(kit, tmp_path, 1)
    with monkeypatch.context() as served:
        served.setattr("serving.repository.is_served", lambda _: True)
        onnx = kit.write_graph(tmp_path / "9.onnx", weights=kit.WEIGHTS * 9)
        teacher = kit.tiny_model(tmp_path / "other", labels=("positive", "negative"))
        write(kit.tiny_model(tmp_path / "model", onnx=onnx), root, teacher=teacher)
    monkeypatch.setattr(operations, "_try_out", lambda *_: 2)
    monkeypatch.setattr(Control, "live", lambda _, name: versions.newest(root / name))
    monkeypatch.setattr(Control, "load", lambda *_: None)
    control = Control(grpc_url="", key="", repository=str(root), staging="")
    said = f"version 1 of sst2_cascade was published with another version of {replaced} than the live one: its thresh"
    assert deploy(control, replaced).after == 2
    assert [said in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    assert rollback(control, replaced).after == 1
    assert caplog.records == []


@pytest.mark.triton
def test_a_cascade_is_asked_its_texts_when_it_is_deployed_and_verified(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    publish(kit, tmp_path, 1)
    with TritonServer(root, **kit.ports()) as server:
        assert verify_served(root, server.grpc_url) == []
        publish(kit, tmp_path, 0.5, threshold=0.7)
        # The student that it was published with is not live yet; later it is, and not that of the version before.
        assert deploy(server.control, "sst2_cascade").smoked == 3
        assert verify_served(root, server.grpc_url) == []
        assert deploy(server.control, "sst2").after == 2
        assert verify_served(root, server.grpc_url) == []
        assert rollback(server.control, "sst2_cascade").smoked == 3
        # One that was published with other answers than its own.
        monkeypatch.setattr(contents, "cascade_answers", lambda own, *_: own[::-1])
        publish(kit, tmp_path, 0.5, threshold=0.6)
        with pytest.raises(SmokeError, match="of sst2_cascade answers 'good' with"):
            deploy(server.control, "sst2_cascade")
        # The server has read the threshold before.
        file = root / "sst2_cascade" / "1" / "config.pbtxt"
        file.write_text(file.read_text().replace('"0.8"', '"0.0"'))
        findings = verify_served(root, server.grpc_url)
        assert [(found.model, found.fault[:19]) for found in findings] == [("sst2_cascade", "version 1 answers '")] * 3


@pytest.mark.triton
def test_a_cascade_whose_model_has_other_labels_now_says_so(kit: Any, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    expected = publish(kit, tmp_path, 1)
    with TritonServer(root, **kit.ports()) as server, Client(server.grpc_url, model="sst2_cascade") as client:
        for labels in (("positive", "negative"), ("no", "yes", "maybe")):
            assert classification(client, "good").label == "positive"
            more = ((0, 0), (0, len(labels) - 2))
            onnx = kit.write_graph(tmp_path / f"{len(labels)}.onnx", weights=np.pad(kit.WEIGHTS, more))
            write(kit.tiny_model(tmp_path / "model", labels=labels, onnx=onnx), root)
            deploy(server.control, "sst2")
            with pytest.raises(
                UnavailableError, match=r"sst2 has other labels now than \['negative', 'positive'\]; deploy"
            ):
                client.classify(["good"])
            assert stored_answers(root / "sst2_cascade" / "1") == expected
            (finding,) = verify_served(root, server.grpc_url)
            assert (finding.model, finding.place) == ("sst2_cascade", "server")
            assert "was published for sst2 with the labels" in finding.fault
            rollback(server.control, "sst2")
