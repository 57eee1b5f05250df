"""Jobs that need the same tools, done in this process or in several others, with results in the order of the jobs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

from threadpoolctl import threadpool_limits

from compressor import world
from compressor.config import AugmentConfig
from compressor.errors import CompressorError, ConfigError
from compressor.stages.augment.tools import Tools
from compressor.world import available_cores, check_device, resolve_device

JOBS_AHEAD = 2  # of each process, so that none waits and results do not pile up
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # torchrun's


class Workers:
    """A context in which jobs are done by `processes` processes; 1 is this process.

    PyTorch is loaded only where there is a masked language model.
    """

    def __init__(self, config: AugmentConfig, *, processes: int, device: str) -> None:
        """Raises ConfigError if there is no such device, not one GPU for each process, or no process."""
        check_device(device)
        if processes < 1:
            raise ConfigError(f"processes is {processes}; it must be at least 1")
        self._config, self._processes = config, processes
        self._here: Tools | None = None
        kind = resolve_device(device) if config.masked_lm else "cpu"
        rank, beside = int(os.environ.get(LOCAL_RANK, 0)), int(os.environ.get(LOCAL_SIZE, 1))
        self._threads = max(1, available_cores() // (processes * beside))
        self._devices = [kind] * processes
        if kind == "cuda":
            import torch

            if processes * beside > torch.cuda.device_count():
                raise ConfigError(
                    f"{processes * beside} processes were asked for and there are {torch.cuda.device_count()} GPUs, "
                    "one for each"
                )
            self._devices = [f"cuda:{rank * processes + number}" for number in range(processes)]

    def __enter__(self) -> Self:
        if self._processes > 1:
            context = multiprocessing.get_context(world.START_METHOD)
            devices = context.SimpleQueue()
            for device in self._devices:
                devices.put(device)
            stop, self._stop = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self._processes, context, _begin, (stop, devices, self._config, self._threads)
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._processes > 1:
            if kind is not None:
                self._stop.close()  # ends the processes, whatever they are doing
            self._pool.shutdown(cancel_futures=True)
            self._stop.close()

    def results(self, work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """`work(tools, *job)` of each job, in the order of the jobs.

        Raises what `work` raises, and CompressorError if a process ends.
        """
        if self._processes == 1:
            for job in jobs:
                self._here = self._here or Tools.load(self._config, device=self._devices[0], threads=self._threads)
                yield work(self._here, *job)
            return
        waiting = deque[Future[Any]]()
        try:
            for job in jobs:
                waiting.append(self._pool.submit(_done, work, job))
                if len(waiting) > JOBS_AHEAD * self._processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise CompressorError(
                f"one of {self._processes} processes that replace words was ended from outside; a command goes on from "
                "what it finished when it is run again; if memory ran out, use fewer processes"
            ) from error


_load: Callable[[], Tools] | None = None  # of a process that was started for this
_tools: Tools | None = None  # the same, for all of its jobs


def _begin(stop: Connection, devices: Any, config: AugmentConfig, threads: int) -> None:
    """Set up a process."""
    global _load
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    threading.Thread(target=_end_with, args=(stop,), daemon=True).start()
    threadpool_limits(threads)
    _load = partial(Tools.load, config, device=devices.get(), threads=threads)


def _end_with(stop: Connection) -> None:
    """End this process as soon as the one that started it ends, by whatever, or gives up."""
    try:
        stop.recv()
    except EOFError:
        os._exit(1)


def _done(work: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    """Do a job in a process that was started for this; the first one loads the tools, so that its errors are told."""
    global _tools
    if _tools is None:
        assert _load is not None
        _tools = _load()
    return work(_tools, *job)
