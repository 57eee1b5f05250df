"""distill: one stage of TinyBERT's task distillation: teacher + student + objective -> student.

Shape legend: N rows, C outputs, D teacher width, d student width.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr, softmax
from torch import nn
from transformers import BertForSequenceClassification

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import (
    Projections,
    general_student,
    load_classifier,
    load_tokenizer,
    save_projections,
    saved_projections,
    to_width,
)
from compressor.config import DistillConfig, Precision, StudentConfig
from compressor.dataset import ENCODED, Encoded, Rows, encode
from compressor.encoding import ROWS_PER_CHUNK
from compressor.errors import ModelError
from compressor.evaluate import TorchPredictor, measure, measure_splits, predict, scores
from compressor.models import rescale, score_scale, student_shape
from compressor.objectives import Intermediate, Prediction
from compressor.progress import Progress
from compressor.projection import begun_student, in_groups
from compressor.shapes import Sizes, check_reach, check_same, check_student
from compressor.sources import model_folder
from compressor.tasks import Task
from compressor.training import Tensors, autocast, cast_frozen, fit, rows_seen
from compressor.world import World, launch

PROJECTION_ROWS = 2_000  # texts that show the subspace of the teacher's states, at most
PROJECTION_TOKENS = 128_000  # of these texts, at most: the states of them all are held at once
PROJECTION_BATCH = 64  # texts at once
TEACHER_BATCH = 128
VALIDATIONS_PER_EPOCH = 4  # of the prediction stage: on augmented rows an epoch is long
UNIFORM = 0.95  # share of the largest possible entropy above which a teacher knows nothing of its classes
open_memmap: Callable[..., np.memmap[Any, Any]] = np.lib.format.open_memmap  # which has no types of its own
LOGIT_ROWS = ROWS_PER_CHUNK  # rows of the teacher's logits in memory at a time, and lost by an interruption at most
log = logging.getLogger(__name__)

Begun = tuple[BertForSequenceClassification, Projections | None, dict[str, Any]]
"""A student, what its projections to the teacher's width start from, and facts for the metrics."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What each process is told."""

    config: DistillConfig
    student: StudentConfig
    task: Task
    teacher: Artifact
    examples: Artifact
    corpus: Artifact
    start: Artifact | None
    general: Artifact | None
    max_tokens: int
    seed: int
    cache: Path
    out: Path


