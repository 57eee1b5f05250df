"""Rows of TSV, CSV, JSONL and Parquet files and of hub data sets: streamed, every byte kept, mistakes named by line.

The same kinds of files are written here, too.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from compressor.errors import DataError, nearest

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
ROWS_AT_ONCE = 1000
ROWS_SEEN = 10_000  # that the types of a Parquet file's columns are taken from, and the rows of its groups
TYPED = (date, time, timedelta, Decimal)  # what Parquet has a type for and JSON has not; text where there are no types
BREAKS = re.compile(r"[\t\n\r]")  # what no cell of a TSV file may hold
SEPARATORS = re.compile(r"[,;|\t]")
TSV_QUOTES = "a .tsv file is read in GLUE's dialect, where quotes are text; save it as .csv"
Records = Iterator[tuple[str, dict[str, Any]]]  # where a row stands, for messages, and its fields by column


def records(path: Path, *, header: Sequence[str] = (), only: str | None = None, gaps: bool = False) -> Records:
    """Stream the rows of a .tsv, .csv, .jsonl or .parquet file as (file and line, fields by column name).

    `header` names the columns of a TSV file without a header line. `only` is the one column that is wanted: Parquet
    files are spared the reading of the others. With `gaps`, a row of a TSV file that ends too soon has None in the rest
    of its columns. Raises DataError that names file and line of what cannot be read.
    """
    match kind_of(path):
        case ".tsv":
            return _read_tsv(path, header, gaps=gaps)
        case ".csv":
            return _read_csv(path)
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path, only)
        case _:
            raise _no_kind(path)


def kind_of(path: Path) -> str:
    """The ending of a file's name, which says how it is read, in small letters."""
    return path.suffix.lower()


def dialect_hint(columns: Collection[str]) -> str:
    """What to add to a sentence about columns that were written in another dialect than they were read in."""
    if len(columns) == 1 and any(map(SEPARATORS.search, columns)):
        return "; columns of a .csv file are separated by commas, and of a .tsv file by tabs: save it so"
    if any(len(name) > 1 and name[0] == name[-1] == '"' for name in columns):
        return f"; {TSV_QUOTES}"
    return ""


def _no_kind(path: Path) -> DataError:
    return DataError(f"{path} ends in {path.suffix!r}; data files end in {', '.join(SUFFIXES)}")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text without its end) of the lines of a UTF-8 file that hold something. Raises DataError."""
    for number, line in _decoded(path):
        text = line.removesuffix("\n").removesuffix("\r")
        if text:
            yield number, text


def check_columns(
    where: str,
    fields: Mapping[str, Any],
    *,
    texts: Sequence[str],
    others: Sequence[str] = (),
    added: Sequence[str] = (),
) -> None:
    """Raise DataError unless a row has the columns `texts`, of texts or nothing, and `others`, and none of `added`."""
    for name in (*texts, *others):
        if name not in fields:
            raise DataError(f"{where}: no column {name!r}; {nearest(name, fields)}")
    for name in added:
        if name in fields:
            raise DataError(f"{where}: there is a column {name!r} already, the name of one to be added; rename it")
    for name in texts:
        if not isinstance(fields[name], str | None):
            kind = type(fields[name]).__name__
            raise DataError(f"{where}: column {name!r} holds {kind} {fields[name]!r}; it must be text")


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
        """Raises DataError if `out` has the name of no kind that can be written, or if `like` cannot be read."""
        if kind_of(out) not in SUFFIXES:
            raise _no_kind(out)
        self._out = out
        self._names = list[str]()
        self._waiting = list[tuple[str, dict[str, Any]]]()  # rows whose types were not looked at
        self._given = dict[str, Any]()
        self._found: Any = None
        if kind_of(out) == ".parquet" and like is not None and kind_of(like) == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                schema = pq.read_schema(like)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(like, error) from error
            names = _class_names(schema.metadata or {})  # codes of class labels were read as names
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


def dataset_records(dataset: Any, where: str) -> Records:
    """Stream the rows of a `datasets.Dataset`; `where` names it in messages."""
    names = {column: feature.names for column, feature in dataset.features.items() if hasattr(feature, "names")}
    batches = dataset.iter(batch_size=ROWS_AT_ONCE)
    rows = (values for batch in batches for values in zip(*batch.values(), strict=True))
    return _numbered((dict(zip(dataset.column_names, values, strict=True)) for values in rows), names, where)


def _read_tsv(path: Path, header: Sequence[str], *, gaps: bool) -> Records:
    """GLUE's dialect: tabs separate, quotes mean nothing, one row a line."""
    rows: Iterator[tuple[str, list[str]]]
    rows = ((f"{path}, line {number}", line.split("\t")) for number, line in lines(path))
    first = next(rows, None)
    if first is None:
        return
    if not header or set(header) & set(first[1]):  # CoLA's test file has a header line, its others have none
        header = _checked(first[1], first[0])
    else:
        rows = chain([first], rows)
    for where, values in rows:
        missing = [None] * (len(header) - len(values) if gaps else 0)
        yield where, _fields(header, [*values, *missing], where)


def _read_csv(path: Path) -> Records:
    """Ordinary CSV: commas separate, a quoted field may hold commas, quotes and line ends."""
    csv.field_size_limit(sys.maxsize)  # the library's own limit of 131,072 characters refuses long documents
    reader = csv.reader((line for _, line in _decoded(path)), strict=True)
    header = list[str]()
    try:
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if not values:
                continue  # a blank line, as at the end of many files
            if header:
                yield where, _fields(header, values, where)
            else:
                header = _checked(values, where)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _read_jsonl(path: Path) -> Records:
    for number, line in lines(path):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not a JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(f"{where}: not a JSON object but {type(fields).__name__}")
        if "\\u" in line:
            _check_characters(where, fields)
        yield where, fields


def _check_characters(where: str, fields: dict[str, Any]) -> None:
    """Raise DataError if a text holds half of a surrogate pair, which JSON can write, and UTF-8 cannot."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where}: the row holds half a character ({half!a}), as of a text cut within an emoji; drop the row"
        ) from error


def _read_parquet(path: Path, only: str | None) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = [only] if only in schema.names else None
            batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _numbered(rows, _class_names(schema.metadata or {}), str(path))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a Parquet file, or damaged: {error}")


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Names of class labels by column, which `datasets` leaves in the Parquet files that it writes."""
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    labels = ((column, kind) for column, kind in features.items() if isinstance(kind, dict))
    return {column: kind["names"] for column, kind in labels if kind.get("_type") == "ClassLabel"}


def _numbered(rows: Iterable[dict[str, Any]], names: Mapping[str, Sequence[str]], where: str) -> Records:
    """Rows with their numbers; a class label by its name, because positions differ between sources."""
    for number, fields in enumerate(rows, start=1):
        for column, known in names.items():
            code = fields.get(column)
            if isinstance(code, int) and 0 <= code < len(known):  # -1: withheld
                fields[column] = known[code]
        yield f"{where}, row {number}", fields


def _checked(header: list[str], where: str) -> list[str]:
    """The header itself. Raises DataError if a name is there twice: a row's field could be either."""
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: column {twice!r} is there twice; rename one")
    return header


def _fields(header: Sequence[str], values: Sequence[str | None], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        hint = dialect_hint(header)
        raise DataError(f"{where}: {len(values)} columns; a row needs {len(header)}; correct or drop it{hint}")
    return dict(zip(header, values, strict=True))


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text with its end) of each line of a UTF-8 file. LF alone ends a line: U+2028 and NEL are text."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
                try:
                    yield number, raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
                    ) from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


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
        raise _no_kind(path)
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
