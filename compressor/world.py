"""Processes and devices as values: who am I, on what do I compute, and how the others are started."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, ConfigError

if TYPE_CHECKING:
    import torch

# They tell of a failed process in tracebacks, before `launch` says it in a sentence.
LAUNCHER_LOGS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class World:
    """One process among those that train together."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    device: torch.device
    """What this process computes on."""

    @property
    def is_leader(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """The leader's `value`, in every process."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def available_cores() -> int:
    """Cores this process may really use: the scheduler's mask, capped by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def resolve_device(name: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises ConfigError if there is no such device here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and PyTorch sees no CUDA device here; use --device cpu or auto")
    return name


def launch(work: Callable[..., None], *args: Any, processes: int = 1, device: str = "auto") -> None:
    """Run `work(world, *args)` in `processes` processes that can talk to each other.

    A single process is this one. Several are started on this machine by torch's elastic launcher; an error in one of
    them ends them all and is raised as CompressorError.
    """
    if "RANK" in os.environ:
        raise ConfigError("torchrun started this command several times; start it once, with --processes")
    kind = resolve_device(device)
    if processes == 1:
        with _joined(kind) as world:
            work(world, *args)
        return
    import torch

    if kind == "cuda" and processes > torch.cuda.device_count():
        raise ConfigError(f"--processes is {processes}; there are {torch.cuda.device_count()} GPUs, one for each")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="spawn",
    )
    for name in LAUNCHER_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    level = logging.getLogger("compressor").getEffectiveLevel()
    with tempfile.TemporaryDirectory() as folder:
        try:
            elastic_launch(launch_config, _worker)(work, args, kind, processes, level, Path(folder))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            rank, reason = _first_reason(Path(folder)) or (rank, failure.message)
            raise CompressorError(f"process {rank} of {processes} failed: {reason}") from error
        except SignalException as error:  # the launcher takes Ctrl-C for itself
            raise KeyboardInterrupt from error


def _worker(
    work: Callable[..., None], args: tuple[Any, ...], kind: str, processes: int, level: int, reasons: Path
) -> None:
    """Body of one launched process."""
    import torch

    logging.basicConfig(format="%(message)s")  # a new process knows nothing of the settings of its parent
    logging.getLogger("compressor").setLevel(level)
    torch.set_num_threads(max(1, available_cores() // processes))
    with _joined(kind) as world:
        try:
            work(world, *args)
        except Exception as error:
            # Before the group is left: that breaks the connection of the others, which then fail as well.
            trace = None if isinstance(error, CompressorError) else traceback.format_exc()
            told = {"rank": world.rank, "reason": str(error) or repr(error), "trace": trace}
            (reasons / f"{time.monotonic_ns():020}.{world.rank}").write_text(json.dumps(told), encoding="utf-8")
            raise


def _first_reason(folder: Path) -> tuple[int, str] | None:
    """Rank and sentence of the process that failed first; of an error that is not ours the traceback is logged."""
    for path in sorted(folder.iterdir()):
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["trace"]:
            log.error("%s", told["trace"])
        return int(told["rank"]), str(told["reason"])
    return None


@contextmanager
def _joined(kind: str) -> Iterator[World]:
    """The world of this process, with a process group while it lasts if there are several."""
    import torch
    import torch.distributed as dist

    _keep_freed_memory()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next step instead of handing them back to the system.

    A training step frees and asks again for the same hundreds of megabytes; where page faults are dear (virtual
    machines), most of the step goes into them. Other C libraries are left as they are.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # names of malloc.h's M_* options
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)
