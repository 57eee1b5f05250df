"""Labelled text as memory-mapped Arrow, and encoded batches of it.

Shape legend: B batch, S sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Sequence, Value, disable_progress_bars
from numpy.typing import NDArray

from compressor.artifact import Artifact
from compressor.world import World

ENCODED = "encoded"  # folder, beside the stages, of what was tokenized
SPLITS = ("train", "validation", "test")
SCHEMA = pa.schema({"text": pa.string(), "label": pa.int32(), "origin": pa.int32()})
ROWS_PER_WRITE = 10_000
# Batches of similar length are cut from pools of this many batches: enough to find neighbours, few enough to mix.
POOL_BATCHES = 64
# Libraries keep memory for every shape they meet: a few lengths instead of every one. The server pads the same way.
PAD_MULTIPLE = 8


def write_examples(path: Path, rows: Iterable[tuple[str, int, int]]) -> int:
    """Stream (text, label index, number of the original row) to an Arrow file; returns how many rows."""
    count, chunk = 0, list[tuple[str, int, int]]()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:

        def flush() -> None:
            columns = [
                pa.array(list(column), type=field.type)
                for column, field in zip(zip(*chunk, strict=True), SCHEMA, strict=True)
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
            chunk.clear()

        for row in rows:
            chunk.append(row)
            count += 1
            if len(chunk) == ROWS_PER_WRITE:
                flush()
        if chunk:
            flush()
    return count


def read_examples(path: Path) -> Dataset:
    """Memory-map an Arrow file of examples: columns text, label, origin."""
    return Dataset.from_file(str(path))


@dataclass(frozen=True)
class Batch:
    """Some encoded rows, padded to the longest of them."""

    input_ids_BS: NDArray[np.int64]
    mask_BS: NDArray[np.int64]
    """1 at a real token, 0 at padding."""
    label_B: NDArray[np.int64]
    row_B: NDArray[np.int64]
    """Numbers of the rows in the encoded file."""


class Encoded:
    """Token ids of examples, memory-mapped: small integers on disk, padded only when a batch is made."""

    def __init__(self, dataset: Dataset, pad_id: int) -> None:
        self._chunks = dataset.data.column("input_ids").chunks
        self._first_rows = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])
        self._pad_id = pad_id
        self.length_N: NDArray[np.int64] = dataset.data.column("length").to_numpy().astype(np.int64)
        """Tokens of each row."""
        self.label_N: NDArray[np.int64] = dataset.data.column("label").to_numpy().astype(np.int64)
        """Label index of each row."""

    def __len__(self) -> int:
        return len(self.length_N)

    def batch(self, row_B: NDArray[np.int64], multiple: int = PAD_MULTIPLE) -> Batch:
        """The rows asked for, in that order, padded to the longest, rounded up to a multiple."""
        size = -(-int(self.length_N[row_B].max()) // multiple) * multiple
        input_ids_BS = np.full((len(row_B), size), self._pad_id, dtype=np.int64)
        mask_BS = np.zeros((len(row_B), size), dtype=np.int64)
        for place, row in enumerate(row_B):
            chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
            ids = self._chunks[chunk][int(row - self._first_rows[chunk])].values.to_numpy()
            input_ids_BS[place, : len(ids)] = ids
            mask_BS[place, : len(ids)] = 1
        return Batch(input_ids_BS, mask_BS, self.label_N[row_B], np.asarray(row_B, dtype=np.int64))

    def batches_by_length(self, batch_size: int) -> Iterator[Batch]:
        """Every row once, neighbours of similar length: the order for inference."""
        order = np.argsort(self.length_N, kind="stable")
        for start in range(0, len(order), batch_size):
            yield self.batch(order[start : start + batch_size])


def encode(
    examples: Artifact, split: str, tokenizer: Any, max_tokens: int, *, cache: Path, world: World | None = None
) -> Encoded:
    """Tokenize one split of an artifact of examples, once for its content, and memory-map the result.

    `tokenizer` is a fast Transformers tokenizer; ids are stored as uint16 where the vocabulary allows. `cache` is the
    folder of encoded files. In a `world` of several processes the leader writes and the others map what it wrote.
    """
    name = hashlib.sha256(f"{examples.content} {split} {_identity(tokenizer)} {max_tokens}".encode()).hexdigest()[:24]
    cache.mkdir(parents=True, exist_ok=True)
    arguments = examples.path / f"{split}.arrow", tokenizer, max_tokens, cache / f"{name}.arrow"
    if world is None or world.size == 1:
        return _encode(*arguments)
    encoded = _encode(*arguments) if world.is_leader else None
    world.barrier()
    return encoded or _encode(*arguments)


def _identity(tokenizer: Any) -> str:
    """Hash of what the tokenizer does to a text, without the padding and truncation it happens to be set to."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return hashlib.sha256(json.dumps(rules | {"padding": None, "truncation": None}).encode()).hexdigest()


def _encode(path: Path, tokenizer: Any, max_tokens: int, target: Path) -> Encoded:
    width = "uint16" if len(tokenizer) <= np.iinfo(np.uint16).max else "int32"
    features = Features({"input_ids": Sequence(Value(width)), "length": Value("uint16"), "label": Value("int32")})

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(rows["text"], truncation=True, max_length=max_tokens, return_attention_mask=False)["input_ids"]
        return {"input_ids": ids, "length": [len(row) for row in ids], "label": rows["label"]}

    disable_progress_bars()
    dataset = read_examples(path).map(
        tokenize,
        batched=True,
        batch_size=ROWS_PER_WRITE,
        features=features,
        remove_columns=["text", "origin"],
        cache_file_name=str(target),
        new_fingerprint=target.stem,
    )
    return Encoded(dataset, tokenizer.pad_token_id)


def training_order(
    length_N: NDArray[np.int64], *, batch_size: int, seed: int, epoch: int, rank: int = 0, size: int = 1
) -> list[NDArray[np.int64]]:
    """Row numbers of one rank's batches of one epoch: shuffled, with rows of similar length together.

    `batch_size` counts rows over all ranks. Every rank gets the same number of batches, so that no rank waits for
    another at the end; where the last batch has fewer rows than there are ranks, rows of it are seen twice.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(length_N))
    batches = list[NDArray[np.int64]]()
    for start in range(0, len(order), batch_size * POOL_BATCHES):
        pool = order[start : start + batch_size * POOL_BATCHES]
        pool = pool[np.argsort(length_N[pool], kind="stable")]
        batches += [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
    mixed = [batches[index] for index in random.permutation(len(batches))]
    return [np.resize(batch, max(len(batch), size))[rank::size] for batch in mixed]
