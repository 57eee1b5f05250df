"""Tasks and their labels."""

import pytest

from compressor.errors import ConfigError, nearest
from compressor.tasks import TASKS, Task, find_task

SST2 = TASKS["sst2"]


@pytest.mark.parametrize(
    ("value", "index"),
    [("negative", 0), ("positive", 1), ("0", 0), ("1", 1), ("POSITIVE", 1), (" Negative ", 0), ("\t1", 1)],
)
def test_label_is_read_as_name_or_code(value, index):
    assert SST2.label_index(value) == index


@pytest.mark.parametrize("value", ["", "2", "-1", "pos", "true", "0.0", "01"])
def test_other_labels_have_no_index(value):
    assert SST2.label_index(value) is None


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_label_has_one_code_or_none_has(task):
    known = [name.casefold() for name in task.labels + task.codes]
    assert len(task.codes) in (0, len(task.labels))
    assert len(set(known)) == len(known)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_names_of_columns_stand_for_one_thing(task):
    names = [name for known in (*task.columns, task.label_columns) for name in known]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_file_is_of_one_split(task):
    files = [*task.validation_files, *task.test_files, *(name for known in task.extra_files.values() for name in known)]
    assert len(set(files)) == len(files)
    assert "train" not in files


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_task_is_a_classification_or_a_regression(task):
    assert task.is_regression == (task.score_range is not None) == (task.name == "stsb")
    assert task.outputs == (1 if task.is_regression else len(task.labels))


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_task_comes_back_from_json_as_it_was(task):
    assert Task.model_validate_json(task.model_dump_json()) == Task.model_validate(task.model_dump(mode="json")) == task


def test_labels_of_the_user_s_own_are_compared_in_any_case():
    task = SST2.model_copy(update={"labels": ("Straße", "École"), "codes": ()})
    assert [task.label_index(label) for label in ("STRASSE", " école ", "0")] == [0, 1, None]


def test_a_label_goes_before_a_code_that_is_written_alike():
    task = SST2.model_copy(update={"labels": ("1", "0"), "codes": ("0", "1")})
    assert task.classes == {"0": 1, "1": 0}
    assert [task.label_index(label) for label in ("0", "1")] == [1, 0]


def test_a_task_that_one_answer_solves_has_a_remedy_if_it_is_the_user_s_own():
    own = Task(name="own", columns=(("a",),), label_columns=("b",), labels=("x", "y"), metrics=("f1",), max_tokens=64)
    remedies = {
        metric: own.model_copy(update={"metrics": (metric,)}).imbalance_remedy(0.8)
        for metric in ("accuracy", "f1", "matthews")
    }
    assert remedies == {
        "accuracy": 'set task.metric = "matthews"',
        "f1": 'set task.metric = "matthews", or list task.labels with the one that is looked for as the second',
        "matthews": None,
    }
    assert own.imbalance_remedy(0.79) is None
    assert SST2.imbalance_remedy(0.9) is None  # its metric cannot be set


def test_splits_that_are_not_trained_on_are_known():
    assert SST2.held_out == ("validation", "test")
    assert TASKS["mnli"].held_out == ("validation", "test", "mismatched")


def test_models_are_chosen_by_the_first_metric():
    chosen = {name: task.metric for name, task in TASKS.items() if task.metric != "accuracy"}
    assert chosen == {"cola": "matthews", "stsb": TASKS["stsb"].metrics[0]}


def test_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown task 'sst-2'; did you mean 'sst2'\?"):
        find_task("sst-2")


def test_task_like_no_other_is_refused_with_all_names():
    with pytest.raises(
        ConfigError, match=r"unknown task 'xyz'; known: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli"
    ):
        find_task("xyz")


def test_nearest_lists_known_names_in_order():
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def test_nearest_suggests_the_closest_name_only():
    assert nearest("epoch", ["epochs", "batch_size", "epoch_s"]) == "did you mean 'epochs'?"
