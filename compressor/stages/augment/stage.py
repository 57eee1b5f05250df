"""The augment stage: for each training row the original, then `copies` others with some words replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact, Draft
from compressor.config import AugmentConfig
from compressor.dataset import task_of
from compressor.errors import ConfigError
from compressor.progress import Progress
from compressor.sources import check, model_folder
from compressor.stages.augment.blocks import Blocks, Numbers, counted, join, write_answers, write_rows
from compressor.stages.augment.quality import COUNTS_FILE, Teacher, judge
from compressor.stages.augment.words import load_stop_words
from compressor.stages.augment.workers import Workers
from compressor.world import World

TRAIN = "train.arrow"


def augment_examples(
    config: AugmentConfig,
    examples: Artifact,
    *,
    masked_lm: Artifact | None = None,
    teacher: Artifact | None = None,
    max_tokens: int | None = None,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Write the `train` rows, augmented; labels are copied, and `origin` names the row each was made from.

    `masked_lm` is the model that config.masked_lm "adapt" stands for. `teacher` judges the copies of a classification,
    each cut to `max_tokens` (or the task's own limit), and is needed to drop some: `quality.judge`. What is written
    depends on the rows, the settings and the seed: not on the number of processes, nor on interruptions. Raises
    ConfigError for a regression, unless the settings ask for one, and SourceError or ModelError if vectors or a model
    cannot be had.
    """
    task = task_of(examples)
    if task.is_regression and not config.regression:
        raise ConfigError(
            f"augment: {task.name} is a regression, whose scores would be copied to changed texts; drop [augment], or "
            "set augment.regression = true"
        )
    if config.max_disagreement is not None and (teacher is None or task.is_regression):
        raise ConfigError(
            f"augment.max_disagreement is {config.max_disagreement}, and there is no teacher that gives labels; give "
            "one, or drop the key"
        )
    section = {**config.model_dump(), "task": task.model_dump(mode="json")}
    parents = {"corpus": examples}
    if teacher is not None:
        parents["teacher"] = teacher
    if masked_lm is not None:
        parents["masked_lm"] = masked_lm
        config = config.model_copy(update={"masked_lm": str(masked_lm.path)})
    check(config.vectors, what="augment.vectors")
    if config.masked_lm is not None:
        check(config.masked_lm, what="augment.masked_lm")
    load_stop_words(config.stop_words)
    with artifact.write(out, "examples", key=key, section=section, parents=parents, together=True) as draft:
        blocks = Blocks.of(examples.path / TRAIN, draft.path / CHECKPOINT, task, seed)
        make_rows(config, blocks, draft, processes=processes, device=device)
        asked = None
        if teacher is not None and not task.is_regression:
            asked = Teacher(teacher.path, task, max_tokens or task.max_tokens, device)
        judged = judge(
            draft.path,
            task,
            teacher=asked,
            masked_lm=model_folder(config.masked_lm, what="augment.masked_lm") if config.masked_lm else None,
            max_disagreement=config.max_disagreement,
            seed=seed,
            kept=blocks.folder,
            world=draft.world,
            device=device,
        )
        if draft.world is None or draft.world.is_leader:
            draft.metrics.update(judged, rows=draft.metrics["rows"] - judged.get("dropped_rows", 0))
    return Artifact.open(out, kind="examples")


def make_rows(config: AugmentConfig, blocks: Blocks, draft: Draft, *, processes: int, device: str) -> None:
    """Write TRAIN, COUNTS_FILE and what was counted into the draft. All processes leave when the files are whole."""
    make_blocks(config, blocks, draft.world, processes=processes, device=device)
    if draft.world is None or draft.world.is_leader:
        join(blocks, draft.path / TRAIN, draft.path / COUNTS_FILE)
        facts = counted(blocks)
        draft.peak_memory_gb = facts["peak_memory_gb"]
        draft.metrics.update(metrics_of(facts, blocks.rows, config.copies))
    if draft.world is not None:
        draft.world.barrier()


def make_blocks(
    config: AugmentConfig, blocks: Blocks, world: World | None = None, *, processes: int, device: str
) -> None:
    """Write the blocks that are not there yet. If processes were started together (`world`), each does its share."""
    first_N = blocks.first_places() if config.masked_lm else None
    with Workers(config, processes=processes, device=device) as workers:
        if first_N is not None:
            _done("masked words", write_answers, blocks, blocks.answers_file, first_N, workers, world)
        _done("augmented rows", write_rows, blocks, blocks.facts_file, first_N, workers, world)


def metrics_of(facts: dict[str, Any], originals: int, copies: int) -> dict[str, Any]:
    """What was counted, for the report."""
    asked = originals * (1 + copies)
    replaced = facts["by_masked_lm"] + facts["by_vectors"]
    return {
        "original_rows": originals,
        "rows": facts["rows"],
        "asked_rows": asked,
        "missing_rows": asked - facts["rows"],
        "duplicates": facts["duplicates"],
        "replaced_words_per_copy": replaced / max(1, facts["rows"] - originals),
        "share_by_masked_lm": facts["by_masked_lm"] / max(1, replaced),
        "share_by_vectors": facts["by_vectors"] / max(1, replaced),
        "rows_without_words": facts["rows_without_words"],
    }


def _done(
    what: str,
    work: Callable[..., None],
    blocks: Blocks,
    file: Callable[[int], Path],
    first_N: Numbers | None,
    workers: Workers,
    world: World | None,
) -> None:
    """Do the work of every block whose file is not there yet."""
    missing = [block for block in range(len(blocks)) if not file(block).is_file()]
    rank, size = 0, 1
    if world is not None:
        missing, rank, size = world.broadcast(missing), world.rank, world.size
    mine = missing[rank::size]
    progress = Progress(what, total=blocks.rows, start=blocks.rows - sum(map(blocks.size, missing)))
    jobs = ((blocks, block, None if first_N is None else blocks.of_block(first_N, block)) for block in mine)
    for block, _ in zip(mine, workers.results(work, jobs), strict=True):
        progress.advance(min(blocks.rows, blocks.size(block) * size))
    progress.close()
    if world is not None:
        world.barrier()
