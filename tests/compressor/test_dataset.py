"""Examples on disk, what is tokenized and when, and the order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compressor import artifact, dataset
from compressor.artifact import Artifact
from compressor.dataset import ROWS_PER_WRITE, Encoded, encode, read_examples, training_order, write_examples

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "good", "bad", "film", "very")
ROWS = [("a good film", 1, 0), ("bad", 0, 1), ("a very very very bad film", 0, 2), ("good good", 1, 3)]
PAD, UNK, CLS, SEP, A, GOOD, BAD, FILM, VERY = range(9)


def make_tokenizer(words: Sequence[str] = WORDS, *, lowercase: bool = True, pad_id: int = 0) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=words[pad_id], unk_token="[UNK]")


def make_examples(out: Path, rows: Sequence[tuple[str, int, int]] = ROWS, split: str = "train") -> Artifact:
    with artifact.write(out, "examples", key=f"{out}", section={}, parents={}) as draft:
        write_examples(draft.path / f"{split}.arrow", rows)
    return Artifact.open(out, kind="examples")


class Counting:
    """A tokenizer that counts the texts it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts = 0

    def __call__(self, texts: Sequence[str], **options: Any) -> Any:
        self.texts += len(texts)
        return self._tokenizer(texts, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def examples(tmp_path):
    return make_examples(tmp_path / "examples")


@pytest.fixture
def encoded(examples, tmp_path) -> Encoded:
    return encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")


@ANY_SPEED
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.integers(0, 9), st.integers(0, 2**31 - 1))))
def test_examples_come_back_as_they_were_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("examples") / "train.arrow"
    assert write_examples(path, rows) == len(rows)
    found = read_examples(path)
    assert list(zip(found["text"], found["label"], found["origin"], strict=True)) == rows


@pytest.mark.parametrize("count", [ROWS_PER_WRITE - 1, ROWS_PER_WRITE, ROWS_PER_WRITE + 1])
def test_rows_are_counted_across_writes(count, tmp_path):
    assert write_examples(tmp_path / "x.arrow", (("a", 0, row) for row in range(count))) == count
    assert read_examples(tmp_path / "x.arrow")["origin"][-1] == count - 1


