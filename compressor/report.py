"""The report of a build: what was made from what, what it kept of the teacher, and what it cost.

`collect` makes one JSON object from the sealed artifacts; Markdown and HTML are written from that object alone. Nothing
is measured here and no model is loaded, so a report costs seconds and equal artifacts give equal bytes.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from compressor import machine, page
from compressor.artifact import RUN_FILE, Artifact
from compressor.dataset import task_of
from compressor.errors import ArtifactError
from compressor.evaluate import METRIC_NAMES, Labels, Logits, paired
from compressor.report_answers import calibrations, disagreements
from compressor.report_augmentation import augmentation, is_augmentation
from compressor.report_int8 import int8_candidates, int8_facts, int8_gates
from compressor.report_plots import headline, plots
from compressor.tasks import Task

TEMPLATE = "report.html"
FILES = ("report.json", "report.md", "report.html")
SYSTEMS = {"teacher": "teacher", "student": "student fp32", "int8": "student INT8"}  # kind of artifact -> name
PAIRS = (("student", "teacher"), ("int8", "student"), ("int8", "teacher"))  # compared with the one it comes from
HEADLINE_SHAPE = "1x32"  # batch x tokens of the verdict and the plot
USE_OF_SPLITS = {
    "train": "fits the models, and sets the ranges of static INT8",
    "validation": "chooses: the state of training that is kept, the INT8 scheme; and holds the gates",
    "test": "chooses nothing: it is only reported on",
}


def write_report(run: Path, artifacts: Mapping[str, Artifact]) -> Path:
    """Write `report.json`, `report.md` and `report.html` into `run`; returns the path of the page.

    `artifacts` are by step name, in the order of the build; what a build does not have yet is left out. Raises
    ArtifactError if an artifact's files do not fit together, or the folder cannot be written.
    """
    facts = collect(run, artifacts)
    as_json = json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    texts = dict(zip(FILES, (as_json, markdown(facts), html(facts)), strict=True))
    try:
        for name, text in texts.items():
            partial = run / f"{name}.new"
            partial.write_text(text, encoding="utf-8")
            partial.replace(run / name)
    except OSError as error:
        raise ArtifactError(f"cannot write the report to {run}: {error.strerror}; free space there") from error
    return run / "report.html"


def collect(run: Path, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """The report as a JSON object, units in its keys; shares run from 0 to 1, what does not exist is left out.

    Raises ArtifactError if there are no `artifacts`, or their files or the run's settings cannot be read or do not fit
    together.
    """
    if not artifacts:
        raise ArtifactError(f"{run} holds no finished stage to report on; run `compressor build`")
    metrics = {name: found.metrics for name, found in artifacts.items()}
    # The last of a kind counts: of the students, the one that is served.
    parts = {found.manifest["kind"]: found for found in artifacts.values() if not is_augmentation(found)}
    corpus = parts["examples"]
    task = task_of(corpus)
    texts, label_N = _test_rows(corpus, task)
    logits = {kind: _logits(parts[kind], len(texts)) for kind in SYSTEMS if kind in parts}
    facts = {
        "task": {
            "name": task.name,
            "labels": list(task.labels),
            "metric": METRIC_NAMES[task.metric],
            "metrics": {name: METRIC_NAMES[name] for name in task.metrics},
            "extra_splits": list(task.extra_files),
        },
        "recipe": _recipe(run),
        "data": {**corpus.metrics, "use": USE_OF_SPLITS | dict.fromkeys(task.extra_files, USE_OF_SPLITS["test"])},
        "augmentation": augmentation(artifacts),
        "models": _models(artifacts),
        "systems": _systems(parts, task),
        "comparisons": [_comparison(task, logits, *pair, label_N) for pair in PAIRS if set(pair) <= set(logits)],
        "gates": _gates(parts),
        "int8_candidates": _candidates(parts["int8"]) if "int8" in parts else None,
        "int8": int8_facts(parts["int8"].metrics, parts["int8"].manifest["section"]) if "int8" in parts else None,
        "latency": _latency(parts["int8"]) if "int8" in parts else None,
        "disagreements": disagreements(task, texts, label_N, logits) if "int8" in parts else None,
        "calibration": calibrations(task, {SYSTEMS[kind]: logits[kind] for kind in ("teacher", "int8")}, label_N)
        if "int8" in parts
        else None,
        "training": [{"stage": name, **found["history"]} for name, found in metrics.items() if "history" in found],
        "publication": parts["publication"].metrics if "publication" in parts else None,
        "stages": _stages(artifacts),
        "machines": _machines(artifacts),
    }
    return {"schema_version": 1, "verdict": _verdict(facts), **{name: value for name, value in facts.items() if value}}


def _recipe(run: Path) -> dict[str, Any] | None:
    """Name and full settings of the recipe, as the build wrote them down."""
    try:
        return dict(json.loads((run / RUN_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{run / RUN_FILE} cannot be read ({error}); run the build again") from error


def _models(artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """What the teacher was made from, and the student's shape and lessons."""
    models: dict[str, Any] = {}
    for found in artifacts.values():
        section = found.manifest["section"]
        if found.manifest["kind"] == "teacher":
            models |= {"teacher_source": found.metrics["source"], "teacher_adopted": bool(section.get("teacher"))}
        elif found.manifest["kind"] == "student":
            models.setdefault("objectives", []).append(section["objective"])
            models |= {"student": section["student"]} if "student" in section else {}
    return models


