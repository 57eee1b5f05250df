"""Rows of TSV, CSV, JSONL and Parquet files and of hub data sets: streamed, every byte kept, mistakes named by line.

The same kinds of files are written here, too.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from compressor.errors import DataError, nearest

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
ROWS_AT_ONCE = 1000
ROWS_SEEN = 10_000  # that the types of a Parquet file's columns are taken from, and the rows of its groups
BREAKS = re.compile(r"[\t\n\r]")  # what no cell of a TSV file may hold
Records = Iterator[tuple[str, dict[str, Any]]]  # where a row stands, for messages, and its fields by column


def records(path: Path, *, header: Sequence[str] = (), only: str | None = None) -> Records:
    """Stream the rows of a .tsv, .csv, .jsonl or .parquet file as (file and line, fields by column name).

    `header` names the columns of a TSV file without a header line. `only` is the one column that is wanted: Parquet
    files are spared the reading of the others. Raises DataError that names file and line of what cannot be read.
    """
    match path.suffix:
        case ".tsv":
            return _read_tsv(path, header)
        case ".csv":
            return _read_csv(path)
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path, only)
        case other:
            raise DataError(f"{path} ends in {other!r}; data files end in {', '.join(SUFFIXES)}")


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


def dataset_records(dataset: Any, where: str) -> Records:
    """Stream the rows of a `datasets.Dataset`; `where` names it in messages."""
    names = {column: feature.names for column, feature in dataset.features.items() if hasattr(feature, "names")}
    batches = dataset.iter(batch_size=ROWS_AT_ONCE)
    rows = (values for batch in batches for values in zip(*batch.values(), strict=True))
    return _numbered((dict(zip(dataset.column_names, values, strict=True)) for values in rows), names, where)


def _read_tsv(path: Path, header: Sequence[str]) -> Records:
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
        yield where, _fields(header, values, where)


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
        yield where, fields


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
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file, or damaged: {error}") from error


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


def _fields(header: Sequence[str], values: list[str], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        raise DataError(f"{where}: {len(values)} columns; a row needs {len(header)}")
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
                        f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})"
                    ) from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def write(path: Path, rows: Iterable[dict[str, Any]], *, like: Path | None = None) -> int:
    """Write rows, all with the same columns, to a .tsv, .csv, .jsonl or .parquet file as they come; returns how many.

    The file has its name when it is whole. A Parquet file gets the types of the first ten thousand rows, and those of
    `like` for its columns, if it is one as well. Raises DataError if a row, or the file, cannot be written.
    """
    writers: dict[str, Callable[[Path, Iterator[dict[str, Any]]], int]]
    writers = {
        ".tsv": _write_tsv,
        ".csv": _write_csv,
        ".jsonl": _write_jsonl,
        ".parquet": lambda partial, alike: _write_parquet(partial, alike, like),
    }
    if path.suffix not in writers:
        raise DataError(f"{path} ends in {path.suffix!r}; data files end in {', '.join(SUFFIXES)}")
    partial = path.with_name(f"{path.name}.partial")
    try:
        count = writers[path.suffix](partial, _alike(rows))
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
        if row.keys() != set(columns):
            raise DataError(
                f"row {number} to be written has columns {', '.join(map(repr, row))}, and the first "
                f"{', '.join(map(repr, columns))}; give every row the same ones"
            )
        yield {name: row[name] for name in columns}


def _write_tsv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        count = 0
        for count, row in enumerate(rows, start=1):
            lines = [[_cell(value) for value in row.values()]]
            if count == 1:
                lines.insert(0, list(row))
            for cell in chain(*lines):
                if BREAKS.search(cell):
                    raise DataError(
                        f"row {count} to be written has a tab or line end in {cell[:80]!r}, which a .tsv file cannot "
                        "hold; write .csv, .jsonl or .parquet"
                    )
            file.writelines("\t".join(line) + "\n" for line in lines)
    return count


def _write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer, count = csv.writer(file, lineterminator="\n"), 0
        for count, row in enumerate(rows, start=1):
            if count == 1:
                writer.writerow(row)
            writer.writerow([_cell(value) for value in row.values()])
    return count


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        count = 0
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]], like: Path | None) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, some = 0, list(islice(rows, ROWS_SEEN))
    try:
        schema = pa.Table.from_pylist(some).schema
        for field in pq.read_schema(like) if like is not None and like.suffix == ".parquet" else ():
            place = schema.get_field_index(field.name)
            # Codes of class labels were read as their names.
            if place >= 0 and not (pa.types.is_integer(field.type) and pa.types.is_string(schema.field(place).type)):
                schema = schema.set(place, field)
        with pq.ParquetWriter(path, schema) as writer:
            while some:
                writer.write_table(pa.Table.from_pylist(some, schema=schema))
                count, some = count + len(some), list(islice(rows, ROWS_SEEN))
    except pa.ArrowException as error:
        raise DataError(f"a row after {count} does not fit its columns' types ({error}); write .jsonl") from error
    return count


def _cell(value: Any) -> str:
    """A value as text: nothing as an empty cell, what is no text as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
