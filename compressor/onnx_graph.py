"""ONNX graphs of classifiers: their constants, dense products and parts; tidied after export, and checked.

Shape legend: K input width, N output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from compressor.errors import GateError, ModelError

Array = NDArray[Any]
PARTS = ("embeddings", "attention", "feed-forward", "head")
NOTES = "compressor."  # how the names of our own entries in a graph's metadata begin


@dataclass(frozen=True)
class Dense:
    """A product with a constant weight, and the bias that is added to it."""

    name: str
    """Of the node that multiplies."""
    input: str
    output: str
    weight_KN: Array
    bias_N: Array | None
    nodes: tuple[Any, ...]
    """All nodes that it is made of."""


def constants(model: Any) -> dict[str, Array]:
    """Every constant of the graph by name; exporters write equal ones once, and the others as its Identity."""
    found = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Identity" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def dense_products(model: Any) -> list[Dense]:
    """The dense products in order: MatMul with the Add of its bias behind it, or Gemm."""
    values, found = constants(model), list[Dense]()
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in model.graph.node:
        if node.op_type == "Gemm" and node.input[1] in values:
            transposed = any(item.name == "transB" and item.i for item in node.attribute)
            weight = values[node.input[1]].T if transposed else values[node.input[1]]
            bias = values[node.input[2]] if len(node.input) > 2 else None
            found.append(Dense(node.name, node.input[0], node.output[0], weight, bias, (node,)))
        elif node.op_type == "MatMul" and node.input[1] in values:
            output, bias = node.output[0], None
            nodes: tuple[Any, ...] = (node,)
            after = readers.get(output, [])
            if len(after) == 1 and after[0].op_type == "Add":
                other = next((name for name in after[0].input if name != output), "")
                if other in values and values[other].ndim == 1:
                    output, nodes, bias = after[0].output[0], (node, after[0]), values[other]
            found.append(Dense(node.name, node.input[0], output, values[node.input[1]], bias, nodes))
    return found


def remove_unused(model: Any) -> None:
    """Drop nodes and constants that nothing reads, in place."""
    graph = model.graph
    while True:
        used = {name for node in graph.node for name in node.input} | {item.name for item in graph.output}
        unused = [node for node in graph.node if not used.intersection(node.output)]
        if not unused:
            break
        for node in unused:
            graph.node.remove(node)
    for item in [item for item in graph.initializer if item.name not in used]:
        graph.initializer.remove(item)


def fix_shapes(model: Any) -> None:
    """Reshapes that keep their first axes and give the others sizes of their own say so by constants, in place.

    Exporters compute these shapes from the input at every call, with a dozen small operators for each.
    """
    values, made_by = constants(model), {name: node for node in model.graph.node for name in node.output}
    shapes: dict[str, Any] = {}
    for node in model.graph.node:
        shape = made_by.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is None or shape.op_type != "Concat":
            continue
        sizes = [values.get(name) for name in shape.input]
        kept = next((place for place, size in enumerate(sizes) if size is not None), len(sizes))
        tail = [int(size.item()) for size in sizes[kept:] if size is not None]
        if kept + len(tail) == len(sizes):
            name = "shape_" + "_".join(map(str, [0] * kept + tail))
            shapes[name] = numpy_helper.from_array(np.array([0] * kept + tail, np.int64), name)
            node.input[1] = name
    model.graph.initializer.extend(shapes.values())
    remove_unused(model)


def inputs_of(model: Any) -> list[str]:
    """Names of the inputs."""
    return [item.name for item in model.graph.input]


def notes(path: Path) -> dict[str, str]:
    """What `compressor` wrote into the metadata of a graph: for INT8, the processor that it is made for."""
    found = onnx.load(path, load_external_data=False).metadata_props
    return {item.key.removeprefix(NOTES): item.value for item in found if item.key.startswith(NOTES)}


def check(path: Path) -> None:
    """Raise ModelError unless the file is a valid graph that a server of classifiers can take.

    Its inputs are int64 with two named axes, its one output is `logits`, and all of it is in one file.
    """
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{path} is no valid ONNX graph: {error}; export it again") from error
    model = onnx.load(path, load_external_data=False)
    faults = [
        f"input {item.name!r} is not int64 [batch, sequence]"
        for item in model.graph.input
        if item.type.tensor_type.elem_type != TensorProto.INT64
        or [bool(axis.dim_param) for axis in item.type.tensor_type.shape.dim] != [True, True]
    ]
    outputs = [item.name for item in model.graph.output]
    faults += [f"its outputs are {outputs}, not logits alone"] if outputs != ["logits"] else []
    outside = [item.name for item in model.graph.initializer if item.data_location == TensorProto.EXTERNAL]
    faults += [f"{len(outside)} of its tensors are in other files"] if outside else []
    read = {name for node in model.graph.node for name in node.input}
    faults += [f"input {item.name!r} is not used" for item in model.graph.input if item.name not in read]
    if faults:
        raise ModelError(f"{path} cannot be served: {'; '.join(faults)}; export it again")


def refuse_broken(path: Path) -> None:
    """Raise GateError if a constant of the graph is no number: parity would not name it, and INT8 would hide it."""
    values = constants(onnx.load(path))
    broken = [name for name, value in values.items() if value.dtype.kind == "f" and not np.isfinite(value).all()]
    if broken:
        raise GateError(
            f"finite gate: {path} has weights that are no numbers (NaN or infinite) in {', '.join(broken)}; the bound "
            "is 0; export a model whose training did not fail"
        )


def word_embeddings(model: Any) -> tuple[str, Array]:
    """Name and values of the table that `input_ids` are looked up in. Raises ModelError if there is none.

    Of an INT8 graph, which looks up twice, it is the table of 8-bit rows.
    """
    values = constants(model)
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in values:
            return node.input[0], values[node.input[0]]
    raise ModelError("the graph looks input_ids up in no table; export it again")


def part_of(name: str) -> str:
    """The part of the classifier that a node is in, by its name, which holds those of `ClassifierGraph`'s modules."""
    return next((part for part in PARTS if part.replace("-", "_") in name), "other")


def size_by_part(model: Any) -> dict[str, int]:
    """Bytes of the constants of each part; what is read by several counts for the first."""
    reader = {name: node.name for node in reversed(model.graph.node) for name in node.input}
    sizes = dict.fromkeys(PARTS, 0)
    for item in model.graph.initializer:
        part = part_of(reader.get(item.name, ""))
        sizes[part] = sizes.get(part, 0) + numpy_helper.to_array(item).nbytes
    for node in model.graph.node:
        if node.op_type == "Constant":
            part = part_of(node.name)
            sizes[part] = sizes.get(part, 0) + numpy_helper.to_array(node.attribute[0].t).nbytes
    return sizes
