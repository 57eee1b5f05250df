"""Tasks of the user's own: columns, labels of any kind, and numbers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor.config import CorpusConfig
from compressor.errors import DataError, SourceError
from compressor.stages.corpus import corpus, find_labels, read_source
from compressor.tasks import TASKS, TaskConfig
from tests.compressor.stages.test_corpus_tasks import all_rows, hub, read

__all__ = ["hub"]  # fixtures


# ---- tasks of the user's own


def own(**fields: Any) -> TaskConfig:
    return TaskConfig(**({"name": "topics", "columns": ("title",), "label": "topic"} | fields))


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A file of the user's, in the format of its suffix."""
    match path.suffix:
        case ".tsv":
            lines = ["\t".join(map(str, cells)) for cells in [rows[0], *(row.values() for row in rows)]]
            path.write_text("\n".join(lines), encoding="utf-8")
        case ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("columns", [("title",), ("title", "body")])
def test_one_or_two_columns_and_many_labels(suffix, columns, tmp_path):
    labels = [f"Topic {number:02}" for number in range(30)]
    rows = [{"id": 7, "body": "text", "topic": label, "title": f"about {label}"} for label in labels[::-1]]
    path = table(tmp_path / f"x{suffix}", rows)
    config = own(columns=columns)
    found = find_labels(CorpusConfig(source=str(path)), config)
    assert found == tuple(labels)
    task = config.model_copy(update={"labels": found}).row()
    texts = [(f"about {label}", "text")[: len(columns)] for label in labels]
    assert all_rows(path, task) == [*zip(texts, range(30), strict=True)][::-1]


@pytest.mark.parametrize(
    ("suffix", "values", "labels"),
    [
        (".jsonl", [True, False], ("false", "true")),
        (".parquet", [True, False], ("false", "true")),
        (".csv", ["TRUE", "FALSE"], ("FALSE", "TRUE")),
        (".jsonl", [3, 1, 2], ("1", "2", "3")),
        (".parquet", [3, 1, 2], ("1", "2", "3")),
        (".parquet", [3.0, 1.0, 2.0], ("1", "2", "3")),
        (".csv", [-1, 1], ("-1", "1")),
        (".jsonl", ["spam", "Ham", "Ham ", " spam "], ("Ham", "spam")),
    ],
)
def test_labels_are_texts_whole_numbers_or_truth_values(suffix, values, labels, tmp_path):
    path = table(
        tmp_path / f"x{suffix}", [{"title": f"text {number}", "topic": value} for number, value in enumerate(values)]
    )
    config = own()
    assert find_labels(CorpusConfig(source=str(path)), config) == labels
    task = config.model_copy(update={"labels": labels}).row()
    folded = [label.casefold() for label in labels]
    written = [str(int(value) if isinstance(value, float) else value).strip().casefold() for value in values]
    assert [label for _, label in all_rows(path, task)] == [folded.index(value) for value in written]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_to_predict(suffix, tmp_path):
    scores = [-1.0, 0.5, 1e6, 3.0]
    path = table(
        tmp_path / f"x{suffix}", [{"title": f"text {number}", "topic": score} for number, score in enumerate(scores)]
    )
    assert [score for _, score in all_rows(path, own(metric="pearson").row())] == scores


def test_whole_numbers_are_scores_and_truth_values_are_not(tmp_path):
    path = table(tmp_path / "x.jsonl", [{"title": "a", "topic": 4}, {"title": "b", "topic": True}])
    with pytest.raises(DataError, match=r"x.jsonl, line 2: score True is no finite number"):
        all_rows(path, own(metric="spearman").row())


