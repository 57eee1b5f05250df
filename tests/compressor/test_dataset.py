"""Examples on disk, what is tokenized and when, and the order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compressor import artifact, dataset, encoding
from compressor.artifact import Artifact
from compressor.dataset import (
    ROWS_PER_WRITE,
    Encoded,
    Example,
    encode,
    read_examples,
    task_of,
    texts_of,
    write_examples,
)
from compressor.encoding import ByRow, ByWord, same
from compressor.errors import ArtifactError
from compressor.tasks import TASKS, Task

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "good", "bad", "film", "very", "##ly", "中", "e", "s", "##s")
SINGLE, PAIR, SCORE = TASKS["sst2"], TASKS["rte"], TASKS["stsb"]
ROWS = [
    Example(("a good film",), 1, 0),
    Example(("bad",), 0, 1),
    Example(("a very very very bad film",), 0, 2),
    Example(("good good",), 1, 3),
]
PAD, UNK, CLS, SEP, A, GOOD, BAD, FILM, VERY = range(9)


def make_tokenizer(words: Sequence[str] = WORDS, *, lowercase: bool = True, pad_id: int = 0) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=words[pad_id],
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def unlike_bert(**parts: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with other parts than BERT's: its rows cannot be put together from words."""
    made = make_tokenizer()
    for name, part in parts.items():
        setattr(made.backend_tokenizer, name, part)
    return made


def make_examples(out: Path, rows: Sequence[Example] = ROWS, split: str = "train", task: Task = SINGLE) -> Artifact:
    section = {"task": task.model_dump(mode="json")}
    with artifact.write(out, "examples", key=f"{out}", section=section, parents={}) as draft:
        write_examples(draft.path / f"{split}.arrow", rows, task)
    return Artifact.open(out, kind="examples")


def pairs_of(*texts: tuple[str, str]) -> list[Example]:
    return [Example(pair, row % 2, row) for row, pair in enumerate(texts)]


@pytest.fixture
def examples(tmp_path):
    return make_examples(tmp_path / "examples")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "encoded"


@pytest.fixture
def encoded(examples, cache) -> Encoded:
    return encode(examples, "train", make_tokenizer(), 16, cache=cache)


def ids(found: Encoded, row: int) -> list[int]:
    """Token ids of a row, without padding."""
    return replace(found, pad_multiple=1).batch(np.array([row])).inputs.input_ids_BS[0].tolist()


TEXT = st.text(st.characters(codec="utf-8"))


@ANY_SPEED
@given(
    st.lists(st.builds(lambda *row: Example((row[0],), *row[1:]), TEXT, st.integers(0, 9), st.integers(0, 2**31 - 1)))
)
def test_examples_come_back_as_they_were_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("examples") / "train.arrow"
    assert write_examples(path, rows, SINGLE) == len(rows)
    found = read_examples(path)
    assert [Example(*row) for row in zip(texts_of(found), found["label"], found["origin"], strict=True)] == rows
    assert found.column_names == ["text", "label", "origin"]


@ANY_SPEED
@given(
    st.lists(
        st.tuples(st.tuples(TEXT, TEXT), st.floats(0, 5, width=32), st.integers(0, 9)).map(lambda row: Example(*row))
    )
)
def test_scored_pairs_come_back_as_they_were_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("examples") / "train.arrow"
    write_examples(path, rows, SCORE)
    found = read_examples(path)
    assert [Example(*row) for row in zip(texts_of(found), found["label"], found["origin"], strict=True)] == rows
    assert found.column_names == ["text", "text_b", "label", "origin"]


def test_a_line_separator_inside_a_text_does_not_end_its_row(cache, tmp_path):
    rows = pairs_of(("a\u2028good film\x85", "bad\r\nfilm"), ("very", "a"))
    found = encode(make_examples(tmp_path / "e", rows, task=PAIR), "train", make_tokenizer(), 16, cache=cache)
    assert [ids(found, row) for row in range(len(found))] == [
        [CLS, A, GOOD, FILM, SEP, BAD, FILM, SEP],
        [CLS, VERY, SEP, A, SEP],
    ]


@pytest.mark.parametrize("count", [ROWS_PER_WRITE - 1, ROWS_PER_WRITE, ROWS_PER_WRITE + 1])
def test_rows_are_counted_across_writes(count, tmp_path):
    rows = (Example(("a",), 0, row) for row in range(count))
    assert write_examples(tmp_path / "x.arrow", rows, SINGLE) == count
    assert read_examples(tmp_path / "x.arrow")["origin"][-1] == count - 1


def test_examples_say_which_task_they_are_of(tmp_path):
    assert task_of(make_examples(tmp_path / "examples", pairs_of(("a", "bad")), task=PAIR)) == PAIR


