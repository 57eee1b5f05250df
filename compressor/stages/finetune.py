"""finetune: a teacher for the task, trained from a pretrained encoder or adopted from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import adopt_classifier, check_vocabulary, load_encoder, load_tokenizer
from compressor.config import FinetuneConfig
from compressor.dataset import ENCODED, encode
from compressor.errors import ModelError
from compressor.evaluate import METRIC_NAMES, TorchPredictor, blind_score, predict, save_classifier, scores
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
    with artifact.write(
        out, "teacher", key=key, section=config.model_dump(), parents={"corpus": examples}, together=True
    ) as draft:
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
    model, loaded = adopt_classifier(folder, task) if config.teacher else load_encoder(folder, task)
    check_vocabulary(model, tokenizer, folder)
    splits = ("train", *task.held_out)
    encoded = {name: encode(examples, name, tokenizer, max_tokens, cache=cache, world=world) for name in splits}
    metrics: dict[str, Any] = {"source": source, "parameters": model.num_parameters(), "loaded": loaded.as_dict()}

    def validate() -> float:
        logits_NC = predict(TorchPredictor(model), encoded["validation"], world=world)
        model.train()
        return scores(task, logits_NC, encoded["validation"].label_N)[task.metric]

    if config.teacher is None:
        module = Supervised(model, task)
        history = fit(
            module, encoded["train"], config, world=world, seed=seed, folder=out / CHECKPOINT, validate=validate
        )
        metrics["history"] = history
    else:
        model.to(world.device)
    if world.is_leader:
        metrics |= save_classifier(model, tokenizer, task, encoded, out)
        artifact.write_result(out, {**metrics, "blind": blind_score(task, encoded["validation"].label_N)})


class Supervised(nn.Module):
    """Cross-entropy of a classifier, or squared error of a regression, on labelled rows."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._is_regression = task.is_regression

    def forward(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The loss term `label`."""
        output = self.model(input_ids=batch.input_ids_BS, token_type_ids=batch.segment_BS, attention_mask=batch.mask_BS)
        logits_BC = output.logits.float()
        if self._is_regression:
            return {"label": mse_loss(logits_BC[:, 0], batch.label_B)}
        return {"label": cross_entropy(logits_BC, batch.label_B)}


def _refuse_chance(metrics: dict[str, Any], source: str) -> None:
    """Raise ModelError unless the teacher is surely better than giving every text the same answer."""
    low, _ = metrics["validation"]["interval_95"]
    if low <= metrics["blind"]:
        found = metrics["validation"]
        name, score = METRIC_NAMES[found["metric"]], 100 * found["score"]
        raise ModelError(
            f"the teacher from {source} has {name} {score:.1f} (95 % interval from {100 * low:.1f}) on the "
            f"{found['rows']} validation rows, and the same answer to every text has {100 * metrics['blind']:.1f}; a "
            "student would learn noise; train it longer, give it more rows, or check the checkpoint's label names and "
            "the labels of the data"
        )