@pytest.mark.parametrize("score", ["Infinity", "[1]", "1" + "0" * 400])
def test_json_that_is_no_finite_number_is_refused(score, tmp_path):
    (tmp_path / "x.jsonl").write_text(f'{{"title": "a", "topic": {score}}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"x.jsonl, line 1: score .* is no finite number"):
        all_rows(tmp_path / "x.jsonl", own(metric="pearson").row())


def test_minus_one_may_be_an_answer_of_a_test_file(tmp_path):
    rows = [{"title": f"text {number}", "topic": number % 2 * 2 - 1} for number in range(40)]
    for split in ("train", "validation", "test"):
        table(tmp_path / f"{split}.csv", rows)
    for task in (own(labels=("-1", "1")).row(), own(metric="pearson").row()):
        assert {split: len(found) for split, found in read(tmp_path, task).items()} == {
            "train": 40,
            "validation": 40,
            "test": 40,
        }


def test_an_unknown_label_is_refused_with_the_first_of_many(tmp_path):
    path = table(tmp_path / "x.csv", [{"title": "a", "topic": "sprots"}])
    task = own(labels=tuple(f"t{number}" for number in range(30))).row()
    with pytest.raises(
        DataError, match=r"line 2: label 'sprots' is unknown; labels of topics are t0, .*, t19 and 10 more"
    ):
        all_rows(path, task)


def test_a_data_set_of_the_user_s_on_the_hub(hub):
    features = datasets.Features({"title": datasets.Value("string"), "topic": datasets.ClassLabel(names=["b", "a"])})
    data = datasets.Dataset.from_dict({"title": ["x", "y"] * 30, "topic": [0, 1] * 30}, features=features)
    asked = hub(train=data)
    config = CorpusConfig(source="hub:me/topics")
    assert find_labels(config, own()) == ("a", "b")
    found, facts = read_source(config, own(labels=("a", "b")).row(), seed=0)
    assert {label for _, label in found["train"]} == {0, 1}
    assert facts["provenance"] == "hub:me/topics"
    assert asked == [("me/topics", None)] * 2


def test_a_configuration_of_the_user_s_goes_before_the_task_s(hub):
    data = datasets.Dataset.from_dict({"sentence": ["x", "y"] * 30, "label": [0, 1] * 30})
    asked = hub(train=data)
    _, facts = read_source(CorpusConfig(source="hub:me/sst:mine"), TASKS["sst2"], seed=0)
    assert facts["provenance"] == "hub:me/sst:mine"
    assert asked == [("me/sst", "mine")]


def test_listed_labels_are_read_in_any_unicode_form(tmp_path):
    path = table(tmp_path / "x.csv", [{"title": "a", "topic": "e\u0301"}, {"title": "b", "topic": "b"}])
    rows = all_rows(path, own(labels=("b", "\u00e9")).row())
    assert [label for _, label in rows] == [1, 0]
    with pytest.raises(ValueError, match="they must differ in more than case"):
        own(labels=("\u00e9", "e\u0301"))


def scored(path, first):
    rows = [{"title": f"text {number}", "topic": first + number} for number in range(40)]
    config = CorpusConfig(source=str(table(path / "x.csv", rows)))
    return corpus(config, own(metric="pearson").row(), seed=0, key="k", out=path / "out")


def test_scores_that_32_bits_cannot_tell_apart_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"would round by up to 39; subtract a constant from all of them, such as the lo"
    ):
        scored(tmp_path, first=1_700_000_000)


@pytest.mark.parametrize("first", [0, 1990, 0.1])
def test_scores_that_32_bits_hardly_round_are_kept(first, tmp_path):
    assert scored(tmp_path, first).metrics["rows"]["train"]


# ---- labels that the recipe does not list


def test_labels_are_those_of_the_training_file_alone(tmp_path):
    table(tmp_path / "train.csv", [{"topic": "b"}, {"topic": "a"}])
    table(tmp_path / "dev.csv", [{"topic": "c"}])
    assert find_labels(CorpusConfig(source=str(tmp_path)), own()) == ("a", "b")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"topic": "a"}, {"topic": "a "}], r"x.jsonl has only label 'a' in column 'topic'; .* at least two labels"),
        (
            [{"topic": "IT"}, {"topic": "HR"}, {"topic": "it"}],
            r"line 3: label 'it' differs from label 'IT' in case alone; write them alike, or list task.labels, which",
        ),
        (
            [{"topic": "\u00e9"}, {"topic": "e\u0301"}],
            r"line 2: label .* differs from label .* in Unicode form alone; write them alike, or list task.labels",
        ),
        ([{"topic": "1"}, {"topic": "1.0"}], r"line 2: label '1.0' is the number of label '1'; write them alike"),
        ([{"title": "a"}], r"x.jsonl, line 1: no column 'topic'; found 'title'"),
        ([{"topic": None}], r"x.jsonl, line 1: the row has no label in column 'topic'; give it one or drop the row"),
        ([{"topic": " "}], r"x.jsonl, line 1: the row has no label in column 'topic'; give it one or drop the row"),
        (
            [{"topic": "a"}, {"topic": ""}, {"topic": None}, {"topic": "b"}, {"topic": math.nan}],
            r"line 2: the row has no label in column 'topic', nor have 2 rows after it; give it one or drop the row",
        ),
        ([{"topic": "a"}, {"topic": "b\nc"}], r"x.jsonl, line 2: label 'b\\nc' has a line break; a label is one line"),
        ([{"topic": "a\x85b"}], r"x.jsonl, line 1: label 'a\\x85b' has a line break; .* correct it or drop the row"),
        ([{"topic": ["a"]}], r"x.jsonl, line 1: label \['a'\] is no text"),
        ([{"topic": 0.5}], r"line 1: label 0.5 is no text, .*; set task.metric to 'pearson' to predict numbers"),
        (
            [{"topic": f"{number / 7}"} for number in range(1001)],
            r"x.jsonl has more than 1,000 labels in column 'topic': they look like numbers; set task.metric to 'pears",
        ),
    ],
)
def test_labels_that_cannot_be_are_refused(rows, sentence, tmp_path):
    path = table(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=sentence):
        find_labels(CorpusConfig(source=str(path)), own())


