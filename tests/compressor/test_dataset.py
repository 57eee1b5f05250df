"""Examples on disk, what is tokenized and when, and the order of batches."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compressor import artifact, dataset, encoding
from compressor.artifact import Artifact
from compressor.dataset import (
    POOL_BATCHES,
    ROWS_PER_WRITE,
    Encoded,
    Example,
    TrainingOrder,
    encode,
    read_examples,
    task_of,
    texts_of,
    write_examples,
)
from compressor.encoding import ByRow, ByWord, same
from compressor.errors import ArtifactError, DataError
from compressor.shuffle import Permutation
from compressor.tasks import TASKS, Task
from compressor.world import World, launch

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
    assert (found.label_N.dtype, found.batch(np.array([0])).label_B.dtype) == ("float32", "float32")
    assert_array_equal(found.batch(np.array([1, 0])).label_B, np.float32([0.0, 2.6]))


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


def schema_of(file: Path) -> pa.Schema:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_file(source).schema


def test_ids_are_small_integers_on_disk(encoded, cache):
    schema = schema_of(written(cache))
    assert (schema.field("input_ids").type.value_type, schema.field("split").type) == (pa.uint16(), pa.uint16())


def test_ids_of_a_large_vocabulary_are_wider(examples, cache):
    words = (*WORDS, *(f"w{number}" for number in range(2**16)))
    encode(examples, "train", make_tokenizer(words), 16, cache=cache)
    assert schema_of(written(cache)).field("input_ids").type.value_type == pa.int32()


def test_ids_are_memory_mapped(encoded, cache):
    assert str(written(cache)) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_the_same_rows_are_tokenized_once(examples, encoded, cache, tmp_path):
    before = written(cache).stat()
    used = make_tokenizer()
    used(["a", "good film"], padding=True, truncation=True, max_length=3)  # leaves its settings on the tokenizer
    for again in (examples, make_examples(tmp_path / "again")):
        encode(again, "train", used, 16, cache=cache)
    after = written(cache).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_max_tokens_are_tokenized_again(examples, encoded, cache):
    found = encode(examples, "train", make_tokenizer(), 4, cache=cache)
    assert found.lengths(np.arange(4)).max() == 4


def test_files_of_an_older_form_are_not_used(examples, encoded, cache, monkeypatch):
    monkeypatch.setattr(encoding, "FORMAT", encoding.FORMAT + 1)
    encode(examples, "train", make_tokenizer(), 16, cache=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "tokenizer", [make_tokenizer(WORDS[:4] + WORDS[:3:-1]), make_tokenizer(lowercase=False)], ids=["words", "case"]
)
def test_another_tokenizer_gives_other_ids(tokenizer, cache, tmp_path):
    examples = make_examples(tmp_path / "examples", [Example(("A good film",), 1, 0)])
    first = encode(examples, "train", make_tokenizer(), 16, cache=cache)
    other = encode(examples, "train", tokenizer, 16, cache=cache)
    assert ids(first, 0) != ids(other, 0)


def test_other_rows_give_other_ids(encoded, cache, tmp_path):
    changed = make_examples(tmp_path / "changed", [Example(("bad",), 0, 0), *ROWS[1:]])
    assert ids(encode(changed, "train", make_tokenizer(), 16, cache=cache), 0) == [CLS, BAD, SEP]


def test_splits_are_kept_apart(cache, tmp_path):
    with artifact.write(tmp_path / "both", "examples", key="k", section={}, parents={}) as draft:
        for split, text in (("train", "good"), ("test", "bad")):
            write_examples(draft.path / f"{split}.arrow", [Example((text,), 1, 0)], SINGLE)
    both = Artifact.open(tmp_path / "both", kind="examples")
    for split, word in (("train", GOOD), ("test", BAD)):
        assert ids(encode(both, split, make_tokenizer(), 16, cache=cache), 0) == [CLS, word, SEP]


KILLED = """\
import os, signal, sys
from pathlib import Path
from compressor import encoding
from compressor.artifact import Artifact
from compressor.dataset import encode
from tests.compressor.test_dataset import make_tokenizer
encoding.ROWS_PER_CHUNK, whole = 2, encoding._chunk
def chunk(rows, *others):
    if len(rows) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(rows, *others)