def test_a_batch_is_padded_to_a_multiple_and_masked(encoded):
    batch = encoded.batch(np.array([1, 0]), multiple=4)
    assert_array_equal(batch.input_ids_BS, [[CLS, BAD, SEP, 0, 0, 0, 0, 0], [CLS, A, GOOD, FILM, SEP, 0, 0, 0]])
    assert_array_equal(batch.mask_BS, [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize(("multiple", "size"), [(1, 8), (3, 9), (8, 8), (16, 16)])
def test_a_batch_is_no_longer_than_it_must_be(encoded, multiple, size):
    assert encoded.batch(np.array([2, 1]), multiple).input_ids_BS.shape == (2, size)


def test_a_batch_is_padded_with_the_tokenizer_s_own_id(examples, tmp_path):
    tokenizer = make_tokenizer(("x", *WORDS[1:], "[PAD]"), pad_id=9)
    batch = encode(examples, "train", tokenizer, 16, cache=tmp_path / "encoded").batch(np.array([1]), multiple=4)
    assert_array_equal(batch.input_ids_BS, [[CLS, BAD, SEP, 9]])


def test_a_batch_keeps_labels_and_row_numbers_in_its_order(encoded):
    batch = encoded.batch(np.array([3, 1, 0]))
    assert (batch.label_B.tolist(), batch.row_B.tolist()) == ([1, 0, 1], [3, 1, 0])


def test_long_texts_are_cut_and_keep_their_ends(examples, tmp_path):
    found = encode(examples, "train", make_tokenizer(), 8, cache=tmp_path / "encoded")
    cut = encode(examples, "train", make_tokenizer(), 5, cache=tmp_path / "encoded")
    assert found.batch(np.array([2]), 1).input_ids_BS.tolist() == [[CLS, A, VERY, VERY, VERY, BAD, FILM, SEP]]
    assert cut.batch(np.array([2]), 1).input_ids_BS.tolist() == [[CLS, A, VERY, VERY, SEP]]


def test_rows_are_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "ROWS_PER_WRITE", 3)
    rows = [("very " * (row % 7), row % 2, row) for row in range(20)]
    monkeypatch.setattr("datasets.config.DEFAULT_MAX_BATCH_SIZE", 3)
    found = encode(make_examples(tmp_path / "examples", rows), "train", make_tokenizer(), 16, cache=tmp_path / "e")
    for row in range(20):
        assert found.batch(np.array([row]), 1).input_ids_BS[0].tolist() == [CLS, *[VERY] * (row % 7), SEP]


def test_batches_by_length_hold_every_row_once(encoded):
    batches = list(encoded.batches_by_length(3))
    assert sorted(np.concatenate([batch.row_B for batch in batches])) == [0, 1, 2, 3]
    lengths = np.concatenate([encoded.length_N[batch.row_B] for batch in batches])
    assert lengths.tolist() == sorted(encoded.length_N)


def test_ids_are_small_integers_on_disk(encoded, tmp_path):
    (file,) = (tmp_path / "encoded").glob("*.arrow")
    with pa.memory_map(str(file)) as source:
        schema = pa.ipc.open_stream(source).schema
    assert (schema.field("input_ids").type.value_type, schema.field("length").type) == (pa.uint16(), pa.uint16())


def test_ids_of_a_large_vocabulary_are_wider(examples, tmp_path):
    words = (*WORDS, *(f"w{number}" for number in range(2**16)))
    encode(examples, "train", make_tokenizer(words), 16, cache=tmp_path / "encoded")
    (file,) = (tmp_path / "encoded").glob("*.arrow")
    with pa.memory_map(str(file)) as source:
        assert pa.ipc.open_stream(source).schema.field("input_ids").type.value_type == pa.int32()


def test_ids_are_memory_mapped(encoded, tmp_path):
    (file,) = (tmp_path / "encoded").glob("*.arrow")
    assert str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_the_same_rows_are_tokenized_once(examples, tmp_path):
    for texts in (len(ROWS), 0):
        tokenizer = Counting(make_tokenizer())
        found = encode(examples, "train", tokenizer, 16, cache=tmp_path / "encoded")
        assert (len(found), tokenizer.texts) == (len(ROWS), texts)


def test_equal_rows_in_another_folder_are_not_tokenized_again(examples, tmp_path):
    encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")
    tokenizer = Counting(make_tokenizer())
    encode(make_examples(tmp_path / "again"), "train", tokenizer, 16, cache=tmp_path / "encoded")
    assert tokenizer.texts == 0


def test_padding_and_truncation_left_on_the_tokenizer_change_nothing(examples, tmp_path):
    encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")
    used = make_tokenizer()
    used(["a", "good film"], padding=True, truncation=True, max_length=3)
    tokenizer = Counting(used)
    encode(examples, "train", tokenizer, 16, cache=tmp_path / "encoded")
    assert tokenizer.texts == 0


def test_other_max_tokens_are_tokenized_again(examples, tmp_path):
    encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")
    found = encode(examples, "train", make_tokenizer(), 4, cache=tmp_path / "encoded")
    assert found.length_N.max() == 4


@pytest.mark.parametrize("tokenizer", [make_tokenizer(WORDS[:4] + WORDS[:3:-1]), make_tokenizer(lowercase=False)])
def test_another_tokenizer_gives_other_ids(tokenizer, tmp_path):
    examples = make_examples(tmp_path / "examples", [("A good film", 1, 0)])
    first = encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded").batch(np.array([0]))
    other = encode(examples, "train", tokenizer, 16, cache=tmp_path / "encoded").batch(np.array([0]))
    assert first.input_ids_BS.tolist() != other.input_ids_BS.tolist()


def test_other_rows_give_other_ids(examples, tmp_path):
    changed = make_examples(tmp_path / "changed", [("bad", 0, 0), *ROWS[1:]])
    encode(examples, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")
    found = encode(changed, "train", make_tokenizer(), 16, cache=tmp_path / "encoded")
    assert found.batch(np.array([0]), 1).input_ids_BS.tolist() == [[CLS, BAD, SEP]]


def test_splits_are_kept_apart(tmp_path):
    with artifact.write(tmp_path / "both", "examples", key="k", section={}, parents={}) as draft:
        write_examples(draft.path / "train.arrow", [("good", 1, 0)])
        write_examples(draft.path / "test.arrow", [("bad", 0, 0)])
    both = Artifact.open(tmp_path / "both", kind="examples")
    for split, word in (("train", GOOD), ("test", BAD)):
        found = encode(both, split, make_tokenizer(), 16, cache=tmp_path / "encoded")
        assert found.batch(np.array([0]), 1).input_ids_BS.tolist() == [[CLS, word, SEP]]


LENGTHS = np.random.default_rng(0).integers(3, 64, size=1000)


def order(length_N=LENGTHS, *, size=1, batch_size=8, seed=0, epoch=0) -> list[list[np.ndarray]]:
    """Batches of each rank."""
    return [
        training_order(length_N, batch_size=batch_size, seed=seed, epoch=epoch, rank=rank, size=size)
        for rank in range(size)
    ]


def test_an_epoch_holds_every_row_once():
    (batches,) = order(LENGTHS[:997])
    assert sorted(np.concatenate(batches)) == list(range(997))


def test_batches_are_full_but_for_one():
    (batches,) = order(LENGTHS[:997])
    assert sorted(map(len, batches))[:2] == [997 % 8, 8]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 513, 1000])