def test_labels_that_are_listed_are_read_in_any_case(tmp_path):
    path = table(tmp_path / "x.csv", [{"title": f"text {n}", "topic": topic} for n, topic in enumerate("aAbB")])
    assert [label for _, label in all_rows(path, own(labels=("a", "b")).row())] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("metric", "topics", "labels"),
    [
        ("f1", "aabbb", ("b", "a")),
        ("f1", "aaabb", ("a", "b")),
        ("f1", "ab", ("a", "b")),
        ("f1", "abbc", ("a", "b", "c")),
        ("accuracy", "aabbb", ("a", "b")),
    ],
)
def test_f1_is_of_the_rarer_of_two_labels(metric, topics, labels, tmp_path):
    path = table(tmp_path / "x.csv", [{"title": "text", "topic": topic} for topic in topics])
    assert find_labels(CorpusConfig(source=str(path)), own(metric=metric)) == labels


@pytest.mark.parametrize("listed", [None, ("0", "1")])
def test_a_number_that_is_missing_among_labels_is_named(listed, tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"title": ["a", "b", "c", "d"], "topic": [0.0, 1.0, math.nan, None]}), path)
    with pytest.raises(DataError, match=r"x.parquet, row 3: the row has no label in column 'topic', nor have 1 rows"):
        all_rows(path, own(labels=listed or find_labels(CorpusConfig(source=str(path)), own())).row())


def test_the_null_of_a_table_is_not_the_label_none(tmp_path):
    path = table(tmp_path / "x.jsonl", [{"title": "a", "topic": "None"}, {"title": "b", "topic": None}])
    with pytest.raises(DataError, match=r"x.jsonl, line 2: the row has no label in column 'topic'"):
        all_rows(path, own(labels=("none", "some")).row())


def test_test_labels_that_are_missing_from_a_column_of_numbers_are_withheld(tmp_path):
    for split, topics in (("train", [0.0, 1.0] * 20), ("dev", [0.0, 1.0]), ("test", [math.nan, math.nan])):
        rows = {"title": [f"{split} {number}" for number in range(len(topics))], "topic": topics}
        pq.write_table(pa.table(rows), tmp_path / f"{split}.parquet")
    assert [text for (text,), _ in read(tmp_path, own(labels=("0", "1")).row())["test"]] == ["dev 0", "dev 1"]


@pytest.mark.parametrize("suffix", [".tsv", ".TSV"])
def test_a_tsv_file_with_quoted_cells_is_refused_not_read_with_the_quotes(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_text('title\ttopic\nplain\ta\n"he said ""no"" to me"\tb\n', encoding="utf-8")
    sentence = (
        r"line 3: the text is in quotes and has doubled ones; a .tsv file is read in GLUE's dialect, where quotes"
    )
    with pytest.raises(DataError, match=sentence):
        all_rows(path, own(labels=("a", "b")).row())


@pytest.mark.parametrize("text", ['"whole"', 'he said ""no""', '""no"" he said ""no""', '"', '""', '"a" and ""b""'])
def test_quotes_that_no_csv_has_are_text_in_a_tsv_file(text, tmp_path):
    path = table(tmp_path / "x.tsv", [{"title": "a", "topic": "a"}, {"title": text, "topic": "b"}])
    assert all_rows(path, own(labels=("a", "b")).row()) == [(("a",), 0), ((text,), 1)]


def test_a_thousand_labels_are_found(tmp_path):
    path = table(tmp_path / "x.jsonl", [{"topic": number} for number in range(1000)])
    assert len(find_labels(CorpusConfig(source=str(path)), own())) == 1000


def test_an_empty_training_file_has_no_labels(tmp_path):
    (tmp_path / "x.csv").write_text("title,topic\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"x.csv has no rows in column 'topic'"):
        find_labels(CorpusConfig(source=str(tmp_path / "x.csv")), own())


def test_labels_of_a_source_that_is_not_there_are_refused():
    with pytest.raises(SourceError, match=r"corpus.source is 'absent.csv', and there is no such file or folder"):
        find_labels(CorpusConfig(source="absent.csv"), own())


def test_the_rated_sentences_have_no_labels_of_the_user_s():
    with pytest.raises(SourceError, match=r"for topics give your own with --data"):
        find_labels(CorpusConfig(source="index:vaderSentiment==3.3.2"), own())
