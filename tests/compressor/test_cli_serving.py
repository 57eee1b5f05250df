"""The commands around a running server, as users run them."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from compressor import cli_serving, machine
from serving import TritonServer, free_port, repository, versions
from serving.exchange import pauses_s
from tests.serving.conftest import tiny_model
from tests.tiny import Ended, main, sentence


def test_a_sound_repository_passes_and_a_damaged_one_fails_with_its_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = published(tmp_path)
    assert main(monkeypatch, capsys, "verify", root) == (0, f"{root}: nothing is wrong\n", "")
    (root / "sst2" / "labels.txt").write_text("no\nyes\n")
    code, out, err = main(monkeypatch, capsys, "verify", root)
    assert code == 1
    assert "the parameter `labels` and labels.txt differ" in out
    assert f"error: model repository {root} has 2 faults; correct or publish it again" in err
    code, out, _ = main(monkeypatch, capsys, "verify", root, "--json")
    assert code == 1
    rows = json.loads(out)
    assert {row["model"] for row in rows} == {"sst2"}
    assert len(rows) == 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of a tiny model."""
    ports: dict[str, Any] = {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}
    with TritonServer(published(tmp_path_factory.mktemp("cli")), **ports) as started:
        yield started


def test_models_made_for_more_cores_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.cores.available_cores", lambda: 2)
    for name, instances, threads in (("fits", 2, 1), ("many", 4, 1), ("wide", 1, 3)):
        model = tiny_model(tmp_path / "model", name=name, instances=instances, intra_op_threads=threads)
        repository.write(model, tmp_path / "repository")
    many, wide = cli_serving.crowded_models(tmp_path / "repository")
    assert many.startswith("many runs 4 x 1 threads, and this machine has 2 cores")
    assert wide.startswith("wide runs 1 x 3 threads, and this machine has 2 cores")
    assert wide.endswith("publish it again here, or with `--set publish.cores=2`")


@pytest.mark.triton
def test_status_deploy_and_rollback(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: object) -> Ended:
        return main(monkeypatch, capsys, *arguments, "--url", server.grpc_url)

    assert command("verify", server.repository).code == 0
    shown = command("status").out.splitlines()
    assert shown[0].split()[:4] == ["model", "version", "newest", "state"]
    assert [line.split()[:4] for line in shown[1:]] == [[name, "1", "1", "READY"] for name in ("sst2", "sst2_student")]
    assert command("deploy").out == "sst2 answers with version 1 already\n"
    published(tmp_path, root=server.repository, labels=("bad", "good"))
    (row,) = [row for row in json.loads(command("status", "--json").out) if row["model"] == "sst2"]
    assert (row["version"], row["published"]) == (1, 2)
    assert sentence(command("deploy", 3)).endswith("sst2 holds no version 3; it has 1, 2")
    assert command("deploy", 2).out == (
        "sst2 answers with version 2, before with 1; 2 stored texts were answered as they must be\n"
    )
    back = json.loads(command("rollback", "--json").out)
    assert back == {"model": "sst2", "before": 2, "after": 1, "smoked": 2}


def test_rollback_of_a_repository_needs_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = published(tmp_path)
    published(tmp_path, root=root, labels=("bad", "good"))
    with monkeypatch.context() as served:
        served.setattr("serving.control.is_served", lambda repository: repository == root)
        done = main(monkeypatch, capsys, "rollback", "--repository", root)
        assert f"error: a server serves {root} now; name its --url instead" in sentence(done)
    said = f"sst2 is at version 1 again, from the next start of a server of {root}\n"
    assert main(monkeypatch, capsys, "rollback", "--repository", root)[:2] == (0, said)
    published(tmp_path, root=root, labels=("worse", "better"))
    done = main(monkeypatch, capsys, "rollback", "--repository", root, "--json")
    assert (done.code, json.loads(done.out)) == (0, {"model": "sst2", "after": 1})
    assert "has no version before 1" in sentence(main(monkeypatch, capsys, "rollback", "--repository", root))


