"""copies: students trained on more or fewer augmented rows, with the same number of steps, over several seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import report
from benchmarks.report import Table
from benchmarks.runs import by_kind, read_config, required
from benchmarks.students import BATCH_SIZE, RATES, distil, mean_of, score_columns, score_header
from compressor.artifact import Artifact
from compressor.config import ADAPT, AugmentConfig, BuildConfig
from compressor.dataset import task_of
from compressor.errors import ConfigError
from compressor.evaluate import METRIC_NAMES
from compressor.pipeline import run_step
from compressor.steps import Where, steps

log = logging.getLogger(__name__)


def compare_copies(
    run: Path,
    copies: Sequence[int],
    *,
    masked_lm: str | None,
    steps_per_phase: int,
    seeds: Sequence[int],
    out: Path,
    threads: int,
    command: str,
) -> dict[str, Any]:
    """Distil the run's student from its teacher on rows with each number of `copies`, with each seed.

    The seed is also that of the copies. `masked_lm` is the source of one that makes them, together with the recipe's
    word vectors ("adapt": the run's own); none = the vectors alone. A stage that is in `out` already is not repeated.
    Raises CompressorError if the run cannot be used.

    What counts is the metric on the test rows: validation also chooses among the states of a phase, of which there are
    more the more epochs the steps make.
    """
    config = read_config(run)
    if config.augment is None:
        raise ConfigError(f"--run {run} was made without [augment]; give a run that has one")
    made = by_kind(run)
    corpus, teacher = (required(made, kind, run) for kind in ("examples", "teacher"))
    if masked_lm == ADAPT and "masked-lm" not in made:
        raise ConfigError(f"--run {run} has made no masked language model; name one with --masked-lm, or leave it out")
    parents = {"corpus": corpus.path, "teacher": teacher.path}
    if masked_lm == ADAPT:
        parents["masked_lm"] = made["masked-lm"].path
    task = task_of(corpus)
    begun = report.Begun()
    method = "vectors" if masked_lm is None else "masked-lm"
    rows = []
    for seed in seeds:
        for count in copies:
            log.info("%d copies, seed %d ...", count, seed)
            name = f"copies{count}-{method}-seed{seed}" if count else f"copies0-seed{seed}"
            augmentation = config.augment.model_copy(update={"copies": max(1, count), "masked_lm": masked_lm})
            examples = _augmented(config, augmentation, seed, parents, out / f"{name}-augment") if count else corpus
            batches = max(1, _rows(examples) // BATCH_SIZE)
            found = distil(
                config,
                epochs=steps_per_phase / batches,
                seed=seed,
                examples=examples,
                corpus=corpus,
                teacher=teacher,
                out=out / name,
            )
            rows.append({"copies": count, "seed": seed, "rows": _rows(examples), **found})
    return {
        "benchmark": "copies",
        "task": task.name,
        "metric": METRIC_NAMES[task.metric],
        "run": str(run),
        **report.context(begun, command=command, seed=seeds, threads=threads),
        "method": method,
        "teacher_score": teacher.metrics["test"]["score"],
        "student": config.student.model_dump(),
        "steps_per_phase": steps_per_phase,
        "batch_size": BATCH_SIZE,
        "learning_rates": RATES,
        "distillations": rows,
        "summary": {
            str(count): mean_of([row["test_score"] for row in rows if row["copies"] == count]) for count in copies
        },
    }


def _augmented(
    config: BuildConfig, augmentation: AugmentConfig, seed: int, parents: Mapping[str, Path], out: Path
) -> Artifact:
    changed = config.model_copy(update={"augment": augmentation, "seed": seed})
    (step,) = (step for step in steps(changed, Where(repository=out)) if step.stage == "augment")
    return run_step(step, parents, out)


def _rows(examples: Artifact) -> int:
    with pa.memory_map(str(examples.path / "train.arrow")) as file:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(file))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    lines = []
    for count, facts in result["summary"].items():
        mine = [row for row in result["distillations"] if str(row["copies"]) == count]
        lines.append([count, f"{mine[0]['rows']:,}", *score_columns(mine, facts, score="test_score")])
    shape = result["student"]
    title = (
        f"{result['task']}: {result['metric']} x 100 on the test rows, {shape['layers']} x {shape['hidden']}, "
        f"{result['steps_per_phase']} steps of each phase, copies by {result['method']}; "
        f"teacher {100 * result['teacher_score']:.1f}"
    )
    return [Table(title, ["copies", "rows", *score_header(result["distillations"])], lines)]
