"""bert-base: the INT8 student of a run against BERT-base in PyTorch fp32, with random weights.

Latency and size need no training.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.local import FULL, QUICK
from benchmarks.report import Table, number, ratio
from benchmarks.runs import Run, open_run
from compressor import machine
from compressor.errors import GateError
from compressor.evaluate import MODEL_FILE, OnnxPredictor, Predictor, TorchPredictor
from compressor.latency import shaped_call, summary

BATCH, TOKENS = 1, 32
MIN_SPEEDUP = 35.0
MIN_SHRINK = 24.0

log = logging.getLogger(__name__)


def against_bert_base(
    run_folder: Path, *, threads: int, seed: int, quick: bool, export: bool, command: str
) -> dict[str, Any]:
    """Time both in turns with the same threads, and compare sizes; with `export`, BERT-base's ONNX file is measured.

    Raises CompressorError if the run cannot be used.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from compressor.checkpoints import load_tokenizer

    run = open_run(run_folder)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    context = report.context(command=command, seed=seed, threads=threads)
    # The library's defaults are bert-base-uncased: 12 layers of 768, 12 heads, 30,522 words.
    base = BertForSequenceClassification(BertConfig(num_labels=run.task.outputs))
    vocabulary = min(base.config.vocab_size, len(load_tokenizer(run.int8.path)))
    student_file = run.int8.path / MODEL_FILE
    predictors: dict[str, Predictor] = {
        "bert_base_pytorch": TorchPredictor(base),
        "student_int8": OnnxPredictor(student_file, threads=threads),
    }
    calls = {name: shaped_call(predictor, BATCH, TOKENS, vocabulary) for name, predictor in predictors.items()}
    times = {name: summary(raw) for name, raw in (QUICK if quick else FULL).time(calls, seed).items()}
    parameters = base.num_parameters()
    size = exported_size(base, run) if export else 4 * parameters
    return {
        "benchmark": "bert-base",
        "task": run.task.name,
        "run": str(run_folder),
        "quick": quick,
        **context,
        "batch": BATCH,
        "tokens": TOKENS,
        "bert_base_parameters": parameters,
        "bert_base_size_bytes": size,
        "bert_base_size_is": "the exported ONNX file" if export else "4 bytes for each parameter",
        "student_int8_size_bytes": student_file.stat().st_size,
        "latency": times,
        "speedup_p50": ratio(times["bert_base_pytorch"]["p50_ms"], times["student_int8"]["p50_ms"]),
        "speedup_fastest": ratio(times["bert_base_pytorch"]["min_ms"], times["student_int8"]["min_ms"]),
        "min_speedup_p50": MIN_SPEEDUP,
        "shrink": ratio(size, student_file.stat().st_size),
        "min_shrink": MIN_SHRINK,
    }


def exported_size(model: Any, run: Run) -> int:
    """Bytes of `model` exported to ONNX in fp32, as the export stage does it."""
    from compressor.checkpoints import load_tokenizer
    from compressor.stages.export import export_onnx

    log.info("exporting BERT-base to ONNX ...")
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "onnx"
        model.save_pretrained(source)
        load_tokenizer(run.teacher.path).save_pretrained(source)
        export_onnx(source, target)
        return sum(file.stat().st_size for file in target.glob("model.onnx*"))


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError if the student is not as much faster and smaller as is promised, or if nobody can tell."""
    if result["machine_was_busy"]:
        raise GateError(
            f"{result['cpu_in_use_before_percent']:.0f} % of the processor was in use by other work, the bound is "
            f"{machine.BUSY_PERCENT} %: that slows PyTorch most and flatters the student; run again on a quiet machine"
        )
    missed = [
        f"{what} is {result[value]:.1f} times; the target is at least {result[bound]:.0f}"
        for what, value, bound in (
            ("the student's speed", "speedup_p50", "min_speedup_p50"),
            ("the student's smallness", "shrink", "min_shrink"),
        )
        if result[value] < result[bound]
    ]
    if missed:
        raise GateError("; ".join(missed))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    base, student = result["latency"]["bert_base_pytorch"], result["latency"]["student_int8"]
    rows = []
    for name, target in (("p50_ms", f"{MIN_SPEEDUP:.0f}"), ("p95_ms", ""), ("p99_ms", ""), ("min_ms", "")):
        times = number(ratio(base[name], student[name]), 1)
        rows.append([f"{name[:3]} latency in ms", number(base[name]), number(student[name]), times, target])
    sizes = [result["bert_base_size_bytes"], result["student_int8_size_bytes"]]
    rows.append(
        ["file MB", *(number(size / 1e6, 1) for size in sizes), number(result["shrink"], 1), f"{MIN_SHRINK:.0f}"]
    )
    title = (
        f"INT8 student against BERT-base (PyTorch fp32, random weights), batch {BATCH} x {TOKENS} tokens; "
        f"BERT-base's size is {result['bert_base_size_is']}"
    )
    return [Table(title, ["figure", "BERT-base", "student INT8", "times", "target at least"], rows)]
