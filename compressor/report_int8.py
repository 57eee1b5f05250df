"""The INT8 section of the report: the candidates, what they lose in each batch, and what the model is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.bounds import MAX_SCORE_DIFFERENCE, Bounds, most_agreement
from compressor.evaluate import METRIC_NAMES


def int8_candidates(metrics: Mapping[str, Any], section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The INT8 schemes that were tried, fp32 first, with what each loses on validation, and why it is out if it is."""
    bounds, rows = Bounds.of(section), []
    for row in metrics["candidates"]:
        facts: dict[str, Any] = {"chosen": row["scheme"] == metrics["scheme"]}
        if not row["scheme"].startswith("fp32"):
            facts |= {
                "drop_points": 100 * row["drop"],
                "bound_points": 100 * bounds.max_metric_drop,
                "within_bound": bounds.hold(row),
                "faults": bounds.faults(row),
            }
        rows.append({**row, **facts})
    return rows


def int8_gates(
    metrics: Mapping[str, Any], section: Mapping[str, Any]
) -> list[tuple[str, float, str, float, str, bool]]:
    """What the chosen scheme had to hold: name, value, rule, bound, unit, result."""
    bounds = Bounds.of(section)
    row = next(row for row in metrics["candidates"] if row["scheme"] == metrics["scheme"])
    lost = f"{METRIC_NAMES[row['metric']]} lost on validation, in the batches where it is most"
    drop, most = 100 * row["drop"], 100 * bounds.max_metric_drop
    flips, most_flips = 100 * row["flips"], 100 * bounds.max_label_flips
    alike = "answers alike in every batch (validation texts whose answer changes)"
    found = [
        (f"close to fp32 ({lost})", drop, "at most", most, "points", bounds.drop_holds(row)),
        (alike, flips, "at most", most_flips, "%", bounds.flips_hold(row)),
    ]
    if (bound := bounds.max_batch_difference) is not None:
        name = "computes alike in every batch (largest difference of a validation text's logits)"
        found.append((name, row["batch_logit_difference"], "at most", bound, "logits", bounds.logits_hold(row)))
    if "agreement_fp32_95" in row:
        name = "answers as fp32 (validation texts, upper end of the 95 % interval)"
        least, upper = 100 * bounds.min_agreement, 100 * most_agreement(row)
        found.append((name, upper, "at least", least, "%", bounds.agreement_holds(row)))
    if (differs := row.get("score_difference_fp32")) is not None:
        name = "scores as fp32 (root mean square of the difference on validation, of the spread of fp32's)"
        found.append((name, 100 * differs, "at most", 100 * MAX_SCORE_DIFFERENCE, "%", bounds.scores_hold(row)))
    return [(f"INT8 ({row['scheme']}) {name}", *facts) for name, *facts in found]


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
