"""train: rows per second of training steps, against a training that works as TinyBERT's published code does.

Both train BERT-base's size into TinyBERT4's, with random weights, on real texts: time needs no training.
Shape legend: B batch, S sequence, D width, H heads, C classes, N rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import BertConfig, BertForSequenceClassification

from benchmarks import report
from benchmarks.report import Table, number, ratio
from compressor import machine
from compressor.artifact import Artifact
from compressor.checkpoints import load_tokenizer
from compressor.config import DistillConfig
from compressor.dataset import Encoded, TrainingOrder, encode
from compressor.errors import GateError
from compressor.losses import soft_cross_entropy
from compressor.objectives import Intermediate, Prediction
from compressor.shapes import layer_map
from compressor.sources import model_folder
from compressor.training import Tensors, Trainer, cast_frozen
from compressor.world import World, launch

BATCH, MAX_TOKENS = 32, 64
RATE = 5e-5
TINYBERT_4 = {"num_hidden_layers": 4, "hidden_size": 312, "num_attention_heads": 12, "intermediate_size": 1200}
NO_DROPOUT, DROPOUT = ({"hidden_dropout_prob": share, "attention_probs_dropout_prob": share} for share in (0.0, 0.1))
TARGETS = {
    "intermediate": 8.0,
    "prediction": 5.0,
    "two_processes_intermediate": 1.6,
}
MAX_LOSS_DIFFERENCE = 1e-4

PROCESSES_FILE = "processes.json"
ALONE = World(device=torch.device("cpu"))

Step = Callable[[], int]
"""Takes a step and returns how many rows it was on."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and for how long: every mode takes turns of some steps, after one turn that does not count."""

    turns: int
    steps: int
    """Steps of one turn."""
    slow_steps: int
    """Steps of one turn of the mode that works as the published code does."""
    teacher: Mapping[str, int] = field(default_factory=dict)
    """Its sizes; the library's defaults are bert-base-uncased's."""
    student: Mapping[str, int] = field(default_factory=lambda: TINYBERT_4)

    def models(self, **student: Any) -> tuple[Any, Any]:
        """Teacher and student with random weights, always the same; the student without dropout unless asked for."""
        torch.manual_seed(0)
        teacher = BertForSequenceClassification(BertConfig(num_labels=2, **self.teacher)).eval().requires_grad_(False)
        shape = BertConfig(num_labels=2, **{**NO_DROPOUT, **self.student, **student})
        return teacher, BertForSequenceClassification(shape)


FULL, QUICK = Plan(turns=5, steps=20, slow_steps=3), Plan(turns=2, steps=4, slow_steps=1)


def train(corpus: Path, base: str, *, plan: Plan, threads: int, seed: int, command: str) -> dict[str, Any]:
    """Time steps of both stages of distillation on the training rows of `corpus`, and two processes against one.

    `base` is the source of a model whose tokenizer makes the rows. Raises CompressorError if one of them is unusable.
    """
    begun = report.Begun()
    with tempfile.TemporaryDirectory() as scratch:
        encoded = _encoded(corpus, base, Path(scratch))
        torch.set_num_threads(threads)
        steps = {
            "intermediate": intermediate_steps(plan, encoded, seed),
            "prediction": prediction_steps(plan, encoded, seed),
        }
        result: dict[str, Any] = {
            "benchmark": "train",
            "quick": plan is not FULL,
            "batch": BATCH,
            "tokens_mean": float(encoded.lengths(np.arange(len(encoded))).mean()),
            "losses": compared_losses(plan, encoded, seed),
            "stages": {stage: in_turns(modes, plan) for stage, modes in steps.items()},
        }
        launch(_together, corpus, base, Path(scratch), seed, plan, processes=2, device="cpu")
        result["processes"] = json.loads((Path(scratch) / PROCESSES_FILE).read_text(encoding="utf-8"))
    stages, processes = result["stages"], result["processes"]
    result["speedups"] = {
        "intermediate": _speedup(stages["intermediate"], "ours", "published"),
        "prediction": _speedup(stages["prediction"], "cached", "teacher_each_step"),
        "prediction_against_published": _speedup(stages["prediction"], "cached", "published"),
        "two_processes_intermediate": _speedup(processes["intermediate"], "two", "one"),
        "two_processes_prediction": _speedup(processes["prediction"], "two", "one"),
    }
    return result | report.context(begun, command=command, seed=seed, threads=threads)


