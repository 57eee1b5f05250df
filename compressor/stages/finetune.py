"""finetune: a teacher for the task, trained from a pretrained encoder or adopted from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import adopt_classifier, check_vocabulary, load_encoder, load_tokenizer
from compressor.config import FinetuneConfig
from compressor.dataset import ENCODED, encode
from compressor.errors import ModelError
from compressor.evaluate import METRIC_NAMES, TorchPredictor, blind_score, measure_splits, predict, scores
from compressor.models import rescale, score_scale
from compressor.shapes import Sizes, check_reach
from compressor.sources import model_folder
from compressor.tasks import Task
from compressor.training import Tensors, fit
from compressor.world import World, launch

FAR = 1.25  # times the error of the median: a teacher that knows little comes near 1


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

    Raises ModelError if a checkpoint does not fit the task, if the teacher is no better than chance, or if its scores
    are of another scale.
    """
    section = config.model_dump() | {"max_tokens": max_tokens, "seed": seed}
    parents = {"corpus": examples}
    with artifact.write(out, "teacher", key=key, section=section, parents=parents, together=True) as draft:
        cache = out.parent / ENCODED
        launch(_work, config, task, examples, max_tokens, seed, cache, draft.path, processes=processes, device=device)
        draft.take_result()
        _refuse_chance(draft.metrics, config.teacher or config.base, task)
        if config.teacher is not None and task.is_regression:
            _refuse_other_scale(draft.metrics, config.teacher)
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
    check_reach(Sizes.of(model.config), max_tokens=max_tokens, is_pair=task.is_pair, folder=folder)
    splits = ("train", *task.held_out)
    encoded = {name: encode(examples, name, tokenizer, max_tokens, cache=cache, world=world) for name in splits}
    metrics: dict[str, Any] = {"source": source, "parameters": model.num_parameters(), "loaded": loaded.as_dict()}

    def validate() -> float:
        logits_NC = predict(TorchPredictor(model), encoded["validation"], world=world)
        model.train()
        return scores(task, logits_NC, encoded["validation"].label_N)[task.metric]

    if config.teacher is None:
        mean, spread = score_scale(task, lambda: encoded["train"].label_N)
        module = Supervised(model, task, mean, spread)
        history = fit(
            module, encoded["train"], config, world=world, seed=seed, folder=out / CHECKPOINT, validate=validate
        )
        rescale(model, mean, spread)
        metrics["history"] = history
    else:
        model.to(world.device)
    metrics |= measure_splits(TorchPredictor(model), task, encoded, out, world)
    if world.is_leader:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        if task.is_regression:
            label_N, answer_N = encoded["validation"].label_N, np.load(out / "validation.logits.npy")[:, 0]
            metrics["absolute_error"] = float(np.abs(answer_N - label_N).mean())
            metrics["blind_absolute_error"] = float(np.abs(np.median(label_N) - label_N).mean())
        artifact.write_result(out, {**metrics, "blind": blind_score(task, encoded["validation"].label_N)})


class Supervised(nn.Module):
    """Cross-entropy of a classifier, or squared error of a regression, on labelled rows.

    A regression answers scores less their `mean`, over their `spread`; `models.rescale` puts both into the model.
    """

    def __init__(self, model: nn.Module, task: Task, mean: float = 0.0, spread: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self._is_regression, self._mean, self._spread = task.is_regression, mean, spread

    def forward(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The loss term `label`."""
        output = self.model(input_ids=batch.input_ids_BS, token_type_ids=batch.segment_BS, attention_mask=batch.mask_BS)
        logits_BC = output.logits.float()
        if self._is_regression:
            return {"label": mse_loss(logits_BC[:, 0], (batch.label_B - self._mean) / self._spread)}
        return {"label": cross_entropy(logits_BC, batch.label_B)}


def _refuse_chance(metrics: dict[str, Any], source: str, task: Task) -> None:
    """Raise ModelError unless the teacher is surely better than giving every text the same answer."""
    low, _ = metrics["validation"]["interval_95"]
    if low <= metrics["blind"]:
        found = metrics["validation"]
        name, score = METRIC_NAMES[found["metric"]], 100 * found["score"]
        remedy = task.imbalance_remedy(metrics["blind"])
        why = f"such a metric hardly shows what was learnt; {remedy}" if remedy else "a student would learn noise"
        if task.name == "wnli":
            why += (
                "; a BERT seldom does better on WNLI, which repeats its texts with the other label (TinyBERT leaves it "
                "out); give a checkpoint that does as finetune.teacher"
            )
        elif not remedy:
            why += (
                "; train it longer, give it more rows, or check the checkpoint's label names and the labels of the data"
            )
        raise ModelError(
            f"the teacher from {source} has {name} {score:.1f} (95 % interval from {100 * low:.1f}) on the "
            f"{found['rows']} validation rows, and the same answer to every text has {100 * metrics['blind']:.1f}; "
            f"{why}"
        )


def _refuse_other_scale(metrics: dict[str, Any], source: str) -> None:
    """Raise ModelError if an adopted regression is much further from the scores than one answer to every text.

    Its scores are of another scale then, which correlations do not see.
    """
    if metrics["absolute_error"] > FAR * metrics["blind_absolute_error"]:
        raise ModelError(
            f"the teacher from {source} is off by {metrics['absolute_error']:.3g} on average on the validation rows, "
            f"and their median by {metrics['blind_absolute_error']:.3g}: its scores are of another scale; give a "
            "teacher that was trained on the scale of the data, or bring the data's scores to the teacher's"
        )
