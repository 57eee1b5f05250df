"""Processes and devices, two of them for real."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.run import main as torchrun

from compressor import artifact, training, world
from compressor.errors import CompressorError, ConfigError
from compressor.training import Trainer
from compressor.world import (
    World,
    _first_reason,
    available_cores,
    launch,
    leads,
    refuse_together,
    resolve_device,
)
from serving import cores
from serving.runtime import free_port
from tests import processes, tiny, together


def fail_and_be_heard(world: World, folder: Path) -> None:
    """Raise in one process; what each says from here on is kept."""
    processes.speak_to(folder / str(world.rank))
    together.fail_on_rank_1(world)


def test_one_process_is_the_leader_and_needs_no_group() -> None:
    alone = World(device=torch.device("cpu"))
    alone.barrier()
    assert alone.is_leader
    assert alone.broadcast("told") == "told"
    assert alone.sum(np.array([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize(("quota", "found"), [(1.5, 2), (None, 8)])
def test_cores_are_capped_by_the_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, found: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cores, "cgroup_quota", lambda *_: quota)
    assert available_cores() == found


def test_where_the_system_tells_nothing_of_cores_they_are_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device is cuda, and PyTorch sees no CUDA device here; use --device cpu"):
        resolve_device("cuda")


def test_one_process_works_where_it_is(tmp_path: Path) -> None:
    launch(together.write_rank, tmp_path, device="cpu")
    assert (tmp_path / "0").read_text().startswith("1 True from 0")
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("cold_processes")
def test_two_processes_know_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(together.write_rank, tmp_path, processes=2, device="cpu")
    threads = max(1, available_cores() // 2)
    assert (tmp_path / "0").read_text() == f"2 True from 0 [[3.0, 2.0]] float32 {threads}"
    assert (tmp_path / "1").read_text() == f"2 False from 0 [[3.0, 2.0]] float32 {threads}"


@pytest.mark.parametrize(("given", "threads"), [(None, 3), ("1", 1)])
def test_processes_of_one_machine_share_its_cores_unless_threads_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.setattr(world, "available_cores", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        launch(together.write_rank, tmp_path, device="cpu")
    finally:
        torch.set_num_threads(before)
    assert (tmp_path / "0").read_text().endswith(f" {threads}")


@pytest.mark.slow
def test_an_error_in_one_process_ends_both_with_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        launch(fail_and_be_heard, tmp_path, processes=2, device="cpu")
    assert str(caught.value) == "process 1 of 2 failed: the second cannot go on; change something"
    said = [(tmp_path / rank).read_text() for rank in "01"]
    assert "Traceback" not in "".join([*said, capfd.readouterr().err])


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


def test_processes_and_torchrun_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"--processes is 2 and torchrun started this command; use one of the two"):
        launch(print, processes=2, device="cpu")


def test_what_works_once_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_together("compressor build", "use --processes")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"torchrun started compressor build 2 times, which works once; use --proc"):
        refuse_together("compressor build", "use --processes")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--processes is 2; there are 1 GPUs, one for each"):
        launch(print, processes=2, device="cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were started on a machine with 1 GPUs; start one for each GPU"):
        launch(print, device="cuda")


def test_only_the_first_of_several_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leads()
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert leads() == speaks


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_its_signal() -> None:
    with pytest.raises(CompressorError, match=r"^process 1 of 2 was ended by signal 9; the same command goes on from"):
        launch(together.end_rank_1, processes=2, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "sentence"),
    [("fail", "error: the second cannot go on; change something"), ("kill", "Signal 9 (SIGKILL)")],
)
def test_one_of_torchrun_s_processes_ends_them_all(tmp_path: Path, work: str, sentence: str) -> None:
    """Of two machines, both this one, each with an agent and one process."""
    agent = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    program = ["-m", together.__name__, work, str(tmp_path / "out")]
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    hosts = {"1": tmp_path / "said-1", "0": tmp_path / "said-0"}
    agents = [
        processes.start(torchrun, [*agent, f"--rdzv-conf=is_host={host}", *program], said=said, environment=root)
        for host, said in hosts.items()
    ]
    assert processes.ended(*agents) == [1, 1]
    said = "".join(file.read_text() for file in hosts.values())
    assert sentence in said
    assert "error: process 0 of 2 lost the others: one of them ended, and its own last words say why" in said
    assert together.MADE not in said
    assert artifact.read(tmp_path / "out") is None


@pytest.mark.slow
def test_one_process_may_work_alone_for_longer_than_the_others_wait_at_a_step(tmp_path: Path) -> None:
    said = tmp_path / "said-0", tmp_path / "said-1"
    assert processes.ended(*processes.start_together(work_alone, said=said)) == [1, 1]
    first, second = (file.read_text() for file in said)
    assert first.startswith("met\n")
    assert second.startswith("met\n")
    assert "process 1 of 2 lost the others" in second


def work_alone() -> None:
    """What two processes do: the leader keeps the other waiting, who has no such patience at a step."""
    vars(training).update(PATIENCE=timedelta(seconds=1.5))
    vars(world).update(LOST_PATIENCE_S=0.0)
    with world.group() as found:
        assert found is not None
        model = tiny.bert(layers=1, hidden=16)
        found.barrier()  # to make the next group is a step, for which they do not wait long
        trainer = Trainer(model, tiny.finetuning(), found)
        time.sleep(2.25 if found.is_leader else 0.0)
        found.barrier()
        sys.stdout.write("met\n")
        sys.stdout.flush()
        assert trainer._exchange is not None
        time.sleep(2.25 if found.is_leader else 0.0)
        torch.distributed.barrier(trainer._exchange._peers)
