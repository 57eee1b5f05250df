"""The reference of the settings says what the models of a recipe's sections are."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compressor.config import BuildConfig

TEXT = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
WRITTEN = {
    heading.strip("[]"): body
    for heading, body in re.findall(r"^## `(.*?)`\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}


def parts(annotation: Any) -> list[Any]:
    """Everything that an annotation is made of."""
    return [annotation, *(part for each in get_args(annotation) for part in parts(each))]


SECTIONS = {
    name: part
    for name, field in BuildConfig.model_fields.items()
    for part in parts(field.annotation)
    if isinstance(part, type) and issubclass(part, BaseModel)
}


def bounds(field: FieldInfo) -> dict[str, float]:
    """The least and greatest number that a field takes, by the names of the comparisons."""
    within = [part for part in parts(field.annotation) if isinstance(part, FieldInfo)]  # of what may also be none
    rules = [rule for each in (field, *within) for rule in each.metadata]
    found = ((name, getattr(rule, name, None)) for name in ("ge", "gt", "le", "lt") for rule in rules)
    return {name: float(value) for name, value in found if value is not None}


IN_WORDS = {
    ("ge",): "{ge:g} or more",
    ("gt",): "above {gt:g}",
    ("ge", "le"): "{ge:g} to {le:g}",
    ("gt", "le"): "above {gt:g}, to {le:g}",
    ("gt", "lt"): "between {gt:g} and {lt:g}",
}


def values_in_words(field: FieldInfo) -> str | None:
    """What a field of one number, a truth value or a text takes; None for choices and lists."""
    kinds = {part for part in parts(field.annotation) if part in (int, float, bool, str)}
    if any(get_origin(part) in (Literal, tuple) for part in parts(field.annotation)):
        return None
    if kinds <= {bool, str}:
        return "true, false" if bool in kinds else "text"
    limits = bounds(field)
    return IN_WORDS[tuple(limits)].format(**limits)


def test_every_section_is_there() -> None:
    assert set(WRITTEN) == set(SECTIONS)
    assert [name for name in BuildConfig.model_fields if name not in SECTIONS] == ["seed"]
    assert f"`seed` (0 to {2**32 - 1}, {BuildConfig.model_fields['seed'].default})" in TEXT


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_has_each_setting_with_its_default_and_its_values(name: str) -> None:
    lines = [line for line in WRITTEN[name].splitlines() if line.startswith("| `")]
    assert max(map(len, lines)) <= 160
    rows = {
        key.strip("`"): (values, default) for key, values, default, _ in (line[2:-2].split(" | ") for line in lines)
    }
    assert len(lines) == len(rows)
    assert set(rows) == set(SECTIONS[name].model_fields)
    block = re.search(r"```toml\n(.*?)```", WRITTEN[name], re.DOTALL)
    below = tomllib.loads(block[1]) if block else {}
    for key, field in SECTIONS[name].model_fields.items():
        values, default = rows[key]
        assert values == (values_in_words(field) or values), key
        wanted = list(field.default) if isinstance(field.default, tuple) else field.default
        if field.is_required() or wanted is None:
            assert default == ("required" if field.is_required() else "none"), key
        else:
            assert (below[key] if default == "below" else tomllib.loads(f"x = {default.strip('`')}")["x"]) == wanted, (
                key
            )
        where = WRITTEN[name] if default == "below" else values
        choices = [value for part in parts(field.annotation) if get_origin(part) is Literal for value in get_args(part)]
        assert [value for value in choices if not re.search(rf'[`"]{value}[`"]', where)] == [], key
