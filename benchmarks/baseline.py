"""Compares a result of `compare` with an earlier one: ratios, because times change with the machine and its day."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ratios import name_of
from benchmarks.report import Table, number
from compressor.errors import ArtifactError, GateError

TOLERANCE = 0.1


def read_baseline(file: Path, schema_version: int) -> dict[str, Any]:
    """An earlier result. Raises ArtifactError if the file is none, or one of another form."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"--baseline {file} cannot be read ({error}); give the compare.json that --out wrote"
        ) from error
    kind, version = (found.get("benchmark"), found.get("schema_version")) if isinstance(found, dict) else (None, None)
    if (kind, version) != ("compare", schema_version):
        raise ArtifactError(
            f"--baseline {file} is a result of {kind!r} in version {version} of its form; it must be of 'compare' in "
            f"version {schema_version}: measure it again"
        )
    return dict(found)


def against_baseline(
    result: Mapping[str, Any], before: Mapping[str, Any], *, file: Path, tolerance: float
) -> dict[str, Any]:
    """Each ratio that both have, and whether it regressed.

    It did if it is lower by more than `tolerance` (a share) and the intervals, where there are any, do not overlap.
    Raises ArtifactError if the earlier result is of another task.
    """
    if before["task"] != result["task"]:
        raise ArtifactError(f"--baseline {file} is of the task {before['task']}, this run of {result['task']}")
    was = {name_of(row): row for row in before["ratios"]}
    now = {name_of(row): row for row in result["ratios"]}
    rows = [_compared(now[name], was[name], tolerance) for name in now if name in was]
    return {
        "file": str(file),
        "command": before["command"],
        "is_same_machine": before["machine"] == result["machine"],
        "tolerance": tolerance,
        "compared": rows,
        "only_before": [", ".join(name) for name in was if name not in now],
        "only_now": [", ".join(name) for name in now if name not in was],
    }


def _compared(now: Mapping[str, Any], was: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    fell_by = 1 - now["ratio"] / was["ratio"]
    highest = now["ratio"] if now["interval_95"] is None else now["interval_95"][1]
    lowest = was["ratio"] if was["interval_95"] is None else was["interval_95"][0]
    return {
        **{name: now[name] for name in ("figure", "where", "system", "than")},
        "was": was["ratio"],
        "was_95": was["interval_95"],
        "is": now["ratio"],
        "is_95": now["interval_95"],
        "fell_by": fell_by,
        "is_regression": fell_by > tolerance and highest < lowest,
    }


def check_baseline(found: Mapping[str, Any]) -> None:
    """Raise GateError that names each ratio that regressed, and by how much."""
    worse = [
        f"{row['figure']} of {row['system']} against {row['than']} ({row['where']}) fell by "
        f"{100 * row['fell_by']:.1f} %, from {row['was']:.2f} to {row['is']:.2f} times"
        for row in found["compared"]
        if row["is_regression"]
    ]
    if worse:
        raise GateError(
            f"{len(worse)} of {len(found['compared'])} ratios regressed by more than {100 * found['tolerance']:.0f} % "
            f"since {found['file']}: {'; '.join(worse)}"
        )


def table(found: Mapping[str, Any]) -> Table:
    """What is compared, the worst first."""
    rows = [
        [
            f"{row['figure']}, {row['where']}, {row['system']} / {row['than']}",
            number(row["was"]),
            number(row["is"]),
            f"{-100 * row['fell_by']:+.1f} %",
            "REGRESSED" if row["is_regression"] else "",
        ]
        for row in sorted(found["compared"], key=lambda row: -row["fell_by"])
    ]
    return Table(f"Against {found['file']}", ["ratio", "was", "is", "change", ""], rows)
