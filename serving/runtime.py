"""Starts the real Triton server of the `nvidia-pytriton` package on a repository, and stops it without a trace."""

import contextlib
import errno
import fcntl
import http.client
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from serving import addresses, supervisor
from serving.control import HEADER, RESTRICTED, SERVED, Control, base_folder, is_held
from serving.errors import DeadlineError, StartError, UnavailableError
from serving.repository import settle
from serving.versions import WAITING, read_marker
from serving.wheel import environment, find_wheel, prepare_backends, prepare_binary

_POLL_S = 0.05
_LOG_LINES = 15
_LOG_ERRORS = 3
_LOG_ENDING = 5
_EXIT_TIMEOUT_S = 3
_GRACE_S = 8
_STUB_TIMEOUT_S = 120
_CACHE_BYTES = 64 * 2**20
_WATCH_S = 0.5
_NOTICE_S = 1.5
# Without the proxies of the environment: they cannot reach a server on this machine.
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))

log = logging.getLogger(__name__)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free on `host` now; nothing reserves it until a server takes it.

    Raises StartError if the host has no address.
    """
    address = addresses.resolved(host)
    with socket.socket(addresses.family_of(address)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class TritonServer:
    """One Triton server process.

        with TritonServer(Path("model_repository")) as server:
            Client(server.grpc_url).classify(["a gripping film"])

    Leaving the block stops the server. It also stops if this process dies in any way, `kill -9` included. A server that
    was ready once and dies by itself, or loses the process of a model, is started again on the same ports.
    """

    def __init__(
        self,
        repository: Path,
        *,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        host: str = "127.0.0.1",
        log: Path | None = None,
    ) -> None:
        """Describe a server; nothing starts yet.

        `host` is an address to listen on, or the name of one; 0.0.0.0 and :: are all of version 4 or 6. `log` receives
        what the server says, appended, one JSON object a line; None keeps it in a temporary file until the server
        stops. Raises StartError if the host has no address.
        """
        self.repository = repository
        self.host = addresses.resolved(host)
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self._wanted_log = log
        self._log: BinaryIO | None = None
        self._log_start = self._log_seen = 0
        self._deaths: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._staging = Path()
        self._key = secrets.token_urlsafe(24)

    @property
    def control(self) -> Control:
        """How to load and unload its models."""
        return Control(
            grpc_url=self.grpc_url,
            key=self._key,
            repository=str(self.repository.absolute()),
            staging=str(self._staging),
        )

    @property
    def http_url(self) -> str:
        """host:port of HTTP, as this machine reaches it."""
        return addresses.at(self.host, self.http_port)

    @property
    def grpc_url(self) -> str:
        """host:port of gRPC, as this machine reaches it."""
        return addresses.at(self.host, self.grpc_port)

    @property
    def metrics_url(self) -> str:
        """Address of the metrics page, as this machine reaches it."""
        return f"http://{addresses.at(self.host, self.metrics_port)}/metrics"

    @property
    def pid(self) -> int | None:
        """Process id of the parent of all processes of the server; None while it is stopped."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and return at once; the models load meanwhile.

        What a killed deploy left of the repository is undone first. Raises StartError if it runs already, if there is
        no repository, if a port is in use, or if the server or its Python library is not installed, and RepositoryError
        if the disk refuses.
        """
        if self._process is not None:
            raise StartError(f"the server on {self.http_url} is started already; stop it first")
        if not self.repository.is_dir():
            raise StartError(f"model repository {self.repository} is no folder; run `compressor build` first")
        self._check_runtime()
        wheel = find_wheel()
        self._check_ports()
        settle(self.repository)
        run, *locks = _new_run()
        log = (self._wanted_log or run / "triton.log").absolute()
        try:
            locks += _lock_served(self.repository)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            # Kept open: the supervisor removes the run folder, and what a dead server said must still be readable.
            self._log = log.open("rb")
            self._log_start = self._log_seen = self._log.seek(0, os.SEEK_END)
            self._deaths = []
            self._staging = run / supervisor.STAGING
            self._staging.mkdir()
            self.control.save(run)
            command = self._command(prepare_binary(wheel, run), prepare_backends(wheel, run), run.name)
            if self._has_cache():
                command += [f"--cache-directory={wheel.caches}", f"--cache-config=local,size={_CACHE_BYTES}"]
            self._process = subprocess.Popen(
                # -I -S: the supervisor needs the standard library alone, and starts in a few milliseconds.
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *(str(run), str(log), str(_GRACE_S), str(self.repository.absolute())),
                    *command,
                ],
                stdin=subprocess.PIPE,
                env=environment(wheel),
                pass_fds=locks,
                start_new_session=True,
            )
        except OSError as error:
            supervisor.remove(run)
            self._close_log()
            raise StartError(
                f"cannot start the server: {error.strerror} ({error.filename}); free or change it"
            ) from error
        finally:
            for lock in locks:
                os.close(lock)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Return when every model of the repository is ready, and the metrics can be read.

        Raises StartError, with the last lines of the log, as soon as the process has died, and DeadlineError if
        `timeout_s` seconds pass before.
        """
        end = time.monotonic() + timeout_s
        while True:
            process = self._running()
            states = self._states()
            if process.poll() is not None:
                raise self._death(process.returncode)
            if states is not None and not states:
                raise StartError(f"the server finds no model in {self.repository}; run `compressor build` first")
            if states and all(state == "READY" for state in states.values()):
                self._order(supervisor.READY)
                return
            if time.monotonic() > end:
                late = ", ".join(f"{name} is {state}" for name, state in (states or {}).items() if state != "READY")
                raise DeadlineError(
                    f"the server is not ready after {timeout_s:g} s ({late or 'no answer yet'}); "
                    f"allow more time; its log ends:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def wait(self) -> None:
        """Block for as long as the server runs, until Ctrl-C for example; raise StartError if it dies for good.

        A death that it recovers from is logged, with the seconds until it was ready again.
        """
        process = self._running()
        known = len(self.deaths())
        while process.poll() is None:
            time.sleep(_WATCH_S)
            deaths, began = self.deaths(), time.monotonic()
            if len(deaths) > known and process.poll() is None:
                log.warning("%s; its log says:\n%s", deaths[-1], self._why())
                known = len(deaths)
                with contextlib.suppress(DeadlineError):
                    self.wait_ready()
                    log.warning("the server is ready again after %.1f s", time.monotonic() - began)
        raise self._death(process.returncode)

    def deaths(self) -> list[str]:
        """Return one sentence for each time that this server died by itself, what became of it included."""
        lines, self._log_seen = self._log_lines(self._log_seen)
        self._deaths += [line["message"] for line in lines if line["source"] == supervisor.SOURCE]
        return list(self._deaths)

    def stop(self) -> None:
        """Stop the server and wait until it is gone; nothing happens if it is stopped already."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None  # start() asked for a pipe
        # Closing the pipe is the whole order: from here the supervisor stops the server, whatever happens to us.
        with contextlib.suppress(OSError):
            # A word as well: a fork of this process that lives on may still hold the pipe open.
            os.write(process.stdin.fileno(), supervisor.STOP)
        process.stdin.close()
        try:
            process.wait(_GRACE_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close_log()

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """Return the last lines that this server wrote to its log."""
        found, _ = self._log_lines(self._log_start)
        return "\n".join(line["message"] for line in found[-lines:])

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server; raise StartError if the block found no server because that one had died."""
        if isinstance(error, UnavailableError):
            # A client can notice the death before the supervisor has written it down.
            end = time.monotonic() + _NOTICE_S
            while not self.deaths() and time.monotonic() < end:
                time.sleep(_POLL_S)
        deaths, why = self.deaths(), self._why()
        self.stop()
        if isinstance(error, UnavailableError) and deaths:
            raise StartError(f"{error}; {deaths[-1]}; the server's log says:\n{why}") from error

    def _log_lines(self, start: int) -> tuple[list[dict[str, str]], int]:
        """Return what the log says from a place on, and where it goes on: its last line may be half written."""
        if self._log is None:
            return [], start
        # Rotated by copy and truncation: what comes now stands before the place.
        if os.fstat(self._log.fileno()).st_size < start:
            start = self._log_start = 0
        self._log.seek(start)
        whole, end, _ = self._log.read().rpartition(b"\n")
        lines = []
        for line in whole.splitlines():
            # A full disk cuts lines short.
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines, start + len(whole + end)

    def _why(self) -> str:
        """Return the errors in the log, each once, and its last lines: the last ones alone are about the shutdown."""
        lines, _ = self._log_lines(self._log_start)
        own = [line for line in lines if line["source"] != supervisor.SOURCE]
        errors = dict.fromkeys(line["message"] for line in own if line["level"] in ("error", "fatal"))
        return "\n".join([*list(errors)[-_LOG_ERRORS:], *(line["message"] for line in lines[-_LOG_ENDING:])])

    def _death(self, status: int) -> StartError:
        return StartError(f"the server died with status {status}; its log says:\n{self._why()}")

    def _order(self, word: bytes) -> None:
        process = self._running()
        assert process.stdin is not None  # start() asked for a pipe
        # It may have died this very moment; whoever looks next is told.
        with contextlib.suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), word)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise StartError("the server is not started; call start() first")
        return self._process

    def _check_runtime(self) -> None:
        """Raise StartError if a model needs a backend that this server lacks."""
        for folder in sorted(self.repository.iterdir()):
            if (read_marker(folder) or {}).get("runtime") == "onnxruntime":
                raise StartError(
                    f"{folder} was published for the runtime onnxruntime, which the server of nvidia-pytriton lacks; "
                    "serve it with Triton's official container (`compressor deploy-files`), or publish it for embedded"
                )

    def _has_cache(self) -> bool:
        """Say whether a model has a response cache, or will have one once the version that waits is deployed."""
        configs = (*self.repository.glob("*/config.pbtxt"), *self.repository.glob(f"*/{WAITING}*/config.pbtxt"))
        return any("response_cache" in file.read_text("utf-8") for file in configs)

    def _check_ports(self) -> None:
        """Raise StartError if a port cannot be taken: the server's own message comes late and names no remedy."""
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}
        if len(set(ports.values())) < len(ports):
            raise StartError(f"the ports {ports} must be three different ones")
        for name, port in ports.items():
            # The server would share the gRPC port with another one; this probe, which does not ask to share, finds it.
            with socket.socket(addresses.family_of(self.host)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except (OSError, OverflowError) as error:
                    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                    reason = "is in use" if taken else f"cannot be used ({error})"
                    raise StartError(
                        f"port {port} on {self.host} {reason}; stop what holds it, or choose another {name}"
                    ) from error

    def _command(self, binary: Path, backends: Path, shared_memory: str) -> list[str]:
        http, grpc = addresses.spelt(self.host)
        return [
            str(binary),
            f"--model-repository={self.repository.absolute()}",
            f"--model-repository={self._staging}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={shared_memory}",
            f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}",
            # Nothing changes but by order, and who orders needs the key of this start.
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={RESTRICTED}:{HEADER}={self._key}",
            f"--grpc-restricted-protocol={RESTRICTED}:{HEADER}={self._key}",
            # With the models of the start it is ready or dead. Strictly it would also be unready while, and after, a
            # version is tried beside the one that answers.
            "--exit-on-error=true",
            "--strict-readiness=false",
            # What the repository says is what runs.
            "--disable-auto-complete-config",
            # An idle connection of a client that did not close it makes the server wait this long.
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            "--allow-gpu-metrics=false",
            f"--http-address={http}",
            f"--http-port={self.http_port}",
            f"--grpc-address={grpc}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={http}",
            f"--metrics-port={self.metrics_port}",
        ]

    def _states(self) -> dict[str, str] | None:
        """Return the state of each model; None while the server does not answer, or says that it is not ready."""
        try:
            with _LOCAL.open(f"http://{self.http_url}/v2/health/ready", timeout=5):
                pass
            # Triton opens its metrics last, after it has called itself ready.
            socket.create_connection((addresses.reached(self.host), self.metrics_port), timeout=5).close()
            url = f"http://{self.http_url}/v2/repository/index"
            with _LOCAL.open(urllib.request.Request(url, b"{}", {HEADER: self._key}), timeout=5) as answer:
                models = json.load(answer)
        except (OSError, ValueError, http.client.HTTPException):
            return None
        # Older versions of a model are listed as well once another one has taken their place.
        states: dict[str, str] = {}
        for model in models:
            if not (self._staging / model["name"]).exists() and states.get(model["name"]) != "READY":
                states[model["name"]] = model.get("state", "UNAVAILABLE")
        return states

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def _new_run() -> tuple[Path, int]:
    """Remove what dead servers left, and return a new run folder with a descriptor that holds its lock."""
    base = base_folder()
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        # Once more: somebody else may have made it in between.
        base_folder()
        descriptor = os.open(base, os.O_RDONLY)
        try:
            # Two servers that start together must not take each other's new folder for a leftover.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _remove_leftovers(base)
            run = base / f"compressor-{secrets.token_hex(6)}"
            run.mkdir()
            lock = os.open(run, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            return run, lock
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StartError(
            f"cannot write to {base} ({error.strerror}); free space, or set TMPDIR to a folder that can be written"
        ) from error


def _remove_leftovers(base: Path) -> None:
    """Remove the run folders that no supervisor holds any more; the kernel frees the lock of one that was killed."""
    for run in base.glob("compressor-*"):
        if not is_held(run):
            supervisor.remove(run)


def _lock_served(repository: Path) -> list[int]:
    """Return a descriptor that says, for as long as a process has it, that a repository is served; none if none can."""
    file = repository / SERVED
    try:
        # Who publishes makes it, and may be another user: then it can be opened here, and not made.
        descriptor = os.open(file, os.O_RDONLY | (0 if file.exists() else os.O_CREAT), 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        log.warning(
            "%s cannot be locked (%s): a version that is published while this server runs goes live without a deploy "
            "if the server dies; publish with it stopped, or let it write there",
            file,
            error.strerror,
        )
        return []
    return [descriptor]
