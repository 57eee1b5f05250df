"""export: student and teacher -> ONNX graphs made for classification, each proved against PyTorch on real texts.

Shape legend: K input width, N output width, V rows of a table, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from transformers import BertForSequenceClassification

from compressor import artifact, onnx_graph
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer, read_weights
from compressor.config import ExportConfig
from compressor.dataset import ENCODED, Encoded, encode
from compressor.errors import GateError
from compressor.evaluate import FP16_FILE, METRIC_NAMES, MODEL_FILE, TorchPredictor, blind_score, predict, scores
from compressor.onnx_export import export_onnx
from compressor.onnx_graph import Array
from compressor.parity import prove
from compressor.progress import quiet_libraries
from compressor.tasks import Task
from compressor.triton_releases import format_for

MODELS = ("student", "teacher")

log = logging.getLogger(__name__)


def export(
    config: ExportConfig,
    task: Task,
    *,
    student: Artifact,
    teacher: Artifact,
    corpus: Artifact,
    max_tokens: int,
    key: str,
    out: Path,
) -> Artifact:
    """Write `student/` and `teacher/`, each with `model.onnx` (fp32), its configuration and its tokenizer.

    With the target `gpu`, `model.fp16.onnx` lies beside it. Raises GateError if a graph's logits differ from PyTorch's
    by more than the bound on any validation text tried or if a model itself is broken, and ModelError if a graph
    cannot be served.
    """
    parents = {"student": student, "teacher": teacher, "corpus": corpus}
    form = format_for(config.triton_release)
    if form.listed_release != config.triton_release:
        log.info(
            "export: Triton %s is not listed; its ONNX Runtime is taken to be that of %s, %s, or later",
            config.triton_release,
            form.listed_release,
            form.onnxruntime,
        )
    with artifact.write(out, "onnx", key=key, section=config.model_dump(), parents=parents) as draft:
        for name, source in zip(MODELS, (student, teacher), strict=True):
            folder = draft.path / name
            refuse_broken(name, source.path, config.max_weight_outlier)
            exporter = export_onnx(source.path, folder, exporter=config.exporter, form=form)
            encoded = encode(corpus, "validation", load_tokenizer(source.path), max_tokens, cache=out.parent / ENCODED)
            facts = {"exporter": exporter, "triton_release": config.triton_release, **vars(form)}
            model = load_classifier(source.path, task)
            bound = config.max_logit_difference
            found = prove(name, folder / MODEL_FILE, model, task, encoded, bound, max_tokens=max_tokens)
            facts |= found | {"size_by_part": onnx_graph.size_by_part(onnx.load(folder / MODEL_FILE))}
            if "gpu" in config.targets:
                write_fp16(folder / MODEL_FILE, folder / FP16_FILE)
                bound = config.max_logit_difference_fp16
                facts["fp16"] = prove(
                    f"{name} fp16", folder / FP16_FILE, model, task, encoded, bound, max_tokens=max_tokens
                )
            if name == "student":  # of a teacher its own stage made sure
                refuse_blind(name, model, task, encoded)
            draft.metrics[name] = facts
    return Artifact.open(out, kind="onnx")


def refuse_broken(name: str, model: Path, max_outlier: float) -> None:
    """Raise GateError if a weight is no number, or if one of its rows or columns dwarfs the others.

    The graph would be as wrong as PyTorch, which parity does not show.
    """
    weights = {key: tensor.float().numpy() for key, tensor in read_weights(model).items()}
    broken = [key for key, values in weights.items() if not np.isfinite(values).all()]
    if broken:
        raise GateError(
            f"finite gate: the {name} has weights that are no numbers (NaN or infinite) in {', '.join(broken)}; the "
            "bound is 0; train it again"
        )
    for key, what, norms, median, of in _norms(weights):
        if norms.max() > max_outlier * median > 0:
            raise GateError(
                f"outlier gate: {what} {norms.argmax()} of the {name}'s {key} has {norms.max() / median:.0f} times "
                f"the norm of the median {of}; the bound is {max_outlier:g} (export.max_weight_outlier); train "
                "the model again, or raise the bound if it is meant to be so"
            )


def _norms(weights: Mapping[str, Array]) -> Iterator[tuple[str, str, Array, float, str]]:
    """Of each weight: its name, row or column, their norms, the median to compare with, and of what that is.

    In BERTs some states before a LayerNorm are very large and its scale makes them small again (in healthy students,
    rows of 60 times the median), so what leads into one counts with that scale. The tables of embeddings are added up:
    a column of each counts by its root mean square, against those of the word table.
    """
    for key, weight_NK in weights.items():
        head, _, table = key.partition("embeddings.")
        if table.endswith("_embeddings.weight"):
            scale_D = weights[f"{head}embeddings.LayerNorm.weight"]
            words_D = _mean_squares(weights[f"{head}embeddings.word_embeddings.weight"] * scale_D)
            column_D = _mean_squares(weight_NK * scale_D)
            yield key, "column", column_D, _median(words_D), "column of the word table"
        elif weight_NK.ndim == 2 and not table:
            if key.endswith("output.dense.weight"):
                weight_NK = weight_NK * weights[key.replace("dense", "LayerNorm")][:, None]
            for axis, what in ((1, "row"), (0, "column")):
                norms = np.linalg.norm(weight_NK, axis=axis)
                yield key, what, norms, _median(norms), what


def _mean_squares(table_VD: Array) -> Array:
    """The root mean square of each column (D,)."""
    return np.asarray(np.sqrt(np.square(table_VD).mean(axis=0)))


def _median(norms: Array) -> float:
    """Of two, the smaller one."""
    return float(np.sort(norms)[(len(norms) - 1) // 2])


def refuse_blind(name: str, model: BertForSequenceClassification, task: Task, validation: Encoded) -> None:
    """Raise GateError unless a classifier does better on the validation rows than one answer to every text.

    What is broken in another way than one row or column of a weight, as by a huge bias, is found by this.
    """
    score = scores(task, predict(TorchPredictor(model), validation), validation.label_N)[task.metric]
    blind = blind_score(task, validation.label_N)
    if not score > blind:
        raise GateError(
            f"accuracy gate: the {name} has {METRIC_NAMES[task.metric]} {100 * score:.1f} on the {len(validation)} "
            f"validation rows, and the same answer to every text has {100 * blind:.1f}, which is the bound; look for "
            "weights that are far larger than others, and train it again"
        )


def write_fp16(source: Path, target: Path) -> None:
    """Write a graph with fp16 weights and arithmetic, for GPUs; its logits stay fp32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet_libraries():
        onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
    onnx_graph.check(target)
