"""quantize: the fp32 ONNX student -> INT8, by the fastest scheme that keeps the answers.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from compressor import artifact, machine, onnx_graph
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.config import QuantizeConfig
from compressor.dataset import ENCODED, Encoded, encode
from compressor.errors import ArtifactError
from compressor.evaluate import (
    MODEL_FILE,
    Logits,
    OnnxPredictor,
    Predictor,
    TorchPredictor,
    measure_splits,
    paired,
    predict,
)
from compressor.latency import SETTLE_S, shaped_call, summary, time_in_turns
from compressor.stages.quantize.aware_training import AwareTraining
from compressor.stages.quantize.choice import choose, slower_than_fp32
from compressor.stages.quantize.folder import complete_folder
from compressor.stages.quantize.scoring import Scorer, latency_shapes
from compressor.stages.quantize.search import FP32, TRIMMED, Host, Search
from compressor.stages.quantize.vocabulary import Pieces, trim, unknown_share, used_pieces
from compressor.tasks import Task
from compressor.world import available_cores

log = logging.getLogger(__name__)


def quantize(
    config: QuantizeConfig,
    task: Task,
    *,
    onnx_models: Artifact,
    student: Artifact,
    teacher: Artifact,
    corpus: Artifact,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
) -> Artifact:
    """Write a folder that serves by itself: `model.onnx` in INT8, configuration, tokenizer, model card.

    Every candidate is scored on the validation rows in the batches that a server makes. Raises GateError with the table
    if none is within the bounds. Test rows are touched once, by the winner.
    """
    exported = onnx_models.path / "student"
    onnx_graph.refuse_broken(exported / MODEL_FILE)
    parents = {"onnx": onnx_models, "student": student, "teacher": teacher, "corpus": corpus}
    section = config.model_dump() | {"max_tokens": max_tokens, "seed": seed}
    with artifact.write(out, "int8", key=key, section=section, parents=parents) as draft:
        threads, read = available_cores(), partial(_encoded, corpus, task, max_tokens, out.parent / ENCODED)
        whole = read(exported)
        source, encoded, kept_W = exported, whole, None
        if config.trim_vocabulary:
            source, encoded, kept_W = _trim(config, exported, whole, read, draft)
        train, validation = whole["train"], whole["validation"]
        host = Host.of(config.target_cpu)
        aware = AwareTraining(
            task=task,
            student=student.path,
            teacher=teacher.path,
            train=train,
            validation=validation,
            weight_bits=host.weight_bits,
            calibration_rows=config.calibration_rows,
            max_tokens=max_tokens,
            seed=seed,
            exported=onnx_models.metrics["student"],
        )
        told = teacher_logits(teacher, len(validation))
        search = Search(
            config=config,
            scorer=Scorer(
                task,
                encoded["validation"],
                told,
                threads,
                fp32=exported / MODEL_FILE,
                fp32_validation=validation,
                predictor=host.predictor,
            ),
            fp32=exported / MODEL_FILE,
            source=source / MODEL_FILE,
            train=encoded["train"],
            retrain=partial(retrained, aware, exported, kept_W, draft.path / "trained"),
            scratch=draft.path,
            threads=threads,
            seed=seed,
        )
        table = search.run()
        rivals = [row for row in table if row["scheme"] != TRIMMED]
        chosen = choose(rivals, search.bounds, search.hint)
        slower = slower_than_fp32(rivals, chosen)
        if slower:
            log.warning("quantize: %s", slower)
        model = draft.path / MODEL_FILE
        search.graphs[chosen].rename(model)
        for scheme, graph in search.graphs.items():
            if scheme not in (FP32, TRIMMED, chosen):
                graph.unlink()
        draft.metrics.update(measure_splits(host.predictor(model, threads=threads), task, encoded, draft.path))
        int8_NC = np.load(draft.path / "validation.logits.npy")
        fp32_NC = predict(OnnxPredictor(exported / MODEL_FILE, threads=threads), validation)
        pairs = {"student fp32": fp32_NC, "teacher": told}
        draft.metrics.update(
            scheme=chosen,
            candidates=table,
            validation_pairs={
                name: paired(task, int8_NC, other_NC, validation.label_N) for name, other_NC in pairs.items()
            },
            threads=threads,
            speed_warning=slower,
            **host.facts() | {"weight_bits": int(onnx_graph.notes(model)["weight_bits"])},
        )
        draft.metrics |= _speed_and_size(teacher, onnx_models, model, source, task, threads)
        origins = {"data": corpus.metrics["provenance"]}
        origins |= {name: parent.content for name, parent in parents.items() if name != "onnx"}
        complete_folder(draft.path, source, task, draft.metrics, max_tokens, origins)
        if source != exported:
            shutil.rmtree(source)
    return Artifact.open(out, kind="int8")


def _encoded(corpus: Artifact, task: Task, max_tokens: int, cache: Path, student: Path) -> dict[str, Encoded]:
    """The splits that are needed, as the tokenizer in `student` cuts them."""
    tokenizer = load_tokenizer(student)
    return {name: encode(corpus, name, tokenizer, max_tokens, cache=cache) for name in ("train", *task.held_out)}


def _trim(
    config: QuantizeConfig,
    exported: Path,
    whole: Mapping[str, Encoded],
    read: Callable[[Path], dict[str, Encoded]],
    draft: artifact.Draft,
) -> tuple[Path, dict[str, Encoded], Pieces]:
    """Write the exported student with the word pieces that are used; what gets lost by it goes into the metrics.

    Returns its folder, the splits as its tokenizer cuts them (`whole` has them uncut), and the pieces that are kept.
    """
    tokenizer = load_tokenizer(exported)
    kept_W = used_pieces(tokenizer, whole["train"], config.vocabulary_texts, config.vocabulary_column)
    source = trimmed(exported, kept_W, draft.path / "trimmed")
    log.info("quantize keeps %d of %d word pieces", len(kept_W), len(tokenizer))
    encoded = read(source)
    before = unknown_share(tokenizer, whole["validation"])
    after = unknown_share(load_tokenizer(source), encoded["validation"])
    log.info(
        "quantize: %.3f %% of the validation pieces were [UNK] before the trim, %.3f %% after",
        100 * before,
        100 * after,
    )
    draft.metrics["vocabulary"] = {
        "pieces": len(kept_W),
        "pieces_before": len(tokenizer),
        "unknown_before": before,
        "unknown": after,
    }
    return source, encoded, kept_W


def trimmed(exported: Path, kept_W: Pieces, folder: Path) -> Path:
    """Write the exported student with fewer word pieces; returns its folder."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    trim(exported, kept_W, folder)
    return folder


