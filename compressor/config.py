"""A recipe: what a build is made of. Frozen values, no I/O beyond reading the TOML file."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compressor.errors import ConfigError, nearest
from compressor.tasks import Task, find_task

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]

STUDENT_INITS = ("project", "teacher-layers", "random", "general")
RECIPES = ("auto", "laptop", "paper")


class Section(BaseModel):
    """Base of every section: frozen, and no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
REGRESSION_METRICS = ("pearson", "spearman")
OWN_MAX_TOKENS = 128


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
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)] | None = None
    """Names of the user's labels; if not given, those that the training file holds, in alphabetical order."""
    metric: Metric = "accuracy"
    """What the user's models are chosen by; `pearson` and `spearman` make it a regression."""

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
        if self.labels is not None and len({label.strip().casefold() for label in self.labels}) < len(self.labels):
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


class CorpusConfig(Section):
    """Where the labelled text comes from and how it is split."""

    source: str
    """`index:`, `hub:`, or the path of a file or folder."""
    undecided: Annotated[float, Field(ge=0)] = 0.5
    """Rated texts whose mean rating is smaller than this in size are left out (ratings run from -4 to 4)."""
    validation: Rate = 0.1
    """Share of the rows held out to choose by, where the source has no validation split."""
    test: Rate = 0.1
    """Share of the rows held out to report on, where the source is one file."""

    @model_validator(mode="after")
    def _some_rows_are_left(self) -> CorpusConfig:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation is {self.validation} and test is {self.test}; together they must be below 1")
        return self


class AugmentConfig(Section):
    """TinyBERT's word replacement."""

    copies: Positive
    """Augmented texts asked for per original one (N_a in the paper)."""
    replace_probability: Rate = 0.4
    """Chance of each eligible word to be replaced in a copy (p_t)."""
    candidates: Positive = 15
    """Replacement words considered per word (K)."""
    vectors: str
    """Word vectors: `package:` or the path of a GloVe text file."""
    masked_lm: str | None = None
    """Masked language model for words that are one word piece; none = word vectors for every word."""


Precision = Literal["auto", "fp32", "bf16", "fp16"]


class Optimisation(Section):
    """What every training stage needs to know."""

    epochs: Annotated[float, Field(gt=0, le=1000)]
    """Passes over the rows; a fraction stops part of the way."""
    learning_rate: Rate
    """Peak learning rate of AdamW."""
    batch_size: Positive = 32
    """Rows per optimiser step, over all processes together."""
    schedule: Literal["linear", "constant"] = "linear"
    """Decay of the learning rate after the warm-up."""
    warmup: Fraction = 0.1
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: Fraction = 0.01
    """Decoupled weight decay; biases and LayerNorm have none."""
    precision: Precision = "auto"
    """Arithmetic of the forward pass; `auto`: bf16 where the hardware has it, else fp16 on a GPU and fp32 on a CPU."""
    accumulate: Positive = 1
    """Parts that each process cuts its rows of a step into, to need less memory; the result is the same."""


class FinetuneConfig(Optimisation):
    """The teacher."""

    base: str
    """Pretrained encoder that the teacher starts from."""
    teacher: str | None = None
    """A checkpoint already fine-tuned, adopted instead of training one (also `--teacher`)."""


class StudentConfig(Section):
    """Shape and start of the student; the defaults are TinyBERT's 4 layers."""

    layers: Positive = 4
    hidden: Positive = 312
    heads: Positive = 12
    intermediate: Positive = 1200
    init: str = "project"
    """`project`, `teacher-layers`, `random`, `general` (the recipe's [general]), or the source of a general student."""
    layer_map: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    """Teacher layer, from 1, that each student layer learns from; if not given, the last of each of equal parts."""

    @model_validator(mode="after")
    def _fits_together(self) -> StudentConfig:
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of heads ({self.heads})")
        if self.layer_map is not None:
            if len(self.layer_map) != self.layers:
                raise ValueError(
                    f"layer_map has {len(self.layer_map)} entries; it needs one for each of {self.layers} layers"
                )
            if list(self.layer_map) != sorted(set(self.layer_map)):
                raise ValueError(f"layer_map is {list(self.layer_map)}; its entries must rise")
        return self