def distill(
    config: DistillConfig,
    student: StudentConfig,
    task: Task,
    *,
    teacher: Artifact,
    examples: Artifact,
    corpus: Artifact,
    start: Artifact | None = None,
    general: Artifact | None = None,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Teach a student by `config.objective` on the training rows of `examples`.

    The student is the one of an earlier stage, `start`, or a new one of the shape `student`, begun as `student.init`
    says; `general` is what init "general" begins with. Held-out rows come from `corpus`. Raises ModelError if the
    student does not fit the teacher, or if the teacher's answers are as good as uniform.
    """
    parents = {"teacher": teacher, "examples": examples, "corpus": corpus}
    parents |= {role: parent for role, parent in (("start", start), ("general", general)) if parent is not None}
    section = config.model_dump() | {"student": student.model_dump(), "max_tokens": max_tokens, "seed": seed}
    with artifact.write(out, "student", key=key, section=section, parents=parents, together=True) as draft:
        job = _Job(
            config=config,
            student=student,
            task=task,
            teacher=teacher,
            examples=examples,
            corpus=corpus,
            start=start,
            general=general,
            max_tokens=max_tokens,
            seed=seed,
            cache=out.parent / ENCODED,
            out=draft.path,
        )
        launch(_work, job, processes=processes, device=device)
        draft.take_result()
    return Artifact.open(out, kind="student")


def _work(world: World, job: _Job) -> None:
    """What each process does."""
    config, task = job.config, job.task
    torch.manual_seed(job.seed)  # a general student's head, projections that start from nothing
    tokenizer = load_tokenizer(job.teacher.path)
    teacher = load_classifier(job.teacher.path, task).eval().requires_grad_(False)
    imitation, init = config if config.objective == "intermediate" else None, None if job.start else job.student.init
    layers = check_student(job.student, Sizes.of(teacher.config), imitation, init=init)
    begun = None if job.start is None else earlier_student(job.start, job, teacher, tokenizer)

    def encoded(examples: Artifact, split: str) -> Encoded:
        return encode(examples, split, tokenizer, job.max_tokens, cache=job.cache, world=world)

    train = encoded(job.examples, "train")
    held_out = {split: encoded(job.corpus, split) for split in task.held_out}
    if begun is None:
        original = encoded(job.corpus, "train")
        # One process makes it: another machine might come to another basis.
        begun = world.broadcast(new_student(job, teacher, layers, original, tokenizer) if world.is_leader else None)
    model, projections, facts = begun
    metrics: dict[str, Any] = {"parameters": model.num_parameters(), "train_rows": len(train)} | facts
    if job.start is None and metrics["head_trained"]:
        logits_NC = predict(TorchPredictor(model.to(world.device)), held_out["validation"], world=world)
        metrics["at_start"] = measure(task, logits_NC, held_out["validation"].label_N)
    mean, spread = score_scale(task, lambda: train.label_N) if config.objective == "prediction" else (0.0, 1.0)
    rescale(teacher, -mean / spread, 1 / spread)
    if metrics["head_trained"]:  # a fresh one is of this scale
        rescale(model, -mean / spread, 1 / spread)
    model.to(world.device)
    cast_frozen(teacher.to(world.device), world, config.precision)

    def validate() -> float:
        logits_NC = predict(TorchPredictor(model), held_out["validation"], world=world)
        return scores(task, logits_NC, held_out["validation"].label_N)[task.metric]

    module: nn.Module
    if config.objective == "intermediate":
        module, check = Intermediate(model, teacher, layers, config, projections), None
    else:
        module, check = Prediction(model, _logits_to_learn(job, teacher, train, world), config), validate
        metrics["head_trained"] = True
    metrics["history"] = fit(
        module,
        train.padded_to(job.max_tokens) if config.normalisation == "published" else train,
        config,
        world=world,
        seed=job.seed,
        folder=job.out / CHECKPOINT,
        validate=check,
        validations_per_epoch=VALIDATIONS_PER_EPOCH,
    )
    rescale(model, mean, spread)
    metrics |= measure_splits(TorchPredictor(model), task, held_out, job.out, world)
    if world.is_leader:
        model.save_pretrained(job.out)
        if isinstance(module, Intermediate):
            projections = module.trained_projections()
        if projections is not None:  # also those that a stage of prediction had no use for
            save_projections(projections, job.out)
        tokenizer.save_pretrained(job.out)
        artifact.write_result(job.out, metrics)


def earlier_student(start: Artifact, job: _Job, teacher: BertForSequenceClassification, tokenizer: Any) -> Begun:
    """The student of an earlier stage, with its projections.

    Raises ModelError if its shape or vocabulary is not what is needed.
    """
    folder, shape = start.path, student_shape(job.student, teacher.config)
    model = load_classifier(folder, job.task)
    check_same(Sizes.of(shape), Sizes.of(model.config), f"the student {folder}")
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the student {folder} has another vocabulary than the teacher; their token ids would not mean the same; "
            "give the teacher that it was made with"
        )
    projections = to_width(saved_projections(folder), teacher.config.hidden_size, f"the student {folder}")
    return model, projections, {"head_trained": start.metrics.get("head_trained", False)}


def new_student(
    job: _Job, teacher: BertForSequenceClassification, layers: tuple[int, ...], original: Encoded, tokenizer: Any
) -> Begun:
    """A student before any training.

    `layers` are the teacher's (from 0) that it learns from; `original` are training rows that nothing was added to.
    """
    shape, init = student_shape(job.student, teacher.config), job.student.init
    if init in ("project", "teacher-layers", "random"):
        groups = in_groups(_projection_rows(original, job.seed), PROJECTION_BATCH)
        student, projections = begun_student(init, shape, teacher, layers, original, groups, job.seed)
        return student, projections, {"head_trained": init != "random"}
    folder = job.general.path if job.general is not None else model_folder(init, what="student.init")
    student, projections, report = general_student(folder, shape, tokenizer.get_vocab(), job.task)
    check_reach(Sizes.of(student.config), max_tokens=job.max_tokens, is_pair=job.task.is_pair, folder=folder)
    projections = to_width(projections, teacher.config.hidden_size, f"student.init {folder}")
    facts = {"head_trained": False, "start": report.as_dict(), "projections_used": projections is not None}
    return student, projections, facts


def _projection_rows(original: Encoded, seed: int) -> Rows:
    """Numbers of the rows that a projection is fitted on, by length."""
    rows = np.random.default_rng(seed).permutation(len(original))[:PROJECTION_ROWS]
    rows = rows[np.cumsum(original.lengths(rows)) <= PROJECTION_TOKENS]
    return rows[np.argsort(original.lengths(rows), kind="stable")]


def _logits_to_learn(
    job: _Job, teacher: BertForSequenceClassification, train: Encoded, world: World
) -> NDArray[np.float32]:
    """The teacher's logits (N, C) for the rows that the stage comes to. Raises ModelError if they tell nothing."""
    row_S = rows_seen(train, job.config, job.seed)
    file, scratch = _logits_file(job, row_S, world), job.out / CHECKPOINT
    logits_NC = teacher_logits(teacher, train, row_S, job.config.precision, world=world, file=file, scratch=scratch)
    refuse_uniform(logits_NC, row_S, job.teacher.path)
    return logits_NC


def _logits_file(job: _Job, row_S: Rows | None, world: World) -> Path:
    """Where the teacher's logits are kept: beside the encoded rows, for every stage that asks the same of them."""
    asked = f"{job.teacher.content} {job.examples.content} {job.max_tokens} {job.config.precision} {world.device.type}"
    if row_S is not None:
        asked += f" {hashlib.sha256(row_S.tobytes()).hexdigest()}"
    return job.cache / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.logits.npy"


def teacher_logits(
    teacher: BertForSequenceClassification,
    examples: Encoded,
    row_S: Rows | None,
    precision: Precision,
    *,
    world: World,
    file: Path,
    scratch: Path,
) -> NDArray[np.float32]:
    """The teacher's logits (N, C), as a read-only memory map of `file`: of `row_S` (rising), 0 elsewhere, or of all.

    Each process does its share, unless the file is there already. Only the leader writes: clients of a network file
    system write whole pages back, also the rows of others in them. What an interrupted run left in `scratch`, a folder
    of this run alone, is gone on from. Raises ArtifactError if a process does not see the file, and OSError if the
    leader's disk is full.
    """
    if not world.broadcast(world.is_leader and _is_whole(file)):
        partial, count = scratch / file.name, len(examples) if row_S is None else len(row_S)
        done = partial.with_suffix(".rows")
        begun = world.broadcast(int(done.read_text()) if world.is_leader and done.is_file() else 0)
        if world.is_leader:
            scratch.mkdir(parents=True, exist_ok=True)
            shape = len(examples), teacher.config.num_labels
            logits_NC = open_memmap(partial, mode="r+" if begun else "w+", dtype=np.float32, shape=shape)
            _take_space(partial)
        progress = Progress("teacher", total=count, start=begun, visible=world.is_leader)
        for first in range(begun, count, LOGIT_ROWS):
            last = min(first + LOGIT_ROWS, count)
            row_W = np.arange(first, last) if row_S is None else row_S[first:last]
            found_WC = world.sum(_answers(teacher, examples, row_W, precision, world, progress))
            if world.is_leader:
                logits_NC[row_W] = found_WC
                logits_NC.flush()
                done.with_suffix(".new").write_text(str(last))
                done.with_suffix(".new").replace(done)
        progress.close()
        if world.is_leader:
            done.unlink()
            partial.replace(file)
        world.barrier()
    artifact.await_shown(file, world, file.is_file)
    loaded: NDArray[np.float32] = np.load(file, mmap_mode="r")
    return loaded


def _is_whole(file: Path) -> bool:
    """Whether a file of logits is there, and not cut short, as after a power failure."""
    if not file.is_file():
        return False
    try:
        np.load(file, mmap_mode="r")
    except (EOFError, ValueError):
        log.warning("%s is damaged and is made again", file)
        return False
    return True


def _take_space(file: Path) -> None:
    """Have the disk give a new file its space. Raises OSError if there is too little.

    Where it is written through memory, a full disk would end the process with a signal instead.
    """
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _answers(
    teacher: BertForSequenceClassification,
    examples: Encoded,
    row_W: Rows,
    precision: Precision,
    world: World,
    progress: Progress,
) -> NDArray[np.float32]:
    """Logits (W, C) of some rows: this process's share of them, 0 in the others."""
    found_WC = np.zeros((len(row_W), teacher.config.num_labels), dtype=np.float32)
    for number, batch in enumerate(examples.batches_by_length(TEACHER_BATCH, row_W)):
        progress.advance(len(batch.row_B))
        if number % world.size == world.rank:
            tensors = Tensors.of(batch, world.device)
            with torch.inference_mode(), autocast(world, precision):
                output = teacher(
                    input_ids=tensors.input_ids_BS,
                    token_type_ids=tensors.segment_BS,
                    attention_mask=tensors.mask_BS,
                )
            found_WC[np.searchsorted(row_W, batch.row_B)] = output.logits.float().cpu().numpy()
    return found_WC


def refuse_uniform(logits_NC: NDArray[np.float32], row_S: Rows | None, teacher: Path) -> None:
    """Raise ModelError if a teacher's answers (N, C), to `row_S` or to all rows, are about uniform."""
    rows, classes = len(logits_NC) if row_S is None else len(row_S), logits_NC.shape[1]
    if classes == 1:
        return
    parts = (slice(first, first + LOGIT_ROWS) for first in range(0, rows, LOGIT_ROWS))
    answers = (logits_NC[part if row_S is None else row_S[part]] for part in parts)
    entropy = sum(float(entr(softmax(part, axis=1)).sum(dtype=np.float64)) for part in answers) / rows
    if not entropy <= UNIFORM * math.log(classes):  # also if it is nan
        raise ModelError(
            f"the teacher {teacher} hardly tells the {classes} classes apart: the mean entropy of its answers to the "
            f"training rows is {entropy:.3f}, and {math.log(classes):.3f} is guessing; its head may not be fine-tuned "
            "for this task; give a fine-tuned teacher"
        )
