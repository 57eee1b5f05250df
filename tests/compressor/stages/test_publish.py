"""The model repository that a build writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.artifact import Artifact
from compressor.config import PublishConfig
from compressor.dataset import Example, write_examples
from compressor.evaluate import FP16_FILE
from compressor.stages.export import write_fp16
from compressor.stages.publish import is_published, publish, spread, warmup_texts
from compressor.tasks import TASKS
from compressor.triton_releases import IR_VERSION, OPSET, RUNTIMES
from serving import RepositoryError, read, repository, triton
from serving.graphs import RELEASES
from serving.verify import verify
from tests import tiny
from tests.conftest import Line
from tests.serving.conftest import write_graph, write_tokenizer

MODELS = ("sst2", "sst2_student", "sst2_teacher")


def run(line: Line, out: Path, root: Path, **config: Any) -> Artifact:
    return publish(
        PublishConfig(**({"max_batch_size": 8} | config)),
        tiny.TASK,
        int8=Artifact.open(line.run / "7-quantize", kind="int8"),
        onnx_models=Artifact.open(line.run / "6-export", kind="onnx"),
        corpus=Artifact.open(line.run / "1-corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key=out.name,
        out=out,
        root=root,
    )


@pytest.mark.parametrize("name", ["stsb", "mnli"])
def test_pairs_and_regressions_are_published_as_what_they_are(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    pairs = [("a good film", "bad"), ("good", "film"), ("a fine film", "a bad film, bad"), ("bad", "a fine film")]
    with tiny.sealed(tmp_path / "corpus", "examples") as draft:
        rows = [Example(texts=pair, label=1, origin=number) for number, pair in enumerate(pairs)]
        write_examples(draft.path / "validation.arrow", rows, task)
    for kind in ("int8", "onnx"):
        with tiny.sealed(tmp_path / kind, kind) as draft:
            folder = draft.path / "teacher" if kind == "onnx" else draft.path
            write_graph(folder / "model.onnx", weights=np.zeros((9, task.outputs), np.float32))
            write_tokenizer(folder / "tokenizer.json")
    made = publish(
        PublishConfig(),
        task,
        int8=Artifact.open(tmp_path / "int8", kind="int8"),
        onnx_models=Artifact.open(tmp_path / "onnx", kind="onnx"),
        corpus=Artifact.open(tmp_path / "corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key="published",
        out=tmp_path / "out",
        root=tmp_path / "root",
    )
    assert is_published(made, tmp_path / "root")
    for served in (name, f"{name}_teacher"):
        config = triton.from_text((tmp_path / "root" / served / "config.pbtxt").read_text())
        assert [tensor.name for tensor in config.input] == ["TEXT", "TEXT_PAIR"]
        assert config.output[-2].name == ("PROBABILITIES" if task.labels else "VALUE")
        assert list(config.output[-2].dims) == [task.outputs]
        assert json.loads(triton.parameters_of(config)["labels"]) == list(task.labels)
        first = config.model_warmup[0].inputs
        raw = {
            name: (tmp_path / "root" / served / "warmup" / first[name].input_data_file).read_bytes() for name in first
        }
        assert {name: text[4:].decode() for name, text in raw.items()} == {"TEXT": "a good film", "TEXT_PAIR": "bad"}


def test_a_cascade_is_chosen_on_the_validation_rows(tmp_path: Path) -> None:
    task = TASKS["sst2"]
    # The student knows "good" and "bad"; only the teacher knows "fine".
    with tiny.sealed(tmp_path / "corpus", "examples") as draft:
        texts = [("good good", 1), ("bad bad", 0), ("fine film", 1), ("good film", 1)]
        rows = [Example(texts=(text,), label=label, origin=n) for n, (text, label) in enumerate(texts)]
        write_examples(draft.path / "validation.arrow", rows, task)
    weights = {"int8": [(5, 0), (4, 1)], "onnx": [(5, 0), (4, 1), (6, 1)]}
    for kind, known in weights.items():
        table = np.zeros((9, 2), np.float32)
        for word, label in known:
            table[word, label] = 2
        with tiny.sealed(tmp_path / kind, kind) as draft:
            folder = draft.path / "teacher" if kind == "onnx" else draft.path
            write_graph(folder / "model.onnx", weights=table)
            write_tokenizer(folder / "tokenizer.json")
    made = publish(
        PublishConfig(cascade=True),
        task,
        int8=Artifact.open(tmp_path / "int8", kind="int8"),
        onnx_models=Artifact.open(tmp_path / "onnx", kind="onnx"),
        corpus=Artifact.open(tmp_path / "corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key="published",
        out=tmp_path / "out",
        root=tmp_path / "root",
    )
    found = made.metrics["cascade"]
    assert (found["student_accuracy"], found["teacher_accuracy"], found["accuracy"]) == (0.75, 1.0, 1.0)
    assert found["escalated"] == 0.25
    assert 0.5 < found["threshold"] < 0.88
    config = triton.from_text((tmp_path / "root" / "sst2_cascade" / "config.pbtxt").read_text())
    assert float(triton.parameters_of(config)["threshold"]) == found["threshold"]
    assert is_published(made, tmp_path / "root")


def warmups(folder: Path, name: str, texts: Sequence[tuple[str, ...]], max_tokens: int) -> tuple[Any, ...]:
    """Return the warm-up texts of a corpus with these validation texts."""
    with tiny.sealed(folder / "corpus", "examples") as draft:
        rows = [Example(texts=text, label=1, origin=number) for number, text in enumerate(texts)]
        write_examples(draft.path / "validation.arrow", rows, TASKS[name])
    corpus = Artifact.open(folder / "corpus", kind="examples")
    return warmup_texts(corpus, TASKS[name], write_tokenizer(folder / "tokenizer.json"), max_tokens)


def test_warmups_are_a_text_of_each_width(tmp_path: Path) -> None:
    texts = [(" ".join(["good"] * (tokens - 2)),) for tokens in (30, 3, 4, 44, 12, 14)]
    found = [text.count("good") + 2 for text in warmups(tmp_path, "sst2", texts, 60)]
    # Of 24, 40, 56 and 60 tokens there is no text: they are the first words of all, and the first such ones.
    assert found == [3, 12, 17, 30, 33, 44, 49, 57]


def test_warmups_of_pairs_reach_every_width(tmp_path: Path) -> None:
    found = warmups(tmp_path, "mnli", [("good film", "bad"), ("a fine film", "a " * 600)], 512)
    tokens = [min(3 + sum(len(part.split()) for part in pair), 512) for pair in found]
    assert [-(-count // 8) for count in tokens] == list(range(1, 65))
    assert found[0] == ("good film", "bad")


def test_warmups_leave_out_what_the_tokenizer_drops(tmp_path: Path) -> None:
    found = warmups(tmp_path, "mnli", [("\u200b " + "good " * 9, "bad " * 9)], 24)
    assert all("good" in first and "bad" in second for first, second in found)


def test_warmups_are_thinned_evenly() -> None:
    texts = tuple("abcdefgh")
    assert spread(texts, 3) == ("a", "e", "h")
    assert spread(texts, 1) == ("a",)
    assert spread(texts, 8) == spread(texts, 9) == texts
    assert spread((), 8) == ()


def files(root: Path) -> dict[str, tuple[int, int]]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_ino) for path in found}


def test_student_entry_and_teacher_are_published(line: Line, tmp_path: Path) -> None:
    made = run(line, tmp_path / "out", tmp_path / "root")
    assert read(tmp_path / "root") == MODELS
    assert {name: facts["version"] for name, facts in made.metrics["versions"].items()} == dict.fromkeys(MODELS, 1)


def test_the_teacher_can_be_left_out(line: Line, tmp_path: Path) -> None:
    run(line, tmp_path / "out", tmp_path / "root", teacher=False)
    assert read(tmp_path / "root") == MODELS[:2]


def test_the_published_student_is_the_int8_graph(line: Line, tmp_path: Path) -> None:
    run(line, tmp_path / "out", tmp_path / "root")
    served = tmp_path / "root" / "sst2_student" / "1" / "model.onnx"
    assert served.read_bytes() == (line.run / "7-quantize" / "model.onnx").read_bytes()


def test_publishing_again_changes_nothing(line: Line, tmp_path: Path) -> None:
    first = run(line, tmp_path / "out", tmp_path / "root")
    before = files(tmp_path / "root")
    again = run(line, tmp_path / "again", tmp_path / "root")
    assert files(tmp_path / "root") == before
    assert again.metrics["versions"] == first.metrics["versions"]


def test_other_content_becomes_the_next_version(line: Line, tmp_path: Path) -> None:
    run(line, tmp_path / "out", tmp_path / "root")
    made = run(line, tmp_path / "again", tmp_path / "root", max_batch_size=4)
    assert made.metrics["versions"]["sst2"]["version"] == 2
    assert (tmp_path / "root" / "sst2" / "1").is_dir()


def test_a_foreign_repository_is_refused_and_left_as_it_is(line: Line, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sst2").mkdir(parents=True)
    (root / "sst2" / "config.pbtxt").write_text("theirs")
    with pytest.raises(RepositoryError, match=r"was not written by compressor .* is left as it is; move it"):
        run(line, tmp_path / "out", root)
    assert list(files(root)) == ["sst2/config.pbtxt"]
    assert not (tmp_path / "out").exists()


def test_the_runtime_of_the_official_containers(tmp_path: Path) -> None:
    task = TASKS["sst2"]
    with tiny.sealed(tmp_path / "corpus", "examples") as draft:
        rows = [Example(texts=(text,), label=1, origin=number) for number, text in enumerate(("good", "a bad film"))]
        write_examples(draft.path / "validation.arrow", rows, task)
    for kind, folders in (("int8", ("",)), ("onnx", ("student", "teacher"))):
        with tiny.sealed(tmp_path / kind, kind) as draft:
            for folder in folders:
                place = draft.path / folder
                write_tokenizer(place / "tokenizer.json")
                write_fp16(write_graph(place / "model.onnx", segments=np.ones((2, 2), np.float32)), place / FP16_FILE)
    made = publish(
        PublishConfig(runtime="onnxruntime"),
        task,
        int8=Artifact.open(tmp_path / "int8", kind="int8"),
        onnx_models=Artifact.open(tmp_path / "onnx", kind="onnx"),
        corpus=Artifact.open(tmp_path / "corpus", kind="examples"),
        max_tokens=tiny.MAX_TOKENS,
        key="published",
        out=tmp_path / "out",
        root=tmp_path / "root",
    )
    assert is_published(made, tmp_path / "root")
    assert sorted(made.metrics["versions"]) == ["sst2", "sst2_student", "sst2_teacher", "sst2_teacher_graph"]
    for graph, fp16 in (("sst2_student", "student"), ("sst2_teacher_graph", "teacher")):
        served = (tmp_path / "root" / graph / "1" / FP16_FILE).read_bytes()
        assert served == (tmp_path / "onnx" / fp16 / FP16_FILE).read_bytes()
    assert verify(tmp_path / "root", release="24.10") == []
    with pytest.raises(RepositoryError, match="was published for the runtime onnxruntime and is now to be embedded"):
        repository.refuse_foreign(tmp_path / "root", "sst2")


def test_graphs_for_gpus_that_nothing_serves_are_warned_of(
    line: Line, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = line.copy(tmp_path)
    run(copy, tmp_path / "without", tmp_path / "root")
    assert "fp16" not in caplog.text
    (copy.run / "6-export" / "student" / FP16_FILE).touch()
    run(copy, tmp_path / "with", tmp_path / "root")
    assert 'publish: there are fp16 graphs for GPUs, and publish.runtime "embedded" serves on CPUs alone' in caplog.text


def test_a_published_repository_is_known_as_such(line: Line, tmp_path: Path) -> None:
    made = run(line, tmp_path / "out", tmp_path / "root")
    assert is_published(made, tmp_path / "root")
    assert not is_published(made, tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["sst2_student/1/model.onnx", "sst2/config.pbtxt", "sst2/1/tokenizer.json"])
def test_a_damaged_repository_is_known_as_such(line: Line, tmp_path: Path, name: str) -> None:
    made = run(line, tmp_path / "out", tmp_path / "root")
    (tmp_path / "root" / name).unlink()
    assert not is_published(made, tmp_path / "root")


def test_publishing_mends_a_damaged_repository(line: Line, tmp_path: Path) -> None:
    run(line, tmp_path / "out", tmp_path / "root")
    (tmp_path / "root" / "sst2_student" / "1" / "model.onnx").write_bytes(b"cut")
    made = run(line, tmp_path / "again", tmp_path / "root")
    assert read(tmp_path / "root") == MODELS
    assert is_published(made, tmp_path / "root")


def test_a_withdrawn_version_is_no_longer_published(line: Line, tmp_path: Path) -> None:
    run(line, tmp_path / "out", tmp_path / "root")
    made = run(line, tmp_path / "again", tmp_path / "root", max_batch_size=4)
    repository.rollback(tmp_path / "root", "sst2")
    assert not is_published(made, tmp_path / "root")


def test_what_is_exported_for_a_release_is_checked_for_the_same_one() -> None:
    assert {name: release.onnxruntime for name, release in RELEASES.items()} == RUNTIMES
    for release in RELEASES.values():
        assert (release.ir_version, release.opset) >= (IR_VERSION, OPSET)
