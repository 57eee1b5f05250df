"""Tasks and their labels."""

import pytest

from compressor.errors import ConfigError, nearest
from compressor.tasks import TASKS, find_task

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
def test_every_label_has_one_code(task):
    assert len(task.labels) == len(task.codes) == len(set(task.labels) | set(task.codes)) / 2


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_labels_are_lower_case_because_they_are_compared_so(task):
    assert [name.casefold() for name in task.labels + task.codes] == list(task.labels + task.codes)


def test_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown task 'sst-2'; did you mean 'sst2'\?"):
        find_task("sst-2")


def test_task_like_no_other_is_refused_with_all_names():
    with pytest.raises(ConfigError, match=r"unknown task 'xyz'; known: sst2"):
        find_task("xyz")


def test_nearest_lists_known_names_in_order():
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def test_nearest_suggests_the_closest_name_only():
    assert nearest("epoch", ["epochs", "batch_size", "epoch_s"]) == "did you mean 'epochs'?"
