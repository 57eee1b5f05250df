"""The tasks the tool knows: one row each, and the form of a user's own; and a recipe's [task], which names one."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from compressor.errors import ConfigError, nearest
from compressor.section import Section

Names = tuple[str, ...]
Stripped = Annotated[str, StringConstraints(strip_whitespace=True)]
Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
REGRESSION_METRICS = ("pearson", "spearman")
OWN_MAX_TOKENS = 128
LARGE_SHARE = 0.8  # of the best score there is: what one answer to every text must not reach


class Task(BaseModel):
    """What a task's files look like and how it is measured. Artifacts of examples carry theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Used in recipes, folders and the served model's name."""
    columns: tuple[Names, ...]
    """One or two text columns, each by the names that the task's files give it."""
    label_columns: Names
    """Names that the task's files give the column of the label or score."""
    labels: Names = ()
    """Label names; a label's index here is its class in every model and file the tool writes. None = a regression."""
    codes: Names = ()
    """What files write for each label besides its name, in the order of `labels`."""
    score_range: tuple[float, float] | None = None
    """Lowest and highest score of a regression."""
    metrics: Names
    """What is measured: names of `compressor.evaluate.METRICS`. Models are chosen by the first."""
    max_tokens: int
    """Longest input in word pieces, [CLS] and [SEP] included; longer texts are cut."""
    tsv_header: Names = ()
    """Columns of the task's TSV files where these have no header line."""
    has_gaps: bool = False
    """Whether rows of the release lack a text or a label: these are left out and counted, and not a mistake."""
    hub_config: str | None = None
    """Configuration of the hub's GLUE data set."""
    validation_files: Names = ("dev", "validation")
    """Names, without ending, of the file or hub split to choose by."""
    test_files: Names = ("test",)
    """The same of the one to report on."""
    extra_files: dict[str, Names] = {}
    """The same of further splits to report on, by the name that the report gives them."""
    paper_epochs: int = 20
    """Epochs of TinyBERT's intermediate stage for this task (section 4.2 and its footnotes)."""
    paper_copies: int = 20
    """Augmented texts per text in the paper."""

    @property
    def is_own(self) -> bool:
        """Whether this is a task of the user's own."""
        return self.name not in TASKS

    @property
    def is_pair(self) -> bool:
        """Whether an example has two texts."""
        return len(self.columns) == 2

    @property
    def is_regression(self) -> bool:
        """Whether the answer is a number."""
        return not self.labels

    @property
    def outputs(self) -> int:
        """Columns of the logits: one for each label, or one for the score."""
        return len(self.labels) or 1

    @property
    def metric(self) -> str:
        """What models are chosen by (higher is better)."""
        return self.metrics[0]

    @property
    def held_out(self) -> Names:
        """Splits that are not trained on."""
        return ("validation", "test", *self.extra_files)

    @property
    def classes(self) -> dict[str, int]:
        """Class by each name and code, `folded`."""
        return {folded(text): index for known in (self.codes, self.labels) for index, text in enumerate(known)}

    def label_index(self, value: str) -> int | None:
        """Class of a label written as a name (any case) or as one of the codes; None if it is neither."""
        return self.classes.get(folded(value))

    def imbalance_remedy(self, blind: float) -> str | None:
        """What the user can do if the same answer to every text has the score `blind`; None if that is fair."""
        if not self.is_own or self.metric not in ("accuracy", "f1") or blind < LARGE_SHARE:
            return None
        order = ", or list task.labels with the one that is looked for as the second" if self.metric == "f1" else ""
        return f'set task.metric = "matthews"{order}'


def folded(label: str) -> str:
    """A label as it is compared: without its case, and with one form for letters that Unicode can write in two."""
    return unicodedata.normalize("NFC", label.strip().casefold())


def _glue(name: str, **facts: object) -> Task:
    """A row of GLUE: the hub calls it by our name."""
    shared = {"name": name, "hub_config": name, "label_columns": ("label",), "max_tokens": 128}
    return Task.model_validate(shared | facts)


