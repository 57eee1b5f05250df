"""What holds for every test: no network but loopback, no model hub, a cache of its own, few threads."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from compressor import world
from tests import tiny

# Libraries read these when they are imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def is_local(address: Any) -> bool:
    """Whether an address of `socket.connect` is on this machine: a Unix path, or loopback."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if not is_local(address):
            pytest.fail(f"a test reaches for the network: {address}", pytrace=True)
        return connect(self, address)

    return guarded


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# What the processes of tests import. Two that import it themselves take ten seconds to start.
PRELOADED = (
    "pytest",
    "transformers.models.bert.modeling_bert",
    "compressor.stages.augment",
    "compressor.stages.distill",
    "compressor.stages.finetune",
)


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    """Processes are forks of one that has imported what they need; `cold_processes` has them start as users' do.

    That one starts with the first of them, has the environment of that moment, speaks to where it went then, and ends
    with the session.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "START_METHOD", "forkserver")
        yield


@pytest.fixture
def cold_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start as they do outside of tests: each with an environment, imports and a hash seed of its own."""
    monkeypatch.setattr(world, "START_METHOD", "spawn")


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of 50 resamples in this process: a thousand correlations take seconds, `test_statistics` has them."""
    monkeypatch.setattr("compressor.statistics.RESAMPLES", 50)


@dataclass(frozen=True)
class Line:
    """A whole build of tiny models, made once by the command line; tests leave it as it is."""

    recipe: Path
    run: Path
    repository: Path
    done: subprocess.CompletedProcess[bytes]
    """The build itself: exit code and what it said."""

    def copy(self, folder: Path) -> Line:
        """The same run and repository elsewhere, to be changed."""
        shutil.copytree(self.run, folder / "run")
        shutil.copytree(self.repository, folder / "repository")
        return replace(self, run=folder / "run", repository=folder / "repository")

    def build(self, *arguments: object, hasty: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Build again."""
        places = ("--recipe", self.recipe, "--out", self.run, "--repository", self.repository)
        return tiny.run("build", *places, *arguments, hasty=hasty)


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The shared build."""
    root = tmp_path_factory.mktemp("line")
    made = Line(tiny.recipe(root), root / "run", root / "repository", subprocess.CompletedProcess([], 0))
    made = replace(made, done=made.build())
    assert made.done.returncode == 0, made.done.stderr.decode()
    return made
