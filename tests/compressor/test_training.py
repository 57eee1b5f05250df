"""The training loop: schedule, decay, best epoch, and runs that were killed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from compressor import training
from compressor.config import FinetuneConfig, Optimisation
from compressor.dataset import Encoded
from compressor.errors import ConfigError, DataError
from compressor.training import Tensors, _dtype, _optimizer, _parts, _rate, autocast, cast_frozen, fit
from compressor.world import World, launch
from tests import tiny

WORLD = World(device=torch.device("cpu"))
ROWS = 48  # 3 steps an epoch at 16 rows a step


class KilledError(Exception):
    """Stands for whatever ends a run."""


class Counted(nn.Module):
    """A classifier with dropout that counts its steps, and dies after some."""

    def __init__(self, *, die_after: int = 10**9, dropout: float = 0.3) -> None:
        super().__init__()
        shape = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        self.model = tiny.bert(layers=1, hidden=16, **shape)
        self.steps = 0
        self.seen_dtype = torch.float32
        self._die_after = die_after

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        if self.steps == self._die_after:
            raise KilledError
        self.steps += 1
        logits_BC = self.model(input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS).logits
        self.seen_dtype = logits_BC.dtype
        return {"label": nn.functional.cross_entropy(logits_BC.double(), batch.label_B)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    return tiny.encoded(tmp_path_factory.mktemp("rows"), train=ROWS)


def settings(**changes: Any) -> FinetuneConfig:
    return tiny.finetuning(**({"epochs": 3.0} | changes))


def train(module: nn.Module, rows: Encoded, folder: Path, config: Optimisation | None = None, **more: Any) -> Any:
    return fit(module, rows, config or settings(), world=WORLD, seed=7, folder=folder, **more)


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    expected = second.state_dict()
    for name, weights in first.state_dict().items():
        assert torch.equal(weights, expected[name]), name


@pytest.mark.parametrize("die_after", [1, 3, 4, 8])
def test_a_resumed_run_ends_with_the_same_weights(
    rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_after: int
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    whole = Counted()
    expected = train(whole, rows, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(Counted(die_after=die_after), rows, tmp_path / "cut")
    resumed = Counted()
    history = train(resumed, rows, tmp_path / "cut")
    assert_same_weights(resumed, whole)
    assert resumed.steps == 9 - die_after
    assert history["steps"] == expected["steps"] == 9
    assert [entry["step"] for entry in history["epochs"]] == [3, 6, 9]


def test_a_resumed_run_repeats_only_the_steps_since_the_last_checkpoint(rows: Encoded, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(Counted(die_after=5), rows, tmp_path)
    resumed, whole = Counted(), Counted()
    train(resumed, rows, tmp_path)
    train(whole, rows, tmp_path / "whole")
    assert resumed.steps == 6  # a checkpoint was written after the first epoch of 3 steps
    assert_same_weights(resumed, whole)


def test_a_finished_run_is_not_trained_again(rows: Encoded, tmp_path: Path) -> None:
    first, again = Counted(), Counted()
    history = train(first, rows, tmp_path)
    assert train(again, rows, tmp_path) == history
    assert again.steps == 0
    assert_same_weights(again, first)


def test_a_resumed_run_keeps_the_best_epoch_of_before(rows: Encoded, tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.2, 0.3])  # at the start, then after each epoch
    seen: list[dict[str, Tensor]] = []

    def validate() -> float:
        seen.append({name: value.clone() for name, value in module.state_dict().items()})
        return next(scores)

    module = Counted(die_after=4)
    with pytest.raises(KilledError):
        train(module, rows, tmp_path, validate=validate)
    module = Counted()
    train(module, rows, tmp_path, validate=validate)
    for name, weights in module.state_dict().items():
        assert torch.equal(weights, seen[1][name]), name


def test_the_best_epoch_is_kept(rows: Encoded, tmp_path: Path) -> None:
    module, scores = Counted(), iter([0.5, 0.8, 0.6])
    seen: list[Tensor] = []

    def validate() -> float:
        seen.append(module.model.classifier.weight.detach().clone())
        return next(scores)

    history = train(module, rows, tmp_path, validate=validate)
    assert torch.equal(module.model.classifier.weight, seen[1])
    assert [entry["validation"] for entry in history["epochs"]] == [0.5, 0.8, 0.6]


@pytest.mark.parametrize(("times", "steps"), [(1, [3, 6]), (2, [2, 3, 5, 6]), (3, [1, 2, 3, 4, 5, 6])])
def test_validation_can_come_several_times_an_epoch(
    rows: Encoded, tmp_path: Path, times: int, steps: list[int]
) -> None:
    config = settings(epochs=2.0)
    history = train(Counted(), rows, tmp_path, config, validate=lambda: 0.5, validations_per_epoch=times)
    assert [entry["step"] for entry in history["epochs"]] == steps


def test_more_validations_than_steps_come_once_a_step(rows: Encoded, tmp_path: Path) -> None:
    history = train(Counted(), rows, tmp_path, settings(epochs=1.0), validations_per_epoch=10)
    assert [entry["step"] for entry in history["epochs"]] == [1, 2, 3]


def test_of_equal_states_the_longest_trained_is_kept(rows: Encoded, tmp_path: Path) -> None:
    module = Counted()
    seen: list[Tensor] = []

    def validate() -> float:
        seen.append(module.model.classifier.weight.detach().clone())
        return 0.5

    train(module, rows, tmp_path, validate=validate)
    assert torch.equal(module.model.classifier.weight, seen[-1])


@pytest.mark.parametrize(("epochs", "steps"), [(0.1, 1), (0.5, 2), (1.0, 3), (2.3, 7)])
def test_a_fraction_of_an_epoch_stops_part_of_the_way(rows: Encoded, tmp_path: Path, epochs: float, steps: int) -> None:
    module = Counted()
    history = train(module, rows, tmp_path, settings(epochs=epochs))
    assert (module.steps, history["steps"], history["epochs"][-1]["step"]) == (steps, steps, steps)


def test_fractional_epochs_are_validated_at_their_end(rows: Encoded, tmp_path: Path) -> None:
    history = train(Counted(), rows, tmp_path, settings(epochs=1.4), validate=lambda: 0.5)
    assert [entry["step"] for entry in history["epochs"]] == [3, 4]


def test_losses_of_an_epoch_are_means_over_its_steps(rows: Encoded, tmp_path: Path) -> None:
    class Rising(Counted):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            terms = super().forward(batch)
            return {"label": terms["label"] * 0 + float(self.steps)}

    history = train(Rising(), rows, tmp_path, settings(epochs=2.0))
    assert [entry["losses"]["label"] for entry in history["epochs"]] == [2.0, 5.0]


def test_losses_fall(rows: Encoded, tmp_path: Path) -> None:
    history = train(Counted(dropout=0.0), rows, tmp_path, settings(epochs=20.0, learning_rate=2e-2))
    losses = [entry["losses"]["label"] for entry in history["epochs"]]
    assert losses[-1] < 0.5 * losses[0]


def test_linear_schedule_rises_and_falls_to_nothing() -> None:
    config = settings(learning_rate=0.1, warmup=0.2, schedule="linear")
    rates = [_rate(config, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125])


def test_constant_schedule_rises_and_stays() -> None:
    config = settings(learning_rate=0.1, warmup=0.2, schedule="constant")
    assert [_rate(config, step, 10) for step in range(10)] == pytest.approx([0.05] + [0.1] * 9)


@pytest.mark.parametrize("warmup", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_no_rate_is_zero_or_above_the_peak(warmup: float, schedule: str, steps: int) -> None:
    config = settings(learning_rate=0.1, warmup=warmup, schedule=schedule)
    assert all(0 < _rate(config, step, steps) <= 0.1 for step in range(steps))


def test_the_optimizer_steps_at_the_scheduled_rates(
    rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rates = settings(epochs=2.0), list[set[float]]()
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        rates.append({group["lr"] for group in self.param_groups})
        return step(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(Counted(), rows, tmp_path, config)
    assert rates == [{_rate(config, number, 6)} for number in range(6)]


def test_biases_and_layer_norms_have_no_weight_decay() -> None:
    module = Counted()
    decayed, others = _optimizer(module, settings(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert all("bias" in names[id(weights)] or "LayerNorm" in names[id(weights)] for weights in others["params"])
    assert not any("bias" in names[id(weights)] or "LayerNorm" in names[id(weights)] for weights in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_weights_have_the_learning_rate_of_how_their_names_begin() -> None:
    module = nn.ModuleDict({"slow": nn.Linear(2, 2), "fast": nn.Linear(2, 2)})
    groups = _optimizer(module, settings(), {"slow.": 0.1}).param_groups
    factors = {id(weights): group["factor"] for group in groups for weights in group["params"]}
    assert {name: factors[id(weights)] for name, weights in module.named_parameters()} == {
        "slow.weight": 0.1,
        "slow.bias": 0.1,
        "fast.weight": 1.0,
        "fast.bias": 1.0,
    }


def test_what_is_frozen_is_not_optimised() -> None:
    module = Counted()
    module.model.bert.requires_grad_(False)
    groups = _optimizer(module, settings()).param_groups
    assert [weights.shape for group in groups for weights in group["params"]] == [(2, 16), (2,)]


def test_large_gradients_are_clipped(rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        gradients = [weights.grad.flatten() for group in self.param_groups for weights in group["params"]]
        norms.append(float(torch.cat(gradients).norm()))
        return step(self, *arguments, **named)

    class Loud(Counted):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            return {"label": super().forward(batch)["label"] * 1e4}

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(Loud(), rows, tmp_path, settings(epochs=1.0))
    assert_close(torch.tensor(norms), torch.ones(3), atol=1e-3, rtol=0)


def test_terms_are_summed(rows: Encoded, tmp_path: Path) -> None:
    class Split(Counted):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            loss = super().forward(batch)["label"]
            return {"one": 0.25 * loss, "two": 0.75 * loss}

    whole, split = Counted(dropout=0.0), Split(dropout=0.0)
    train(whole, rows, tmp_path / "whole")
    history = train(split, rows, tmp_path / "split")
    for name, weights in split.state_dict().items():
        assert_close(weights, whole.state_dict()[name], atol=1e-3, rtol=1e-2)
    assert set(history["epochs"][0]["losses"]) == {"one", "two"}


def test_a_trained_module_is_left_in_evaluation_mode(rows: Encoded, tmp_path: Path) -> None:
    module = Counted()
    train(module, rows, tmp_path, settings(epochs=0.1))
    assert not any(part.training for part in module.modules())


def test_every_row_is_seen_once_an_epoch(rows: Encoded, tmp_path: Path) -> None:
    seen: list[int] = []

    class Listed(Counted):
        def forward(self, batch: Tensors) -> dict[str, Tensor]:
            seen.extend(batch.row_B.tolist())
            return super().forward(batch)

    train(Listed(), rows, tmp_path, settings(epochs=2.0))
    assert np.bincount(seen).tolist() == [2] * ROWS


def test_the_checkpoint_is_safetensors_with_json(rows: Encoded, tmp_path: Path) -> None:
    train(Counted(), rows, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.safetensors"]
    with safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"facts"}


def test_the_checkpoint_loads_without_pickle(rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Counted()
    train(first, rows, tmp_path)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    again = Counted()
    train(again, rows, tmp_path)
    assert_same_weights(again, first)


def test_a_crash_while_saving_leaves_the_checkpoint_before(
    rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = training.save_file

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        save(tensors, path, metadata)
        if len(list(tmp_path.glob("state.safetensors"))):
            path.write_bytes(path.read_bytes()[:100])
            raise KilledError

    monkeypatch.setattr(training, "save_file", half)
    with pytest.raises(KilledError):
        train(Counted(), rows, tmp_path)
    monkeypatch.undo()
    resumed, whole = Counted(), Counted()
    train(resumed, rows, tmp_path)
    train(whole, rows, tmp_path / "whole")
    assert resumed.steps == 6
    assert_same_weights(resumed, whole)


def test_shared_weights_are_saved(tmp_path: Path) -> None:
    # safetensors refuses tensors that share memory; a state dict may hold some.
    shared = torch.ones(3)
    training._save({"one": shared, "two": shared}, tmp_path / "state.safetensors", {})
    with safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        assert_close(file.get_tensor("two"), shared)


def test_a_batch_becomes_tensors_on_its_device(rows: Encoded) -> None:
    tensors = Tensors.of(rows.batch(np.array([3, 1])), torch.device("cpu"))
    assert tensors.row_B.tolist() == [3, 1]
    assert tensors.input_ids_BS.shape == tensors.mask_BS.shape
    assert tensors.input_ids_BS.dtype == torch.int64


def test_row_numbers_stay_where_they_are_looked_up(rows: Encoded) -> None:
    tensors = Tensors.of(rows.batch(np.array([3, 1])), torch.device("meta"))
    assert tensors.row_B.device.type == "cpu"
    assert tensors.segment_BS.shape == tensors.input_ids_BS.shape


# Bits differ in the last place when sums are taken in another order; in float64 nothing grows out of that.
def exact(**given: Any) -> Counted:
    return Counted(dropout=0.0, **given).double()


def assert_nearly_same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, weights in first.items():
        assert_close(weights, second[name], rtol=0, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    """Rows whose 3 batches have 16, 17 and 17 of them: two processes get different shares."""
    return tiny.encoded(tmp_path_factory.mktemp("uneven"), train=50)


@pytest.mark.parametrize("accumulate", [2, 3, 100])
def test_parts_of_a_step_add_up_to_it(uneven: Encoded, tmp_path: Path, accumulate: int) -> None:
    whole, parted = exact(), exact()
    expected = train(whole, uneven, tmp_path / "whole", settings(precision="fp32"))
    history = train(parted, uneven, tmp_path / "parted", settings(precision="fp32", accumulate=accumulate))
    assert_nearly_same_weights(parted.state_dict(), whole.state_dict())
    assert history == expected
    assert parted.steps == sum(min(accumulate, len(batch)) for batch in ([0] * 16, [0] * 17, [0] * 17)) * 3


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


def train_in_two(world: World, rows: Encoded, folder: Path) -> None:
    """What each of two processes does: a whole run, one that is cut, and one that a single process began."""
    whole = exact()
    config = settings(precision="fp32", accumulate=2)
    history = fit(
        whole, rows, config, world=world, seed=7, folder=folder / "whole", validate=lambda: 0.5 + 0.1 * world.rank
    )
    save_file(whole.state_dict(), folder / f"whole-{world.rank}")
    assert [entry["validation"] for entry in history["epochs"]] == [0.5] * 3  # the leader's
    config = settings(precision="fp32")
    with pytest.raises(KilledError):
        fit(exact(die_after=4), rows, config, world=world, seed=7, folder=folder / "two-then-one")
    world.barrier()  # the cut run's last checkpoint is the leader's
    resumed = exact()
    history = fit(resumed, rows, config, world=world, seed=7, folder=folder / "one-then-two")
    save_file(resumed.state_dict(), folder / f"resumed-{world.rank}")
    assert (resumed.steps, history["steps"]) == (6, 9)


@pytest.mark.slow
def test_two_processes_do_what_one_does_and_take_up_its_work(uneven: Encoded, tmp_path: Path) -> None:
    config, whole, resumed = settings(precision="fp32"), exact(), exact()
    train(whole, uneven, tmp_path / "one", config)
    with pytest.raises(KilledError):
        train(exact(die_after=4), uneven, tmp_path / "one-then-two", config)
    launch(train_in_two, uneven, tmp_path, processes=2, device="cpu")
    train(resumed, uneven, tmp_path / "two-then-one", config)
    expected = whole.state_dict()
    assert_nearly_same_weights(resumed.state_dict(), expected)
    assert resumed.steps == 6
    for name in ("whole", "resumed"):
        first, second = (load_file(tmp_path / f"{name}-{rank}") for rank in range(2))
        assert all(torch.equal(weights, second[key]) for key, weights in first.items())
        assert_nearly_same_weights(first, expected)


# Forked, not started anew: importing PyTorch takes longer than all of the training.
KILLED = """\
import os, random, select, signal, sys, time
from pathlib import Path
from safetensors.torch import save_file
from compressor import training
from tests import tiny
from tests.compressor.test_training import Counted, settings, train

