"""PyTorch classifiers written as ONNX graphs, by Optimum or by PyTorch's own exporter."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
from transformers import BertForSequenceClassification

from compressor import onnx_graph
from compressor.checkpoints import load_tokenizer
from compressor.classifier_graph import ClassifierGraph
from compressor.errors import ConfigError
from compressor.evaluate import INPUT_NAMES, MODEL_FILE
from compressor.progress import quiet_libraries
from compressor.triton_releases import IR_VERSION, OPSET, Format


def export_onnx(
    model: Path, folder: Path, *, exporter: str = "auto", form: Format | None = None, rewrite: bool = True
) -> str:
    """Export the classifier saved in `model` into `folder`, with configuration and tokenizer; returns the exporter.

    `auto` is Optimum where it can be imported, else PyTorch's own. Not to `rewrite` leaves the graph as the library
    computes it, every token through every layer. Raises ConfigError if the exporter asked for is missing.
    """
    source = BertForSequenceClassification.from_pretrained(model, local_files_only=True).eval()
    folder.mkdir(parents=True, exist_ok=True)
    graph = ClassifierGraph(source) if rewrite else source
    chosen = write_graph(graph, folder / MODEL_FILE, exporter=exporter, form=form)
    source.config.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return chosen


def write_graph(model: Any, path: Path, *, exporter: str = "auto", form: Format | None = None) -> str:
    """Write a classifier, or its `ClassifierGraph`, as an ONNX file and check it; returns the exporter.

    Raises ConfigError if the exporter asked for is missing.
    """
    chosen = _exporter() if exporter == "auto" else exporter
    if chosen == "optimum" and _exporter() != "optimum":
        raise ConfigError(
            'export.exporter is "optimum" and optimum-onnx cannot be imported; install it, or use "torch"'
        )
    write = _write_with_optimum if chosen == "optimum" else _write_with_torch
    with quiet_libraries():  # tracing warns of Python control flow; the parity gate is what decides
        write(model, path)
    graph = onnx.load(path)
    if isinstance(model, ClassifierGraph):
        onnx_graph.fix_shapes(graph)
    graph.ir_version = IR_VERSION if form is None else form.ir_version
    onnx.save(graph, path)
    onnx_graph.check(path)
    return chosen


def _exporter() -> str:
    try:
        import_module("optimum.exporters.onnx")
    except ImportError:  # not installed, or made for another transformers
        return "torch"
    return "optimum"


def _write_with_optimum(model: Any, path: Path) -> None:
    from optimum.exporters.onnx import export as write
    from optimum.exporters.tasks import TasksManager

    make_config = TasksManager.get_exporter_config_constructor(
        "onnx", model_type="bert", task="text-classification", library_name="transformers"
    )
    write(model, make_config(model.config, task="text-classification"), path, opset=OPSET)


def _write_with_torch(model: Any, path: Path) -> None:
    import torch

    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in INPUT_NAMES} | {"logits": {0: "batch_size"}}
    ids_BS = torch.ones(2, 16, dtype=torch.int64)
    inputs = {"input_ids": ids_BS, "token_type_ids": torch.zeros_like(ids_BS), "attention_mask": ids_BS}
    torch.onnx.export(
        model,
        (),
        str(path),
        kwargs=inputs,
        input_names=["input_ids", "attention_mask", "token_type_ids"],  # the order of the arguments
        output_names=["logits"],
        dynamic_axes=axes,
        opset_version=OPSET,
        dynamo=False,
    )
