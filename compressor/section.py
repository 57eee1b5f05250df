"""What the sections of a recipe have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base of every section: frozen, and no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def refuse_unused(section: Section, names: tuple[str, ...], why: str) -> None:
    """Raise ValueError if one of some settings, which have no use here, is not the default.

    Not by `model_fields_set`: a recipe that was written down with its defaults is read again.
    """
    for name in names:
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            raise ValueError(f"{name} is {value!r} and {why}, so it has no use; drop it")
