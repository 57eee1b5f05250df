"""finetune: a teacher for the task, trained from a pretrained encoder or adopted from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.config import FinetuneConfig
from compressor.dataset import ENCODED, SPLITS, encode
from compressor.errors import ModelError
from compressor.evaluate import TorchPredictor, measure, predict, save_classifier
from compressor.models import check_vocabulary, load_classifier, load_encoder, load_tokenizer
from compressor.sources import model_folder
from compressor.tasks import Task
from compressor.training import Tensors, fit
from compressor.world import World, launch


def finetune(
    config: FinetuneConfig,
    task: Task,
    examples: Artifact,
    *,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Train a teacher on the examples, or adopt `config.teacher`, and measure it on validation and test.

    Raises ModelError if a checkpoint does not fit the task, or if the teacher is no better than chance.
    """
    with artifact.write(out, "teacher", key=key, section=config.model_dump(), parents={"corpus": examples}) as draft:
        cache = out.parent / ENCODED
        launch(_work, config, task, examples, max_tokens, seed, cache, draft.path, processes=processes, device=device)
        draft.take_result()
        _refuse_chance(draft.metrics, config.teacher or config.base)
    return Artifact.open(out, kind="teacher")


def _work(
    world: World,
    config: FinetuneConfig,
    task: Task,
    examples: Artifact,
    max_tokens: int,
    seed: int,
    cache: Path,
    out: Path,
) -> None:
    """What each process does."""
    source = config.teacher or config.base
    what = "finetune.teacher" if config.teacher else "finetune.base"
    folder = model_folder(source, what=what)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(seed)  # the new head
    model = load_classifier(folder, task) if config.teacher else load_encoder(folder, task)
    check_vocabulary(model, tokenizer, folder)
    encoded = {name: encode(examples, name, tokenizer, max_tokens, cache=cache, world=world) for name in SPLITS}
    metrics: dict[str, Any] = {"source": source, "parameters": model.num_parameters()}

    def validate() -> float:
        logits_NC = predict(TorchPredictor(model), encoded["validation"])
        model.train()
        return float(measure(logits_NC, encoded["validation"].label_N)["accuracy"])

    if config.teacher is None:
        module = Classification(model)
        history = fit(
            module, encoded["train"], config, world=world, seed=seed, folder=out / CHECKPOINT, validate=validate
        )
        metrics["history"] = history
    else:
        model.to(world.device)
    if world.is_leader:
        metrics |= save_classifier(model, tokenizer, encoded, out)
        counts = np.bincount(encoded["validation"].label_N)
        artifact.write_result(out, {**metrics, "majority": float(counts.max() / counts.sum())})


class Classification(nn.Module):
    """Cross-entropy of a classifier on labelled rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The loss term `label`."""
        logits_BC = self.model(input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS).logits
        return {"label": cross_entropy(logits_BC.float(), batch.label_B)}


def _refuse_chance(metrics: dict[str, Any], source: str) -> None:
    """Raise ModelError unless the teacher is surely better than always giving the most frequent label."""
    low, _ = metrics["validation"]["interval_95"]
    if low <= metrics["majority"]:
        raise ModelError(
            f"the teacher from {source} has {100 * metrics['validation']['accuracy']:.1f} % accuracy on the validation "
            f"rows, and the most frequent label alone gives {100 * metrics['majority']:.1f} %; a student would learn "
            "noise; check the checkpoint's label names, or the labels of the data"
        )
