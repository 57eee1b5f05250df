"""Sends the texts of a table, in a file or in memory, to a running server, and adds its answers as columns."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import table_writer, tables
from compressor.errors import ConfigError, DataError
from compressor.progress import Progress
from serving.client import Classifier
from serving.errors import DeadlineError, RequestError
from serving.exchange import Answer, Classification, Regression
from serving.model import Text

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ROWS_AT_ONCE = 32  # of a request: more of them come back later without being faster


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns."""

    text: str
    text_b: str | None = None
    """The second text of pairs."""
    prefix: str = ""
    """Put before the names of the columns that are added."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Of one text, or of both."""
        return (self.text,) if self.text_b is None else (self.text, self.text_b)

    def added(self, labels: Sequence[str]) -> tuple[str, ...]:
        """What a model with these labels adds: label and score, or the value of a regression; and error."""
        names = ("label", "score", "error") if labels else ("value", "error")
        return tuple(f"{self.prefix}{name}" for name in names)


def classify_file(
    source: Path,
    out: Path,
    columns: Columns,
    connect: Callable[[], Classifier],
    *,
    in_flight: int = 4,
) -> dict[str, int]:
    """Write the rows of a table with what a server says of each, in order; returns the numbers of rows and of refused.

    `connect` makes a client; each of the threads that keep `in_flight` requests under way has its own. A row whose text
    the server refuses (an empty one) gets the reason in `error`, "" everywhere else. The table is read twice, the first
    time to find its mistakes; it is never in memory as a whole. Raises DataError if a row cannot be used, ConfigError
    if model and columns do not fit together, ServingError if no server answers.
    """
    facts = {"rows": 0, "refused": 0}
    with closing(connect()) as client:
        _check_pairs(client, columns)
        added = columns.added(client.labels)
    facts["rows"], schema = _checked(source, out, columns, added)
    batches = _batches(fields for _, fields in tables.records(source))
    progress = Progress("classified rows", total=facts["rows"])

    def rows() -> Generator[dict[str, Any]]:
        for batch, found in _in_order(batches, columns, connect, in_flight):
            for fields, answer in zip(batch, found, strict=True):
                facts["refused"] += isinstance(answer, RequestError)
                yield {**fields, **dict(zip(added, _cells(answer, len(added)), strict=True))}
            progress.advance(len(batch))

    with closing(rows()) as made:
        table_writer.write(out, made, schema=schema)
    progress.close()
    return facts


def classify_table(
    client: Classifier, table: pa.Table | pa.RecordBatch | pd.DataFrame, columns: Columns
) -> pa.Table | pd.DataFrame:
    """Return an Arrow table, or a pandas DataFrame, with the columns that `classify_file` adds.

    Raises DataError if it is neither, or a column is missing, there twice or already, or holds no texts; ConfigError
    and ServingError as there.
    """
    import pyarrow as pa

    _check_pairs(client, columns)
    added = columns.added(client.labels)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    is_arrow = isinstance(table, pa.Table)
    if not is_arrow and not _is_frame(table):
        raise DataError(f"the table is of type {type(table).__name__}; give an Arrow table or a pandas DataFrame")
    names = table.column_names if is_arrow else list(table.columns)
    # Frames may have numbers for names, and tuples where names have levels.
    tables.check_columns("the table", {str(name): None for name in names}, texts=columns.texts, added=added)
    for name in columns.texts:
        if names.count(name) != 1:
            raise DataError(
                f"the table: {names.count(name)} columns are named {name!r}; give one column that name, as a text"
            )
    # pandas has a number of ways to say that there is nothing; all of them become None.
    held = [
        table[name].to_pylist()
        if is_arrow
        else [None if is_na else value for value, is_na in zip(table[name], table[name].isna(), strict=True)]
        for name in columns.texts
    ]
    rows = [dict(zip(columns.texts, values, strict=True)) for values in zip(*held, strict=True)]
    for number, row in enumerate(rows, start=1):
        tables.check_columns(f"the table, row {number}", row, texts=columns.texts)
    found = [answer for batch in _batches(iter(rows)) for answer in answered(client, _texts(batch, columns))]
    cells = list(zip(*(_cells(answer, len(added)) for answer in found), strict=True)) or [()] * len(added)
    for name, values in zip(added, cells, strict=True):
        kind = pa.float64() if _is_number(name) else pa.string()
        table = table.append_column(name, pa.array(values, kind)) if is_arrow else table.assign(**{name: values})
    return table


