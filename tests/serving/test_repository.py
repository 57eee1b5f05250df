"""Publishing: layout, new versions, refusals, and what a failure leaves."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import ModelError, RepositoryError, ServedModel, read, rollback, triton, versions, write
from serving.control import SERVED, is_served


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below `root` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_layout_of_a_first_publication(make_model: Callable[..., ServedModel], root: Path) -> None:
    folders = write(make_model(), root, teacher=make_model(name="sst2_teacher"))
    assert folders == (root / "sst2" / "1", root / "sst2_student" / "1", root / "sst2_teacher" / "1")
    assert read(root) == ("sst2", "sst2_student", "sst2_teacher")
    names = {name for name in tree(root) if "warmup" not in name}
    shared, version = (
        {"config.pbtxt", "labels.txt", ".compressor.json"},
        {"config.pbtxt", "labels.txt", "manifest.json"},
    )
    entry, student = {"model.py", "tokenizer.json", "expected.json"}, {"model.py", "model.onnx"}
    expected = {f"{model}/{name}" for model in ("sst2", "sst2_student", "sst2_teacher") for name in shared}
    expected |= {f"sst2/1/{name}" for name in version | entry} | {SERVED}
    expected |= {f"sst2_student/1/{name}" for name in version | student}
    expected |= {f"sst2_teacher/1/{name}" for name in version | entry | student}
    assert names == expected
    assert (root / "sst2" / "labels.txt").read_text() == "negative\npositive\n"


def test_warmup_files_of_the_config_exist(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    texts = set()
    for model in ("sst2", "sst2_student"):
        config = triton.from_text((root / model / "config.pbtxt").read_text())
        assert config.model_warmup
        for warmup in config.model_warmup:
            for name, tensor in warmup.inputs.items():
                raw = (root / model / "warmup" / tensor.input_data_file).read_bytes()
                if name == "TEXT":
                    texts.add((warmup.batch_size, raw[4:].decode()))
                else:
                    assert len(raw) == 8 * tensor.dims[0]
    assert texts == {(1, "a good film"), (1, "a bad film, é"), (4, "a bad film, é")}


def test_regression_on_pairs_has_no_labels_file_and_warms_up_with_pairs(kit: Any, root: Path, tmp_path: Path) -> None:
    write(kit.score_model(tmp_path), root, teacher=kit.score_model(tmp_path, name="stsb_teacher"))
    assert read(root) == ("stsb", "stsb_student", "stsb_teacher")
    assert not [name for name in tree(root) if name.endswith("labels.txt")]
    config = triton.from_text((root / "stsb" / "config.pbtxt").read_text())
    warm = {name: tensor.input_data_file for name, tensor in config.model_warmup[-1].inputs.items()}
    raw = {name: (root / "stsb" / "warmup" / file).read_bytes()[4:] for name, file in warm.items()}
    assert (config.model_warmup[-1].batch_size, raw) == (4, {"TEXT": b"good", "TEXT_PAIR": b"bad film"})
    student = triton.from_text((root / "stsb_student" / "config.pbtxt").read_text())
    types = (
        root / "stsb_student" / "warmup" / student.model_warmup[0].inputs["token_type_ids"].input_data_file
    ).read_bytes()
    # Padded to 8 tokens.
    assert types == bytes(8 * 3) + (b"\x01" + bytes(7)) * 3 + bytes(8 * 2)


def test_labels_file_goes_and_comes_back_with_the_version(
    kit: Any, make_model: Callable[..., ServedModel], root: Path, tmp_path: Path
) -> None:
    write(make_model(), root)
    graph = kit.write_graph(tmp_path / "score.onnx", weights=kit.WEIGHTS[:, 1:])
    assert write(make_model(labels=(), onnx=graph), root)[0].name == "2"
    assert read(root) == ("sst2", "sst2_student")
    assert not (root / "sst2" / "labels.txt").exists()
    assert rollback(root, "sst2") == 1
    assert (root / "sst2" / "labels.txt").read_text() == "negative\npositive\n"
    assert write(make_model(labels=(), onnx=graph), root)[0].name == "3"
    write(make_model(), root)
    assert rollback(root, "sst2") == 3
    assert not (root / "sst2" / "labels.txt").exists()
    assert read(root) == ("sst2", "sst2_student")


def test_model_without_warmup_texts_starts_cold(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(warmup_texts=()), root)
    assert read(root) == ("sst2", "sst2_student")
    assert not triton.from_text((root / "sst2" / "config.pbtxt").read_text()).model_warmup


def test_same_content_changes_nothing(make_model: Callable[..., ServedModel], root: Path) -> None:
    first = write(make_model(), root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert write(make_model(), root) == first
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_other_content_becomes_the_next_version_of_both(
    kit: Any, make_model: Callable[..., ServedModel], root: Path, tmp_path: Path
) -> None:
    write(make_model(), root)
    before = {name: raw for name, raw in tree(root).items() if "/1/" in name}
    graph = kit.write_graph(tmp_path / "other.onnx", weights=kit.WEIGHTS * 2)
    labels = ("worse", "better")
    assert write(make_model(onnx=graph, labels=labels), root) == (root / "sst2" / "2", root / "sst2_student" / "2")
    after = tree(root)
    assert {name: raw for name, raw in after.items() if "/1/" in name} == before
    assert after["sst2_student/2/model.onnx"] == graph.read_bytes()
    assert after["sst2/labels.txt"] == b"worse\nbetter\n"
    assert after["sst2/config.pbtxt"] == after["sst2/2/config.pbtxt"]
    assert read(root) == ("sst2", "sst2_student")


def test_change_of_the_entry_alone_moves_the_student_too(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    assert [folder.name for folder in write(make_model(instances=2), root)] == ["2", "2"]


def test_teacher_keeps_its_own_number(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    folders = write(make_model(instances=2), root, teacher=make_model())
    assert [f"{folder.parent.name}/{folder.name}" for folder in folders] == [
        "sst2/2",
        "sst2_student/2",
        "sst2_teacher/1",
    ]


def test_damaged_version_is_replaced_by_the_next(make_model: Callable[..., ServedModel], root: Path) -> None:
    folder = write(make_model(), root)[1]
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(RepositoryError, match=r"damaged: .*model.onnx has \d+ bytes instead of \d+; publish it again"):
        read(root)
    assert write(make_model(), root)[1].name == "2"
    assert read(root) == ("sst2", "sst2_student")


def test_interrupted_publication_is_completed(
    kit: Any, make_model: Callable[..., ServedModel], root: Path, tmp_path: Path
) -> None:
    write(make_model(), root)
    second = make_model(onnx=kit.write_graph(tmp_path / "other.onnx", weights=kit.WEIGHTS * 2))
    write(second, root)
    # As if the process had been killed between the two renames.
    shutil.rmtree(root / "sst2" / "2")
    (root / "sst2" / ".partial-sst2-x").mkdir()
    with pytest.raises(RepositoryError, match="sst2 is at version 1 but sst2_student at 2"):
        read(root)
    assert [folder.name for folder in write(second, root)] == ["2", "2"]
    assert read(root) == ("sst2", "sst2_student")
    assert not list(root.rglob(".partial-*"))


def test_stale_shared_file_is_found_and_healed(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    (root / "sst2" / "config.pbtxt").write_text("")
    with pytest.raises(RepositoryError, match=r"config.pbtxt is not the one of version 1; publish it again"):
        read(root)
    write(make_model(), root)
    assert read(root) == ("sst2", "sst2_student")


def test_readme_and_gitignore_may_stand_beside(make_model: Callable[..., ServedModel], root: Path) -> None:
    root.mkdir()
    (root / "README.md").write_text("ours")
    (root / ".gitignore").write_text("*")
    write(make_model(), root)
    assert read(root) == ("sst2", "sst2_student")
    assert (root / "README.md").read_text() == "ours"


def test_model_of_somebody_else_is_left_alone(make_model: Callable[..., ServedModel], root: Path) -> None:
    foreign = root / "sst2" / "config.pbtxt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text('name: "sst2"')
    with pytest.raises(RepositoryError, match=r"sst2 was not written by compressor \(.compressor.json is missing\)"):
        write(make_model(), root)
    assert tree(root) == {"sst2/config.pbtxt": b'name: "sst2"'}


def test_folder_that_is_no_repository_is_refused(make_model: Callable[..., ServedModel], root: Path) -> None:
    (root / "photos").mkdir(parents=True)
    with pytest.raises(RepositoryError, match="holds the folder 'photos', which is no model"):
        write(make_model(), root)
    with pytest.raises(RepositoryError, match="choose a folder of its own"):
        read(root)
    assert os.listdir(root) == ["photos"]


def test_foreign_triton_model_beside_ours_is_let_be(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    (root / "mine").mkdir()
    (root / "mine" / "config.pbtxt").write_text("")
    assert read(root) == ("sst2", "sst2_student")
    write(make_model(instances=3), root)


@pytest.mark.parametrize(
    ("make", "message"), [("nothing", "does not exist"), ("file", "is no folder"), ("folder", "holds no")]
)
def test_missing_and_empty_repositories_name_the_remedy(root: Path, make: str, message: str) -> None:
    match make:
        case "file":
            root.write_text("")
        case "folder":
            root.mkdir()
    with pytest.raises(RepositoryError, match=rf"{message}.*run `compressor build` or `compressor publish`"):
        read(root)


@pytest.mark.parametrize("damage", ["version", "manifest.json", "entry", "warmup", "partial"])
def test_damage_is_named(make_model: Callable[..., ServedModel], root: Path, damage: str) -> None:
    write(make_model(), root)
    remove = shutil.rmtree
    match damage:
        case "version":
            remove(root / "sst2" / "1")
            remove(root / "sst2_student" / "1")
            message = "has no version"
        case "manifest.json":
            (root / "sst2" / "1" / damage).write_text("{}")
            message = "has no manifest.json"
        case "entry":
            remove(root / "sst2")
            message = "sst2_student has no entry model"
        case "warmup":
            remove(root / "sst2" / "warmup")
            message = "bin is missing"
        case _:
            (root / ".partial-sst2-x").mkdir()
            message = "left by an interrupted run; publish again"
    with pytest.raises(RepositoryError, match=message):
        read(root)
    write(make_model(), root)
    assert read(root) == ("sst2", "sst2_student")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("failing", ["model.onnx", "tokenizer.json"])
def test_full_disk_leaves_what_was_there(
    make_model: Callable[..., ServedModel], root: Path, monkeypatch: pytest.MonkeyPatch, again: bool, failing: str
) -> None:
    if again:
        write(make_model(), root)
    before = tree(root)
    copy = shutil.copyfile

    def copyfile(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name == failing:
            raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(RepositoryError, match=rf"cannot write .*: No space left on device \(.*{failing}\); free space"):
        write(make_model(instances=2), root)
    assert tree(root) == before
    assert not list(root.rglob(".partial-*"))


def test_real_limit_of_the_system_is_reported(
    make_model: Callable[..., ServedModel], root: Path, tmp_path: Path
) -> None:
    # A file size limit stands for a full disk: the same kind of error, from the kernel, in the middle of a copy.
    model = make_model()
    model.onnx.with_name("big").write_bytes(b"")
    tokenizer_bytes = model.tokenizer.stat().st_size
    assert model.onnx.stat().st_size < tokenizer_bytes
    code = (
        "import sys; from pathlib import Path; from serving import ServedModel, RepositoryError, write\n"
        "onnx, tokenizer, root = map(Path, sys.argv[1:])\n"
        "model = ServedModel(name='sst2', onnx=onnx, tokenizer=tokenizer, labels=('a', 'b'), max_tokens=8)\n"
        "try: write(model, root)\n"
        "except RepositoryError as error: sys.exit(str(error))\n"
    )
    size = tokenizer_bytes - 1
    done = subprocess.run(
        [sys.executable, "-c", code, str(model.onnx), str(model.tokenizer), str(root)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr, done.stderr
    assert tree(root) == {}


def test_path_that_cannot_be_a_folder_is_refused(make_model: Callable[..., ServedModel], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RepositoryError, match=r"cannot write the model repository .*file"):
        write(make_model(), tmp_path / "file" / "repository")


def test_two_publications_at_once_make_two_versions(make_model: Callable[..., ServedModel], root: Path) -> None:
    models = [make_model(instances=count) for count in (1, 2, 3)]
    threads = [threading.Thread(target=write, args=(model, root)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions.newest(root / "sst2") == versions.newest(root / "sst2_student") == 3
    assert read(root) == ("sst2", "sst2_student")


def test_teacher_must_answer_the_same_labels(make_model: Callable[..., ServedModel], root: Path) -> None:
    with pytest.raises(ModelError, match="cannot be compared"):
        write(make_model(), root, teacher=make_model(labels=("a", "b")))
    with pytest.raises(ModelError, match="teacher has pair True but student False; they cannot be compared"):
        write(make_model(), root, teacher=make_model(pair=True, warmup_texts=()))
    with pytest.raises(ModelError, match="it must be 'sst2_teacher'"):
        write(make_model(), root, teacher=make_model(name="rte"))
    assert not root.exists()


def test_rollback_serves_the_older_version_again(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    before = tree(root)
    write(make_model(labels=("worse", "better")), root)
    assert rollback(root, "sst2") == 1
    assert read(root) == ("sst2", "sst2_student")
    after = tree(root)
    assert {name: after[name] for name in before} == before
    assert after["sst2/withdrawn-2/labels.txt"] == b"worse\nbetter\n"
    # The number of what was withdrawn is not used again, and publishing the served content changes nothing.
    assert write(make_model(), root)[0].name == "1"
    assert [folder.name for folder in write(make_model(instances=2), root)] == ["3", "3"]
    assert rollback(root, "sst2") == 1


def test_interrupted_rollback_is_completed(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    write(make_model(instances=2), root)
    versions.withdraw([root / "sst2"], 2, 1)
    with pytest.raises(RepositoryError, match="sst2 is at version 1 but sst2_student at 2"):
        read(root)
    assert rollback(root, "sst2") == 1
    assert read(root) == ("sst2", "sst2_student")


def test_teacher_goes_back_alone(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root, teacher=make_model())
    write(make_model(), root, teacher=make_model(instances=2))
    assert rollback(root, "sst2_teacher") == 1
    assert read(root) == ("sst2", "sst2_student", "sst2_teacher")


def test_rollback_without_an_older_version_is_refused(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    with pytest.raises(RepositoryError, match="sst2 has no version before 1; publish another"):
        rollback(root, "sst2")
    for name in ("sst2_student", "absent"):
        with pytest.raises(RepositoryError, match=f"holds no model '{name}' that takes texts and can .* go back"):
            rollback(root, name)


def test_rollback_to_a_damaged_version_is_refused(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    write(make_model(instances=2), root)
    graph = root / "sst2_student" / "1" / "model.onnx"
    raw = graph.read_bytes()
    graph.write_bytes(raw[:-1] + b"x")
    before = tree(root)
    with pytest.raises(
        RepositoryError, match=r"sst2 cannot go back from version 2 to 1, .*: a checksum of sst2_student"
    ):
        rollback(root, "sst2")
    assert tree(root) == before
    graph.write_bytes(raw)
    assert rollback(root, "sst2") == 1


def test_a_version_that_is_gone_takes_nothing_away(make_model: Callable[..., ServedModel], root: Path) -> None:
    write(make_model(), root)
    before = tree(root)
    with pytest.raises(RepositoryError, match=r"sst2 has no version 2 any more; publish it again"):
        versions.promote([root / "sst2"], 2)
    (root / "sst2" / "2").mkdir()
    for change in (
        lambda: versions.promote([root / "sst2"], 2),
        lambda: versions.withdraw([root / "sst2"], 1, 2),
    ):
        with pytest.raises(RepositoryError, match=r"2 has no config.pbtxt; publish it again"):
            change()
    assert tree(root) == before


def test_rollback_that_the_disk_refuses_is_reported(
    make_model: Callable[..., ServedModel], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(make_model(), root)
    write(make_model(instances=2), root)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RepositoryError, match=r"cannot roll .* back: No space left on device; free space"):
        rollback(root, "sst2")


def test_a_version_waits_while_a_server_runs(
    kit: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(strength: float) -> list[str]:
        graph = kit.write_graph(tmp_path / f"{strength}.onnx", weights=kit.WEIGHTS * strength)
        return [folder.name for folder in write(kit.tiny_model(tmp_path / "model", onnx=graph), root)]

    assert not is_served(root)
    monkeypatch.setattr("serving.repository.is_served", lambda _: True)
    # A model that is new takes nothing from anybody.
    assert publish(1) == ["1", "1"]
    before = tree(root)
    assert publish(2) == ["waiting-2", "waiting-2"]
    assert {name: raw for name, raw in tree(root).items() if "waiting-" not in name} == before
    assert publish(2) == ["waiting-2", "waiting-2"]
    assert publish(3) == ["waiting-3", "waiting-3"]
    assert not (root / "sst2" / "waiting-2").exists()
    # What is live is wanted again: nothing waits any more.
    assert publish(1) == ["1", "1"]
    assert tree(root) == before
    assert publish(4) == ["waiting-2", "waiting-2"]
    monkeypatch.setattr("serving.repository.is_served", lambda _: False)
    assert publish(4) == ["2", "2"]
    assert versions.waiting(root / "sst2") == 0
    assert read(root) == ("sst2", "sst2_student")
    assert rollback(root, "sst2") == 1
    assert publish(5) == ["3", "3"]
