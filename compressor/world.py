"""Processes and devices as values: who am I, on what do I compute, and how the others are started."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, ConfigError, refused_write

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

DEVICES = ("auto", "cpu", "cuda")
# They tell of a failed process in tracebacks, before `launch` says it in a sentence.
LAUNCHER_LOGS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
# What the libraries say when the process at the other end of a connection is gone.
LOST_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "gloo")
LOST_PATIENCE_S = 5.0
# For the others' part of a step.
PATIENCE = timedelta(minutes=30)
# For one that does something alone, such as tokenizing millions of rows. One that ends is noticed at once, because its
# connections close; only one whose machine is gone without a word is waited for that long.
ALONE_PATIENCE = timedelta(days=1)
# Not a fork of this process, which would have neither PyTorch's threads nor a device that it was using.
START_METHOD = "spawn"
LOCAL_PLACE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
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

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """The sum of every process's `array`, in every process; all are of one shape and type."""
        if self.size == 1:
            return array
        import numpy as np
        import torch
        import torch.distributed as dist

        total = torch.from_numpy(np.array(array, order="C"))
        dist.all_reduce(total)
        summed: NDArray[Any] = total.numpy()
        return summed


def available_cores() -> int:
    """Cores this process may really use; where the system does not tell, those of the machine."""
    from serving.cores import available_cores as told  # here: the package around it loads a web client

    return told() if sys.platform == "linux" else os.cpu_count() or 1


def check_device(name: str) -> None:
    """Raise ConfigError unless this names a device; whether there is one is seen only with PyTorch."""
    if name not in DEVICES:
        raise ConfigError(f"--device is {name!r}; known: {', '.join(DEVICES)}")


def resolve_device(name: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises ConfigError if there is no such device here."""
    check_device(name)
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and PyTorch sees no CUDA device here; use --device cpu or auto")
    return name


def launch(work: Callable[..., None], *args: Any, processes: int = 1, device: str = "auto") -> None:
    """Run `work(world, *args)` in `processes` processes that can talk to each other.

    A single process is this one; if torchrun started it together with others, they are its world. Several are started
    on this machine by torch's elastic launcher; an error in one of them ends them all and is raised as CompressorError.
    """
    kind = resolve_device(device)
    if processes == 1:
        with _world(kind) as world:
            work(world, *args)
        return
    if started_together() or "RANK" in os.environ:
        raise ConfigError(f"--processes is {processes} and torchrun started this command; use one of the two")
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
        start_method=START_METHOD,
    )
    for name in LAUNCHER_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    level = logging.getLogger("compressor").getEffectiveLevel()
    with tempfile.TemporaryDirectory() as folder:
        try:
            elastic_launch(launch_config, _worker)(work, args, kind, level, Path(folder))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise CompressorError(
                    f"process {rank} of {processes} was ended by signal {-failure.exitcode}; the same command goes on "
                    "from the last checkpoint; if memory ran out, use fewer processes or a smaller batch_size"
                ) from error
            rank, reason = _first_reason(Path(folder)) or (rank, failure.message)
            raise CompressorError(f"process {rank} of {processes} failed: {reason}") from error
        except SignalException as error:  # the launcher takes Ctrl-C for itself
            raise KeyboardInterrupt from error


def started_together() -> bool:
    """Whether torchrun (or a launcher that sets the same variables) started this process with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def leads() -> bool:
    """Whether this process is alone, or the first of those that were started together: the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def refuse_together(what: str, remedy: str) -> None:
    """Raise ConfigError if this process was started together with others."""
    if started_together():
        raise ConfigError(f"torchrun started {what} {os.environ['WORLD_SIZE']} times, which works once; {remedy}")


@contextmanager
def group() -> Iterator[World | None]:
    """The processes that were started together, which can talk to each other meanwhile; None if this one is alone.

    Inside another `group` it is the same one. Raises CompressorError if another process fails.
    """
    if not started_together():
        yield None
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
        return
    try:
        # Tensors on a GPU go through NCCL; everything else does not wait for the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=ALONE_PATIENCE)
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    except RuntimeError as error:
        if not any(word in str(error) for word in LOST_WORDS):
            raise
        # The launcher sees which process failed first, tells of that one, and ends this one before it wakes.
        time.sleep(LOST_PATIENCE_S)
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise CompressorError(
            f"process {rank} of {size} lost the others: one of them ended, and its own last words say why; "
            "the same command goes on from the last checkpoint"
        ) from error
    # Not after an error: to leave in order takes every process, and the end of this one tells the others.
    dist.destroy_process_group()


def _worker(work: Callable[..., None], args: tuple[Any, ...], kind: str, level: int, reasons: Path) -> None:
    """Body of one launched process."""
    logging.basicConfig(format="%(message)s")  # a new process knows nothing of the settings of its parent
    logging.getLogger("compressor").setLevel(level)
    try:
        with _world(kind) as world:
            work(world, *args)
    except Exception as found:
        error = refused_write(found, "the result") or found
        trace = None if isinstance(error, CompressorError) else traceback.format_exc()
        told = {"rank": int(os.environ["RANK"]), "reason": str(error) or repr(error), "trace": trace}
        (reasons / f"{time.monotonic_ns():020}.{told['rank']}").write_text(json.dumps(told), encoding="utf-8")
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
def _world(kind: str) -> Iterator[World]:
    """The world of this process, with its device, threads and memory set up."""
    import torch

    keep_freed_memory()
    local_rank, local_size = (int(os.environ.get(name, value)) for name, value in LOCAL_PLACE.items())
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{local_size} processes were started on a machine with {torch.cuda.device_count()} GPUs; start one "
                "for each GPU"
            )
        torch.cuda.set_device(local_rank)
    if local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // local_size))
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    with group() as found:
        yield World(device=device) if found is None else replace(found, device=device)


def keep_freed_memory() -> None:
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
