"""Students that are distilled over several seeds, to compare what they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.report import MISSING, number
from compressor.artifact import Artifact
from compressor.config import BuildConfig, DistillConfig
from compressor.pipeline import run_step
from compressor.steps import Where, steps

BATCH_SIZE = 32
RATES = {"intermediate": 4e-4, "prediction": 1.5e-4}


def distil(
    config: BuildConfig, *, epochs: float, seed: int, examples: Artifact, corpus: Artifact, teacher: Artifact, out: Path
) -> dict[str, Any]:
    """A student as `config` has it, after `epochs` of the intermediate and of the prediction phase on `examples`.

    Its stages are folders whose names begin with `out`; what is there already is not repeated. Returns the steps and
    seconds of each phase, the metric on the validation rows of `corpus`, at the start, if it has one, and in the end,
    and on its test rows in the end.
    """
    phases = tuple(
        DistillConfig.model_validate(
            {"objective": objective, "learning_rate": rate, "epochs": epochs, "batch_size": BATCH_SIZE}
        )
        for objective, rate in RATES.items()
    )
    changed = config.model_copy(update={"distill": phases, "seed": seed, "augment": None, "general": None})
    parents = {"teacher": teacher.path, "examples": examples.path, "corpus": corpus.path}
    found: dict[str, Any] = {}
    for step in (step for step in steps(changed, Where(repository=out)) if step.stage == "distill"):
        objective = step.section["objective"]
        made = run_step(step, parents, out.with_name(f"{out.name}-{objective}"))
        parents["start"] = made.path
        if objective == "intermediate":
            found["score_at_start"] = made.metrics.get("at_start", {}).get("score")
        found[f"{objective}_steps"] = made.metrics["history"]["steps"]
        found[f"{objective}_seconds"] = made.manifest["seconds"]
    return {**found, "score": made.metrics["validation"]["score"], "test_score": made.metrics["test"]["score"]}


def mean_of(scores: Sequence[float]) -> dict[str, Any]:
    """Mean over the seeds with its 95 % interval (Student's t), which needs two of them."""
    mean = float(np.mean(scores))
    if len(scores) < 2:
        return {"mean": mean, "interval_95": None, "seeds": len(scores)}
    spread = float(stats.t.ppf(0.975, len(scores) - 1) * np.std(scores, ddof=1) / np.sqrt(len(scores)))
    return {"mean": mean, "interval_95": [mean - spread, mean + spread], "seeds": len(scores)}


def score_columns(made: Sequence[Mapping[str, Any]], mean: Mapping[str, Any], *, score: str = "score") -> list[str]:
    """Scores x 100 of the students of all seeds, their mean and its interval."""
    interval = mean["interval_95"]
    return [
        " / ".join(number(100 * row[score], 1) for row in made),
        number(100 * mean["mean"], 1),
        f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}" if interval else MISSING,
    ]


def score_header(made: Sequence[Mapping[str, Any]]) -> list[str]:
    """The header of `score_columns`."""
    seeds = " / ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in made))
    return [f"seeds {seeds}", "mean", "95 % interval of the mean"]
