"""Processes and devices, two of them for real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from compressor import world
from compressor.errors import CompressorError, ConfigError
from compressor.world import World, _first_reason, available_cores, launch, resolve_device


def write_rank(world: World, folder: Path) -> None:
    """Leave a file that says what this process knows of the others."""
    told = world.broadcast(f"from {world.rank}")
    world.barrier()
    (folder / str(world.rank)).write_text(f"{world.size} {world.is_leader} {told} {torch.get_num_threads()}")


def fail_on_rank_1(world: World) -> None:
    """Raise on one process while the other waits for it."""
    if world.rank == 1:
        raise ConfigError("the second process cannot go on; change something")
    world.barrier()


def test_one_process_is_the_leader_and_needs_no_group() -> None:
    alone = World(device=torch.device("cpu"))
    alone.barrier()
    assert alone.is_leader
    assert alone.broadcast("told") == "told"


def test_cores_are_those_of_the_scheduler_at_most() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("nonsense", 8)],
)
def test_cores_are_capped_by_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    opened = open
    monkeypatch.setattr(world, "open", lambda path, **named: opened(tmp_path / "cpu.max", **named), raising=False)
    assert available_cores() == cores


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device is cuda, and PyTorch sees no CUDA device here; use --device cpu"):
        resolve_device("cuda")


def test_one_process_works_where_it_is(tmp_path: Path) -> None:
    launch(write_rank, tmp_path, device="cpu")
    assert (tmp_path / "0").read_text().startswith("1 True from 0")
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_processes_know_each_other(tmp_path: Path) -> None:
    launch(write_rank, tmp_path, processes=2, device="cpu")
    threads = max(1, available_cores() // 2)
    assert (tmp_path / "0").read_text() == f"2 True from 0 {threads}"
    assert (tmp_path / "1").read_text() == f"2 False from 0 {threads}"


@pytest.mark.slow
def test_an_error_in_one_process_ends_both_with_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        launch(fail_on_rank_1, processes=2, device="cpu")
    assert str(caught.value) == "process 1 of 2 failed: the second process cannot go on; change something"
    assert "Traceback" not in capfd.readouterr().err


def test_the_first_of_several_failures_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, reason in (("0002.0", "connection reset"), ("0001.1", "the cause")):
        told = {"rank": int(name[-1]), "reason": reason, "trace": None}
        (tmp_path / name).write_text(json.dumps(told))
    assert _first_reason(tmp_path) == (1, "the cause")
    assert not caplog.messages


def test_a_failure_that_is_no_error_of_ours_is_logged_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"rank": 0, "reason": "division by zero", "trace": "Traceback: line 1"}
    (tmp_path / "0001.0").write_text(json.dumps(told))
    assert _first_reason(tmp_path) == (0, "division by zero")
    assert caplog.messages == ["Traceback: line 1"]


def test_processes_that_were_killed_leave_no_reason(tmp_path: Path) -> None:
    assert _first_reason(tmp_path) is None


def test_a_command_that_torchrun_multiplied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="start it once, with --processes"):
        launch(print, device="cpu")
