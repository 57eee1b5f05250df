"""BERT-base in PyTorch, fp32, with random weights: its speed and size need no training."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.runs import Run, forms_of
from compressor.tasks import Task
from serving import triton
from serving.model import ServedModel
from serving.sources import Source

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification

BERT_BASE = "bert_base_pytorch"


def bert_base(task: Task, vocabulary: int) -> BertForSequenceClassification:
    """A classifier for the task that knows so many tokens, or those of bert-base-uncased if they are more."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    # The library's defaults are bert-base-uncased: 12 layers of 768, 12 heads, 30,522 words.
    config = BertConfig(num_labels=task.outputs)
    config.vocab_size = max(config.vocab_size, vocabulary)
    return BertForSequenceClassification(config).eval()


def write_repository(model: BertForSequenceClassification, run: Run, root: Path, cores: int) -> None:
    """Write a model repository that serves `model` as `BERT_BASE`, behind the same entry model as the run's student.

    One instance with a thread for each of the `cores`: that answers one text soonest, and texts that wait meanwhile
    share a batch.
    """
    forms, graph = forms_of(run), f"{BERT_BASE}_graph"
    weights, tokenizer = root / graph / "1" / "model", forms.student / "tokenizer.json"
    model.save_pretrained(weights)
    shutil.copyfile(Path(__file__).with_name("torch_runner.py"), weights.parent / "model.py")
    served = ServedModel(
        name=BERT_BASE,
        onnx=weights,  # no ONNX: the entry model asks the other one, as with the runtime `onnxruntime`
        tokenizer=tokenizer,
        runtime="onnxruntime",
        labels=run.task.labels,
        pair=run.task.is_pair,
        max_tokens=run.max_tokens,
        instances=1,
        intra_op_threads=cores,
    )
    source = Source(inputs=("input_ids", "attention_mask", "token_type_ids"), pad_id=forms.pad_id, warmups=())
    entry = root / BERT_BASE / "1"
    entry.mkdir(parents=True)
    (entry / "model.py").write_bytes(resources.files("serving.entry").joinpath("model.py").read_bytes())
    shutil.copyfile(tokenizer, entry / "tokenizer.json")
    configs = {
        BERT_BASE: triton.text_config(served, name=BERT_BASE, graph=graph, source=source),
        graph: triton.runner_config(served, name=graph, inputs=source.inputs),
    }
    for name, config in configs.items():
        (root / name / triton.LABELS_FILE).write_text("".join(f"{label}\n" for label in run.task.labels), "utf-8")
        (root / name / "config.pbtxt").write_text(triton.to_text(config), encoding="utf-8")