def test_every_rank_has_the_same_number_of_batches_and_none_is_empty(size, rows):
    ranks = order(LENGTHS[:rows], size=size)
    assert {len(batches) for batches in ranks} == {-(-rows // 8)}
    assert all(len(batch) for batches in ranks for batch in batches)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [7, 8, 513, 1000])
def test_ranks_together_see_every_row(size, rows):
    seen = np.concatenate([batch for batches in order(LENGTHS[:rows], size=size) for batch in batches])
    assert set(seen) == set(range(rows))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_share_no_row_where_there_are_enough(size):
    seen = np.concatenate([batch for batches in order(LENGTHS, size=size) for batch in batches])
    assert len(seen) == 1000


def test_ranks_together_make_the_batches_of_one_process():
    alone, ranks = order()[0], order(size=4)
    for step, batch in enumerate(alone):
        assert sorted(np.concatenate([batches[step] for batches in ranks])) == sorted(batch)


def test_a_last_batch_smaller_than_the_ranks_is_seen_twice():
    ranks = order(LENGTHS[:9], size=4)
    last = [batches[step] for batches in ranks for step in range(2) if sum(len(rank[step]) for rank in ranks) == 4]
    assert len(set(np.concatenate(last))) == 1


def test_the_order_is_fixed_by_the_seed():
    assert all(np.array_equal(one, two) for one, two in zip(order()[0], order()[0], strict=True))


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_the_order_differs_by_seed_and_epoch(change):
    assert not np.array_equal(np.concatenate(order()[0]), np.concatenate(order(**change)[0]))


def test_seed_and_epoch_are_not_added_up():
    assert not np.array_equal(np.concatenate(order(seed=1)[0]), np.concatenate(order(epoch=1)[0]))


def test_rows_of_a_batch_are_of_similar_length():
    (batches,) = order()
    spread = np.mean([np.ptp(LENGTHS[batch]) for batch in batches])
    assert spread < 0.1 * np.ptp(LENGTHS)


def test_short_batches_do_not_all_come_first():
    (batches,) = order()
    means = np.array([LENGTHS[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_equal_rows_are_mixed_anew_each_epoch():
    (first,), (second,) = order(np.full(64, 9)), order(np.full(64, 9), epoch=1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
