"""The model that runs inside the server: text in, label out."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving import ServedModel, write
from serving.exchange import parts
from tests.serving.conftest import answers, wait_until


@pytest.fixture
def entry(make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(make_model(), tmp_path / "repository")[0])


def test_outputs_agree_with_each_other(kit: Any, entry: Any) -> None:
    response = entry.execute([kit.text_request("good film", "bad film", "film")])[0]
    label, score, probabilities = (response.outputs[name] for name in ("LABEL", "SCORE", "PROBABILITIES"))
    assert label.tolist() == [["positive"], ["negative"], ["negative"]]
    assert score.dtype == probabilities.dtype == np.float32
    assert score.shape == (3, 1)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(score[:, 0], probabilities.max(axis=1))
    # By hand: the logits of "good film" are 0 and 2.
    assert math.isclose(score[0, 0], math.exp(2) / (1 + math.exp(2)), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TEXT[1] is empty or white space alone"),
        (" \t\n\u00a0\u3000", "TEXT[1] is empty or white space alone"),
        ("\u200b", "nothing that the tokenizer can read"),
        ("good\x00film", r"control character U+0000 at position 4"),
        ("good\x7f", r"control character U+007F"),
        (b"good \xff film", "TEXT[1] is not UTF-8 (byte 5: invalid start byte)"),
        (b"good \xc3", "TEXT[1] is not UTF-8 (byte 5: unexpected end of data)"),
        ("\ud800".encode("utf-8", "surrogatepass"), "TEXT[1] is not UTF-8"),
        ("é" * 50_001, "TEXT[1] is 100002 bytes long; at most 100000 are taken"),
    ],
)
def test_bad_text_is_refused_and_its_neighbours_answered(kit: Any, entry: Any, text: str | bytes, message: str) -> None:
    first, refused, last = answers(
        entry, kit.text_request("good"), kit.text_request("bad", text), kit.text_request("bad")
    )
    assert (first, last) == (["positive"], ["negative"])
    assert message in refused


@pytest.fixture
def one_word_more(kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path) -> ServedModel:
    """A model whose tokenizer has a word, "new", that its graph has no row for."""
    return make_model(tokenizer=kit.write_tokenizer(tmp_path / "t.json", words=(*kit.WORDS, "new")))


def test_row_that_the_graph_refuses_is_named_and_its_neighbours_answered(
    kit: Any, one_word_more: ServedModel, load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    entry = load_entry(write(one_word_more, tmp_path / "repository")[0])
    texts = ("good", "bad"), ("fine", "a new film", "good"), ("",), ("bad " * 20,), ("new",)
    responses = entry.execute([kit.text_request(*request) for request in texts])
    labels = [response.outputs["LABEL"].tolist() for response in (responses[0], responses[3])]
    assert labels == [[["positive"], ["negative"]], [["negative"]]]
    errors = [responses[number].error for number in (1, 2, 4)]
    assert [error.code for error in errors] == [kit.FakeTritonError.INVALID_ARG] * 3
    # A cascade tells by the first word that the text is at fault.
    assert str(errors[0]).startswith("TEXT 'a new film' cannot be run: ")
    assert "idx=9" in str(errors[0])
    assert str(errors[2]).startswith("TEXT 'new' cannot be run: ")
    entry.finalize()
    counted = kit.FakeFamily.counted
    assert (counted["compressor_texts_total"], counted["compressor_refused_requests_total"]) == (3, 3)
    assert counted["compressor_truncated_texts_total"] == 1


def test_row_of_a_regression_that_the_graph_refuses_is_named(
    kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    model = kit.score_model(tmp_path, tokenizer=kit.write_tokenizer(tmp_path / "t.json", words=(*kit.WORDS, "new")))
    entry = load_entry(write(model, tmp_path / "repository")[0])
    first, refused = entry.execute([kit.pair_request(("good", "film")), kit.pair_request(("good", "new"))])
    assert first.outputs["VALUE"].tolist() == [[2.0]]
    assert str(refused.error).startswith("TEXT 'good' cannot be run: ")


@pytest.mark.parametrize("reason", ["onnx runtime error 2: idx=9", "the graph refused the tensors: idx=9", "is full"])
def test_row_that_an_asked_graph_refuses_is_named_and_its_neighbours_answered(
    kit: Any,
    one_word_more: ServedModel,
    load_entry: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    written = write(replace(one_word_more, runtime="onnxruntime"), tmp_path / "repository")
    entry = load_entry(written[0])
    backend = sys.modules["triton_python_backend_utils"]
    rows: list[int] = []

    class FakeInferenceRequest:
        """Triton's request to another model of the server."""

        def __init__(self, *, inputs: list[Any], **_: Any) -> None:
            self.tensors = {tensor.name: tensor.value for tensor in inputs}

        def exec(self) -> Any:
            ids, mask = (self.tensors[name] for name in ("input_ids", "attention_mask"))
            rows.append(len(ids))
            is_bad = ids.max() >= len(kit.WEIGHTS)
            logits = None if is_bad else (kit.WEIGHTS[ids] * mask[:, :, None]).sum(axis=1)
            error = SimpleNamespace(message=lambda: reason)
            return SimpleNamespace(has_error=lambda: is_bad, error=lambda: error, logits=logits)

    names = {
        "InferenceRequest": FakeInferenceRequest,
        "PreferredMemory": lambda *_: None,
        "TRITONSERVER_MEMORY_CPU": 0,
        "get_output_tensor_by_name": lambda response, name: kit.FakeTensor(name, response.logits),
    }
    for name, value in names.items():
        monkeypatch.setattr(backend, name, value, raising=False)
    monkeypatch.setattr(kit.FakeTritonError, "UNAVAILABLE", "unavailable", raising=False)
    requests = [kit.text_request(*texts) for texts in (("good",), ("bad", "new"), ("",))]
    first, refused, empty = entry.execute(requests)
    assert "empty" in str(empty.error)
    if reason == "is full":
        # No fault of a row: the student is not asked again for each of them.
        assert rows == [3]
        assert {first.error.code, refused.error.code} == {kit.FakeTritonError.UNAVAILABLE}
        entry.finalize()
        assert kit.FakeFamily.counted == {"compressor_refused_requests_total": 1}
        return
    assert rows == [3, 1, 1, 1]
    assert first.outputs["LABEL"].tolist() == [["positive"]]
    assert (refused.error.code, str(refused.error)) == (
        kit.FakeTritonError.INVALID_ARG,
        f"TEXT 'new' cannot be run: {reason}; leave it out",
    )


