"""What makes the INT8 folder serve by itself: configuration, tokenizer, labels, provenance, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor import machine
from compressor.checkpoints import load_tokenizer
from compressor.evaluate import METRIC_NAMES
from compressor.tasks import Task

CARD, PROVENANCE = "README.md", "provenance.json"
HUB_METRICS = {"matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}  # others are alike


def complete_folder(
    folder: Path, student: Path, task: Task, metrics: Mapping[str, Any], max_tokens: int, origins: Mapping[str, str]
) -> None:
    """Add what is beside `model.onnx`: config.json with the labels by name, tokenizer, provenance, card.

    `origins` is what it was made from: `data` in words, and the SHA-256 of `corpus`, `teacher` and `student`.
    """
    shutil.copyfile(student / "config.json", folder / "config.json")
    tokenizer = load_tokenizer(student)
    tokenizer.model_max_length = max_tokens
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.enable_truncation(max_tokens)
    tokenizer.save_pretrained(folder)
    made_on = machine.fingerprint()
    provenance = {
        "task": task.name,
        "labels": list(task.labels),
        "max_tokens": max_tokens,
        "made_from": dict(origins),
        "scheme": metrics["scheme"],
        "made_for_cpu": metrics["target_cpu"],
        "made_on": made_on,
        "versions": machine.versions(),
    }
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    (folder / CARD).write_text(card(task, metrics, max_tokens, made_on, origins), encoding="utf-8")


def card(
    task: Task, metrics: Mapping[str, Any], max_tokens: int, made_on: Mapping[str, Any], origins: Mapping[str, str]
) -> str:
    """The model card: the hub's header, then what was measured, on what, and what the model was made from.

    `made_on` is a machine's fingerprint, `origins` as for `complete_folder`.
    """
    chosen = next(row for row in metrics["candidates"] if row["scheme"] == metrics["scheme"])
    test, name = metrics["test"], METRIC_NAMES[task.metric]
    low, high = test["interval_95"]
    pair = metrics["validation_pairs"]["student fp32"]
    pair_low, pair_high = pair["difference_95"]
    doubt = ": no difference that these rows can show" if pair_low <= 0 <= pair_high else ""
    busy = ", too much to rely on them" if metrics["cpu_in_use_percent"] > machine.BUSY_PERCENT else ""
    warning = f" Take care: {metrics['host_warning']}." if metrics["host_warning"] else ""
    times = metrics["latency"]
    rows = "\n".join(
        f"| {system} | " + " | ".join(f"{found['p50_ms']:.2f}" for found in shapes.values()) + " |"
        for system, shapes in times.items()
    )
    shapes = list(next(iter(times.values())))
    parts = "\n".join(
        f"| {part} | {metrics['size_by_part']['fp32'].get(part, 0) / 1e6:.2f} | {size / 1e6:.2f} |"
        for part, size in metrics["size_by_part"]["int8"].items()
    )
    texts = "pairs of texts" if task.is_pair else "single texts"
    query = '{"text": "the first text", "text_pair": "the second"}' if task.is_pair else '"a text"'
    answer = "a number" if task.is_regression else f"one of {', '.join(task.labels)}"
    return f"""---
library_name: onnx
pipeline_tag: text-classification
tags:
- onnx
- int8
- bert
- compressor
model-index:
- name: {task.name}-int8
  results:
  - task:
      type: text-classification
    dataset:
      name: {json.dumps(origins["data"], ensure_ascii=False)}
      type: sha256-{origins["corpus"]}
      split: test
    metrics:
    - type: {HUB_METRICS.get(task.metric, task.metric)}
      value: {test["score"]:.4f}
---

# {task.name}: INT8 classifier

Takes {texts}, cut at {max_tokens} tokens, and answers {answer}. A distilled BERT in INT8 for ONNX Runtime on CPUs
(scheme `{metrics["scheme"]}`, made for {metrics["target_cpu"]}, {metrics["weight_bits"]}-bit weights).

```python
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoTokenizer, pipeline

folder = "."
model = ORTModelForSequenceClassification.from_pretrained(folder, file_name="model.onnx")
tokenizer = AutoTokenizer.from_pretrained(folder)
cut = {{"truncation": True, "max_length": {max_tokens}}}
classify = pipeline("text-classification", model=model, tokenizer=tokenizer, **cut)
print(classify([{query}]))
```

## Made from

- Data: {origins["data"]} (SHA-256 {origins["corpus"]}).
- Teacher: SHA-256 {origins["teacher"]}.
- Student: SHA-256 {origins["student"]}.

## Measured

- Test {name}: {100 * test["score"]:.1f} (95 % interval {100 * low:.1f} to {100 * high:.1f}, {test["rows"]} rows).
- Against the fp32 student, {metrics["validation"]["rows"]} validation rows: {name} {_points(pair["difference"])} points
  (95 % interval {_points(pair_low)} to {_points(pair_high)}{doubt});
  {100 * pair["agreement"]:.1f} % of answers are the same.
- In the batches that a server makes, {chosen["rows"]} validation rows: {_points(-chosen["drop"])} points in the worst;
  {100 * chosen["flips"]:.2f} % of answers depend on the batch, and logits of a text differ between batches by at most
  {chosen["batch_logit_difference"]:.1e}.
- Size: {metrics["size_bytes"] / 1e6:.2f} MB.

Times are of {made_on["processor"]}, {made_on["cores"]} cores ({" ".join(made_on["cpu_flags"])}); other work used
{metrics["cpu_in_use_percent"]:.0f} % of it before{busy}.{warning}

| p50 in ms, {metrics["threads"]} threads, batch x tokens | {" | ".join(shapes)} |
|---|{"---:|" * len(shapes)}
{rows}

| Part | fp32, MB | INT8, MB |
|---|---:|---:|
{parts}
"""


def _points(difference: float) -> str:
    """A difference of a metric in points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-0.00", "+0.00")
