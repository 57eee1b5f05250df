"""The report of a build, on made-up artifacts whose figures are worked out by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from compressor import artifact
from compressor.artifact import Artifact
from compressor.errors import ArtifactError
from compressor.report import collect, markdown, write_report
from compressor.tasks import TASKS, Task

ROWS = 20
LABELS = np.arange(ROWS) % 2
WRONG = {"teacher": [0, 1], "student": [0, 1, 2], "int8": [1, 2, 3, 4]}  # test rows that each gets wrong
HOSTILE = "<script>alert(1)</script> a|b *bold* \n& [x](y) \\ `code`"
MACHINE = {
    "processor": "Made-up CPU",
    "cpu_flags": ["avx2"],
    "cores": 2,
    "memory_gb": 8.0,
    "system": "Linux",
    "python": "3.11",
}
STEPS = (
    "1-corpus",
    "2-augment",
    "3-finetune",
    "4-distill-intermediate",
    "5-distill-prediction",
    "6-export",
    "7-quantize",
    "8-publish",
)


def make_run(
    run: Path, *, leave_out: tuple[str, ...] = (), task: Task = TASKS["sst2"], **manifest: Any
) -> dict[str, Artifact]:
    """A finished build in `run`, without the steps in `leave_out`; `manifest` overrides fields of the last one."""
    section = {"task": task.model_dump(mode="json")}
    made = {
        "1-corpus": _seal(run, "1-corpus", "examples", _corpus_metrics(), section=section),
        "2-augment": _seal(run, "2-augment", "examples", _augment_metrics(), parents=["1-corpus"]),
        "3-finetune": _seal(
            run,
            "3-finetune",
            "teacher",
            _model_metrics("teacher", 22_000_000, validate=True),
            section={"teacher": None},
        ),
        "4-distill-intermediate": _seal(
            run,
            "4-distill-intermediate",
            "student",
            _model_metrics("student", 14_000_000),
            section={"objective": "intermediate", "student": {"layers": 4, "hidden": 312, "init": "project"}},
        ),
        "5-distill-prediction": _seal(
            run,
            "5-distill-prediction",
            "student",
            _model_metrics("student", 14_000_000, validate=True),
            section={"objective": "prediction"},
            parents=["3-finetune", "2-augment"],
        ),
        "6-export": _seal(run, "6-export", "onnx", _onnx_metrics(), parents=["5-distill-prediction"]),
        "7-quantize": _seal(run, "7-quantize", "int8", _int8_metrics(), section={"max_metric_drop": 0.005}),
        "8-publish": _seal(
            run, "8-publish", "publication", {"versions": {"sst2": {"version": 1, "digest": "d1"}}}, **manifest
        ),
    }
    _write_rows(made["1-corpus"].path)
    for name, found in made.items():
        if found.manifest["kind"] in WRONG:
            np.save(run / name / "test.logits.npy", _logits(WRONG[found.manifest["kind"]]))
    facts = {"compressor": "0.1.0", "recipe": "laptop", "config": {"seed": 42, "task": {"name": "sst2"}}}
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return {name: found for name, found in made.items() if name not in leave_out}


def _seal(
    run: Path,
    name: str,
    kind: str,
    metrics: dict[str, Any],
    *,
    section: dict[str, Any] | None = None,
    parents: list[str] | None = None,
    **manifest: Any,
) -> Artifact:
    facts = {
        "kind": kind,
        "key": f"key of {name}",
        "content": f"content of {name}",
        "parents": {f"role {parent}": {"key": f"key of {parent}", "content": ""} for parent in parents or []},
        "section": section or {},
        "metrics": metrics,
        "seconds": 12.3,
        "peak_memory_gb": 1.5,
        "finished": "2026-01-02T03:04:05+00:00",
        "machine": MACHINE,
        "versions": {"torch": "2.6.0"},
    }
    (run / name).mkdir(parents=True)
    (run / name / "manifest.json").write_text(json.dumps(facts | manifest), encoding="utf-8")
    found = artifact.read(run / name)
    assert found is not None
    return found


def _corpus_metrics() -> dict[str, Any]:
    rows = {"train": {"negative": 1000, "positive": 1234}, "validation": {"negative": 10, "positive": 10}}
    return {
        "provenance": "made-up sentences",
        "splits": "cut from one list",
        "rows": rows | {"test": {"negative": 10, "positive": 10}},
    }


def _augment_metrics() -> dict[str, Any]:
    counts = {"original_rows": 2234, "rows": 10_000, "asked_rows": 11_170, "missing_rows": 1170}
    return {**counts, "replaced_words_per_copy": 3.25, "rows_without_words": 7}


def _measured(right: int) -> dict[str, Any]:
    share, interval = right / ROWS, [right / ROWS - 0.1, min(1.0, right / ROWS + 0.05)]
    return {
        "metric": "accuracy",
        "score": share,
        "interval_95": interval,
        "rows": ROWS,
        "all": {"accuracy": share},
    }


def _model_metrics(kind: str, parameters: int, *, validate: bool = False) -> dict[str, Any]:
    epoch = {"step": 252, "losses": {"label": 0.4783}} | ({"validation": 0.95} if validate else {})
    return {
        "source": "package:base",
        "parameters": parameters,
        "history": {"steps": 252, "precision": "float32", "epochs": [epoch]},
        "validation": _measured(19),
        "test": _measured(ROWS - len(WRONG[kind])),
        "blind": 0.5,
    }


def _onnx_metrics() -> dict[str, Any]:
    facts = {"max_logit_difference": 2e-6, "agreement": 1.0, "rows": 20, "bound": 1e-4}
    return {"student": {**facts, "size_bytes": 57_000_000}, "teacher": {**facts, "size_bytes": 90_000_000}}


def _int8_metrics() -> dict[str, Any]:
    paired = {"agreement": 0.95, "only_first_right": 1, "only_second_right": 0, "p_value": 1.0}
    shared = {"metric": "accuracy", "flips": 0.0, "against_fp32": paired, "p50_ms": {"1x16": 1.0, "1x32": 1.5}}
    fp32 = {"scheme": "fp32", "score": 0.95, "size_bytes": 57_000_000, **shared}
    dynamic = {"scheme": "dynamic", "score": 0.95, "size_bytes": 15_000_000, **shared}
    static = {"scheme": "static", "score": 0.9, "size_bytes": 14_900_000, **shared}
    p50_ms = {"teacher PyTorch": 12.0, "teacher ONNX": 9.0, "student fp32": 2.0, "student INT8": 1.5}
    times = {
        name: {"1x32": {"p50_ms": p50, "p95_ms": 2 * p50, "p99_ms": 3 * p50, "calls": 99}}
        for name, p50 in p50_ms.items()
    }
    return {
        "validation": _measured(19),
        "test": _measured(ROWS - len(WRONG["int8"])),
        "scheme": "dynamic",
        "candidates": [fp32, dynamic, static],
        "threads": 2,
        "cpu_in_use_percent": 3.0,
        "latency": times,
        "size_bytes": 15_000_000,
    }


def _write_rows(folder: Path) -> None:
    """The test split: row 2, on which teacher and INT8 disagree, tries to be more than text."""
    texts = [HOSTILE if row == 2 else f"text {row}" for row in range(ROWS)]
    table = pa.table(
        {"text": texts, "label": pa.array(LABELS, pa.int32()), "origin": pa.array(range(ROWS), pa.int32())}
    )
    with pa.OSFile(str(folder / "test.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _logits(wrong: list[int]) -> np.ndarray:
    """Right by 2 on every row but `wrong`, where the wrong label leads by 1 + a little more for later rows."""
    logits_NC = np.zeros((ROWS, 2), np.float32)
    logits_NC[np.arange(ROWS), LABELS] = 2
    for row in wrong:
        logits_NC[row] = 0
        logits_NC[row, 1 - LABELS[row]] = 1 + row / 100
    return logits_NC


def pair(facts: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    return next(dict(row) for row in facts["comparisons"] if (row["first"], row["second"]) == (first, second))


def test_verdict_holds_ratio_size_and_speed(tmp_path: Path) -> None:
    assert collect(tmp_path, make_run(tmp_path))["verdict"] == (
        "The INT8 student keeps 88.9 % of the teacher's test accuracy (80.0 against 90.0), is 6.0 times smaller "
        "and answers one text of 32 tokens 8.0 times faster than the teacher in PyTorch, 6.0 times faster than the "
        "teacher in ONNX Runtime."
    )


def test_verdict_says_so_when_the_student_is_larger_slower_and_better(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    metrics = artifacts["7-quantize"].manifest["metrics"]
    metrics["size_bytes"] = 180_000_000
    metrics["latency"]["student INT8"]["1x32"]["p50_ms"] = 18.0
    metrics["test"] = _measured(19)
    assert collect(tmp_path, artifacts)["verdict"] == (
        "The INT8 student reaches 105.6 % of the teacher's test accuracy (95.0 against 90.0), is 2.0 times larger "
        "and answers one text of 32 tokens 1.5 times slower than the teacher in PyTorch, 2.0 times slower than the "
        "teacher in ONNX Runtime."
    )


def test_times_taken_beside_other_work_are_said_to_be(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    artifacts["7-quantize"].manifest["metrics"]["cpu_in_use_percent"] = 60.0
    facts = collect(tmp_path, artifacts)
    assert facts["verdict"].endswith("teacher in ONNX Runtime (timed beside other work: do not publish these times).")
    assert "Other work used 60 % of the processor, which slows PyTorch most" in markdown(facts)


def test_int8_is_compared_with_the_teacher_row_by_row(tmp_path: Path) -> None:
    row = pair(collect(tmp_path, make_run(tmp_path)), "student INT8", "teacher")
    # Right alone: INT8 on row 0; the teacher on rows 2, 3, 4. Exact p of 1 in 4: 2 * (1 + 4) / 16.
    assert (row["only_first_right"], row["only_second_right"], row["agreement"]) == (1, 3, 0.8)
    assert row["p_value"] == pytest.approx(0.625)
    assert row["difference"] == pytest.approx(-0.1)
    assert row["ratio"] == pytest.approx(16 / 18)
    assert row["meaning"].startswith("These 20 rows cannot show that the student INT8 and the teacher differ")


def test_a_loss_beyond_chance_is_called_a_loss(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    np.save(artifacts["7-quantize"].path / "test.logits.npy", _logits(list(range(12))))
    meaning = pair(collect(tmp_path, artifacts), "student INT8", "teacher")["meaning"]
    assert meaning.startswith(
        "The student INT8 is worse than the teacher, by more than chance explains (-50.0 points; "
    )


def test_gates_state_value_and_bound(tmp_path: Path) -> None:
    gates = collect(tmp_path, make_run(tmp_path))["gates"]
    assert [(gate["value"], gate["bound"], gate["passed"]) for gate in gates] == [
        (pytest.approx(85), 50, True),
        (2e-6, 1e-4, True),
        (2e-6, 1e-4, True),
        (0, 0.5, True),
    ]


def test_rejected_int8_candidate_is_in_the_table(tmp_path: Path) -> None:
    fp32, dynamic, static = collect(tmp_path, make_run(tmp_path))["int8_candidates"]
    assert "drop_points" not in fp32
    assert dynamic["chosen"]
    assert (static["drop_points"], static["within_bound"], static["chosen"]) == (pytest.approx(5), False, False)


def test_disagreements_come_surest_first(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path))["disagreements"]
    assert (facts["count"], [row["row"] for row in facts["examples"]]) == (4, [4, 3, 2, 0])
    first = facts["examples"][0]
    # Confidences: 1 / (1 + exp(-2)) and 1 / (1 + exp(-1.04)).
    assert (first["label"], first["teacher"], first["int8"]) == ("negative", "negative, 88.1 %", "positive, 73.9 %")


def test_a_regression_of_pairs_is_reported_by_its_correlation(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path, task=TASKS["stsb"])
    scores = np.arange(ROWS, dtype=np.float32) / 4
    texts = [f"text {row}" for row in range(ROWS)]
    table = pa.table({"text": texts, "text_b": texts, "label": pa.array(scores), "origin": pa.array(range(ROWS))})
    path = tmp_path / "1-corpus" / "test.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name, found in artifacts.items():
        if found.manifest["kind"] in WRONG:
            found.manifest["metrics"]["test"]["all"] = {"spearman": 0.9, "pearson": 0.8}
            logits = scores + (np.arange(ROWS) == 3) * (0.5 if found.manifest["kind"] == "int8" else 0.0)
            np.save(tmp_path / name / "test.logits.npy", logits[:, None].astype(np.float32))
    facts = collect(tmp_path, artifacts)
    row = pair(facts, "student INT8", "teacher")
    assert row["agreement"] == 0.95
    assert row["difference"] < 0
    assert row["difference_95"][1] <= 0
    assert "p_value" not in row
    assert facts["disagreements"]["examples"] == [
        {"row": 3, "text": "text 3 / text 3", "label": "0.75", "teacher": "0.75", "int8": "1.25"}
    ]
    assert "Spearman correlation" in facts["verdict"]
    page = markdown(facts)
    assert "a regression" in page
    assert "teacher on test: Spearman correlation 90.0, Pearson correlation 80.0." in page
    assert "McNemar's test" not in page


def test_stages_name_what_they_were_made_from(tmp_path: Path) -> None:
    stages = {row["stage"]: row for row in collect(tmp_path, make_run(tmp_path))["stages"]}
    assert tuple(stages) == STEPS
    assert stages["5-distill-prediction"]["made_from"] == ["3-finetune", "2-augment"]


def test_stages_on_different_machines_are_told_apart(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path, machine={**MACHINE, "cores": 64}))
    assert [group["stages"] for group in facts["machines"]] == [list(STEPS[:-1]), ["8-publish"]]
    assert "ran on different machines" in markdown(facts)
    assert "different" not in markdown(collect(tmp_path / "one", make_run(tmp_path / "one"))).partition("## Machine")[2]


def test_page_escapes_texts_and_loads_nothing(tmp_path: Path) -> None:
    page = write_report(tmp_path, make_run(tmp_path)).read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r"https?://|<link|<img|@import|src=|url\((?!#)", page)
    assert page.count('<figure role="img" aria-label="Plot: ') == 4


def test_page_is_well_formed_and_its_ids_are_unique(tmp_path: Path) -> None:
    page = Tags()
    page.feed(write_report(tmp_path, make_run(tmp_path)).read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {reference.removeprefix("#") for reference in page.references} <= set(page.ids)


class Tags(HTMLParser):
    """Open elements, ids, and references to ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [tag] if tag != "meta" else []
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.ids += [str(value)] if name == "id" else []
            self.references += re.findall(r"#[\w-]+", str(value)) if name in ("xlink:href", "clip-path") else []


