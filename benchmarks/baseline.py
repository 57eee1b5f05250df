"""Compares a result of `compare` with an earlier one: ratios, because times change with the machine and its day."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from benchmarks.ratios import QUALITY, name_of
from benchmarks.report import MISSING, Table, number
from compressor.errors import ArtifactError, GateError

TOLERANCE = 0.1
QUALITY_TOLERANCE = 0.01  # a tenth of the speed is a bad day, a tenth of the accuracy another model

Times = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Ratio(BaseModel):
    figure: str
    where: str
    system: str
    than: str
    ratio: Times
    interval_95: tuple[Times, Times] | None


class _Before(BaseModel):
    """What is read of an earlier result."""

    command: str
    machine: dict[str, Any]
    ratios: list[_Ratio]


def read_baseline(file: Path, schema_version: int, **alike: Any) -> dict[str, Any]:
    """What counts of an earlier result: command, machine and ratios. All that can be wrong with it is found here.

    `alike` are keys that it must have as they are now. Raises ArtifactError if the file is no result, or one of another
    form, or was measured otherwise.
    """
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
    for key, now in alike.items():
        if found.get(key) != now:
            raise ArtifactError(
                f"--baseline {file} was measured with {key} {found.get(key)}, this run would be with {now}; compare "
                "like with like"
            )
    try:
        before = _Before.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"--baseline {file} has a fault at {where} ({first['msg']}); measure it again") from error
    if not any(row.where == "file" for row in before.ratios):
        raise ArtifactError(f"--baseline {file} lacks the ratios of size, which every result has; measure it again")
    return before.model_dump()


def against_baseline(
    result: Mapping[str, Any], before: Mapping[str, Any], *, file: Path, tolerance: float
) -> dict[str, Any]:
    """Each ratio that both have, and whether it regressed; `before` is what `read_baseline` gives.

    A speed or size did if its ratio is lower by more than `tolerance` (a share), and on the logarithm by more than the
    intervals' half-widths, squared, added and rooted: the 95 % interval of the change. Without an interval nothing is
    known. The task's metric did if it is lower by more than `QUALITY_TOLERANCE`, or
    `tolerance` if that is less: the same rows were answered, so that no interval excuses it. It is `lost` if both
    systems were measured and it has no ratio any more: one of them is no longer above 0.
    """
    was = {name_of(row): row for row in before["ratios"]}
    now = {name_of(row): row for row in result["ratios"]}
    rows = [_compared(now[name], was[name], tolerance) for name in now if name in was]
    measured = {*result["in_process"], *result["served"]}
    gone = [name for name in was if name not in now]
    return {
        "file": str(file),
        "command": before["command"],
        "is_same_machine": before["machine"] == result["machine"],
        "tolerance": tolerance,
        "compared": rows,
        "lost": [", ".join(name) for name in gone if name[1] in QUALITY and measured.issuperset(name[2:])],
        "only_before": [", ".join(name) for name in gone],
        "only_now": [", ".join(name) for name in now if name not in was],
    }


def _compared(now: Mapping[str, Any], was: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    fell_by = 1 - now["ratio"] / was["ratio"]
    if now["where"] in QUALITY:
        tolerance, counts = min(tolerance, QUALITY_TOLERANCE), True
    else:
        widths = [_half_width(row["interval_95"]) for row in (was, now)]
        counts = math.log(was["ratio"] / now["ratio"]) > math.hypot(*widths)
    return {
        **{name: now[name] for name in ("figure", "where", "system", "than")},
        "was": was["ratio"],
        "was_95": was["interval_95"],
        "is": now["ratio"],
        "is_95": now["interval_95"],
        "fell_by": fell_by,
        "tolerance": tolerance,
        "is_regression": fell_by > tolerance and counts,
    }


def _half_width(interval: tuple[float, float] | None) -> float:
    """Of an interval, on the logarithm."""
    return math.inf if interval is None else math.log(interval[1] / interval[0]) / 2


def check_baseline(found: Mapping[str, Any]) -> None:
    """Raise GateError that names each ratio that regressed, and by how much."""
    worse = [
        f"{row['figure']} of {row['system']} against {row['than']} ({row['where']}) fell by "
        f"{100 * row['fell_by']:.1f} % (allowed {100 * row['tolerance']:g} %), from {row['was']:.2f} to "
        f"{row['is']:.2f} times"
        for row in found["compared"]
        if row["is_regression"]
    ]
    worse += [f"{name} has no ratio any more: one of the two is not above 0" for name in found["lost"]]
    if worse:
        count = len(found["compared"]) + len(found["lost"])
        raise GateError(
            f"{len(worse)} of {count} ratios regressed by more than allowed since {found['file']}: {'; '.join(worse)}"
        )


def table(found: Mapping[str, Any]) -> Table:
    """What is compared, the worst first; the title says what the comparison is worth."""
    rows = [
        [
            f"{row['figure']}, {row['where']}, {row['system']} / {row['than']}",
            number(row["was"]),
            number(row["is"]),
            f"{-100 * row['fell_by']:+.1f} %",
            f"{-100 * row['tolerance']:g} %",
            "REGRESSED" if row["is_regression"] else "",
        ]
        for row in sorted(found["compared"], key=lambda row: -row["fell_by"])
    ]
    rows.extend(
        [name, "", MISSING, "", "", "REGRESSED" if name in found["lost"] else "not measured now"]
        for name in found["only_before"]
    )
    alone = len(found["only_before"]) + len(found["only_now"])
    title = f"Against {found['file']}{'' if found['is_same_machine'] else ', measured on another machine'}"
    title += f"; {alone} ratios are of one of the two alone and not compared" if alone else ""
    return Table(title, ["ratio", "was", "is", "change", "allowed", ""], rows)
