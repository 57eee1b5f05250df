"""Turns results into JSON, text and Markdown, and says what they were measured on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from compressor import machine
from compressor.errors import ArtifactError

MORE_PACKAGES = ("nvidia-pytriton", "tritonclient", "tokenizers", "grpcio")
MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A titled table of words."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal: first column to the left, the others to the right."""
        lines = [[" ".join(cell.split()) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [
            "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(cells))
            for cells in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in shown)])

    def markdown(self) -> str:
        """As GitHub renders it."""
        from compressor.page import plain  # matplotlib comes with it, which a process that measures need not load

        header, *rows = ([plain(cell) for cell in line] for line in (self.header, *self.rows))
        rule = ["---", *("---:" for _ in header[1:])]
        lines = [f"| {' | '.join(line)} |" for line in (header, rule, *rows)]
        return "\n".join([f"## {plain(self.title)}", "", *lines])


def number(value: float | int | None, digits: int = 2) -> str:
    """A number for a table; a dash if it was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percentiles(found: Mapping[str, Any]) -> str:
    """`p50 / p95 / p99` of a summary, in ms."""
    return " / ".join(number(found[name]) for name in ("p50_ms", "p95_ms", "p99_ms"))


class Begun:
    """Made before a measurement starts: how busy the machine is, and from then on what else it does."""

    def __init__(self) -> None:
        self.in_use_before_percent = machine.in_use_percent()
        self.other_work = machine.OtherWork()


def context(begun: Begun, *, command: str, seed: int | Sequence[int], threads: int) -> dict[str, Any]:
    """What every result says of its making, asked for at its end: command, seeds, machine, versions, other work."""
    before, meanwhile = begun.in_use_before_percent, begun.other_work.percent()
    versions = machine.versions()
    for name in MORE_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": command,
        **({"seed": seed} if isinstance(seed, int) else {"seeds": list(seed)}),
        "threads": threads,
        "cpu_in_use_before_percent": before,
        "other_work_meanwhile_percent": meanwhile,
        "machine_was_busy": max(before, meanwhile) > machine.BUSY_PERCENT,
        "machine": machine.fingerprint(),
        "versions": versions,
    }


def headline(result: Mapping[str, Any]) -> str:
    """The conditions in two lines."""
    where = result["machine"]
    busy = ": do not publish these times" if result["machine_was_busy"] else ""
    seed = f"seed {result['seed']}" if "seed" in result else f"seeds {', '.join(map(str, result['seeds']))}"
    return (
        f"{result['command']}\n"
        f"{where['processor']}, {where['cores']} cores ({' '.join(where['cpu_flags'])}), {result['threads']} threads, "
        f"{seed}, {other_work(result)}{busy}"
    )


def other_work(result: Mapping[str, Any]) -> str:
    """How much of the processor was in use by other work, in words."""
    return (
        f"other work used {result['cpu_in_use_before_percent']:.0f} % of the processor before and "
        f"{result['other_work_meanwhile_percent']:.0f} % meanwhile"
    )


def conditions(result: Mapping[str, Any]) -> list[str]:
    """What the figures hold for, and the versions that they were measured with; a paragraph each."""
    said = result["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = (
        [f"{what.replace('_', ' ')}: {how}." for what, how in said.items()]
        if isinstance(said, Mapping)
        else [f"{said}."]
    )
    return [*parts, f"Versions: {versions}."]


def to_json(result: Mapping[str, Any]) -> str:
    """One JSON object; a number that is none is null."""
    return json.dumps(_finite(result), indent=1, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def write(
    out: Path,
    name: str,
    result: Mapping[str, Any],
    tables: Sequence[Table],
    html: Callable[[Mapping[str, Any]], str] | None = None,
) -> None:
    """Write `<name>.json` and `<name>.md`, and last the page that `html` makes of the result, into the folder `out`.

    Raises ArtifactError if the disk refuses.
    """
    lines = headline(result).splitlines()
    verdict = [result["verdict"]] if "verdict" in result else []
    parts = [f"# {name}", *verdict, f"`{lines[0]}`", *lines[1:], *(table.markdown() for table in tables)]
    page = "\n\n".join([*parts, "## Conditions", *conditions(result)])
    _write(out / f"{name}.json", to_json(result))
    _write(out / f"{name}.md", page)
    if html is not None:
        _write(out / f"{name}.html", html(result))


def _write(file: Path, text: str) -> None:
    with refused(file.parent):
        partial = file.with_name(f".{file.name}.new")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(file)


@contextmanager
def refused(out: Path) -> Iterator[None]:
    """Make the folder `out`; what the disk refuses is an ArtifactError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ArtifactError(f"cannot write to --out {out}: {error.strerror}; choose another folder") from error


def ratio(above: float | int | None, below: float | int | None) -> float | None:
    """`above` / `below`; None if one of them was not measured or `below` is 0."""
    return None if above is None or not below else above / below