def _encoded(corpus: Path, base: str, cache: Path) -> Encoded:
    tokenizer = load_tokenizer(model_folder(base, what="--base"))
    return encode(Artifact.open(corpus, kind="examples"), "train", tokenizer, MAX_TOKENS, cache=cache)


def _layers(teacher: Any, student: Any) -> tuple[int, ...]:
    return layer_map(student.config.num_hidden_layers, teacher.config.num_hidden_layers)


def _config(objective: str, **changes: Any) -> DistillConfig:
    return DistillConfig.model_validate({"objective": objective, "epochs": 1.0, "learning_rate": RATE} | changes)


def _batches(encoded: Encoded, seed: int, batch: int = BATCH) -> Iterator[NDArray[np.int64]]:
    """Rows of one batch after the other, without end, as training takes them."""
    for epoch in count():
        yield from TrainingOrder(encoded, batch_size=batch, seed=seed, epoch=epoch).batches()


def our_step(module: nn.Module, config: DistillConfig, encoded: Encoded, seed: int, world: World = ALONE) -> Step:
    """A step of `training.fit` on BATCH rows for each process."""
    trainer, batches = Trainer(module.train(), config, world), _batches(encoded, seed, BATCH * world.size)

    def step() -> int:
        row_B = next(batches)
        trainer.step(encoded, row_B, RATE, {})
        return len(row_B)

    return step


def published_step(module: nn.Module, encoded: Encoded, seed: int) -> Step:
    """A step as the published code takes it: float32, padded to the longest text allowed, losses read every time."""
    padded, batches = encoded.padded_to(MAX_TOKENS), _batches(encoded, seed)
    optimizer = torch.optim.AdamW([weights for weights in module.parameters() if weights.requires_grad], foreach=False)

    def step() -> int:
        row_B = next(batches)
        terms = module(Tensors.of(padded.batch(row_B), ALONE.device))
        torch.autograd.backward(torch.stack(list(terms.values())).sum())
        for value in terms.values():
            value.item()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return len(row_B)

    return step


def intermediate_steps(plan: Plan, encoded: Encoded, seed: int) -> dict[str, Step]:
    """By mode: a step of the intermediate stage."""
    teacher, student = plan.models(**DROPOUT)
    published = Published(student, teacher.train(), _layers(teacher, student))
    teacher, student = plan.models()
    cast_frozen(teacher, ALONE)
    config = _config("intermediate")
    ours = Intermediate(student, teacher, _layers(teacher, student), config)
    return {
        "published": published_step(published.train(), encoded, seed),
        "ours": our_step(ours, config, encoded, seed),
    }


def prediction_steps(plan: Plan, encoded: Encoded, seed: int) -> dict[str, Step]:
    """By mode: a step of the prediction stage."""
    config = _config("prediction")
    teacher, student = plan.models(**DROPOUT)
    published = WithTeacher(student, teacher.train(), inside=True)
    teacher, student = plan.models()
    cast_frozen(teacher, ALONE)
    logits_NC = np.zeros((len(encoded), 2), dtype=np.float32)
    return {
        "published": published_step(published.train(), encoded, seed),
        "teacher_each_step": our_step(WithTeacher(student, teacher), config, encoded, seed),
        "cached": our_step(Prediction(plan.models()[1], logits_NC, config), config, encoded, seed),
    }


class Published(nn.Module):
    """The intermediate stage as published: states and scores of every layer of both models, padding compared too.

    One projection for all. (The published teacher is never told to evaluate: it drops out, as it does here in
    training mode.)
    """

    def __init__(self, student: Any, teacher: Any, layers: tuple[int, ...]) -> None:
        super().__init__()
        student.bert.pooler.requires_grad_(False)
        student.classifier.requires_grad_(False)
        self.student, self._teacher, self._layers = student, [teacher], layers
        self.projection = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        """The loss terms."""
        with torch.no_grad():
            targets, target_scores = _inside(self._teacher[0], batch)
        states, scores = _inside(self.student, batch)
        places = (0, *(layer + 1 for layer in self._layers))
        errors = [mse_loss(self.projection(mine), targets[place]) for mine, place in zip(states, places, strict=True)]
        target_scores = [target_scores[layer] for layer in self._layers]
        pairs = [
            [torch.where(found <= -1e2, torch.zeros_like(found), found) for found in pair]
            for pair in zip(scores, target_scores, strict=True)
        ]
        differences = [mse_loss(mine, theirs) for mine, theirs in pairs]
        return {
            "embedding": errors[0],
            "hidden": torch.stack(errors[1:]).sum(),
            "attention": torch.stack(differences).sum(),
        }