def test_lone_text_is_not_numbered(kit: Any, entry: Any) -> None:
    assert answers(entry, kit.text_request("")) == ["TEXT is empty or white space alone; send at least one word"]


def test_refusal_is_the_senders_fault(kit: Any, entry: Any) -> None:
    assert entry.execute([kit.text_request("")])[0].error.code == kit.FakeTritonError.INVALID_ARG


@pytest.mark.parametrize("shape", [(0, 1), (2,), (1, 2)])
def test_wrong_shape_is_refused(kit: Any, entry: Any, shape: tuple[int, ...]) -> None:
    wrong = kit.request_of(TEXT=np.full(shape, b"good", dtype=object))
    refused, answered = answers(entry, wrong, kit.text_request("good"))
    assert "TEXT has shape" in refused
    assert answered == ["positive"]


@pytest.mark.parametrize("text", ["good\tfilm\r\n", "a" * 100_000, "good \x80\x99 film", "\ufeffgood", "好 good", "é"])
def test_unusual_text_is_answered(kit: Any, entry: Any, text: str) -> None:
    assert answers(entry, kit.text_request(text))[0][0] in ("negative", "positive")


def test_only_refused_requests_are_fine(kit: Any, entry: Any) -> None:
    assert all("TEXT" in answer for answer in answers(entry, kit.text_request(""), kit.text_request("\x00")))


