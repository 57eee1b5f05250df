"""Steps in parts, in other precisions and by several processes, and runs that are killed: the same weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from compressor import training
from compressor.dataset import Encoded
from compressor.errors import ConfigError, DataError
from compressor.objectives import Intermediate
from compressor.training import Tensors, _dtype, _parts, autocast, cast_frozen, fit
from compressor.world import World, launch
from tests import tiny
from tests.compressor.test_training import WORLD, Counted, KilledError, assert_same_weights, rows, settings, train
from tests.processes import Killed, in_new_process

__all__ = ["rows"]  # fixtures


class Inside(Intermediate):
    """A student that learns a teacher's inside, and counts its steps, as `Counted` does."""

    def __init__(self, *, die_after: int = 10**9, **changes: Any) -> None:
        torch.manual_seed(0)  # the projections
        student = tiny.bert(layers=1, hidden=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, seed=1)
        teacher = tiny.lively(tiny.bert()).double()
        super().__init__(student, teacher, [1], tiny.distilling("intermediate", **changes))
        self.steps, self._die_after = 0, die_after

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        if self.steps == self._die_after:
            raise KilledError
        self.steps += 1
        return super().forward(batch)


# What the modules' terms are means over: rows, tokens and pairs of tokens, all tokens there are room for.
KINDS: dict[str, Callable[..., Any]] = {
    "rows": partial(Counted, dropout=0.0),
    "tokens": Inside,
    "relations": partial(Inside, attention="relations", relation_heads=4),
    "published": partial(Inside, normalisation="published"),
}


# Bits differ in the last place when sums are taken in another order; in float64 nothing grows out of that.
def exact(kind: str = "rows", **given: Any) -> Any:
    return KINDS[kind](**given).double()


def assert_nearly_same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, weights in first.items():
        assert_close(weights, second[name], rtol=0, atol=1e-9, msg=name)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    """Rows whose 3 batches have 16, 17 and 17 of them: two processes get different shares."""
    return tiny.encoded(tmp_path_factory.mktemp("uneven"), train=50)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [2, 3, 100])
def test_parts_of_a_step_add_up_to_it(uneven: Encoded, tmp_path: Path, accumulate: int, kind: str) -> None:
    whole, parted = exact(kind), exact(kind)
    uneven = uneven.padded_to(tiny.MAX_TOKENS) if kind == "published" else uneven
    expected = train(whole, uneven, tmp_path / "whole", settings(precision="fp32"))
    history = train(parted, uneven, tmp_path / "parted", settings(precision="fp32", accumulate=accumulate))
    assert_nearly_same_weights(parted.state_dict(), whole.state_dict())
    for found, wanted in zip(history["epochs"], expected["epochs"], strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=2e-5)  # they are rounded to 1e-5
    assert parted.steps == sum(min(accumulate, len(batch)) for batch in ([0] * 16, [0] * 17, [0] * 17)) * 3


def test_a_whole_step_is_weighed_with_1(uneven: Encoded, tmp_path: Path) -> None:
    seen = list[tuple[float, float]]()

    class Watched(Inside):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            seen.append((batch.tokens, batch.pairs))
            return super().forward(batch)

    train(Watched().double(), uneven, tmp_path / "whole", settings(epochs=1.0, precision="fp32"))
    assert seen == [(1.0, 1.0)] * 3  # to the bit: without parts nothing changes
    train(Watched().double(), uneven, tmp_path / "parted", settings(epochs=1.0, precision="fp32", accumulate=16))
    assert len(set(seen)) > 3


@pytest.mark.parametrize(("size", "accumulate", "rows_in_batch"), [(1, 1, 5), (2, 1, 5), (3, 2, 17), (4, 8, 6)])
def test_every_row_of_a_batch_weighs_the_same(size: int, accumulate: int, rows_in_batch: int) -> None:
    found = []
    for rank in range(size):
        for rows_B, weight in _parts(
            np.arange(rows_in_batch), accumulate, World(rank=rank, size=size, device=WORLD.device)
        ):
            found += [(int(row), weight / len(rows_B) / size) for row in rows_B]
    assert sorted(row for row, _ in found) == list(range(rows_in_batch))
    assert [weight for _, weight in found] == pytest.approx([1 / rows_in_batch] * rows_in_batch)


