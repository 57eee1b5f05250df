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
INT8_BOUNDS = {"max_metric_drop": 0.005, "max_label_flips": 0.0}
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
    "2-finetune",
    "3-augment",
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
        "2-finetune": _seal(
            run,
            "2-finetune",
            "teacher",
            _model_metrics("teacher", 22_000_000, validate=True),
            section={"teacher": None},
        ),
        "3-augment": _seal(
            run,
            "3-augment",
            "examples",
            _augment_metrics(),
            section={"vectors": "package:glove", "masked_lm": "adapt"},
            parents=["1-corpus", "2-finetune"],
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
            parents=["2-finetune", "3-augment"],
        ),
        "6-export": _seal(run, "6-export", "onnx", _onnx_metrics(), parents=["5-distill-prediction"]),
        "7-quantize": _seal(run, "7-quantize", "int8", _int8_metrics(), section=INT8_BOUNDS),
        "8-publish": _seal(
            run, "8-publish", "publication", {"versions": {"sst2": {"version": 1, "digest": "d1"}}}, **manifest
        ),
    }
    _write_rows(made["1-corpus"].path)
    examples = json.dumps([_augment_example(number) for number in range(20)])
    (made["3-augment"].path / "examples.json").write_text(examples, encoding="utf-8")
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
    shares = {"share_by_masked_lm": 0.6, "share_by_vectors": 0.4, "duplicates": 321}
    agreement = {"rows": 2000, "share": 0.905, "interval_95": [0.891, 0.917]}
    perplexity = {"copies_judged": 200, "originals": 12.0, "copies": 30.0, "ratio": 2.5, "ratio_95": [2.1, 2.9]}
    return {
        **counts,
        **shares,
        "replaced_words_per_copy": 3.25,
        "rows_without_words": 7,
        "agreement": {"originals": {**agreement, "share": 0.99}, "copies": agreement, "vectors": agreement},
        "perplexity": perplexity,
    }


def _augment_example(number: int) -> dict[str, Any]:
    return {
        "original": [["a ", False], ["good", True], [" film", False]],
        "copy": [["a ", False], [HOSTILE, True], [f" film {number}", False]],
        "label": "positive",
        "by_masked_lm": 1,
        "by_vectors": 0,
        "teacher": "negative",
        "teacher_probability": 0.875,
    }


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
    shared = {"metric": "accuracy", "agreement_fp32": 0.95, "agreement_teacher": 0.9, "excluded": [], "rows": 20}
    shared |= {"batch_logit_difference": 0.0, "fp32_logit_difference": 0.1, "p50_ms": {"1x16": 1.0, "1x32": 1.5}}

    def candidate(scheme: str, score: float, size_bytes: int, flips: float = 0.0) -> dict[str, Any]:
        measured = {"score": score, "scores": {"1": score, "64": score}, "drop": 0.95 - score, "flips": flips}
        return {"scheme": scheme, **measured, "size_bytes": size_bytes, **shared}

    fp32, static = candidate("fp32", 0.95, 57_000_000), candidate("static", 0.9, 14_900_000)
    dynamic, per_row = candidate("dynamic", 0.95, 15_000_000), candidate("per-row", 0.95, 15_000_000, flips=0.05)
    p50_ms = {"teacher PyTorch": 12.0, "teacher ONNX": 9.0, "student fp32": 2.0, "student INT8": 1.5}
    times = {
        name: {"1x32": {"p50_ms": p50, "p95_ms": 2 * p50, "p99_ms": 3 * p50, "calls": 99}}
        for name, p50 in p50_ms.items()
    }
    return {
        "validation": _measured(19),
        "test": _measured(ROWS - len(WRONG["int8"])),
        "scheme": "dynamic",
        "candidates": [fp32, dynamic, static, per_row],
        "validation_pairs": {"student fp32": paired | {"difference": 0.0, "difference_95": [-0.1, 0.1]}},
        "size_by_part": {
            "fp32": {"embeddings": 38_700_000, "head": 400_000},
            "int8": {"embeddings": 9_800_000, "head": 100_000},
        },
        "target_cpu": "avx2",
        "built_on_cpu": "amx",
        "weight_bits": 7,
        "host_warning": "made for avx2 and timed on amx: the times are not those of the target",
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
        (0, 0, True),
    ]


def test_rejected_int8_candidate_is_in_the_table(tmp_path: Path) -> None:
    fp32, dynamic, static, per_row = collect(tmp_path, make_run(tmp_path))["int8_candidates"]
    assert "drop_points" not in fp32
    assert dynamic["chosen"]
    assert (static["drop_points"], static["within_bound"], static["chosen"]) == (pytest.approx(5), False, False)
    assert (per_row["drop_points"], per_row["within_bound"]) == (0, False)  # its answers depend on the batch


