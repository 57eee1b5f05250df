"""The INT8 section of the report: the candidates, what they lose in each batch, and what the model is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.evaluate import METRIC_NAMES

TOLERANCE = 1e-12  # for the rounding of shares of rows


def int8_candidates(metrics: Mapping[str, Any], section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The INT8 schemes that were tried, fp32 first, with what each loses on validation and the bounds."""
    bounds = {"drop": section["max_metric_drop"], "flips": section["max_label_flips"]}
    min_agreement = section.get("min_agreement", 0.0)  # runs of old versions have none
    rows = []
    for row in metrics["candidates"]:
        facts: dict[str, Any] = {"chosen": row["scheme"] == metrics["scheme"]}
        if not row["scheme"].startswith("fp32"):
            facts |= {
                "drop_points": 100 * row["drop"],
                "bound_points": 100 * bounds["drop"],
                "bound_flips": bounds["flips"],
                "bound_agreement": min_agreement,
                "within_bound": all(row[name] <= bound + TOLERANCE for name, bound in bounds.items())
                and _agreement(row) >= min_agreement,
            }
        rows.append({**row, **facts})
    return rows


def int8_gates(candidates: list[dict[str, Any]]) -> list[tuple[str, float, str, float, str, bool]]:
    """What the chosen scheme had to hold: name, value, rule, bound, unit, result."""
    found = []
    for row in candidates:
        if row["chosen"]:
            lost = f"{METRIC_NAMES[row['metric']]} lost on validation, in the batches where it is most"
            name = f"INT8 ({row['scheme']}) close to fp32 ({lost})"
            passed = row["drop_points"] <= row["bound_points"] + 100 * TOLERANCE
            found.append((name, row["drop_points"], "at most", row["bound_points"], "points", passed))
            name = f"INT8 ({row['scheme']}) answers alike in every batch (validation texts whose answer changes)"
            flips, bound = 100 * row["flips"], 100 * row["bound_flips"]
            found.append((name, flips, "at most", bound, "%", flips <= bound + 100 * TOLERANCE))
            if "agreement_fp32_95" in row:
                name = f"INT8 ({row['scheme']}) answers as fp32 (validation texts, upper end of the 95 % interval)"
                upper, bound = 100 * _agreement(row), 100 * row["bound_agreement"]
                found.append((name, upper, "at least", bound, "%", upper >= bound))
    return found


def _agreement(row: Mapping[str, Any]) -> float:
    """The most that the share of answers as fp32's may be; a regression has no such gate."""
    return float(row.get("agreement_fp32_95", [1.0, 1.0])[1])


def int8_facts(metrics: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """What the chosen model is made of and for: size by part, processor, vocabulary, comparisons on validation."""
    parts = metrics["size_by_part"]
    return {
        "size_by_part": {part: {name: parts[name].get(part, 0) for name in parts} for part in parts["int8"]},
        "vocabulary": metrics.get("vocabulary"),
        "validation_pairs": metrics["validation_pairs"],
        "max_label_flips": section["max_label_flips"],
        "speed_warning": metrics.get("speed_warning", ""),
        **{name: metrics[name] for name in ("target_cpu", "built_on_cpu", "weight_bits", "host_warning")},
    }
