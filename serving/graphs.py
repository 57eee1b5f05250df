"""Compares an ONNX graph with the configuration that serves it, as Triton's onnxruntime backend would."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc import model_config_pb2 as pb

from serving.errors import RepositoryError

if TYPE_CHECKING:
    import onnx
    import onnxruntime


@dataclass(frozen=True, kw_only=True)
class Release:
    """The newest that the ONNX Runtime of one Triton container is known to read."""

    onnxruntime: str
    ir_version: int
    opset: int


_ORT_1_20 = {"ir_version": 10, "opset": 21}
_ORT_1_22 = {"ir_version": 10, "opset": 22}
# What later ones read besides is not listed: nothing here is written for it.
_ORT_1_23 = {"ir_version": 11, "opset": 23}
RELEASES = {
    "24.06": Release(onnxruntime="1.18.0", **_ORT_1_20),
    "24.10": Release(onnxruntime="1.19.2", **_ORT_1_20),
    **dict.fromkeys(("24.12", "25.01", "25.02"), Release(onnxruntime="1.20.1", **_ORT_1_20)),
    **dict.fromkeys(("25.05", "25.06", "25.07"), Release(onnxruntime="1.22.0", **_ORT_1_22)),
    "26.01": Release(onnxruntime="1.23.2", **_ORT_1_23),
    **dict.fromkeys(("26.04", "26.05", "26.06"), Release(onnxruntime="1.24.4", **_ORT_1_23)),
    "26.07": Release(onnxruntime="1.27.0", **_ORT_1_23),
}


# What models in Python open their graphs with, in every container: `deploy/requirements.txt` pins it.
IN_PYTHON = Release(onnxruntime="1.23.2", **_ORT_1_23)


def listed_release(release: str) -> str:
    """Return the release itself, or the last one before it that `RELEASES` has: it reads at least as much.

    Raises RepositoryError if it is no release, or too old.
    """
    before = [listed for listed in RELEASES if listed <= release]
    if not re.fullmatch(r"\d\d\.(0[1-9]|1[0-2])", release, re.ASCII) or not before:
        raise RepositoryError(
            f"Triton release {release!r} is not known here; give one as year.month, {min(RELEASES)} or later"
        )
    return max(before)


# ONNX's element types, by number, as Triton names them.
_KINDS = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
    16: "TYPE_BF16",
}


def graph_faults(file: Path, config: pb.ModelConfig, release: str | None, *, in_python: bool = False) -> Iterator[str]:
    """Say what is wrong with a graph: its versions, and, if `config` serves its tensors, each input and output.

    `release` names a container, 24.06 or later; None stands for the ONNX Runtime that is installed here. `in_python`
    says that a model in Python opens the graph there, and not the container's own backend.
    """
    model = _load(file)
    if isinstance(model, str):
        yield model
        return
    yield from _version_faults(file, model, release, in_python)
    constants = {weights.name for weights in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in constants]
    if any(weights.data_location == weights.EXTERNAL for weights in model.graph.initializer):
        yield f"{file.name} keeps weights in a second file, which is not published with it"
    if any(tensor.data_type == pb.TYPE_STRING for tensor in config.input):
        yield from _text_model_faults(file, model, config)
        sent, taken = config.parameters.get("inputs"), [tensor.name for tensor in inputs]
        if sent is not None and sorted(json.loads(sent.string_value)) != sorted(taken):
            yield f"the parameter inputs is {sent.string_value}; {file.name} takes {taken}"
        return
    yield from _name_faults("input", [tensor.name for tensor in config.input], [tensor.name for tensor in inputs])
    yield from _name_faults(
        "output", [tensor.name for tensor in config.output], [t.name for t in model.graph.output], may_lack=True
    )
    graph_tensors = {tensor.name: tensor for tensor in (*inputs, *model.graph.output)}
    for tensor in (*config.input, *config.output):
        if tensor.name in graph_tensors:
            yield from _tensor_faults(tensor, graph_tensors[tensor.name], is_batched=config.max_batch_size > 0)


def _load(file: Path) -> "onnx.ModelProto | str":
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(str(file), load_external_data=False)
    except (DecodeError, OSError) as error:
        return f"{file.name} is not an ONNX file ({error})"


def _version_faults(file: Path, model: "onnx.ModelProto", release: str | None, in_python: bool) -> Iterator[str]:
    if release is None or in_python:
        session = _opened_here(file)
        if isinstance(session, str):
            yield f"the installed ONNX Runtime does not open {file.name}: {session}"
    if release is None:
        return
    listed = listed_release(release)
    known = IN_PYTHON if in_python else RELEASES[listed]
    where = f"Triton {listed} has ONNX Runtime {known.onnxruntime}"
    if in_python:
        where = f"models in Python have ONNX Runtime {known.onnxruntime} in the container"
    elif listed != release:
        where = f"Triton {release} is not listed here, and {listed} before it has ONNX Runtime {known.onnxruntime}"
    if model.ir_version > known.ir_version:
        yield f"{file.name} has IR version {model.ir_version}; {where}, which reads {known.ir_version} at most"
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > known.opset:
            yield f"{file.name} has opset {opset.version}; {where}, which reads {known.opset} at most"


def _opened_here(file: Path) -> "onnxruntime.InferenceSession | str":
    """Open a graph with the installed ONNX Runtime; return why it cannot be, if so."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Only whether it opens, and what it takes, is asked.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    # Its errors share no base class of their own.
    except Exception as error:
        return str(error).splitlines()[0]


