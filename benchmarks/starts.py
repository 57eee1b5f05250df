"""starts: students of one shape that start from different weights, distilled with the same steps over several seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.runs import by_kind, read_config, required
from compressor.artifact import Artifact
from compressor.config import BuildConfig, DistillConfig
from compressor.dataset import task_of
from compressor.evaluate import METRIC_NAMES
from compressor.pipeline import run_step
from compressor.steps import Where, steps

EPOCHS = 0.5
BATCH_SIZE = 32
RATES = {"intermediate": 4e-4, "prediction": 1.5e-4}

log = logging.getLogger(__name__)


def compare_starts(
    run: Path, starts: Mapping[str, str], *, seeds: Sequence[int], out: Path, threads: int, command: str
) -> dict[str, Any]:
    """Distil a student from each start (name -> `student.init`) with each seed, on the run's original training rows.

    Teacher and data are the run's; a distillation that is in `out` already is not repeated. Raises CompressorError if
    the run cannot be used.
    """
    config = read_config(run)
    found = by_kind(run)
    corpus, teacher = (required(found, kind, run) for kind in ("examples", "teacher"))
    task = task_of(corpus)
    context = report.context(command=command, seed=seeds[0], threads=threads)
    rows = []
    for seed in seeds:
        for name, init in starts.items():
            log.info("%s, seed %d ...", name, seed)
            rows.append(
                {"start": name, "init": init, "seed": seed, **_distil(config, init, seed, corpus, teacher, out)}
            )
    summary = {name: _summary([row["score"] for row in rows if row["start"] == name]) for name in starts}
    return {
        "benchmark": "starts",
        "task": task.name,
        "metric": METRIC_NAMES[task.metric],
        "run": str(run),
        **context,
        "teacher_score": teacher.metrics["validation"]["score"],
        "student": config.student.model_dump(exclude={"init"}),
        "epochs_per_phase": EPOCHS,
        "batch_size": BATCH_SIZE,
        "learning_rates": RATES,
        "distillations": rows,
        "summary": summary,
    }


def _distil(
    config: BuildConfig, init: str, seed: int, corpus: Artifact, teacher: Artifact, out: Path
) -> dict[str, Any]:
    """Intermediate, then prediction phase; validation figures of the student."""
    shared = {"epochs": EPOCHS, "batch_size": BATCH_SIZE}
    phases = [
        DistillConfig.model_validate({"objective": objective, "learning_rate": rate, **shared})
        for objective, rate in RATES.items()
    ]
    student = config.student.model_copy(update={"init": init})
    changed = config.model_copy(
        update={"student": student, "distill": tuple(phases), "seed": seed, "augment": None, "general": None}
    )
    parents = {"teacher": teacher.path, "examples": corpus.path, "corpus": corpus.path}
    found: dict[str, Any] = {}
    for step in (step for step in steps(changed, Where(repository=out)) if step.stage == "distill"):
        objective = step.section["objective"]
        name = "".join(char if char.isalnum() else "-" for char in init).strip("-")
        made = run_step(step, parents, out / f"{name}-seed{seed}-{objective}")
        parents["start"] = made.path
        if objective == "intermediate":
            found["score_at_start"] = made.metrics.get("at_start", {}).get("score")
        found[f"{objective}_steps"] = made.metrics["history"]["steps"]
        found[f"{objective}_seconds"] = made.manifest["seconds"]
    return {**found, "score": made.metrics["validation"]["score"]}


def _summary(scores: Sequence[float]) -> dict[str, Any]:
    """Mean over the seeds with its 95 % interval (Student's t), which needs two of them."""
    mean = float(np.mean(scores))
    if len(scores) < 2:
        return {"mean": mean, "interval_95": None, "seeds": len(scores)}
    spread = float(stats.t.ppf(0.975, len(scores) - 1) * np.std(scores, ddof=1) / np.sqrt(len(scores)))
    return {"mean": mean, "interval_95": [mean - spread, mean + spread], "seeds": len(scores)}


def _mean_percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return number(100 * float(np.mean(known)), 1) if known else report.MISSING


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    rows = []
    for name, facts in result["summary"].items():
        mine = [row for row in result["distillations"] if row["start"] == name]
        interval = facts["interval_95"]
        rows.append(
            [
                name,
                _mean_percent([row["score_at_start"] for row in mine]),
                " / ".join(number(100 * row["score"], 1) for row in mine),
                number(100 * facts["mean"], 1),
                f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}" if interval else report.MISSING,
            ]
        )
    shape = result["student"]
    title = (
        f"{result['task']}: {result['metric']} x 100 on the validation rows, {shape['layers']} x {shape['hidden']}, "
        f"{result['epochs_per_phase']:g} epochs of each phase; teacher {100 * result['teacher_score']:.1f}"
    )
    seeds = " / ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in result["distillations"]))
    return [Table(title, ["start", "before training", f"seeds {seeds}", "mean", "95 % interval of the mean"], rows)]
