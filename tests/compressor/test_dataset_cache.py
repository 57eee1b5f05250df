"""Encoded rows on disk: small, mapped, made once, whole or absent, shared by processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from compressor import artifact, encoding
from compressor.artifact import Artifact
from compressor.dataset import (
    Example,
    TrainingOrder,
    encode,
    write_examples,
)
from compressor.world import World, launch
from tests.compressor.test_dataset import (
    BAD,
    CLS,
    GOOD,
    ROWS,
    SEP,
    SINGLE,
    WORDS,
    cache,
    encoded,
    examples,
    ids,
    make_examples,
    make_tokenizer,
    written,
)
from tests.processes import in_new_process

__all__ = ["cache", "encoded", "examples"]  # fixtures


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


@pytest.mark.parametrize("kept_bytes", [0, 20, -40])
def test_a_damaged_file_is_named_and_made_again(examples, encoded, cache, kept_bytes, caplog):
    file = written(cache)
    whole = file.read_bytes()
    file.unlink()  # its pages are mapped
    file.write_bytes(whole[:kept_bytes])
    assert len(encode(examples, "train", make_tokenizer(), 16, cache=cache)) == len(encoded)
    assert file.read_bytes() == whole
    assert f"{file} is damaged and is made again" in caplog.text


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


@pytest.mark.parametrize(("texts", "share"), [(("goodly zebras film", "a film"), 20), (("unknown", "words too"), 100)])
@pytest.mark.parametrize("by_word", [True, False])
def test_many_unknown_words_are_told_once(texts, share, by_word, cache, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(encoding.ByWord, "fits", lambda rules: by_word)
    examples = make_examples(tmp_path / "examples", [Example((text,), 1, 0) for text in texts])
    for _ in range(2):
        encode(examples, "train", make_tokenizer(), 16, cache=cache)
    (said,) = caplog.messages
    assert said.startswith(f"{share} % of the words of {examples.path / 'train.arrow'} are unknown to the tokenizer")


def test_few_unknown_words_are_not_told(cache, tmp_path, caplog):
    rows = [Example(("good " * 20 + "zebra",), 1, 0)]
    encode(make_examples(tmp_path / "examples", rows), "train", make_tokenizer(), 64, cache=cache)
    assert not caplog.messages


def encode_and_die(examples: Artifact, cache: Path) -> None:
    """Die before the last chunk is written."""
    whole = encoding._chunk

    def chunk(rows: Any, *others: Any) -> Any:
        if len(rows) < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(rows, *others)

    vars(encoding).update(ROWS_PER_CHUNK=2, _chunk=chunk)
    encode(examples, "train", make_tokenizer(), 16, cache=cache)


def test_a_file_cut_short_is_never_used(cache, tmp_path):
    examples = make_examples(tmp_path / "examples", [*ROWS, Example(("film",), 1, 4)])
    assert in_new_process(encode_and_die, examples, cache) == -signal.SIGKILL
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