ENTAILMENT = ("entailment", "not_entailment")
# Columns: the hub's name first, then the TSV release's. Order of labels: the hub's.
TASKS = {
    task.name: task
    for task in (
        _glue(
            "cola",
            columns=(("sentence",),),
            labels=("unacceptable", "acceptable"),
            codes=("0", "1"),
            metrics=("matthews", "accuracy"),
            max_tokens=64,
            tsv_header=("source", "label", "mark", "sentence"),
            paper_epochs=50,
        ),
        _glue(
            "sst2",
            columns=(("sentence",),),
            labels=("negative", "positive"),
            codes=("0", "1"),
            metrics=("accuracy",),
            max_tokens=64,
        ),
        _glue(
            "mrpc",
            columns=(("sentence1", "#1 String"), ("sentence2", "#2 String")),
            label_columns=("label", "Quality"),
            labels=("not_equivalent", "equivalent"),
            codes=("0", "1"),
            metrics=("accuracy", "f1"),  # the F1 of always answering yes is over 80 %: a poor thing to choose by
        ),
        _glue(
            "qqp",
            columns=(("question1",), ("question2",)),
            label_columns=("label", "is_duplicate"),
            labels=("not_duplicate", "duplicate"),
            codes=("0", "1"),
            metrics=("accuracy", "f1"),
            has_gaps=True,  # questions that are empty, and rows cut in two by a line end within a question
            paper_epochs=10,
        ),
        _glue(
            "stsb",
            columns=(("sentence1",), ("sentence2",)),
            label_columns=("label", "score"),
            score_range=(0.0, 5.0),
            metrics=("spearman", "pearson"),
        ),
        _glue(
            "mnli",
            columns=(("premise", "sentence1"), ("hypothesis", "sentence2")),
            label_columns=("label", "gold_label"),
            labels=("entailment", "neutral", "contradiction"),
            metrics=("accuracy",),
            validation_files=("dev_matched", "validation_matched", "dev", "validation"),
            test_files=("test_matched", "test"),
            extra_files={"mismatched": ("dev_mismatched", "validation_mismatched")},
            paper_epochs=10,
        ),
        _glue(
            "qnli",
            columns=(("question",), ("sentence",)),
            labels=ENTAILMENT,
            metrics=("accuracy",),
            paper_epochs=10,
        ),
        _glue("rte", columns=(("sentence1",), ("sentence2",)), labels=ENTAILMENT, metrics=("accuracy",)),
        _glue(
            "wnli",
            columns=(("sentence1",), ("sentence2",)),
            labels=("not_entailment", "entailment"),
            codes=("0", "1"),
            metrics=("accuracy",),
        ),
    )
}


def find_task(name: str) -> Task:
    """The task called `name`. Raises ConfigError with the nearest name if there is none."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; {nearest(name, TASKS)}")
    return TASKS[name]


class TaskConfig(Section):
    """A GLUE task by name, or the user's own: then `columns` and `label` say what its files look like."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """A row of `compressor tasks`, or a name for the user's own."""
    max_tokens: Annotated[int, Field(ge=8, le=512)] | None = None
    """Longest input in word pieces; if not given, the task's own limit, or 128."""
    columns: Annotated[tuple[str, ...], Field(min_length=1, max_length=2, strict=False)] | None = None
    """One or two text columns of the user's files."""
    label: str | None = None
    """The column of the user's files that holds the label, or the number to predict."""
    labels: Annotated[tuple[Stripped, ...], Field(min_length=2, strict=False)] | None = None
    """Names of the user's labels; if not given, those that the training file holds, in alphabetical order, but for `f1`
    the rarer one of two as the second."""
    metric: Metric = "accuracy"
    """What the user's models are chosen by; `f1` is that of the second of two labels, or the mean over more; `pearson`
    and `spearman` make it a regression."""

    @model_validator(mode="after")
    def _is_known_or_described(self) -> TaskConfig:
        try:
            known = find_task(self.name)
        except ConfigError as error:
            if self.columns is None:  # pydantic puts it beside the other mistakes
                raise ValueError(f"{error}; a task of your own needs columns and label") from error
        else:
            if (self.columns, self.label, self.labels, self.metric) != (None, None, None, "accuracy"):
                raise ValueError(f"{known.name!r} is a GLUE task with its own columns; give your own another name")
            return self
        if self.label is None:
            raise ValueError("label is missing: the column that holds the label")
        if len({*self.columns, self.label}) < len(self.columns) + 1:
            raise ValueError(f"columns are {list(self.columns)} and label is {self.label!r}; they must all differ")
        if self.labels is not None and self.is_regression:
            raise ValueError(f"metric {self.metric!r} is for numbers, and labels are given; drop one of them")
        broken = [label for label in self.labels or () if not label.strip() or label.splitlines() != [label]]
        if broken:
            raise ValueError(f"labels hold {broken[0]!r}; each must be one line that is not empty")
        if self.labels is not None and len(set(map(folded, self.labels))) < len(self.labels):
            raise ValueError(f"labels are {list(self.labels)}; they must differ in more than case")
        return self

    @property
    def is_own(self) -> bool:
        """Whether this is a task of the user's own."""
        return self.columns is not None

    @property
    def is_regression(self) -> bool:
        """Whether a task of the user's own predicts a number."""
        return self.metric in REGRESSION_METRICS

    def row(self) -> Task:
        """The task. Raises ConfigError if the labels of the user's own are not known yet."""
        if self.columns is None:
            return find_task(self.name)
        assert self.label is not None
        if self.labels is None and not self.is_regression:
            raise ConfigError(f"task.labels of {self.name!r} are not known; list them in the recipe's [task]")
        return Task(
            name=self.name,
            columns=tuple((column,) for column in self.columns),
            label_columns=(self.label,),
            labels=self.labels or (),
            metrics=(self.metric,),
            max_tokens=self.max_tokens or OWN_MAX_TOKENS,
        )
