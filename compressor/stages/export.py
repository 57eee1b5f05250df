"""export: student and teacher -> ONNX through Optimum, each proved against PyTorch on real validation texts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import artifact
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.config import ExportConfig
from compressor.dataset import ENCODED, Encoded, encode
from compressor.errors import GateError
from compressor.evaluate import MODEL_FILE, OnnxPredictor, TorchPredictor, same_answers
from compressor.progress import quiet_libraries
from compressor.tasks import Task
from compressor.world import available_cores

MODELS = ("student", "teacher")
OPSET = 18
PARITY_BATCHES = (1, 8, 33)
PARITY_ROWS = 256

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
    """Write `student/model.onnx` and `teacher/model.onnx` (fp32), with their tokenizers.

    Raises GateError if a graph's logits differ from PyTorch's by more than the bound on any validation text tried.
    """
    parents = {"student": student, "teacher": teacher, "corpus": corpus}
    with artifact.write(out, "onnx", key=key, section=config.model_dump(), parents=parents) as draft:
        for name, source in zip(MODELS, (student, teacher), strict=True):
            folder = draft.path / name
            export_onnx(source.path, folder)
            tokenizer = load_tokenizer(source.path)
            examples = encode(corpus, "validation", tokenizer, max_tokens, cache=out.parent / ENCODED)
            parity = measure_parity(folder / MODEL_FILE, source.path, task, examples)
            size_bytes = (folder / MODEL_FILE).stat().st_size
            draft.metrics[name] = {**parity, "bound": config.max_logit_difference, "size_bytes": size_bytes}
            line = (
                f"{name}: largest logit difference to PyTorch {parity['max_logit_difference']:.2e} on "
                f"{parity['rows']} validation texts (bound {config.max_logit_difference:.0e})"
            )
            log.info("export %s", line)
            if not parity["max_logit_difference"] <= config.max_logit_difference:
                raise GateError(f"parity gate: {line}; the same answer to {100 * parity['agreement']:.2f} %")
    return Artifact.open(out, kind="onnx")


def export_onnx(model: Path, folder: Path) -> None:
    """Export the classifier saved in `model` through Optimum into `folder`."""
    from optimum.exporters.onnx import main_export

    with quiet_libraries():  # tracing warns of Python control flow; the parity gate is what decides
        main_export(
            str(model), folder, task="text-classification", opset=OPSET, do_validation=False, local_files_only=True
        )


def measure_parity(graph: Path, model: Path, task: Task, examples: Encoded) -> dict[str, Any]:
    """Largest logit difference, and agreement, to PyTorch: in batches of several sizes, long and short mixed."""
    random = np.random.default_rng(0)
    rows = random.permutation(len(examples))[:PARITY_ROWS]
    length_N = examples.lengths(np.arange(len(examples)))
    rows[:2] = length_N.argmax(), length_N.argmin()
    batches = [
        examples.batch(rows[first : first + batch_size])
        for batch_size in PARITY_BATCHES
        for first in range(0, len(rows), batch_size)
    ]
    # One after the other: the threads of either would slow the other down.
    theirs_NC, mine_NC = (
        np.concatenate([predictor(batch.inputs) for batch in batches])
        for predictor in (TorchPredictor(load_classifier(model, task)), OnnxPredictor(graph, threads=available_cores()))
    )
    largest = _difference(mine_NC, theirs_NC)
    return {
        "max_logit_difference": largest,
        "agreement": float(same_answers(task, mine_NC, theirs_NC).mean()),
        "rows": len(rows),
        "batch_sizes": list(PARITY_BATCHES),
    }


def _difference(mine_NC: NDArray[np.float32], theirs_NC: NDArray[np.float32]) -> float:
    difference = float(np.abs(mine_NC - theirs_NC).max())
    return difference if np.isfinite(difference) else float(np.finfo(np.float32).max)  # nan compares as no difference
