"""Recipes: TOML text, by name or from a file, checked into a BuildConfig; every mistake in one report."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pydantic import ValidationError

from compressor.config import (
    AdaptConfig,
    AugmentConfig,
    BuildConfig,
    CorpusConfig,
    DistillConfig,
    ExportConfig,
    FinetuneConfig,
    GeneralConfig,
    PublishConfig,
    QuantizeConfig,
    StudentConfig,
)
from compressor.errors import ConfigError, nearest
from compressor.section import Section
from compressor.tasks import TaskConfig, find_task

RECIPES = ("auto", "laptop", "paper")


def augment_config(**settings: Any) -> AugmentConfig:
    """The settings of an augmentation by the keys of a recipe's [augment]. Raises ConfigError that lists mistakes."""
    try:
        return AugmentConfig.model_validate(settings)
    except ValidationError as error:
        mistakes = [_sentence({**item, "loc": ("augment", *item["loc"])}) for item in error.errors()]
        raise ConfigError("; ".join(mistakes)) from error


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
        text = path.read_text(encoding="utf-8-sig")
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
    message = item["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if item["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where} is {item['input']!r}; {message[0].lower()}{message[1:]}"


def _keys_beside(location: list[str]) -> list[str]:
    """Keys that a section allows where an unknown one was found."""
    sections: dict[str, type[Section]] = {
        "task": TaskConfig,
        "corpus": CorpusConfig,
        "augment": AugmentConfig,
        "adapt": AdaptConfig,
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