@pytest.mark.triton
def test_a_page_without_a_teacher_is_refused(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentence(main(monkeypatch, capsys, "ui", "--url", server.grpc_url))
    assert "error: teacher and student of sst2 are not both served (" in said
    assert "'sst2_teacher' is not found; check name," in said
    assert "; publish with publish.teacher on" in said


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put back what signals do in this process."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("change", ["deploy", "rollback"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_change_that_is_told_to_end_undoes_what_it_began(
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
    number: signal.Signals,
) -> None:
    undone: list[str] = []

    def begin(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            undone.append(change)
            raise

    monkeypatch.setattr("serving.control.find_control", lambda _: None)
    monkeypatch.setattr(f"serving.operations.{change}", begin)
    assert main(monkeypatch, capsys, change).code == 130
    assert undone == [change]
    # Who started it with `nohup` wants it to go on without a terminal.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cli_serving._undo_when_told_to_end()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_server_that_is_stopped_before_it_is_ready_was_interrupted(
    handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    root = published(tmp_path)
    monkeypatch.setattr(TritonServer, "start", lambda _: None)
    monkeypatch.setattr(TritonServer, "wait_ready", interrupted)
    code, _, err = main(monkeypatch, capsys, "serve", root)
    assert code == 130
    assert "stopping\n" in err


def test_serve_undoes_what_a_killed_deploy_left(
    handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = published(tmp_path)
    published(tmp_path, root=root, labels=("bad", "good"))
    # As if it had come no further than the first of the two.
    repository.leave_note([root / "sst2_student", root / "sst2"], 2, 1, versions.WAITING)
    versions.withdraw([root / "sst2"], 2, 1, prefix=versions.WAITING)
    monkeypatch.setattr(TritonServer, "start", lambda _: None)
    monkeypatch.setattr(TritonServer, "wait_ready", lambda *_: None)
    monkeypatch.setattr(TritonServer, "wait", lambda _: None)
    done = main(monkeypatch, capsys, "serve", root)
    assert done.code == 0
    assert "version 2 of sst2 waits for `compressor deploy --model sst2`" in done.out


def test_no_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(main(monkeypatch, capsys, "status", "--url", "127.0.0.1:1"))
    assert "error: no server of yours that `compressor serve` started listens at 127.0.0.1:1" in said
    said = sentence(main(monkeypatch, capsys, "ui", "--url", "127.0.0.1:1"))
    assert "error: no server answers at 127.0.0.1:1 (" in said


def published(folder: Path, *, root: Path | None = None, labels: tuple[str, str] = ("negative", "positive")) -> Path:
    """Publish a tiny model."""
    target = root or folder / "repository"
    repository.write(tiny_model(folder / "model", labels=labels), target)
    return target


def test_files_for_the_official_container_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deploy"
    code, out, _ = main(monkeypatch, capsys, "deploy-files", folder)
    assert code == 0
    assert f"{folder}/README.md says how to use them" in out
    assert (folder / "start.sh").stat().st_mode & 0o111
    said = sentence(main(monkeypatch, capsys, "deploy-files", folder))
    assert "is there and not an empty folder; name another" in said


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ("avx512_vnni", []),
        ("amx", ["times are not those of the target; `--set quantize.target_cpu=amx`"]),
        ("avx2", ["products may saturate here"]),
    ],
)
def test_graphs_made_for_another_processor_are_told(
    here: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    (tmp_path / "sst2_teacher" / "1").mkdir(parents=True)
    onnx.save(model, tmp_path / "sst2_teacher" / "1" / "model.onnx")  # fp32: made for none
    model.metadata_props.add(key="compressor.target_cpu", value="avx512_vnni")
    for name in ("sst2", "sst2_student"):
        (tmp_path / name / "1").mkdir(parents=True)
        onnx.save(model, tmp_path / name / "1" / "model.onnx")
    monkeypatch.setattr(machine, "int8_cpu", lambda: here)
    found = cli_serving.foreign_graphs(tmp_path)
    assert len(found) == len(said)
    assert all(words in warning for words, warning in zip(said, found, strict=True))


def test_no_server_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = main(monkeypatch, capsys, "classify", "a good film", "--url", f"127.0.0.1:{free_port()}")
    assert re.search(r"error: .*127\.0\.0\.1.*compressor serve", sentence(done))


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = main(monkeypatch, capsys, "classify", "-", stdin=b"a good film\n\xff\xfe\n")
    assert "standard input, line 2: not UTF-8" in sentence(done)


def test_a_file_is_not_sent_to_no_server_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Once it has begun it waits for a server that was killed; ready again took one ten seconds.
    assert sum(pauses_s(cli_serving._RETRIES)) > 120
    monkeypatch.setattr("serving.client.time.sleep", lambda _: pytest.fail("it was sent again"))
    (tmp_path / "in.jsonl").write_text('{"t": "good"}\n')
    run = ("classify-file", tmp_path / "in.jsonl", tmp_path / "out.csv", "--text", "t")
    done = main(monkeypatch, capsys, *run, "--url", f"127.0.0.1:{free_port()}")
    assert "no server answers at 127.0.0.1" in sentence(done)
