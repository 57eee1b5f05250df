"""general: a pretrained teacher + any text -> a general student, which the distillation of a task can start from.

Shape legend: D teacher width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import BertForSequenceClassification

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import (
    PROJECTIONS_FILE,
    Projections,
    check_vocabulary,
    load_plain_encoder,
    load_tokenizer,
)
from compressor.config import GeneralConfig, Precision, StudentConfig
from compressor.dataset import ENCODED, Encoded
from compressor.errors import ModelError
from compressor.models import copied_student, layer_map, random_student, student_shape
from compressor.objectives import Intermediate, refuse_unlike
from compressor.projection import projected_student
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
    layers = layer_map(student.layers, teacher.config.num_hidden_layers, student.layer_map)
    refuse_unlike(config, student_shape(student, teacher.config), teacher.config)
    if config.block_tokens > teacher.config.max_position_embeddings:
        raise ModelError(
            f"general.block_tokens is {config.block_tokens} and the teacher {folder} reads at most "
            f"{teacher.config.max_position_embeddings} tokens; make the blocks shorter"
        )
    blocks = packed(
        config.source, config.column, tokenizer, config.block_tokens, what="general.source", cache=cache, world=world
    )
    # One process makes it: another machine might come to another basis.
    begun = _new_student(config, student, teacher, layers, blocks.train, seed) if world.is_leader else None
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
        save_file(module.projections.state_dict(prefix="projections."), out / PROJECTIONS_FILE)
        artifact.write_result(out, metrics)


def _new_student(
    config: GeneralConfig,
    student: StudentConfig,
    teacher: BertForSequenceClassification,
    layers: tuple[int, ...],
    blocks: Encoded,
    seed: int,
) -> tuple[BertForSequenceClassification, Projections | None]:
    """A student before any training, and what its projections to the teacher's width start from."""
    shape = student_shape(student, teacher.config)
    match config.init:
        case "random":
            return random_student(shape, seed), None
        case "teacher-layers":
            model, basis_Dd = copied_student(shape, teacher, layers), torch.eye(shape.hidden_size)
        case "project":
            rows = np.random.default_rng(seed).permutation(len(blocks))[:PROJECTION_BLOCKS]
            groups = [rows[first : first + BLOCKS_AT_ONCE] for first in range(0, len(rows), BLOCKS_AT_ONCE)]
            batches = [Tensors.of(blocks.batch(group), teacher.device) for group in groups]
            sample = [(batch.input_ids_BS, batch.segment_BS, batch.mask_BS) for batch in batches]
            model, basis_Dd = projected_student(shape, teacher, sample, seed, kept=layers)
    return model, [(basis_Dd, torch.zeros(len(basis_Dd)))]


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
