"""Finds the Triton server inside the `nvidia-pytriton` package, and what it needs to run.

The package starts its server for its own purposes only; here the binary runs as any Triton does, on a repository.
"""

import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from serving.errors import StartError

_STUB = "triton_python_backend_stub"
_LIBRARY_FOLDERS = (
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib64",
    "/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """The parts of an installed server."""

    binary: Path
    """`tritonserver`."""

    backends: Path
    """The folder of its backends."""

    caches: Path
    """The folder of its response caches."""

    stub: Path
    """The process that runs a `model.py`, built for this interpreter's minor version."""

    libraries: tuple[Path, ...]
    """Folders of the shared libraries that binary and stub need."""


def find_wheel() -> Wheel:
    """Return the installed server; raise StartError if it, or the Python library it needs, is missing."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise StartError("the Triton server is not installed; pip install 'compressor[serve]'")
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / minor / _STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in (server / "python_backend_stubs").glob("3.*")))
        raise StartError(
            f"this is Python {minor}, but the installed Triton server runs models with {known}; use one of these"
        )
    return Wheel(
        binary=server / "bin" / "tritonserver",
        backends=server / "backends",
        caches=server / "caches",
        stub=stub,
        # The interpreter's own library comes first: another one of the same version may lack what it was built with.
        libraries=(_python_library_folder(minor), package.parent / "nvidia_pytriton.libs"),
    )


def prepare_backends(wheel: Wheel, folder: Path) -> Path:
    """Lay out the backend folder that the server expects; links, apart from what must be executable. Return it."""
    python = folder / "backends" / "python"
    python.mkdir(parents=True)
    for file in (wheel.backends / "python").iterdir():
        if file.is_file():
            (python / file.name).symlink_to(file)
    _executable(wheel.stub, python / _STUB)
    return python.parent


def prepare_binary(wheel: Wheel, folder: Path) -> Path:
    """Return an executable server binary: the installed one, or a copy if its run bit was lost."""
    if os.access(wheel.binary, os.X_OK):
        return wheel.binary
    return _executable(wheel.binary, folder / wheel.binary.name)


def environment(wheel: Wheel) -> dict[str, str]:
    """Return the environment of the server process: this interpreter's packages, the wheel's libraries."""
    libraries = [*map(str, wheel.libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    # The stub finds its packages by looking for `python3` on PATH.
    path = [str(Path(sys.executable).parent), *filter(None, [os.environ.get("PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(path)}


def _executable(source: Path, target: Path) -> Path:
    if os.access(source, os.X_OK):
        target.symlink_to(source)
    else:
        target.write_bytes(source.read_bytes())
        target.chmod(0o755)
    return target


def _python_library_folder(minor: str) -> Path:
    name = f"libpython{minor}.so.1.0"
    folders = [Path(folder) for folder in (sysconfig.get_config_var("LIBDIR"), *_LIBRARY_FOLDERS) if folder]
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise StartError(
        f"the Triton server runs models with {name}, which is in none of {', '.join(map(str, folders))}; "
        f"install it (Debian, Ubuntu: apt install libpython{minor}) or use an interpreter built with --enable-shared"
    )
