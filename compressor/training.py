"""fit(): the one training loop. DDP, mixed precision, clipping, checkpoints that a killed run goes on from."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSdpaSelfAttention, BertSelfAttention

from compressor.config import Optimisation, Precision
from compressor.dataset import Batch, Encoded, Rows, TrainingOrder
from compressor.errors import ConfigError, ModelError
from compressor.progress import Progress
from compressor.world import PATIENCE, World

CHECKPOINT_EVERY_S = 30.0
CLIP_NORM = 1.0
# Finer than the server's 8: of texts of 13 tokens, in batches of nearly one length, that makes a quarter padding.
PAD_MULTIPLE = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tensors:
    """A batch on its device."""

    input_ids_BS: Tensor
    segment_BS: Tensor
    mask_BS: Tensor
    label_B: Tensor
    row_B: Tensor
    """Always in main memory, where what is looked up by row lies: no step waits for the device."""
    tokens: float = 1.0
    """Real tokens of a row on average, as a multiple of what they are in the whole step that this is a part of."""
    pairs: float = 1.0
    """The same of pairs of tokens in one row."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device, tokens: float = 1.0, pairs: float = 1.0) -> Tensors:
        """Move a batch to `device`."""

        def moved(array: NDArray[Any]) -> Tensor:
            tensor = torch.from_numpy(array)
            # Only from pinned memory is a copy to a GPU not waited for.
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        input_ids_BS, segment_BS, mask_BS = map(moved, batch.inputs)
        row_B = torch.from_numpy(batch.row_B)
        return cls(input_ids_BS, segment_BS, mask_BS, moved(batch.label_B), row_B, tokens, pairs)


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
    rates: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Train `module`, whose forward pass maps a `Tensors` batch to a dictionary of loss terms that are summed.

    Each term is a mean over the rows it is given; one over their tokens, or pairs of these, is multiplied by the
    batch's `tokens` or `pairs`. So, whatever the number of processes and of `config.accumulate`, a step is that of the
    same rows in one batch. `validate` measures the module on every rank, `validations_per_epoch` times in each epoch
    (higher is better; the leader's value counts); the best state is kept at the end, or the last one without it.
    `rates` are factors of the learning rate, by how the names of weights begin. `folder` holds the checkpoint: a run
    that was killed goes on from there, also with another number of processes, and on one CPU process ends with the same
    weights. Returns the history: steps, precision, and mean terms and validation metric between validations; in fp16
    also the loss scale, and the steps that were skipped because gradients were not finite. Raises ConfigError if the
    device has no such precision, DataError if a batch has fewer rows than there are processes, and ModelError if a mean
    term or the metric is not finite.
    """
    module.to(world.device).train()
    per_epoch = len(_order(examples, config, seed, 0, size=world.size))  # refuses more processes than rows of a batch
    steps = _steps(per_epoch, config)
    trainer = Trainer(module, config, world, rates)
    state = _State(module, trainer, folder)
    step, history, best = state.load(world)
    history = history or {"steps": steps, "precision": str(trainer.dtype).removeprefix("torch."), "epochs": []}
    totals, counted, saved_at = dict[str, Tensor](), 0, time.monotonic()
    progress = Progress("train", total=steps, start=step, visible=world.is_leader)
    while step < steps:
        epoch, skip = divmod(step, per_epoch)
        pause = min(steps, epoch * per_epoch + _next_pause(skip, per_epoch, validations_per_epoch))
        for row_B in islice(_order(examples, config, seed, epoch).batches(skip), pause - step):
            torch.manual_seed(_step_seed(seed, step, world.rank))  # dropout does not depend on where a run resumed
            trainer.step(examples, row_B, _rate(config, step, steps), totals)
            step, counted = step + 1, counted + 1
            progress.advance()
            if world.is_leader and time.monotonic() - saved_at > CHECKPOINT_EVERY_S and step < pause:
                state.save(step, history, best)
                saved_at = time.monotonic()
        entry: dict[str, Any] = {"step": step, "losses": _means(totals, counted, world)}
        totals, counted = {}, 0
        if trainer.scaler.is_enabled():
            entry |= {"loss_scale": trainer.scaler.get_scale(), "skipped_steps": trainer.skipped}
            trainer.skipped = 0
        _refuse_diverged(step, {f"mean {name} loss": mean for name, mean in entry["losses"].items()}, config)
        if validate is not None:
            entry["validation"] = world.broadcast(validate())
            _refuse_diverged(step, {"validation metric": entry["validation"]}, config)
            module.train()
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


def rows_seen(examples: Encoded, config: Optimisation, seed: int) -> Rows | None:
    """Numbers of the rows that less than an epoch of `fit` trains on, rising; None if they are all."""
    order = _order(examples, config, seed, 0)
    steps = _steps(len(order), config)
    if steps >= len(order):
        return None
    return np.sort(np.concatenate(list(islice(order.batches(), steps))))


def autocast(world: World, precision: Precision = "auto") -> AbstractContextManager[Any]:
    """The mixed-precision context of this device; none for float32. Raises ConfigError as `fit` does."""
    dtype = _dtype(precision, world.device)
    return torch.autocast(world.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()


def cast_frozen(model: nn.Module, world: World, precision: Precision = "auto") -> None:
    """Give the linear layers of a model that is not trained the type that `autocast` would cast them to at every step.

    Under `autocast` it answers the same as before, without the casts. Does nothing for float32.
    """
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.to(_dtype(precision, world.device))


def _dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What a precision means here; `auto` is bf16 where the hardware computes in it."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bf16" and not has_bf16:
            raise ConfigError('precision is "bf16" and this GPU does not compute in it; use "fp16", "fp32" or "auto"')
        chosen = torch.bfloat16 if has_bf16 else torch.float16
    else:
        is_available: Callable[[], bool] = torch.backends.mkldnn.is_available
        chosen = torch.bfloat16 if is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return chosen if precision == "auto" else DTYPES[precision]


class Trainer:
    """Takes the steps of one process: a module, its optimiser, and what they need."""

    def __init__(
        self, module: nn.Module, config: Optimisation, world: World, rates: Mapping[str, float] | None = None
    ) -> None:
        self._config, self._world = config, world
        self.dtype = _dtype(config.precision, world.device)
        if world.device.type == "cpu" and self.dtype != torch.float32:
            _attend_eagerly(module)
        self._forward: nn.Module = module
        self._quietly: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._exchange: _Exchange | None = None
        if world.size > 1:
            # At a step nobody does anything alone: who is missing is not waited for as long as elsewhere.
            peers = dist.new_group(timeout=PATIENCE)
            wrapped = nn.parallel.DistributedDataParallel(module, process_group=peers, gradient_as_bucket_view=True)
            self._forward, self._quietly = wrapped, wrapped.no_sync
            if world.device.type == "cpu":
                self._exchange = exchange = _Exchange(module, peers)
                wrapped.register_comm_hook(None, lambda state, bucket: exchange.average(bucket))
        self._weights = [weights for weights in module.parameters() if weights.requires_grad]
        self.optimizer = _optimizer(module, config, rates)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == torch.float16)
        self.skipped = 0  # steps whose gradients were not finite, of fp16 only

    def step(self, examples: Encoded, row_B: NDArray[np.int64], rate: float, totals: dict[str, Tensor]) -> None:
        """One step on the rows of all processes at learning rate `rate`; adds its loss terms to `totals`.

        Nothing is read back, but in fp16 whether the step was taken: that would wait for the device.
        """
        if self._exchange is not None:
            self._exchange.expect(examples.batch(row_B))
        examples = replace(examples, pad_multiple=PAD_MULTIPLE)
        parts = _parts(row_B, self._config.accumulate, self._world)
        for number, (part_B, weight) in enumerate(parts, start=1):
            batch = Tensors.of(examples.batch(part_B), self._world.device, *_density(examples, part_B, row_B))
            # Gradients are exchanged once, after the last part.
            with nullcontext() if number == len(parts) else self._quietly():
                with autocast(self._world, self._config.precision):
                    terms = self._forward(batch)
                loss = torch.stack(list(terms.values())).sum() * weight
                torch.autograd.backward(self.scaler.scale(loss))
            for name, value in terms.items():
                term = value.detach().float() * weight
                totals[name] = totals[name] + term if name in totals else term
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._weights, CLIP_NORM)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        self.optimizer.zero_grad(set_to_none=True)


class _Exchange:
    """How processes on CPUs average their gradients: of the word embeddings only the rows of tokens in the batch.

    All other rows are 0 everywhere; to exchange the whole table can take longer than the rest of a step.
    """

    def __init__(self, module: nn.Module, peers: dist.ProcessGroup) -> None:
        tables = [part.word_embeddings.weight for part in module.modules() if isinstance(part, BertEmbeddings)]
        # A table that is an output layer as well, as in a masked LM, has gradients for every token.
        tied = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
        self._table: nn.Parameter | None = next((table for table in tables if id(table) not in tied), None)
        self._peers = peers
        self._token_T = torch.empty(0, dtype=torch.int64)

    def expect(self, batch: Batch) -> None:
        """Say which tokens the rows of all processes have in the next step."""
        self._token_T = torch.from_numpy(np.unique(batch.inputs.input_ids_BS))

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Replace the gradients in one of DDP's buckets by their average over all processes, some time."""
        whole: Tensor = bucket.buffer()
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        table_VD: Tensor | None = next((gradient for weights, gradient in pairs if weights is self._table), None)
        if table_VD is None:
            return self._averaged(whole, lambda total: total)
        # What else is in the bucket of the table lies before or behind it.
        start = table_VD.storage_offset() - whole.storage_offset()
        parts = [whole[:start], whole[start + table_VD.numel() :], table_VD[self._token_T].flatten()]

        def put_back(total: Tensor) -> Tensor:
            sizes = [part.numel() for part in parts]
            before, behind, rows = torch.split(total, sizes)
            parts[0].copy_(before)
            parts[1].copy_(behind)
            table_VD[self._token_T] = rows.view(-1, table_VD.shape[1])
            return whole

        return self._averaged(torch.cat(parts), put_back)

    def _averaged(self, values: Tensor, then: Callable[[Tensor], Tensor]) -> torch.futures.Future[Tensor]:
        """`then` of the average over all processes, some time; takes `values` for it."""
        values.div_(self._peers.size())
        future: torch.futures.Future[list[Tensor]]
        future = dist.all_reduce(values, group=self._peers, async_op=True).get_future()
        return future.then(lambda done: then(done.value()[0]))


def _attend_eagerly(module: nn.Module) -> None:
    """Let every fused attention of `module` be computed step by step.

    On CPUs PyTorch's fused kernel takes ten times as long for the gradient in half precision as in float32.
    """
    for part in module.modules():
        if type(part) is BertSdpaSelfAttention:
            part.__class__ = BertSelfAttention  # the same weights; how it attends can be chosen at its making only


def _steps(per_epoch: int, config: Optimisation) -> int:
    return max(1, round(per_epoch * config.epochs))


def _order(examples: Encoded, config: Optimisation, seed: int, epoch: int, *, size: int = 1) -> TrainingOrder:
    """Batches of an epoch. For `size` 1 they are whole: a process weighs its rows by how many all have together."""
    return TrainingOrder(examples, batch_size=config.batch_size, seed=seed, epoch=epoch, size=size)


def _parts(row_B: NDArray[np.int64], count: int, world: World) -> list[tuple[NDArray[np.int64], float]]:
    """The rows of a batch that are this process's, in at most `count` parts, each with the weight of its loss here.

    Processes' gradients are averaged: a part weighs its share of the batch, times the number of processes.
    """
    mine_B = row_B[world.rank :: world.size]
    parts = np.array_split(mine_B, min(count, len(mine_B)))
    return [(part_B, len(part_B) * world.size / len(row_B)) for part_B in parts]


def _density(examples: Encoded, part_B: Rows, row_B: Rows) -> tuple[float, float]:
    """How many tokens, and pairs of tokens, a row of a part has on average, as multiples of those of all rows."""
    part, whole = examples.lengths(part_B), examples.lengths(row_B)
    return float(part.mean() / whole.mean()), float((part**2).mean() / (whole**2).mean())


def _step_seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + rank


def _optimizer(module: nn.Module, config: Optimisation, rates: Mapping[str, float] | None = None) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as BERT does. `rates` as of `fit`."""
    groups = dict[tuple[float, bool], list[nn.Parameter]]()
    for name, weights in module.named_parameters():
        if weights.requires_grad:
            factor = next((factor for start, factor in (rates or {}).items() if name.startswith(start)), 1.0)
            groups.setdefault((factor, weights.ndim > 1), []).append(weights)
    return torch.optim.AdamW(
        [
            {"params": groups[kind], "factor": kind[0], "weight_decay": config.weight_decay if kind[1] else 0.0}
            for kind in sorted(groups, reverse=True)
        ],
        lr=config.learning_rate,
        fused=True,
    )


def _rate(config: Optimisation, step: int, steps: int) -> float:
    """Learning rate of a step: linear warm-up, then linear decay to 0 or constant."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (steps - step) / max(1, steps - warmup)


def _next_pause(step: int, per_epoch: int, pauses: int) -> int:
    """The step of an epoch, after `step`, at which its next validation stands; the last one is its end."""
    return next(pause for number in range(1, pauses + 1) if (pause := round(number * per_epoch / pauses)) > step)


def _means(totals: Mapping[str, Tensor], count: int, world: World) -> dict[str, float]:
    """Loss terms of a step, on average over `count` steps and all processes."""
    sums = np.array([float(total) for total in totals.values()])
    means = world.sum(sums) / (max(1, count) * world.size)
    return {name: round(float(mean), 5) for name, mean in zip(totals, means, strict=True)}


def _line(entry: Mapping[str, Any]) -> str:
    parts = [f"{name} {value:.4f}" for name, value in entry["losses"].items()]
    if "validation" in entry:
        parts.append(f"validation {100 * entry['validation']:.2f} %")
    if "loss_scale" in entry:
        parts.append(f"loss scale {entry['loss_scale']:g}, {entry['skipped_steps']} steps skipped")
    return f"step {entry['step']}: {', '.join(parts)}"


def _refuse_diverged(step: int, values: Mapping[str, float], config: Optimisation) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ModelError(
                f"training came apart before step {step}: the {name} is {value}, which is no finite number; lower the "
                f'learning_rate, which is {config.learning_rate}, or set precision = "bf16" or "fp32" if it is fp16'
            )


class _State:
    """What a killed run needs to go on: one safetensors file, replaced atomically."""

    def __init__(self, module: nn.Module, trainer: Trainer, folder: Path) -> None:
        self._module, self._optimizer, self._scaler = module, trainer.optimizer, trainer.scaler
        self._file, self._best = folder / "state.safetensors", folder / "best.safetensors"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, history: Mapping[str, Any], best: float) -> None:
        tensors = {f"model.{name}": value for name, value in self._module.state_dict().items()}
        for index, slots in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": value for slot, value in slots.items()}
        facts = {"step": step, "history": history, "best": best, "scaler": self._scaler.state_dict()}
        _save(tensors, self._file, {"facts": json.dumps(facts)})

    def load(self, world: World) -> tuple[int, dict[str, Any], float]:
        """Step to go on from, history and best metric so far: the beginning if nothing usable was saved."""
        if not self._file.is_file():
            return 0, {}, -1.0
        slots = dict[int, dict[str, Tensor]]()
        weights = dict[str, Tensor]()
        try:
            with safe_open(self._file, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                names: list[str] = file.keys()  # it cannot be iterated itself
                for name in names:
                    part, _, rest = name.partition(".")
                    if part == "model":
                        weights[rest] = file.get_tensor(name)
                    else:
                        index, _, slot = rest.partition(".")
                        slots.setdefault(int(index), {})[slot] = file.get_tensor(name)
            if facts["best"] > -1.0:
                load_file(self._best)
        except (FileNotFoundError, SafetensorError) as error:
            if world.is_leader:
                log.warning("the checkpoint in %s is damaged (%s); training begins again", self._file.parent, error)
            return 0, {}, -1.0
        self._module.load_state_dict(weights)
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": slots})
        if self._scaler.is_enabled() and facts["scaler"]:  # none if the steps before were not in fp16
            self._scaler.load_state_dict(facts["scaler"])
        if world.is_leader:
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
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # or a power failure could leave the name without the bytes
    partial.replace(path)
