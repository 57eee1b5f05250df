"""What the report of a build says of single answers: where student and teacher disagree, and how far to trust them.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import softmax

from compressor.evaluate import Labels, Logits, answers, same_answers
from compressor.statistics import calibration
from compressor.tasks import Task

EXAMPLES = 10  # texts shown on which student and teacher disagree
TEXT_LIMIT = 300  # characters of such a text


def calibrations(task: Task, logits: Mapping[str, Logits], label_N: Labels) -> dict[str, Any] | None:
    """How well the confidence of each system fits its answers on the test rows; None for a regression, which has none.

    By system what `calibration` gives, and `overconfidence`: mean confidence less the share of right answers.
    """
    if task.is_regression:
        return None
    systems = {}
    for name, logits_NC in logits.items():
        probability_NC = softmax(np.float64(logits_NC), axis=1)
        right = float((probability_NC.argmax(axis=1) == label_N).mean())
        over = float(probability_NC.max(axis=1).mean()) - right
        systems[name] = {**calibration(probability_NC, label_N), "overconfidence": over}
    return {"split": "test", "rows": len(label_N), "systems": systems}


def disagreements(
    task: Task,
    texts: list[str],
    label_N: Labels,
    logits: Mapping[str, Logits],
    *,
    split: str = "test",
    most: int = EXAMPLES,
) -> dict[str, Any]:
    """Texts that INT8 student and teacher answer differently: those that both are surest of, or furthest apart.

    `logits` are those of "teacher" and "int8"; logarithms of probabilities do as well. At most `most` texts are shown.
    """
    apart = np.flatnonzero(~same_answers(task, logits["teacher"], logits["int8"]))
    found = {kind: answers(task, logits[kind]) for kind in ("teacher", "int8")}
    if task.is_regression:
        weight_N = np.abs(found["teacher"] - found["int8"])
    else:
        surety = {kind: softmax(np.float64(logits[kind]), axis=1).max(axis=1) for kind in found}
        weight_N = np.minimum(surety["teacher"], surety["int8"])
    examples = []
    for row in apart[np.argsort(-weight_N[apart], kind="stable")][:most]:
        text = texts[row] if len(texts[row]) <= TEXT_LIMIT else texts[row][:TEXT_LIMIT] + "…"
        facts = {"row": int(row), "text": text, "label": _answer(task, label_N[row])}
        for kind, answer_N in found.items():
            facts[kind] = _answer(task, answer_N[row])
            if not task.is_regression:
                facts[kind] += f", {100 * surety[kind][row]:.1f} %"
        examples.append(facts)
    return {"split": split, "count": len(apart), "rows": len(texts), "examples": examples}


def _answer(task: Task, value: Any) -> str:
    return f"{value:.2f}" if task.is_regression else task.labels[int(value)]
