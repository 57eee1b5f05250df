"""The whole line: resume, interruption, what is reused and what is not."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compressor import artifact, machine, pipeline
from compressor.config import BuildConfig
from compressor.errors import ArtifactError, SourceError
from compressor.pipeline import finished, open_run, plan
from compressor.recipe import load_recipe
from compressor.steps import Where, steps
from compressor.tasks import TASKS, Task
from tests import tiny
from tests.conftest import Line

STEPS = [
    "1-corpus",
    "2-finetune",
    "3-augment",
    "4-distill-intermediate",
    "5-distill-prediction",
    "6-export",
    "7-quantize",
    "8-publish",
]


def config_of(line: Line, *overrides: str) -> BuildConfig:
    return load_recipe(None, str(line.recipe), overrides)


def reusable(line: Line, *overrides: str) -> list[str]:
    """The steps that a build with overrides would reuse."""
    planned = plan(steps(config_of(line, *overrides), Where(repository=line.repository)), line.run)
    return [item.step.name for item in planned if item.reusable]


def said(lines: list[str], what: str) -> list[str]:
    """Stages of which a build said `what`, such as "cached"."""
    return [text.partition("] ")[2].partition(":")[0] for text in lines if text.startswith("[") and f": {what}" in text]


def until(process: subprocess.Popen[bytes], text: str) -> None:
    """Read what a build says until it says `text`."""
    assert process.stderr is not None
    heard = ""
    for raw in process.stderr:
        heard += raw.decode()
        if text in heard:
            return
    raise AssertionError(f"the build ended before it said {text!r}:\n{heard}")


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command at work; it does not outlive the block."""
    command = tiny.command(*arguments, hasty=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C; the last that is said is what is kept."""
    process.send_signal(signal.SIGINT)
    _, heard = process.communicate(timeout=100)
    assert process.returncode == 130, heard.decode()
    assert heard.decode().splitlines()[-1].startswith("interrupted; finished stages are kept, and the same command")
    assert b"Traceback" not in heard


def weights(run: Path, step: str) -> Any:
    found = artifact.read(run / step)
    assert found is not None
    return found.manifest["files"]["model.safetensors"]["sha256"]


def test_importing_the_pipeline_is_light() -> None:
    code = "import sys, compressor.pipeline; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "datasets", "numpy"}


def test_steps_are_the_line_in_order(line: Line) -> None:
    found = steps(config_of(line), Where(repository=line.repository))
    assert [step.name for step in found] == STEPS
    for place, step in enumerate(found):
        assert set(step.parents.values()) <= set(STEPS[:place])


LATER = ("finetune", "distill", "export", "quantize", "publish")


def test_later_stages_work_on_the_splits_that_the_corpus_found(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS["mnli"]
    config = config_of(line, "task.name=mnli")
    matched = tiny.examples(tmp_path / "corpus", task=task.model_copy(update={"extra_files": {}}))
    assert "mismatched" in task.held_out
    for stage in LATER:
        monkeypatch.setattr(f"compressor.stages.{stage}.{stage}", lambda *given, **more: given)
    for step in steps(config, Where(repository=tmp_path)):
        if step.stage in LATER:
            given: Any = step.make(dict.fromkeys([*step.parents, "corpus"], matched), "key", tmp_path / "out")
            assert next(item for item in given if isinstance(item, Task)).held_out == ("validation", "test")


def test_students_learn_from_the_augmented_rows(line: Line) -> None:
    found = {step.name: step for step in steps(config_of(line), Where(repository=line.repository))}
    assert found["4-distill-intermediate"].parents["examples"] == "3-augment"
    assert found["2-finetune"].parents == {"corpus": "1-corpus"}


def test_copies_are_judged_by_the_teacher(line: Line) -> None:
    found = {step.name: step for step in steps(config_of(line), Where(repository=line.repository))}
    assert found["3-augment"].parents == {"corpus": "1-corpus", "teacher": "2-finetune"}


def test_a_masked_lm_made_here_is_a_step_before_the_augmentation(line: Line) -> None:
    text = line.recipe.with_name("data") / "train.tsv"
    overrides = ('augment.masked_lm="adapt"', f'adapt.corpus=["{text}"]')
    found = steps(config_of(line, *overrides), Where(repository=line.repository))
    assert [step.name for step in found][:5] == [
        "1-corpus",
        "2-finetune",
        "3-adapt",
        "4-augment",
        STEPS[3].replace("4", "5"),
    ]
    adapt, augment = found[2:4]
    assert (adapt.kind, adapt.parents) == ("masked-lm", {"corpus": "1-corpus"})
    base = str(line.recipe.with_name("base"))
    assert adapt.sources == {"finetune.base": base, "adapt.corpus.0": str(text)}
    assert augment.parents == {"corpus": "1-corpus", "teacher": "2-finetune", "masked_lm": "3-adapt"}
    assert "augment.masked_lm" not in augment.sources
    other, _ = steps(config_of(line, *overrides, "adapt.epochs=2.0"), Where(repository=line.repository))[2:4]
    assert other.key({"corpus": "c"}) != adapt.key({"corpus": "c"})


def test_where_a_build_runs_decides_nothing(line: Line) -> None:
    here, there = (
        plan(steps(config_of(line), Where(repository=line.repository, processes=processes, device=device)), line.run)
        for processes, device in ((1, "auto"), (4, "cpu"))
    )
    assert [item.key for item in here] == [item.key for item in there]


def test_a_build_makes_every_stage_and_the_report(line: Line) -> None:
    assert list(finished(line.run)) == STEPS
    assert {"report.html", "report.md", "report.json", "run.json"} <= {path.name for path in line.run.iterdir()}


def test_a_build_says_what_was_kept_on_standard_output(line: Line) -> None:
    verdict, report, serve = line.done.stdout.decode().splitlines()
    assert verdict.startswith("The INT8 student keeps ")
    assert report == f"report: {line.run / 'report.html'}"
    assert serve == f"serve it: compressor serve {line.repository}"


def test_nothing_unfinished_is_left(line: Line) -> None:
    assert not [path for path in line.run.rglob("*") if path.suffix in (".partial", ".old", ".new")]


def test_everything_is_reused(line: Line) -> None:
    assert reusable(line) == STEPS


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("publish.max_batch_size=4", 7),
        ("quantize.max_metric_drop=0.2", 6),
        ("export.max_logit_difference=1e-3", 5),
        ("distill.1.epochs=3", 4),
        ("distill.0.epochs=3", 3),
        ("student.hidden=20", 3),
        ("corpus.undecided=0.4", 0),
        ("task.max_tokens=24", 1),
        ("seed=8", 0),
    ],
)
def test_a_changed_value_reruns_the_stages_after_it(line: Line, override: str, kept: int) -> None:
    assert reusable(line, override) == STEPS[:kept]


def test_a_changed_teacher_reruns_the_augmentation_that_it_judges(line: Line) -> None:
    assert reusable(line, "finetune.epochs=7") == ["1-corpus"]


def test_a_changed_augmentation_leaves_the_teacher(line: Line) -> None:
    assert reusable(line, "augment.copies=2") == ["1-corpus", "2-finetune"]


def test_changed_data_reruns_everything(line: Line, tmp_path: Path) -> None:
    shutil.copytree(line.recipe.with_name("data"), tmp_path / "data")
    override = f'corpus.source="{tmp_path / "data"}"'
    first = [item.key for item in plan(steps(config_of(line, override), Where(repository=tmp_path)), tmp_path / "run")]
    with (tmp_path / "data" / "train.tsv").open("a") as file:
        file.write("one more good film\t1\n")
    second = [item.key for item in plan(steps(config_of(line, override), Where(repository=tmp_path)), tmp_path / "run")]
    assert all(before != after for before, after in zip(first, second, strict=True))


def quantize_key(line: Line, *overrides: str) -> str:
    """What decides whether the INT8 student is made again."""
    (step,) = (
        step for step in steps(config_of(line, *overrides), Where(repository=line.repository)) if step.kind == "int8"
    )
    return step.key(dict.fromkeys(step.parents, "same"))


def test_changed_texts_of_the_vocabulary_rerun_quantization(line: Line, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    overrides = ("quantize.trim_vocabulary=true", f'quantize.vocabulary_texts=["{texts}"]')
    with pytest.raises(
        SourceError, match=r"^quantize\.vocabulary_texts\.0 is .*texts\.txt', and there is no such file"
    ):
        pipeline.check_ready(steps(config_of(line, *overrides), Where(repository=line.repository)))
    texts.write_text("some words\n")
    before = quantize_key(line, *overrides)
    texts.write_text("other words\n")
    assert quantize_key(line, *overrides) != before


def test_a_missing_package_is_named_before_any_stage_starts(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    with pytest.raises(
        SourceError,
        match=r"^stage export needs onnxruntime, which is not installed; pip install 'compressor\[cpu\]'$",
    ):
        pipeline.check_ready(steps(config_of(line), Where(repository=line.repository)))
    assert "cpu" in machine.missing_extras()


def test_a_run_carried_on_by_another_kind_of_processor_is_quantized_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for kind in ("avx2", "amx"):
        monkeypatch.setattr(machine, "int8_cpu", lambda kind=kind: kind)
        keys.append((quantize_key(line), quantize_key(line, 'quantize.target_cpu="neon"')))
    (auto, neon), (other_auto, other_neon) = keys
    assert auto != other_auto
    assert neon == other_neon
    assert other_auto == quantize_key(line, 'quantize.target_cpu="amx"')


def test_a_damaged_stage_is_made_again(line: Line, tmp_path: Path) -> None:
    copy = line.copy(tmp_path)
    (copy.run / "6-export" / "student" / "model.onnx").unlink()
    assert reusable(copy) == STEPS[:5]


def test_a_damaged_repository_is_published_again(line: Line, tmp_path: Path) -> None:
    copy = line.copy(tmp_path)
    (copy.repository / "sst2_student" / "1" / "model.onnx").unlink()
    assert reusable(copy) == STEPS[:7]


def test_another_repository_is_published_to(line: Line, tmp_path: Path) -> None:
    planned = plan(steps(config_of(line), Where(repository=tmp_path / "other")), line.run)
    assert [item.step.name for item in planned if item.reusable] == STEPS[:7]


def test_a_plan_tells_the_seconds_of_last_time(line: Line) -> None:
    planned = plan(steps(config_of(line, "seed=8"), Where(repository=line.repository)), line.run)
    assert all(item.seconds_last_time is not None and not item.reusable for item in planned)


def test_finished_stages_follow_the_recipe_not_the_folder(line: Line, tmp_path: Path) -> None:
    copy = line.copy(tmp_path)
    # What a build of one more [[distill]] left behind.
    shutil.copytree(copy.run / "8-publish", copy.run / "9-publish")
    shutil.copytree(copy.run / "7-quantize", copy.run / "8-quantize")
    assert list(finished(copy.run)) == STEPS


def test_ten_stages_are_a_finished_build_as_well(line: Line, tmp_path: Path) -> None:
    config = config_of(line)
    many = config.model_copy(update={"distill": (*config.distill, *config.distill)})
    open_run(tmp_path / "run", "many", many, overwrite=False)
    names = [step.name for step in steps(many, Where(repository=tmp_path))]
    assert names[-1] == "10-publish"
    for name in names:
        with tiny.sealed(tmp_path / "run" / name, "any"):
            pass
    assert list(finished(tmp_path / "run")) == names


def test_an_unfinished_build_has_no_artifacts_to_report_on(line: Line, tmp_path: Path) -> None:
    copy = line.copy(tmp_path)
    shutil.rmtree(copy.run / "8-publish")
    with pytest.raises(ArtifactError, match=r"holds no finished build; run `compressor build --out .*` to the end"):
        finished(copy.run)
    with pytest.raises(ArtifactError, match=r"holds no run.json of a build; give the run folder of one"):
        finished(tmp_path / "nowhere")


def test_a_foreign_folder_is_refused_and_left_as_it_is(line: Line, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ArtifactError, match=r"holds files and no run.json: it belongs to something else"):
            open_run(tmp_path, "tiny", config_of(line), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_file_is_no_run_folder(line: Line, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match=r"--out .*file is a file; it must be a folder"):
        open_run(tmp_path / "file", "tiny", config_of(line), overwrite=False)


def test_overwriting_throws_an_earlier_run_away(line: Line, tmp_path: Path) -> None:
    open_run(tmp_path / "run", "tiny", config_of(line), overwrite=False)
    (tmp_path / "run" / "old").mkdir()
    open_run(tmp_path / "run", "tiny", config_of(line), overwrite=False)
    assert (tmp_path / "run" / "old").exists()
    open_run(tmp_path / "run", "tiny", config_of(line), overwrite=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_a_missing_source_is_refused_before_anything_is_made(line: Line, tmp_path: Path) -> None:
    config = config_of(line, 'augment.vectors="/nowhere/vectors.txt"')
    with pytest.raises(SourceError, match=r"augment.vectors is '/nowhere/vectors.txt', and there is no such file"):
        pipeline.build(config, "tiny", tmp_path / "run", Where(repository=tmp_path / "repository"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rerun_with_a_changed_value_does_just_that(
    line: Line,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = line.copy(tmp_path)
    places = ("--recipe", copy.recipe, "--out", copy.run, "--repository", copy.repository)
    done = tiny.main(monkeypatch, capsys, "build", *places, "--set", "quantize.max_metric_drop=0.2", hasty=True)
    assert done.code == 0, done.err
    assert said(caplog.messages, "cached") == [name.partition("-")[2] for name in STEPS[:6]]
    assert said(caplog.messages, "done") == ["quantize", "publish"]


@pytest.mark.slow
def test_a_build_that_is_interrupted_and_killed_goes_on_and_ends_with_the_same_weights(
    line: Line, tmp_path: Path
) -> None:
    run, repository = tmp_path / "run", tmp_path / "repository"
    build = ("build", "--recipe", line.recipe, "--out", run, "--repository", repository)
    # Interrupted in the middle of the teacher's training, after a checkpoint ...
    with started(*build) as process:
        until(process, "train step 36")
        interrupt(process)
    planned = plan(steps(config_of(line), Where(repository=repository)), run)
    assert [item.step.name for item in planned if item.reusable] == STEPS[:1]
    assert [item.step.name for item in planned if item.begun] == ["2-finetune"]

    # ... and killed in the middle of the student's. What is said comes before its checkpoint; that of step 6 is there.
    with started(*build) as process:
        for text in ("[2/8] finetune ...", "going on from step", "[5/8] distill-prediction ...", "train step 12"):
            until(process, text)
        process.kill()
    assert not (run / "5-distill-prediction").exists()

    # The weights are made by now; one INT8 scheme is enough for the rest of the way.
    with started(*build, "--set", 'quantize.candidates=["static"]') as process:
        _, heard = process.communicate(timeout=200)
        assert process.returncode == 0, heard.decode()
    lines = heard.decode().splitlines()
    assert said(lines, "cached") == [name.partition("-")[2] for name in STEPS[:4]]
    assert any(text.startswith("going on from step") for text in lines)
    assert weights(run, "2-finetune") == weights(line.run, "2-finetune")
    assert weights(run, "5-distill-prediction") == weights(line.run, "5-distill-prediction")


@pytest.mark.slow
def test_ctrl_c_stops_two_processes(line: Line, tmp_path: Path) -> None:
    places = ("--recipe", line.recipe, "--corpus", line.run / "1-corpus", "--out", tmp_path / "teacher")
    with started("finetune", *places, "--processes", 2, "--set", "finetune.epochs=500") as process:
        until(process, "train step 12")
        interrupt(process)
    assert not (tmp_path / "teacher").exists()
