"""The student answers where it is sure, the teacher where not."""

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

from serving import Client, ModelError, RequestError, TritonServer, read, write
from serving.cascade import Cascade, choose_threshold
from serving.contents import files_of
from serving.verify import verify


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
    answers = [b if handed else a for a, b, handed in zip(student, teacher, asked, strict=True)]
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
