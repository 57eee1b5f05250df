"""corpus: labelled text from files, a hub or the package index -> Arrow examples in three splits."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import CorpusConfig
from compressor.dataset import SPLITS, write_examples
from compressor.errors import DataError
from compressor.sources import check, hub_error, index_file, index_text
from compressor.tasks import Task

Row = tuple[str, int]  # text, label index
SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
SPLIT_NAMES = {"train": ("train",), "validation": ("dev", "validation"), "test": ("test",)}
MAX_TEXT_BYTES = 100_000
ALLOWED_CONTROLS = "\t\n\r"


def corpus(config: CorpusConfig, task: Task, *, seed: int, key: str, out: Path) -> Artifact:
    """Read the source into `train`, `validation` and `test` examples of `task`.

    Splits that the source does not have are cut from its rows, the same ones for the same seed, with each label's
    share kept. Raises DataError that names file and line of a malformed row.
    """
    splits, facts = read_source(config, task, seed=seed)
    for name in SPLITS:
        labels = Counter(label for _, label in splits[name])
        if len(labels) < 2:
            only = task.labels[next(iter(labels))] if labels else None
            found = f"only label {only!r}" if labels else "no rows"
            raise DataError(f"the {name} split of {config.source} has {found}; a classifier needs at least two labels")
    section = {**config.model_dump(), "task": task.name}
    with artifact.write(out, "examples", key=key, section=section, parents={}) as draft:
        rows = {}
        for name in SPLITS:
            examples = ((text, label, number) for number, (text, label) in enumerate(splits[name]))
            write_examples(draft.path / f"{name}.arrow", examples)
            counts = Counter(label for _, label in splits[name])
            rows[name] = {task.labels[label]: counts[label] for label in sorted(counts)}
        draft.metrics.update(facts, rows=rows)
    return Artifact.open(out, kind="examples")


def read_source(config: CorpusConfig, task: Task, *, seed: int) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Rows of each split, and what the report says about where they come from."""
    check(config.source, what="corpus.source")
    kind, _, name = config.source.partition(":")
    if kind == "index":
        source = index_file(name, what="corpus.source")
        rows, skipped = read_ratings(index_text(source), config.undecided, task)
        facts: dict[str, Any] = {"provenance": source.provenance, "undecided_left_out": skipped}
        return _split(rows, config, seed=seed), facts | {"splits": "cut from one list of rows"}
    if kind == "hub":
        found, provenance = _read_hub(name, task), f"{task.hub_config} of {config.source}"
    else:
        path = Path(config.source)
        found, provenance = _read_path(path, task), f"{'files in ' if path.is_dir() else ''}{path.name}"
    facts = {"provenance": provenance}
    if set(found) == {"train"}:
        return _split(found["train"], config, seed=seed), facts | {"splits": "cut from one list of rows"}
    if "test" in found and "validation" in found:
        return found, facts | {"splits": "as given; validation is used for choosing, test only for reporting"}
    # One held-out file: report on it, and choose on rows kept out of training, or the figures would flatter.
    reported = found["test"] if "test" in found else found["validation"]
    train, validation = _hold_out(found["train"], config.validation, seed=seed)
    splits = "one held-out file, used only for reporting; validation, used for choosing, is cut from train"
    return {"train": train, "validation": validation, "test": reported}, facts | {"splits": splits}


def read_ratings(path: Path, undecided: float, task: Task) -> tuple[list[Row], int]:
    """Rated sentences (id, mean rating, text; tab-separated) as rows, and how many were left out as undecided."""
    negative, positive = task.labels.index("negative"), task.labels.index("positive")
    rows, skipped = [], 0
    for number, line in _lines(path):
        fields = line.split("\t")
        try:
            _, rating, text = fields[0], float(fields[1]), fields[2]
        except (IndexError, ValueError) as error:
            raise DataError(f"{path}, line {number}: needs an id, a rating and a text, separated by tabs") from error
        if abs(rating) < undecided or not rating:
            skipped += 1
        else:
            label = positive if rating > 0 else negative
            rows.append((checked_text(text.strip(), f"{path}, line {number}"), label))
    return rows, skipped


def _split(rows: list[Row], config: CorpusConfig, *, seed: int) -> dict[str, list[Row]]:
    """Train, validation and test rows cut from one list, stratified, fixed by the seed."""
    rest, test = _hold_out(rows, config.test, seed=seed)
    train, validation = _hold_out(rest, config.validation / (1 - config.test), seed=seed + 1)
    return {"train": train, "validation": validation, "test": test}