folder, draw = Path(sys.argv[1]), random.Random(0)
training.CHECKPOINT_EVERY_S = 0.0
rows = tiny.encoded(folder / "rows", train=64)
told, tell = os.pipe()

class Telling(Counted):
    def forward(self, batch):
        os.write(tell, b".")
        return super().forward(batch)

def start(name, kind):
    child = os.fork()
    if child == 0:
        module = kind()
        train(module, rows, folder / name, settings(epochs=30.0, precision="fp32"), validate=lambda: 0.5)
        save_file(module.state_dict(), folder / f"{name}.safetensors", {"steps": str(module.steps)})
        os._exit(0)
    return child

assert os.waitpid(start("whole", Counted), 0)[1] == 0
# Ten times some seven of the 120 steps, counted and not timed: no machine is fast enough to come to the end
# before, nor slow enough to be killed ten times before its first checkpoint.
for _ in range(10):
    child = start("cut", Telling)
    for _ in range(draw.randint(2, 7)):
        os.read(told, 1)
    time.sleep(draw.uniform(0.0, 0.01))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it had come to its end before"
    while select.select([told], [], [], 0)[0]:
        os.read(told, 80)
assert os.waitpid(start("cut", Counted), 0)[1] == 0
"""


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, check=False, cwd=root, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()
    whole, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(weights, cut[name]) for name, weights in whole.items())
    with safe_open(tmp_path / "cut.safetensors", framework="pt") as file:
        assert 0 < int(file.metadata()["steps"]) < 120  # the last of eleven had only some of the steps left