def test_no_requests_give_no_responses(kit: Any, entry: Any) -> None:
    assert entry.execute([]) == []


def shapes_run(entry: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that collects the rows and tokens of each run."""
    shapes: list[tuple[int, int]] = []
    feed = entry.feed

    def noted(encodings: Any, width: int) -> Any:
        shapes.append((len(encodings), width))
        return feed(encodings, width)

    monkeypatch.setattr(entry, "feed", noted)
    return shapes


def test_large_batches_are_cut(kit: Any, entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = shapes_run(entry, monkeypatch)
    texts = ["good", "bad", "fine"] * 3
    assert answers(entry, kit.text_request(*texts[:5]), kit.text_request(*texts[5:])) == [
        ["positive", "negative", "positive", "positive", "negative"],
        ["positive", "positive", "negative", "positive"],
    ]
    assert shapes == [(4, 8), (4, 8), (1, 8)]


def test_rows_of_one_width_run_together_and_none_is_padded_to_a_longer_one(
    kit: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = shapes_run(entry, monkeypatch)
    found = answers(entry, kit.text_request("good", "bad " * 50), kit.text_request("good " * 9, "bad"))
    assert found == [["positive", "negative"], ["positive", "negative"]]
    # max_tokens is 12, and the position table may end there.
    assert shapes == [(2, 8), (2, 12)]


def test_a_batch_holds_no_more_tokens_than_it_may(
    kit: Any,
    make_model: Callable[..., ServedModel],
    load_entry: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(max_batch_tokens=24)
    entry = load_entry(write(model, tmp_path / "repository")[0])
    shapes = shapes_run(entry, monkeypatch)
    assert answers(entry, kit.text_request(*["good"] * 4, *["bad " * 9] * 3))[0] == ["positive"] * 4 + ["negative"] * 3
    assert shapes == [(3, 8), (1, 8), (2, 12), (1, 12)]
    # One row always runs, however small the budget.
    entry.max_batch_tokens = 1
    assert answers(entry, kit.text_request("good"))[0] == ["positive"]


def test_rows_are_padded_to_the_width(kit: Any, entry: Any) -> None:
    short = entry.feed(entry.read(kit.text_request("good", "good film")), 8)
    assert {name: tensor.shape for name, tensor in short.items()} == dict.fromkeys(entry.inputs, (2, 8))
    assert short["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 4 + [0] * 4]
    assert short["input_ids"][0].tolist() == [2, 4, 3, 0, 0, 0, 0, 0]


def test_a_text_that_was_cut_is_reported(kit: Any, entry: Any) -> None:
    # 12 tokens are 10 words between [CLS] and [SEP].
    response = entry.execute([kit.text_request("good " * 10, "good " * 11, "good")])[0]
    assert response.outputs["TRUNCATED"].tolist() == [[False], [True], [False]]
    assert response.outputs["TRUNCATED"].dtype == np.bool_


def test_only_what_is_asked_for_is_answered(kit: Any, entry: Any) -> None:
    request = kit.text_request("good")
    request.asked = ("LABEL",)
    assert set(entry.execute([request])[0].outputs) == {"LABEL"}


def test_label_and_score_are_only_worked_out_when_asked_for(
    kit: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "labels", None)
    request = kit.text_request("good")
    request.asked = ("PROBABILITIES", "TRUNCATED")
    assert set(entry.execute([request])[0].outputs) == {"PROBABILITIES", "TRUNCATED"}


def test_request_that_would_hold_the_others_up_is_refused(kit: Any, entry: Any) -> None:
    long = "a" * 100_000
    most, refused, answered = answers(
        entry, kit.text_request(*[long] * 5), kit.text_request(*[long] * 5, "good"), kit.text_request("good")
    )
    assert len(most) == 5
    assert (
        refused == "TEXT: the request holds 500004 bytes of text; at most 500000 are taken, send fewer texts at a time"
    )
    assert answered == ["positive"]


def test_client_sends_no_more_in_a_request_than_is_taken(kit: Any, entry: Any) -> None:
    raw = [(b"a" * 90_000,)] * 11 + [(b"good",)] * 5
    requests = [kit.text_request(*(text for (text,) in raw[part])) for part in parts(raw, 64)]
    assert [len(labels) for labels in answers(entry, *requests)] == [5, 5, 6]
    assert [len(raw[part]) for part in parts(raw, 4)] == [4, 4, 4, 4]
    assert parts([(b"a" * 600_000, b"b")], 64) == [slice(0, 1)]  # refused by the server, in its own words


def test_work_is_counted(kit: Any, entry: Any) -> None:
    counted = kit.FakeFamily.counted
    entry.execute([kit.text_request("good film", "bad " * 20), kit.text_request("")])
    assert counted == {}
    entry.counters.flush()
    assert counted["compressor_texts_total"] == 2
    assert counted["compressor_truncated_texts_total"] == counted["compressor_refused_requests_total"] == 1
    assert (counted["compressor_tokens_total"], counted["compressor_padded_tokens_total"]) == (4 + 12, 8 + 12)
    assert 0 < counted["compressor_tokenise_seconds_total"] < 1
    assert 0 < counted["compressor_run_seconds_total"] < 1
    # What comes later is handed over too, without another request, and nothing twice.
    for _ in range(3):
        entry.execute([kit.text_request("good")])
    wait_until(lambda: counted["compressor_texts_total"] == 5)
    entry.execute([kit.text_request("good")])
    entry.finalize()
    assert counted["compressor_texts_total"] == 6


def test_graph_without_token_types_gets_none(
    kit: Any, make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    graph = kit.write_graph(tmp_path / "two.onnx", inputs=("input_ids", "attention_mask"))
    entry = load_entry(write(make_model(onnx=graph), tmp_path / "repository")[0])
    assert answers(entry, kit.text_request("good")) == [["positive"]]


def test_number_that_is_not_finite_is_an_error_of_the_model(
    kit: Any, make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    weights = np.full((9, 2), np.nan, np.float32)
    graph = kit.write_graph(tmp_path / "nan.onnx", weights=weights)
    entry = load_entry(write(make_model(onnx=graph), tmp_path / "repository")[0])
    error = entry.execute([kit.text_request("good")])[0].error
    assert error.code == kit.FakeTritonError.INTERNAL
    assert "not finite" in str(error)


def test_teacher_runs_the_same_code_on_its_own_graph(
    kit: Any, make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    teacher = make_model(
        name="sst2_teacher", onnx=kit.write_graph(tmp_path / "t.onnx", weights=-np.eye(9, 2, -4, np.float32))
    )
    folder = write(make_model(), tmp_path / "repository", teacher=teacher)[2]
    assert folder == tmp_path / "repository" / "sst2_teacher" / "1"
    assert answers(load_entry(folder), kit.text_request("good", "bad")) == [["positive", "negative"]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 6), max_size=6), data=st.data())
def test_mixing_requests_changes_no_answer(kit: Any, entry: Any, sizes: list[int], data: st.DataObject) -> None:
    words = st.sampled_from(["good", "bad", "fine film", "é good bad", "film " * 9, "", "\x00", "\u200b"])
    texts = [data.draw(st.lists(words, min_size=size, max_size=size)) for size in sizes]
    together = entry.execute([kit.text_request(*request) for request in texts])
    for request, response in zip(texts, together, strict=True):
        alone = entry.execute([kit.text_request(*request)])[0]
        assert bool(alone.error) == bool(response.error) == any(not t.strip(" \x00\u200b") for t in request)
        for name, value in alone.outputs.items():
            np.testing.assert_array_equal(value, response.outputs[name])
