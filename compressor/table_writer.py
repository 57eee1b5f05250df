"""Writes rows to TSV, CSV, JSONL and Parquet files, and says before the work what such a file cannot hold."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from compressor.errors import DataError
from compressor.tables import SUFFIXES, class_names, damaged, kind_of, no_kind

ROWS_AT_ONCE = 1000  # whose types are looked at together
ROWS_SEEN = 10_000  # that the types of a Parquet file's columns are taken from, and the rows of its groups
TYPED = (date, time, timedelta, Decimal)  # what Parquet has a type for and JSON has not; text where there are no types
BREAKS = re.compile(r"[\t\n\r]")  # what no cell of a TSV file may hold


def check_cells(where: str, fields: Mapping[str, Any], out: Path) -> None:
    """Raise DataError if a field is, or holds, what a file like `out` cannot hold."""
    if kind_of(out) == ".parquet":
        return
    for name, value in fields.items():
        try:
            cell = _cell(value, kind_of(out))
        except DataError as error:
            raise DataError(f"{where}: column {name!r}: {error}") from error
        if kind_of(out) == ".tsv":
            _check_breaks(where, name, cell)


class Form:
    """What rows have in common: their columns and, for a Parquet file, the types of these, which every row decides.

    Types of columns that the Parquet file `like` has, and that were read as they are there, are taken from it.
    """

    def __init__(self, out: Path, like: Path | None = None) -> None:
        """Raises DataError if `out` has the name of no kind that can be written, or `like` cannot be read as it is."""
        if kind_of(out) not in SUFFIXES:
            raise no_kind(out)
        self._out = out
        self._names = list[str]()
        self._waiting = list[tuple[str, dict[str, Any]]]()  # rows whose types were not looked at
        self._given = dict[str, Any]()
        self._found: Any = None
        if like is not None and kind_of(like) == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                schema = pq.read_schema(like)
                _check_times(like, schema)
            except (pa.ArrowException, OSError) as error:
                raise damaged(like, error) from error
            names = class_names(schema.metadata or {})  # codes of class labels were read as names
            if kind_of(out) == ".parquet":
                self._given = {field.name: field for field in schema if field.name not in names}

    def add(self, where: str, fields: dict[str, Any]) -> None:
        """Take in one more row. Raises DataError that names it, or one of the last, if it does not fit the others."""
        self._names = self._names or list(fields)
        _check_names(where, fields, self._names)
        check_cells(where, fields, self._out)
        if kind_of(self._out) == ".parquet":
            self._waiting.append((where, {name: fields[name] for name in fields if name not in self._given}))
            if len(self._waiting) >= ROWS_AT_ONCE:
                self._look()

    def schema(self) -> Any:
        """The columns of a Parquet file with all the rows; None for another kind. Raises DataError as `add`."""
        if kind_of(self._out) != ".parquet":
            return None
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._look()
        schema = pa.schema([self._given.get(name) or self._found.field(name) for name in self._names])
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
        except pa.ArrowException as error:
            raise DataError(f"{self._out} cannot hold the columns ({error}); write .jsonl") from error
        return schema

    def _look(self) -> None:
        """Bring the types of the waiting rows together with those of the rows before."""
        import pyarrow as pa

        def joined(found: Any, rows: list[dict[str, Any]]) -> Any:
            new = pa.Table.from_pylist(rows).schema
            return new if found is None else pa.unify_schemas([found, new], promote_options="permissive")

        rows, self._waiting = self._waiting, []
        try:
            if rows:
                self._found = joined(self._found, [fields for _, fields in rows])
        except (pa.ArrowException, OverflowError):  # one by one, to name the row
            for where, fields in rows:
                try:
                    self._found = joined(self._found, [fields])
                except (pa.ArrowException, OverflowError) as error:
                    raise DataError(f"{where} does not fit its columns' types ({error}); write .jsonl") from error


def _check_times(path: Path, schema: Any) -> None:
    """Raise DataError if a Parquet file has a time of day that Python, which counts microseconds, would cut."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in (field.name for field in schema if field.type == pa.time64("ns")):
        with pq.ParquetFile(path) as file:
            try:
                for batch in file.iter_batches(columns=[name]):
                    batch.column(0).cast(pa.time64("us"))
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"{path}: column {name!r} holds times of day in nanoseconds, which would be cut; round them to "
                    "microseconds, or write them as numbers"
                ) from error


