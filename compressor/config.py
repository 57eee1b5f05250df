"""A recipe: what a build is made of. Frozen values, no I/O beyond reading the TOML file."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compressor.errors import ConfigError, nearest
from compressor.tasks import find_task

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]

STUDENT_INITS = ("project", "teacher-layers", "random")
RECIPES = ("auto", "laptop", "paper")


class Section(BaseModel):
    """Base of every section: frozen, and no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TaskConfig(Section):
    """Which task, and how long its texts may be."""

    name: str
    """A row of `compressor tasks`."""
    max_tokens: Annotated[int, Field(ge=8, le=512)] | None = None
    """Longest input in word pieces; the task's own limit if not given."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        try:
            return find_task(name).name
        except ConfigError as error:
            raise ValueError(str(error)) from error  # pydantic puts it beside the other mistakes


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
    """`project`, `teacher-layers`, `random`, or the source of a general student."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> StudentConfig:
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of heads ({self.heads})")
        return self


class DistillConfig(Optimisation):
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
    student: StudentConfig
    distill: Annotated[tuple[DistillConfig, ...], Field(min_length=1, strict=False)]
    export: ExportConfig = ExportConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    publish: PublishConfig = PublishConfig()

    @property
    def max_tokens(self) -> int:
        """Longest input in word pieces."""
        return self.task.max_tokens or find_task(self.task.name).max_tokens


def recipe_text(task: str, recipe: str) -> str:
    """The TOML text of a recipe that comes with the package."""
    find_task(task)
    folder = resources.files("compressor") / "recipes"
    return (folder / f"{task}-{recipe}.toml").read_text(encoding="utf-8")


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
    if task is not None and config.task.name != find_task(task).name:
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
        return f"{where} is missing"
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
        "student": StudentConfig,
        "distill": DistillConfig,
        "export": ExportConfig,
        "quantize": QuantizeConfig,
        "publish": PublishConfig,
    }
    section = sections[location[0]] if len(location) > 1 else BuildConfig
    return list(section.model_fields)
