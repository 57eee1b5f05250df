"""Work in processes of its own, which may die of it: forks of one that has imported what tests need."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from serving.runtime import free_port

TIMEOUT_S = 200.0


def start(
    work: Callable[..., Any], *arguments: Any, said: Path | None = None, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """A process that does `work(*arguments)`; what it says goes to the file `said`, or to where this session's does."""
    given = (said, dict(environment or {}), work, arguments)
    # A daemon, so that one that hangs ends with the session.
    process = multiprocessing.get_context("forkserver").Process(target=_do, args=given, daemon=True)
    process.start()
    return process


def start_together(
    work: Callable[..., Any], *arguments: Any, said: tuple[Path | None, Path | None] = (None, None)
) -> list[BaseProcess]:
    """Two processes that have what torchrun gives to its own on one machine, and do `work(*arguments)`."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(work, *arguments, said=file, environment=meeting | {"RANK": rank, "LOCAL_RANK": rank})
        for rank, file in zip("01", said, strict=True)
    ]


def ended(*processes: BaseProcess) -> list[int]:
    """Their exit codes: 0, 1 after an exception, -9 if SIGKILL ended one."""
    codes = list[int]()
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, f"a process has not come to its end within {TIMEOUT_S:.0f} s"
        codes.append(process.exitcode)
    return codes


def in_new_process(work: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that does `work(*arguments)`."""
    return ended(start(work, *arguments))[0]


def speak_to(file: Path) -> None:
    """Have this process, and those that it starts, write to a file what they say."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def _do(said: Path | None, environment: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= environment
    if said is not None:
        speak_to(said)
    work(*arguments)


class Killed:
    """Forks of this process that tell of their steps, and are killed after some."""

    def __init__(self) -> None:
        self._told, self._tell = os.pipe()

    def tell(self) -> None:
        """Tell of a step, in a fork."""
        os.write(self._tell, b".")

    def fork(self, work: Callable[[], Any]) -> int:
        """The number of a fork that does `work`."""
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        return child

    def complete(self, work: Callable[[], Any]) -> int:
        """How many steps a fork tells of that comes to its end."""
        assert os.waitpid(self.fork(work), 0)[1] == 0
        return self._unheard()

    def kill(self, child: int) -> None:
        """End a fork, which must not have ended by itself."""
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it had come to its end before"
        self._unheard()

    def hear(self, steps: int) -> None:
        """Wait for as many steps."""
        for _ in range(steps):
            assert os.read(self._told, 1)

    def _unheard(self) -> int:
        found = 0
        while select.select([self._told], [], [], 0)[0]:
            found += len(os.read(self._told, 80))
        return found