def _systems(parts: Mapping[str, Artifact], task: Task) -> list[dict[str, Any]]:
    """The metrics with intervals, parameters and size of the ONNX file: one row per form of the classifier."""
    metrics = {kind: found.metrics for kind, found in parts.items()}
    sizes = {**metrics.get("onnx", {}), "int8": metrics.get("int8", {})}
    rows = []
    for kind in filter(metrics.__contains__, SYSTEMS):
        found = {
            "parameters": metrics[kind].get("parameters"),
            "onnx_size_bytes": sizes.get(kind, {}).get("size_bytes"),
        }
        row = {"system": SYSTEMS[kind], **{split: metrics[kind][split] for split in task.held_out}}
        rows.append(row | {name: value for name, value in found.items() if value is not None})
    return rows


def _test_rows(corpus: Artifact, task: Task) -> tuple[list[str], Labels]:
    """Texts, pairs as one, and labels (N,) of the test split."""
    with pa.memory_map(str(corpus.path / "test.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
        texts = table["text"].to_pylist()
        if task.is_pair:
            texts = [f"{first} / {second}" for first, second in zip(texts, table["text_b"].to_pylist(), strict=True)]
        return texts, table["label"].to_numpy()


def _logits(model: Artifact, rows: int) -> Logits:
    """Logits (N, C) that a model gave on the test split. Raises ArtifactError if they do not fit its rows."""
    path = model.path / "test.logits.npy"
    try:
        logits_NC: Logits = np.load(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run its stage again") from error
    finite = int(np.isfinite(logits_NC).all(axis=1).sum())
    if not len(logits_NC) == rows == finite:
        raise ArtifactError(f"{path} has {finite} finite rows of {len(logits_NC)}, the test split {rows}; run again")
    return logits_NC


def _comparison(task: Task, logits: Mapping[str, Logits], first: str, second: str, label_N: Labels) -> dict[str, Any]:
    """Two forms on the same test rows: agreement, McNemar, difference and ratio with their intervals."""
    facts = paired(task, logits[first], logits[second], label_N)
    row = {"first": SYSTEMS[first], "second": SYSTEMS[second], "split": "test", "rows": len(label_N), **facts}
    return {**row, "meaning": _meaning(row, METRIC_NAMES[task.metric])}


def _meaning(row: Mapping[str, Any], metric: str) -> str:
    """What a comparison shows, in a sentence."""
    first, second, points = row["first"], row["second"], 100 * row["difference"]
    low, high = (100 * end for end in row["difference_95"])
    p_value = row["p_value"] if metric == "accuracy" else None
    size = f"({points:+.1f} points; 95 % interval {low:+.1f} to {high:+.1f}"
    size += f", McNemar p = {p_value:.2g})" if p_value is not None else ")"
    if p_value < 0.05 if p_value is not None else low > 0 or high < 0:
        word = "better" if points > 0 else "worse"
        return f"The {first} is {word} than the {second}, by more than chance explains {size}."
    return f"These {row['rows']} rows cannot show that the {first} and the {second} differ in {metric} {size}."


def _gates(parts: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """What had to hold, with the measured value and its bound."""
    gates = []
    if "teacher" in parts:
        metrics = parts["teacher"].metrics
        low, blind = metrics["validation"]["interval_95"][0], metrics["blind"]
        metric = METRIC_NAMES[metrics["validation"]["metric"]]
        name = f"teacher better than the same answer to every text (validation {metric}, low end of its interval)"
        gates.append((name, 100 * low, "above", 100 * blind, "%", low > blind))
    for model, facts in (parts["onnx"].metrics if "onnx" in parts else {}).items():
        value, bound = facts["max_logit_difference"], facts["bound"]
        name = f"{model} ONNX equal to PyTorch (largest logit difference, {facts['rows']} validation texts)"
        gates.append((name, value, "at most", bound, "logits", value <= bound))
    gates += int8_gates(parts["int8"].metrics, parts["int8"].manifest["section"]) if "int8" in parts else []
    return [dict(zip(("gate", "value", "rule", "bound", "unit", "passed"), gate, strict=True)) for gate in gates]


def _candidates(int8: Artifact) -> list[dict[str, Any]]:
    return int8_candidates(int8.metrics, int8.manifest["section"])


def _latency(int8: Artifact) -> dict[str, Any]:
    """Times of a call by system and shape (batch x tokens), and what they hold for."""
    measured = int8.metrics["latency"]
    shapes = list(next(iter(measured.values())))
    return {
        "threads": int8.metrics["threads"],
        "cpu_in_use_percent": int8.metrics["cpu_in_use_percent"],
        "machine_was_busy": int8.metrics["cpu_in_use_percent"] > machine.BUSY_PERCENT,
        "input": "random token ids without padding; the systems take turns of many calls, each after a pause; "
        "tokenizing is not included",
        "processor": int8.manifest["machine"]["processor"],
        "headline_shape": HEADLINE_SHAPE if HEADLINE_SHAPE in shapes else shapes[0],
        "systems": measured,
    }


def _stages(artifacts: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    names = {found.manifest["key"]: name for name, found in artifacts.items()}  # two may have the same content
    rows = []
    for name, found in artifacts.items():
        facts = found.manifest
        parents = dict.fromkeys(names.get(parent["key"], role) for role, parent in facts["parents"].items())
        row = {"stage": name, "made_from": list(parents), "duration_s": facts["seconds"]}
        rows.append({**row, "peak_memory_gb": facts["peak_memory_gb"], "finished": facts["finished"]})
    return rows


def _machines(artifacts: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Machines and versions, each with the stages that ran on them: usually one."""
    groups: dict[str, dict[str, Any]] = {}
    for name, found in artifacts.items():
        facts = {"machine": found.manifest["machine"], "versions": found.manifest["versions"]}
        groups.setdefault(json.dumps(facts, sort_keys=True), {"stages": [], **facts})["stages"].append(name)
    return list(groups.values())


def _verdict(facts: Mapping[str, Any]) -> str:
    """The build in a sentence."""
    systems = {row["system"]: row for row in facts["systems"]}
    if "student INT8" not in systems:
        return f"There is no INT8 student yet: the last finished stage is {facts['stages'][-1]['stage']}."
    teacher, student = systems["teacher"], systems["student INT8"]
    ours, theirs = student["test"]["score"], teacher["test"]["score"]
    shape, p50_ms = headline(facts["latency"])
    batch, tokens = shape.split("x")
    size = times(teacher["onnx_size_bytes"], student["onnx_size_bytes"], "smaller", "larger")
    texts = "one text" if batch == "1" else f"{batch} texts"
    speed, in_onnx = (
        times(p50_ms[f"teacher {form}"], p50_ms["student INT8"], "faster", "slower") for form in ("PyTorch", "ONNX")
    )
    return (
        f"The INT8 student {kept(ours, theirs)} the teacher's test "
        f"{facts['task']['metric']} ({100 * ours:.1f} against {100 * theirs:.1f}), is {size} and answers "
        f"{texts} of {tokens} tokens {speed} than the teacher in PyTorch, {in_onnx} than the teacher in ONNX Runtime"
        f"{' (timed beside other work: do not publish these times)' if facts['latency']['machine_was_busy'] else ''}."
    )


def kept(ours: float, theirs: float) -> str:
    """How much of another's metric ours is; no share of a metric that is not above 0, as a correlation can be."""
    if min(ours, theirs) <= 0:
        return "is compared with"
    return f"{'reaches' if ours > theirs else 'keeps'} {100 * ours / theirs:.1f} % of"


def times(theirs: float, ours: float, less: str, more: str) -> str:
    """How many times less ours is than theirs, or more."""
    return f"{theirs / ours:.1f} times {less}" if theirs >= ours else f"{ours / theirs:.1f} times {more}"


def markdown(facts: Mapping[str, Any]) -> str:
    """The report in Markdown, made from what `collect` gives."""
    return page.render(TEMPLATE, form="markdown", facts=facts)


def html(facts: Mapping[str, Any]) -> str:
    """The report as one page that needs no network, made from what `collect` gives."""
    return page.render(TEMPLATE, form="html", plots=plots(facts), facts=facts)
