"""Tables augmented in files: every column and byte kept, copies after their rows, mistakes found before any work."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor import table_writer
from compressor.config import AugmentConfig
from compressor.errors import ConfigError, DataError, ModelError
from compressor.stages.augment import blocks, engine, stage
from compressor.stages.augment import file as module
from compressor.stages.augment.file import Columns, augment_file
from tests import augmenting, tiny
from tests.augmenting import RECORDS, read, table

REVIEW = Columns(text="review")
SCORE = Columns(text="review", label="n")


@pytest.fixture
def config(tmp_path: Path) -> AugmentConfig:
    return augmenting.settings(vectors=augmenting.glove(tmp_path / "vectors.txt"))


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
    for number, row in enumerate(RECORDS):
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


@pytest.mark.parametrize("nothing", [None, ""])
@pytest.mark.parametrize("empty", ["a", "b"])
def test_of_a_pair_the_text_that_stays_stays_nothing(
    tmp_path: Path, config: AugmentConfig, empty: str, nothing: str | None
) -> None:
    source = table(tmp_path / "in.jsonl", [{"a": "good film", "b": "good film"} | {empty: nothing}])
    augment_file(source, tmp_path / "out.jsonl", Columns(text="a", text_b="b"), config, seed=0)
    assert [row[empty] for row in read(tmp_path / "out.jsonl")] == [nothing] * 4


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


def test_bytes_are_refused_before_any_work(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"review": ["a good film"] * 2, "raw": [None, b"a"]}), tmp_path / "in.parquet")
    monkeypatch.setattr(module, "make_blocks", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(DataError, match=r"in.parquet, row 2: column 'raw': .* bytes b'a', .*; write .parquet"):
        augment_file(tmp_path / "in.parquet", tmp_path / "out.csv", REVIEW, config, seed=0)


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        ([{"text": "a"}], REVIEW, r"in.jsonl, line 1: no column 'review'; known: text"),
        ([{"review": "a", "origin": 1}], REVIEW, r"line 1: there is a column 'origin' already"),
        ([{"review": "a"}, {"review": 3}], REVIEW, r"line 2: column 'review' holds int 3; it must be text"),
        ([{"review": "a"}], Columns(text="review", text_b="revue"), r"no column 'revue'; did you mean 'review'\?"),
        ([{"review": "a"}], Columns(text="review", label="stars"), r"no column 'stars'"),
        ([], REVIEW, r"in.jsonl has no rows"),
        ([{"review": "a", "n": 1}, {"review": "b"}], REVIEW, r"line 2 has columns 'review', and the first"),
        ([{"review": "a"}, {"review": "b", "n": 1}], REVIEW, r"line 2 has columns 'review', 'n', and the first"),
        (
            [{"review": "a", "n": "4"}, {"review": "b", "n": "3.8"}],
            SCORE,
            r"line 2: column 'n' holds the score 3.8, wh",
        ),
        ([{"review": "a", "n": 0.25}], SCORE, r"score 0.25, .*; set regression \(--regression\) if that is what"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, config: AugmentConfig, rows: list[dict[str, Any]], columns: Columns, reason: str
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=reason):
        augment_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", columns, config, seed=0)
    assert not list(tmp_path.glob("out*"))


def test_scores_are_copied_if_that_is_asked_for_and_whole_numbers_anyway(tmp_path: Path, config: AugmentConfig) -> None:
    for values, regression in ([0.5, 4.0], True), (["1", "2.0"], False), (["nan", "a.b"], False), ([None, True], False):
        rows = [{"review": "good film", "n": value} for value in values]
        asked = config.model_copy(update={"regression": regression})
        augment_file(table(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", SCORE, asked, seed=0)
        assert [row["n"] for row in read(tmp_path / "out.jsonl")] == [value for value in values for _ in range(4)]


def test_mistakes_of_types_are_named_before_any_work(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "make_blocks", lambda *_, **__: pytest.fail("work began"))
    source = table(tmp_path / "in.jsonl", [{"review": "a", "n": 1}, {"review": "b", "n": "two"}])
    with pytest.raises(DataError, match=r"in.jsonl, line 2 does not fit its columns' types .*; write .jsonl"):
        augment_file(source, tmp_path / "out.parquet", REVIEW, config, seed=0)
    with pytest.raises(DataError, match=r"out.xlsx ends in '.xlsx'"):
        augment_file(source, tmp_path / "out.xlsx", REVIEW, config, seed=0)
    with pytest.raises(DataError, match=r"copies cannot be made in .*: No such file or directory"):
        augment_file(source, tmp_path / "nowhere" / "out.csv", REVIEW, config, seed=0)


def test_a_column_that_is_empty_for_long_has_its_type_all_the_same(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "ROWS_SEEN", 1)
    rows = [{"review": "good film", "n": value} for value in (None, 1, 2.5)]
    augment_file(table(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet", REVIEW, config, seed=0)
    assert {row["n"] for row in read(tmp_path / "out.parquet")} == {None, 1.0, 2.5}


def test_what_was_made_is_counted(tmp_path: Path, config: AugmentConfig) -> None:
    source = table(tmp_path / "in.csv")
    facts = augment_file(source, tmp_path / "a.csv", REVIEW, config.model_copy(update={"copies": 60}), seed=1)
    found = list(engine.augmented([row["review"] for row in RECORDS], config.model_copy(update={"copies": 60}), seed=1))
    assert facts["duplicates"] == sum(row.duplicates for row in found) > 0
    assert facts["rows_without_words"] == 1
    assert (facts["share_by_masked_lm"], facts["share_by_vectors"]) == (0, 1)
    both = config.model_copy(update={"masked_lm": augmenting.saved_masked_lm(tmp_path / "lm")})
    facts = augment_file(source, tmp_path / "b.csv", REVIEW, both, seed=1)
    assert facts["share_by_masked_lm"] == 1 - facts["share_by_vectors"] > 0.9


def test_an_interrupted_file_goes_on_from_what_is_finished(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect q of the published code."""
    source, out = table(tmp_path / "in.csv"), tmp_path / "out.csv"
    augment_file(source, tmp_path / "whole.csv", REVIEW, config, seed=1)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 1)
    work, done = blocks.write_rows, list[int]()

    def stopped(tools: Any, of: Any, block: int, *rest: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(block)
        work(tools, of, block, *rest)

    monkeypatch.setattr(stage, "write_rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        augment_file(source, out, REVIEW, config, seed=1)
    assert not out.exists()
    done.clear()
    with pytest.raises(KeyboardInterrupt):  # of another seed nothing is finished
        augment_file(source, out, REVIEW, config, seed=2)
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        augment_file(source, out, REVIEW, config, seed=1)
    done.clear()
    augment_file(source, out, REVIEW, config, seed=1)
    assert done == [2]
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv", "vectors.txt", "whole.csv"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, config: AugmentConfig) -> None:
    (tmp_path / "out.csv.partial").mkdir()
    (tmp_path / "out.csv.partial" / "thesis.txt").write_text("all of it")
    with pytest.raises(DataError, match=r"out.csv.partial is in the way and was not made by this command; move it"):
        augment_file(table(tmp_path / "in.csv"), tmp_path / "out.csv", REVIEW, config, seed=0)
    assert (tmp_path / "out.csv.partial" / "thesis.txt").read_text() == "all of it"


def test_a_second_command_for_the_same_file_is_refused(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, work = table(tmp_path / "in.csv"), tmp_path / "out.csv", blocks.write_rows
    refused = list[str]()

    def twice(*arguments: Any) -> None:
        with pytest.raises(DataError) as found:
            augment_file(source, out, REVIEW, config, seed=1)
        refused.append(str(found.value))
        work(*arguments)

    monkeypatch.setattr(stage, "write_rows", twice)
    augment_file(source, out, REVIEW, config, seed=1)
    assert refused == [f"another command writes {out} now; wait for it, or choose another OUT"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv", "vectors.txt"]


def test_a_folder_whose_removal_was_interrupted_is_still_known(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, unlink = table(tmp_path / "in.csv"), tmp_path / "out.csv", Path.unlink

    def stopped(path: Path, **options: bool) -> None:
        if path.parent.suffix == ".partial" and path.name.startswith("rows-"):
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stopped)
        with pytest.raises(KeyboardInterrupt):
            augment_file(source, out, REVIEW, config, seed=1)
    before = out.read_bytes()
    augment_file(source, out, REVIEW, config, seed=1)
    assert out.read_bytes() == before
    assert not (tmp_path / "out.csv.partial").exists()


@pytest.mark.parametrize("line", ["lost", "3\tgood film\t1\t2"])
def test_a_row_with_too_few_or_too_many_columns_is_named(tmp_path: Path, config: AugmentConfig, line: str) -> None:
    """Defect k of the published code."""
    (tmp_path / "in.tsv").write_text(f"id\treview\tstars\n1\tgood film\t4\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"in.tsv, line 3: \d columns; a row needs 3; correct or drop it"):
        augment_file(tmp_path / "in.tsv", tmp_path / "out.csv", REVIEW, config, seed=0)


def test_an_ordinary_reader_gets_an_unbalanced_quote_back(tmp_path: Path, config: AugmentConfig) -> None:
    """Defect j of the published code."""
    rows = [{"review": '5" film, "good', "n": '"'}, {"review": 'he said: "bad plot', "n": '""'}]
    augment_file(table(tmp_path / "in.jsonl", rows), tmp_path / "out.csv", REVIEW, config, seed=0)
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert found == read(tmp_path / "out.csv")
    assert [{**rows[number], "origin": str(number)} in found for number in range(2)] == [True, True]
    assert [row["n"] for row in found] == ['"'] * 4 + ['""'] * 4


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path, config: AugmentConfig) -> None:
    with pytest.raises(DataError, match=r"out.xlsx ends in '.xlsx'; data files end in"):
        augment_file(table(tmp_path / "in.csv"), tmp_path / "out.xlsx", REVIEW, config, seed=0)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, config: AugmentConfig) -> None:
    with pytest.raises(DataError, match=r"in.csv, line 3 has a tab or line end .*; write .csv, .jsonl or .parquet"):
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


def test_of_long_rows_fewer_are_judged_at_a_time(
    tmp_path: Path, config: AugmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Counting(ByWord):
        def probabilities(self, rows: list[tuple[str, ...]]) -> list[list[float]]:
            asked.append(sum(len(text) for (text,) in rows))
            return super().probabilities(rows)

    monkeypatch.setattr(module, "Teacher", Counting)
    teacher, source = tiny.checkpoint(tmp_path / "teacher"), table(tmp_path / "in.csv", LABELLED)
    augment_file(source, tmp_path / "a.csv", KIND, dropping(config), teacher=teacher, seed=0)
    assert len(asked) == 1
    monkeypatch.setattr(engine, "CHARACTERS_AT_ONCE", 30)
    augment_file(source, tmp_path / "b.csv", KIND, dropping(config), teacher=teacher, seed=0)
    assert len(asked) > 3
    assert max(asked[1:]) < 30 + len("picture picture")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


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
