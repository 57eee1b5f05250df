"""Labelled text: bytes and rows kept, mistakes named by file and line, splits fixed by the seed."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from itertools import chain, product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.artifact import Artifact
from compressor.config import CorpusConfig
from compressor.dataset import read_examples, texts_of
from compressor.errors import ArtifactError, DataError, SourceError
from compressor.stages.corpus import corpus, read_source
from compressor.tasks import TASKS, Task

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
SST2 = TASKS["sst2"]
SPLITS = ("train", "validation", "test")
HEADER = "sentence\tlabel\n"
MANY: list[tuple[str, float]] = [(f"text number {number}", number % 2) for number in range(100)]
BOTH = [("bad one", 0), ("good one", 1)]
# Texts that other readers merge, split or change. A tab or a line feed cannot stand in a TSV field.
HARD = [
    'an unbalanced " quote',
    '"whole"',
    'he said ""no""',
    "line\u2028separator and \u2029 paragraph",
    "next\x85line",
    "  blanks at both ends ",
    "no\xa0break",
    "comma, semicolon; pipe|",
    "back\\slash \\n \\t",
    "emoji 🎬 and cafe\u0301",
    "\ufeffa mark inside",
    "NA",
    "null",
    "007",
    "1e5",
    "#comment",
    "'",
    '"',
]


def write(path: Path, rows: Sequence[tuple[str, object]], *, label_first: bool = False) -> Path:
    """A data file in the format of its suffix."""
    columns = ["label", "sentence"] if label_first else ["sentence", "label"]
    records = [{"sentence": text, "label": label} for text, label in rows]
    match path.suffix:
        case ".tsv":
            lines = ["\t".join(columns), *("\t".join(str(record[name]) for name in columns) for record in records)]
            path.write_bytes("".join(line + "\n" for line in lines).encode())
        case ".csv":
            buffer = io.StringIO(newline="")
            writer = csv.DictWriter(buffer, columns)
            writer.writeheader()
            writer.writerows(records)
            path.write_bytes(buffer.getvalue().encode())
        case ".jsonl":
            path.write_bytes("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())
        case ".parquet":
            pq.write_table(pa.table({name: [record[name] for record in records] for name in columns}), path)
    return path


def single(rows: Iterable[tuple[tuple[str, ...], float]]) -> list[tuple[str, float]]:
    """Rows of one text each, as (text, label)."""
    return [(text, label) for (text,), label in rows]


def read_rows(path: Path, task: Task) -> list[tuple[tuple[str, ...], float]]:
    """Rows of one file in order, with shares so small that nothing is held out."""
    found, _ = read_source(CorpusConfig(source=str(path), validation=1e-9, test=1e-9), task, seed=0)
    assert not found["validation"]
    assert not found["test"]
    return list(found["train"])


def read_file(path: Path) -> list[tuple[str, float]]:
    return single(read_rows(path, SST2))


def read_text(folder: Path, text: str | bytes, name: str = "x.tsv") -> list[tuple[str, float]]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(folder / name)


def make(source: Path, out: Path, *, task: Task = SST2, seed: int = 0, **config) -> Artifact:
    return corpus(CorpusConfig(source=str(source), **config), task, seed=seed, key="k", out=out)


def pairs_of(examples: Artifact) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    found = {path.stem: read_examples(path) for path in sorted(examples.path.glob("*.arrow"))}
    return {split: list(zip(texts_of(data), data["label"], strict=True)) for split, data in found.items()}


def rows_of(examples: Artifact) -> dict[str, list[tuple[str, float]]]:
    return {split: single(rows) for split, rows in pairs_of(examples).items()}


# ---- bytes and rows are kept


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_hard_texts_come_back_as_they_are(suffix, tmp_path):
    rows = [(text, number % 2) for number, text in enumerate(HARD)]
    assert read_file(write(tmp_path / f"x{suffix}", rows)) == rows


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("text", ["a\ttab", "two\nlines", "two\r\nlines", "\n\nbetween blank lines\n\n"])
def test_quoted_formats_hold_tabs_and_line_ends(suffix, text, tmp_path):
    assert read_file(write(tmp_path / f"x{suffix}", [(text, 1), ("after", 0)])) == [(text, 1), ("after", 0)]


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])).filter(str.strip)


@ANY_SPEED
@given(st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_tsv_round_trip(tmp_path_factory, rows, end):
    text = "".join(f"{left}\t{right}{end}" for left, right in [("sentence", "label"), *rows])
    assert read_text(tmp_path_factory.mktemp("tsv"), text) == rows


@ANY_SPEED
@given(st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=20), st.booleans())
def test_jsonl_round_trip(tmp_path_factory, rows, ascii_only):
    lines = [json.dumps({"sentence": text, "label": label}, ensure_ascii=ascii_only) for text, label in rows]
    assert read_text(tmp_path_factory.mktemp("jsonl"), "\n".join(lines), "x.jsonl") == rows


@ANY_SPEED
@given(st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=20))
def test_csv_round_trip(tmp_path_factory, rows):
    assert read_file(write(tmp_path_factory.mktemp("csv") / "x.csv", rows)) == rows


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(suffix, tmp_path):
    path = write(tmp_path / f"x{suffix}", BOTH)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_file(path) == BOTH


def test_carriage_returns_are_line_ends_not_text(tmp_path):
    assert read_text(tmp_path, "label\tsentence\r\n1\tgood\r\n0\tbad\r\n") == [("good", 1), ("bad", 0)]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n\n"])
def test_blank_lines_at_the_end_are_no_rows(suffix, end, tmp_path):
    path = write(tmp_path / f"x{suffix}", BOTH)
    path.write_bytes(path.read_bytes().rstrip() + end)
    assert read_file(path) == BOTH


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".parquet"])
def test_the_order_of_columns_does_not_matter(suffix, tmp_path):
    assert read_file(write(tmp_path / f"x{suffix}", BOTH, label_first=True)) == BOTH


def test_other_columns_are_passed_over(tmp_path):
    assert read_text(tmp_path, "id\tsentence\tlabel\tnote\n7\tgood\t1\t\n") == [("good", 1)]


# ---- labels


WRITTEN = [("negative", "positive"), ("0", "1"), (0, 1), ("Negative", "POSITIVE")]


@pytest.mark.parametrize(
    ("suffix", "labels"),
    [
        *product((".tsv", ".csv", ".jsonl", ".parquet"), WRITTEN),
        *product((".jsonl", ".parquet"), [(0.0, 1.0)]),  # what a table has whose label column once had gaps
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_labels_are_read_by_name_or_code_whichever_comes_first(suffix, labels, first, tmp_path):
    order = [first, 1 - first]
    path = write(tmp_path / f"x{suffix}", [(f"text {label}", labels[label]) for label in order])
    assert read_file(path) == [(f"text {label}", label) for label in order]


@pytest.mark.parametrize("label", ["2", "pos", "-1"])
def test_an_unknown_label_is_refused_with_the_known_ones(label, tmp_path):
    sentence = rf"x.tsv, line 3: label '{label}' is unknown; labels of sst2 are negative or 0, positive or 1"
    with pytest.raises(DataError, match=sentence):
        read_text(tmp_path, f"{HEADER}good\t1\nbad\t{label}\n")


@pytest.mark.parametrize("label", [True, 0.5, ["1"], 2])
def test_a_label_of_another_type_is_refused(label, tmp_path):
    with pytest.raises(DataError, match=r"x.jsonl, line 1: label .* is unknown"):
        read_text(tmp_path, json.dumps({"sentence": "good", "label": label}), "x.jsonl")


# ---- mistakes are named


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.tsv", "", r"x.tsv is empty; it needs rows with columns 'sentence' and 'label'"),
        ("x.tsv", HEADER, r"x.tsv is empty; it needs rows"),
        ("x.csv", "", r"x.csv is empty; it needs rows"),
        ("x.jsonl", "\n\n", r"x.jsonl is empty; it needs rows"),
        ("x.tsv", "text\tlabel\ngood\t1\n", r"x.tsv, line 2: no column 'sentence'; found 'text', 'label'"),
        ("x.tsv", "sentence\tscore\ngood\t1\n", r"x.tsv, line 2: no column 'label'; found 'sentence', 'score'"),
        ("x.tsv", f"{HEADER}good\t1\nbad\n", r"x.tsv, line 3: 1 columns; a row needs 2"),
        ("x.tsv", f"{HEADER}good\t1\n\nto\to\t0\n", r"x.tsv, line 4: 3 columns; a row needs 2"),
        ("x.csv", "sentence,label\ngood,1\nbad, really,0\n", r"x.csv, line 3: 3 columns; a row needs 2"),
        ("x.csv", 'sentence,label\n"two\nlines",1\nbad\n', r"x.csv, line 4: 1 columns"),
        (
            "x.csv",
            'sentence,label\ngood,1\n"never closed,0\nmore,1\n',
            r"x.csv, line 4: a quoted field has no end; close its quotes",
        ),
        ("x.csv", 'sentence,label\n"good" one,1\n', r"x.csv, line 2: ',' expected after '\"'"),
        ("x.jsonl", '{"sentence": "good", "label": 1}\n{"sentence"\n', r"x.jsonl, line 2: not a JSON object: "),
        ("x.jsonl", '["good", 1]\n', r"x.jsonl, line 1: not a JSON object but list"),
        ("x.jsonl", '{"sentence": "good"}\n', r"x.jsonl, line 1: no column 'label'; found 'sentence'"),
        (
            "x.jsonl",
            '{"sentence": "good", "label": null}\n',
            r"x.jsonl, line 1: the row has no label in column 'label'",
        ),
        ("x.jsonl", '{"sentence": null, "label": 1}\n', r"line 1, column 'sentence': the text is empty; give it a"),
        (
            "x.csv",
            "sentence,label\ngood,\n",
            r"x.csv, line 2: the row has no label in column 'label'; give it one or drop",
        ),
        (
            "x.csv",
            "sentence;label\ngood;1\n",
            r"line 2: no column 'sentence'; found 'sentence;label'; columns of a .csv file are separated by commas",
        ),
        (
            "x.tsv",
            '"sentence"\t"label"\n"good"\t"1"\n',
            r"""found '"sentence"', '"label"'; a .tsv file is read in GLUE's dialect, where quotes are text""",
        ),
        (
            "x.jsonl",
            '{"sentence": 5, "label": 1}\n',
            r"x.jsonl, line 1: column 'sentence' holds int 5; it must be text",
        ),
        ("x.jsonl", '{"sentence": ["a"], "label": 1}\n', r"x.jsonl, line 1: column 'sentence' holds list"),
        (
            "x.jsonl",
            '{"sentence": "half \\ud83c", "label": 1}\n',
            r"line 1: the row holds half a character",
        ),
        ("x.parquet", "PAR?", r"x.parquet is not a Parquet file, or damaged"),
        ("x.txt", "good\t1\n", r"x.txt ends in '.txt'; data files end in .tsv, .csv, .jsonl, .parquet"),
        (
            "x.tsv",
            f"{HEADER}  \t1\n",
            r"x.tsv, line 2, column 'sentence': the text is empty; give it a text or drop the row",
        ),
        (
            "x.tsv",
            f"{HEADER}good\t1\n{'é' * 50_001}\t1\n",
            r"x.tsv, line 3, column 'sentence': the text has 100002 bytes; the limit is 100",
        ),
        (
            "x.tsv",
            f"{HEADER}a\x00b\t1\n",
            r"x.tsv, line 2, column 'sentence': the text holds control character '\\x00'; remove it",
        ),
        (
            "x.tsv",
            HEADER + "\x1b[31mred\t1\n",
            r"x.tsv, line 2, column 'sentence': the text holds control character '\\x1b'",
        ),
        (
            "x.tsv",
            f"{HEADER}a\x7fb\t1\n",
            r"x.tsv, line 2, column 'sentence': the text holds control character '\\x7f'",
        ),
    ],
)
def test_a_mistake_is_named_by_file_and_line(name, text, sentence, tmp_path):
    with pytest.raises(DataError, match=sentence):
        read_text(tmp_path, text, name)


