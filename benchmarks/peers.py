"""What users would take instead of the INT8 file in plain ONNX Runtime, made from the same student.

Two kinds behind one small interface: a peer that reads token ids is timed beside the forms of the classifier, one that
reads texts beside our own way from text to label. Each is opened by a function of the forms and a number of threads.

Shape legend: B batch, S sequence, C classes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.forms import Forms
from compressor.errors import ConfigError, nearest
from serving.model import Text

if TYPE_CHECKING:
    from compressor.evaluate import Predictor

Classify = Callable[[Sequence[Text]], list[Any]]
"""Texts or pairs -> a label for each, or a number for each of a regression."""


@dataclass(frozen=True, kw_only=True)
class TokenPeer:
    """One that reads token ids, segments and mask, each (B, S), and gives logits (B, C)."""

    about: str
    open: Callable[[Forms, int], tuple[Predictor, int]]
    """Forms and threads -> the predictor, and the bytes of its weights."""
    needs: str
    """Package that must be installed."""
    reads_int8: bool = False
    """Whether it takes the INT8 file, whose vocabulary may be smaller."""


@dataclass(frozen=True, kw_only=True)
class TextPeer:
    """One that reads texts and gives labels."""

    about: str
    open: Callable[[Forms, int], tuple[Classify, int]]
    """Forms and threads -> what classifies, and the bytes of its weights."""
    needs: str
    """Package that must be installed."""


def _pipeline(forms: Forms, threads: int) -> tuple[Classify, int]:
    import torch
    from transformers import pipeline

    torch.set_num_threads(threads)
    pipe = pipeline(
        "text-classification", model=str(forms.student), device="cpu", truncation=True, max_length=forms.max_tokens
    )
    answer, more = ("label", {}) if forms.labels else ("score", {"function_to_apply": "none"})

    def classify(texts: Sequence[Text]) -> list[Any]:
        rows = [{"text": text[0], "text_pair": text[1]} if isinstance(text, tuple) else text for text in texts]
        # One text alone is passed as users pass it: a list of one goes the slower way of a data loader.
        found = pipe(rows, batch_size=len(rows), **more) if len(rows) > 1 else pipe(rows[0], **more)
        return [row[answer] for row in (found if isinstance(found, list) else [found])]

    return classify, (forms.student / "model.safetensors").stat().st_size


def _optimum(forms: Forms, threads: int) -> tuple[Classify, int]:
    import onnxruntime
    from optimum.onnxruntime import ORTModelForSequenceClassification
    from transformers import AutoTokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    tokenizer = AutoTokenizer.from_pretrained(forms.int8)
    model = ORTModelForSequenceClassification.from_pretrained(
        forms.int8, file_name=forms.int8_graph.name, provider="CPUExecutionProvider", session_options=options
    )

    def classify(texts: Sequence[Text]) -> list[Any]:
        columns = [list(column) for column in zip(*texts, strict=True)] if forms.is_pair else [list(texts)]
        inputs = tokenizer(*columns, padding=True, truncation=True, max_length=forms.max_tokens, return_tensors="np")
        logits_BC = model(**inputs).logits
        if not forms.labels:
            return [float(value) for value in logits_BC[:, 0]]
        return [model.config.id2label[index] for index in logits_BC.argmax(axis=1).tolist()]

    return classify, forms.int8_graph.stat().st_size


def _torch_dynamic(forms: Forms, threads: int) -> tuple[Predictor, int]:
    import torch
    from transformers import BertForSequenceClassification

    from compressor.evaluate import TorchPredictor

    torch.set_num_threads(threads)
    model = BertForSequenceClassification.from_pretrained(forms.student).eval()
    with warnings.catch_warnings():
        # PyTorch announces that it will go, and points to a package of its own; this is what it alone has on a CPU.
        warnings.simplefilter("ignore")
        quantize: Any = torch.ao.quantization.quantize_dynamic  # no type hints
        quantized = quantize(model, {torch.nn.Linear}, dtype=torch.qint8)
        saved = io.BytesIO()
        torch.save(quantized.state_dict(), saved)
    return TorchPredictor(quantized), saved.tell()


def _openvino(file: Path, threads: int) -> tuple[Predictor, int]:
    import openvino

    compiled = openvino.Core().compile_model(
        str(file), "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    )
    request, names = compiled.create_infer_request(), [port.get_any_name() for port in compiled.inputs]

    def predictor(inputs: Any) -> Any:
        input_ids_BS, segment_BS, mask_BS = inputs
        feeds = {"input_ids": input_ids_BS, "token_type_ids": segment_BS, "attention_mask": mask_BS}
        # A copy: the next call writes over the result.
        return np.array(request.infer({name: feeds[name] for name in names})[compiled.output(0)])

    return predictor, file.stat().st_size


PEERS: Mapping[str, TokenPeer | TextPeer] = {
    "transformers": TextPeer(
        about="transformers.pipeline with the student's PyTorch folder", open=_pipeline, needs="transformers"
    ),
    "optimum": TextPeer(
        about="Optimum's ORTModelForSequenceClassification with the same INT8 file", open=_optimum, needs="optimum"
    ),
    "torch-dynamic": TokenPeer(
        about="PyTorch's dynamic INT8 quantization of the student", open=_torch_dynamic, needs="torch"
    ),
    "openvino": TokenPeer(
        about="OpenVINO with the student's fp32 ONNX file",
        open=lambda forms, threads: _openvino(forms.student_onnx, threads),
        needs="openvino",
    ),
    "openvino-int8": TokenPeer(
        about="OpenVINO with the same INT8 file",
        open=lambda forms, threads: _openvino(forms.int8_graph, threads),
        needs="openvino",
        reads_int8=True,
    ),
}


def check_peers(names: Sequence[str]) -> None:
    """Raise ConfigError if one of the peers is unknown, or needs a package that is not installed."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peer {name} is unknown; {nearest(name, PEERS)}")
        if find_spec(PEERS[name].needs) is None:
            raise ConfigError(
                f"--peer {name} needs the package {PEERS[name].needs}, which is not installed; "
                "run `python -m pip install -c constraints.txt -e '.[peers]'`"
            )


def token_peers(names: Sequence[str]) -> dict[str, TokenPeer]:
    """Those of the peers that read token ids."""
    return {name: peer for name in names if isinstance(peer := PEERS[name], TokenPeer)}


def text_peers(names: Sequence[str]) -> dict[str, TextPeer]:
    """Those of the peers that read texts."""
    return {name: peer for name in names if isinstance(peer := PEERS[name], TextPeer)}
