"""Each GLUE task from both of its forms, and tasks of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor.artifact import Artifact
from compressor.config import CorpusConfig
from compressor.dataset import read_examples, task_of, texts_of
from compressor.errors import DataError, SourceError
from compressor.stages.corpus import corpus, read_source
from compressor.tasks import TASKS, Task, TaskConfig

Rows = Sequence[tuple[tuple[str, ...], float]]

SINGLE = [("one text", 0), ("another text", 1), ("a third", 1)]
TWO = [("first a", "second a", 0), ("first b", "second b", 1), ("first a", "second c", 1)]
SCORED = [("first a", "second a", 0.0), ("first b", "second b", 5.0), ("first a", "second c", 3.25)]
THREE = [("first a", "second a", 0), ("first b", "second b", 1), ("first a", "second c", 2)]
SINGLES = [((text,), label) for text, label in SINGLE]
TWOS, SCORES, THREES = ([((one, two), label) for one, two, label in rows] for rows in (TWO, SCORED, THREE))

# As in the TSV release: header line (none for CoLA), the place of texts and label in it, what a label is written as.
MNLI_HEADER = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label"
)
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
STSB_HEADER = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
RELEASE: dict[str, tuple[str, tuple[int, ...], int, int, list[str], Rows]] = {
    "cola": ("", (3,), 1, 4, ["0", "1"], SINGLES),
    "sst2": ("sentence label", (0,), 1, 2, ["0", "1"], SINGLES),
    "mrpc": (MRPC_HEADER, (3, 4), 0, 5, ["0", "1"], TWOS),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", (3, 4), 5, 6, ["0", "1"], TWOS),
    "stsb": (STSB_HEADER, (7, 8), 9, 10, [], SCORES),
    "mnli": (MNLI_HEADER, (8, 9), 11, 12, ["entailment", "neutral", "contradiction"], THREES),
    "qnli": ("index question sentence label", (1, 2), 3, 4, ["entailment", "not_entailment"], TWOS),
    "rte": ("index sentence1 sentence2 label", (1, 2), 3, 4, ["entailment", "not_entailment"], TWOS),
    "wnli": ("index sentence1 sentence2 label", (1, 2), 3, 4, ["0", "1"], TWOS),
}
# As on the hub: names of the text columns, names of the labels in the hub's order.
HUB = {
    "cola": (("sentence",), ["unacceptable", "acceptable"]),
    "sst2": (("sentence",), ["negative", "positive"]),
    "mrpc": (("sentence1", "sentence2"), ["not_equivalent", "equivalent"]),
    "qqp": (("question1", "question2"), ["not_duplicate", "duplicate"]),
    "stsb": (("sentence1", "sentence2"), None),
    "mnli": (("premise", "hypothesis"), ["entailment", "neutral", "contradiction"]),
    "qnli": (("question", "sentence"), ["entailment", "not_entailment"]),
    "rte": (("sentence1", "sentence2"), ["entailment", "not_entailment"]),
    "wnli": (("sentence1", "sentence2"), ["not_entailment", "entailment"]),
}


def released(path: Path, task: str, rows: Rows | None = None) -> Path:
    """A file in the task's TSV form."""
    header, text_places, label_place, width, labels, own_rows = RELEASE[task]
    lines = [header if "\t" in header else header.replace(" ", "\t")] if header else []
    for texts, label in own_rows if rows is None else rows:
        cells = ["x"] * width
        cells[label_place] = labels[int(label)] if labels else f"{label:.3f}"
        for place, text in zip(text_places, texts, strict=True):
            cells[place] = text
        lines.append("\t".join(cells))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def on_hub(task: str, rows: Rows | None = None, *, reverse: bool = False, withheld: bool = False) -> datasets.Dataset:
    """A table in the task's form on the hub; `reverse` turns the order of its labels around."""
    columns, names = HUB[task]
    rows = RELEASE[task][5] if rows is None else rows
    table: dict[str, list[Any]] = {name: [texts[place] for texts, _ in rows] for place, name in enumerate(columns)}
    kinds: dict[str, Any] = dict.fromkeys(columns, datasets.Value("string"))
    if names is None:
        kinds["label"], table["label"] = datasets.Value("float32"), [label for _, label in rows]
    else:
        order = names[::-1] if reverse else names
        kinds["label"] = datasets.ClassLabel(names=order)
        table["label"] = [order.index(names[int(label)]) for _, label in rows]
    if withheld:
        table["label"] = [-1] * len(rows)
    table["idx"], kinds["idx"] = list(range(len(rows))), datasets.Value("int32")
    return datasets.Dataset.from_dict(table, features=datasets.Features(kinds))


