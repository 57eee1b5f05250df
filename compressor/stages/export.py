"""export: student and teacher -> ONNX graphs made for classification, each proved against PyTorch on real texts.

Shape legend: B batch, S sequence, N rows, C outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from compressor import artifact, onnx_graph
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer, read_weights
from compressor.config import ExportConfig
from compressor.dataset import ENCODED, Encoded, Inputs, encode
from compressor.errors import GateError
from compressor.evaluate import FP16_FILE, MODEL_FILE, Logits, OnnxPredictor, TorchPredictor, same_answers
from compressor.models import score_scale
from compressor.onnx_export import export_onnx
from compressor.progress import quiet_libraries
from compressor.tasks import Task
from compressor.triton_releases import format_for
from compressor.world import available_cores

MODELS = ("student", "teacher")
PARITY_SHAPES = ((1, 1), (1, 128), (8, 33))  # rows x tokens, all of them real
PARITY_ROWS = 256
MIXED = 64  # rows of a batch of texts of all lengths

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
    by more than the bound on any validation text tried or if the model itself is broken, and ModelError if a graph
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
            found = _proved(name, folder / MODEL_FILE, source.path, task, encoded, config.max_logit_difference)
            facts |= found | {"size_by_part": onnx_graph.size_by_part(onnx.load(folder / MODEL_FILE))}
            if "gpu" in config.targets:
                write_fp16(folder / MODEL_FILE, folder / FP16_FILE)
                bound = config.max_logit_difference_fp16
                facts["fp16"] = _proved(f"{name} fp16", folder / FP16_FILE, source.path, task, encoded, bound)
            draft.metrics[name] = facts
    return Artifact.open(out, kind="onnx")


def refuse_broken(name: str, model: Path, max_outlier: float) -> None:
    """Raise GateError if a weight is no number, or if one row or column of a dense weight dwarfs the others.

    The graph would be as wrong as PyTorch, which parity does not show. In BERTs some states before a LayerNorm are very
    large and its scale makes them small again (in healthy students, rows of 60 times the median), so rows count with
    that scale.
    """
    weights = {key: tensor.float().numpy() for key, tensor in read_weights(model).items()}
    broken = [key for key, values in weights.items() if not np.isfinite(values).all()]
    if broken:
        raise GateError(
            f"finite gate: the {name} has weights that are no numbers (NaN or infinite) in {', '.join(broken)}; the "
            "bound is 0; train it again"
        )
    for key, weight_NK in weights.items():
        if weight_NK.ndim != 2 or "embeddings" in key:
            continue
        if key.endswith("output.dense.weight"):
            weight_NK = weight_NK * weights[key.replace("dense", "LayerNorm")][:, None]
        for what, norms in (("row", np.linalg.norm(weight_NK, axis=1)), ("column", np.linalg.norm(weight_NK, axis=0))):
            median = np.sort(norms)[(len(norms) - 1) // 2]  # of two, the smaller one
            if norms.max() > max_outlier * median > 0:
                raise GateError(
                    f"outlier gate: {what} {norms.argmax()} of the {name}'s {key} has {norms.max() / median:.0f} times "
                    f"the norm of the median {what}; the bound is {max_outlier:g} (export.max_weight_outlier); train "
                    "the model again, or raise the bound if it is meant to be so"
                )


def _proved(name: str, graph: Path, model: Path, task: Task, examples: Encoded, bound: float) -> dict[str, Any]:
    """What parity was measured. Raises GateError beyond the bound, or if weights or logits are no numbers."""
    onnx_graph.refuse_broken(graph)
    parity = measure_parity(graph, model, task, examples)
    largest = parity["max_logit_difference"]
    no_numbers = [shape for shape, difference in parity["by_shape"].items() if difference is None]
    if no_numbers:
        raise GateError(
            f"parity gate: {name}: logits that are no numbers (NaN or infinite) at {', '.join(no_numbers)}; the bound "
            f"on their difference to PyTorch is {bound:.0e}; look for weights that are not finite, or too large"
        )
    line = (
        f"{name}: largest logit difference to PyTorch {largest:.2e} on {parity['rows']} validation texts "
        f"(bound {bound:.0e})"
    )
    log.info("export %s", line)
    if not largest <= bound:
        shapes = ", ".join(f"{shape}: {difference:.2e}" for shape, difference in parity["by_shape"].items())
        raise GateError(
            f"parity gate: {line}; by rows x tokens {shapes}; the same answer to {100 * parity['agreement']:.2f} %"
        )
    return {**parity, "bound": bound, "size_bytes": graph.stat().st_size}


def write_fp16(source: Path, target: Path) -> None:
    """Write a graph with fp16 weights and arithmetic, for GPUs; its logits stay fp32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet_libraries():
        onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
    onnx_graph.check(target)


