"""Artifacts: sealed or absent, whatever stops the process."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import artifact
from compressor.artifact import BEGUN, CHECKPOINT, MANIFEST, Artifact
from compressor.errors import ArtifactError, ConfigError, GateError
from compressor.world import World


def make(out: Path, *, text: str = "result", key: str = "k1", kind: str = "thing", parents=None, **section) -> Artifact:
    """A finished artifact with one file."""
    with artifact.write(out, kind, key=key, section=section, parents=parents or {}) as draft:
        (draft.path / "file.txt").write_text(text, encoding="utf-8")
        draft.metrics["accuracy"] = 0.5
    return Artifact.open(out, kind=kind)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begin(out: Path, *, key: str = "k1") -> Path:
    """What a stage leaves that was killed in the middle of its work."""
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True)
    (partial / BEGUN).write_text(json.dumps({"kind": "thing", "key": key, "seconds": 60.0}), encoding="utf-8")
    (partial / CHECKPOINT).mkdir()
    (partial / CHECKPOINT / "step-7").write_text("weights", encoding="utf-8")
    return partial


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run" / "1-thing"


def test_a_finished_stage_holds_its_files_and_the_manifest_alone(out):
    make(out)
    assert sorted(path.name for path in out.iterdir()) == ["file.txt", MANIFEST]
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_manifest_says_what_the_stage_was_made_of(out, tmp_path):
    parent = make(tmp_path / "parent", key="p1")
    manifest = make(out, parents={"corpus": parent}, copies=3).manifest
    assert manifest["parents"] == {"corpus": {"key": "p1", "content": parent.content}}
    assert (manifest["kind"], manifest["key"], manifest["section"]) == ("thing", "k1", {"copies": 3})
    assert manifest["metrics"] == {"accuracy": 0.5}
    assert {"seconds", "peak_memory_gb", "finished", "machine", "versions"} <= manifest.keys()


def test_files_in_folders_are_sealed_too(out):
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        (draft.path / "deep" / "er").mkdir(parents=True)
        (draft.path / "deep" / "er" / "file").write_bytes(b"x")
    assert list(Artifact.open(out, kind="thing").manifest["files"]) == ["deep/er/file"]


def test_a_checkpoint_is_not_part_of_the_result(out):
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        (draft.path / CHECKPOINT).mkdir()
    assert not (out / CHECKPOINT).exists()


def test_an_error_leaves_no_artifact_but_the_unfinished_work(out):
    with pytest.raises(GateError, match="too slow"), artifact.write(out, "thing", key="k1", section={}, parents={}):
        raise GateError("too slow")
    assert artifact.read(out) is None
    assert artifact.begun_key(out.with_name(out.name + ".partial")) == "k1"


def test_an_error_leaves_the_artifact_that_was_there(out):
    make(out, text="old")
    before = snapshot(out)
    with pytest.raises(GateError, match="no"), artifact.write(out, "thing", key="k2", section={}, parents={}):
        raise GateError("no")
    assert snapshot(out) == before


def test_a_new_artifact_takes_the_place_of_the_old_one(out):
    make(out, text="old")
    make(out, text="new", key="k2")
    assert snapshot(out).keys() == {"file.txt", MANIFEST}
    assert (out / "file.txt").read_text(encoding="utf-8") == "new"


def test_a_folder_kept_under_a_similar_name_is_left_alone(out):
    make(out)
    kept = out.with_name(out.name + ".old")
    make(kept, text="a copy made by hand")
    make(out, key="k2")
    assert (kept / "file.txt").read_text(encoding="utf-8") == "a copy made by hand"


def killed_before_the_note(out):
    out.with_name(out.name + ".partial").mkdir(parents=True)


def killed_inside_the_note(out):
    killed_before_the_note(out)
    (out.with_name(out.name + ".partial") / f"{BEGUN}.new").write_text('{"ki', encoding="utf-8")


def killed_at_work(out):
    (begin(out) / "file.txt").write_text("half", encoding="utf-8")


def killed_with_the_note_lost(out):
    (begin(out) / BEGUN).write_bytes(b"")  # what a power cut can leave of a file that was just renamed


def killed_inside_the_manifest(out):
    killed_at_work(out)
    (out.with_name(out.name + ".partial") / MANIFEST).write_text('{"kind": "thi', encoding="utf-8")


def killed_after_the_manifest(out):
    make(out)
    out.rename(partial := out.with_name(out.name + ".partial"))
    (partial / BEGUN).write_text(json.dumps({"kind": "thing", "key": "k1", "seconds": 1}), encoding="utf-8")


def killed_before_the_name(out):
    make(out)
    out.rename(out.with_name(out.name + ".partial"))


def killed_while_replacing(out):
    make(out, text="new")
    out.rename(partial := out.with_name(out.name + ".partial"))
    make(out.with_name("elsewhere"), text="old", key="k0").path.rename(partial / artifact.REPLACED)


def killed_while_cleaning_up(out):
    make(out, text="new")
    (out / artifact.REPLACED).mkdir()
    (out / artifact.REPLACED / "file.txt").write_text("old", encoding="utf-8")


KILLS = [value for name, value in sorted(globals().items()) if name.startswith("killed_")]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_the_next_run_finishes_what_was(kill, out):
    kill(out)
    found = make(out, text="after")
    assert snapshot(out).keys() == {"file.txt", MANIFEST}
    assert list(found.manifest["files"]) == ["file.txt"]
    assert (out / "file.txt").read_text(encoding="utf-8") == "after"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_what_a_kill_leaves_is_whole_or_absent(kill, out):
    kill(out)
    assert artifact.read(out) is None or Artifact.open(out, kind="thing").is_whole()


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_another_stage_can_follow_what_was(kill, out):
    kill(out)
    make(out, text="other", key="k9")
    assert snapshot(out).keys() == {"file.txt", MANIFEST}


def test_unfinished_work_of_the_same_key_is_kept(out):
    begin(out)
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        assert (draft.path / CHECKPOINT / "step-7").is_file()


def test_unfinished_work_of_another_key_is_thrown_away(out):
    begin(out, key="k0")
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        assert not (draft.path / CHECKPOINT).exists()


def test_seconds_count_the_interrupted_run_as_well(out):
    begin(out)
    assert make(out).manifest["seconds"] >= 60


def test_begun_key_of_nothing_is_none(tmp_path):
    assert artifact.begun_key(tmp_path / "absent.partial") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thesis.docx", "years of work"),
        (MANIFEST, '{"manifest_version": 3, "name": "a browser extension"}'),
        (MANIFEST, '["not", "ours"]'),
        (BEGUN, "{}"),
    ],
)
def test_a_folder_that_belongs_to_something_else_is_refused_and_untouched(name, content, out):
    out.mkdir(parents=True)
    (out / name).write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"1-thing.* is not .* of this tool; choose another --out, or move it away"):
        make(out)
    assert snapshot(out) == {name: content.encode()}
    assert not out.with_name(out.name + ".partial").exists()


def test_a_file_in_the_place_of_the_folder_is_refused_and_untouched(out):
    out.parent.mkdir()
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match="exists and is not an artifact of this tool"):
        make(out)
    assert out.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["notes.txt", f"{BEGUN}.bak"])
def test_a_partial_folder_that_belongs_to_something_else_is_refused_and_untouched(name, out):
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True)
    (partial / name).write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"1-thing.partial exists and is not an unfinished artifact; move it away"):
        make(out)
    assert snapshot(partial) == {name: b"mine"}


def test_an_empty_folder_may_be_filled(out):
    out.mkdir(parents=True)
    make(out)
    assert snapshot(out).keys() == {"file.txt", MANIFEST}


def test_a_folder_without_a_name_is_refused():
    with pytest.raises(ArtifactError, match=r"\. has no name of its own; choose another --out"):
        make(Path())


def test_a_parent_that_is_a_file_gives_one_sentence(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"cannot write .*: Not a directory; free space or choose another --out"):
        make(tmp_path / "file" / "1-thing")


def test_a_full_disk_gives_one_sentence_and_leaves_what_is_finished(out):
    make(out)
    before = snapshot(out)
    (begin(out, key="k2") / "file.txt").symlink_to("/dev/full")
    with pytest.raises(ArtifactError, match=r"cannot write .*: No space left on device; free space or choose another"):
        make(out, text="x" * 100_000, key="k2")
    assert snapshot(out) == before


@pytest.mark.parametrize("call", ["_note", "file_hash"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_refuses_at_any_step_leaves_what_is_finished(call, code, out, monkeypatch):
    make(out)
    before = snapshot(out)

    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(artifact, call, refuse)
        with pytest.raises(ArtifactError, match=rf"cannot write .*: {os.strerror(code)}; free space"):
            make(out, text="new", key="k2")
    assert snapshot(out) == before
    make(out, text="new", key="k2")


def test_a_library_s_reading_error_is_not_called_a_full_disk(out):
    sentence = re.escape(f"{out} was not made: config.json is not JSON")
    with (
        pytest.raises(ArtifactError, match=rf"^{sentence}$"),
        artifact.write(out, "thing", key="k1", section={}, parents={}),
    ):
        raise OSError("config.json is not JSON")


def test_a_missing_file_is_not_called_a_full_disk(out, tmp_path):
    missing = tmp_path / "mismatched.arrow"
    sentence = re.escape(f"{out} was not made: there is no {missing}; run the stage that writes it again")
    with (
        pytest.raises(ArtifactError, match=rf"^{sentence}$"),
        artifact.write(out, "thing", key="k1", section={}, parents={}),
    ):
        missing.read_bytes()


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError, ChildProcessError])
def test_errors_of_networks_and_processes_pass(error, out):
    with pytest.raises(error), artifact.write(out, "thing", key="k1", section={}, parents={}):
        raise error


def test_key_is_the_same_for_equal_settings_in_any_order():
    one = artifact.key("thing", {"a": 1, "b": (2, 3)}, {"x": "1", "y": "2"}, {})
    assert one == artifact.key("thing", {"b": [2, 3], "a": 1}, {"y": "2", "x": "1"}, {})


@pytest.mark.parametrize(
    "change", [{"kind": "other"}, {"section": {"a": 2}}, {"parents": {"x": "2"}}, {"sources": {"s": "other"}}]
)
def test_key_changes_with_everything_that_matters(change):
    given: dict[str, Any] = {"kind": "thing", "section": {"a": 1}, "parents": {"x": "1"}, "sources": {"s": "hash"}}
    assert artifact.key(**given) != artifact.key(**given | change)


def test_content_is_decided_by_the_files_alone(out, tmp_path):
    same = make(tmp_path / "same", key="other", setting=1)
    assert make(out).content == same.content
    assert make(tmp_path / "changed", text="resulT").content != same.content


def test_open_notices_a_changed_byte(out):
    make(out)
    (out / "file.txt").write_text("resulT", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"file.txt is missing or was changed since it was made; run its stage"):
        Artifact.open(out, kind="thing")


def test_open_notices_a_missing_file(out):
    make(out)
    (out / "file.txt").unlink()
    with pytest.raises(ArtifactError, match=r"file.txt is missing or was changed"):
        Artifact.open(out, kind="thing")


def test_open_refuses_another_kind(out):
    make(out)
    with pytest.raises(ArtifactError, match="holds 'thing'; this needs an artifact of kind 'onnx'"):
        Artifact.open(out, kind="onnx")


@pytest.mark.parametrize("exists", [True, False])
def test_unsealed_folder_names_the_remedy(exists, tmp_path):
    with pytest.raises(ArtifactError, match=r"has no manifest.json: the stage did not finish there; run it again"):
        Artifact.open(tmp_path if exists else tmp_path / "absent", kind="thing")


def test_a_manifest_that_cannot_be_read_names_the_remedy(out):
    make(out)
    (out / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"manifest.json cannot be read \(.*\); delete .*1-thing and run again"):
        artifact.read(out)


def test_is_whole_until_a_file_is_lost_or_cut(out):
    found = make(out)
    assert found.is_whole()
    (out / "file.txt").write_text("resul", encoding="utf-8")
    assert not found.is_whole()
    (out / "file.txt").unlink()
    assert not found.is_whole()


def test_result_of_another_process_becomes_metrics(out):
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        artifact.write_result(draft.path, {"loss": 0.25})
        draft.take_result()
    made = Artifact.open(out, kind="thing")
    assert (made.metrics, list(made.manifest["files"])) == ({"loss": 0.25}, [])
    assert made.manifest["peak_memory_gb"] > 0


def test_a_stage_for_one_process_is_refused_among_several(out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"torchrun started the stage of 1-thing 2 times, .*; run this stage once, with"
    ):
        make(out)
    assert not out.parent.exists()


def test_processes_that_share_no_disk_are_told(out, monkeypatch):
    monkeypatch.setattr(artifact, "SHARED_PATIENCE_S", 0.2)
    leader, other = (World(rank=rank, device=torch.device("cpu")) for rank in (0, 1))
    with pytest.raises(
        ArtifactError, match=r"process 1 does not see .*1-thing as process 0 wrote it; all machines must"
    ):
        artifact._await_leader(out, other)
    out.mkdir(parents=True)
    artifact._show_leader(out, leader)
    shown = (out / CHECKPOINT / artifact.LEADER).read_text(encoding="utf-8")
    monkeypatch.setattr(World, "broadcast", lambda self, value: shown)
    artifact._await_leader(out, other)


@pytest.mark.parametrize("key", ["k1", "k2"])
def test_what_another_process_is_writing_is_left_alone(key, out):
    with artifact.write(out, "thing", key="k1", section={}, parents={}) as draft:
        (draft.path / "file.txt").write_text("first", encoding="utf-8")
        with pytest.raises(
            ArtifactError, match=r"another compressor is writing .*1-thing; wait for it, or choose anot"
        ):
            make(out, text="second", key=key)
    assert (Artifact.open(out, kind="thing").path / "file.txt").read_text(encoding="utf-8") == "first"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_an_error_lets_others_write(out):
    with pytest.raises(GateError), artifact.write(out, "thing", key="k1", section={}, parents={}):
        raise GateError("no")
    make(out)


def test_a_file_system_without_locks_is_written_to(out, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    make(out)


def test_a_manifest_without_files_is_not_ours(tmp_path):
    (tmp_path / MANIFEST).write_text('{"kind": "thing", "key": "k", "content": "c"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"is not a manifest of this tool; choose another --out, or move it away"):
        Artifact.open(tmp_path, kind="thing")
