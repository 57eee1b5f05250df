"""How one file or a folder becomes training, validation and test rows."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.config import CorpusConfig
from compressor.errors import DataError
from compressor.rows import Row
from compressor.stages.corpus import Split, _hold_out, read_source
from compressor.tasks import TASKS, Task, TaskConfig
from tests.compressor.stages.test_corpus import HARD, MANY, SPLITS, SST2, make, rows_of, write

# ---- splits


def test_one_file_is_cut_into_three_splits_that_share_no_row(tmp_path):
    found = rows_of(make(write(tmp_path / "x.tsv", MANY), tmp_path / "out", validation=0.2, test=0.1))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 70, "validation": 20, "test": 10}
    assert sorted(chain(*found.values())) == sorted(MANY)


def test_every_split_keeps_each_label_s_share(tmp_path):
    rows = [(f"text {number}", int(number % 4 == 0)) for number in range(400)]
    found = rows_of(make(write(tmp_path / "x.tsv", rows), tmp_path / "out"))
    for split in SPLITS:
        counts = Counter(label for _, label in found[split])
        assert counts[1] / counts.total() == pytest.approx(0.25, abs=0.02)


def test_the_split_is_fixed_by_the_seed(tmp_path):
    path = write(tmp_path / "x.tsv", MANY)
    one, again, other = (rows_of(make(path, tmp_path / f"out{n}", seed=seed)) for n, seed in enumerate((1, 1, 2)))
    assert one == again
    assert one["test"] != other["test"]


def test_rows_keep_the_order_of_the_file(tmp_path):
    found = rows_of(make(write(tmp_path / "x.tsv", MANY), tmp_path / "out"))
    for rows in found.values():
        assert [MANY.index(row) for row in rows] == sorted(MANY.index(row) for row in rows)


def test_equal_texts_are_on_the_same_side(tmp_path):
    rows = [(f"text {number % 40}", number % 2) for number in range(200)]
    rows += [(f"text {number}", 1 - number % 2) for number in range(10)]  # the same text with both labels
    found = rows_of(make(write(tmp_path / "x.tsv", rows), tmp_path / "out", validation=0.2, test=0.2))
    sides = [{text for text, _ in found[split]} for split in SPLITS]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 40
    assert sum(map(len, found.values())) == 210


def held_out_in_memory(rows: list[Row], task: Task, share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """What `_hold_out` does, on rows as objects."""
    random, by_label, held = np.random.default_rng(seed), dict[float, list[Any]](), set[Any]()
    for texts, label in dict.fromkeys(rows):
        by_label.setdefault(0 if task.is_regression else label, []).append(texts)
    for label in sorted(by_label):
        group = by_label[label]
        held.update(group[index] for index in random.permutation(len(group))[: round(share * len(group))])
    return [row for row in rows if row[0] not in held], [row for row in rows if row[0] in held]


@pytest.mark.parametrize("name", ["sst2", "mnli", "stsb"])
def test_rows_are_held_out_by_hashes_as_they_were_by_texts(name):
    draw, task = random.Random(0), TASKS[name]
    texts = [tuple(f"{draw.randrange(60)}" for _ in task.columns) for _ in range(400)]
    labels = [draw.randrange(5) / 2 - 1 if task.is_regression else draw.randrange(task.outputs) for _ in texts]
    rows = list(zip(texts, labels, strict=True))
    kept, held = _hold_out(Split.of(partial(compress, rows)), task, 0.3, seed=5)
    assert (list(kept), list(held)) == held_out_in_memory(rows, task, 0.3, 5)
    again, twice = _hold_out(kept, task, 0.2, seed=6)
    assert (list(again), list(twice)) == held_out_in_memory(list(kept), task, 0.2, 6)


def test_rows_do_not_stay_in_memory(tmp_path):
    count = 5_000
    path = write(tmp_path / "x.tsv", [(f"text number {number} of {count}", number % 2) for number in range(count)])
    config = CorpusConfig(source=str(path))
    read_source(config, SST2, seed=0)
    tracemalloc.start()
    try:
        found, _ = read_source(config, SST2, seed=0)
        assert sum(sum(1 for _ in rows) for rows in found.values()) == count
        assert tracemalloc.get_traced_memory()[1] / count < 150
    finally:
        tracemalloc.stop()


def folder(tmp_path: Path, **files: Sequence[tuple[str, object]]) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in files.items():
        write(data / f"{name}.tsv", rows)
    return data


DEV = [("dev bad", 0), ("dev good", 1)]


TEST = [("test bad", 0), ("test good", 1)]


def test_a_folder_with_dev_only_reports_on_dev_and_chooses_on_rows_of_train(tmp_path):
    found = rows_of(made := make(folder(tmp_path, train=MANY, dev=DEV), tmp_path / "out"))
    assert found["test"] == DEV
    assert sorted(found["train"] + found["validation"]) == sorted(MANY)
    assert len(found["validation"]) == 10
    assert "one held-out file, used only for reporting" in made.metrics["splits"]


def test_a_folder_with_all_three_is_taken_as_given(tmp_path):
    made = make(folder(tmp_path, train=MANY, validation=DEV, test=TEST), tmp_path / "out")
    assert rows_of(made) == {"train": MANY, "validation": DEV, "test": TEST}
    assert "as given" in made.metrics["splits"]


def test_a_folder_with_a_labelled_test_reports_on_it(tmp_path):
    found = rows_of(make(folder(tmp_path, train=MANY, test=TEST), tmp_path / "out"))
    assert (found["test"], len(found["validation"])) == (TEST, 10)


def test_a_folder_with_train_only_is_cut_like_one_file(tmp_path):
    from_folder = rows_of(make(folder(tmp_path, train=MANY), tmp_path / "out"))
    assert from_folder == rows_of(make(write(tmp_path / "x.tsv", MANY), tmp_path / "other"))


def test_a_test_file_with_withheld_labels_is_ignored(tmp_path, caplog):
    data = folder(tmp_path, train=MANY, dev=DEV, test=[("unknown", -1), ("unknown too", -1)])
    with caplog.at_level(logging.INFO):
        assert rows_of(make(data, tmp_path / "out"))["test"] == DEV
    assert f"{data / 'test.tsv'}: its labels are withheld, so it is not used" in caplog.messages


@pytest.mark.parametrize("column", ["index", "Label"])
def test_a_test_file_without_a_column_of_labels_is_ignored_with_a_warning(column, tmp_path, caplog):
    data = folder(tmp_path, train=MANY, dev=DEV)
    (data / "test.tsv").write_text(f"{column}\tsentence\n0\tunknown\n", encoding="utf-8")
    assert rows_of(make(data, tmp_path / "out"))["test"] == DEV
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"{data / 'test.tsv'} has no column 'label', so it is not used; found {column!r}, 'sentence'")
    ]


def test_a_test_file_that_loses_its_labels_half_way_is_refused_not_cut_short(tmp_path):
    data = folder(tmp_path, train=MANY, dev=DEV, test=[*TEST, ("unknown", -1)])
    with pytest.raises(DataError, match=r"test.tsv, line 4: label '-1' is unknown"):
        make(data, tmp_path / "out")


@pytest.mark.parametrize("missing", ["", -1])
def test_a_test_file_that_gets_its_labels_later_is_refused_not_dropped(missing, tmp_path):
    data = folder(tmp_path, train=MANY, dev=DEV, test=[("unknown", missing), *TEST])
    sentence = (
        r"test.tsv, line 2: the row has no label, and .*test.tsv, line 3 has one; give every row a label, or none"
    )
    with pytest.raises(DataError, match=sentence):
        make(data, tmp_path / "out")


def own(path: Path, counts: dict[str, int], metric: str = "accuracy") -> tuple[Path, Task]:
    """A file with so many rows of each label, and its task."""
    rows = [f"text {number} {label},{label}\n" for label, count in counts.items() for number in range(count)]
    path.write_text("sentence,label\n" + "".join(rows), encoding="utf-8")
    task = TaskConfig.model_validate(
        {"name": "own", "columns": ["sentence"], "label": "label", "labels": tuple(counts), "metric": metric}
    )
    return path, task.row()


def test_a_label_that_a_split_lacks_is_named(tmp_path, caplog):
    path, task = own(tmp_path / "x.csv", {"rare": 4, "a": 47, "b": 47})
    made = make(path, tmp_path / "out", task=task)
    assert made.metrics["rows"]["test"] == {"a": 5, "b": 5}
    sentence = f"of {path} has no row with label 'rare', of which it can say nothing; give more such rows"
    assert caplog.messages == [f"the {split} split {sentence}" for split in ("validation", "test")]


def test_labels_with_a_row_each_cannot_be_shared_out(tmp_path):
    path, task = own(tmp_path / "x.csv", {f"label {number}": 1 for number in range(50)})
    with pytest.raises(DataError, match=r"has no rows: there are too few rows of each label to share out; give more"):
        make(path, tmp_path / "out", task=task)


@pytest.mark.parametrize(
    ("metric", "counts", "metric_name"),
    [
        ("accuracy", {"fraud": 30, "legit": 170}, "accuracy"),
        ("accuracy", {"legit": 170, "fraud": 30}, "accuracy"),
        ("f1", {"fraud": 30, "legit": 170}, "F1"),
        ("f1", {"legit": 170, "fraud": 30}, None),  # F1 is of the rare one
        ("matthews", {"fraud": 30, "legit": 170}, None),
        ("accuracy", {"fraud": 60, "legit": 140}, None),
    ],
)
def test_a_label_that_most_rows_have_is_named_before_training(metric, counts, metric_name, tmp_path, caplog):
    path, task = own(tmp_path / "x.csv", counts, metric)
    make(path, tmp_path / "out", task=task)
    if metric_name is None:
        assert caplog.messages == []
    else:
        what = f"85.0 % of the rows of the train split of {path} have label 'legit'"
        why = f'{metric_name} hardly tells a model from that one answer; set task.metric = "matthews"'
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"{what}, and {why}")


def test_training_rows_need_labels(tmp_path):
    with pytest.raises(DataError, match=r"train.tsv, line 2: label '-1' is unknown"):
        make(folder(tmp_path, train=[("unknown", -1)], dev=DEV), tmp_path / "out")


def test_all_formats_give_the_same_examples(tmp_path):
    contents = set()
    for suffix in (".tsv", ".csv", ".jsonl", ".parquet"):
        path = write(tmp_path / f"x{suffix}", [*MANY, *((text, 1) for text in HARD)])
        contents.add(make(path, tmp_path / f"out{suffix[1:]}").content)
    assert len(contents) == 1


def test_the_report_counts_rows_by_split_and_label(tmp_path):
    made = make(folder(tmp_path, train=MANY, validation=DEV, test=TEST), tmp_path / "out")
    assert made.metrics["rows"]["train"] == {"negative": 50, "positive": 50}
    assert made.metrics["rows"]["test"] == {"negative": 1, "positive": 1}
