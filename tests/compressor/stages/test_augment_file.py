"""Tables augmented in files: every column and byte kept, copies after their rows, mistakes found before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor import tables
from compressor.cli_augment import augment_file as command
from compressor.config import AugmentConfig
from compressor.errors import CompressorError, ConfigError, DataError, ModelError
from compressor.stages.augment import file as module
from compressor.stages.augment.file import Columns, augment_file
from tests import augmenting, tiny

ROWS: list[dict[str, Any]] = [
    {"id": "7", "review": 'The film is "good",\nthe plot is NOT.', "stars": "4"},
    {"id": "8", "review": "!!! 42", "stars": ""},
    {"id": "9", "review": "A Bad film", "stars": "1"},
]
REVIEW = Columns(text="review")


@pytest.fixture
def config(tmp_path: Path) -> AugmentConfig:
    return augmenting.settings(vectors=augmenting.glove(tmp_path / "vectors.txt"))


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    tables.write(path, iter(rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [fields for _, fields in tables.records(path)]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("came_as", ["csv", "jsonl", "parquet"])
def test_rows_come_with_their_copies_and_all_columns(
    tmp_path: Path, config: AugmentConfig, came_as: str, ending: str
) -> None:
    source, out = table(tmp_path / f"in.{came_as}"), tmp_path / f"out.{ending}"
    facts = augment_file(source, out, REVIEW, config, seed=1)
    found = read(out)
    assert [list(row) for row in found] == [["id", "review", "stars", "origin"]] * len(found)
    origins = [int(row["origin"]) for row in found]
    assert origins == [0] * 4 + [1] + [2] * 4
    for number, row in enumerate(ROWS):
        made = [row for row, origin in zip(found, origins, strict=True) if origin == number]
        assert {name: made[0][name] for name in row} == row
        assert all((copy["id"], copy["stars"]) == (row["id"], row["stars"]) for copy in made)
        assert len({copy["review"] for copy in made}) == len(made)
    assert facts["rows"] == 3
    assert (facts["asked_rows"], facts["made_rows"], facts["missing_rows"], facts["written_rows"]) == (12, 9, 3, 9)
    assert facts["replaced_words"] >= 6
    assert not list(tmp_path.glob("*.partial"))


def test_tsv_in_and_out(tmp_path: Path, config: AugmentConfig) -> None:
    rows = [{"sentence": 'a "good film', "label": "1"}, {"sentence": "a bad plot", "label": "0"}]
    augment_file(table(tmp_path / "in.tsv", rows), tmp_path / "out.tsv", Columns(text="sentence"), config, seed=0)
    lines = (tmp_path / "out.tsv").read_text().split("\n")
    assert lines[:2] == ["sentence\tlabel\torigin", 'a "good film\t1\t0']
    assert [line.count("\t") for line in lines if line] == [2] * 9


def test_the_seed_decides_and_nothing_else(tmp_path: Path, config: AugmentConfig) -> None:
    source = table(tmp_path / "in.csv")
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        augment_file(source, tmp_path / f"{number}.csv", REVIEW, config, seed=seed)
        texts.append((tmp_path / f"{number}.csv").read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_of_a_pair_one_text_changes_at_a_time(tmp_path: Path, config: AugmentConfig) -> None:
    source = table(tmp_path / "in.jsonl", [{"a": "good film", "b": "bad plot", "n": 1}])
    augment_file(source, tmp_path / "out.jsonl", Columns(text="a", text_b="b"), config, seed=0)
    first, *copies = read(tmp_path / "out.jsonl")
    assert first == {"a": "good film", "b": "bad plot", "n": 1, "origin": 0}
    assert len(copies) == 3
    assert all((copy["a"] != first["a"]) + (copy["b"] != first["b"]) == 1 for copy in copies)


def test_cells_without_text_stay_empty(tmp_path: Path, config: AugmentConfig) -> None:
    source = table(tmp_path / "in.jsonl", [{"review": None}, {"review": ""}, {"review": "good"}])
    augment_file(source, tmp_path / "out.jsonl", REVIEW, config, seed=0)
    assert read(tmp_path / "out.jsonl")[:2] == [{"review": None, "origin": 0}, {"review": "", "origin": 1}]


def test_parquet_keeps_the_types_of_columns(tmp_path: Path, config: AugmentConfig) -> None:
    schema = pa.schema([("review", pa.large_string()), ("when", pa.timestamp("ms")), ("score", pa.float32())])
    rows = pa.Table.from_pylist([{"review": "a good film", "when": 1000, "score": 0.1}], schema=schema)
    pq.write_table(rows, tmp_path / "in.parquet")
    augment_file(tmp_path / "in.parquet", tmp_path / "out.parquet", REVIEW, config, seed=0)
    assert pq.read_schema(tmp_path / "out.parquet") == schema.append(pa.field("origin", pa.int64()))


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        ([{"text": "a"}], REVIEW, r"in.jsonl, line 1: no column 'review'; known: text"),
        ([{"review": "a", "origin": 1}], REVIEW, r"line 1: there is a column 'origin' already"),
        ([{"review": "a"}, {"review": 3}], REVIEW, r"line 2: column 'review' holds int 3; it must be text"),
        ([{"review": "a"}], Columns(text="review", text_b="revue"), r"no column 'revue'; did you mean 'review'\?"),
        ([{"review": "a"}], Columns(text="review", label="stars"), r"no column 'stars'"),
        ([], REVIEW, r"in.jsonl has no rows"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, config: AugmentConfig, rows: list[dict[str, Any]], columns: Columns, reason: str
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=reason):
        augment_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", columns, config, seed=0)
    assert not list(tmp_path.glob("out*"))


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path, config: AugmentConfig) -> None:
    with pytest.raises(DataError, match=r"out.xlsx ends in '.xlsx'; data files end in"):
        augment_file(table(tmp_path / "in.csv"), tmp_path / "out.xlsx", REVIEW, config, seed=0)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, config: AugmentConfig) -> None:
    with pytest.raises(
        DataError, match=r"row 1 to be written has a tab or line end .*; write .csv, .jsonl or .parquet"
    ):
        augment_file(table(tmp_path / "in.csv"), tmp_path / "out.tsv", REVIEW, config, seed=0)
    assert not list(tmp_path.glob("out*"))


# ---- with a teacher

LABELLED = [
    {"text": "good film", "kind": "Positive"},
    {"text": "bad film", "kind": " negative"},
    {"text": "fine plot", "kind": "negative"},  # the teacher doubts it, but it was given
]
KIND = Columns(text="text", label="kind")


class ByWord:
    """A teacher that is 90 % sure, by one word."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def probabilities(self, rows: list[tuple[str, ...]]) -> list[list[float]]:
        bad = [any(word in text.casefold() for word in ("bad", "poor", "awful")) for (text,) in rows]
        return [[0.9, 0.1] if is_bad else [0.1, 0.9] for is_bad in bad]


