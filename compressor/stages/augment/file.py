"""Augmentation of a table in a file, for use without the rest: CSV, TSV, JSONL or Parquet in, any of them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from compressor import tables
from compressor.config import AugmentConfig
from compressor.errors import ConfigError, DataError
from compressor.progress import Progress
from compressor.stages.augment.engine import augmented
from compressor.stages.augment.quality import Teacher
from compressor.stages.augment.tools import Texts
from compressor.tasks import Task

ORIGIN = "origin"
"""Column of what is written: number, from 0, of the row that it was made from."""
JUDGED_AT_ONCE = 2048
TEACHER_TOKENS = 512  # what a teacher reads of a text, if it can read so much


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns."""

    text: str
    text_b: str | None = None
    """The second text of pairs."""
    label: str | None = None
    """For a teacher."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Of one text, or of both."""
        return (self.text,) if self.text_b is None else (self.text, self.text_b)


class _Row(NamedTuple):
    """A row to be written."""

    fields: dict[str, Any]
    texts: Texts
    changes: int
    """Words that were replaced: none in a row that was read."""
    label: int
    """-1 without a teacher."""


def augment_file(
    source: Path,
    out: Path,
    columns: Columns,
    config: AugmentConfig,
    *,
    teacher: Path | None = None,
    seed: int,
    processes: int = 1,
    device: str = "auto",
) -> dict[str, Any]:
    """Write the rows of a table, each followed by its copies; returns what was counted.

    All columns stay, and `origin` is added. With `config.max_disagreement` the copies that `teacher`, the folder of a
    fine-tuned checkpoint, labels otherwise are left out. The table is read twice, the first time to find its mistakes
    before hours of work; it is never in memory as a whole. Raises DataError if a row cannot be used, ConfigError if
    the settings do not fit together, SourceError or ModelError if vectors or models cannot be had.
    """
    if (config.max_disagreement is None) != (teacher is None) or (teacher is not None and columns.label is None):
        raise ConfigError(
            f"teacher is {teacher}, max_disagreement is {config.max_disagreement} and the label column is "
            f"{columns.label}; copies are dropped by all three together; give all or none of them"
        )
    labels = tuple[str, ...]()
    if teacher is not None:
        from compressor.checkpoints import label_names

        labels = label_names(teacher)
    count = _checked(source, columns, labels)
    judge = None
    if teacher is not None:
        task = Task(
            name="file",
            columns=tuple((name,) for name in columns.texts),
            label_columns=(str(columns.label),),
            labels=labels,
            metrics=("accuracy",),
            max_tokens=TEACHER_TOKENS,
        )
        judge = Teacher(teacher, task, TEACHER_TOKENS, device)
    facts = {"rows": count, "asked_rows": count * (1 + config.copies), "made_rows": 0, "replaced_words": 0}
    made = _made(source, columns, config, labels, facts, seed=seed, processes=processes, device=device)
    with closing(made):
        kept = made if judge is None or config.max_disagreement is None else _kept(made, judge, config.max_disagreement)
        written = tables.write(out, (row.fields for row in kept), like=source)
    dropped = {} if judge is None else {"dropped_rows": facts["made_rows"] - written}
    return {**facts, "missing_rows": facts["asked_rows"] - facts["made_rows"], **dropped, "written_rows": written}


def _checked(source: Path, columns: Columns, labels: tuple[str, ...]) -> int:
    """The number of rows of a table that can be augmented. Raises DataError where one cannot."""
    count, known = 0, {label.casefold() for label in labels}
    for where, fields in tables.records(source):
        count += 1
        others = (columns.label,) if columns.label else ()
        tables.check_columns(where, fields, texts=columns.texts, others=others, added=(ORIGIN,))
        if labels and _label(fields, columns) not in known:
            raise DataError(
                f"{where}: label {fields[str(columns.label)]!r} is none of the teacher's: {', '.join(labels)}; give a "
                "teacher of these labels, or name its classes in id2label of its config.json"
            )
    if not count:
        raise DataError(f"{source} has no rows; give a file with a row for each text")
    return count


def _label(fields: Mapping[str, Any], columns: Columns) -> str:
    return str(fields[str(columns.label)]).strip().casefold()


def _made(
    source: Path,
    columns: Columns,
    config: AugmentConfig,
    labels: tuple[str, ...],
    facts: dict[str, int],
    *,
    seed: int,
    processes: int,
    device: str,
) -> Generator[_Row]:
    """Every row and its copies, which are counted in `facts`."""
    codes = {label.casefold(): code for code, label in enumerate(labels)}
    waiting = deque[dict[str, Any]]()  # rows that were given to the engine, and have not come back

    def texts() -> Iterator[Texts]:
        for _, fields in tables.records(source):
            waiting.append(fields)
            yield tuple(fields[name] or "" for name in columns.texts)

    progress, current = Progress("augmented rows", total=facts["rows"]), dict[str, Any]()
    for row in augmented(texts(), config, seed=seed, processes=processes, device=device):
        fields = {}
        if row.changes:
            fields = dict(zip(columns.texts, row.texts, strict=True))
        else:
            current = waiting.popleft()
            progress.advance()
        facts["made_rows"] += 1
        facts["replaced_words"] += len(row.changes)
        label = codes[_label(current, columns)] if codes else -1
        yield _Row({**current, **fields, ORIGIN: row.origin}, row.texts, len(row.changes), label)
    progress.close()


def _kept(rows: Iterator[_Row], teacher: Teacher, max_disagreement: float) -> Iterator[_Row]:
    """The rows without the copies whose other labels have, by the teacher, a probability above the bound."""
    while some := list(islice(rows, JUDGED_AT_ONCE)):
        copies = [row for row in some if row.changes]
        probability_JC = teacher.probabilities([row.texts for row in copies]) if copies else ()
        doubts = iter([1 - found_C[row.label] for row, found_C in zip(copies, probability_JC, strict=True)])
        yield from (row for row in some if not row.changes or next(doubts) <= max_disagreement)
