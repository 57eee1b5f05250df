"""Augmentation of a table in a file, for use without the rest: CSV, TSV, JSONL or Parquet in, any of them out."""

from __future__ import annotations

import fcntl
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from compressor import __version__, artifact, table_writer, tables
from compressor.config import ENGLISH, AugmentConfig
from compressor.dataset import Example, write_examples
from compressor.errors import ConfigError, DataError
from compressor.progress import Progress
from compressor.sources import check, content_hash, file_hash
from compressor.stages.augment.blocks import Blocks, counted, lines_of
from compressor.stages.augment.engine import in_blocks
from compressor.stages.augment.quality import Teacher, keep_answers
from compressor.stages.augment.stage import make_blocks, metrics_of
from compressor.stages.augment.tools import Texts
from compressor.stages.augment.words import load_stop_words
from compressor.tasks import TASKS, Task

ORIGIN = "origin"
"""Column of what is written: number, from 0, of the row that it was made from."""
JUDGED_AT_ONCE = 2048
TEACHER_TOKENS = 512  # what a teacher reads of a text, if it can read so much
TEXTS_FILE, KEY_FILE = "texts.arrow", "key"  # of what is kept beside OUT
LABEL_COLUMNS = frozenset(name.casefold() for task in TASKS.values() for name in task.label_columns)
# Of what the stage counts.
PASSED_ON = ("missing_rows", "duplicates", "rows_without_words", "share_by_masked_lm", "share_by_vectors")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns."""

    text: str
    text_b: str | None = None
    """The second text of pairs."""
    label: str | None = None
    """For a teacher, and to tell whether it is a score."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Of one text, or of both."""
        return (self.text,) if self.text_b is None else (self.text, self.text_b)


class _Row(NamedTuple):
    """A row to be written."""

    fields: dict[str, Any]
    texts: Texts
    is_copy: bool
    label: int
    """0 without a teacher."""


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
    fine-tuned checkpoint, labels otherwise are left out. The table is read before hours of work to find its mistakes;
    it is never in memory as a whole. What is finished, the teacher's answers as well, is kept beside OUT until OUT is
    whole, and the same call goes on from it. Raises DataError if a row cannot be used, ConfigError if the settings do
    not fit together, SourceError or ModelError if vectors or models cannot be had.
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
    form = table_writer.Form(out, source)
    _check(source, columns, labels, form, regression=config.regression)
    schema = form.schema()
    if schema is not None:
        schema = schema.append(pa.field(ORIGIN, pa.int64()))
    task = Task(
        name="file",
        columns=tuple((name,) for name in columns.texts),
        label_columns=(str(columns.label),),
        labels=labels,
        metrics=("accuracy",),
        max_tokens=TEACHER_TOKENS,
    )
    judge = None if teacher is None else Teacher(teacher, task, TEACHER_TOKENS, device)
    with _kept_folder(out, _key(source, columns, config, labels, seed)) as folder:
        write_examples(folder / TEXTS_FILE, _examples(source, columns, labels), task)
        blocks = Blocks.of(folder / TEXTS_FILE, folder, task, seed)
        make_blocks(config, blocks, processes=processes, device=device)
        with closing(_made(source, columns, blocks)) as made:
            kept: Iterator[_Row] = made
            bound = config.max_disagreement
            if judge is not None and bound is not None:
                kept = _kept(made, judge, bound, folder / f"judged-{content_hash(str(teacher))}")
            written = table_writer.write(out, (row.fields for row in kept), schema=schema)
        told = counted(blocks)
    found = metrics_of(told, blocks.rows, config.copies)
    facts = {"rows": found["original_rows"], "asked_rows": found["asked_rows"], "made_rows": found["rows"]}
    facts |= {"replaced_words": told["by_masked_lm"] + told["by_vectors"]}
    facts |= {name: found[name] for name in PASSED_ON}
    if judge is not None:
        facts["dropped_rows"] = found["rows"] - written
    return {**facts, "written_rows": written}


def _check(
    source: Path, columns: Columns, labels: tuple[str, ...], form: table_writer.Form, *, regression: bool
) -> None:
    """Read a table once, and its form. Raises DataError where a row cannot be augmented, or not be written."""
    is_empty, known = True, {label.casefold() for label in labels}
    has_score = bool(columns.label) or regression  # that its copies keep is known, or refused
    for where, fields in tables.records(source):
        is_empty = False
        others = (columns.label,) if columns.label else ()
        tables.check_columns(where, fields, texts=columns.texts, others=others, added=(ORIGIN,))
        form.add(where, fields)
        if labels and _label(fields, columns) not in known:
            raise DataError(
                f"{where}: label {fields[str(columns.label)]!r} is none of the teacher's: {', '.join(labels)}; give a "
                "teacher of these labels, or name its classes in id2label of its config.json"
            )
        if columns.label and not labels and not regression and _is_score(fields[columns.label]):
            raise DataError(
                f"{where}: column {columns.label!r} holds the score {fields[columns.label]}, which would be copied to "
                "changed texts; set regression (--regression) if that is what you want"
            )
        found = None if has_score else _unnamed_score(fields)
        if found is not None:
            has_score = True
            log.warning(
                "%s: column %r looks like a score (%s), and copies keep it though their words are others; give "
                "--label %s to have that refused, or --regression if it is what you want",
                *(where, found, fields[found], found),
            )
    if is_empty:
        raise DataError(f"{source} has no rows; give a file with a row for each text")


