"""int8: the INT8 student against fp32, against its own products measured alone, and in every batch of a server.

On one core times are of the processor as well: ONNX Runtime with one thread works in the thread that calls, so other
work on the machine changes them little.
Shape legend: B batch, S sequence, K input width.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks import report
from benchmarks.report import Table, number, ratio
from benchmarks.runs import Run, open_run
from compressor import machine
from compressor.checkpoints import load_tokenizer
from compressor.dataset import encode
from compressor.errors import GateError
from compressor.evaluate import MODEL_FILE, OnnxPredictor
from compressor.latency import SETTLE_S, WARMUP_CALLS, shaped_call, summary, time_in_turns
from compressor.onnx_export import export_onnx
from compressor.onnx_graph import constants, dense_products, remove_unused, word_embeddings
from compressor.stages.quantize.scoring import Scorer
from compressor.stages.quantize.stage import teacher_logits

ONE_CORE_TOKENS = (16, 32, 64)
PRODUCT = "MatMulIntegerToFloat"
MIN_SPEEDUP = {"1x32": 1.8, "1x128": 1.6}  # without VNNI the products alone gain 1.7 to 1.9, and the rest nothing
MAX_OVER_PRODUCTS = 1.7
MAX_DROP, MAX_LOGIT_DIFFERENCE, MAX_SHARE_OF_SIZE = 0.003, 1e-5, 0.26
ROUNDS, TURN_S = 8, 0.25

Call = Callable[[], object]
log = logging.getLogger(__name__)


def int8(path: Path, *, threads: int, seed: int, quick: bool, command: str) -> dict[str, Any]:
    """Measure the INT8 student of the build in `path`. Raises ArtifactError if it is missing or unfinished."""
    run = open_run(path)
    begun = report.Begun()
    graphs = {"fp32": run.onnx.path / "student" / MODEL_FILE, "int8": run.int8.path / MODEL_FILE}
    rounds, turn_s = (2, 0.05) if quick else (ROUNDS, TURN_S)
    words, positions = len(word_embeddings(onnx.load(graphs["int8"]))[1]), _positions(run)
    log.info("one core ...")
    one_core = {
        f"1x{tokens}": _on_one_core(_one_core_calls(graphs["int8"], tokens, words), rounds, turn_s)
        for tokens in ONE_CORE_TOKENS
        if tokens <= positions
    }
    log.info("fp32 against INT8, %d threads ...", threads)
    predictors = {name: OnnxPredictor(graph, threads=threads) for name, graph in graphs.items()}
    latency: dict[str, dict[str, Any]] = {}
    for shape in MIN_SPEEDUP:
        batch, tokens = map(int, shape.split("x"))
        if tokens <= positions:
            calls = {name: shaped_call(predictor, batch, tokens, words) for name, predictor in predictors.items()}
            times = time_in_turns(calls, rounds=rounds, turn_s=turn_s, seed=seed)
            latency[shape] = {name: summary(found) for name, found in times.items()}
            latency[shape]["speedup"] = ratio(latency[shape]["fp32"]["p50_ms"], latency[shape]["int8"]["p50_ms"])
            alone = {name: products_alone(graph, tokens)[0] for name, graph in graphs.items()}
            took = _on_one_core(alone, rounds, turn_s)
            latency[shape]["products_speedup"] = ratio(took["fp32"]["processor_ms"], took["int8"]["processor_ms"])
    log.info("graphs of the fp32 student ...")
    forms = {
        f"1x{tokens}": _on_one_core(calls, rounds, turn_s)
        for tokens, calls in _forms_of_the_graph(run, words, positions).items()
    }
    log.info("batches of a server ...")
    sizes = {name: graph.stat().st_size for name, graph in graphs.items()}
    return {
        "benchmark": "int8",
        "quick": quick,
        "scheme": run.int8.metrics["scheme"],
        "int8_cpu": machine.int8_cpu(),
        "products": _count_products(graphs["int8"]),
        "one_core": one_core,
        "latency": latency,
        "graph_forms": forms,
        "batches": _in_every_batch(run, graphs, threads),
        "size_bytes": sizes,
        "share_of_size": ratio(sizes["int8"], sizes["fp32"]),
        **report.context(begun, command=command, seed=seed, threads=threads),
    }


def _count_products(graph: Path) -> dict[str, int]:
    """How many dense products of a graph are in INT8, and how many in fp32."""
    in_int8 = [parts[0].op_type == PRODUCT for parts, _ in _products(onnx.load(graph))]
    return {"int8": sum(in_int8), "fp32": len(in_int8) - sum(in_int8)}


def _positions(run: Run) -> int:
    config = json.loads((run.onnx.path / "student" / "config.json").read_text(encoding="utf-8"))
    return int(config["max_position_embeddings"])


def _one_core_calls(graph: Path, tokens: int, words: int) -> dict[str, Call]:
    """The model, and its own products alone, on a text of so many tokens."""
    model = shaped_call(OnnxPredictor(graph, threads=1), 1, tokens, words)
    return {"model": model, "products": products_alone(graph, tokens)[0]}


def products_alone(graph: Path, tokens: int) -> tuple[Call, dict[str, tuple[int, ...]]]:
    """A call of nothing but the graph's dense products on one thread, and the shapes of their outputs.

    Each multiplies any numbers for a text of `tokens` tokens, in INT8 or fp32, as the graph has it. The products of the
    last layer behind its keys and values, and those of the head, have one row: [CLS]'s.
    """
    model = onnx.load(graph)
    values, nodes, outputs, feeds = constants(model), list[Any](), list[str](), dict[str, Any]()
    random = np.random.default_rng(0)
    for parts, width in _products(model):
        place = re.split(r"[/.]", parts[0].name.strip("/"))
        rows = 1 if place[0] in ("last", "head") and "kv" not in place else tokens
        in_int8 = parts[0].op_type == PRODUCT
        name = f"{'int8' if in_int8 else 'fp32'}_{rows}_{width}"
        feeds[name] = random.integers(0, 256, (rows, width)).astype(np.uint8 if in_int8 else np.float32)
        first, *more = map(copy.deepcopy, parts)
        first.input[0] = name
        for slot, read in enumerate(first.input[2:], start=2):
            if read and read not in values:  # a scale that the dynamic scheme computes
                first.input[slot] = "any_zero" if "zero" in read else "any_scale"
        nodes += [first, *more]
        outputs.append(nodes[-1].output[0])
    values |= {"any_zero": np.array(128, np.uint8), "any_scale": np.array(0.02, np.float32)}
    del model.graph.node[:], model.graph.input[:], model.graph.output[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    model.graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    )
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs)
    remove_unused(model)
    session = _session(model)
    found = dict(zip(outputs, session.run(outputs, feeds), strict=True))
    # In place: `run` would copy every output to NumPy, which is no work of the products.
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
    for name, value in found.items():
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(value))
    return partial(session.run_with_iobinding, binding), {name: value.shape for name, value in found.items()}


def _products(model: Any) -> list[tuple[tuple[Any, ...], int]]:
    """The nodes of each dense product, and the width of its input: those in INT8, then those in fp32."""
    values = constants(model)
    in_int8 = [((node,), len(values[node.input[1]])) for node in model.graph.node if node.op_type == PRODUCT]
    return in_int8 + [(item.nodes, len(item.weight_KN)) for item in dense_products(model)]


def _session(model: Any, disabled: tuple[str, ...] = ()) -> Any:
    """On one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = 1, 1, 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled))