def test_markdown_keeps_a_hostile_text_in_its_cell(tmp_path: Path) -> None:
    text = markdown(collect(tmp_path, make_run(tmp_path)))
    line = next(line for line in text.splitlines() if "script" in line)
    assert line.startswith(r"| \<script\>alert(1)\</script\> a\|b \*bold\* \& \[x\](y) \\ \`code\` | negative | ")
    assert len(re.findall(r"(?<!\\)\|", line)) == 5


def test_markdown_tables_have_no_gaps(tmp_path: Path) -> None:
    lines = markdown(collect(tmp_path, make_run(tmp_path))).splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("|---")]
    assert len(rules) == 11
    for number in rules:
        assert lines[number - 2] == ""
        assert all(lines[near].startswith("| ") for near in (number - 1, number + 1))
        assert lines[number - 1].count("|") == lines[number].count("|")


def test_same_artifacts_give_same_bytes(tmp_path: Path) -> None:
    names = ("report.json", "report.md", "report.html")
    artifacts = make_run(tmp_path)
    first, second = [
        [(write_report(tmp_path, artifacts).parent / name).read_bytes() for name in names] for _ in range(2)
    ]
    assert first == second
    assert not list(tmp_path.glob("*.new"))


def test_json_is_what_collect_gives(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    write_report(tmp_path, artifacts)
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == 1
    assert written == json.loads(json.dumps(collect(tmp_path, artifacts), allow_nan=False))


@pytest.mark.parametrize("finished", range(1, len(STEPS)))
def test_unfinished_build_reports_what_there_is(tmp_path: Path, finished: int) -> None:
    artifacts = make_run(tmp_path, leave_out=STEPS[finished:])
    (tmp_path / "run.json").unlink()
    page = write_report(tmp_path, artifacts).read_text(encoding="utf-8")
    assert ("There is no INT8 student yet" in page) == (finished < 7)
    assert "Recipe</h2>" not in page


def test_recipe_without_augmentation_says_nothing_of_it(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path, leave_out=("2-augment",)))
    assert "augmentation" not in facts
    assert "Augmentation" not in markdown(facts)


def test_logits_of_other_rows_are_refused(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    np.save(artifacts["3-finetune"].path / "test.logits.npy", _logits([])[:5])
    with pytest.raises(ArtifactError, match=r"has 5 finite rows of 5, the test split 20"):
        collect(tmp_path, artifacts)


def test_run_without_a_finished_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no finished stage"):
        collect(tmp_path, {})


def test_reporting_needs_neither_torch_nor_datasets() -> None:
    code = "import sys, compressor.report; sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
