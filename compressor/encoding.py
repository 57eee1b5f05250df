"""Texts to token ids, once: a file of small integers that every process maps.

Shape legend: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

log = logging.getLogger(__name__)
FORMAT = 1  # raise it when files of an older version must not be used
# Of every chunk but the last: the chunk of a row is found by division.
ROWS_PER_CHUNK = 2**16
ROWS_PER_CALL = 2**11
WORDS_KEPT = 2**17  # 30 MB
LONGEST_KEPT = 64  # characters; text without spaces is one word
IDS = np.dtype(np.int32)
MANY_UNKNOWN = 0.05  # of the words
PROBES = ([["a"]], [["a"], ["b c"]])  # a text and a pair


class Ids(NamedTuple):
    """Token ids of some rows."""

    ids: NDArray[Any]
    """Of all rows, one after the other."""
    length_B: NDArray[np.int64]
    """Tokens of each row."""
    split_B: NDArray[np.int64]
    """Those of them before the second text."""


Texts = list[list[str]]
"""The first texts of some rows, and the second ones if they are pairs."""


def encoded_file(examples: Path, content: str, tokenizer: Any, max_tokens: int, cache: Path) -> Path:
    """The file in the folder `cache` with the token ids of an Arrow file of examples, written if it is not there.

    `content` identifies the examples. Columns: input_ids (lists of uint16, or of int32 if the vocabulary needs it),
    split (uint16: tokens before the second text, all of them where there is none) and label. The name depends on all
    that the ids depend on, and is given when the file is whole.
    """
    rules = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rules.no_padding()
    rules.enable_truncation(max_tokens, strategy="longest_first")
    name = hashlib.sha256(f"{FORMAT} {content} {rules.to_str()}".encode()).hexdigest()[:24]
    file = cache / f"{name}.arrow"
    if not _is_whole(file):
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(f"{name}.*.partial"):
            if not psutil.pid_exists(int(left.suffixes[-2][1:])):  # its writer was killed
                left.unlink(missing_ok=True)
        draft = cache / f"{name}.{os.getpid()}.partial"
        try:
            unknown = _write(examples, rules, tokenizer.unk_token_id, draft)
            if unknown > MANY_UNKNOWN:
                log.warning(
                    "%.0f %% of the words of %s are unknown to the tokenizer, and the model cannot tell them apart; "
                    "use a model of the text's language",
                    100 * unknown,
                    examples,
                )
            with draft.open("rb") as written:
                os.fsync(written.fileno())  # or a power failure could leave the name without the bytes
            draft.rename(file)
        finally:
            draft.unlink(missing_ok=True)
    return file


def _is_whole(file: Path) -> bool:
    """Whether a file of token ids is there, and not cut short, as after a power failure."""
    if not file.is_file():
        return False
    try:
        with pa.memory_map(str(file)) as source:
            pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        log.warning("%s is damaged and is made again", file)
        return False
    return True


def _write(examples: Path, rules: Tokenizer, unknown_id: int | None, target: Path) -> float:
    """Write the file; returns the share of the words that became [UNK]."""
    dtype = np.dtype(np.uint16 if rules.get_vocab_size() <= np.iinfo(np.uint16).max else np.int32)
    encode = (ByWord if ByWord.fits(rules) else ByRow)(rules, dtype)
    count_V = np.zeros(max(rules.get_vocab().values()) + 1, np.int64)  # of each token of the vocabulary
    with pa.OSFile(str(examples)) as source, pa.ipc.open_stream(source) as reader:
        label = reader.schema.field("label")
        schema = pa.schema([("input_ids", pa.list_(pa.from_numpy_dtype(dtype))), ("split", pa.uint16()), label])
        with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for rows in _tables(reader):
                writer.write_batch(_chunk(rows, encode, schema, count_V))
    goes_on = [place for piece, place in rules.get_vocab().items() if piece.startswith("##")]
    count_V[goes_on + rules.encode("").ids] = 0
    words = count_V.sum()
    return float(count_V[unknown_id] / words) if words and unknown_id is not None else 0.0


def _tables(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The rows in tables of ROWS_PER_CHUNK. Read, not mapped: pages that one process maps are its private memory."""
    held = reader.schema.empty_table()
    for batch in reader:
        held = pa.concat_tables([held, pa.Table.from_batches([batch])])
        while len(held) >= ROWS_PER_CHUNK:
            yield held.slice(0, ROWS_PER_CHUNK)
            held = held.slice(ROWS_PER_CHUNK)
    if len(held):
        yield held


