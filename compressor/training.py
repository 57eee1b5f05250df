"""fit(): the one training loop. DDP, mixed precision, clipping, checkpoints that a killed run goes on from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.config import Optimisation
from compressor.dataset import Batch, Encoded, training_order
from compressor.progress import Progress
from compressor.world import World

CHECKPOINT_EVERY_S = 30.0
CLIP_NORM = 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tensors:
    """A batch on its device."""

    input_ids_BS: Tensor
    mask_BS: Tensor
    label_B: Tensor
    row_B: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Tensors:
        """Move a batch to `device`."""
        arrays = (batch.input_ids_BS, batch.mask_BS, batch.label_B, batch.row_B)
        return cls(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


def fit(
    module: nn.Module,
    examples: Encoded,
    config: Optimisation,
    *,
    world: World,
    seed: int,
    folder: Path,
    validate: Callable[[], float] | None = None,
    validations_per_epoch: int = 1,
) -> dict[str, Any]:
    """Train `module`, whose forward pass maps a `Tensors` batch to a dictionary of loss terms that are summed.

    `validate` measures it `validations_per_epoch` times in each epoch (higher is better); the best state is kept at
    the end, or the last one without it. `folder` holds the checkpoint: a run that was killed goes on
    from there and, on a CPU, ends with the same weights. Returns the history: steps, precision, and mean terms and
    validation metric between validations.
    """
    module.to(world.device).train()
    per_epoch = len(_order(examples, config, world, seed, 0))
    steps = max(1, round(per_epoch * config.epochs))
    optimizer = _optimizer(module, config, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=_precision(world) == torch.float16)
    state = _State(module, optimizer, scaler, folder)
    step, history, best = state.load()
    history = history or {"steps": steps, "precision": str(_precision(world)).removeprefix("torch."), "epochs": []}
    wrapped = nn.parallel.DistributedDataParallel(module) if world.size > 1 else module
    totals, saved_at = dict[str, Tensor](), time.monotonic()
    progress = Progress("train", total=steps, start=step, visible=world.is_leader)
    while step < steps:
        epoch, skip = divmod(step, per_epoch)
        order = _order(examples, config, world, seed, epoch)
        pause = min(steps, epoch * per_epoch + _next_pause(skip, per_epoch, validations_per_epoch))
        for row_B in order[skip : skip + pause - step]:
            torch.manual_seed(_step_seed(seed, step, world.rank))  # dropout does not depend on where a run resumed
            batch = Tensors.of(examples.batch(row_B), world.device)
            with autocast(world):
                terms = wrapped(batch)
            _update(module, torch.stack(list(terms.values())).sum(), optimizer, scaler, _rate(config, step, steps))
            step += 1
            _add(totals, terms)
            progress.advance()
            if world.is_leader and time.monotonic() - saved_at > CHECKPOINT_EVERY_S and step < pause:
                state.save(step, history, best)
                saved_at = time.monotonic()
        entry = _entry(totals, step, validate)
        totals.clear()
        history["epochs"].append(entry)
        progress.note(_line(entry))
        if validate is not None and entry["validation"] >= best:  # of equals, the longer trained
            best = entry["validation"]
            if world.is_leader:
                state.save_best()
        if world.is_leader:
            state.save(step, history, best)
        saved_at = time.monotonic()
    progress.close()
    if validate is not None:
        state.load_best(world)
        history["kept"] = "the state with the best validation metric"
    module.eval()
    return history


def autocast(world: World) -> AbstractContextManager[Any]:
    """The mixed-precision context of this device; none where low precision is not faster."""
    precision = _precision(world)
    return torch.autocast(world.device.type, dtype=precision) if precision != torch.float32 else nullcontext()


def _precision(world: World) -> torch.dtype:
    """bf16 where the hardware computes in it, fp16 on older GPUs, fp32 on other CPUs."""
    if world.device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's gap
        return torch.float32
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _order(examples: Encoded, config: Optimisation, world: World, seed: int, epoch: int) -> list[Any]:
    return training_order(
        examples.length_N, batch_size=config.batch_size, seed=seed, epoch=epoch, rank=world.rank, size=world.size
    )


def _step_seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + rank


def _optimizer(module: nn.Module, config: Optimisation, world: World) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as BERT does."""
    decayed = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.ndim > 1]
    others = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def _rate(config: Optimisation, step: int, steps: int) -> float:
    """Learning rate of a step: linear warm-up, then linear decay to 0 or constant."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (steps - step) / max(1, steps - warmup)


def _update(
    module: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's gap
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def _add(totals: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    """Sum loss terms on the device: reading them every step would wait for it."""
    for name, value in (*terms.items(), ("steps", torch.ones(()))):
        totals[name] = totals.get(name, torch.zeros(())).to(value.device) + value.detach().float()


def _next_pause(step: int, per_epoch: int, pauses: int) -> int:
    """The step of an epoch, after `step`, at which its next validation stands; the last one is its end."""
    return next(pause for number in range(1, pauses + 1) if (pause := round(number * per_epoch / pauses)) > step)


def _entry(totals: Mapping[str, Tensor], step: int, validate: Callable[[], float] | None) -> dict[str, Any]:
    count = max(1.0, float(totals.get("steps", 1.0)))
    entry: dict[str, Any] = {"step": step}
    entry["losses"] = {name: round(float(total) / count, 5) for name, total in totals.items() if name != "steps"}
    if validate is not None:
        entry["validation"] = validate()
    return entry


def _line(entry: Mapping[str, Any]) -> str:
    parts = [f"{name} {value:.4f}" for name, value in entry["losses"].items()]
    if "validation" in entry:
        parts.append(f"validation {100 * entry['validation']:.2f} %")
    return f"step {entry['step']}: {', '.join(parts)}"


class _State:
    """What a killed run needs to go on: one safetensors file, replaced atomically."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, folder: Path
    ) -> None:
        self._module, self._optimizer, self._scaler = module, optimizer, scaler
        self._file, self._best = folder / "state.safetensors", folder / "best.safetensors"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, history: Mapping[str, Any], best: float) -> None:
        tensors = {f"model.{name}": value for name, value in self._module.state_dict().items()}
        for index, slots in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": value for slot, value in slots.items()}
        facts = {"step": step, "history": history, "best": best, "scale": self._scaler.get_scale()}
        _save(tensors, self._file, {"facts": json.dumps(facts)})

    def load(self) -> tuple[int, dict[str, Any], float]:
        """Step to go on from, history and best metric so far: the beginning if nothing was saved."""
        if not self._file.is_file():
            return 0, {}, -1.0
        slots = dict[int, dict[str, Tensor]]()
        weights = dict[str, Tensor]()
        with safe_open(self._file, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            for name in file.keys():  # noqa: SIM118  (safe_open has keys() and cannot be iterated)
                part, _, rest = name.partition(".")
                if part == "model":
                    weights[rest] = file.get_tensor(name)
                else:
                    index, _, slot = rest.partition(".")
                    slots.setdefault(int(index), {})[slot] = file.get_tensor(name)
        self._module.load_state_dict(weights)
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": slots})
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": facts["scale"]})
        log.info("going on from step %d", facts["step"])
        return facts["step"], facts["history"], facts["best"]

    def save_best(self) -> None:
        _save(dict(self._module.state_dict()), self._best, {})

    def load_best(self, world: World) -> None:
        world.barrier()
        self._module.load_state_dict(load_file(self._best))


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    partial = path.with_suffix(".new")
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, partial, metadata)
    partial.replace(path)
