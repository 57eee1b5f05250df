"""The tasks the tool knows: one row each."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task's files look like and how it is measured."""

    name: str
    """Used in recipes, folders and the served model's name."""
    column: str
    """Column that holds the text."""
    label_column: str
    """Column that holds the label."""
    labels: tuple[str, ...]
    """Label names; a label's index in this tuple is its class in every model and file the tool writes."""
    codes: tuple[str, ...]
    """What GLUE's files write for each label, in the order of `labels`. Names are accepted as well."""
    metric: str
    """Metric that models are chosen by (`accuracy`)."""
    max_tokens: int
    """Longest input in word pieces, [CLS] and [SEP] included; longer texts are cut."""
    hub_config: str
    """Configuration of the hub's GLUE data set."""

    def label_index(self, value: str) -> int | None:
        """Class of a label written as a name (any case) or as GLUE's code; None if it is neither."""
        folded = value.strip().casefold()
        for known in (self.labels, self.codes):
            if folded in known:
                return known.index(folded)
        return None


TASKS = {
    task.name: task
    for task in (
        Task(
            name="sst2",
            column="sentence",
            label_column="label",
            labels=("negative", "positive"),
            codes=("0", "1"),
            metric="accuracy",
            max_tokens=64,
            hub_config="sst2",
        ),
    )
}


def find_task(name: str) -> Task:
    """The task called `name`. Raises ConfigError with the nearest name if there is none."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; {nearest(name, TASKS)}")
    return TASKS[name]
