"""Keeps one Triton server running, and sees to it that the server never outlives its caller.

It runs as a process of its own, and needs the standard library alone.

    python supervisor.py <run folder> <log file> <grace seconds> <repository> <command> ...

The caller holds the other end of this process's standard input. When it writes `STOP` there, or when that end closes
because the caller died, even by `kill -9`, the server is stopped and what it left is removed. This process leads a
session of its own, so the Ctrl-C of the caller's terminal does not reach the server before the caller has seen it.

Once the caller has written `READY`, a server that dies by itself is started again, and so is one whose model process
died: Triton goes on saying that such a model is ready while each of its requests fails. A server that dies too often is
given up. The log gets one JSON object a line: time, level, source, message.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

READY = b"r"
STOP = b"."
STAGING = "staging"
"""Folder in the run folder: a second repository of the server, for models on trial."""

SOURCE = "supervisor"
"""Source of the lines in the log that come from here."""

MOST_DEATHS = 5
"""So many deaths within `WINDOW_S` are too many."""

WINDOW_S = 60.0
_PAUSE_S = 0.1
_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 2.0
_SETTLE = "import pathlib, sys; sys.path.append(sys.argv[1]); from serving import repository; "
_SETTLE += "repository.settle(pathlib.Path(sys.argv[2]))"
SHARED_MEMORY = Path("/dev/shm")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
_HEADER = re.compile(r"([IWEF])\d{4} [\d:.]+ \d+ ([^\]]+)\] ?(.*)")


class End(NamedTuple):
    """Why a server no longer runs, or must not."""

    kind: Literal["stop", "caller died", "death"]
    reason: str = ""
    """Of a death that left the server itself running."""


def main(arguments: list[str]) -> int:
    """Run the command until it is told to stop, standard input closes, or it dies too often; return its status."""
    folder, log, grace_s, repository, *command = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The server's helpers become ours when it dies, so that they can be waited for: not every init process does that.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The caller also hands its locks on run folder and repository over, as open descriptors that nothing here touches:
    # whoever can take such a lock later knows that no server is there, as the kernel lets go when this process ends.
    with open(log, "ab", buffering=0) as output:
        try:
            return _keep(command, output, float(grace_s), Path(folder), repository)
        finally:
            remove(Path(folder))


def _keep(command: Sequence[str], log: BinaryIO, grace_s: float, folder: Path, repository: str) -> int:
    """Run the server, and again after each death by itself; return the status of the last one."""
    deaths: list[float] = []
    is_armed = False
    while True:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Safe here: this process has one thread now, so no lock can be held across the fork.
            preexec_fn=_die_with_us,
        )
        assert server.stdout is not None
        writer = threading.Thread(target=copy_log, args=(server.stdout, log))
        writer.start()
        end, is_armed = _wait(server.pid, is_armed)
        # Nobody waits for the answers of a server whose caller died.
        status = _stop(server, grace_s if end.kind == "stop" else 0.0)
        writer.join()
        server.stdout.close()
        if end.kind != "death" or not is_armed:
            return status
        deaths = [moment for moment in deaths if moment > time.monotonic() - WINDOW_S] + [time.monotonic()]
        reason = end.reason or f"the server died {_cause(status)}"
        if len(deaths) == MOST_DEATHS:
            _say(log, f"{reason}, for the {MOST_DEATHS}th time within {WINDOW_S:g} s; the server is given up")
            return status
        _say(log, f"{reason}; the server is started again (death {len(deaths)} within {WINDOW_S:g} s)")
        _remove_regions(folder.name)
        _empty(folder / STAGING)
        _settle(repository, log)
        if _is_told_within(_PAUSE_S * 2 ** (len(deaths) - 1)):
            return status


def _empty(staging: Path) -> None:
    """Remove the models that were on trial when a server died: the next one would load them too."""
    for trial in staging.glob("*"):
        shutil.rmtree(trial, ignore_errors=True)


def _settle(repository: str, log: BinaryIO) -> None:
    """Have the repository put right, which the next server reads, where a deploy was killed; see `repository.settle`.

    In a process of its own, so that nothing that goes wrong there ends this one.
    """
    package = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SETTLE, package, repository],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    for line in done.stderr.decode(errors="replace").splitlines():
        _write(log, "warning", "repository", line)


def remove(folder: Path) -> None:
    """Remove a run folder, and the shared memory of its server, which is named after it."""
    _remove_regions(folder.name)
    shutil.rmtree(folder, ignore_errors=True)


def copy_log(source: BinaryIO, log: BinaryIO) -> None:
    """Write what the server says to its log, each line as JSON, until it has closed its end."""
    level = "info"
    for raw in source:
        line = raw.decode("utf-8", "replace").rstrip()
        header = _HEADER.match(line)
        origin, text = "", line
        if header:
            level, origin, text = _LEVELS[header[1]], header[2], header[3]
        # The server draws its settings as tables of hundreds of columns.
        if text and not text.startswith(("|", "+--")):
            _write(log, level, origin, _unquoted(text))


def _unquoted(text: str) -> str:
    try:
        found = json.loads(text, strict=False) if text.startswith('"') else text
    except ValueError:
        return text
    return str(found)


def _write(log: BinaryIO, level: str, source: str, message: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "level": level, "source": source, "message": message}
    # A full disk costs lines of the log: nobody else reads what the server says, and it would wait for that for ever.
    with contextlib.suppress(OSError):
        log.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _say(log: BinaryIO, message: str) -> None:
    _write(log, "error", SOURCE, message)


def _cause(status: int) -> str:
    """Say how a process ended, by its exit status as a shell gives it."""
    known = {128 + number: f"by {number.name}" for number in signal.Signals}
    return known.get(status, f"with status {status}")


def _remove_regions(name: str) -> None:
    for region in SHARED_MEMORY.glob(f"{name}*"):
        region.unlink(missing_ok=True)


def _die_with_us() -> None:
    # A backstop for a `kill -9` of this process; the server's own helpers leave when it does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait(pid: int, is_armed: bool) -> tuple[End, bool]:
    """Return why a server must not go on, and whether it was ready before, when that is known."""
    process, orders = os.pidfd_open(pid), sys.stdin.fileno()
    lost: set[int] = set()
    try:
        while True:
            events, _, _ = select.select([process, orders], [], [], _LOOK_S if is_armed else None)
            if orders in events:
                order = os.read(orders, 1)
                if order != READY:
                    return End("stop" if order else "caller died"), is_armed
                is_armed = True
            elif process in events:
                return End("death"), is_armed
            else:
                # A model that is unloaded also leaves a dead process, but the server waits for that one at once.
                still, lost = lost, _dead_children(pid)
                if still & lost:
                    return End("death", f"model process {min(still & lost)} died"), is_armed
    finally:
        os.close(process)


def _is_told_within(seconds: float) -> bool:
    """Return True as soon as the caller wants no server any more, and False after `seconds`."""
    end = time.monotonic() + seconds
    while select.select([sys.stdin.fileno()], [], [], max(0.0, end - time.monotonic()))[0]:
        if os.read(sys.stdin.fileno(), 1) != READY:
            return True
    return False


def _dead_children(parent: int) -> set[int]:
    """Return the processes that have died and that `parent` has not waited for."""
    found = set()
    # Not all of /proc: a machine can have thousands of processes, and this is done twice a second.
    for thread in _entries(f"/proc/{parent}/task"):
        # Threads and children end at any time.
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as children:
            for child in children.read().split():
                with open(f"/proc/{child}/stat", errors="replace") as stat:
                    # The name, in parentheses, may hold anything.
                    if stat.read().rpartition(")")[2].split()[0] == "Z":
                        found.add(int(child))
    return found


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stop(server: subprocess.Popen[bytes], grace_s: float) -> int:
    """End the server if it still runs: politely first, then with all its helpers; return its exit status."""
    server.terminate()
    try:
        status = server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        status = server.wait()
    _kill_helpers()
    return 128 - status if status < 0 else status


def _kill_helpers() -> None:
    """Kill what is left of the session: the helper processes of a server that had no time to stop them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.getsid(int(entry.name)) == os.getpid():
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    end = time.monotonic() + _REAP_S
    try:
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
