"""Labelled texts as memory-mapped Arrow, batches of their token ids, and the order of training.

Private memory does not grow with the number of rows: rows stay on disk, and the order is computed.
Shape legend: B batch, S sequence, N rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from compressor.artifact import Artifact
from compressor.encoding import ROWS_PER_CHUNK, encoded_file
from compressor.errors import ArtifactError, DataError
from compressor.shuffle import Permutation
from compressor.tasks import Task
from compressor.world import World

if TYPE_CHECKING:
    from datasets import Dataset

ENCODED = "encoded"  # folder, beside the stages, of what was tokenized
ROWS_PER_WRITE = 10_000
# Batches of similar length are cut from pools of this many batches: enough to find neighbours, few enough to mix.
POOL_BATCHES = 64
# Libraries keep memory for every shape they meet: a few lengths instead of every one. The server pads the same way.
PAD_MULTIPLE = 8

Rows = NDArray[np.int64]


class Example(NamedTuple):
    """One row of labelled text."""

    texts: tuple[str, ...]
    """One text, or the two of a pair."""
    label: float
    """Label index, or the score of a regression."""
    origin: int
    """Number of the row that it was made from."""


def examples_schema(task: Task) -> pa.Schema:
    """The columns of a file of examples of a task."""
    text_names = ("text", "text_b") if task.is_pair else ("text",)
    label_type = pa.float32() if task.is_regression else pa.int32()
    return pa.schema([*((name, pa.string()) for name in text_names), ("label", label_type), ("origin", pa.int32())])


def write_examples(path: Path, rows: Iterable[Example], task: Task) -> int:
    """Stream examples of a task to an Arrow file, in their order; returns how many."""
    schema = examples_schema(task)
    count, left = 0, iter(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while chunk := list(itertools.islice(left, ROWS_PER_WRITE)):
            texts, labels, origins = zip(*chunk, strict=True)
            columns = [*zip(*texts, strict=True), labels, origins]
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            count += len(chunk)
    return count


def read_examples(path: Path) -> Dataset:
    """Memory-map an Arrow file of examples: columns text, text_b (pairs only), label, origin."""
    from datasets import Dataset  # takes seconds to load; reports and batches do without

    return Dataset.from_file(str(path))


def texts_of(examples: Dataset) -> list[tuple[str, ...]]:
    """The texts of every row: one, or the two of a pair. For splits that fit into memory."""
    names = [name for name in ("text", "text_b") if name in examples.column_names]
    return list(zip(*(examples[name] for name in names), strict=True))


def task_of(examples: Artifact) -> Task:
    """The task whose examples an artifact holds. Raises ArtifactError if it does not say."""
    found = examples.manifest["section"].get("task")
    if not isinstance(found, dict):
        raise ArtifactError(f"{examples.path} does not say which task its examples are of; run its stage again")
    return Task.model_validate(found)


class Inputs(NamedTuple):
    """What a model reads, in the order of its arguments."""

    input_ids_BS: NDArray[np.int64]
    segment_BS: NDArray[np.int64]
    """1 at tokens of the second text and the [SEP] after it, else 0."""
    mask_BS: NDArray[np.int64]
    """1 at a real token, 0 at padding."""


@dataclass(frozen=True)
class Batch:
    """Some encoded rows, padded to one length."""

    inputs: Inputs
    label_B: NDArray[Any]
    """Label indices (int64), or scores of a regression (float32)."""
    row_B: Rows
    """Numbers of the rows in the encoded file."""


@dataclass(frozen=True)
class _Chunk:
    """Columns of some consecutive rows: views of the memory-mapped file."""

    ids: NDArray[Any]
    """Token ids of all rows, one after the other."""
    end: NDArray[np.int32]
    """Where each row starts in them, and where the last one ends."""
    split: NDArray[np.uint16]
    """Tokens of each row before its second text."""
    label: NDArray[Any]

    @staticmethod
    def of(batch: pa.RecordBatch) -> _Chunk:
        """The columns of a record batch as NumPy arrays, without a copy."""
        ids = batch.column("input_ids")
        split, label = (batch.column(name).to_numpy() for name in ("split", "label"))
        return _Chunk(ids.values.to_numpy(), ids.offsets.to_numpy(), split, label)


@dataclass(frozen=True)
class Encoded:
    """Token ids of examples, memory-mapped: small integers on disk, padded only when a batch is made."""

    _chunks: tuple[_Chunk, ...]
    _pad_id: int
    _max_tokens: int
    pad_multiple: int = PAD_MULTIPLE
    """Batches are padded to the longest row, rounded up to a multiple of this, but not past the longest possible."""
    _size: int = 0

    @staticmethod
    def open(file: Path, pad_id: int, max_tokens: int) -> Encoded:
        """Memory-map what `encoding.encoded_file` wrote, in rows of `max_tokens` at most."""
        with pa.memory_map(str(file)) as source:
            reader = pa.ipc.open_file(source)
            chunks = tuple(_Chunk.of(reader.get_batch(number)) for number in range(reader.num_record_batches))
        return Encoded(chunks, pad_id, max_tokens)

    def __len__(self) -> int:
        return sum(len(chunk.label) for chunk in self._chunks)

    @property
    def label_N(self) -> NDArray[Any]:
        """Label index (int64) or score (float32) of every row."""
        return _labels(np.concatenate([chunk.label for chunk in self._chunks]))

    def lengths(self, row_B: Rows) -> NDArray[np.int64]:
        """Tokens of the rows asked for, before padding."""
        row_B = np.asarray(row_B)
        chunk_B, place_B = np.divmod(row_B, ROWS_PER_CHUNK)
        length_B = np.empty(len(row_B), dtype=np.int64)
        for number in np.unique(chunk_B):
            here = chunk_B == number
            end, place = self._chunks[number].end, place_B[here]
            length_B[here] = end[place + 1] - end[place]
        return length_B

    def padded_to(self, size: int) -> Encoded:
        """The same rows in batches that are all padded to `size` tokens; no row may be longer."""
        return replace(self, _size=size)

    def batch(self, row_B: Rows) -> Batch:
        """The rows asked for, in that order, padded to one length."""
        row_B = np.asarray(row_B, dtype=np.int64)
        found = [(self._chunks[row // ROWS_PER_CHUNK], row % ROWS_PER_CHUNK) for row in row_B.tolist()]
        ids = [chunk.ids[chunk.end[place] : chunk.end[place + 1]] for chunk, place in found]
        # A model may have no position past the longest row.
        rounded = min(-(-max(map(len, ids)) // self.pad_multiple) * self.pad_multiple, self._max_tokens)
        size = self._size or rounded
        input_ids_BS = np.full((len(row_B), size), self._pad_id, dtype=np.int64)
        for place, row_ids in enumerate(ids):
            input_ids_BS[place, : len(row_ids)] = row_ids
        length_B1 = np.array([len(row_ids) for row_ids in ids])[:, None]
        split_B1 = np.array([chunk.split[place] for chunk, place in found])[:, None]
        place_S = np.arange(size)
        mask_BS = place_S < length_B1
        segment_BS = mask_BS & (place_S >= split_B1)
        inputs = Inputs(input_ids_BS, segment_BS.astype(np.int64), mask_BS.astype(np.int64))
        return Batch(inputs, _labels(np.array([chunk.label[place] for chunk, place in found])), row_B)

    def batches_by_length(self, batch_size: int, row_N: Rows | None = None) -> Iterator[Batch]:
        """Every row once, or the rows asked for, neighbours of similar length: the order for inference."""
        count = len(self) if row_N is None else len(row_N)
        for first in range(0, count, ROWS_PER_CHUNK):
            last = min(first + ROWS_PER_CHUNK, count)
            row_W = np.arange(first, last) if row_N is None else row_N[first:last]
            row_W = row_W[np.argsort(self.lengths(row_W), kind="stable")]
            for start in range(0, len(row_W), batch_size):
                yield self.batch(row_W[start : start + batch_size])


def _labels(stored: NDArray[Any]) -> NDArray[Any]:
    """Labels as models take them: indices as int64, scores as they are."""
    return stored.astype(np.int64) if stored.dtype == np.int32 else stored


def encode(
    examples: Artifact, split: str, tokenizer: Any, max_tokens: int, *, cache: Path, world: World | None = None
) -> Encoded:
    """Tokenize one split of an artifact of examples, once for its content, and memory-map the result.

    `tokenizer` is a fast Transformers tokenizer of the BERT family; `cache` is the folder of encoded files. In a
    `world` of several processes the leader writes and the others map what it wrote.
    """
    arguments = examples.path / f"{split}.arrow", f"{examples.content} {split}", tokenizer, max_tokens, cache
    file = encoded_file(*arguments) if world is None or world.is_leader else None
    if world is not None:
        world.barrier()
    # A process on another machine, with a disk of its own, makes the file there.
    return Encoded.open(file or encoded_file(*arguments), tokenizer.pad_token_id, max_tokens)


class TrainingOrder:
    """Row numbers of one rank's batches of one epoch: shuffled, with rows of similar length together.

    `batch_size` counts rows over all ranks. Batches of every world size are the same: their number is the number of
    rows / `batch_size`, rounded down (one if there are fewer rows), and the rest is spread evenly over them, so that
    no batch has fewer rows than any number of ranks up to `batch_size`. Every row comes once. Only a pool of
    POOL_BATCHES batches is in memory at a time. Raises DataError if a rank would get no row.
    """

    def __init__(
        self, encoded: Encoded, *, batch_size: int, seed: int, epoch: int, rank: int = 0, size: int = 1
    ) -> None:
        self._count = len(encoded)
        self._batches = max(1, self._count // batch_size)
        if size > self._count // self._batches:
            raise DataError(
                f"a batch has {self._count // self._batches} rows, fewer than the {size} processes that share it; "
                "use fewer processes or a larger batch_size"
            )
        self._encoded = encoded
        self._seed = seed, epoch
        self._share = slice(rank, None, size)
        self._row = Permutation(self._count, self._seed)

    def __len__(self) -> int:
        return self._batches

    def batches(self, first: int = 0) -> Iterator[Rows]:
        """The rank's rows of each batch, from the `first`-th on."""
        for begin in range(first - first % POOL_BATCHES, self._batches, POOL_BATCHES):
            pool = self._pool(begin)
            for batch in pool[max(0, first - begin) :]:
                yield batch[self._share]

    def _pool(self, begin: int) -> list[Rows]:
        """All rows of the batches of one pool, neighbours in length together, batches in random order."""
        count = min(POOL_BATCHES, self._batches - begin)
        edges = np.arange(begin, begin + count + 1) * self._count // self._batches
        row_P = self._row[edges[0] : edges[-1]]
        row_P = row_P[np.argsort(self._encoded.lengths(row_P), kind="stable")]
        batches = np.split(row_P, edges[1:-1] - edges[0])
        return [batches[place] for place in np.random.default_rng([*self._seed, begin]).permutation(count)]