def test_the_int8_section_tells_parts_and_processors(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path))
    assert facts["int8"]["size_by_part"]["head"] == {"fp32": 400_000, "int8": 100_000}
    text = markdown(facts)
    assert "| embeddings | 38.70 | 9.80 |" in text
    assert "of the kind avx2 with weights of 7 bits, on one of the kind amx. Take care: made for avx2 and timed" in text


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
    assert stages["5-distill-prediction"]["made_from"] == ["2-finetune", "3-augment"]


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
    assert len(rules) == 14
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
    facts = collect(tmp_path, make_run(tmp_path, leave_out=("3-augment",)))
    assert "augmentation" not in facts
    assert "Augmentation" not in markdown(facts)


def test_report_says_how_far_the_augmentation_can_be_trusted(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path))
    found = facts["augmentation"]
    assert (found["rows"], found["asked_rows"], found["duplicates"]) == (10_000, 11_170, 321)
    assert [row["kind"] for row in found["agreement"]] == ["originals", "all copies", "words by vectors only"]
    text = markdown(facts)
    assert "60.0 % of them by a masked language model (adapt) and 40.0 % by word vectors (package:glove)" in text
    assert "| all copies | 2,000 | 90.5 % (89.1 to 91.7) |" in text
    assert "12.0 of originals, 30.0 of copies (200 pairs; times 2.50, 95 % interval 2.10 to 2.90)" in text
    assert "were dropped" not in text
    assert "held-out texts" not in text


def test_page_shows_twenty_copies_with_what_was_replaced(tmp_path: Path) -> None:
    page = write_report(tmp_path, make_run(tmp_path)).read_text(encoding="utf-8")
    assert page.count("a <mark>good</mark> film") == 20
    assert "a <mark>&lt;script&gt;" in page
    assert "negative, 87.5 %" in page


def test_report_says_how_many_copies_were_dropped(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    more = {"max_disagreement": 0.5, "dropped_rows": 1500, "rows": 8500}
    text = markdown(collect(tmp_path, _changed(artifacts, "3-augment", metrics=_augment_metrics() | more)))
    assert "Augmentation made 10,000 training rows of 11,170" in text
    assert "1,500 copies were dropped" in text
    assert "total probability above 0.5; 8,500 rows are left" in text


def test_without_a_masked_lm_report_says_that_there_is_no_perplexity(tmp_path: Path) -> None:
    metrics = {name: value for name, value in _augment_metrics().items() if name not in ("perplexity", "agreement")}
    section = {"vectors": "package:glove", "masked_lm": None}
    text = markdown(collect(tmp_path, _changed(make_run(tmp_path), "3-augment", metrics=metrics, section=section)))
    assert "No masked language model was used" in text
    assert "teacher's label" not in text


def test_report_says_what_a_masked_lm_made_here_finds_again(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)

    def measured(share: float) -> dict[str, Any]:
        best = {"share": share, "interval_95": [share - 0.01, share + 0.01]}
        return {"test": {"texts": 10, "masked_tokens": 1234, "top_1": best, "top_15": best}}

    metrics = {
        "source": "package:base",
        "fresh_head": True,
        "provenance": ["the task's training rows", "reviews"],
        "tokens": 1_000_000,
        "at_start": measured(0.02),
        "at_end": measured(0.52),
    }
    artifacts["3-adapt"] = _seal(tmp_path, "3-adapt", "masked-lm", metrics)
    text = markdown(collect(tmp_path, artifacts))
    assert "with a fresh head, on 1,000,000 tokens of the task's training rows, and reviews" in text
    assert "| test | 1,234 | 2.0 % (1.0 to 3.0) | 52.0 % (51.0 to 53.0) |" in text


def test_examples_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    (artifacts["3-augment"].path / "examples.json").write_text("[")
    with pytest.raises(ArtifactError, match=r"examples.json cannot be read .*; run its stage again"):
        collect(tmp_path, artifacts)


def _changed(artifacts: dict[str, Artifact], name: str, **manifest: Any) -> dict[str, Artifact]:
    """The same build with other facts in one manifest."""
    found = artifacts[name]
    return artifacts | {name: Artifact(found.path, {**found.manifest, **manifest})}


def test_logits_of_other_rows_are_refused(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    np.save(artifacts["2-finetune"].path / "test.logits.npy", _logits([])[:5])
    with pytest.raises(ArtifactError, match=r"has 5 finite rows of 5, the test split 20"):
        collect(tmp_path, artifacts)


def test_run_without_a_finished_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no finished stage"):
        collect(tmp_path, {})


def test_reporting_needs_neither_torch_nor_datasets() -> None:
    code = "import sys, compressor.report; sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
