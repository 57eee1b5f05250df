"""fp32 graphs rewritten in INT8: dense products and embedding tables; all else stays as it is.

LayerNorm, GELU, softmax, the products of attention (activation by activation) and residual sums stay in fp32. Products
are ONNX Runtime's MatMulIntegerToFloat, which multiplies in INT8, scales back and adds the bias in one pass.
Shape legend: V rows of a table, D width, K input width, N output width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compressor import onnx_graph
from compressor.onnx_graph import Dense
from compressor.stages.quantize.calibration import Activation
from compressor.stages.quantize.candidates import Candidate, Dynamic, PerRow, Static

RUNTIME = "com.microsoft"  # domain of ONNX Runtime's own operators
SMALLEST_TABLE = 50_000  # elements; smaller tables of embeddings are not worth a change
SMALLEST_OUTPUT = 8  # columns; a classifier of a few labels stays in fp32
UNSIGNED_ZERO = 128  # what an unsigned 8-bit number for 0 is
TINY = np.finfo(np.float32).tiny

Floats = NDArray[np.float32]


def quantize_graph(
    source: Path,
    target: Path,
    candidate: Candidate,
    activations: Mapping[str, Activation] | None = None,
    *,
    excluded: Collection[str] = (),
    weight_bits: int = 8,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write `source` to `target` in INT8.

    Static schemes need `activations`. `excluded` products stay in fp32. `notes` become metadata of the file. Weights
    are symmetric, activations unsigned. `weight_bits` is for signed weights; unsigned ones have 8.
    """
    model = onnx.load(source)
    if candidate.embeddings:
        quantize_embeddings(model)
    writer = _Writer(model, candidate, activations or {}, weight_bits)
    dense = [item for item in products(model) if item.name not in excluded]
    for item in dense:
        writer.replace(item)
    if dense:
        model.opset_import.append(helper.make_opsetid(RUNTIME, 1))
    onnx_graph.remove_unused(model)
    for key, value in (notes or {}).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, target)
    onnx_graph.check(target)


def products(model: Any) -> list[Dense]:
    """The dense products that are worth INT8."""
    return [item for item in onnx_graph.dense_products(model) if item.weight_KN.shape[1] >= SMALLEST_OUTPUT]


def quantize_embeddings(model: Any) -> None:
    """Store embedding tables as INT8 with one scale per row, and look rows up before they are scaled back, in place."""
    graph, tables = model.graph, {item.name: item for item in model.graph.initializer if _is_large(item)}
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type not in ("Gather", "Slice") or node.input[0] not in tables:
            continue
        table, output = tables[node.input[0]], node.output[0]
        rows_VD, scale_V1 = quantize_rows(numpy_helper.to_array(table))
        graph.initializer.extend(
            [
                numpy_helper.from_array(rows_VD, f"{table.name}_int8"),
                numpy_helper.from_array(scale_V1, f"{table.name}_scale"),
            ]
        )
        added = [_copy(node, suffix, table.name) for suffix in ("_int8", "_scale")]
        cast, product = f"{output}_cast", node.name + "_rescale"
        added.append(
            helper.make_node("Cast", [f"{output}_int8"], [cast], name=f"{node.name}_cast", to=TensorProto.FLOAT)
        )
        added.append(helper.make_node("Mul", [cast, f"{output}_scale"], [output], name=product))
        graph.node.remove(node)
        for offset, new in enumerate(added):
            graph.node.insert(position + offset, new)
    onnx_graph.remove_unused(model)


def _is_large(table: Any) -> bool:
    return len(table.dims) == 2 and int(np.prod(table.dims)) >= SMALLEST_TABLE


def _copy(node: Any, suffix: str, table: str) -> Any:
    """The same look-up in another table."""
    found = type(node)()
    found.CopyFrom(node)
    found.name += suffix
    found.input[0], found.output[0] = table + suffix, node.output[0] + suffix
    return found


