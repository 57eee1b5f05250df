"""The model that runs inside the server: text in, label out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving import ServedModel, write


@pytest.fixture
def entry(make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(make_model(), tmp_path / "repository")[0])


def answers(entry: Any, *requests: Any) -> list[Any]:
    """Return the labels of each request, or the message of its error."""
    return [
        str(response.error) if response.error else response.outputs["LABEL"][:, 0].tolist()
        for response in entry.execute(list(requests))
    ]


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
    short = entry.feed(entry.tokenizer.encode_batch(["good", "good film"]), 8)
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


def test_work_is_counted(kit: Any, entry: Any) -> None:
    counted = kit.FakeFamily.counted
    entry.execute([kit.text_request("good film", "bad " * 20), kit.text_request("")])
    assert counted == {}
    entry.finalize()
    assert counted["compressor_texts_total"] == 2
    assert counted["compressor_truncated_texts_total"] == counted["compressor_refused_requests_total"] == 1
    assert (counted["compressor_tokens_total"], counted["compressor_padded_tokens_total"]) == (4 + 12, 8 + 12)
    assert 0 < counted["compressor_tokenise_seconds_total"] < 1
    assert 0 < counted["compressor_run_seconds_total"] < 1
    # A second later the next request hands it over by itself.
    entry.counters._flushed -= 2
    entry.execute([kit.text_request("good")])
    assert counted["compressor_texts_total"] == 3


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


@pytest.fixture
def pairs(kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(kit.pair_model(tmp_path), tmp_path / "repository")[0])


@pytest.fixture
def scores(kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(kit.score_model(tmp_path), tmp_path / "repository")[0])


def test_pair_is_encoded_as_bert_expects_and_the_longer_text_is_cut(pairs: Any) -> None:
    tensors = pairs.feed(pairs.tokenizer.encode_batch([("good", "bad film"), ("good " * 50, "bad film")]), 12)
    short, long = ({name: tensor[row].tolist() for name, tensor in tensors.items()} for row in (0, 1))
    assert short["input_ids"] == [2, 4, 3, 5, 7, 3] + [0] * 6
    assert short["token_type_ids"] == [0, 0, 0, 1, 1, 1] + [0] * 6
    assert short["attention_mask"] == [1] * 6 + [0] * 6
    assert long["input_ids"] == [2, *[4] * 7, 3, 5, 7, 3]
    assert long["token_type_ids"] == [0] * 9 + [1] * 3


def test_first_and_second_text_are_told_apart(kit: Any, pairs: Any) -> None:
    # By hand: "good" gives 2 for positive, and 3 times that against it as the second text.
    request = kit.pair_request(("good", "film"), ("film", "good"), ("good", "bad"), ("good good good good", "good"))
    assert answers(pairs, request) == [["positive", "negative", "positive", "positive"]]
    response = pairs.execute([request])[0]
    assert set(response.outputs) == {"LABEL", "SCORE", "PROBABILITIES", "TRUNCATED"}
    assert math.isclose(response.outputs["SCORE"][1, 0], math.exp(6) / (1 + math.exp(6)), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("", "good"), "TEXT[1] is empty or white space alone"),
        (("good", " \n"), "TEXT_PAIR[1] is empty or white space alone"),
        (("\u200b", "good"), r"TEXT '\u200b' holds nothing that the tokenizer can read"),
        (("good", "\u200b"), r"TEXT_PAIR '\u200b' holds nothing that the tokenizer can read"),
        (("good", b"\xff"), "TEXT_PAIR[1] is not UTF-8"),
        (("good", "a" * 100_001), "TEXT_PAIR[1] is 100001 bytes long"),
        (("good", "\x00"), "TEXT_PAIR[1] holds the control character U+0000"),
    ],
)
def test_bad_half_of_a_pair_is_refused_and_its_neighbours_answered(
    kit: Any, pairs: Any, pair: tuple[str | bytes, str | bytes], message: str
) -> None:
    good = ("good", "film")
    first, refused, last = answers(
        pairs, kit.pair_request(good), kit.pair_request(good, pair), kit.pair_request(good[::-1])
    )
    assert (first, last) == (["positive"], ["negative"])
    assert message in refused


def test_texts_without_their_seconds_are_refused(kit: Any, pairs: Any) -> None:
    uneven = kit.request_of(TEXT=kit.text_column("good", "bad"), TEXT_PAIR=kit.text_column("film"))
    misshaped = kit.request_of(TEXT=kit.text_column("good"), TEXT_PAIR=np.full((1, 2), b"film", dtype=object))
    refused, wrong, answered = answers(pairs, uneven, misshaped, kit.pair_request(("good", "film")))
    assert refused == "TEXT holds 2 texts and TEXT_PAIR 1; send pairs"
    assert wrong == "TEXT_PAIR has shape [1, 2]; send [texts, 1] with at least one text"
    assert answered == ["positive"]


def test_regression_answers_the_logit_itself(kit: Any, scores: Any) -> None:
    requests = kit.pair_request(("good", "film"), ("é good", "good")), kit.pair_request(("film", "fine"))
    found = [response.outputs for response in scores.execute(list(requests))]
    assert [list(outputs) for outputs in found] == [["TRUNCATED", "VALUE"]] * 2
    assert found[0]["VALUE"].dtype == np.float32
    assert [outputs["VALUE"].tolist() for outputs in found] == [[[2.0], [4.0]], [[-0.5]]]


def test_number_of_a_regression_that_is_not_finite_is_an_error(
    kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    graph = kit.write_graph(tmp_path / "inf.onnx", weights=np.full((9, 1), np.inf, np.float32))
    entry = load_entry(write(kit.score_model(tmp_path, onnx=graph), tmp_path / "repository")[0])
    assert "not finite" in str(entry.execute([kit.pair_request(("good", "film"))])[0].error)


def test_regression_on_single_texts(
    kit: Any, make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path
) -> None:
    graph = kit.write_graph(tmp_path / "score.onnx", weights=kit.WEIGHTS[:, 1:])
    entry = load_entry(write(make_model(labels=(), onnx=graph), tmp_path / "repository")[0])
    refused, answered = entry.execute([kit.text_request(""), kit.text_request("good", "bad")])
    assert "empty" in str(refused.error)
    assert answered.outputs["VALUE"].tolist() == [[2.0], [0.0]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 5), max_size=5), data=st.data())
def test_mixing_requests_of_pairs_changes_no_answer(
    kit: Any, scores: Any, sizes: list[int], data: st.DataObject
) -> None:
    words = st.sampled_from(["good", "bad", "fine film", "é good bad", "film " * 9, "", "\u200b"])
    pairs = [data.draw(st.lists(st.tuples(words, words), min_size=size, max_size=size)) for size in sizes]
    together = scores.execute([kit.pair_request(*request) for request in pairs])
    for request, response in zip(pairs, together, strict=True):
        alone = scores.execute([kit.pair_request(*request)])[0]
        assert bool(alone.error) == bool(response.error) == any(not t.strip("\u200b") for pair in request for t in pair)
        for name, value in alone.outputs.items():
            np.testing.assert_array_equal(value, response.outputs[name])
