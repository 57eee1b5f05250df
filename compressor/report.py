"""The report of a build: what was made from what, what it kept of the teacher, and what it cost.

`collect` makes one JSON object from the sealed artifacts; Markdown and HTML are written from that object alone. Nothing
is measured here and no model is loaded, so a report costs seconds and equal artifacts give equal bytes.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from compressor import machine
from compressor.artifact import Artifact
from compressor.dataset import task_of
from compressor.errors import ArtifactError
from compressor.evaluate import METRIC_NAMES, Labels, Logits, answers, paired, same_answers
from compressor.report_augmentation import augmentation, is_augmentation
from compressor.report_int8 import int8_candidates, int8_facts, int8_gates
from compressor.tasks import Task

RUN_FILE = "run.json"
SYSTEMS = {"teacher": "teacher", "student": "student fp32", "int8": "student INT8"}  # kind of artifact -> name
PAIRS = (("student", "teacher"), ("int8", "student"), ("int8", "teacher"))  # compared with the one it comes from
HEADLINE_SHAPE = "1x32"  # batch x tokens of the verdict and the plot
EXAMPLES = 10  # texts shown on which student and teacher disagree
TEXT_LIMIT = 300  # characters of such a text
USE_OF_SPLITS = {
    "train": "fits the models, and sets the ranges of static INT8",
    "validation": "chooses: the state of training that is kept, the INT8 scheme; and holds the gates",
    "test": "chooses nothing: it is only reported on",
}
# Colours that matplotlib writes, and what the page puts in their place, so that plots follow its light or dark scheme.
INK, STRONG, FAINT = "#010101", "#020202", "#030303"
PAGE_COLOURS = {INK: "currentColor", STRONG: "var(--strong)", FAINT: "var(--faint)"}


def write_report(run: Path, artifacts: Mapping[str, Artifact]) -> Path:
    """Write `report.json`, `report.md` and `report.html` into `run`; returns the path of the page.

    `artifacts` are by step name, in the order of the build; what a build does not have yet is left out. Raises
    ArtifactError if an artifact's files do not fit together, or the folder cannot be written.
    """
    facts = collect(run, artifacts)
    as_json = json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    texts = {"report.json": as_json, "report.md": markdown(facts), "report.html": html(facts)}
    try:
        for name, text in texts.items():
            partial = run / f"{name}.new"
            partial.write_text(text, encoding="utf-8")
            partial.replace(run / name)
    except OSError as error:
        raise ArtifactError(f"cannot write the report to {run}: {error.strerror}; free space there") from error
    return run / "report.html"


def collect(run: Path, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """The report as a JSON object, units in its keys; shares run from 0 to 1, what does not exist is left out."""
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
        "disagreements": _disagreements(task, texts, label_N, logits) if "int8" in parts else None,
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
    gates += int8_gates(_candidates(parts["int8"])) if "int8" in parts else []
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


def _disagreements(task: Task, texts: list[str], label_N: Labels, logits: Mapping[str, Logits]) -> dict[str, Any]:
    """Test texts that INT8 student and teacher answer differently: those that both are surest of, or furthest apart."""
    apart = np.flatnonzero(~same_answers(task, logits["teacher"], logits["int8"]))
    found = {kind: answers(task, logits[kind]) for kind in ("teacher", "int8")}
    if task.is_regression:
        weight_N = np.abs(found["teacher"] - found["int8"])
    else:
        surety = {kind: _confidence(logits[kind]) for kind in found}
        weight_N = np.minimum(surety["teacher"], surety["int8"])
    examples = []
    for row in apart[np.argsort(-weight_N[apart], kind="stable")][:EXAMPLES]:
        text = texts[row] if len(texts[row]) <= TEXT_LIMIT else texts[row][:TEXT_LIMIT] + "…"
        facts = {"row": int(row), "text": text, "label": _answer(task, label_N[row])}
        for kind, answer_N in found.items():
            facts[kind] = _answer(task, answer_N[row])
            if not task.is_regression:
                facts[kind] += f", {100 * surety[kind][row]:.1f} %"
        examples.append(facts)
    return {"split": "test", "count": len(apart), "rows": len(texts), "examples": examples}


def _answer(task: Task, value: Any) -> str:
    return f"{value:.2f}" if task.is_regression else task.labels[int(value)]


def _confidence(logits_NC: Logits) -> NDArray[np.float64]:
    """The largest probability (N,) of each row: 1 over the sum of the others' odds and its own."""
    odds_NC = np.exp(logits_NC.astype(np.float64) - logits_NC.max(axis=1, keepdims=True))
    return np.asarray(1 / odds_NC.sum(axis=1))


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
    shape, p50_ms = _headline(facts["latency"])
    batch, tokens = shape.split("x")
    size = _times(teacher["onnx_size_bytes"], student["onnx_size_bytes"], "smaller", "larger")
    texts = "one text" if batch == "1" else f"{batch} texts"
    speed, in_onnx = (
        _times(p50_ms[f"teacher {form}"], p50_ms["student INT8"], "faster", "slower") for form in ("PyTorch", "ONNX")
    )
    return (
        f"The INT8 student {'reaches' if ours > theirs else 'keeps'} {100 * ours / theirs:.1f} % of the teacher's test "
        f"{facts['task']['metric']} ({100 * ours:.1f} against {100 * theirs:.1f}), is {size} and answers "
        f"{texts} of {tokens} tokens {speed} than the teacher in PyTorch, {in_onnx} than the teacher in ONNX Runtime"
        f"{' (timed beside other work: do not publish these times)' if facts['latency']['machine_was_busy'] else ''}."
    )