def _inside(model: Any, batch: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Embedding output and states (B, S, D), and masked scores before softmax (B, H, S, S), of every layer."""
    bias_B11S = (1.0 - batch.mask_BS[:, None, None, :].float()) * -10_000.0
    states = [model.bert.embeddings(input_ids=batch.input_ids_BS, token_type_ids=batch.segment_BS)]
    scores = list[Tensor]()
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        parts = (getattr(attention, name)(states[-1]) for name in ("query", "key", "value"))
        query, key, value = (part.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2) for part in parts)
        scores.append(query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1]) + bias_B11S)
        weights_BHSS = attention.dropout(scores[-1].softmax(dim=-1))
        mixed_BSD = (weights_BHSS @ value).transpose(1, 2).flatten(2)
        attended_BSD = layer.attention.output(mixed_BSD, states[-1])
        states.append(layer.output(layer.intermediate(attended_BSD), attended_BSD))
    return states, scores


class WithTeacher(nn.Module):
    """The prediction stage with the teacher run at every step; `inside`: both as the published code runs them."""

    def __init__(self, student: Any, teacher: Any, *, inside: bool = False) -> None:
        super().__init__()
        self.student, self._teacher, self._inside = student, [teacher], inside

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        """The loss term."""
        with torch.no_grad():
            target_BC = self._logits(self._teacher[0], batch)
        return {"soft_label": soft_cross_entropy(self._logits(self.student, batch), target_BC)}

    def _logits(self, model: Any, batch: Tensors) -> Tensor:
        if self._inside:
            states, _ = _inside(model, batch)
            logits_BC: Tensor = model.classifier(model.bert.pooler(states[-1]))
            return logits_BC
        inputs = {"input_ids": batch.input_ids_BS, "token_type_ids": batch.segment_BS, "attention_mask": batch.mask_BS}
        found_BC: Tensor = model(**inputs).logits
        return found_BC


def compared_losses(plan: Plan, encoded: Encoded, seed: int) -> dict[str, Any]:
    """Loss terms of one batch in float32, ours with the published normalisation, and their largest difference."""
    teacher, student = plan.models()
    layers = _layers(teacher, student)
    published = Published(student, teacher, layers)
    config = _config("intermediate", projection="shared", normalisation="published", precision="fp32")
    start = [(published.projection.weight.detach(), published.projection.bias.detach())]
    ours = Intermediate(student, teacher, layers, config, start)
    batch = Tensors.of(encoded.padded_to(MAX_TOKENS).batch(next(_batches(encoded, seed))), ALONE.device)
    with torch.no_grad():
        found = {"published": published(batch), "ours": ours(batch)}
    terms = {mode: {name: float(value) for name, value in values.items()} for mode, values in found.items()}
    differences = [abs(value - terms["ours"][name]) for name, value in terms["published"].items()]
    return {**terms, "max_difference": max(differences)}


def in_turns(modes: Mapping[str, Step], plan: Plan) -> dict[str, Any]:
    """By mode: rows per second of wall and of processor time, each the median of turns that the modes take."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for turn in range(plan.turns + 1):
        for name, step in modes.items():
            log.info("%s, turn %d of %d ...", name, turn, plan.turns)
            taken = _turn(step, plan.slow_steps if name == "published" else plan.steps)
            found[name] += [taken] if turn else []  # the first is to warm up
    return {name: _medians(rates) for name, rates in found.items()}


def _turn(step: Step, steps: int) -> tuple[float, float]:
    """Rows per second of wall and of processor time."""
    began, busy = time.perf_counter(), time.process_time()
    rows = sum(step() for _ in range(steps))
    return rows / (time.perf_counter() - began), rows / (time.process_time() - busy)


def _medians(rates: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = (statistics.median(values) for values in zip(*rates, strict=True))
    return {"rows_per_s": wall, "rows_per_processor_s": processor}


def _together(world: World, corpus: Path, base: str, scratch: Path, seed: int, plan: Plan) -> None:
    """What each of two processes does: by turns the leader alone, and both."""
    torch.set_num_threads(1)
    encoded, result = _encoded(corpus, base, scratch), dict[str, Any]()
    logits_NC = np.zeros((len(encoded), 2), dtype=np.float32)
    for stage in ("intermediate", "prediction"):
        config, modules = _config(stage), list[nn.Module]()
        for _ in range(2):
            teacher, student = plan.models()
            cast_frozen(teacher, ALONE)
            modules.append(
                Intermediate(student, teacher, _layers(teacher, student), config)
                if stage == "intermediate"
                else Prediction(student, logits_NC, config)
            )
        one = our_step(modules[0], config, encoded, seed)
        two = our_step(modules[1], config, encoded, seed, world)
        found: dict[str, list[tuple[float, float]]] = {"one": [], "two": []}
        for _ in range(plan.turns + 1):
            if world.is_leader:
                found["one"].append(_turn(one, plan.steps))
            world.barrier()
            found["two"].append(_turn(two, plan.steps))
        result[stage] = {name: _medians(rates[1:]) for name, rates in found.items() if rates}
        result[stage]["weights_equal"] = _weights_equal(modules[1], world)
    if world.is_leader:
        (scratch / PROCESSES_FILE).write_text(json.dumps(result), encoding="utf-8")


def _weights_equal(module: nn.Module, world: World) -> bool:
    """Whether every process has the same weights, bit by bit."""
    bits = b"".join(weights.detach().numpy().tobytes() for weights in module.parameters())
    digest = hashlib.sha256(bits).hexdigest()
    return bool(world.sum(np.array([digest == world.broadcast(digest)], dtype=np.int64))[0] == world.size)


def _speedup(modes: Mapping[str, Any], fast: str, slow: str) -> dict[str, float | None]:
    return {unit: ratio(modes[fast][unit], modes[slow][unit]) for unit in ("rows_per_s", "rows_per_processor_s")}


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError if losses differ, if a speed-up is below its target, or if nobody can tell."""
    if result["machine_was_busy"]:
        raise GateError(
            f"{report.other_work(result)}, the bound is {machine.BUSY_PERCENT} %: steps cannot be timed beside it; "
            "run again on a quiet machine"
        )
    missed = [
        f"{name} is {result['speedups'][name]['rows_per_s']:.2f} times as fast; the target is at least {target:g}"
        for name, target in TARGETS.items()
        if result["speedups"][name]["rows_per_s"] < target
    ]
    if result["losses"]["max_difference"] > MAX_LOSS_DIFFERENCE:
        missed.insert(
            0, f"losses differ by {result['losses']['max_difference']:.2g}; the bound is {MAX_LOSS_DIFFERENCE:g}"
        )
    missed += [
        f"two processes have different weights after the {stage} stage; they must be equal bit by bit"
        for stage, found in result["processes"].items()
        if not found["weights_equal"]
    ]
    if missed:
        raise GateError("; ".join(missed))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    groups = {**result["stages"], **{f"{stage}, processes": modes for stage, modes in result["processes"].items()}}
    speeds = [
        [f"{stage}: {mode}", *(number(modes[mode][unit], 1) for unit in ("rows_per_s", "rows_per_processor_s"))]
        for stage, modes in groups.items()
        for mode in modes
        if mode != "weights_equal"
    ]
    ratios = [
        [name, *(number(value) for value in found.values()), f"{TARGETS[name]:g}" if name in TARGETS else ""]
        for name, found in result["speedups"].items()
    ]
    losses = result["losses"]
    terms = [[name, *(f"{losses[mode][name]:.6f}" for mode in ("published", "ours"))] for name in losses["ours"]]
    return [
        Table(f"Training steps of {BATCH} rows, rows per second", ["mode", "wall", "processor time"], speeds),
        Table("Speed-ups", ["what", "wall", "processor time", "target at least"], ratios),
        Table(
            f"Loss of one batch in float32 (largest difference {losses['max_difference']:.1e})",
            ["term", "published", "ours"],
            terms,
        ),
    ]
