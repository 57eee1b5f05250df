"""Processes and devices, two of them for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor import artifact, training, world
from compressor.artifact import Artifact
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
from serving.runtime import free_port
from tests import tiny


def write_rank(world: World, folder: Path) -> None:
    """Leave a file that says what this process knows of the others."""
    told, total = (
        world.broadcast(f"from {world.rank}"),
        world.sum(np.array([[1.5, 2.0 * world.rank]], dtype=np.float32)),
    )
    world.barrier()
    known = f"{world.size} {world.is_leader} {told} {total.tolist()} {total.dtype} {torch.get_num_threads()}"
    (folder / str(world.rank)).write_text(known)


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
    assert alone.sum(np.array([1, 2])).tolist() == [1, 2]


def test_cores_are_those_of_the_scheduler_at_most() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("nonsense", 8)],
)
def test_cores_are_capped_by_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(world, "CPU_QUOTAS", ((tmp_path / "cpu.max",),))
    assert available_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("150000", 2)])
def test_cores_are_capped_by_the_quota_of_older_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    files = (tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us")
    for file, number in zip(files, (quota, "100000"), strict=True):
        file.write_text(f"{number}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(world, "CPU_QUOTAS", ((tmp_path / "absent",), files))
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
def test_two_processes_know_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(write_rank, tmp_path, processes=2, device="cpu")
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
        launch(write_rank, tmp_path, device="cpu")
    finally:
        torch.set_num_threads(before)
    assert (tmp_path / "0").read_text().endswith(f" {threads}")


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


def end_rank_1(world: World) -> None:
    """Die as a process dies whose memory is taken, while the other waits."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_its_signal() -> None:
    with pytest.raises(CompressorError, match=r"^process 1 of 2 was ended by signal 9; the same command goes on from"):
        launch(end_rank_1, processes=2, device="cpu")


def torchrun(folder: Path, mode: str) -> list[subprocess.Popen[str]]:
    """Agents of two machines (both this one), each with one process that runs this file as a program."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    meeting, program = (
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        ["-m", "tests.compressor.test_world", mode, str(folder)],
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [*agent, meeting, f"--rdzv-conf=is_host={host}", *program], cwd=Path(__file__).parents[2], **pipes
        )
        for host in (1, 0)
    ]


def ended(agents: list[subprocess.Popen[str]]) -> tuple[set[int], str, str]:
    """Exit codes, and all that was said, once every agent has come to its end."""
    said = [agent.communicate(timeout=120) for agent in agents]
    return {agent.returncode for agent in agents}, "".join(out for out, _ in said), "".join(err for _, err in said)


@pytest.mark.slow
def test_torchrun_s_processes_make_one_artifact(tmp_path: Path) -> None:
    codes, out, err = ended(torchrun(tmp_path, "talk"))
    assert codes == {0}, err
    assert out.split() == ["3.0", "3.0"]  # the sum, measured by the leader, told to both
    assert list(Artifact.open(tmp_path / "out", kind="thing").manifest["files"]) == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sentence"),
    [("fail", "error: the second cannot go on; change something"), ("kill", "Signal 9 (SIGKILL)")],
)
def test_one_of_torchrun_s_processes_ends_them_all(tmp_path: Path, mode: str, sentence: str) -> None:
    codes, out, err = ended(torchrun(tmp_path, mode))
    assert codes == {1}
    assert out == ""
    assert sentence in err
    assert "error: process 0 of 2 lost the others: one of them ended, and its own last words say why" in err
    assert artifact.read(tmp_path / "out") is None


@pytest.mark.slow
def test_one_process_may_work_alone_for_longer_than_the_others_wait_at_a_step(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = [sys.executable, "-m", "tests.compressor.test_world", "alone", str(tmp_path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    codes, out, err = ended(
        [
            subprocess.Popen(program, cwd=Path(__file__).parents[2], env=os.environ | meeting | {"RANK": rank}, **pipes)
            for rank in "01"
        ]
    )
    assert out.split() == ["met", "met"], err
    assert codes == {1}
    assert "process 1 of 2 lost the others" in err


def work_alone(folder: Path) -> None:
    """What two processes do: the leader keeps the other waiting, who has no such patience at a step."""
    vars(training).update(PATIENCE=timedelta(seconds=3))
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:  # both are awake
        time.sleep(0.1)
    with world.group() as found:
        assert found is not None
        trainer = Trainer(tiny.bert(layers=1, hidden=16), tiny.finetuning(), found)
        time.sleep(4.5 if found.is_leader else 0.0)
        found.barrier()
        sys.stdout.write("met\n")
        sys.stdout.flush()
        assert trainer._exchange is not None
        time.sleep(4.5 if found.is_leader else 0.0)
        torch.distributed.barrier(trainer._exchange._peers)


def talk(world: World, folder: Path, mode: str) -> None:
    """What torchrun's processes do together."""
    if world.rank == 1 and mode == "fail":
        raise ConfigError("the second cannot go on; change something")
    if mode == "kill":
        end_rank_1(world)
    total = world.sum(np.array([1.0 + world.rank]))
    if world.is_leader:
        (folder / "file").write_text("")
        artifact.write_result(folder, {"total": float(total[0])})


def main(mode: str, folder: Path) -> None:
    """The program that torchrun starts."""
    try:
        if mode == "alone":
            return work_alone(folder)
        with artifact.write(folder / "out", "thing", key="k", section={}, parents={}, together=True) as draft:
            launch(talk, draft.path, mode, device="cpu")
            draft.take_result()
        Artifact.open(folder / "out", kind="thing")
        sys.stdout.write(f"{draft.metrics['total']}\n")
    except CompressorError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
