"""The report of a build, on made-up artifacts whose figures are worked out by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from compressor import statistics
from compressor.artifact import Artifact
from compressor.errors import ArtifactError
from compressor.report import collect, html, markdown, write_report
from compressor.tasks import TASKS
from tests.reporting import MACHINE, ROWS, STEPS, WRONG, augment_metrics, logits, make_run, measured, seal

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Run:
    """A made-up build, its report as facts, as Markdown and as a page; tests leave it as it is."""

    path: Path
    artifacts: Mapping[str, Artifact]
    facts: dict[str, Any]
    text: str
    page: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("run")
    artifacts = make_run(path)
    facts = collect(path, artifacts)
    page = write_report(path, artifacts).read_text(encoding="utf-8")
    return Run(path, artifacts, facts, (path / "report.md").read_text(encoding="utf-8"), page)


def pair(facts: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    return next(dict(row) for row in facts["comparisons"] if (row["first"], row["second"]) == (first, second))


def test_verdict_holds_ratio_size_and_speed(run: Run) -> None:
    assert run.facts["verdict"] == (
        "The INT8 student keeps 88.9 % of the teacher's test accuracy (80.0 against 90.0), is 6.0 times smaller "
        "and answers one text of 32 tokens 8.0 times faster than the teacher in PyTorch, 6.0 times faster than the "
        "teacher in ONNX Runtime."
    )


def test_verdict_says_so_when_the_student_is_larger_slower_and_better(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    metrics = artifacts["7-quantize"].manifest["metrics"]
    metrics["size_bytes"] = 180_000_000
    metrics["latency"]["student INT8"]["1x32"]["p50_ms"] = 18.0
    metrics["test"] = measured(19)
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


def test_int8_is_compared_with_the_teacher_row_by_row(run: Run) -> None:
    row = pair(run.facts, "student INT8", "teacher")
    # Right alone: INT8 on row 0; the teacher on rows 2, 3, 4. Exact p of 1 in 4: 2 * (1 + 4) / 16.
    assert (row["only_first_right"], row["only_second_right"], row["agreement"]) == (1, 3, 0.8)
    assert row["p_value"] == pytest.approx(0.625)
    assert row["difference"] == pytest.approx(-0.1)
    assert row["ratio"] == pytest.approx(16 / 18)
    assert row["meaning"].startswith("These 20 rows cannot show that the student INT8 and the teacher differ")


def test_a_loss_beyond_chance_is_called_a_loss(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    np.save(artifacts["7-quantize"].path / "test.logits.npy", logits(list(range(12))))
    meaning = pair(collect(tmp_path, artifacts), "student INT8", "teacher")["meaning"]
    assert meaning.startswith(
        "The student INT8 is worse than the teacher, by more than chance explains (-50.0 points; "
    )


def test_gates_state_value_and_bound(run: Run) -> None:
    assert [(gate["value"], gate["bound"], gate["passed"]) for gate in run.facts["gates"]] == [
        (pytest.approx(85), 50, True),
        (2e-6, 1e-4, True),
        (2e-6, 1e-4, True),
        (0, 0.5, True),
        (0, 0, True),
        (0, 1e-5, True),
    ]


def test_rejected_int8_candidate_is_in_the_table(run: Run) -> None:
    fp32, dynamic, static, per_row = run.facts["int8_candidates"]
    assert "drop_points" not in fp32
    assert dynamic["chosen"]
    assert (static["drop_points"], static["within_bound"], static["chosen"]) == (pytest.approx(5), False, False)
    assert (per_row["drop_points"], per_row["within_bound"]) == (0, False)
    assert per_row["faults"] == ["5.00 % of answers depend on the batch"]


def test_the_table_says_why_a_scheme_whose_logits_depend_on_the_batch_is_out(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    metrics = artifacts["7-quantize"].manifest["metrics"]
    metrics["candidates"][2] |= {"drop": 0.0, "batch_logit_difference": 0.13}
    facts = collect(tmp_path, artifacts)
    assert facts["int8_candidates"][2]["faults"] == ["logits differ between batches by 1.3e-01"]
    assert "| no: logits differ between batches by 1.3e-01 |" in markdown(facts)


@pytest.mark.parametrize(("upper", "within"), [(0.98, True), (0.96, False)])
def test_the_agreement_gate_is_one_of_the_gates(tmp_path: Path, upper: float, within: bool) -> None:
    artifacts = make_run(tmp_path)
    manifest = artifacts["7-quantize"].manifest
    manifest["section"]["min_agreement"] = 0.97
    manifest["metrics"]["candidates"][1]["agreement_fp32_95"] = [0.9, upper]
    facts = collect(tmp_path, artifacts)
    gate = next(gate for gate in facts["gates"] if "answers as fp32" in gate["gate"])
    assert (gate["value"], gate["rule"], gate["bound"]) == (100 * upper, "at least", 97)
    assert facts["int8_candidates"][1]["within_bound"] is gate["passed"] is within


@pytest.mark.parametrize(("difference", "within"), [(0.04, True), (0.3, False)])
def test_the_gate_of_a_regressions_scores_is_one_of_the_gates(tmp_path: Path, difference: float, within: bool) -> None:
    artifacts = make_run(tmp_path)
    artifacts["7-quantize"].manifest["metrics"]["candidates"][1]["score_difference_fp32"] = difference
    facts = collect(tmp_path, artifacts)
    gate = next(gate for gate in facts["gates"] if "scores as fp32" in gate["gate"])
    assert (gate["value"], gate["rule"], gate["bound"]) == (100 * difference, "at most", 25)
    assert facts["int8_candidates"][1]["within_bound"] is gate["passed"] is within


def test_the_int8_section_tells_parts_and_processors(run: Run) -> None:
    assert run.facts["int8"]["size_by_part"]["head"] == {"fp32": 400_000, "int8": 100_000}
    assert "| embeddings | 38.70 | 9.80 |" in run.text
    said = "of the kind avx2 with weights of 7 bits, on one of the kind amx. Take care: made for avx2 and timed"
    assert said in run.text


def test_disagreements_come_surest_first(run: Run) -> None:
    facts = run.facts["disagreements"]
    assert (facts["count"], [row["row"] for row in facts["examples"]]) == (4, [4, 3, 2, 0])
    first = facts["examples"][0]
    # Confidences: 1 / (1 + exp(-2)) and 1 / (1 + exp(-1.04)).
    assert (first["label"], first["teacher"], first["int8"]) == ("negative", "negative, 88.1 %", "positive, 73.9 %")


def test_calibration_of_teacher_and_student_by_hand(run: Run) -> None:
    found = run.facts["calibration"]
    teacher, student = found["systems"]["teacher"], found["systems"]["student INT8"]
    assert (found["split"], found["rows"], teacher["rows"]) == ("test", ROWS, ROWS)
    # 18 rows right at 1 / (1 + exp(-2)), two wrong at 1 / (1 + exp(-1)) and 1 / (1 + exp(-1.01)).
    sure, unsure = 1 / (1 + np.exp(-2)), [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-1.01))]
    assert [(row["low"], row["rows"], row["accuracy"]) for row in teacher["bins"]] == [(0.7, 2, 0.0), (0.8, 18, 1.0)]
    assert teacher["ece"] == pytest.approx((18 * (1 - sure) + sum(unsure)) / 20)
    assert teacher["overconfidence"] == pytest.approx((18 * sure + sum(unsure)) / 20 - 0.9)
    assert [row["rows"] for row in student["bins"]] == [4, 16]


def test_calibration_is_told_with_its_rows_and_what_chance_does(run: Run) -> None:
    chance = run.facts["calibration"]["systems"]["teacher"]["ece_by_chance"]
    assert f"| teacher | 18.0 % | {100 * chance:.1f} % | -3.4 |" in run.text
    assert "On 20 test texts, put into ten bins" in run.text
    assert "| teacher | 80 to 90 % | 18 | 88.1 % | 100.0 % (82.4 to 100.0) |" in run.text


def test_each_timed_form_stands_in_the_plot_of_latency_and_quality(run: Run) -> None:
    figure = run.page.partition('aria-label="Plot: test metric of each system')[2].partition("</figure>")[0]
    assert all(f">{name}</text>" in figure for name in ("teacher PyTorch", "teacher ONNX", "student INT8"))
    assert ">test accuracy x 100</text>" in figure


def test_a_regression_of_pairs_is_reported_by_its_correlation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 50)  # a correlation of each takes long
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


def test_stages_name_what_they_were_made_from(run: Run) -> None:
    stages = {row["stage"]: row for row in run.facts["stages"]}
    assert tuple(stages) == STEPS
    assert stages["5-distill-prediction"]["made_from"] == ["2-finetune", "3-augment"]


def test_stages_on_different_machines_are_told_apart(run: Run, tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path, machine={**MACHINE, "cores": 64}))
    assert [group["stages"] for group in facts["machines"]] == [list(STEPS[:-1]), ["8-publish"]]
    assert "ran on different machines" in markdown(facts)
    assert "different" not in run.text.partition("## Machine")[2]


def test_page_escapes_texts_and_loads_nothing(run: Run) -> None:
    assert "&lt;script&gt;" in run.page
    assert "<script" not in run.page
    assert not re.search(r"https?://|<link|<img|@import|src=|url\((?!#)", run.page)
    assert run.page.count('<figure role="img" aria-label="Plot: ') == 6


def test_page_is_well_formed_and_its_ids_are_unique(run: Run) -> None:
    page = Tags()
    page.feed(run.page)
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


def test_markdown_keeps_a_hostile_text_in_its_cell(run: Run) -> None:
    line = next(line for line in run.text.splitlines() if "script" in line)
    assert line.startswith(r"| \<script\>alert(1)\</script\> a\|b \*bold\* \& \[x\](y) \\ \`code\` | negative | ")
    assert len(re.findall(r"(?<!\\)\|", line)) == 5


def test_markdown_tables_have_no_gaps(run: Run) -> None:
    lines = run.text.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("|---")]
    assert len(rules) == 16
    for number in rules:
        assert lines[number - 2] == ""
        assert all(lines[near].startswith("| ") for near in (number - 1, number + 1))
        assert lines[number - 1].count("|") == lines[number].count("|")


def test_same_artifacts_give_same_bytes(run: Run) -> None:
    names = ("report.json", "report.md", "report.html")
    first = [(run.path / name).read_bytes() for name in names]
    write_report(run.path, run.artifacts)
    assert [(run.path / name).read_bytes() for name in names] == first
    assert not list(run.path.glob("*.new"))


def test_json_is_what_collect_gives(run: Run) -> None:
    written = json.loads((run.path / "report.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == 1
    assert written == json.loads(json.dumps(run.facts, allow_nan=False))


def test_every_key_of_the_json_is_documented(run: Run) -> None:
    of_builds, _ = (DOCS / "report.md").read_text(encoding="utf-8").split("# The comparison as JSON")
    documented = re.findall(r"^\| `(\w+)` \|", of_builds, re.MULTILINE)
    assert set(documented) == set(run.facts)


@pytest.mark.parametrize("finished", range(1, len(STEPS)))
def test_unfinished_build_reports_what_there_is(tmp_path: Path, finished: int) -> None:
    artifacts = make_run(tmp_path, leave_out=STEPS[finished:])
    (tmp_path / "run.json").unlink()
    page = html(collect(tmp_path, artifacts))
    assert ("There is no INT8 student yet" in page) == (finished < 7)
    assert "Recipe</h2>" not in page


def test_recipe_without_augmentation_says_nothing_of_it(tmp_path: Path) -> None:
    facts = collect(tmp_path, make_run(tmp_path, leave_out=("3-augment",)))
    assert "augmentation" not in facts
    assert "Augmentation" not in markdown(facts)


def test_report_says_how_far_the_augmentation_can_be_trusted(run: Run) -> None:
    found, text = run.facts["augmentation"], run.text
    assert (found["rows"], found["asked_rows"], found["duplicates"]) == (10_000, 11_170, 321)
    assert [row["kind"] for row in found["agreement"]] == ["originals", "all copies", "words by vectors only"]
    assert "60.0 % of them by a masked language model (adapt) and 40.0 % by word vectors (package:glove)" in text
    assert "| all copies | 2,000 | 90.5 % (89.1 to 91.7) |" in text
    assert "12.0 of originals, 30.0 of copies (200 pairs; times 2.50, 95 % interval 2.10 to 2.90)" in text
    assert "were dropped" not in text
    assert "held-out texts" not in text


def test_page_shows_twenty_copies_with_what_was_replaced(run: Run) -> None:
    assert run.page.count("a <mark>good</mark> film") == 20
    assert "a <mark>&lt;script&gt;" in run.page
    assert "negative, 87.5 %" in run.page


def test_report_says_how_many_copies_were_dropped(tmp_path: Path) -> None:
    artifacts = make_run(tmp_path)
    more = {"max_disagreement": 0.5, "dropped_rows": 1500, "rows": 8500}
    text = markdown(collect(tmp_path, _changed(artifacts, "3-augment", metrics=augment_metrics() | more)))
    assert "Augmentation made 10,000 training rows of 11,170" in text
    assert "1,500 copies were dropped" in text
    assert "total probability above 0.5; 8,500 rows are left" in text


def test_without_a_masked_lm_report_says_that_there_is_no_perplexity(tmp_path: Path) -> None:
    metrics = {name: value for name, value in augment_metrics().items() if name not in ("perplexity", "agreement")}
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
    artifacts["3-adapt"] = seal(tmp_path, "3-adapt", "masked-lm", metrics)
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
    np.save(artifacts["2-finetune"].path / "test.logits.npy", logits([])[:5])
    with pytest.raises(ArtifactError, match=r"has 5 finite rows of 5, the test split 20"):
        collect(tmp_path, artifacts)


def test_run_without_a_finished_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no finished stage"):
        collect(tmp_path, {})


def test_reporting_needs_neither_torch_nor_datasets() -> None:
    code = "import sys, compressor.report; sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