def read(source: Path | str, task: Task, **shares: float) -> dict[str, list[Any]]:
    found, _ = read_source(CorpusConfig(source=str(source), **shares), task, seed=0)
    return {split: list(rows) for split, rows in found.items()}


def all_rows(source: Path | str, task: Task) -> list[Any]:
    return read(source, task, validation=1e-9, test=1e-9)["train"]


@pytest.fixture
def hub(monkeypatch):
    """Sets what the hub has; notes what it was asked for."""
    asked: list[tuple[str, str | None]] = []

    def answer(**splits: datasets.Dataset):
        def load_dataset(name: str, config: str | None):
            asked.append((name, config))
            return datasets.DatasetDict(splits)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return answer


# ---- each task of GLUE


@pytest.mark.parametrize("name", TASKS)
def test_the_release_and_the_hub_give_the_same_rows(name, tmp_path, hub):
    expected = RELEASE[name][5]
    asked = hub(train=on_hub(name))
    assert all_rows(released(tmp_path / "x.tsv", name), TASKS[name]) == expected
    assert all_rows("hub:nyu-mll/glue", TASKS[name]) == expected
    assert asked == [("nyu-mll/glue", name)]


@pytest.mark.parametrize("name", TASKS)
def test_a_local_copy_of_the_hub_gives_the_same_rows(name, tmp_path):
    on_hub(name).to_parquet(tmp_path / "x.parquet")
    assert all_rows(tmp_path / "x.parquet", TASKS[name]) == RELEASE[name][5]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.labels])
def test_labels_of_the_hub_are_read_by_name_whatever_their_order(name, hub):
    hub(train=on_hub(name, reverse=True))
    assert all_rows("hub:nyu-mll/glue", TASKS[name]) == RELEASE[name][5]


@pytest.mark.parametrize("name", TASKS)
def test_the_artifact_holds_rows_and_task(name, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", TASKS[name].validation_files[0], TASKS[name].test_files[0]):
        released(data / f"{split}.tsv", name)
    made = make(data, TASKS[name], tmp_path / "out")
    assert task_of(made) == TASKS[name].model_copy(update={"extra_files": {}})
    for split in ("train", "validation", "test"):
        found = read_examples(made.path / f"{split}.arrow")
        assert list(zip(texts_of(found), found["label"], strict=True)) == RELEASE[name][5]
        assert found["origin"] == list(range(3))
    assert sum(made.metrics["rows"]["train"].values()) == 3


def make(source: Path | str, task: Task, out: Path) -> Artifact:
    return corpus(CorpusConfig(source=str(source)), task, seed=0, key="k", out=out)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.labels and not task.codes])