class Imitation(Optimisation):
    """How a student learns a teacher's inside: TinyBERT's embedding, hidden and attention terms."""

    attention: Literal["scores", "relations"] = "scores"
    """Scores before softmax, head by head (TinyBERT), or relations of queries, keys and values (MiniLMv2)."""
    relation_heads: Positive = 12
    """Heads that both models' widths are cut into for relations."""
    projection: Literal["per-layer", "shared"] = "per-layer"
    """Maps from the student's to the teacher's width: one for each layer (the paper) or one for all (its code)."""
    normalisation: Literal["tokens", "published"] = "tokens"
    """Means over real tokens, or as the published code has them: padding included, cross-entropy over classes too."""


class GeneralConfig(Imitation):
    """General distillation: a pretrained teacher's inside, learnt on any text."""

    source: str
    """Text: `package:`, `hub:`, or the path of .txt (a document a line), .tsv, .csv, .jsonl or .parquet files."""
    column: str = "text"
    """The column that holds the text in files that have columns."""
    teacher: str | None = None
    """Pretrained encoder to learn from; finetune.base if not given."""
    init: Literal["project", "teacher-layers", "random"] = "random"
    """What the general student starts from."""
    block_tokens: Annotated[int, Field(ge=8, le=512)] = 128
    """Length of the blocks that the text is packed into, [CLS] and [SEP] included."""


class DistillConfig(Imitation):
    """One stage of distillation."""

    objective: Literal["intermediate", "prediction"]
    """Which of TinyBERT's two task stages this is."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides both models' logits in the soft cross-entropy."""


class ExportConfig(Section):
    """The ONNX graph and its parity gate."""

    format: Literal["onnx"] = "onnx"
    max_logit_difference: Annotated[float, Field(gt=0)] = 1e-4
    """Parity gate: largest difference to PyTorch on any validation text."""


class QuantizeConfig(Section):
    """The INT8 candidates and their accuracy gate."""

    candidates: Annotated[tuple[Literal["dynamic", "static"], ...], Field(min_length=1, strict=False)] = (
        "dynamic",
        "static",
    )
    """INT8 schemes to try; the fastest within the bound wins."""
    max_metric_drop: Fraction = 0.005
    """Accuracy gate: largest loss on the validation set against the fp32 student."""
    calibration_rows: Positive = 512
    """Training texts that set the activation ranges of the static scheme."""


class PublishConfig(Section):
    """The model repository."""

    runtime: Literal["embedded"] = "embedded"
    max_batch_size: Positive = 64
    teacher: bool = True
    """Also publish the teacher, for comparison through the same server."""


class BuildConfig(Section):
    """A whole recipe."""

    task: TaskConfig
    seed: int = 42
    """Seed of the splits, the augmentation, the order of rows, dropout and new weights."""
    corpus: CorpusConfig
    augment: AugmentConfig | None = None
    finetune: FinetuneConfig
    general: GeneralConfig | None = None
    student: StudentConfig
    distill: Annotated[tuple[DistillConfig, ...], Field(min_length=1, strict=False)]
    export: ExportConfig = ExportConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    publish: PublishConfig = PublishConfig()

    @property
    def max_tokens(self) -> int:
        """Longest input in word pieces."""
        return self.task.max_tokens or self.task.row().max_tokens

    @model_validator(mode="after")
    def _sections_fit_together(self) -> BuildConfig:
        is_regression = self.task.is_regression if self.task.is_own else find_task(self.task.name).is_regression
        if self.augment is not None and is_regression:
            raise ValueError(
                f"{self.task.name} is a regression, and [augment] would copy scores to changed texts; drop it"
            )
        if self.student.init == "general" and self.general is None:
            raise ValueError('student.init is "general" and the recipe has no [general]; add one')
        return self


