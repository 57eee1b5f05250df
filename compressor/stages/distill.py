"""distill: one stage of TinyBERT's task distillation: teacher + student + objective -> student.

Shape legend: N rows, C classes, D teacher width, d student width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.config import DistillConfig, StudentConfig
from compressor.dataset import ENCODED, Encoded, encode
from compressor.evaluate import TorchPredictor, measure, predict, save_classifier
from compressor.losses import intermediate_loss, soft_cross_entropy
from compressor.models import (
    Observed,
    copied_student,
    general_student,
    layer_map,
    load_classifier,
    load_tokenizer,
    random_student,
    student_shape,
)
from compressor.progress import Progress
from compressor.projection import projected_student
from compressor.sources import model_folder
from compressor.tasks import Task
from compressor.training import Tensors, autocast, fit
from compressor.world import World, launch

PROJECTION_ROWS = 2_000  # texts that show the subspace of the teacher's states
TEACHER_BATCH = 128
VALIDATIONS_PER_EPOCH = 4  # of the prediction stage: on augmented rows an epoch is long


def distill(
    config: DistillConfig,
    student: StudentConfig | Artifact,
    task: Task,
    *,
    teacher: Artifact,
    examples: Artifact,
    corpus: Artifact,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Teach a student by `config.objective` on the training rows of `examples`.

    `student` is the shape of a new one, or the student of an earlier stage. Validation and test rows come from
    `corpus`. Raises ModelError if the student does not fit the teacher.
    """
    parents = {"teacher": teacher, "examples": examples, "corpus": corpus}
    section = config.model_dump()
    if isinstance(student, Artifact):
        parents["student"] = student
    else:
        section |= {"student": student.model_dump()}
    with artifact.write(out, "student", key=key, section=section, parents=parents) as draft:
        arguments = (
            config,
            student,
            task,
            teacher,
            examples,
            corpus,
            max_tokens,
            seed,
            out.parent / ENCODED,
            draft.path,
        )
        launch(_work, *arguments, processes=processes, device=device)
        draft.take_result()
    return Artifact.open(out, kind="student")


def _work(
    world: World,
    config: DistillConfig,
    student: StudentConfig | Artifact,
    task: Task,
    teacher_artifact: Artifact,
    examples: Artifact,
    corpus: Artifact,
    max_tokens: int,
    seed: int,
    cache: Path,
    out: Path,
) -> None:
    """What each process does."""
    torch.manual_seed(seed)  # a general student's head, projections that start from no basis
    tokenizer = load_tokenizer(teacher_artifact.path)
    teacher = load_classifier(teacher_artifact.path, task).to(world.device).eval().requires_grad_(False)
    train = encode(examples, "train", tokenizer, max_tokens, cache=cache, world=world)
    held_out = {
        name: encode(corpus, name, tokenizer, max_tokens, cache=cache, world=world) for name in ("validation", "test")
    }
    if isinstance(student, Artifact):
        model, basis_Dd = load_classifier(student.path, task), None
    else:
        original = encode(corpus, "train", tokenizer, max_tokens, cache=cache, world=world)
        model, basis_Dd = new_student(student, teacher, tokenizer, original, task, seed)
    metrics: dict[str, Any] = {"parameters": model.num_parameters(), "train_rows": len(train)}
    if not isinstance(student, Artifact):
        metrics["at_start"] = measure(
            predict(TorchPredictor(model), held_out["validation"]), held_out["validation"].label_N
        )

    def validate() -> float:
        logits_NC = predict(TorchPredictor(model), held_out["validation"])
        model.train()
        return float(measure(logits_NC, held_out["validation"].label_N)["accuracy"])

    module: nn.Module
    if config.objective == "intermediate":
        module, check = Intermediate(model, teacher, basis_Dd), None
    else:
        logits_NC = teacher_logits(teacher, train, world, out / CHECKPOINT)
        module, check = Prediction(model, torch.from_numpy(logits_NC), config.temperature), validate
    metrics["history"] = fit(
        module,
        train,
        config,
        world=world,
        seed=seed,
        folder=out / CHECKPOINT,
        validate=check,
        validations_per_epoch=VALIDATIONS_PER_EPOCH,
    )
    if world.is_leader:
        model.requires_grad_(True)
        metrics |= save_classifier(model, tokenizer, held_out, out)
        artifact.write_result(out, metrics)