def test_a_number_is_no_label_where_sources_number_them_differently(name, tmp_path):
    columns = {column: ["a", "b"] for column in HUB[name][0]}
    pq.write_table(pa.table(columns | {"label": [0, 1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=rf"row 1: label 0 is unknown; labels of {name} are entailment, "):
        all_rows(tmp_path / "x.parquet", TASKS[name])


# ---- peculiarities of one task


def test_cola_s_test_file_has_a_header_line_and_no_labels(tmp_path):
    for split in ("train", "dev"):
        released(tmp_path / f"{split}.tsv", "cola", [((f"{split} {number}",), number % 2) for number in range(30)])
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tunknown\n", encoding="utf-8")
    assert len(read(tmp_path, TASKS["cola"])["test"]) == 30


def test_mrpc_s_byte_order_mark_line_ends_and_quotes_are_read_as_they_are(tmp_path):
    rows = ['1\t7\t8\tHe said "no\tHe said ""no""', '0\t7\t8\t"Yes\t"Yes" he said']
    text = "\r\n".join([MRPC_HEADER, *rows, ""])
    (tmp_path / "x.tsv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert all_rows(tmp_path / "x.tsv", TASKS["mrpc"]) == [
        (('He said "no', 'He said ""no""'), 1),
        (('"Yes', '"Yes" he said'), 0),
    ]


def test_stsb_s_lost_quotation_mark_is_kept(tmp_path):
    rows = [(("Treasury\x12s plan", "The plan"), 3.0), (("a", "b"), 1.0)]
    assert all_rows(released(tmp_path / "x.tsv", "stsb", rows), TASKS["stsb"]) == rows


GAPS = {
    "no label": "1\t2\t3\tWhy?\tBecause",
    "an empty label": "1\t2\t3\tWhy?\tBecause\t",
    "an empty question": "1\t2\t3\tWhy?\t \t1",
    "the first half of a row": "1\t2\t3\tWhy",
    "its second half": "is it so?\tBecause\t1",
}


@pytest.mark.parametrize("gap", GAPS)
def test_rows_with_a_gap_in_qqp_s_release_are_left_out_and_counted(gap, tmp_path, caplog):
    (tmp_path / "qqp").mkdir()
    for split in ("train", "dev", "test"):
        released(tmp_path / "qqp" / f"{split}.tsv", "qqp", TWOS)
    path = tmp_path / "qqp" / "train.tsv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([header, *rows[:1], GAPS[gap], *rows[1:], GAPS[gap], ""]), encoding="utf-8")
    made = make(tmp_path / "qqp", TASKS["qqp"], tmp_path / "out")
    found = read_examples(made.path / "train.arrow")
    assert list(zip(texts_of(found), found["label"], strict=True)) == TWOS
    assert made.metrics["incomplete_left_out"] == 2
    assert f"{path}: 2 rows lack a text or a label and are left out" in caplog.text


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("1\t2\t3\tWhy?\tBecause\t2", r"x.tsv, line 3: label '2' is unknown; labels of qqp are not_duplicate or 0, du"),
        ("1\t2\t3\tWhy?\tBecause\t1\t1", r"x.tsv, line 3: 7 columns; a row needs 6"),
    ],
)
def test_a_malformed_row_of_qqp_is_named_by_file_and_line(row, sentence, tmp_path):
    path = released(tmp_path / "x.tsv", "qqp", TWOS[:1])
    path.write_text(f"{path.read_text(encoding='utf-8')}{row}\n", encoding="utf-8")
    with pytest.raises(DataError, match=sentence):
        all_rows(path, TASKS["qqp"])


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("1\tWhy?\tBecause", r"x.tsv, line 3: 3 columns; a row needs 4"),
        ("1\tWhy?\t \tentailment", r"x.tsv, line 3, column 'sentence': the text is empty; give it a text or drop"),
        ("1\tWhy?\tBecause\t", r"x.tsv, line 3: the row has no label in column 'label'; give it one or drop"),
    ],
)
def test_a_gap_in_any_other_release_is_a_mistake_named_by_file_and_line(row, sentence, tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text(f"index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n{row}\n", encoding="utf-8")
    with pytest.raises(DataError, match=sentence):
        all_rows(path, TASKS["qnli"])


@pytest.mark.parametrize("score", ["5.001", "-0.5", "6", "-1"])
def test_a_score_out_of_range_is_named_by_file_and_line(score, tmp_path):
    path = scored(tmp_path, [score])
    with pytest.raises(DataError, match=rf"x.tsv, line 2: score {float(score):g} is outside .* range of 0 to 5"):
        all_rows(path, TASKS["stsb"])


@pytest.mark.parametrize("score", ["high", "nan", "inf", "1e39"])
def test_a_score_that_is_no_finite_number_is_named_by_file_and_line(score, tmp_path):
    with pytest.raises(DataError, match=rf"x.tsv, line 3: score '{score}' is no finite number; correct it or drop"):
        all_rows(scored(tmp_path, ["1.5", score]), TASKS["stsb"])


def test_a_missing_score_is_named_by_file_and_line(tmp_path):
    with pytest.raises(DataError, match=r"x.tsv, line 3: the row has no score in column 'score'; give it one or drop"):
        all_rows(scored(tmp_path, ["1.5", ""]), TASKS["stsb"])


def scored(folder: Path, scores: Sequence[str]) -> Path:
    lines = [f"a {number}\tb\t{score}\n" for number, score in enumerate(scores)]
    (folder / "x.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(lines), encoding="utf-8")
    return folder / "x.tsv"


def test_equal_scores_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the train split of .*x.tsv has only score 2.5; it needs at least two scores"):
        make(scored(tmp_path, ["2.5"] * 40), TASKS["stsb"], tmp_path / "out")


def test_the_report_counts_scores_with_their_range(tmp_path):
    made = make(scored(tmp_path, [f"{number / 10}" for number in range(50)]), TASKS["stsb"], tmp_path / "out")
    ((span, count),) = made.metrics["rows"]["train"].items()
    low, high = map(float, span.split(" to "))
    assert (count, low < 1, high > 4) == (40, True, True)


def test_a_hub_test_split_of_scores_that_are_withheld_is_left_out(hub):
    hub(
        train=on_hub("stsb", SCORES * 10),
        validation=on_hub("stsb"),
        test=on_hub("stsb", withheld=True),
    )
    assert read("hub:nyu-mll/glue", TASKS["stsb"])["test"] == SCORES


# ---- MNLI's two held-out sets

MATCHED, MISMATCHED = (
    [((f"{name} {text}", f"{text} b"), number) for number, text in enumerate("xyz")] for name in "mn"
)


@pytest.mark.parametrize("form", ["release", "hub"])
def test_mnli_chooses_by_rows_of_train_and_reports_on_both(form, tmp_path, hub):
    many = [((f"p {number}", f"h {number}"), number % 3) for number in range(60)]
    if form == "release":
        source = str(tmp_path / "data")
        Path(source).mkdir()
        for split, rows in (("train", many), ("dev_matched", MATCHED), ("dev_mismatched", MISMATCHED)):
            released(Path(source) / f"{split}.tsv", "mnli", rows)
    else:
        source = "hub:nyu-mll/glue"
        withheld = on_hub("mnli", withheld=True)
        held_out = {"validation_matched": on_hub("mnli", MATCHED), "validation_mismatched": on_hub("mnli", MISMATCHED)}
        hub(train=on_hub("mnli", many), **held_out, test_matched=withheld, test_mismatched=withheld)
    made = make(source, TASKS["mnli"], tmp_path / "out")
    assert task_of(made).held_out == ("validation", "test", "mismatched")
    found = {path.stem: read_examples(path) for path in made.path.glob("*.arrow")}
    assert {split: len(rows) for split, rows in found.items()} == {
        "train": 54,
        "validation": 6,
        "test": 3,
        "mismatched": 3,
    }
    assert (texts_of(found["test"]), texts_of(found["mismatched"])) == (
        [texts for texts, _ in MATCHED],
        [texts for texts, _ in MISMATCHED],
    )
    assert {text for text, _ in texts_of(found["validation"])} <= {text for (text, _), _ in many}


def test_a_split_that_is_only_reported_on_is_no_held_out_file(tmp_path):
    released(tmp_path / "train.tsv", "mnli", [((f"p {number}", "h"), number % 3) for number in range(60)])
    released(tmp_path / "dev_mismatched.tsv", "mnli", MISMATCHED)
    found = read(tmp_path, TASKS["mnli"])
    assert {split: len(rows) for split, rows in found.items()} == {
        "train": 48,
        "validation": 6,
        "test": 6,
        "mismatched": 3,
    }


def test_a_folder_of_one_s_own_for_mnli_may_call_its_files_dev_and_test(tmp_path):
    released(tmp_path / "train.tsv", "mnli", [((f"p {number}", "h"), number % 3) for number in range(60)])
    released(tmp_path / "dev.tsv", "mnli", MATCHED)
    released(tmp_path / "test.tsv", "mnli", MISMATCHED)
    found = read(tmp_path, TASKS["mnli"])
    assert (found["validation"], found["test"]) == (MATCHED, MISMATCHED)
    assert len(found["train"]) == 60


# ---- splits of pairs and scores


def test_equal_pairs_are_on_the_same_side_and_a_repeated_first_text_need_not_be(tmp_path):
    rows = [((f"p {number % 10}", f"h {number % 60}"), number % 2) for number in range(240)]
    found = read(released(tmp_path / "x.tsv", "rte", rows), TASKS["rte"], validation=0.3, test=0.3)
    sides = [{texts for texts, _ in part} for part in found.values()]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 60
    assert len(set.intersection(*({first for first, _ in side} for side in sides))) > 1
    assert sum(map(len, found.values())) == 240


def test_scores_are_cut_into_splits_of_the_shares_asked_for(tmp_path):
    rows = [((f"a {number}", "b"), number % 50 / 10) for number in range(200)]
    found = read(released(tmp_path / "x.tsv", "stsb", rows), TASKS["stsb"], validation=0.2, test=0.1)
    assert {split: len(part) for split, part in found.items()} == {"train": 140, "validation": 40, "test": 20}


# ---- columns


def test_a_column_is_missed_by_all_of_its_names(tmp_path):
    (tmp_path / "x.tsv").write_text("premise\tsentence1\nx\ty\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2: no column 'sentence2' or '#2 String'; found 'premise', 'sentence1'"):
        all_rows(tmp_path / "x.tsv", TASKS["mrpc"])


def test_two_columns_for_the_same_are_refused(tmp_path):
    (tmp_path / "x.tsv").write_text("premise\tsentence1\thypothesis\tlabel\nx\ty\tz\tneutral\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"line 2: column 'premise' and column 'sentence1' stand for the same; drop one"
    ):
        all_rows(tmp_path / "x.tsv", TASKS["mnli"])


def test_an_empty_file_is_refused_with_the_columns_it_needs(tmp_path):
    (tmp_path / "x.csv").write_text("", encoding="utf-8")
    sentence = r"x.csv is empty; it needs rows with columns 'sentence1' and 'sentence2' and 'label' or 'score'"
    with pytest.raises(DataError, match=sentence):
        all_rows(tmp_path / "x.csv", TASKS["stsb"])


# ---- rated sentences fit one kind of task


@pytest.mark.parametrize(
    "task",
    [
        TASKS["cola"],
        TASKS["rte"],
        TASKS["stsb"],
        TaskConfig(name="own", columns=("a", "b"), label="x", labels=("negative", "positive")).row(),
    ],
    ids=lambda task: task.name,
)
def test_the_rated_sentences_are_refused_for_other_tasks(task):
    sentence = (
        rf"corpus.source is 'index:.*', which holds single texts that are negative or positive; for {task.name} give"
    )
    with pytest.raises(SourceError, match=sentence):
        read("index:vaderSentiment==3.3.2", task)