def test_examples_that_do_not_say_their_task_are_refused(tmp_path):
    with artifact.write(tmp_path / "old", "examples", key="k", section={}, parents={}):
        pass
    with pytest.raises(ArtifactError, match="old does not say which task its examples are of; run its stage again"):
        task_of(Artifact.open(tmp_path / "old", kind="examples"))


def test_a_batch_is_padded_to_a_multiple_and_masked(encoded):
    inputs = replace(encoded, pad_multiple=4).batch(np.array([1, 0])).inputs
    assert_array_equal(inputs.input_ids_BS, [[CLS, BAD, SEP, 0, 0, 0, 0, 0], [CLS, A, GOOD, FILM, SEP, 0, 0, 0]])
    assert_array_equal(inputs.mask_BS, [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    assert_array_equal(inputs.segment_BS, np.zeros((2, 8)))
    assert {array.dtype for array in inputs} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("multiple", "size"), [(1, 8), (3, 9), (8, 8), (16, 16)])
def test_a_batch_is_no_longer_than_it_must_be(encoded, multiple, size):
    found = replace(encoded, pad_multiple=multiple).batch(np.array([2, 1]))
    assert found.inputs.input_ids_BS.shape == (2, size)


def test_a_batch_is_padded_to_eight_unless_told_otherwise(encoded):
    assert encoded.batch(np.array([1])).inputs.mask_BS.shape == (1, 8)


def test_a_batch_is_not_padded_past_the_longest_row_possible(examples, cache):
    encoded = encode(examples, "train", make_tokenizer(), 9, cache=cache)
    assert replace(encoded, pad_multiple=4).batch(np.array([2])).inputs.mask_BS.shape == (1, 8)
    assert replace(encoded, pad_multiple=7).batch(np.array([2])).inputs.mask_BS.shape == (1, 9)


def test_batches_can_all_have_one_size(encoded):
    wide = encoded.padded_to(12)
    shapes = {array.shape for batch in wide.batches_by_length(2) for array in batch.inputs}
    assert shapes == {(2, 12)}
    assert_array_equal(wide.batch(np.array([1])).inputs.mask_BS, [[1, 1, 1, *[0] * 9]])
    assert encoded.batch(np.array([1])).inputs.mask_BS.shape == (1, 8)


def test_a_batch_is_padded_with_the_tokenizer_s_own_id(examples, cache):
    tokenizer = make_tokenizer(("x", *WORDS[1:], "[PAD]"), pad_id=len(WORDS))
    batch = encode(examples, "train", tokenizer, 16, cache=cache).batch(np.array([1]))
    assert batch.inputs.input_ids_BS.tolist() == [[CLS, BAD, SEP, *[len(WORDS)] * 5]]


def test_a_batch_keeps_labels_and_row_numbers_in_its_order(encoded):
    batch = encoded.batch(np.array([3, 1, 0]))
    assert (batch.label_B.tolist(), batch.row_B.tolist()) == ([1, 0, 1], [3, 1, 0])
    assert (batch.label_B.dtype, encoded.label_N.dtype, encoded.label_N.tolist()) == ("int64", "int64", [1, 0, 0, 1])


def test_scores_stay_numbers(cache, tmp_path):
    rows = [Example(("a", "bad"), 2.6, 0), Example(("good", "a"), 0.0, 1)]
    found = encode(make_examples(tmp_path / "e", rows, task=SCORE), "train", make_tokenizer(), 16, cache=cache)
    assert found.label_N.dtype == found.batch(np.array([0])).label_B.dtype == "float32"
    assert_array_equal(found.batch(np.array([1, 0])).label_B, np.array([0.0, 2.6], np.float32))


def test_lengths_are_those_of_the_rows_asked_for(encoded):
    assert encoded.lengths(np.array([2, 1, 2])).tolist() == [8, 3, 8]


def test_long_texts_are_cut_and_keep_their_ends(examples, encoded, cache):
    cut = encode(examples, "train", make_tokenizer(), 5, cache=cache)
    assert ids(encoded, 2) == [CLS, A, VERY, VERY, VERY, BAD, FILM, SEP]
    assert ids(cut, 2) == [CLS, A, VERY, VERY, SEP]


PIECES = (
    *WORDS,
    " ",
    " ",
    " ",
    "\t",
    "\x1c",
    "\u2028",
    "\u3000",
    "\x00",
    "É",
    "e\u0301",
    "\u0301",
    "日本",
    "ß",
    "İ",
    ".",
    "##",
)
ROUGH = st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | TEXT
BERTS = [
    make_tokenizer(),
    make_tokenizer(lowercase=False),
    unlike_bert(pre_tokenizer=pre_tokenizers.Metaspace()),
    unlike_bert(post_processor=processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))),
    unlike_bert(
        post_processor=processors.TemplateProcessing(
            single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", SEP)]
        )
    ),
]