def _forms_of_the_graph(run: Run, words: int, positions: int) -> dict[int, dict[str, Call]]:
    """By tokens: the fp32 student as the library computes it and as it is exported, with and without one fusion."""
    with tempfile.TemporaryDirectory() as scratch:
        export_onnx(run.student.path, Path(scratch) / "plain", rewrite=False)
        paths = {
            "library's": Path(scratch) / "plain" / MODEL_FILE,
            "classification's": run.onnx.path / "student" / MODEL_FILE,
        }
        fusion = {"": ("SkipLayerNormFusion",), " with SkipLayerNormalization": ()}
        sessions = {
            name + suffix: _session(path, disabled)
            for name, path in paths.items()
            for suffix, disabled in fusion.items()
        }
    return {
        tokens: {name: _call(session, tokens, words) for name, session in sessions.items()}
        for tokens in (16, 32, 128)
        if tokens <= positions
    }


def _call(session: Any, tokens: int, words: int) -> Call:
    ids_BS = np.random.default_rng(0).integers(0, words, size=(1, tokens), dtype=np.int64)
    feeds = {"input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "token_type_ids": np.zeros_like(ids_BS)}
    return lambda: session.run(["logits"], feeds)


def _on_one_core(calls: Mapping[str, Call], rounds: int, turn_s: float) -> dict[str, dict[str, float]]:
    """Median times of calls that take turns, in ms: of the wall's clock and of the processor."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(SETTLE_S)
            for _ in range(WARMUP_CALLS):
                call()
            end = time.perf_counter() + turn_s
            while time.perf_counter() < end:
                wall, busy = time.perf_counter_ns(), time.thread_time_ns()
                call()
                times[name].append(((time.perf_counter_ns() - wall) / 1e6, (time.thread_time_ns() - busy) / 1e6))
    return {
        name: dict(zip(("wall_ms", "processor_ms"), np.median(found, axis=0).tolist(), strict=True))
        for name, found in times.items()
    }


def _in_every_batch(run: Run, graphs: Mapping[str, Path], threads: int) -> dict[str, Any]:
    """The line of each graph in the table of candidates, measured again."""
    with tempfile.TemporaryDirectory() as scratch:
        fp32_rows, int8_rows = (
            encode(run.corpus, "validation", load_tokenizer(folder), run.max_tokens, cache=Path(scratch))
            for folder in (run.onnx.path / "student", run.int8.path)
        )
        told = teacher_logits(run.teacher, len(fp32_rows))
        scorer = Scorer(run.task, int8_rows, told, threads, fp32=graphs["fp32"], fp32_validation=fp32_rows)
        return {name: scorer.row(name, graph) for name, graph in graphs.items()}


def over_products(result: Mapping[str, Any]) -> dict[str, float | None]:
    """By shape: the model's processor time on one core over that of its products."""
    return {
        shape: ratio(found["model"]["processor_ms"], found["products"]["processor_ms"])
        for shape, found in result["one_core"].items()
    }


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError with every target that is missed."""
    row = result["batches"]["int8"]
    bounds = [
        (f"INT8 loses {100 * row['drop']:.2f} points in the worst batches", 100 * row["drop"], 100 * MAX_DROP),
        (f"{100 * row['flips']:.2f} % of answers depend on the batch", 100 * row["flips"], 0.0),
        (
            f"logits differ by {row['batch_logit_difference']:.1e} between batches",
            row["batch_logit_difference"],
            MAX_LOGIT_DIFFERENCE,
        ),
        (f"INT8 has {result['share_of_size']:.3f} of the size", result["share_of_size"], MAX_SHARE_OF_SIZE),
    ]
    bounds += [
        (f"at {shape} on one core the model takes {value:.2f} times its products", value, MAX_OVER_PRODUCTS)
        for shape, value in over_products(result).items()
        if value is not None
    ]
    missed = [f"{what}; the bound is {bound:g}" for what, value, bound in bounds if value > bound + 1e-12]
    if result["machine_was_busy"]:
        missed.append(
            f"{report.other_work(result)}, the bound is {machine.BUSY_PERCENT} %: run again on a quiet machine"
        )
    for shape, target in MIN_SPEEDUP.items():
        found = result["latency"].get(shape)
        if found and found["speedup"] < target:
            missed.append(f"at {shape} INT8 is {found['speedup']:.2f} times as fast; the target is {target:g}")
            if result["int8_cpu"] == "avx2":  # what cannot be met here is not met
                missed[-1] += (
                    f", which is for processors with VNNI: this one has none, and its products alone are "
                    f"{found['products_speedup']:.2f} times as fast"
                )
    if missed:
        raise GateError("; ".join(missed))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    over = over_products(result)
    alone = [
        [
            shape,
            *(number(found[what][clock], 3) for clock in ("processor_ms", "wall_ms") for what in ("model", "products")),
            number(over[shape]),
        ]
        for shape, found in result["one_core"].items()
    ]
    latency = [
        [
            shape,
            *(number(found[name]["p50_ms"], 3) for name in ("fp32", "int8")),
            *(number(found[name]) for name in ("speedup", "products_speedup")),
        ]
        for shape, found in result["latency"].items()
    ]
    forms = [
        [name, *(number(found[name]["processor_ms"], 3) for found in result["graph_forms"].values())]
        for name in next(iter(result["graph_forms"].values()))
    ]
    batches = [
        [
            name,
            *(number(100 * score, 2) for score in row["scores"].values()),
            number(100 * row["flips"], 2),
            f"{row['batch_logit_difference']:.1e}",
            number(100 * row["agreement_fp32"], 2),
            number(100 * row["agreement_teacher"], 2),
            number(row["size_bytes"] / 1e6),
        ]
        for name, row in result["batches"].items()
    ]
    metric = result["batches"]["fp32"]["metric"]
    compositions = [f"batch {name}" for name in result["batches"]["fp32"]["scores"]]
    return [
        Table(
            f"INT8 ({result['scheme']}) and its own products ({result['products']['int8']} in INT8, "
            f"{result['products']['fp32']} in fp32), one core, ms",
            ["batch x tokens", "model, processor", "products, processor", "model, wall", "products, wall", "ratio"],
            alone,
        ),
        Table(
            f"p50, ms, {result['threads']} threads",
            ["batch x tokens", "fp32", "INT8", "times as fast", "products alone, one core"],
            latency,
        ),
        Table("fp32 graphs, one core, processor ms", ["graph", *result["graph_forms"]], forms),
        Table(
            f"Validation {metric} x 100 in the batches of a server",
            ["graph", *compositions, "flips, %", "logit difference", "as fp32, %", "as teacher, %", "MB"],
            batches,
        ),
    ]
