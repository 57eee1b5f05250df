"""Writes what runs a model repository in Triton's official container: Docker, Compose with Prometheus, Kubernetes."""

import shutil
from importlib import resources
from pathlib import Path

from serving.errors import RepositoryError


def write_deployment(folder: Path) -> tuple[Path, ...]:
    """Write the files into a folder, which must be empty or new; return them, sorted.

    They are the same for every repository: what differs (release, image, cores) is a build argument, or stands where a
    comment says so. Raises RepositoryError if the folder holds something, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RepositoryError(f"{folder} is there and not an empty folder; name another, or empty it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with resources.as_file(resources.files("serving") / "deploy") as source:
            shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        # An installed package has lost it.
        (folder / "start.sh").chmod(0o755)
    except OSError as error:
        raise RepositoryError(f"cannot write {folder}: {error.strerror or error}; choose another folder") from error
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
