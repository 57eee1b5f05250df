"""Sealed artifacts of a made-up build, for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from compressor import artifact
from compressor.artifact import Artifact
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
        "1-corpus": seal(run, "1-corpus", "examples", _corpus_metrics(), section=section),
        "2-finetune": seal(
            run,
            "2-finetune",
            "teacher",
            _model_metrics("teacher", 22_000_000, validate=True),
            section={"teacher": None},
        ),
        "3-augment": seal(
            run,
            "3-augment",
            "examples",
            augment_metrics(),
            section={"vectors": "package:glove", "masked_lm": "adapt"},
            parents=["1-corpus", "2-finetune"],
        ),
        "4-distill-intermediate": seal(
            run,
            "4-distill-intermediate",
            "student",
            _model_metrics("student", 14_000_000),
            section={"objective": "intermediate", "student": {"layers": 4, "hidden": 312, "init": "project"}},
        ),
        "5-distill-prediction": seal(
            run,
            "5-distill-prediction",
            "student",
            _model_metrics("student", 14_000_000, validate=True),
            section={"objective": "prediction"},
            parents=["2-finetune", "3-augment"],
        ),
        "6-export": seal(run, "6-export", "onnx", _onnx_metrics(), parents=["5-distill-prediction"]),
        "7-quantize": seal(run, "7-quantize", "int8", _int8_metrics(), section=INT8_BOUNDS),
        "8-publish": seal(
            run, "8-publish", "publication", {"versions": {"sst2": {"version": 1, "digest": "d1"}}}, **manifest
        ),
    }
    _write_rows(made["1-corpus"].path)
    examples = json.dumps([_augment_example(number) for number in range(20)])
    (made["3-augment"].path / "examples.json").write_text(examples, encoding="utf-8")
    for name, found in made.items():
        if found.manifest["kind"] in WRONG:
            np.save(run / name / "test.logits.npy", logits(WRONG[found.manifest["kind"]]))
    facts = {"compressor": "0.1.0", "recipe": "laptop", "config": {"seed": 42, "task": {"name": "sst2"}}}
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return {name: found for name, found in made.items() if name not in leave_out}


def seal(
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
        "files": {},
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


def augment_metrics() -> dict[str, Any]:
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


def measured(right: int) -> dict[str, Any]:
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
        "validation": measured(19),
        "test": measured(ROWS - len(WRONG[kind])),
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
        "validation": measured(19),
        "test": measured(ROWS - len(WRONG["int8"])),
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


def logits(wrong: list[int]) -> np.ndarray:
    """Right by 2 on every row but `wrong`, where the wrong label leads by 1 + a little more for later rows."""
    logits_NC = np.zeros((ROWS, 2), np.float32)
    logits_NC[np.arange(ROWS), LABELS] = 2
    for row in wrong:
        logits_NC[row] = 0
        logits_NC[row, 1 - LABELS[row]] = 1 + row / 100
    return logits_NC