def _chunk(
    rows: pa.Table, encode: Callable[[Texts], Ids], schema: pa.Schema, count_V: NDArray[np.int64]
) -> pa.RecordBatch:
    """Encoded rows; their tokens are added to `count_V`."""
    columns = [name for name in ("text", "text_b") if name in rows.column_names]
    parts = []
    for start in range(0, len(rows), ROWS_PER_CALL):
        part = rows.slice(start, ROWS_PER_CALL)
        parts.append(encode([part.column(name).to_pylist() for name in columns]))
        count_V += np.bincount(parts[-1].ids, minlength=len(count_V))
    ids, length_B, split_B = map(np.concatenate, zip(*parts, strict=True))
    end = np.concatenate([[0], np.cumsum(length_B)]).astype(np.int32)
    input_ids = pa.ListArray.from_arrays(pa.array(end), pa.array(ids))
    label = rows.column("label").combine_chunks()
    return pa.record_batch([input_ids, pa.array(split_B.astype(np.uint16)), label], schema=schema)


class ByRow:
    """Any tokenizer: rows as they are, on all cores."""

    def __init__(self, rules: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._rules = rules
        self._dtype = dtype

    def __call__(self, texts: Texts) -> Ids:
        """Tokenize some rows."""
        found = self._rules.encode_batch_fast(list(zip(*texts, strict=True)) if len(texts) == 2 else texts[0])
        ids = [row.ids for row in found]
        split_B = np.array([row.type_ids.count(0) for row in found])
        return Ids(np.array(list(chain.from_iterable(ids)), self._dtype), np.array([len(row) for row in ids]), split_B)


class ByWord:
    """BERT's tokenizer: it never looks beyond a space, so each word is tokenized once and its ids are kept.

    The ids are those of `ByRow`, for a tenth of the time.
    """

    def __init__(self, rules: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._rules = Tokenizer.from_str(rules.to_str())
        self._rules.no_truncation()
        self._dtype = dtype
        self._max_tokens = rules.truncation["max_length"]
        self._start, self._end = (np.array([token], dtype).tobytes() for token in self._rules.encode("").ids)
        self._known = dict[str, bytes]()

    @staticmethod
    def fits(rules: Tokenizer) -> bool:
        """Whether the tokenizer is made of BERT's parts."""
        parts = ((rules.normalizer, BertNormalizer), (rules.pre_tokenizer, BertPreTokenizer), (rules.model, WordPiece))
        added = rules.get_added_tokens_decoder().values()
        return (
            all(isinstance(part, kind) for part, kind in parts)
            and not any(token.normalized or " " in token.content for token in added)
            and len(rules.encode("").ids) == 2
            and all(same(ByWord(rules, IDS)(probe), ByRow(rules, IDS)(probe)) for probe in PROBES)
        )

    def __call__(self, texts: Texts) -> Ids:
        """Tokenize some rows."""
        words = [[text.split(" ") for text in column] for column in texts]
        new = list(set(chain.from_iterable(chain.from_iterable(words))).difference(self._known))
        for word, found in zip(new, self._rules.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._known[word] = np.array(found.ids, self._dtype).tobytes()
        ids = [[b"".join(map(self._known.__getitem__, row)) for row in column] for column in words]
        for word in new:
            if len(word) > LONGEST_KEPT:
                del self._known[word]
        if len(self._known) > WORDS_KEPT:
            self._known.clear()
        return self._joined(ids)

    def _joined(self, texts: list[list[bytes]]) -> Ids:
        """Cut rows that are too long, and put [CLS] and [SEP] around their texts."""
        width = self._dtype.itemsize
        room = (self._max_tokens - 1 - len(texts)) * width
        rows, split = list[bytes](), list[int]()
        for row in zip(*texts, strict=True):
            if sum(map(len, row)) > room:
                row = _cut(row, room, width)
            rows.append(self._start + self._end.join(row) + self._end)
            split.append(len(row[0]) // width + 2)
        length_B = np.array([len(row) // width for row in rows])
        return Ids(np.frombuffer(b"".join(rows), self._dtype), length_B, np.array(split))


def _cut(row: tuple[bytes, ...], room: int, width: int) -> tuple[bytes, ...]:
    """Shorten a row to `room` bytes of ids, the longer text of a pair first, then both: `longest_first`."""
    if len(row) == 1:
        return (row[0][:room],)
    first, second = row
    short = min(len(first), len(second), room // width // 2 * width)
    if len(first) <= len(second):
        return first[:short], second[: room - short]
    return first[: room - short], second[:short]


def same(one: Ids, other: Ids) -> bool:
    """Whether both have the same rows."""
    return all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
