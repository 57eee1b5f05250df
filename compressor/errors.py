"""Every error the package raises on purpose, with the exit code the command line gives it.

CompressorError (1)        the input or the environment is wrong
├── ConfigError            a recipe, a flag, or a combination of them
├── DataError              labelled text: a missing file, a malformed row, one label only
├── SourceError            a model, vectors or data that cannot be had from where the recipe says
├── ModelError             a checkpoint that does not fit: labels, vocabulary, shape, chance level
├── ArtifactError          a stage's folder: unsealed, damaged, of another kind, or somebody else's
└── GateError (3)          a measured value is outside the bound of the recipe
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from safetensors import SafetensorError

NO_DISK_ERRORS = (ConnectionError, TimeoutError, ChildProcessError)  # of the classes that are OSErrors


class CompressorError(Exception):
    """One sentence that names the thing, the value found, the rule and the remedy."""

    exit_code = 1


class ConfigError(CompressorError):
    """A recipe or a flag is wrong."""


class DataError(CompressorError):
    """Labelled text is missing or malformed."""


class SourceError(CompressorError):
    """A model, word vectors or a data set cannot be had."""


class ModelError(CompressorError):
    """A checkpoint does not fit the task or the student."""


class ArtifactError(CompressorError):
    """A stage's folder cannot be used."""


class GateError(CompressorError):
    """A gate failed; the message holds the measured value and its bound."""

    exit_code = 3


def refused_write(error: Exception, where: object) -> ArtifactError | None:
    """The sentence for a system that refuses to write `where`, unless the error names a file; None for other errors."""
    if isinstance(error, SafetensorError):  # its writer's own class for a full disk
        return ArtifactError(f"cannot write {where}: {error}; free space or choose another --out")
    if not isinstance(error, OSError) or isinstance(error, (*NO_DISK_ERRORS, FileNotFoundError)):
        return None
    if error.errno is None:  # a library's own class, about what it was given to read
        return None
    return ArtifactError(
        f"cannot write {error.filename or where}: {error.strerror or error}; free space or choose another --out"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of a sentence that refuses `name`: the closest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