def _text_model_faults(file: Path, model: "onnx.ModelProto", config: pb.ModelConfig) -> Iterator[str]:
    """A model that takes texts answers the numbers of its graph's logits, one for each label."""
    logits = [tensor for tensor in model.graph.output if tensor.name == "logits"]
    if not logits:
        yield f"{file.name} has no output `logits`"
        return
    numbers = [tensor for tensor in config.output if tensor.name in ("PROBABILITIES", "VALUE")]
    columns = _sizes(logits[0])[-1:]
    for tensor in numbers:
        if columns != [-1] and list(tensor.dims) != columns:
            yield f"{tensor.name} has dims {list(tensor.dims)}, but logits of {file.name} has {columns} columns"
    yield from _longest_faults(file, config)


def _longest_faults(file: Path, config: pb.ModelConfig) -> Iterator[str]:
    """A text is cut at `max_tokens`: the graph must take as many, which its table of positions decides."""
    import numpy as np

    given = {name: parameter.string_value for name, parameter in config.parameters.items()}
    session = _opened_here(file)
    if isinstance(session, str) or not {"max_tokens", "pad_id"} <= set(given):
        return
    ids = np.full((1, int(given["max_tokens"])), int(given["pad_id"]), np.int64)
    tensors = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    try:
        session.run(["logits"], {tensor.name: tensors[tensor.name] for tensor in session.get_inputs()})
    # As above; a name or a type that does not fit is said elsewhere as well.
    except Exception as error:
        yield f"{file.name} does not take a row of max_tokens, {ids.shape[1]}: {str(error).splitlines()[0]}"


def _name_faults(kind: str, ours: Sequence[str], graphs: Iterable[str], *, may_lack: bool = False) -> Iterator[str]:
    graphs = list(graphs)
    unknown = [name for name in ours if name not in graphs]
    if unknown:
        yield f"config.pbtxt names the {kind}s {unknown}; the graph has {graphs}"
    lacking = [name for name in graphs if name not in ours]
    if lacking and not may_lack:
        yield f"config.pbtxt has {len(ours)} {kind}s and lacks {lacking}; the graph has {graphs}"


def _tensor_faults(tensor: pb.ModelInput, graphs: "onnx.ValueInfoProto", *, is_batched: bool) -> Iterator[str]:
    kind = pb.DataType.Name(tensor.data_type)
    graph_kind = _KINDS.get(graphs.type.tensor_type.elem_type, "an unknown type")
    if kind != graph_kind:
        yield f"{tensor.name} is {kind}; the graph has {graph_kind}"
    sizes, dims = _sizes(graphs), list(tensor.dims)
    if is_batched and sizes[:1] != [-1]:
        yield f"{tensor.name} of the graph has the shape {sizes}; its first axis must be open: export with dynamic axes"
        return
    wanted = sizes[1:] if is_batched else sizes
    rule = "without the batch axis " if is_batched else ""
    if len(dims) != len(wanted):
        yield f"{tensor.name} has dims {dims}; {rule}the graph has {wanted}"
        return
    for ours, theirs in zip(dims, wanted, strict=True):
        if theirs == -1 and ours != -1 and isinstance(tensor, pb.ModelInput):
            yield f"{tensor.name} has dims {dims}; the graph's axis is open, so other lengths are refused: write -1"
        elif theirs not in (-1, ours):
            yield f"{tensor.name} has dims {dims}; {rule}the graph has {wanted}"


def _sizes(tensor: "onnx.ValueInfoProto") -> list[int]:
    """Return the sizes of a tensor's axes; -1 for an open one."""
    return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.type.tensor_type.shape.dim]