def _is_frame(table: Any) -> bool:
    """Whether it is a DataFrame: of a library that whoever made one has loaded, and that we do without."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(table, pandas.DataFrame)


def answered(client: Classifier, texts: Sequence[Text]) -> list[Answer | RequestError]:
    """Return the answer to each text or pair, or the error for which it alone was refused.

    A request is refused as a whole: halves of it are sent until the bad text is alone.
    """
    if not texts:
        return []
    try:
        return list(client.classify(texts))
    except RequestError as error:
        if len(texts) == 1:
            return [error]
    middle = len(texts) // 2
    return [*answered(client, texts[:middle]), *answered(client, texts[middle:])]


class _Own(threading.local):
    """What each thread has for itself."""

    client: Classifier | None = None


def _in_order(
    batches: Iterator[list[dict[str, Any]]], columns: Columns, connect: Callable[[], Classifier], in_flight: int
) -> Iterator[tuple[list[dict[str, Any]], list[Answer | RequestError]]]:
    """Each batch with its answers, as they were read; `in_flight` of them are asked at a time, as many wait."""
    own, clients = _Own(), list[Classifier]()

    def ask(batch: list[dict[str, Any]]) -> list[Answer | RequestError]:
        if own.client is None:
            own.client = connect()
            clients.append(own.client)
        texts = _texts(batch, columns)
        try:
            return answered(own.client, texts)
        except DeadlineError:
            # A server that was killed, or was busy for a moment, must not cost the rows that are done.
            return answered(own.client, texts)

    waiting = deque[tuple[list[dict[str, Any]], Future[list[Answer | RequestError]]]]()
    pool = ThreadPoolExecutor(in_flight, thread_name_prefix="classify")
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(ask, batch)))
            if len(waiting) >= 2 * in_flight:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for client in clients:
            client.close()


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while some := list(islice(rows, ROWS_AT_ONCE)):
        yield some


def _texts(rows: list[dict[str, Any]], columns: Columns) -> list[Text]:
    first = [row[columns.text] or "" for row in rows]
    return (
        first if columns.text_b is None else list(zip(first, [row[columns.text_b] or "" for row in rows], strict=True))
    )


def _cells(answer: Answer | RequestError, count: int) -> tuple[Any, ...]:
    """The values of the added columns."""
    match answer:
        case Classification():
            return answer.label, answer.score, ""
        case Regression():
            return answer.value, ""
        case RequestError():
            # A reason with line ends, as gateways send, is no cell of a TSV file.
            return (None,) * (count - 1) + (" ".join(str(answer).split()),)


def _checked(source: Path, out: Path, columns: Columns, added: Sequence[str]) -> tuple[int, Any]:
    """The number of rows of a table that can be sent, and the schema of `out` with the answers (see `Form.schema`).

    Raises DataError where a row cannot be sent, or written to `out`.
    """
    count, form = 0, table_writer.Form(out, source)
    answer = {name: 0.0 if _is_number(name) else "" for name in added}  # of the types that all of them have
    for where, fields in tables.records(source):
        count += 1
        tables.check_columns(where, fields, texts=columns.texts, added=added)
        form.add(where, {**fields, **answer})
    if not count:
        raise DataError(f"{source} has no rows; give a file with a row for each text")
    return count, form.schema()


def _is_number(added: str) -> bool:
    """Whether a column that is added holds numbers; the others hold text."""
    return added.endswith(("score", "value"))


def _check_pairs(client: Classifier, columns: Columns) -> None:
    if client.is_pair and columns.text_b is None:
        raise ConfigError(f"the model reads pairs, and {columns.text!r} is one column; name the second text's too")
    if columns.text_b is not None and not client.is_pair:
        raise ConfigError(f"the model reads single texts; leave the column {columns.text_b!r} out")
