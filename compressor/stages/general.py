"""general: a pretrained teacher + any text -> a general student, which the distillation of a task can start from.

Shape legend: D teacher width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import check_vocabulary, load_plain_encoder, load_tokenizer, save_projections
from compressor.config import GeneralConfig, Precision, StudentConfig
from compressor.dataset import ENCODED, Encoded
from compressor.models import student_shape
from compressor.objectives import Intermediate
from compressor.projection import begun_student, in_groups
from compressor.shapes import Sizes, check_blocks, check_student
from compressor.sources import model_folder
from compressor.texts import packed, provenance
from compressor.training import Tensors, autocast, cast_frozen, fit
from compressor.world import World, launch

PROJECTION_BLOCKS = 256  # blocks that show the subspace of the teacher's states
BLOCKS_AT_ONCE = 32  # where nothing is trained


def general(
    config: GeneralConfig,
    student: StudentConfig,
    *,
    base: str,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Teach a new student of the shape `student` the inside of a pretrained teacher, on text without labels.

    The teacher is `config.teacher`, or `base` if the recipe names none. The student begins as `config.init` says;
    `student.init` plays no part. The artifact is a plain BERT with the teacher's tokenizer, and the projections to the
    teacher's width. Raises DataError if there is too little text, ModelError if the student does not fit the teacher.
    """
    section = {**config.model_dump(), "student": student.model_dump(exclude={"init"}), "seed": seed}
    with artifact.write(out, "general-student", key=key, section=section, parents={}, together=True) as draft:
        arguments = config, student, base, seed, out.parent / ENCODED, draft.path
        launch(_work, *arguments, processes=processes, device=device)
        draft.take_result()
    return Artifact.open(out, kind="general-student")


def _work(
    world: World, config: GeneralConfig, student: StudentConfig, base: str, seed: int, cache: Path, out: Path
) -> None:
    """What each process does."""
    torch.manual_seed(seed)  # projections that start from nothing
    folder = model_folder(config.teacher or base, what="general.teacher" if config.teacher else "finetune.base")
    tokenizer = load_tokenizer(folder)
    teacher, report = load_plain_encoder(folder)
    check_vocabulary(teacher, tokenizer, folder)
    teacher.eval().requires_grad_(False)
    layers = check_student(student, Sizes.of(teacher.config), config, init=config.init)
    check_blocks(config.block_tokens, Sizes.of(teacher.config), folder)
    blocks = packed(
        config.source, config.column, tokenizer, config.block_tokens, what="general.source", cache=cache, world=world
    )
    # One process makes it: another machine might come to another basis.
    begun = None
    if world.is_leader:
        shape, rows = student_shape(student, teacher.config), np.random.default_rng(seed).permutation(len(blocks.train))
        groups = in_groups(rows[:PROJECTION_BLOCKS], BLOCKS_AT_ONCE)
        begun = begun_student(config.init, shape, teacher, layers, blocks.train, groups, seed)
    model, projections = world.broadcast(begun)
    cast_frozen(teacher.to(world.device), world, config.precision)
    module = Intermediate(model, teacher, layers, config, projections).to(world.device)
    metrics: dict[str, Any] = {"teacher": report.as_dict(), "provenance": provenance(config.source), **blocks.facts}
    metrics |= {
        "parameters": model.bert.num_parameters(),
        "at_start": mean_losses(module, blocks.held_out, config.precision, world),
    }
    metrics["history"] = fit(module, blocks.train, config, world=world, seed=seed, folder=out / CHECKPOINT)
    metrics["at_end"] = mean_losses(module, blocks.held_out, config.precision, world)
    if world.is_leader:
        model.bert.save_pretrained(out)
        tokenizer.save_pretrained(out)
        save_projections(module.trained_projections(), out)
        artifact.write_result(out, metrics)


@torch.no_grad()
def mean_losses(module: Intermediate, blocks: Encoded, precision: Precision, world: World) -> dict[str, float]:
    """Each loss term over all of some blocks; every process does its share."""
    totals = dict[str, float]()
    for number, batch in enumerate(blocks.batches_by_length(BLOCKS_AT_ONCE)):
        is_mine = number % world.size == world.rank
        if is_mine or not totals:  # the first one tells every process the names of the terms
            with autocast(world, precision):
                terms = module(Tensors.of(batch, world.device))
            totals = totals or dict.fromkeys(terms, 0.0)
            if is_mine:
                totals = {name: total + float(terms[name]) * len(batch.row_B) for name, total in totals.items()}
    summed = world.sum(np.array(list(totals.values())))
    return {name: float(total) / len(blocks) for name, total in zip(totals, summed, strict=True)}