def _hold_out(rows: list[Row], share: float, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to keep and rows held out, each label in proportion. Equal texts fall on the same side."""
    random = np.random.default_rng(seed)
    by_label: dict[int, list[str]] = {}
    for text, label in dict.fromkeys(rows):
        by_label.setdefault(label, []).append(text)
    held = set[str]()
    for label in sorted(by_label):
        texts = by_label[label]
        held.update(texts[index] for index in random.permutation(len(texts))[: round(share * len(texts))])
    return [row for row in rows if row[0] not in held], [row for row in rows if row[0] in held]


def _read_path(path: Path, task: Task) -> dict[str, list[Row]]:
    """Rows by split of a folder (train, dev or validation, test) or of one file (all of them as `train`)."""
    if path.is_file():
        return {"train": list(_read_file(path, task))}
    found = {}
    for split, names in SPLIT_NAMES.items():
        files = [path / (name + suffix) for name in names for suffix in SUFFIXES if (path / (name + suffix)).is_file()]
        if len(files) > 1:
            raise DataError(f"{path} holds both {files[0].name} and {files[1].name}; keep one file for {split}")
        if files:
            rows = list(_read_file(files[0], task, unlabelled=split == "test"))
            if rows:
                found[split] = rows
    if "train" not in found:
        raise DataError(f"{path} holds no training rows; put train{' or train'.join(SUFFIXES)} there")
    return found


def _read_file(path: Path, task: Task, *, unlabelled: bool = False) -> Iterator[Row]:
    """Checked rows of one file. A test file whose labels are withheld gives none, if `unlabelled` allows it."""
    count = 0
    for where, fields in _records(path):
        count += 1
        withheld = unlabelled and count == 1  # of all rows or of none: a label missing later is a mistake
        for column in (task.column, task.label_column):
            if fields.get(column) is None:
                if column == task.label_column and withheld:
                    return
                found = "it is empty" if column in fields else f"found {', '.join(map(repr, fields))}"
                raise DataError(f"{where}: no column {column!r}; {found}")
        raw, text = fields[task.label_column], fields[task.column]
        if not isinstance(text, str):
            raise DataError(f"{where}: column {task.column!r} holds {type(text).__name__} {text!r}; it must be text")
        label = task.label_index(str(int(raw) if isinstance(raw, float) and raw.is_integer() else raw))
        if label is None:
            if withheld and str(raw) == "-1":
                return
            known = ", ".join(f"{name} or {code}" for name, code in zip(task.labels, task.codes, strict=True))
            raise DataError(f"{where}: label {raw!r} is unknown; labels of {task.name} are {known}")
        yield checked_text(text, where), label
    if not count:
        raise DataError(f"{path} is empty; it needs rows with columns {task.column!r} and {task.label_column!r}")


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, fields by column name) of each row of a TSV, CSV, JSONL or Parquet file."""
    match path.suffix:
        case ".tsv":
            yield from _read_tsv(path)
        case ".csv":
            yield from _read_csv(path)
        case ".jsonl":
            for number, line in _lines(path):
                try:
                    fields = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: not a JSON object: {error}") from error
                if not isinstance(fields, dict):
                    raise DataError(f"{path}, line {number}: not a JSON object but {type(fields).__name__}")
                yield f"{path}, line {number}", fields
        case ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                table = pq.read_table(path)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path} is not a Parquet file: {error}") from error
            for number, fields in enumerate(table.to_pylist(), start=1):
                yield f"{path}, row {number}", fields
        case other:
            raise DataError(f"{path} ends in {other!r}; data files end in {', '.join(SUFFIXES)}")


def _read_tsv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """GLUE's dialect: tabs separate, quotes mean nothing, one row a line."""
    lines = _lines(path)
    header = next((line.split("\t") for _, line in lines), [])
    for number, line in lines:
        values = line.split("\t")
        if len(values) != len(header):
            raise DataError(f"{path}, line {number}: {len(values)} columns; the header has {len(header)}")
        yield f"{path}, line {number}", dict(zip(header, values, strict=True))


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ordinary CSV: commas separate, a quoted field may hold commas, quotes and line ends."""
    reader = csv.reader((line for _, line in _decoded(path)), strict=True)
    try:
        header = next(reader, [])
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if not values:
                continue  # a blank line, as at the end of many files
            if len(values) != len(header):
                raise DataError(f"{where}: {len(values)} columns; the header has {len(header)}")
            yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that hold something, without their ends."""
    for number, line in _decoded(path):
        text = line.removesuffix("\n").removesuffix("\r")
        if text:
            yield number, text


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


def checked_text(text: str, where: str) -> str:
    """`text` itself. Raises DataError if no classifier can use it: empty, huge, no Unicode, or control characters."""
    if not text.strip():
        raise DataError(f"{where}: the text is empty; give it a text or drop the row")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text holds half a character ({text[error.start]!r}); drop the row") from error
    if size > MAX_TEXT_BYTES:
        raise DataError(f"{where}: the text has {size} bytes; the limit is {MAX_TEXT_BYTES}; cut it or drop the row")
    control = next(
        (char for char in text if (ord(char) < 32 and char not in ALLOWED_CONTROLS) or ord(char) == 127), None
    )
    if control is not None:
        raise DataError(f"{where}: the text holds control character {control!r}; remove it or drop the row")
    return text


def _read_hub(name: str, task: Task) -> dict[str, list[Row]]:
    """Rows by split of a hub data set, labels by name. A split whose labels are withheld is left out."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        loaded = load_dataset(name, task.hub_config)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:  # ValueError: no such configuration
        raise hub_error(name, what="corpus.source") from error
    found: dict[str, list[Row]] = {}
    for split in SPLITS:
        if split not in loaded:
            continue
        dataset = loaded[split]
        if not {task.column, task.label_column} <= set(dataset.column_names):
            wanted = f"{task.column!r} and {task.label_column!r}"
            raise DataError(f"hub:{name} has columns {dataset.column_names}; {task.name} needs {wanted}")
        names = dataset.features[task.label_column].names
        known = {position: task.label_index(label) for position, label in enumerate(names)}
        indices = {position: index for position, index in known.items() if index is not None}
        if len(indices) < len(names):
            raise DataError(f"hub:{name} has labels {names}; {task.name} has {list(task.labels)}")
        rows = enumerate(zip(dataset[task.column], dataset[task.label_column], strict=True), start=1)
        labelled = [
            (checked_text(text, f"hub:{name}, {split}, row {number}"), indices[label])
            for number, (text, label) in rows
            if label in indices
        ]
        if labelled:
            found[split] = labelled
    if "train" not in found:
        raise DataError(f"hub:{name} holds no training rows; it has {', '.join(map(repr, loaded))}")
    return found