def retrained(aware: AwareTraining, exported: Path, kept_W: Pieces | None, folder: Path) -> Path:
    """Write the exported student once more, trained for INT8, with the same word pieces; returns its graph."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    aware.write(exported, folder)
    if kept_W is not None:
        whole, folder = folder, trimmed(folder, kept_W, folder.with_name(f"{folder.name}-trimmed"))
        shutil.rmtree(whole)
    return folder / MODEL_FILE


def teacher_logits(teacher: Artifact, rows: int) -> Logits:
    """What the teacher said to the validation rows. Raises ArtifactError if that is missing or of other rows."""
    path = teacher.path / "validation.logits.npy"
    try:
        logits_NC: Logits = np.load(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run the stage finetune again") from error
    if len(logits_NC) != rows:
        raise ArtifactError(f"{path} has {len(logits_NC)} rows, the validation split {rows}; run finetune again")
    return logits_NC


def _speed_and_size(
    teacher: Artifact, onnx_models: Artifact, int8: Path, student: Path, task: Task, threads: int
) -> dict[str, Any]:
    """What `time_systems` finds, and what the graph weighs."""
    time.sleep(SETTLE_S)  # our own threads are not other work
    graphs = {FP32: onnx_models.path / "student" / MODEL_FILE, "int8": int8}
    return {
        "cpu_in_use_percent": machine.in_use_percent(),
        "latency": time_systems(teacher, onnx_models, int8, student, task, threads),
        "size_bytes": int8.stat().st_size,
        "size_by_part": {name: onnx_graph.size_by_part(onnx.load(graph)) for name, graph in graphs.items()},
    }


def time_systems(
    teacher: Artifact, onnx_models: Artifact, int8: Path, student: Path, task: Task, threads: int
) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Latency of every form of the classifier, in turns, with the same threads: by system, then by batch x tokens.

    Positions and word pieces are those of the `student` that INT8 was made from.
    """
    vocabulary = len(onnx_graph.word_embeddings(onnx.load(student / MODEL_FILE))[1])
    torch.set_num_threads(threads)
    systems: dict[str, Predictor] = {
        "teacher PyTorch": TorchPredictor(load_classifier(teacher.path, task)),
        "teacher ONNX": OnnxPredictor(onnx_models.path / "teacher" / MODEL_FILE, threads=threads),
        "student fp32": OnnxPredictor(onnx_models.path / "student" / MODEL_FILE, threads=threads),
        "student INT8": OnnxPredictor(int8, threads=threads),
    }
    result: dict[str, dict[str, dict[str, float | int | None]]] = {name: {} for name in systems}
    for batch, tokens in latency_shapes(student):
        calls = {name: shaped_call(predictor, batch, tokens, vocabulary) for name, predictor in systems.items()}
        for name, times_ms in time_in_turns(calls).items():
            result[name][f"{batch}x{tokens}"] = summary(times_ms)
    return result
