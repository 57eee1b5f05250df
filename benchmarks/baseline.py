"""Compares a result of `compare` with an earlier one: ratios, because times change with the machine and its day."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ratios import QUALITY, name_of
from benchmarks.report import MISSING, Table, number
from compressor.errors import ArtifactError, GateError

TOLERANCE = 0.1
QUALITY_TOLERANCE = 0.01  # a tenth of the speed is a bad day, a tenth of the accuracy another model


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

    It did if it is lower by more than `tolerance` (a share; of the task's metric `QUALITY_TOLERANCE` at most) and the
    intervals do not overlap; without an interval nothing is known. Raises ArtifactError if the earlier result is of
    another task, effort or number of threads, or has no ratio that this one has.
    """
    for key, what in (("task", "task"), ("quick", "--quick"), ("threads", "--threads")):
        if before[key] != result[key]:
            raise ArtifactError(
                f"--baseline {file} was measured with {what} {before[key]}, this run with {result[key]}; compare like "
                "with like"
            )
    was = {name_of(row): row for row in before["ratios"]}
    now = {name_of(row): row for row in result["ratios"]}
    rows = [_compared(now[name], was[name], tolerance) for name in now if name in was]
    if not rows:
        raise ArtifactError(f"--baseline {file} has no ratio that this run has; measure it again")
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
    if now["where"] in QUALITY:
        tolerance = min(tolerance, QUALITY_TOLERANCE)
    apart = None not in (now["interval_95"], was["interval_95"]) and now["interval_95"][1] < was["interval_95"][0]
    return {
        **{name: now[name] for name in ("figure", "where", "system", "than")},
        "was": was["ratio"],
        "was_95": was["interval_95"],
        "is": now["ratio"],
        "is_95": now["interval_95"],
        "fell_by": fell_by,
        "tolerance": tolerance,
        "is_regression": fell_by > tolerance and apart,
    }


def check_baseline(found: Mapping[str, Any]) -> None:
    """Raise GateError that names each ratio that regressed, and by how much."""
    worse = [
        f"{row['figure']} of {row['system']} against {row['than']} ({row['where']}) fell by "
        f"{100 * row['fell_by']:.1f} % (allowed {100 * row['tolerance']:.0f} %), from {row['was']:.2f} to "
        f"{row['is']:.2f} times"
        for row in found["compared"]
        if row["is_regression"]
    ]
    if worse:
        raise GateError(
            f"{len(worse)} of {len(found['compared'])} ratios regressed by more than allowed since {found['file']}: "
            f"{'; '.join(worse)}"
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
    rows += [[name, "", MISSING, "", "not measured now"] for name in found["only_before"]]
    return Table(f"Against {found['file']}", ["ratio", "was", "is", "change", ""], rows)