encoding._chunk = chunk
encode(Artifact.open(Path(sys.argv[1]), kind="examples"), "train", make_tokenizer(), 16, cache=Path(sys.argv[2]))
"""


def test_a_file_cut_short_is_never_used(cache, tmp_path):
    examples = make_examples(tmp_path / "examples", [*ROWS, Example(("film",), 1, 4)])
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", KILLED, examples.path, cache], check=False, cwd=root)
    assert ended.returncode == -signal.SIGKILL
    assert written(cache).name.endswith(".partial")
    assert len(encode(examples, "train", make_tokenizer(), 16, cache=cache)) == 5
    assert written(cache).suffix == ".arrow"


def test_a_file_that_another_process_is_writing_is_left_alone(examples, encoded, cache):
    name = written(cache).stem
    written(cache).unlink()
    (cache / f"{name}.{os.getppid()}.partial").touch()
    encode(examples, "train", make_tokenizer(), 16, cache=cache)
    assert len(list(cache.iterdir())) == 2


def test_a_failed_write_leaves_nothing(cache, tmp_path):
    (tmp_path / "broken.arrow").write_bytes(b"nothing")
    with pytest.raises(pa.ArrowInvalid):
        encoding.encoded_file(tmp_path / "broken.arrow", "content", make_tokenizer(), 16, cache)
    assert not list(cache.iterdir())


def map_what_the_leader_wrote(world: World, examples: Artifact, folder: Path) -> None:
    """Leave what this process sees."""
    found = encode(examples, "train", make_tokenizer(), 16, cache=folder / "encoded", world=world)
    order = TrainingOrder(found, batch_size=2, seed=0, epoch=0, rank=world.rank, size=world.size)
    (folder / str(world.rank)).write_text(json.dumps([len(found), [row_B.tolist() for row_B in order.batches()]]))


@pytest.mark.slow
def test_processes_share_one_file_and_all_rows(examples, tmp_path):
    launch(map_what_the_leader_wrote, examples, tmp_path, processes=2, device="cpu")
    assert written(tmp_path / "encoded").suffix == ".arrow"
    told = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert [rows for rows, _ in told] == [4, 4]
    assert sorted(row for _, batches in told for batch in batches for row in batch) == [0, 1, 2, 3]


def made_up(length_N: Sequence[int] | np.ndarray) -> Encoded:
    """Encoded rows of the lengths given, in memory."""
    chunks = []
    for start in range(0, len(length_N), encoding.ROWS_PER_CHUNK):
        length_C = np.asarray(length_N[start : start + encoding.ROWS_PER_CHUNK])
        end = np.concatenate([[0], np.cumsum(length_C)]).astype(np.int32)
        ids, label = np.zeros(end[-1], np.uint16), np.zeros(len(length_C), np.int32)
        chunks.append(dataset._Chunk(ids, end, length_C.astype(np.uint16), label))
    return Encoded(tuple(chunks), 0)


LENGTHS = np.random.default_rng(0).integers(3, 64, size=5000)
MADE_UP = made_up(LENGTHS)


def order(encoded=MADE_UP, *, size=1, batch_size=8, seed=0, epoch=0, first=0) -> list[list[np.ndarray]]:
    """Batches of each rank."""
    given = {"batch_size": batch_size, "seed": seed, "epoch": epoch, "size": size}
    return [list(TrainingOrder(encoded, rank=rank, **given).batches(first)) for rank in range(size)]


@ANY_SPEED
@given(st.integers(1, 20_000), st.integers(0, 2**32), st.integers(0, 100))
def test_a_permutation_holds_every_number_once(count, seed, epoch):
    found = Permutation(count, [seed, epoch])[0:count]
    assert_array_equal(np.sort(found), np.arange(count))


def test_a_part_of_a_permutation_is_that_part_of_the_whole():
    whole = Permutation(1000, [1])
    assert_array_equal(whole[17:400], whole[0:1000][17:400])


def test_a_permutation_shows_no_structure():
    found = Permutation(100_000, [3])[0:100_000].astype(float)
    places = np.arange(100_000)
    steps = np.diff(found)
    assert abs(np.corrcoef(found, places)[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02
    assert len(np.unique(steps)) > 60_000  # of a random order 63 %: 2 / sqrt(e) of them differ
    # Of every 1,000 places in a row the numbers spread evenly over ten tenths.
    counts = [np.bincount((part // 10_000).astype(int), minlength=10) for part in found.reshape(100, 1000)]
    assert 60 < np.mean((np.array(counts) - 100) ** 2) < 120  # 89 for a random order


def test_every_number_is_as_often_at_every_place():
    drawn = np.array([Permutation(6, [seed])[0:6] for seed in range(3000)])
    counts = np.array([np.bincount(column, minlength=6) for column in drawn.T])
    assert ((counts - 500) ** 2 / 500).sum() < 60  # chi-squared with 25 degrees of freedom


@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (1, 8), (2, 8), (3, 8), (1, 32), (2, 32), (3, 32)])
@pytest.mark.parametrize("rows", [33, 64, 997, 5000])
def test_every_row_comes_once_and_no_rank_is_without(rows, size, batch_size):
    ranks = order(made_up(LENGTHS[:rows]), size=size, batch_size=batch_size)
    assert {len(batches) for batches in ranks} == {rows // batch_size}
    assert all(len(batch) for batches in ranks for batch in batches)
    assert sorted(np.concatenate([batch for batches in ranks for batch in batches])) == list(range(rows))


@pytest.mark.parametrize("rows", [8, 9, 15, 23, 513])
def test_every_rank_up_to_the_batch_size_has_a_row_of_every_batch(rows):
    ranks = order(made_up(LENGTHS[:rows]), size=8)
    assert min(len(batch) for batches in ranks for batch in batches) >= 1


def test_rows_that_fill_no_batch_are_spread_over_all():
    (batches,) = order(made_up(LENGTHS[:997]))
    assert len(batches) == 124
    assert sorted(map(len, batches)) == [8] * 119 + [9] * 5


def test_fewer_rows_than_a_batch_are_one():
    (batches,) = order(made_up([3, 4, 5]))
    assert [len(batch) for batch in batches] == [3]


def test_more_processes_than_rows_in_a_batch_are_refused():
    with pytest.raises(DataError, match=r"a batch has 4 rows, fewer than the 5 processes .* a larger batch_size"):
        TrainingOrder(MADE_UP, batch_size=4, seed=0, epoch=0, size=5)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_together_make_the_batches_of_one_process(size):
    (alone,), ranks = order(), order(size=size)
    for step, batch in enumerate(alone):
        assert sorted(np.concatenate([batches[step] for batches in ranks])) == sorted(batch)


@pytest.mark.parametrize("first", [0, 1, POOL_BATCHES - 1, POOL_BATCHES, POOL_BATCHES + 3, 624, 625])
def test_an_epoch_goes_on_in_the_middle(first):
    for whole, rest in zip(order(size=2), order(size=2, first=first), strict=True):
        assert len(rest) == 625 - first
        assert all(map(np.array_equal, whole[first:], rest))


def test_the_length_of_an_order_is_its_number_of_batches():
    made = TrainingOrder(MADE_UP, batch_size=8, seed=0, epoch=0)
    assert len(made) == len(list(made.batches())) == 625


def test_the_order_is_fixed_by_the_seed():
    assert all(map(np.array_equal, order()[0], order()[0]))


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
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_equal_rows_are_mixed_anew_each_epoch():
    same_length = made_up(np.full(64, 9))
    (first,), (second,) = order(same_length), order(same_length, epoch=1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def peaks(rows: int) -> tuple[int, int]:
    """Bytes that training and inference take beside the rows themselves."""
    encoded = made_up(np.random.default_rng(0).integers(3, 12, size=rows))
    tracemalloc.start()
    try:
        batches = TrainingOrder(encoded, batch_size=32, seed=0, epoch=0).batches(rows // 64)
        for row_B in itertools.islice(batches, 2 * POOL_BATCHES):
            encoded.batch(row_B)
        in_training = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        for _ in itertools.islice(encoded.batches_by_length(64), 10):
            pass
        return in_training, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows():
    few, many = peaks(80_000), peaks(300_000)
    assert many[0] < 220_000  # a byte for each row that was added would be as much
    assert abs(many[0] - few[0]) < 50_000
    assert abs(many[1] - few[1]) < 50_000