def test_more_processes_than_rows_of_a_batch_are_refused_before_a_step(rows: Encoded, tmp_path: Path) -> None:
    world = World(rank=0, size=17, device=WORLD.device)
    with pytest.raises(DataError, match=r"a batch has 16 rows, fewer than the 17 processes that share it; use fewer"):
        fit(Counted(), rows, settings(), world=world, seed=7, folder=tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_learns(rows: Encoded, tmp_path: Path, precision: Any) -> None:
    module = Counted(dropout=0.0)
    history = train(module, rows, tmp_path, settings(epochs=15.0, learning_rate=2e-2, precision=precision))
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert (module.seen_dtype, history["precision"]) == (expected, str(expected).removeprefix("torch."))
    losses = [entry["losses"]["label"] for entry in history["epochs"]]
    assert losses[-1] < 0.5 * losses[0]
    assert all(weights.dtype == torch.float32 for weights in module.parameters())


def test_a_resumed_run_in_fp16_goes_on_with_its_loss_scale(rows: Encoded, tmp_path: Path) -> None:
    config = settings(precision="fp16")
    with pytest.raises(KilledError):
        train(Counted(die_after=5), rows, tmp_path, config)
    resumed, whole = Counted(), Counted()
    train(resumed, rows, tmp_path, config)
    train(whole, rows, tmp_path / "whole", config)
    assert_same_weights(resumed, whole)


def test_a_run_that_began_without_fp16_goes_on_in_it(rows: Encoded, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(Counted(die_after=5), rows, tmp_path, settings(precision="fp32"))
    resumed = Counted()
    train(resumed, rows, tmp_path, settings(precision="fp16"))
    assert (resumed.steps, resumed.seen_dtype) == (6, torch.float16)


def test_bf16_is_refused_where_a_gpu_only_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert _dtype("auto", torch.device("cuda")) == torch.float16
    assert _dtype("fp32", torch.device("cuda")) == torch.float32
    with pytest.raises(ConfigError, match=r'precision is "bf16" and this GPU does not compute in it; use "fp16"'):
        _dtype("bf16", torch.device("cuda"))


def test_half_precision_on_a_cpu_attends_as_before(rows: Encoded, tmp_path: Path) -> None:
    module, fused = Counted(dropout=0.0), tiny.bert(layers=1, hidden=16)
    train(module, rows, tmp_path, settings(epochs=0.1, precision="bf16"))
    fused.load_state_dict(module.model.state_dict())
    batch = Tensors.of(rows.batch(np.arange(9)), WORLD.device)
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.mask_BS}
    assert type(module.model.bert.encoder.layer[0].attention.self) is not type(
        fused.bert.encoder.layer[0].attention.self
    )
    assert_close(module.model(**inputs).logits, fused(**inputs).logits)


def test_a_frozen_model_answers_the_same_after_its_cast(rows: Encoded) -> None:
    model = tiny.lively(tiny.bert())
    batch = Tensors.of(rows.batch(np.arange(9)), WORLD.device)

    def answer() -> Tensor:
        with torch.no_grad(), autocast(WORLD, "bf16"):
            return model(input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS).logits

    before = answer()
    cast_frozen(model, WORLD, "bf16")
    assert model.bert.encoder.layer[0].output.dense.weight.dtype == torch.bfloat16
    assert torch.equal(answer(), before)


def train_in_two(world: World, rows: Encoded, folder: Path, kind: str) -> None:
    """What each of two processes does: a whole run, one that is cut, and one that a single process began."""
    whole = exact(kind)
    config = settings(precision="fp32", accumulate=2)
    history = fit(
        whole, rows, config, world=world, seed=7, folder=folder / "whole", validate=lambda: 0.5 + 0.1 * world.rank
    )
    save_file(whole.state_dict(), folder / f"whole-{world.rank}")
    assert [entry["validation"] for entry in history["epochs"]] == [0.5] * 3  # the leader's
    config = settings(precision="fp32")
    with pytest.raises(KilledError):
        fit(exact(kind, die_after=4), rows, config, world=world, seed=7, folder=folder / "two-then-one")
    world.barrier()  # the cut run's last checkpoint is the leader's
    resumed = exact(kind)
    history = fit(resumed, rows, config, world=world, seed=7, folder=folder / "one-then-two")
    save_file(resumed.state_dict(), folder / f"resumed-{world.rank}")
    assert (resumed.steps, history["steps"]) == (6, 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_two_processes_do_what_one_does_and_take_up_its_work(uneven: Encoded, tmp_path: Path, kind: str) -> None:
    config, whole, resumed = settings(precision="fp32"), exact(kind), exact(kind)
    train(whole, uneven, tmp_path / "one", config)
    with pytest.raises(KilledError):
        train(exact(kind, die_after=4), uneven, tmp_path / "one-then-two", config)
    launch(train_in_two, uneven, tmp_path, kind, processes=2, device="cpu")
    train(resumed, uneven, tmp_path / "two-then-one", config)
    expected = whole.state_dict()
    assert_nearly_same_weights(resumed.state_dict(), expected)
    assert resumed.steps == 6
    for name in ("whole", "resumed"):
        first, second = (load_file(tmp_path / f"{name}-{rank}") for rank in range(2))
        assert all(torch.equal(weights, second[key]) for key, weights in first.items())
        assert_nearly_same_weights(first, expected)


def train_and_be_killed(folder: Path) -> None:
    """Train whole, and killed ten times after some seven of the 120 steps.

    They are counted and not timed: no machine is fast enough to come to the end before, nor slow enough to be killed
    ten times before its first checkpoint.
    """
    vars(training).update(CHECKPOINT_EVERY_S=0.0)
    rows, draw, killed = tiny.encoded(folder / "rows", train=64), random.Random(0), Killed()

    class Telling(Counted):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            killed.tell()
            return super().forward(batch)

    def trained(name: str, module: Counted) -> None:
        train(module, rows, folder / name, settings(epochs=30.0, precision="fp32"), validate=lambda: 0.5)
        save_file(module.state_dict(), folder / f"{name}.safetensors", {"steps": str(module.steps)})

    killed.complete(lambda: trained("whole", Counted()))
    for _ in range(10):
        child = killed.fork(lambda: trained("cut", Telling()))
        killed.hear(draw.randint(2, 7))
        time.sleep(draw.uniform(0.0, 0.01))
        killed.kill(child)
    killed.complete(lambda: trained("cut", Counted()))


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    assert in_new_process(train_and_be_killed, tmp_path) == 0
    whole, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(weights, cut[name]) for name, weights in whole.items())
    with safe_open(tmp_path / "cut.safetensors", framework="pt") as file:
        assert 0 < int(file.metadata()["steps"]) < 120  # the last of eleven had only some of the steps left