def measure_parity(graph: Path, model: Path, task: Task, examples: Encoded) -> dict[str, Any]:
    """Largest logit difference to PyTorch at several shapes, all texts real, and agreement on whole texts.

    A difference is None if logits on either side are no numbers. Scores of a regression without a range of its own
    count by their spread: a difference of 1e-5 is nothing to prices.
    """
    classifier = load_classifier(model, task)
    theirs, batches = TorchPredictor(classifier), dict(_parity_batches(examples, classifier.config))
    # One after the other: the threads of either would slow the other down.
    expected = {shape: [theirs(inputs) for inputs in found] for shape, found in batches.items()}
    mine = OnnxPredictor(graph, threads=available_cores())
    found = {shape: [mine(inputs) for inputs in inputs_of] for shape, inputs_of in batches.items()}
    whole = f"{MIXED}xmixed"
    mine_NC, theirs_NC = (np.concatenate(logits[whole]) for logits in (found, expected))
    _, unit = score_scale(task, theirs_NC)
    by_shape = {
        shape: difference(np.concatenate(found[shape]) / (unit or 1.0), np.concatenate(expected[shape]) / (unit or 1.0))
        for shape in batches
    }
    return {
        "max_logit_difference": max((value for value in by_shape.values() if value is not None), default=None),
        "by_shape": by_shape,
        "agreement": float(same_answers(task, mine_NC, theirs_NC).mean()),
        "rows": len(mine_NC),
    }


def _parity_batches(examples: Encoded, shape: Any) -> Iterator[tuple[str, list[Inputs]]]:
    """By rows x tokens: batches made of validation texts. The longest and the shortest are always among them."""
    rows = np.random.default_rng(0).permutation(len(examples))[:PARITY_ROWS]
    length_N = examples.lengths(np.arange(len(examples)))
    rows[:2] = [length_N.argmax(), length_N.argmin()][: len(rows)]  # there may be one
    for count, tokens in PARITY_SHAPES:
        yield f"{count}x{tokens}", [_full(examples, rows, count, min(tokens, shape.max_position_embeddings))]
    mixed = [examples.batch(rows[first : first + MIXED]).inputs for first in range(0, len(rows), MIXED)]
    yield f"{MIXED}xmixed", mixed


def _full(examples: Encoded, rows: Any, count: int, tokens: int) -> Inputs:
    """A batch of `count` rows of `tokens` tokens without padding: texts one after the other, cut to that length."""
    parts: list[list[Any]] = [[], []]
    needed, place = count * tokens, 0
    while sum(map(len, parts[0])) < needed:
        ids_BS, segment_BS, mask_BS = examples.batch(rows[[place % len(rows)]]).inputs
        size = int(mask_BS.sum())
        for part, values_BS in zip(parts, (ids_BS, segment_BS), strict=True):
            part.append(values_BS[0, :size])
        place += 1
    ids_BS, segment_BS = (np.concatenate(part)[:needed].reshape(count, tokens) for part in parts)
    return Inputs(ids_BS, segment_BS, np.ones_like(ids_BS))


def difference(mine_NC: Logits, theirs_NC: Logits) -> float | None:
    """The largest difference of two sets of logits; None if it is no number."""
    largest = float(np.abs(mine_NC - theirs_NC).max())
    return largest if np.isfinite(largest) else None