def _unnamed_score(fields: Mapping[str, Any]) -> str | None:
    """A column with the name of some task's labels that holds a score."""
    return next((name for name in fields if name.casefold() in LABEL_COLUMNS and _is_score(fields[name])), None)


def _is_score(value: Any) -> bool:
    """Whether a label is a number that is not whole, as no class is."""
    try:
        number = float(value) if isinstance(value, float | Decimal | str) else 0.0
    except ValueError:
        return False
    return math.isfinite(number) and not number.is_integer()


def _key(source: Path, columns: Columns, config: AugmentConfig, labels: tuple[str, ...], seed: int) -> str:
    """What decides the copies. Raises SourceError or ConfigError if something that they are made with is not there."""
    load_stop_words(config.stop_words)
    found = {"vectors": config.vectors, "masked_lm": config.masked_lm}
    for name, value in found.items():
        if value is not None:
            check(value, what=f"augment.{name}")
    found["stop_words"] = None if config.stop_words == ENGLISH else config.stop_words
    hashes = {name: content_hash(value) for name, value in found.items() if value is not None}
    section = {**config.model_dump(exclude={"max_disagreement"}), "labels": labels, "seed": seed}
    section |= {"texts": columns.texts, "label": columns.label, "version": __version__}
    return artifact.key("augmented-file", section, {}, {**hashes, "source": file_hash(source)})


@contextmanager
def _kept_folder(out: Path, key: str) -> Iterator[Path]:
    """A folder beside `out` for blocks, with those that an interrupted run of the same key had finished.

    It goes when all is done, and when there is an error before the first block. Raises DataError if it is not ours,
    another command works in it, or it cannot be written.
    """
    folder = out.with_name(f"{out.name}.partial")
    mark = folder / KEY_FILE
    try:
        if folder.exists() and not mark.is_file() and any(folder.iterdir()):
            raise DataError(f"{folder} is in the way and was not made by this command; move it, or choose another OUT")
        folder.mkdir(exist_ok=True)
        with mark.open("a+", encoding="utf-8") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(f"another command writes {out} now; wait for it, or choose another OUT") from error
            if mark.read_text(encoding="utf-8") != key:
                _empty(folder)
                mark.write_text(key, encoding="utf-8")
            try:
                yield folder
                _empty(folder)
            finally:
                if not [*folder.glob("answers-*.arrow"), *folder.glob("rows-*.json")]:
                    _empty(folder)
                    mark.unlink()
                    folder.rmdir()
    except OSError as error:
        raise DataError(
            f"copies cannot be made in {folder}: {error.strerror or error}; free space, or choose another OUT"
        ) from error


def _empty(folder: Path) -> None:
    """Remove all but the mark, so that the folder stays known as ours whenever this is interrupted."""
    for path in folder.iterdir():
        if path.name != KEY_FILE:
            path.unlink()


def _label(fields: Mapping[str, Any], columns: Columns) -> str:
    return str(fields[str(columns.label)]).strip().casefold()


def _examples(source: Path, columns: Columns, labels: tuple[str, ...]) -> Iterator[Example]:
    codes = {label.casefold(): code for code, label in enumerate(labels)}
    for number, (_, fields) in enumerate(tables.records(source)):
        texts = tuple(fields[name] or "" for name in columns.texts)
        yield Example(texts, codes[_label(fields, columns)] if codes else 0, number)


def _made(source: Path, columns: Columns, blocks: Blocks) -> Generator[_Row]:
    """Every row and its copies."""
    rows, last = tables.records(source), -1
    fields, given = dict[str, Any](), tuple[str, ...]()
    progress = Progress("written rows", total=blocks.rows)
    for *both, label, origin, _, _ in lines_of(blocks):
        texts, is_copy = tuple(both), origin == last
        if not is_copy:
            (_, fields), given, last = next(rows), texts, origin
            progress.advance()
        # Only what changed: the other text of a pair stays as it is, an empty cell too.
        changed = {name: new for name, new, old in zip(columns.texts, texts, given, strict=True) if new != old}
        yield _Row({**fields, **changed, ORIGIN: origin}, texts, is_copy, int(label))
    progress.close()


def _kept(rows: Iterator[_Row], teacher: Teacher, max_disagreement: float, judged: Path) -> Iterator[_Row]:
    """The rows without the copies whose other labels have, by the teacher, a probability above the bound.

    The teacher's answers are kept in files whose names begin with `judged`, and those found there are taken.
    """
    for number, some in enumerate(in_blocks(rows, JUDGED_AT_ONCE, lambda row: row.texts)):
        copies = [row for row in some if row.is_copy]
        file = judged.with_name(f"{judged.name}-{number:09}.npy")
        if copies and not file.is_file():
            keep_answers(teacher, [row.texts for row in copies], file)
        probability_JC = np.load(file) if copies else ()
        doubts = iter([1 - found_C[row.label] for row, found_C in zip(copies, probability_JC, strict=True)])
        yield from (row for row in some if not row.is_copy or next(doubts) <= max_disagreement)
