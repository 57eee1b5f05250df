"""Rows of TSV, CSV, JSONL and Parquet files and of hub data sets: streamed, every byte kept, mistakes named by line."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from compressor.errors import DataError, nearest

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
ROWS_AT_ONCE = 1000
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
            raise no_kind(path)


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


def no_kind(path: Path) -> DataError:
    """The error for a file whose name does not say how it is read."""
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


def dataset_records(dataset: Any, where: str) -> Records:
    """Stream the rows of a `datasets.Dataset`; `where` names it in messages."""
    names = {column: feature.names for column, feature in dataset.features.items() if hasattr(feature, "names")}
    batches = dataset.iter(batch_size=ROWS_AT_ONCE)
    rows = (values for batch in batches for values in zip(*batch.values(), strict=True))
    return _numbered((dict(zip(dataset.column_names, values, strict=True)) for values in rows), names, where)


def _read_tsv(path: Path, header: Sequence[str], *, gaps: bool) -> Records:
    """GLUE's dialect: tabs separate, quotes mean nothing, one row a line."""
    rows: Iterator[tuple[int, list[str]]]
    rows = ((number, line.split("\t")) for number, line in lines(path))
    first = next(rows, None)
    if first is None:
        return
    last = first[0]
    if not header or set(header) & set(first[1]):  # CoLA's test file has a header line, its others have none
        header = _checked(first[1], f"{path}, line {last}")
    else:
        rows = chain([first], rows)
    for number, values in rows:
        if len(header) == 1 and number > last + 1:
            raise DataError(
                f"{path}, line {last + 1}: an empty line, which with one column could be a row without text; drop it, "
                "or save the file as .csv or .jsonl"
            )
        where, last = f"{path}, line {number}", number
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
        raise DataError(f"{path}, line {reader.line_num}: {_csv_mistake(str(error))}") from error


def _csv_mistake(said: str) -> str:
    """What the CSV library finds wrong, with the remedy."""
    if "unexpected end of data" in said:
        return "a quoted field has no end; close its quotes, or double those that are text"
    if "new-line character" in said:
        return "a carriage return stands outside quotes; end lines with LF or CRLF"
    return f"{said}; quote fields that hold quotes, commas or line ends, and double the quotes in them"


def _read_jsonl(path: Path) -> Records:
    for number, line in lines(path):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not a JSON object: {error}") from error
        except RecursionError as error:
            raise DataError(f"{where}: JSON of too many levels; correct or drop the row") from error
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
            _checked(schema.names, str(path))
            columns = [only] if only in schema.names else None
            batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _numbered(rows, class_names(schema.metadata or {}), str(path))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error
    except (OverflowError, ValueError) as error:  # Python has no such date
        raise DataError(f"{path} holds a value that cannot be read ({error}); correct its column or drop it") from error


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a Parquet file that Arrow cannot read."""
    return DataError(f"{path} is not a Parquet file, or damaged: {error}")


def class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Names of class labels by column, which `datasets` leaves in the Parquet files that it writes."""
    info = json.loads(metadata.get(b"huggingface", b"{}")).get("info") or {}
    features = info.get("features") or {}
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
