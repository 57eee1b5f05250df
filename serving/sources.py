"""Reads the files of a model before it is published, and refuses what a server could not run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from serving.errors import ModelError
from serving.model import ServedModel

if TYPE_CHECKING:
    import onnx

_REQUIRED = ("input_ids", "attention_mask")
_OPTIONAL = ("token_type_ids",)
_PAD_TOKENS = ("[PAD]", "<pad>")
_STRANGE = "\U00012000"  # a sign of cuneiform: in no vocabulary


class WarmupRow(NamedTuple):
    """A text, or a pair, as the graph reads it."""

    ids: tuple[int, ...]
    """Token ids."""

    type_ids: tuple[int, ...]
    """0 at the tokens of the first text, 1 at those of the second."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What `read_source` found in the files of one model."""

    inputs: tuple[str, ...]
    """Input names of the graph, in the graph's order."""

    pad_id: int
    """Token id that fills a row up; the attention mask hides it."""

    warmups: tuple[WarmupRow, ...]
    """Each warm-up text, or pair, as tokens."""


def read_source(model: ServedModel) -> Source:
    """Check the graph and the tokenizer of a model; raise ModelError naming what a server could not run."""
    graphs = (model.onnx,) if model.gpu_onnx is None else (model.onnx, model.gpu_onnx)
    for file in (*graphs, model.tokenizer):
        if not file.is_file():
            raise ModelError(f"model {model.name}: {file} is no file; give the path of an existing one")
    inputs, *others = (_read_inputs(model, graph) for graph in graphs)
    if any(set(names) != set(inputs) for names in others):
        raise ModelError(f"model {model.name}: {model.onnx.name} has the inputs {inputs}, its fp16 graph {others[0]}")
    pad_id, warmups = _read_tokenizer(model)
    return Source(inputs=inputs, pad_id=pad_id, warmups=warmups)


def _read_inputs(model: ServedModel, file: Path) -> tuple[str, ...]:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(file), load_external_data=False).graph
    except DecodeError as error:
        raise ModelError(f"model {model.name}: {file} is not an ONNX file ({error}); export it again") from error
    where = f"model {model.name}: {file.name}"
    if any(weights.data_location == onnx.TensorProto.EXTERNAL for weights in graph.initializer):
        raise ModelError(f"{where} keeps weights in a second file; save it as one file (save_as_external_data=False)")
    constants = {weights.name for weights in graph.initializer}
    inputs = [tensor for tensor in graph.input if tensor.name not in constants]
    names = tuple(tensor.name for tensor in inputs)
    if not set(_REQUIRED) <= set(names) <= {*_REQUIRED, *_OPTIONAL}:
        raise ModelError(f"{where} has the inputs {names}; it must have {_REQUIRED} and may have {_OPTIONAL}")
    for tensor in inputs:
        _check_tensor(where, tensor, onnx.TensorProto.INT64, "int64 [batch, sequence]", columns=None)
    logits = [tensor for tensor in graph.output if tensor.name == "logits"]
    if not logits:
        found = tuple(tensor.name for tensor in graph.output)
        raise ModelError(f"{where} has the outputs {found}; one must be `logits`")
    rule = f"float32 [batch, {len(model.labels)} labels]" if model.labels else "float32 [batch, 1] for a regression"
    _check_tensor(where, logits[0], onnx.TensorProto.FLOAT, rule, columns=model.outputs)
    return names


def _check_tensor(where: str, tensor: "onnx.ValueInfoProto", kind: int, rule: str, *, columns: int | None) -> None:
    """Raise ModelError unless a tensor is a matrix of this kind with a free first axis and a fitting second one."""
    found = tensor.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in found.shape.dim]
    # An exporter that could not infer the number of labels leaves it open.
    allowed = ([None, None], [None, columns])
    if found.elem_type != kind or sizes not in allowed:
        shape = [dim.dim_value or dim.dim_param or "?" for dim in found.shape.dim]
        raise ModelError(
            f"{where}: {tensor.name} has the element type {found.elem_type} and the shape {shape}; "
            f"it must be {rule} with open axes: export it again with dynamic axes"
        )


def _read_tokenizer(model: ServedModel) -> tuple[int, tuple[WarmupRow, ...]]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model.tokenizer))
    # The library raises Exception itself.
    except Exception as error:
        raise ModelError(
            f"model {model.name}: {model.tokenizer} is not a tokenizer.json ({error}); save the fast tokenizer"
        ) from error
    pad_ids = [tokenizer.padding["pad_id"]] if tokenizer.padding else []
    pad_ids += [token_id for token in _PAD_TOKENS if (token_id := tokenizer.token_to_id(token)) is not None]
    if not pad_ids:
        raise ModelError(f"model {model.name}: {model.tokenizer} has none of the padding tokens {_PAD_TOKENS}")
    tokenizer.no_padding()
    tokenizer.enable_truncation(model.max_tokens)
    try:
        tokenizer.encode(_STRANGE)
        encodings = tokenizer.encode_batch(list(model.warmup_texts))
    except Exception as error:
        # On a server one such word would fail all texts that are tokenised with it.
        raise ModelError(
            f"model {model.name}: {model.tokenizer} does not read every text ({error}); add its unknown token"
        ) from error
    return pad_ids[0], tuple(WarmupRow(tuple(found.ids), tuple(found.type_ids)) for found in encodings)