def recipe_text(task: str, recipe: str) -> str:
    """The TOML text of a recipe that comes with the package, for one task."""
    known = find_task(task)
    folder = resources.files("compressor") / "recipes"
    text, table = ((folder / f"{name}.toml").read_text(encoding="utf-8") for name in (recipe, "tasks"))
    settings = tomllib.loads(table)[task]
    text = Template(text).substitute(known.model_dump() | settings)
    if known.is_regression:
        why = "a changed text would keep its original's score; the paper has copies in its first stage only"
        text = _replaced(text, "augment", f"# No [augment]: {why}.")
    elif recipe == "laptop" and not settings["copies"]:
        text = _replaced(text, "augment", "# No [augment]: there are rows enough.")
    if recipe == "laptop" and task != "sst2":  # nothing comes with the package or from the index
        source = '# source = "FOLDER"  # with train, dev and test files; or give --data FOLDER'
        text = _replaced(text, "corpus", f"[corpus]\n{source}\nvalidation = {settings['validation']}")
    return text


def _replaced(text: str, section: str, lines: str) -> str:
    """A recipe's text with other lines in the place of a section."""
    return re.sub(rf"^\[{section}\]\n(?:.+\n)+", f"{lines}\n", text, flags=re.MULTILINE)


def read_recipe(text: str, overrides: tuple[str, ...] = (), *, name: str) -> BuildConfig:
    """Parse TOML `text`, apply `section.key=value` overrides, and check everything.

    Raises ConfigError that lists every mistake at once; `name` says where the text came from.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {name} is not TOML: {error}") from error
    for override in overrides:
        _apply(values, override)
    try:
        return BuildConfig.model_validate(values)
    except ValidationError as error:
        mistakes = "; ".join(_sentence(item) for item in error.errors())
        raise ConfigError(f"recipe {name}: {mistakes}") from error


def load_recipe(task: str | None, recipe: str, overrides: tuple[str, ...] = ()) -> BuildConfig:
    """A recipe by name (`laptop`, `paper`) for `task`, or a TOML file by path.

    Raises ConfigError if there is no such recipe, or if the file is for another task than `task`.
    """
    if recipe in RECIPES and recipe != "auto":
        if task is None:
            raise ConfigError(f"recipe {recipe!r} needs a task; give --task, one of `compressor tasks`")
        return read_recipe(recipe_text(task, recipe), overrides, name=f"{task} {recipe}")
    path = Path(recipe)
    if path.suffix != ".toml":
        raise ConfigError(f"unknown recipe {recipe!r}; {nearest(recipe, RECIPES)} (or the path of a .toml file)")
    if not path.is_file():
        raise ConfigError(f"recipe file {recipe} does not exist; `compressor recipe sst2 > {path.name}` writes one")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe file {recipe} cannot be read: {error}") from error
    config = read_recipe(text, overrides, name=recipe)
    if task not in (None, config.task.name):
        raise ConfigError(f"recipe {recipe} is for task {config.task.name!r}, not {task!r}; drop --task or change one")
    return config


def _apply(values: dict[str, Any], override: str) -> None:
    """Set `a.b.0.c=value` in nested TOML values, in place; the value is read as TOML, else as a string."""
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} has no value; write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    *parents, last = key.split(".")
    node: Any = values
    for part in parents:
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(f"--set {key}: there is no entry {part!r}; entries run from 0 to {len(node) - 1}")
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
    if not isinstance(node, dict):
        raise ConfigError(f"--set {key}: {'.'.join(parents)} is not a section; write --set section.key=value")
    node[last] = value


def _sentence(item: Any) -> str:
    """One pydantic error as: key, value found, rule."""
    location = [str(part) for part in item["loc"]]
    where = ".".join(location) or "the recipe"
    if item["type"] == "extra_forbidden":
        return f"unknown key {where!r}; {nearest(location[-1], _keys_beside(location))}"
    if item["type"] == "missing":
        remedy = "; give --data FOLDER, a folder with train, dev and test files" if where == "corpus.source" else ""
        return f"{where} is missing{remedy}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where} is {item['input']!r}; {message[0].lower()}{message[1:]}"


def _keys_beside(location: list[str]) -> list[str]:
    """Keys that a section allows where an unknown one was found."""
    sections: dict[str, type[Section]] = {
        "task": TaskConfig,
        "corpus": CorpusConfig,
        "augment": AugmentConfig,
        "finetune": FinetuneConfig,
        "general": GeneralConfig,
        "student": StudentConfig,
        "distill": DistillConfig,
        "export": ExportConfig,
        "quantize": QuantizeConfig,
        "publish": PublishConfig,
    }
    section = sections[location[0]] if len(location) > 1 else BuildConfig
    return list(section.model_fields)
