"""Asks a running server about its models, and to load and unload them, over gRPC with the key of its own start.

The key lies in the run folder, which only the user that started the server can read. It keeps out whoever reaches the
server over the network, and not other users of the machine: Triton takes it on its command line, which `ps` shows them.
"""

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import addresses
from serving.errors import StartError

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

RESTRICTED = "model-repository,shared-memory,trace,logging"
"""Interfaces of the server that need the key."""

HEADER = "admin-key"
SERVED = ".compressor-served"
"""File in a repository that the supervisor of each server of it holds, whoever started that and wherever its run folder
is."""

_FILE = "control.json"
_TIMEOUT_S = 300.0


def base_folder() -> Path:
    """Return the folder that holds the run folders of this user's servers; it may be missing.

    Raises StartError if it is somebody else's: any user may give a folder that name, and what it holds is not to be
    trusted.
    """
    base = Path(tempfile.gettempdir()) / f"compressor-triton-{os.getuid()}"
    try:
        found = base.lstat()
    except FileNotFoundError:
        return base
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StartError(f"{base} belongs to somebody else; remove it, or set TMPDIR to a folder of your own")
    return base


@dataclass(frozen=True, kw_only=True)
class Control:
    """How to control one running server."""

    grpc_url: str
    """host:port, as this machine reaches it."""

    key: str
    """Opens the restricted interfaces."""

    repository: str
    """The model repository that it serves."""

    staging: str
    """A second, empty repository: models are tried here before they replace one."""

    def save(self, run: Path) -> None:
        """Leave it in the run folder of the server."""
        descriptor = os.open(run / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)

    def load(self, model: str) -> None:
        """Load what the repository holds of a model now, in place of what is loaded.

        Raises RequestError or NotFoundError if the server refuses it; what was loaded before goes on then.
        """
        with self._client() as (client, headers):
            client.load_model(model, headers=headers, client_timeout=_TIMEOUT_S)

    def unload(self, model: str) -> None:
        """Unload a model."""
        with self._client() as (client, headers):
            client.unload_model(model, headers=headers, client_timeout=_TIMEOUT_S)

    def states(self) -> dict[str, dict[int, str]]:
        """Return the state of each version of each model."""
        with self._client() as (client, headers):
            index = client.get_model_repository_index(headers=headers, client_timeout=_TIMEOUT_S)
        found: dict[str, dict[int, str]] = {}
        for model in index.models:
            found.setdefault(model.name, {})[int(model.version or 0)] = model.state or "UNAVAILABLE"
        return found

    def live(self, model: str) -> int:
        """Return the version that requests without one get; 0 if none is ready."""
        return max((n for n, state in self.states().get(model, {}).items() if state == "READY"), default=0)

    def statistics(self) -> list[dict[str, Any]]:
        """Return what the server has counted of each version, with Triton's own names; times in nanoseconds."""
        with self._client() as (client, _):
            found = client.get_inference_statistics(as_json=True, client_timeout=_TIMEOUT_S)
        return list(found.get("model_stats", []))

    @contextmanager
    def _client(self) -> "Iterator[tuple[InferenceServerClient, dict[str, str]]]":
        # Loaded here, so that a program that only starts servers needs no client library.
        import tritonclient.grpc as library

        from serving.transport import border

        client = library.InferenceServerClient(self.grpc_url, channel_args=[("grpc.enable_http_proxy", 0)])
        try:
            with border(self.grpc_url, _TIMEOUT_S, "look into its log, and whether it is still at work"):
                yield client, {f"triton-grpc-protocol-{HEADER}": self.key}
        finally:
            client.close()


def is_served(repository: Path) -> bool:
    """Say whether a server that was started by `TritonServer` serves a repository now."""
    try:
        with (repository / SERVED).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # none ever did
    return False


def served_at(repository: Path) -> str | None:
    """Return host:port of gRPC of the server of this user that serves a repository now; None if none does."""
    try:
        base = base_folder()
    except StartError:
        return None  # no server of ours starts there
    for file in base.glob(f"*/{_FILE}"):
        try:
            found = json.loads(file.read_text())
            served, address = Path(found["repository"]), str(found["grpc_url"])
        except (OSError, ValueError, KeyError):
            continue
        if served.resolve() == repository.resolve() and is_held(file.parent):
            return address
    return None


def is_held(run: Path) -> bool:
    """Say whether the supervisor of a run folder lives: it has the folder locked, and the kernel lets go when it ends.

    The lock is also what keeps systemd-tmpfiles from removing the folder, which may be old.
    """
    try:
        descriptor = os.open(run, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def find_control(grpc_url: str) -> Control:
    """Return how to control the server of this user at host:port.

    Raises StartError if none of them listens there, or if the folder that would say so is somebody else's, and
    ServingError if that is no address.
    """
    from serving.exchange import address_of

    host, _, port = address_of(grpc_url, "grpc", _TIMEOUT_S).rpartition(":")
    wanted, known, base = addresses.at(addresses.resolved(host), port), [], base_folder()
    for file in base.glob(f"*/{_FILE}"):
        try:
            control = Control(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        # What a killed server left is not to be asked: who listens at its port now would be told the key.
        if not is_held(file.parent):
            continue
        known.append(control.grpc_url)
        if control.grpc_url == wanted:
            return control
    raise StartError(
        f"no server of yours that `compressor serve` started listens at {grpc_url}; "
        f"{f'these do: {known}' if known else f'start one, or set TMPDIR as it was at its start: {base} names none'}"
    )
