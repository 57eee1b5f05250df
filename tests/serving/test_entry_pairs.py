"""The model that runs inside the server: pairs of texts, and numbers in place of labels."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from serving import ServedModel, write
from serving.inprocess import shorten
from tests.serving.conftest import Spy, answers


@pytest.fixture
def pairs(kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(kit.pair_model(tmp_path), tmp_path / "repository")[0])


@pytest.fixture
def scores(kit: Any, load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(kit.score_model(tmp_path), tmp_path / "repository")[0])


def test_pair_is_encoded_as_bert_expects_and_the_longer_text_is_cut(kit: Any, pairs: Any) -> None:
    tensors = pairs.feed(pairs.read(kit.pair_request(("good", "bad film"), ("good " * 50, "bad film"))), 12)
    short, long = ({name: tensor[row].tolist() for name, tensor in tensors.items()} for row in (0, 1))
    assert short["input_ids"] == [2, 4, 3, 5, 7, 3] + [0] * 6
    assert short["token_type_ids"] == [0, 0, 0, 1, 1, 1] + [0] * 6
    assert short["attention_mask"] == [1] * 6 + [0] * 6
    assert long["input_ids"] == [2, *[4] * 7, 3, 5, 7, 3]
    assert long["token_type_ids"] == [0] * 9 + [1] * 3


PIECES = (
    *("good", "film ", "bad ", "é", "e\u0301", "\u0301", "İ", "안", "好", "😀", "👩\u200d👧", "!", "[SEP]", "[SE"),
    *(" ", "\t", "\u00a0", "\x85", "\u200b", "x" * 101),
)


@pytest.mark.parametrize("max_tokens", [5, 6, 12, 13])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(data=st.data())
def test_long_pairs_are_tokenised_as_if_they_were_whole(
    kit: Any, tmp_path: Path, pairs: Any, max_tokens: int, data: st.DataObject
) -> None:
    words = (*kit.WORDS, "##d", "##film", "x", "\u1106", "##\u1161", "i", "##\u0307", "e", "##\u0301", "!", "[", "##fi")
    reader = Tokenizer.from_file(str(kit.write_tokenizer(tmp_path / "pieces.json", words=words)))
    reader.normalizer = normalizers.BertNormalizer(strip_accents=data.draw(st.booleans()))
    reader.add_special_tokens(["[SEP]"])
    reader.enable_truncation(max_tokens)
    pairs.tokenizer, pairs.max_tokens = reader, max_tokens
    some = st.lists(st.sampled_from(PIECES), min_size=1, max_size=30).map("".join)
    first, second = (data.draw(some) * data.draw(st.integers(1, 9)) for _ in range(2))
    (whole,), (cut,) = reader.encode_batch_fast([(first, second)]), pairs.tokenise([[first], [second]])
    assert (cut.ids, cut.type_ids, cut.sequence_ids) == (whole.ids, whole.type_ids, whole.sequence_ids)
    assert bool(cut.overflowing) == bool(whole.overflowing)
    assert shorten((first, second), reader, max_tokens) == pairs.shorten_pair((first, second))


def test_pair_of_the_longest_texts_is_read_once_and_never_together(kit: Any, pairs: Any) -> None:
    request = kit.pair_request(("good " * 20_000, "bad " * 25_000), ("good", "bad " * 25_000))
    pairs.tokenizer = spy = Spy(pairs.tokenizer)
    response = pairs.execute([request])[0]
    # What grows with the square of the length, takes minutes and gigabytes, is the reading of both: that is of 12 and
    # 24 words, and of 1 and 24.
    together = len(("good " * 12).strip() + ("bad " * 24).strip() + "good" + ("bad " * 24).strip())
    assert spy.read == {"encode_batch": 3 * 100_000 + len("good"), "encode_batch_fast": together}
    assert response.outputs["TRUNCATED"].tolist() == [[True], [True]]


def test_long_pairs_lose_what_is_not_read(pairs: Any) -> None:
    # max_tokens is 12: the longer text keeps 24 words.
    assert [text.split() for text in pairs.shorten_pair(("good " * 50, "bad " * 40))] == [["good"] * 24, ["bad"] * 12]
    assert [text.split() for text in pairs.shorten_pair(("good " * 40, "bad " * 40))] == [["good"] * 12, ["bad"] * 24]
    assert pairs.shorten_pair(("\u200b" * 50, "bad")) == ("\u200b" * 50, "bad")


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