def dropping(config: AugmentConfig, bound: float | None = 0.5) -> AugmentConfig:
    return config.model_copy(update={"max_disagreement": bound})


def test_copies_that_the_teacher_labels_otherwise_are_left_out(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Teacher", ByWord)
    monkeypatch.setattr(module, "JUDGED_AT_ONCE", 5)
    teacher = tiny.checkpoint(tmp_path / "teacher")
    source, out = table(tmp_path / "in.csv", LABELLED), tmp_path / "out.csv"
    facts = augment_file(source, out, KIND, dropping(config), teacher=teacher, seed=0)
    plain = augment_file(source, tmp_path / "all.csv", KIND, config, seed=0)
    made = read(tmp_path / "all.csv")
    wanted = [
        row
        for row in made
        if row["text"] in [given["text"] for given in LABELLED]
        or ("bad" in row["text"] or "poor" in row["text"] or "awful" in row["text"])
        == (row["kind"].strip() == "negative")
    ]
    assert read(out) == wanted
    assert 3 < len(wanted) < len(made)
    assert facts["dropped_rows"] == len(made) - len(wanted)
    assert facts["written_rows"] == len(wanted)
    assert "dropped_rows" not in plain


def test_a_real_teacher_is_asked(tmp_path: Path, config: AugmentConfig) -> None:
    teacher = tiny.checkpoint(tmp_path / "teacher", tiny.lively(tiny.bert()))
    source = table(tmp_path / "in.csv", LABELLED)
    all_of_them = augment_file(source, tmp_path / "a.csv", KIND, dropping(config, 1.0), teacher=teacher, seed=0)
    none = augment_file(source, tmp_path / "b.csv", KIND, dropping(config, 0.0), teacher=teacher, seed=0)
    assert (all_of_them["dropped_rows"], none["dropped_rows"]) == (0, all_of_them["made_rows"] - 3)
    assert [row["text"] for row in read(tmp_path / "b.csv")] == [row["text"] for row in LABELLED]


def test_labels_that_the_teacher_does_not_know_are_refused(tmp_path: Path, config: AugmentConfig) -> None:
    source = table(tmp_path / "in.csv", [*LABELLED, {"text": "film", "kind": "1"}])
    teacher = tiny.checkpoint(tmp_path / "teacher")
    with pytest.raises(DataError, match=r"line 5: label '1' is none of the teacher's: negative, positive"):
        augment_file(source, tmp_path / "out.csv", KIND, dropping(config), teacher=teacher, seed=0)


@pytest.mark.parametrize(
    ("teacher", "bound", "columns"), [(None, 0.5, KIND), ("t", None, KIND), ("t", 0.5, Columns(text="text"))]
)
def test_teacher_bound_and_label_belong_together(
    tmp_path: Path, config: AugmentConfig, teacher: str | None, bound: float | None, columns: Columns
) -> None:
    folder = None if teacher is None else tmp_path / teacher
    with pytest.raises(ConfigError, match="copies are dropped by all three together"):
        augment_file(
            tmp_path / "in.csv", tmp_path / "out.csv", columns, dropping(config, bound), teacher=folder, seed=0
        )


def test_a_teacher_that_is_none_is_refused(tmp_path: Path, config: AugmentConfig) -> None:
    (tmp_path / "teacher").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        augment_file(
            table(tmp_path / "in.csv", LABELLED),
            tmp_path / "out.csv",
            KIND,
            dropping(config),
            teacher=tmp_path / "teacher",
            seed=0,
        )


# ---- the command


def test_the_command_writes_the_file_and_says_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, vectors = table(tmp_path / "in.csv"), tmp_path / "out.jsonl", augmenting.glove(tmp_path / "v.txt")
    done = tiny.run("augment-file", source, out, "--text", "review", "--copies", 2, "--vectors", vectors)
    assert done.returncode == 0, done.stderr.decode()
    count = len(read(out))
    assert done.stdout.decode().startswith(f"{out}: {count} rows, from 3; ")
    with pytest.raises(ConfigError, match=r"out.jsonl is there already; give another OUT, or --overwrite to replace"):
        command(source, out, text="review", copies=2, vectors=vectors)
    command(source, out, text="review", copies=2, vectors=vectors, overwrite=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["written_rows"] == count


@pytest.mark.parametrize(
    ("source", "out", "reason"),
    [
        ("nowhere.csv", "out.csv", "is no file"),
        ("in.csv", "in.csv", "IN and OUT are both"),
        ("in.csv", ".", "there already"),
    ],
)
def test_the_command_refuses_wrong_places(tmp_path: Path, source: str, out: str, reason: str) -> None:
    table(tmp_path / "in.csv")
    with pytest.raises(CompressorError, match=reason):
        command(tmp_path / source, tmp_path / out, text="review", overwrite=True)
