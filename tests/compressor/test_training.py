"""The training loop: schedule, decay, best epoch, and runs that were killed."""

from __future__ import annotations

import pickle
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
from compressor.errors import ModelError
from compressor.training import Tensors, _optimizer, _rate, fit
from compressor.world import World
from tests import tiny

WORLD = World(device=torch.device("cpu"))
ROWS = 48  # 3 steps an epoch at 16 rows a step


class KilledError(Exception):
    """Stands for whatever ends a run."""


class Counted(nn.Module):
    """A classifier with dropout that counts its steps, and dies after some."""

    def __init__(self, *, die_after: int = 10**9, dropout: float = 0.3) -> None:
        super().__init__()
        shape: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
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


@pytest.mark.parametrize("name", ["state.safetensors", "best.safetensors"])
@pytest.mark.parametrize("content", [b"", b"cut short"])
def test_a_damaged_checkpoint_is_named_and_training_begins_again(
    rows: Encoded, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes
) -> None:
    with pytest.raises(KilledError):
        train(Counted(die_after=5), rows, tmp_path, validate=lambda: 0.5)
    (tmp_path / name).write_bytes(content)
    again = Counted()
    train(again, rows, tmp_path, validate=lambda: 0.5)
    assert again.steps == 9
    assert f"the checkpoint in {tmp_path} is damaged" in caplog.text


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda _: synced.append((tmp_path / "state.new").is_file()))
    train(Counted(), rows, tmp_path, settings(epochs=1.0))
    assert synced == [True]


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


class Odd(Counted):
    """A classifier whose loss is multiplied by something in one of its steps."""

    def __init__(self, factor: float, *, at: int) -> None:
        super().__init__()
        self._factor, self._at = factor, at

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        loss = super().forward(batch)["label"]
        return {"label": loss * self._factor if self.steps == self._at else loss}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_training_at_the_next_pause(
    rows: Encoded, tmp_path: Path, factor: float, precision: str
) -> None:
    module = Odd(factor, at=6)
    sentence = rf"before step 6: the mean label loss is {factor}, .*; lower the learning_rate, which is 0\.005, or set"
    with pytest.raises(ModelError, match=sentence):
        train(module, rows, tmp_path, settings(precision=precision))
    assert module.steps == 6
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "state.safetensors").values())


def test_a_metric_that_is_not_finite_ends_training(rows: Encoded, tmp_path: Path) -> None:
    scores = iter([0.5, float("nan")])
    with pytest.raises(ModelError, match="before step 6: the validation metric is nan, which is no finite number"):
        train(Counted(), rows, tmp_path, validate=lambda: next(scores))


def test_steps_that_fp16_skips_are_counted_and_said(
    rows: Encoded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    history = train(Odd(1e30, at=5), rows, tmp_path, settings(precision="fp16"))
    assert [entry["skipped_steps"] for entry in history["epochs"]] == [0, 1, 0]
    assert [entry["loss_scale"] for entry in history["epochs"]] == [65536.0, 32768.0, 32768.0]
    assert "loss scale 32768, 1 steps skipped" in caplog.text
    assert "loss_scale" not in train(Counted(), rows, tmp_path / "fp32", settings(precision="fp32"))["epochs"][0]


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
    def half(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata)
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
