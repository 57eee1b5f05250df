"""quantize: the fp32 ONNX student -> INT8, by the fastest scheme that keeps the accuracy.

Shape legend: V words, D hidden width, N rows, C classes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, assert_never

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from compressor import artifact, machine
from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.config import QuantizeConfig
from compressor.dataset import ENCODED, Encoded, encode
from compressor.errors import GateError
from compressor.evaluate import (
    INPUT_NAMES,
    METRIC_NAMES,
    MODEL_FILE,
    Logits,
    OnnxPredictor,
    Predictor,
    TorchPredictor,
    measure_splits,
    paired,
    predict,
    same_answers,
    scores,
)
from compressor.latency import SETTLE_S, shaped_call, summary, time_in_turns
from compressor.progress import quiet_libraries
from compressor.tasks import Task
from compressor.world import available_cores

Scheme = Literal["dynamic", "static"]
LATENCY_SHAPES = ((1, 16), (1, 32), (8, 32))  # batch, tokens
SERVED_BATCHES = (1, 64)
# Timings closer than this are noise; among such candidates the one whose answers depend less on the batch wins.
SAME_SPEED = 1.1
SMALLEST_TABLE = 50_000  # elements; smaller tables of embeddings are not worth a change

log = logging.getLogger(__name__)


def quantize(
    config: QuantizeConfig,
    task: Task,
    *,
    onnx_models: Artifact,
    teacher: Artifact,
    corpus: Artifact,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
) -> Artifact:
    """Write `model.onnx` in INT8 with its tokenizer, and time it beside the teacher and the fp32 student.

    Every candidate is scored on the validation rows in batches of 1 and of 64, the worse counts. Raises GateError with
    the table if none loses at most `config.max_metric_drop` against fp32. Test rows are touched once, by the winner.
    """
    student = onnx_models.path / "student"
    parents = {"onnx": onnx_models, "teacher": teacher, "corpus": corpus}
    with artifact.write(out, "int8", key=key, section=config.model_dump(), parents=parents) as draft:
        tokenizer = load_tokenizer(student)
        encoded = {
            name: encode(corpus, name, tokenizer, max_tokens, cache=out.parent / ENCODED)
            for name in ("train", *task.held_out)
        }
        threads = available_cores()
        graphs = {"fp32": student / MODEL_FILE}
        for scheme in config.candidates:
            graphs[scheme] = draft.path / f"{scheme}.onnx"
            with quiet_libraries():  # ONNX Runtime advises a pre-processing that changes nothing in these graphs
                quantize_graph(graphs["fp32"], graphs[scheme], scheme, encoded["train"], config.calibration_rows, seed)
        table = score(task, graphs, encoded["validation"], threads, len(tokenizer))
        chosen = choose(table, config.max_metric_drop)
        for scheme in config.candidates:
            if scheme != chosen:
                graphs[scheme].unlink()
        graphs[chosen].rename(draft.path / MODEL_FILE)
        metrics = measure_splits(OnnxPredictor(draft.path / MODEL_FILE, threads=threads), task, encoded, draft.path)
        draft.metrics.update(metrics, scheme=chosen, candidates=table, threads=threads)
        time.sleep(SETTLE_S)  # our own threads are not other work
        draft.metrics["cpu_in_use_percent"] = machine.in_use_percent()
        draft.metrics["latency"] = time_systems(
            teacher, onnx_models, draft.path / MODEL_FILE, task, threads, len(tokenizer)
        )
        draft.metrics["size_bytes"] = (draft.path / MODEL_FILE).stat().st_size
        tokenizer.save_pretrained(draft.path)
    return Artifact.open(out, kind="int8")


def quantize_graph(
    source: Path, target: Path, scheme: Scheme, calibration: Encoded, calibration_rows: int, seed: int
) -> None:
    """Write `source` to `target` with INT8 embeddings and INT8 products with constant weights.

    Weights are signed, symmetric, one scale per column; activations unsigned. The products of attention (activation by
    activation), LayerNorm, GELU, softmax and residual sums stay in fp32.
    """
    partial = target.with_suffix(".embeddings.onnx")
    model = onnx.load(source)
    quantize_embeddings(model)
    onnx.save(model, partial)
    dense = dense_products(model)
    options = {"WeightSymmetric": True, "ActivationSymmetric": False, "DefaultTensorType": TensorProto.FLOAT}
    # Without VNNI the sum of two products of 8 bits by 8 bits saturates in 16: weights get 7 bits.
    reduce_range = not {"avx512_vnni", "avx_vnni", "asimddp"} & set(machine.fingerprint()["cpu_flags"])
    match scheme:
        case "dynamic":
            quantize_dynamic(
                partial,
                target,
                per_channel=True,
                reduce_range=reduce_range,
                weight_type=QuantType.QInt8,
                nodes_to_quantize=dense,
                extra_options=options | {"MatMulConstBOnly": True},
            )
        case "static":
            quantize_static(
                partial,
                target,
                CalibrationTexts(calibration, calibration_rows, [item.name for item in model.graph.input], seed),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=reduce_range,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_quantize=dense,
                calibrate_method=CalibrationMethod.MinMax,
                extra_options=options | {"OpTypesToExcludeOutputQuantization": ["MatMul"]},
            )
            quantized = onnx.load(target)
            spare_other_consumers(quantized, set(dense))
            onnx.save(quantized, target)
        case _:
            assert_never(scheme)
    partial.unlink()
    onnx.checker.check_model(str(target))


def dense_products(model: onnx.ModelProto) -> list[str]:
    """Names of the matrix products whose second factor is a weight."""
    weights = {item.name for item in model.graph.initializer}
    return [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]


def spare_other_consumers(model: onnx.ModelProto, dense: set[str]) -> None:
    """Give residual sums the fp32 activations again, in place.

    The quantizer puts a pair of QuantizeLinear and DequantizeLinear behind an activation for everything that reads it;
    only the dense products are meant.
    """
    quantized_from = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    original = {
        node.output[0]: quantized_from[node.input[0]]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in quantized_from
    }
    for node in model.graph.node:
        if node.name not in dense:
            for place, name in enumerate(node.input):
                node.input[place] = original.get(name, name)


def quantize_embeddings(model: onnx.ModelProto) -> None:
    """Store embedding tables as INT8 with one scale per row, and look rows up before they are scaled back, in place."""
    graph = model.graph
    tables = {item.name: item for item in graph.initializer if int(np.prod(item.dims)) >= SMALLEST_TABLE}
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Gather" or node.input[0] not in tables:
            continue
        table = tables[node.input[0]]
        rows_VD, scale_V1 = quantize_rows(numpy_helper.to_array(table))
        rows, scales, output = f"{table.name}_int8", f"{table.name}_scale", node.output[0]
        added = [
            helper.make_node("Gather", [rows, node.input[1]], [f"{output}_int8"], name=f"{node.name}_int8", axis=0),
            helper.make_node(
                "Cast", [f"{output}_int8"], [f"{output}_cast"], name=f"{node.name}_cast", to=TensorProto.FLOAT
            ),
            helper.make_node("Gather", [scales, node.input[1]], [f"{output}_scale"], name=f"{node.name}_scale", axis=0),
            helper.make_node("Mul", [f"{output}_cast", f"{output}_scale"], [output], name=f"{node.name}_rescale"),
        ]
        graph.node.remove(node)
        for offset, new in enumerate(added):
            graph.node.insert(position + offset, new)
        graph.initializer.remove(table)
        graph.initializer.extend([numpy_helper.from_array(rows_VD, rows), numpy_helper.from_array(scale_V1, scales)])


def quantize_rows(table_VD: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Signed 8-bit rows and their scales (V, 1): row * scale is within half a step of the original."""
    scale_V1 = np.maximum(np.abs(table_VD).max(axis=1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    return np.rint(table_VD / scale_V1).astype(np.int8), scale_V1.astype(np.float32)


class CalibrationTexts(CalibrationDataReader):  # type: ignore[misc]  # ORT has no type hints
    """Training texts one by one at their own length: padding never sets a range."""

    def __init__(self, examples: Encoded, rows: int, inputs: list[str], seed: int) -> None:
        chosen = np.random.default_rng(seed).permutation(len(examples))[:rows]
        self._feeds = self._make(examples, chosen, inputs)

    @staticmethod
    def _make(examples: Encoded, rows: NDArray[np.int64], inputs: list[str]) -> Iterator[dict[str, NDArray[np.int64]]]:
        for row in rows:
            size = int(examples.lengths(np.array([row]))[0])
            feeds = dict(zip(INPUT_NAMES, examples.padded_to(size).batch(np.array([row])).inputs, strict=True))
            yield {name: feeds[name] for name in inputs}

    def get_next(self) -> dict[str, NDArray[np.int64]] | None:
        """The next text, or None at the end."""
        return next(self._feeds, None)


def score(
    task: Task, graphs: dict[str, Path], validation: Encoded, threads: int, vocabulary: int
) -> list[dict[str, Any]]:
    """One row per graph, fp32 first: the metric, flips between batches, agreement with fp32, size, latency."""
    predictors = {name: OnnxPredictor(path, threads=threads) for name, path in graphs.items()}
    latency: dict[str, dict[str, float]] = {name: {} for name in graphs}
    for batch, tokens in LATENCY_SHAPES:
        calls = {name: shaped_call(predictor, batch, tokens, vocabulary) for name, predictor in predictors.items()}
        for name, times_ms in time_in_turns(calls).items():
            latency[name][f"{batch}x{tokens}"] = float(np.median(times_ms))
    table = []
    fp32: Logits | None = None
    for name, predictor in predictors.items():
        alone_NC, together_NC = (predict(predictor, validation, batch) for batch in SERVED_BATCHES)
        fp32 = alone_NC if fp32 is None else fp32
        found = [scores(task, logits, validation.label_N)[task.metric] for logits in (alone_NC, together_NC)]
        table.append(
            {
                "scheme": name,
                "metric": task.metric,
                "score": min(found),
                "score_batch_1": found[0],
                "score_batch_64": found[1],
                "flips": float((~same_answers(task, alone_NC, together_NC)).mean()),
                "against_fp32": paired(task, fp32, alone_NC, validation.label_N),
                "size_bytes": graphs[name].stat().st_size,
                "p50_ms": latency[name],
            }
        )
    return table


def time_systems(
    teacher: Artifact, onnx_models: Artifact, int8: Path, task: Task, threads: int, vocabulary: int
) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Latency of every form of the classifier, in turns, with the same threads: by system, then by batch x tokens."""
    torch.set_num_threads(threads)
    systems: dict[str, Predictor] = {
        "teacher PyTorch": TorchPredictor(load_classifier(teacher.path, task)),
        "teacher ONNX": OnnxPredictor(onnx_models.path / "teacher" / MODEL_FILE, threads=threads),
        "student fp32": OnnxPredictor(onnx_models.path / "student" / MODEL_FILE, threads=threads),
        "student INT8": OnnxPredictor(int8, threads=threads),
    }
    result: dict[str, dict[str, dict[str, float | int | None]]] = {name: {} for name in systems}
    for batch, tokens in LATENCY_SHAPES:
        calls = {name: shaped_call(predictor, batch, tokens, vocabulary) for name, predictor in systems.items()}
        for name, times_ms in time_in_turns(calls).items():
            result[name][f"{batch}x{tokens}"] = summary(times_ms)
    return result


def choose(table: list[dict[str, Any]], max_metric_drop: float) -> str:
    """The fastest candidate within the bound; of equally fast ones, the one with the fewest flips.

    The first row is fp32. Raises GateError with the table if there is none.
    """
    fp32, *candidates = table
    for row in table:
        log.info("quantize %s", line(row, fp32["score"]))
    drops = {row["scheme"]: fp32["score"] - row["score"] for row in candidates}
    # The tolerance is for the rounding of shares of rows, not for the gate.
    passed = [row for row in candidates if drops[row["scheme"]] <= max_metric_drop + 1e-12]
    if not passed:
        rows = "; ".join(line(row, fp32["score"]) for row in table)
        best = min(drops, key=lambda scheme: drops[scheme])
        raise GateError(
            f"accuracy gate: the best INT8 candidate ({best}) loses {100 * drops[best]:.2f} points on the validation "
            f"rows; the bound is {100 * max_metric_drop:.2f} (quantize.max_metric_drop); {rows}"
        )
    fastest = min(speed(row) for row in passed)
    chosen = min((row for row in passed if speed(row) <= fastest * SAME_SPEED), key=lambda row: row["flips"])
    log.info(
        "quantize chose %s: loses %.2f points (bound %.2f)",
        chosen["scheme"],
        100 * drops[chosen["scheme"]],
        100 * max_metric_drop,
    )
    return str(chosen["scheme"])


def speed(row: dict[str, Any]) -> float:
    """Geometric mean of the p50 latencies, in ms."""
    return float(np.exp(np.mean(np.log(list(row["p50_ms"].values())))))


def line(row: dict[str, Any], fp32_score: float) -> str:
    """One row of the table in words."""
    lost = 100 * (row["score"] - fp32_score)
    return (
        f"{row['scheme']}: {METRIC_NAMES[row['metric']]} {100 * row['score']:.2f} ({lost:+.2f}), "
        f"{100 * row['flips']:.2f} % of answers flip between batch 1 and 64, "
        f"{row['size_bytes'] / 1e6:.1f} MB, {row['p50_ms']['1x32']:.2f} ms at 1x32"
    )