def _headline(latency: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The shape that verdict and plot speak of, and the p50 of each system there."""
    shape = latency["headline_shape"]
    return shape, {name: times[shape]["p50_ms"] for name, times in latency["systems"].items()}


def _times(theirs: float, ours: float, less: str, more: str) -> str:
    return f"{theirs / ours:.1f} times {less}" if theirs >= ours else f"{ours / theirs:.1f} times {more}"


def markdown(facts: Mapping[str, Any]) -> str:
    """The report in Markdown, made from what `collect` gives."""
    return re.sub(r"\n{3,}", "\n\n", _render(facts, "markdown")).strip() + "\n"


def html(facts: Mapping[str, Any]) -> str:
    """The report as one page that needs no network, made from what `collect` gives."""
    systems = facts.get("systems", [])
    seconds = {row["stage"]: row["duration_s"] for row in facts["stages"]}
    plots = {"time": _svg("time", lambda axes: _bars(axes, seconds, "time, s", "{:,.0f} s"))}
    if systems:
        plots["metric"] = _svg("metric", lambda axes: _intervals(axes, systems, facts["task"]["metric"]))
    if sizes := {row["system"]: row["onnx_size_bytes"] / 1e6 for row in systems if "onnx_size_bytes" in row}:
        plots["size"] = _svg("size", lambda axes: _bars(axes, sizes, "ONNX file, MB", "{:.1f} MB"))
    if "latency" in facts:
        shape, p50_ms = _headline(facts["latency"])
        label = f"p50 of a call at {shape} (batch x tokens), ms, log scale"
        plots["latency"] = _svg("latency", lambda axes: _bars(axes, p50_ms, label, "{:.3g} ms", log=True))
    return _render(facts, "html", plots)


def _render(facts: Mapping[str, Any], form: str, plots: Mapping[str, str] | None = None) -> str:
    """One template says what the report says; its macros write headings and tables in either form."""
    jinja = Environment(autoescape=form == "html", undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"points": lambda share: f"{100 * share:.1f}"}
    jinja.filters |= {"plain": _plain, "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False)}
    text = (resources.files("compressor") / "templates" / "report.html").read_text(encoding="utf-8")
    return jinja.from_string(text).render(facts=facts, form=form, plots=plots)


def _plain(text: object) -> str:
    """`text` on one line, nothing in it read as Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(str(text).split()))


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    """A plot as an SVG element for a page: no prolog or date, ids of its own, colours of the page."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": INK}
    style |= {f"{part}.color": INK for part in ("xtick", "ytick")} | {"axes.labelcolor": INK, "axes.edgecolor": INK}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none", "ytick.major.size": 0}
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5, 2.4), layout="constrained")
        figure.patch.set_visible(False)
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = re.sub(r'(?s)^.*?(?=<svg)|<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", buffer.getvalue())
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub("|".join(PAGE_COLOURS), lambda found: PAGE_COLOURS[found[0]], text)


def _intervals(axes: Axes, systems: list[dict[str, Any]], metric: str) -> None:
    """The metric of each form on validation and test, with its interval."""
    for split, shift, colour in (("validation", -0.12, FAINT), ("test", 0.12, STRONG)):
        middle = np.array([100 * row[split]["score"] for row in systems])
        ends = np.array([[100 * end for end in row[split]["interval_95"]] for row in systems]).T
        places = np.arange(len(systems)) + shift
        axes.errorbar(
            middle, places, xerr=abs(ends - middle), label=split, color=colour, fmt="o", capsize=3, markersize=5
        )
    _name_rows(axes, [row["system"] for row in systems])
    axes.set_xlabel(f"{metric} x 100 (bars: 95 % interval)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)


def _bars(axes: Axes, values: Mapping[str, float], label: str, form: str, *, log: bool = False) -> None:
    """One value per row, written beside its mark: a bar from zero, or on a log scale, which has none, a dot."""
    lengths = list(values.values())
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlim(10 ** math.floor(math.log10(min(lengths))), 10 ** math.ceil(math.log10(2 * max(lengths))))
        axes.plot(lengths, range(len(values)), "o", color=STRONG)
    else:
        axes.barh(range(len(values)), lengths, height=0.5, color=STRONG)
        axes.margins(x=0.2)
    _name_rows(axes, list(values))
    axes.set_xlabel(label)
    for place, value in enumerate(lengths):
        axes.annotate(form.format(value), (value, place), xytext=(7, 0), textcoords="offset points", va="center")


def _name_rows(axes: Axes, names: list[str]) -> None:
    """Names at the left of the rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