def new_student(
    config: StudentConfig,
    teacher: BertForSequenceClassification,
    tokenizer: Any,
    examples: Encoded,
    task: Task,
    seed: int,
) -> tuple[BertForSequenceClassification, Tensor | None]:
    """A student before any training, and the basis (D, d) of its width in the teacher's, if it started from one."""
    shape = student_shape(config, teacher.config)
    match config.init:
        case "random":
            return random_student(shape, seed), None
        case "teacher-layers":
            return copied_student(shape, teacher), torch.eye(shape.hidden_size)
        case "project":
            random = np.random.default_rng(seed)
            rows = random.permutation(len(examples))[:PROJECTION_ROWS]
            rows = rows[np.argsort(examples.length_N[rows], kind="stable")]
            groups = [rows[first : first + 64] for first in range(0, len(rows), 64)]
            batches = [Tensors.of(examples.batch(group), teacher.device) for group in groups]
            return projected_student(shape, teacher, [(batch.input_ids_BS, batch.mask_BS) for batch in batches], seed)
        case source:
            folder = model_folder(source, what="student.init")
            return general_student(folder, shape, tokenizer.get_vocab(), task), None


class Intermediate(nn.Module):
    """Embedding, hidden states and attention scores of the mapped layers, against the teacher's.

    The head is not trained here and takes no part. Each layer and the embedding have their own projection to the
    teacher's width; it starts at `basis_Dd` where the student was made from one.
    """

    def __init__(
        self, student: BertForSequenceClassification, teacher: BertForSequenceClassification, basis_Dd: Tensor | None
    ) -> None:
        super().__init__()
        layers = student.config.num_hidden_layers
        self._mapped = layer_map(layers, teacher.config.num_hidden_layers)
        student.bert.pooler.requires_grad_(False)
        student.classifier.requires_grad_(False)
        self.student = Observed(student, range(layers))
        width, narrow = teacher.config.hidden_size, student.config.hidden_size
        self.projections = nn.ModuleList([nn.Linear(narrow, width, bias=False) for _ in range(layers + 1)])
        if basis_Dd is not None:
            with torch.no_grad():
                for projection in self.projections:
                    projection.weight.copy_(basis_Dd)  # type: ignore[operator]  # a ModuleList forgets its types
        # In a list, so that the teacher is no part of this module: not trained, not saved, not synchronised.
        self._teacher = [Observed(teacher, self._mapped)]

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        """The loss terms `embedding`, `hidden`, `attention`."""
        with torch.no_grad():
            theirs = self._teacher[0](batch.input_ids_BS, batch.mask_BS)
        mine = self.student(batch.input_ids_BS, batch.mask_BS)
        hidden = [projection(state) for projection, state in zip(self.projections, mine.hidden, strict=True)]
        targets = [theirs.hidden[0], *(theirs.hidden[layer + 1] for layer in self._mapped)]
        scores = [mine.scores[layer] for layer in range(len(self._mapped))]
        return intermediate_loss(
            hidden, targets, scores, [theirs.scores[layer] for layer in self._mapped], batch.mask_BS.bool()
        )


class Prediction(nn.Module):
    """Soft cross-entropy of the student's logits against the teacher's, which were worked out once."""

    def __init__(self, student: nn.Module, teacher_logits_NC: Tensor, temperature: float) -> None:
        super().__init__()
        self.student = student
        self._teacher_logits_NC = teacher_logits_NC  # no buffer: it belongs to the rows, not to the student
        self._temperature = temperature

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        """The loss term `soft_label`."""
        logits_BC = self.student(input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS).logits
        target_BC = self._teacher_logits_NC[batch.row_B.cpu()].to(logits_BC.device)
        return {"soft_label": soft_cross_entropy(logits_BC, target_BC, self._temperature)}


def teacher_logits(
    teacher: BertForSequenceClassification, examples: Encoded, world: World, folder: Path
) -> NDArray[np.float32]:
    """The teacher's logits (N, C) on every training row, each process doing its share, kept for a resumed run."""
    folder.mkdir(parents=True, exist_ok=True)
    done, partial = folder / "teacher_logits.npy", folder / "teacher_logits.partial.npy"
    if not world.broadcast(done.is_file()):
        shape = (len(examples), teacher.config.num_labels)
        if world.is_leader:
            # numpy gives open_memmap no type hints.
            np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape).flush()  # type: ignore[no-untyped-call]
        world.barrier()
        logits_NC = np.lib.format.open_memmap(partial, mode="r+")  # type: ignore[no-untyped-call]
        progress = Progress("teacher", total=len(examples), visible=world.is_leader)
        for number, batch in enumerate(examples.batches_by_length(TEACHER_BATCH)):
            progress.advance(len(batch.row_B))
            if number % world.size == world.rank:
                tensors = Tensors.of(batch, world.device)
                with torch.inference_mode(), autocast(world):
                    output = teacher(input_ids=tensors.input_ids_BS, attention_mask=tensors.mask_BS)
                logits_NC[batch.row_B] = output.logits.float().cpu().numpy()
        progress.close()
        logits_NC.flush()
        world.barrier()
        if world.is_leader:
            partial.rename(done)
        world.barrier()
    loaded: NDArray[np.float32] = np.load(done)
    return loaded
