"""Rows of a table as a task's texts and answers, checked: what cannot be used is named by file and line."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from compressor.errors import DataError
from compressor.tables import TSV_QUOTES, Records, dialect_hint
from compressor.tasks import Names, Task, folded

log = logging.getLogger(__name__)
Row = tuple[tuple[str, ...], float]  # one text or the two of a pair, and the label index or score
Table = tuple[str, Callable[[], Records]]  # what it is called in messages, and what reads its rows
MAX_TEXT_BYTES = 100_000
# Not tab and line ends. The second half but for ESC is let pass: it is what is left of a quotation mark (U+2018 to
# U+201D) whose first byte was lost, as in GLUE's STS-B; BERT's tokenizer takes it out.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e\x0f\x1b\x7f]")
LARGEST_SCORE = float(np.finfo(np.float32).max)  # of what examples are kept in
LABELS_SHOWN = 20


def checked_rows(
    table: Table, task: Task, chosen: Iterable[bool], *, may_lack_labels: bool, left_out: Counter[str]
) -> Iterator[Row]:
    """Checked rows of a table, those that are `chosen`. One whose labels are withheld gives none, if it may lack them.

    Of a task with gaps, rows that have one do not count as rows, but in `left_out`, by the table.
    """
    title, read = table
    rows = read()
    first = next(rows, None)
    if first is None:
        columns = " and ".join(map(_either, [*task.columns, task.label_columns]))
        raise DataError(f"{title} is empty; it needs rows with columns {columns}")
    if may_lack_labels and _is_withheld(first[1], task):
        _pass_over(title, first, rows, task)
        return
    is_chosen, classes = iter(chosen), task.classes
    may_be_quoted = task.is_own and title.lower().endswith(".tsv")
    for where, fields in chain([first], rows):
        if task.has_gaps and _has_gap(fields, task):
            left_out[title] += 1
            continue
        if not next(is_chosen, False):
            continue
        texts = tuple(_text(fields, names, where) for names in task.columns)
        if may_be_quoted and any(map(_is_quoted, texts)):
            raise DataError(f"{where}: the text is in quotes and has doubled ones; {TSV_QUOTES}")
        column = column_of(fields, task.label_columns, where)
        raw = fields[column]
        if is_missing(raw):
            raise no_answer(where, rows, column, "score" if task.is_regression else "label")
        yield texts, _score(raw, task, where) if task.is_regression else _label(raw, classes, task, where)


def _pass_over(title: str, first: tuple[str, dict[str, Any]], rest: Records, task: Task) -> None:
    """Say why a table without labels is not used. Raises DataError if a row after the first has one.

    Withheld are the labels of all rows or of none: one that is missing later, or is not, is a mistake.
    """
    for where, fields in rest:
        if not _is_withheld(fields, task):
            raise DataError(f"{first[0]}: the row has no label, and {where} has one; give every row a label, or none")
    if any(name in first[1] for name in task.label_columns):
        log.info("%s: its labels are withheld, so it is not used", title)
        return
    there = ", ".join(map(repr, first[1]))
    log.warning("%s has no column %s, so it is not used; found %s", title, _either(task.label_columns), there)


def _has_gap(fields: Mapping[str, Any], task: Task) -> bool:
    """Whether a column of the task has nothing in a row; one that the file lacks altogether is a mistake instead."""
    cells = [fields[name] for names in (*task.columns, task.label_columns) for name in names if name in fields]
    return any(map(is_missing, cells))


def _is_withheld(fields: Mapping[str, Any], task: Task) -> bool:
    given = [fields[name] for name in task.label_columns if not is_missing(fields.get(name))]
    minus_one_is_an_answer = task.score_range is None if task.is_regression else task.label_index("-1") is not None
    return not given or (written(given[0]) == "-1" and not minus_one_is_an_answer)


def _either(names: Names) -> str:
    return " or ".join(map(repr, names))


def column_of(fields: Mapping[str, Any], names: Names, where: str) -> str:
    """The one of `names` that a row has. Raises DataError if it has none or two."""
    here = [name for name in names if name in fields]
    if len(here) > 1:
        raise DataError(f"{where}: column {here[0]!r} and column {here[1]!r} stand for the same; drop one")
    if not here:
        found = ", ".join(map(repr, fields))
        raise DataError(f"{where}: no column {_either(names)}; found {found}{dialect_hint(fields)}")
    return here[0]


def is_missing(raw: Any) -> bool:
    """Whether a cell holds nothing; in a column of numbers that is NaN."""
    return raw is None or raw != raw or (isinstance(raw, str) and not raw.strip())


def no_answer(where: str, rest: Records, column: str, kind: str) -> DataError:
    """What to say of a row that has no label or score, and of the rows after it."""
    more = sum(is_missing(fields.get(column)) for _, fields in rest)
    others = f", nor have {more} rows after it" if more else ""
    return DataError(f"{where}: the row has no {kind} in column {column!r}{others}; give it one or drop the row")


def _is_quoted(text: str) -> bool:
    """Whether a text is written as in CSV, where a field that holds quotes stands in quotes and doubles them."""
    inner = text[1:-1]
    return text[:1] == text[-1:] == '"' and '""' in inner and '"' not in inner.replace('""', "")


def _text(fields: Mapping[str, Any], names: Names, where: str) -> str:
    column = column_of(fields, names, where)
    text = "" if fields[column] is None else fields[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r} holds {type(text).__name__} {text!r}; it must be text")
    return checked_text(text, f"{where}, column {column!r}")


def written(label: Any) -> str:
    """A label as text: Parquet and JSON have numbers and true and false as well."""
    if isinstance(label, bool):
        return str(label).lower()
    # A table whose label column once had gaps holds whole numbers as floats.
    return str(int(label) if isinstance(label, float) and label.is_integer() else label).strip()


def _label(raw: Any, classes: Mapping[str, int], task: Task, where: str) -> int:
    index = classes.get(folded(written(raw)))
    if index is None:
        known = list(task.labels)
        if task.codes:
            known = [f"{name} or {code}" for name, code in zip(task.labels, task.codes, strict=True)]
        raise DataError(f"{where}: label {raw!r} is unknown; labels of {task.name} are {listed(known)}")
    return index


def listed(labels: list[str]) -> str:
    """As many as a sentence can hold."""
    more = f" and {len(labels) - LABELS_SHOWN} more" if len(labels) > LABELS_SHOWN else ""
    return ", ".join(labels[:LABELS_SHOWN]) + more


def _score(raw: Any, task: Task, where: str) -> float:
    try:
        score = float(raw)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if isinstance(raw, bool) or not abs(score) <= LARGEST_SCORE:
        raise DataError(f"{where}: score {raw!r} is no finite number; correct it or drop the row")
    low, high = task.score_range or (score, score)
    if not low <= score <= high:
        raise DataError(f"{where}: score {score:g} is outside the task's range of {low:g} to {high:g}")
    return score


def checked_text(text: str, where: str) -> str:
    """`text` itself. Raises DataError if no classifier can use it: empty, huge, or control characters."""
    if not text.strip():
        raise DataError(f"{where}: the text is empty; give it a text or drop the row")
    size = len(text.encode("utf-8"))
    if size > MAX_TEXT_BYTES:
        raise DataError(f"{where}: the text has {size} bytes; the limit is {MAX_TEXT_BYTES}; cut it or drop the row")
    control = CONTROL.search(text)
    if control is not None:
        raise DataError(f"{where}: the text holds control character {control.group()!r}; remove it or drop the row")
    return text