def quantize_rows(table_VD: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Signed 8-bit rows and their scales (V, 1): row * scale is within half a step of the original."""
    scale_V1 = np.maximum(np.abs(table_VD).max(axis=1, keepdims=True) / 127, TINY)
    return np.rint(table_VD / scale_V1).astype(np.int8), scale_V1.astype(np.float32)


def quantize_columns(weight_KN: Floats, bits: int, *, per_channel: bool) -> tuple[NDArray[np.int8], Floats]:
    """Signed columns of `bits` bits and their scales: (N,), or one for all."""
    largest = 2 ** (bits - 1) - 1
    size = np.abs(weight_KN).max(axis=0 if per_channel else None)
    scale = np.maximum(size / largest, TINY).astype(np.float32)
    return np.clip(np.rint(weight_KN / scale), -largest, largest).astype(np.int8), scale


def as_unsigned(weight_KN: NDArray[np.int8]) -> NDArray[np.uint8]:
    """The same numbers around 128: without VNNI, ONNX Runtime multiplies these in 16 bits, where nothing saturates."""
    return (weight_KN.astype(np.int16) + UNSIGNED_ZERO).astype(np.uint8)


def smoothing(activation: Activation, weight_KN: Floats) -> Floats:
    """What each channel (K,) is divided by, and its weights multiplied with: both sides carry equal parts.

    Source: SmoothQuant, arXiv:2211.10438, with alpha 1/2.
    """
    size_K = np.maximum(np.maximum(-activation.low_K, activation.high_K), 1e-5)
    factor_K = np.sqrt(size_K / np.maximum(np.abs(weight_KN).max(axis=1), 1e-5))
    return np.asarray(factor_K / np.exp(np.log(factor_K).mean()), dtype=np.float32)


@dataclass
class _Writer:
    """Puts INT8 products in the place of fp32 ones."""

    model: Any
    candidate: Candidate
    activations: Mapping[str, Activation]
    weight_bits: int
    _quantized: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By activation: its 8-bit form, its scale and zero point."""
    _constants: set[str] = field(default_factory=set)

    def replace(self, dense: Dense) -> None:
        """Write one product in INT8."""
        name, weight_KN = dense.name.strip("/").replace("/", "."), dense.weight_KN
        place = list(self.model.graph.node).index(dense.nodes[0])
        nodes: list[Any] = []
        if isinstance(self.candidate, Static) and self.candidate.smooth:
            factor_K = smoothing(self.activations[dense.input], weight_KN)
            weight_KN = weight_KN * factor_K[:, None]
            x, scale, zero = self._smoothed(dense.input, name, factor_K, nodes)
        else:
            x, scale, zero = self._activation(dense.input, name, nodes)
        weight, columns, weight_zero = self._weight(weight_KN, name)
        bias = "" if dense.bias_N is None else self._constant(f"{name}.bias", dense.bias_N)
        if isinstance(self.candidate, PerRow):
            one, product = self._constant("one", np.float32(1)), f"{dense.output}.product"
            self._runtime(nodes, [x, weight, one, columns, zero, weight_zero], product, name)
            rescaled = dense.output if not bias else f"{dense.output}.rescaled"
            _add(nodes, "Mul", [product, scale], rescaled, f"{name}.rescale")
            if bias:
                _add(nodes, "Add", [rescaled, bias], dense.output, f"{name}.add")
        else:
            self._runtime(nodes, [x, weight, scale, columns, zero, weight_zero, bias], dense.output, name)
        for node in dense.nodes:
            self.model.graph.node.remove(node)
        for offset, node in enumerate(nodes):
            self.model.graph.node.insert(place + offset, node)

    def _weight(self, weight_KN: Floats, name: str) -> tuple[str, str, str]:
        """8-bit form, scales and zero point of a weight; signed ones need no zero point."""
        unsigned = self.candidate.weights == "unsigned"
        bits, zero = 8 if unsigned else self.weight_bits, ""
        rounded_KN, scale = quantize_columns(weight_KN, bits, per_channel=self.candidate.per_channel)
        if unsigned:
            zero = self._constant("middle", np.uint8(UNSIGNED_ZERO))
        weight = self._constant(f"{name}.int8", as_unsigned(rounded_KN) if unsigned else rounded_KN)
        return weight, self._constant(f"{name}.scale", scale), zero

    def _activation(self, x: str, name: str, nodes: list[Any]) -> tuple[str, str, str]:
        """8-bit form, scale and zero point of an activation; made once for all that read it."""
        if x in self._quantized:
            return self._quantized[x]
        found = f"{x}.int8", f"{x}.scale", f"{x}.zero"
        match self.candidate:
            case Dynamic():
                nodes.append(helper.make_node("DynamicQuantizeLinear", [x], list(found), name=f"{name}.quantize"))
            case Static(method=method):
                low, high = self.activations[x].range(method)
                found = self._fixed(x, low, high, name, nodes)
            case PerRow():
                found = f"{x}.int8", f"{x}.scale", self._constant("middle", np.uint8(UNSIGNED_ZERO))
                one, steps = self._constant("one", np.float32(1)), self._constant("step", np.float32(1 / 127))
                last = self._constant("last_axis", np.array([-1], np.int64))
                _add(nodes, "Abs", [x], f"{x}.size", f"{name}.size")
                _add(nodes, "ReduceMax", [f"{x}.size", last], f"{x}.largest", f"{name}.largest")
                # A row of zeros has scale 0: whatever it is divided to, it is multiplied by 0 again.
                _add(nodes, "Mul", [f"{x}.largest", steps], f"{x}.scale", f"{name}.step")
                _add(nodes, "Div", [x, f"{x}.scale"], f"{x}.scaled", f"{name}.divide")
                _add(nodes, "QuantizeLinear", [f"{x}.scaled", one, found[2]], f"{x}.int8", f"{name}.quantize")
            case _:
                assert_never(self.candidate)
        self._quantized[x] = found
        return found

    def _smoothed(self, x: str, name: str, factor_K: Floats, nodes: list[Any]) -> tuple[str, str, str]:
        """As `_activation`, of the channels divided by their factors."""
        smooth, seen = f"{x}.{name}.smooth", self.activations[x]
        _add(
            nodes,
            "Mul",
            [x, self._constant(f"{name}.smooth", (1 / factor_K).astype(np.float32))],
            smooth,
            f"{name}.smooth",
        )
        low, high = float((seen.low_K / factor_K).min()), float((seen.high_K / factor_K).max())
        return self._fixed(smooth, low, high, name, nodes)

    def _fixed(self, x: str, low: float, high: float, name: str, nodes: list[Any]) -> tuple[str, str, str]:
        """8-bit form of an activation whose range is known."""
        low, high = min(low, 0.0), max(high, 0.0)  # zero must have a number of its own
        step = max((high - low) / 255, float(TINY))
        scale = self._constant(f"{x}.scale", np.float32(step))
        zero = self._constant(f"{x}.zero", np.uint8(np.clip(round(-low / step), 0, 255)))
        _add(nodes, "QuantizeLinear", [x, scale, zero], f"{x}.int8", f"{name}.quantize")
        return f"{x}.int8", scale, zero

    def _constant(self, name: str, value: Any) -> str:
        if name not in self._constants:
            self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
            self._constants.add(name)
        return name

    def _runtime(self, nodes: list[Any], inputs: list[str], output: str, name: str) -> None:
        while not inputs[-1]:  # optional ones at the end
            inputs = inputs[:-1]
        nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, [output], name=f"{name}.product", domain=RUNTIME))


def _add(nodes: list[Any], operator: str, inputs: list[str], output: str, name: str) -> None:
    nodes.append(helper.make_node(operator, inputs, [output], name=name))
