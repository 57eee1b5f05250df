"""Runs one server process for as long as another process wants it.

`runtime` starts it as a file, so it needs the standard library alone.

    python supervisor.py <run folder> <log file> <grace seconds> <command> ...

The caller holds the other end of this process's standard input. When it writes there, or when that end closes because
the caller died, even by `kill -9`, the server is stopped and what it left is removed. This process leads a
session of its own, so the Ctrl-C of the caller's terminal does not reach the server before the caller has seen it.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 2.0
SHARED_MEMORY = Path("/dev/shm")


def main(arguments: list[str]) -> int:
    """Run the command until it ends or standard input closes; return its exit status."""
    folder, log, grace_s, *command = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The server's helpers become ours when it dies, so that they can be waited for: not every init process does that.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The caller also hands its lock on the run folder over, as an open descriptor that nothing here touches: whoever
    # can take that lock later knows that the folder is a leftover, because the kernel lets go when this process ends.
    with open(log, "ab", buffering=0) as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Safe here: this process has one thread, so no lock can be held across the fork.
            preexec_fn=_die_with_us,
        )
        try:
            # Nobody waits for the answers of a server whose caller died.
            status = _stop(server, float(grace_s) if _wait(server.pid) else 0.0)
        finally:
            remove(Path(folder))
    return status


def remove(folder: Path) -> None:
    """Remove a run folder, and the shared memory of its server, which is named after it."""
    for region in SHARED_MEMORY.glob(f"{folder.name}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _die_with_us() -> None:
    # A backstop for a `kill -9` of this process; the server's own helpers leave when it does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait(pid: int) -> bool:
    """Return when the server has ended or standard input says something (True), or when it is closed (False)."""
    process = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([process, sys.stdin.fileno()], [], [])
        return process in ready or bool(os.read(sys.stdin.fileno(), 1))
    finally:
        os.close(process)


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
