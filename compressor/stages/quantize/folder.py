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


def complete_folder(folder: Path, student: Path, task: Task, metrics: Mapping[str, Any], max_tokens: int) -> None:
    """Add what is beside `model.onnx`: config.json with the labels by name, tokenizer, provenance, card."""
    shutil.copyfile(student / "config.json", folder / "config.json")
    tokenizer = load_tokenizer(student)
    tokenizer.model_max_length = max_tokens
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.enable_truncation(max_tokens)
    tokenizer.save_pretrained(folder)
    provenance = {
        "task": task.name,
        "labels": list(task.labels),
        "max_tokens": max_tokens,
        "scheme": metrics["scheme"],
        "made_for_cpu": metrics["target_cpu"],
        "made_on": machine.fingerprint(),
        "versions": machine.versions(),
    }
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    (folder / CARD).write_text(card(task, metrics, max_tokens), encoding="utf-8")


def card(task: Task, metrics: Mapping[str, Any], max_tokens: int) -> str:
    """The model card: the hub's header, then what was measured."""
    chosen = next(row for row in metrics["candidates"] if row["scheme"] == metrics["scheme"])
    test, name = metrics["test"], METRIC_NAMES[task.metric]
    low, high = test["interval_95"]
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
      name: {task.name}
      type: {task.name}
      split: test
    metrics:
    - type: {task.metric}
      value: {test["score"]:.4f}
---

# {task.name}: INT8 classifier

Takes {texts} of at most {max_tokens} tokens and answers {answer}. A distilled BERT in INT8 for ONNX Runtime on CPUs
(scheme `{metrics["scheme"]}`, made for {metrics["target_cpu"]}, {metrics["weight_bits"]}-bit weights).

```python
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoTokenizer, pipeline

folder = "."
model = ORTModelForSequenceClassification.from_pretrained(folder, file_name="model.onnx")
classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
```

## Measured

- Test {name}: {100 * test["score"]:.1f} (95 % interval {100 * low:.1f} to {100 * high:.1f}, {test["rows"]} rows).
- Against the fp32 student, validation: loses {100 * chosen["drop"]:.2f} points in the worst batches;
  {100 * chosen["agreement_fp32"]:.1f} % of answers are the same.
- {100 * chosen["flips"]:.2f} % of answers depend on the batch that a text is in; logits of a text differ between
  batches by at most {chosen["batch_logit_difference"]:.1e}.
- Size: {metrics["size_bytes"] / 1e6:.2f} MB.

| p50 in ms, {metrics["threads"]} threads, batch x tokens | {" | ".join(shapes)} |
|---|{"---:|" * len(shapes)}
{rows}

| Part | fp32, MB | INT8, MB |
|---|---:|---:|
{parts}
"""