@pytest.mark.parametrize("name", ["x.tsv", "x.csv", "x.jsonl"])
@pytest.mark.parametrize("raw", [b"caf\xe9", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3"])
def test_bytes_that_are_not_utf8_are_named_by_file_and_line(name, raw, tmp_path):
    path = write(tmp_path / name, BOTH)
    path.write_bytes(path.read_bytes() + raw)
    line = 3 if name == "x.jsonl" else 4
    with pytest.raises(DataError, match=rf"{name}, line {line}: not UTF-8 \(.* at byte [0-9]+\); save it as UTF-8$"):
        read_file(path)


def test_utf16_is_refused_at_its_first_line(tmp_path):
    with pytest.raises(DataError, match=r"x.tsv, line 1: not UTF-8"):
        read_text(tmp_path, f"{HEADER}good\t1\n".encode("utf-16"))


def test_binary_text_of_a_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"sentence": [b"good"], "label": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet, row 1: column 'sentence' holds bytes b'good'; it must be text"):
        read_file(tmp_path / "x.parquet")


def test_a_text_of_just_the_limit_is_kept(tmp_path):
    assert read_text(tmp_path, f"{HEADER}{'x' * 100_000}\t1\n")[0][1] == 1


def test_a_missing_file_is_refused_with_the_kinds_of_sources(tmp_path):
    with pytest.raises(SourceError, match=r"corpus.source is '.*absent.tsv', and there is no such file or folder"):
        make(tmp_path / "absent.tsv", tmp_path / "out")


def test_a_folder_without_training_rows_says_what_to_put_there(tmp_path):
    with pytest.raises(DataError, match=r"holds no training rows; put train.tsv or train.csv or .* there"):
        make(tmp_path, tmp_path / "out")


def test_two_files_for_one_split_are_refused(tmp_path):
    write(tmp_path / "train.tsv", MANY)
    write(tmp_path / "dev.tsv", BOTH)
    write(tmp_path / "validation.csv", BOTH)
    with pytest.raises(DataError, match=r"holds both dev.tsv and validation.csv; keep one of them for validation"):
        make(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["val.tsv", "valid.csv", "VALID.jsonl", "dev.TSV", "Validation.CSV"])
def test_a_validation_file_has_many_names(name, tmp_path):
    write(tmp_path / "train.tsv", MANY)
    source = write(tmp_path / name.lower(), BOTH)
    source.rename(tmp_path / name)
    assert rows_of(make(tmp_path, tmp_path / "out"))["test"] == BOTH
    write(tmp_path / "dev.parquet", BOTH)
    with pytest.raises(DataError, match=r"holds both .*; keep one of them for validation"):
        make(tmp_path, tmp_path / "other")


def test_training_rows_may_be_in_a_file_with_capitals(tmp_path):
    write(tmp_path / "train.csv", MANY).rename(tmp_path / "Train.CSV")
    assert sorted(chain(*rows_of(make(tmp_path, tmp_path / "out")).values())) == sorted(MANY)


def test_files_that_are_no_split_are_named(tmp_path, caplog):
    for name in ("train.tsv", "dev.tsv", "holdout.csv", "more.jsonl"):
        write(tmp_path / name, MANY)
    (tmp_path / "notes.txt").write_text("no rows", encoding="utf-8")
    make(tmp_path, tmp_path / "out")
    sentence = "not used, because no split is called so: holdout.csv, more.jsonl; splits are called train, dev, "
    assert caplog.messages == [f"{tmp_path}: {sentence}validation, val, valid, test"]


def test_one_label_only_is_refused(tmp_path):
    path = write(tmp_path / "x.tsv", [(f"text {number}", 1) for number in range(40)])
    with pytest.raises(
        DataError, match=r"the train split of .*x.tsv has only label 'positive'; it needs at least two labels"
    ):
        make(path, tmp_path / "out")


def test_too_few_rows_for_a_split_are_refused(tmp_path):
    sentence = r"the validation split of .*x.tsv has no rows: there are too few rows of each label to share out; give m"
    with pytest.raises(DataError, match=sentence):
        make(write(tmp_path / "x.tsv", BOTH), tmp_path / "out")


def test_a_mistake_leaves_no_folder(tmp_path):
    (tmp_path / "x.tsv").write_text("bad", encoding="utf-8")
    with pytest.raises(DataError, match="is empty"):
        make(tmp_path / "x.tsv", tmp_path / "run" / "out")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_gives_one_sentence_and_leaves_what_is_finished(tmp_path):
    path = write(tmp_path / "x.tsv", MANY)
    before = rows_of(make(path, tmp_path / "out"))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "begun.json").write_text('{"key": "k", "seconds": 0}', encoding="utf-8")
    os.symlink("/dev/full", tmp_path / "out.partial" / "train.arrow")
    with pytest.raises(ArtifactError, match=r"cannot write .*No space left on device; free space or choose another"):
        make(path, tmp_path / "out")
    assert rows_of(Artifact.open(tmp_path / "out", kind="examples")) == before
