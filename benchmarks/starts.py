"""starts: students of one shape that start from different weights, distilled with the same steps over several seeds."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.runs import by_kind, read_config, required
from benchmarks.students import BATCH_SIZE, RATES, distil, mean_of, score_columns, score_header
from compressor.dataset import task_of
from compressor.evaluate import METRIC_NAMES

EPOCHS, QUICK_EPOCHS = 0.5, 0.01

log = logging.getLogger(__name__)


def compare_starts(
    run: Path, starts: Mapping[str, str], *, epochs: float, seeds: Sequence[int], out: Path, threads: int, command: str
) -> dict[str, Any]:
    """Distil a student from each start (name -> `student.init`) with each seed, on the run's original training rows.

    `epochs` are those of each phase.
    Teacher and data are the run's; a distillation that is in `out` already is not repeated. Raises CompressorError if
    the run cannot be used.
    """
    config = read_config(run)
    made = by_kind(run)
    corpus, teacher = (required(made, kind, run) for kind in ("examples", "teacher"))
    task = task_of(corpus)
    begun = report.Begun()
    rows = []
    for seed in seeds:
        for name, init in starts.items():
            log.info("%s, seed %d ...", name, seed)
            recipe = config.model_copy(update={"student": config.student.model_copy(update={"init": init})})
            folder = out / f"{re.sub('[^a-zA-Z0-9]', '-', init).strip('-')}-seed{seed}"
            found = distil(
                recipe, epochs=epochs, seed=seed, examples=corpus, corpus=corpus, teacher=teacher, out=folder
            )
            rows.append({"start": name, "init": init, "seed": seed, **found})
    summary = {name: mean_of([row["score"] for row in rows if row["start"] == name]) for name in starts}
    return {
        "benchmark": "starts",
        "task": task.name,
        "metric": METRIC_NAMES[task.metric],
        "run": str(run),
        **report.context(begun, command=command, seed=seeds, threads=threads),
        "teacher_score": teacher.metrics["validation"]["score"],
        "student": config.student.model_dump(exclude={"init"}),
        "epochs_per_phase": epochs,
        "batch_size": BATCH_SIZE,
        "learning_rates": RATES,
        "distillations": rows,
        "summary": summary,
    }


def _mean_percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return number(100 * float(np.mean(known)), 1) if known else report.MISSING


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    rows = []
    for name, facts in result["summary"].items():
        mine = [row for row in result["distillations"] if row["start"] == name]
        rows.append([name, _mean_percent([row["score_at_start"] for row in mine]), *score_columns(mine, facts)])
    shape = result["student"]
    title = (
        f"{result['task']}: {result['metric']} x 100 on the validation rows, {shape['layers']} x {shape['hidden']}, "
        f"{result['epochs_per_phase']:g} epochs of each phase; teacher {100 * result['teacher_score']:.1f}"
    )
    return [Table(title, ["start", "before training", *score_header(result["distillations"])], rows)]
