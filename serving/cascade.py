"""Chooses when a student hands a text over to its teacher.

shape legend: N rows, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """A student that asks its teacher where it is unsure."""

    threshold: float
    """The student answers alone if its best label has at least this probability; 0: always, more than 1: never."""

    accuracy: float
    """Of the cascade on the rows that the threshold was chosen on."""

    student_accuracy: float
    teacher_accuracy: float

    escalated: float
    """Share of these rows that the teacher answers."""

    rows: int


def choose_threshold(
    student: Sequence[dict[str, float]],
    teacher: Sequence[dict[str, float]],
    labels: Sequence[str],
    accuracy: float | None,
) -> Cascade:
    """Return the cascade that asks the teacher least often of those that reach an accuracy on labelled rows.

    `student` and `teacher` hold the probability of each label for each row, `labels` the right one. None for `accuracy`
    asks for what the teacher reaches alone. Raises ModelError if no threshold reaches it.
    """
    import numpy as np  # here: a command line that only wants its help does without

    sure_N = np.array([max(row.values()) for row in student])
    is_right_student_N, is_right_teacher_N = (_is_right(rows, labels) for rows in (student, teacher))
    wanted = float(is_right_teacher_N.mean()) if accuracy is None else accuracy
    order = np.argsort(sure_N, kind="stable")
    # With the k least sure rows at the teacher, k from 0 to N; rows that are equally sure go together.
    handed = np.concatenate([[0], np.cumsum(is_right_teacher_N[order])])
    kept = np.concatenate([[0], np.cumsum(is_right_student_N[order][::-1])])[::-1]
    accuracies = (handed + kept) / len(labels)
    edges = np.concatenate([[True], sure_N[order][1:] > sure_N[order][:-1], [True]])
    enough = np.flatnonzero((accuracies >= wanted - 1e-12) & edges)
    if not enough.size:
        raise ModelError(
            f"no cascade of these models reaches an accuracy of {wanted:.4f} on {len(labels)} rows; the best has "
            f"{accuracies[edges].max():.4f}: ask for that, or improve the teacher"
        )
    count = int(enough[0])
    # In the middle between two rows: the server's float32 must not move one across.
    edge = float(sure_N[order][max(0, count - 1) : count + 1].mean())
    threshold = 0.0 if count == 0 else edge if count < len(labels) else 1.1
    return Cascade(
        threshold=threshold,
        accuracy=float(accuracies[count]),
        student_accuracy=float(is_right_student_N.mean()),
        teacher_accuracy=float(is_right_teacher_N.mean()),
        escalated=count / len(labels),
        rows=len(labels),
    )


def cascade_answers(
    student: Sequence[dict[str, float]], teacher: Sequence[dict[str, float]], threshold: float
) -> list[dict[str, float]]:
    """Return the probabilities that a cascade answers where these are its models', row by row: as `entry.cascade`."""
    return [
        sure if max(sure.values()) >= threshold else {label: asked[label] for label in sure}
        for sure, asked in zip(student, teacher, strict=True)
    ]


def _is_right(rows: Sequence[dict[str, float]], labels: Sequence[str]) -> NDArray[np.bool_]:
    import numpy as np

    return np.array([max(row, key=lambda name: row[name]) == label for row, label in zip(rows, labels, strict=True)])
