"""Shows a result. The only module here that writes results to standard output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from benchmarks.report import Table


def command() -> str:
    """What was asked for, as it can be typed again."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def show(
    result: Mapping[str, Any],
    tables: Sequence[Table],
    out: Path | None,
    *,
    quick: bool,
    as_json: bool,
    html: Callable[[Mapping[str, Any]], str] | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Print a result, as JSON or as text, and write it to `out` if there is one, with the page `html` of it.

    Then `check` it, which raises GateError if a target is missed; a quick look has none.
    """
    from benchmarks import report
    from benchmarks.conditions import CONDITIONS

    result = {"conditions": CONDITIONS.get(result["benchmark"]), **result, "quick": quick}
    verdict = [result["verdict"]] if "verdict" in result else []
    text = "\n\n".join([*verdict, report.headline(result), *(table.text() for table in tables)])
    typer.echo(report.to_json(result) if as_json else text)
    if out is not None:
        report.write(out, result["benchmark"], result, tables, html)
    if check is not None and not quick:
        check(result)
