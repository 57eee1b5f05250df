"""The rows of the stage in blocks: what is written for each, so that an interrupted stage goes on from finished ones.

Blocks end where the engine's do, whatever the number of processes. For each there is first a file of what the
masked language model answers to the texts that come for the first time in it, then one of its rows with their copies.

Shape legend: N rows times texts of a row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from compressor import machine
from compressor.dataset import ROWS_PER_WRITE, examples_schema
from compressor.stages.augment.engine import ROWS_AT_ONCE, in_blocks, row_seed
from compressor.stages.augment.masked_lm import Answers
from compressor.stages.augment.tools import Texts, Tools
from compressor.tasks import Task

CHARACTERS_PER_WRITE = 16_000_000
MOST = np.iinfo(np.uint16).max  # replaced words that are told apart
REPLACED = pa.schema([("by_masked_lm", pa.uint16()), ("by_vectors", pa.uint16())])
WORDS = pa.list_(pa.list_(pa.string()))
ANSWERS = pa.schema([("text", pa.int64()), ("starts", pa.list_(pa.int32())), ("words", WORDS)])
COUNTED = ("rows", "duplicates", "rows_without_words", "by_masked_lm", "by_vectors")
Numbers = NDArray[np.int64]
Line = tuple[Any, ...]
"""Texts, label, origin, words replaced by the masked language model, and by the vectors."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The rows to be augmented, and where their blocks are written."""

    source: Path
    """Arrow file of the rows."""
    folder: Path
    """Of the blocks."""
    task: Task
    seed: int
    starts: tuple[int, ...]
    """First row of each block, then the number of all rows."""

    @classmethod
    def of(cls, source: Path, folder: Path, task: Task, seed: int) -> Blocks:
        """The blocks of the rows in an Arrow file."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = cls(source=source, folder=folder, task=task, seed=seed, starts=())
        sizes = (len(rows) for rows in in_blocks(whole.all_texts(), ROWS_AT_ONCE, lambda texts: texts))
        return replace(whole, starts=tuple(itertools.accumulate(sizes, initial=0)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return self.starts[-1]

    def size(self, block: int) -> int:
        """Rows of a block."""
        return self.starts[block + 1] - self.starts[block]

    def answers_file(self, block: int) -> Path:
        """What the masked language model answers."""
        return self.folder / f"answers-{self._name(block)}.arrow"

    def rows_file(self, block: int) -> Path:
        """The rows with their copies."""
        return self.folder / f"rows-{self._name(block)}.arrow"

    def facts_file(self, block: int) -> Path:
        """What was counted; written after the rows."""
        return self.folder / f"rows-{self._name(block)}.json"

    def _name(self, block: int) -> str:
        """By its rows, so that a file of blocks that ended elsewhere is not taken for one of these."""
        return f"{self.starts[block]:09}-{self.starts[block + 1]:09}"

    def all_texts(self) -> Iterator[Texts]:
        """The texts of every row."""
        for batch in _table(self.source).to_batches():
            yield from zip(*(batch.column(name).to_pylist() for name in self._columns), strict=True)

    def texts(self, block: int) -> tuple[list[Texts], list[float]]:
        """Texts and labels of a block's rows."""
        rows = _table(self.source).slice(self.starts[block], self.size(block))
        *texts, labels = (rows.column(name).to_pylist() for name in (*self._columns, "label"))
        return list(zip(*texts, strict=True)), labels

    def first_places(self) -> Numbers:
        """For each text (N, row by row) the place at which the same text comes first."""
        texts = itertools.chain.from_iterable(self.all_texts())
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
        high_N, low_N = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2).T
        order_N = np.lexsort((low_N, high_N))  # stable: of equals the first comes first
        is_new_N = np.ones(len(order_N), dtype=bool)
        is_new_N[1:] = (np.diff(high_N[order_N]) != 0) | (np.diff(low_N[order_N]) != 0)
        first_N = np.empty(len(order_N), dtype=np.int64)
        first_N[order_N] = order_N[is_new_N][np.cumsum(is_new_N) - 1]
        return first_N

    def of_block(self, first_N: Numbers, block: int) -> Numbers:
        """The part of `first_places` that is of one block."""
        return first_N[self.starts[block] * self.sides : self.starts[block + 1] * self.sides]

    def holding(self, place: int) -> int:
        """The block that a text is in, by its place among all texts."""
        return bisect_right(self.starts, place // self.sides) - 1

    @property
    def sides(self) -> int:
        """Texts of a row."""
        return 2 if self.task.is_pair else 1

    @property
    def _columns(self) -> tuple[str, ...]:
        return ("text", "text_b")[: self.sides]


def write_answers(tools: Tools, blocks: Blocks, block: int, first_N: Numbers) -> None:
    """Write what the masked language model answers to the texts that come for the first time in a block.

    `first_N` are the block's own of `first_places`.
    """
    start = blocks.starts[block] * blocks.sides
    texts = [text for texts in blocks.texts(block)[0] for text in texts]
    places = [start + number for number, first in enumerate(first_N.tolist()) if first == start + number]
    found = list(tools.answers(texts[place - start] for place in places).values())
    starts, words = [list(answers) for answers in found], [list(answers.values()) for answers in found]
    file = blocks.answers_file(block)
    with pa.OSFile(str(_new(file)), "wb") as sink, pa.ipc.new_stream(sink, ANSWERS) as writer:
        writer.write_batch(_batch((places, starts, words), ANSWERS))
    _new(file).replace(file)


def read_answers(blocks: Blocks, texts: list[str], first_N: Numbers) -> dict[str, Answers]:
    """What was written for some texts, wherever it was."""
    wanted = sorted(dict(zip(first_N.tolist(), texts, strict=True)).items())
    found = dict[str, Answers]()
    for block, group in itertools.groupby(wanted, lambda item: blocks.holding(item[0])):
        table = _table(blocks.answers_file(block))
        places = {place: row for row, place in enumerate(table.column("text").to_pylist())}
        starts, words = table.column("starts"), table.column("words")
        for place, text in group:
            row = places[place]
            found[text] = dict(zip(starts[row].as_py(), words[row].as_py(), strict=True))
    return found


def write_rows(tools: Tools, blocks: Blocks, block: int, first_N: Numbers | None) -> None:
    """Write the rows of a block, each followed by its copies, and what was counted.

    `first_N` are the block's own of `first_places`, if there are answers of a masked language model.
    """
    rows, labels = blocks.texts(block)
    answers = dict[str, Answers]()
    if first_N is not None:
        answers = read_answers(blocks, [text for texts in rows for text in texts], first_N)
    facts, file, schema = Counter(dict.fromkeys(COUNTED, 0)), blocks.rows_file(block), rows_schema(blocks.task)
    first = blocks.starts[block]
    seeds = [row_seed(blocks.seed, first + number) for number in range(len(rows))]

    def lines() -> Iterator[Line]:
        for number, made in enumerate(tools.made(rows, answers, seeds)):
            facts["duplicates"] += made.duplicates
            facts["rows_without_words"] += not made.has_words
            yield *rows[number], labels[number], first + number, 0, 0
            for texts, changes in made.copies:
                by_masked_lm = sum(change.by_masked_lm for change in changes)
                by_vectors = len(changes) - by_masked_lm
                facts["by_masked_lm"] += by_masked_lm
                facts["by_vectors"] += by_vectors
                yield *texts, labels[number], first + number, min(MOST, by_masked_lm), min(MOST, by_vectors)

    with pa.OSFile(str(_new(file)), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for some in _some(lines()):
            facts["rows"] += len(some)
            writer.write_batch(_batch(zip(*some, strict=True), schema))
    _new(file).replace(file)
    told = _new(blocks.facts_file(block))
    told.write_text(json.dumps({**facts, "peak_memory_gb": machine.peak_memory_gb()}), encoding="utf-8")
    told.replace(blocks.facts_file(block))


def _some(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Lines in lists of about CHARACTERS_PER_WRITE."""
    some, size = list[Line](), 0
    for line in lines:
        some.append(line)
        size += sum(len(cell) for cell in line if isinstance(cell, str))
        if size > CHARACTERS_PER_WRITE:
            yield some
            some, size = [], 0
    if some:
        yield some


def counted(blocks: Blocks) -> dict[str, Any]:
    """What was counted, over all blocks; of peaks of memory the highest."""
    facts, peak_gb = Counter(dict.fromkeys(COUNTED, 0)), 0.0
    for block in range(len(blocks)):
        told = json.loads(blocks.facts_file(block).read_text(encoding="utf-8"))
        peak_gb = max(peak_gb, told.pop("peak_memory_gb"))
        facts.update(told)
    return {**facts, "peak_memory_gb": peak_gb}


def lines_of(blocks: Blocks) -> Iterator[Line]:
    """The rows of all blocks, in their order."""
    for block in range(len(blocks)):
        for batch in _table(blocks.rows_file(block)).to_batches():
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def join(blocks: Blocks, train: Path, copies: Path) -> None:
    """Put the rows of all blocks together: what later stages read in `train`, what was replaced in `copies`."""
    examples = examples_schema(blocks.task)
    with (
        pa.OSFile(str(train), "wb") as train_file,
        pa.ipc.new_stream(train_file, examples) as train_writer,
        pa.OSFile(str(copies), "wb") as copies_file,
        pa.ipc.new_stream(copies_file, REPLACED) as copies_writer,
    ):
        for table in _regrouped(_table(blocks.rows_file(block)) for block in range(len(blocks))):
            train_writer.write_table(table.select(examples.names))
            copies_writer.write_table(table.select(REPLACED.names))


def _regrouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of ROWS_PER_WRITE: what is written does not show how large the blocks were."""
    waiting = None
    for table in tables:
        waiting = table if waiting is None else pa.concat_tables([waiting, table])
        while waiting.num_rows >= ROWS_PER_WRITE:
            yield waiting.slice(0, ROWS_PER_WRITE).combine_chunks()
            waiting = waiting.slice(ROWS_PER_WRITE)
    if waiting is not None and waiting.num_rows:
        yield waiting.combine_chunks()


def rows_schema(task: Task) -> pa.Schema:
    """The columns of a block's rows."""
    return pa.schema([*examples_schema(task), *REPLACED])


def _batch(columns: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


def _table(file: Path) -> pa.Table:
    """A file of Arrow's stream format, memory-mapped."""
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def _new(file: Path) -> Path:
    return file.with_suffix(".new")