@pytest.mark.parametrize("tokenizer", BERTS, ids=["uncased", "cased", "metaspace", "roberta", "no_start"])
@pytest.mark.parametrize("max_tokens", [5, 8, 64])
@settings(ANY_SPEED, max_examples=15)
@given(data=st.lists(st.tuples(ROUGH, ROUGH), min_size=1, max_size=20))
def test_ids_and_segments_are_those_of_the_tokenizer(tmp_path_factory, tokenizer, max_tokens, data):
    for task in (PAIR, SINGLE):
        rows = [Example(texts[: len(task.columns)], 0, row) for row, texts in enumerate(data)]
        folder = tmp_path_factory.mktemp("texts")
        found = encode(make_examples(folder / "e", rows, task=task), "train", tokenizer, max_tokens, cache=folder)
        size = int(found.lengths(np.arange(len(rows))).max())
        inputs = found.padded_to(size).batch(np.arange(len(rows))).inputs
        columns = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
        right = tokenizer(*columns, truncation="longest_first", max_length=max_tokens, padding=True)
        assert_array_equal(inputs.input_ids_BS, right["input_ids"])
        assert_array_equal(inputs.segment_BS, right["token_type_ids"])
        assert_array_equal(inputs.mask_BS, right["attention_mask"])


def rules_of(tokenizer: PreTrainedTokenizerFast, max_tokens: int = 16) -> Tokenizer:
    rules = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rules.enable_truncation(max_tokens)
    return rules


def with_added(*, content: str, normalized: bool) -> PreTrainedTokenizerFast:
    made = make_tokenizer()
    made.backend_tokenizer.add_tokens([AddedToken(content, normalized=normalized)])
    return made


@pytest.mark.parametrize(
    ("tokenizer", "fits"),
    [
        *zip(BERTS, (True, True, False, False, False), strict=True),
        (with_added(content="[X]", normalized=False), True),
        (with_added(content="[X]", normalized=True), False),
        (with_added(content="a film", normalized=False), False),
    ],
)
def test_only_bert_s_own_tokenizer_works_word_by_word(tokenizer, fits):
    assert ByWord.fits(rules_of(tokenizer)) is fits


def test_words_that_are_forgotten_change_nothing(monkeypatch):
    texts = [["a good film", "a" * 9 + " bad", "very bad very"], ["bad", "a good", ""]]
    monkeypatch.setattr(encoding, "WORDS_KEPT", 2)
    monkeypatch.setattr(encoding, "LONGEST_KEPT", 8)
    forgetful, rules = ByWord(rules_of(make_tokenizer()), encoding.IDS), rules_of(make_tokenizer())
    for _ in range(3):
        assert same(forgetful(texts), ByRow(rules, encoding.IDS)(texts))
        assert len(forgetful._known) <= 2


def written(cache: Path) -> Path:
    """The one file in the cache."""
    (file,) = cache.iterdir()
    return file


def test_rows_are_found_across_chunks(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "ROWS_PER_WRITE", 4)
    for module in (dataset, encoding):
        monkeypatch.setattr(module, "ROWS_PER_CHUNK", 3)
    rows = [Example(("very " * (row % 7),), row % 2, row) for row in range(20)]
    found = encode(make_examples(tmp_path / "examples", rows), "train", make_tokenizer(), 16, cache=cache)
    assert [ids(found, row) for row in range(20)] == [[CLS, *[VERY] * (row % 7), SEP] for row in range(20)]
    assert_array_equal(found.lengths(np.arange(20)[::-1]), [row % 7 + 2 for row in range(20)][::-1])
    assert (len(found), found.label_N.tolist()) == (20, [0, 1] * 10)
    assert sorted(np.concatenate([batch.row_B for batch in found.batches_by_length(2)])) == list(range(20))


def test_the_file_does_not_depend_on_how_rows_come(tmp_path, monkeypatch):
    rows = [Example(("very " * (row % 7), "a" * (row % 3)), row % 2, row) for row in range(50)]
    files = []
    for size in (3, 50):
        monkeypatch.setattr(dataset, "ROWS_PER_WRITE", size)
        monkeypatch.setattr(encoding, "ROWS_PER_CALL", size)
        examples = make_examples(tmp_path / f"{size}", rows, task=PAIR)
        encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / f"cache{size}")
        files.append(written(tmp_path / f"cache{size}").read_bytes())
    assert files[0] == files[1]


def test_batches_by_length_hold_every_row_once(encoded):
    batches = list(encoded.batches_by_length(3))
    assert sorted(np.concatenate([batch.row_B for batch in batches])) == [0, 1, 2, 3]
    lengths = np.concatenate([encoded.lengths(batch.row_B) for batch in batches])
    assert lengths.tolist() == sorted(encoded.lengths(np.arange(4)))