def write(path: Path, rows: Iterable[dict[str, Any]], *, like: Path | None = None, schema: Any = None) -> int:
    """Write rows, all with the same columns, to a .tsv, .csv, .jsonl or .parquet file as they come; returns how many.

    The file has its name when it is whole. A Parquet file gets the types of `schema`, which `Form` finds; without one
    those of the first ten thousand rows, and those of `like` for its columns, if it is one as well. In the other kinds
    dates and times have ISO form, and decimals are text. Raises DataError if a row, or the file, cannot be written.
    """
    writers: dict[str, Callable[[Path, Iterator[dict[str, Any]]], int]]
    writers = {
        ".tsv": _write_tsv,
        ".csv": _write_csv,
        ".jsonl": _write_jsonl,
        ".parquet": lambda partial, alike: _write_parquet(partial, alike, like, schema),
    }
    if kind_of(path) not in SUFFIXES:
        raise no_kind(path)
    partial = path.with_name(f"{path.name}.new")
    try:
        count = writers[kind_of(path)](partial, _alike(rows))
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; free space or choose another") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def _alike(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, with their columns in one order. Raises DataError where a row has others than the first."""
    columns = list[str]()
    for number, row in enumerate(rows, start=1):
        columns = columns or list(row)
        _check_names(f"row {number} to be written", row, columns)
        yield {name: row[name] for name in columns}


def _check_names(where: str, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    if row.keys() != set(columns):
        raise DataError(
            f"{where} has columns {', '.join(map(repr, row))}, and the first {', '.join(map(repr, columns))}; give "
            "every row the same ones"
        )


def _check_breaks(where: str, name: str, cell: str) -> None:
    """Raise DataError if a column's name or a cell of it would break a line of a TSV file."""
    for text in (name, cell):
        if BREAKS.search(text):
            raise DataError(
                f"{where} has a tab or line end in {text[:80]!r}, which a .tsv file cannot hold; write .csv, .jsonl or "
                ".parquet"
            )


def _write_tsv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        count = 0
        for count, row in enumerate(rows, start=1):
            cells = [_cell(value, ".tsv") for value in row.values()]
            for name, cell in zip(row, cells, strict=True):
                _check_breaks(f"row {count} to be written", name, cell)
            if count == 1:
                file.write("\t".join(row) + "\n")
            file.write("\t".join(cells) + "\n")
    return count


class _Lines:
    """A file for `csv.writer`, which quotes the line ends that it is given itself: told CR LF, it quotes CR as well."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(line.removesuffix("\r\n") + "\n")


def _write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer, count = csv.writer(_Lines(file), lineterminator="\r\n"), 0
        for count, row in enumerate(rows, start=1):
            if count == 1:
                writer.writerow(row)
            writer.writerow([_cell(value, ".csv") for value in row.values()])
    return count


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        count = 0
        for row in rows:
            file.write(_json(row, ".jsonl") + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]], like: Path | None, schema: Any) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, some = 0, list(islice(rows, ROWS_SEEN))
    if schema is None:
        form = Form(path.with_suffix(""), like)
        for number, row in enumerate(some, start=1):
            form.add(f"row {number} to be written", row)
        schema = form.schema()
    try:
        with pq.ParquetWriter(path, schema) as writer:
            while some:
                writer.write_table(pa.Table.from_pylist(some, schema=schema))
                count, some = count + len(some), list(islice(rows, ROWS_SEEN))
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"a row after {count} does not fit its columns' types ({error}); write .jsonl") from error
    return count


def _cell(value: Any, suffix: str) -> str:
    """A value as text: nothing as an empty cell, what is no text as JSON."""
    if value is None:
        return ""
    if isinstance(value, TYPED):
        return _text(value, suffix)
    return value if isinstance(value, str) else _json(value, suffix)


def _json(value: Any, suffix: str) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda other: _text(other, suffix))


def _text(value: Any, suffix: str) -> str:
    """A value that JSON lacks. Raises DataError unless it is of TYPED."""
    match value:
        case date() | time():
            return value.isoformat()
        case Decimal() | timedelta():
            return str(value)
        case _:
            raise DataError(
                f"a value to be written is {type(value).__name__} {value!r:.80}, which a {suffix} file cannot hold; "
                "write .parquet"
            )
