"""Sentences for what the system refuses, also in a process that trains with others."""

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from compressor import world
from compressor.errors import refused_write

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LIBRARY = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, LIBRARY])
def test_a_full_disk_in_one_of_several_processes_is_a_sentence_with_a_remedy(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(_: object) -> None:
        raise error

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(type(error)):
        world._worker(work, (), "cpu", 0, tmp_path)
    (told,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir())
    assert told["reason"].startswith("cannot write the result: ")
    assert told["reason"].endswith("; free space or choose another --out")
    assert told["trace"] is None


def test_a_file_that_the_system_names_goes_before_the_folder() -> None:
    assert "cannot write x.bin: " in str(refused_write(OSError(errno.EROFS, "read-only", "x.bin"), "folder"))


@pytest.mark.parametrize(
    "error", [ValueError("x"), FileNotFoundError(errno.ENOENT, "x"), ConnectionResetError(errno.ECONNRESET, "x")]
)
def test_other_errors_are_not_about_the_disk(error: Exception) -> None:
    assert refused_write(error, "folder") is None
