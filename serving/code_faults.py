"""Finds what would stop the Python backend at a model's code, and code of ours at its configuration."""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from serving import triton
from serving.contents import code

_PARAMETERS = {
    "model.py": ("inputs", "intra_op_threads", "labels", "max_batch_tokens", "max_tokens", "onnx", "pad_id"),
    "cascade.py": ("labels", "student", "teacher", "teacher_labels", "threshold"),
    "runner.py": ("intra_op_threads", "max_tokens"),
}
"""What each module of `serving.entry` reads of its configuration."""


def code_faults(file: Path, config: pb.ModelConfig) -> Iterator[str]:
    """Say what is wrong with the code of a model whose parameters can be read.

    Of code by hand that is only whether Python reads it, and whether it has the class that the backend asks for. Raises
    OSError if it cannot be read.
    """
    raw = file.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(raw, file.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        yield f"{file.name} is no Python: {error}"
        return
    if b"TritonPythonModel" not in raw:
        yield f"{file.name} has no class TritonPythonModel, which the backend asks for"
    module = next((name for name in _PARAMETERS if raw == code(name)), None)
    if module is None:
        return
    if lacking := [name for name in _PARAMETERS[module] if name not in config.parameters]:
        yield f"{file.name} reads the parameters {lacking}, which are missing"
    elif module != "runner.py":  # the tensors of that one are its graph's
        yield from _text_faults(file.name, config, is_cascade=module == "cascade.py")


def _text_faults(name: str, config: pb.ModelConfig, *, is_cascade: bool) -> Iterator[str]:
    """A model of ours that takes texts has the tensors that `triton` writes for its labels."""
    wanted = pb.ModelConfig()
    is_pair = any(tensor.name == triton.TEXTS[1] for tensor in config.input)
    triton.add_texts(wanted, is_pair=is_pair, labels=json.loads(config.parameters["labels"].string_value))
    if is_cascade:
        triton.add_escalated(wanted)
    for kind, ours, theirs in (
        ("inputs", config.input, wanted.input),
        ("outputs", config.output, wanted.output),
    ):
        if _shown(ours) != _shown(theirs):
            yield f"the {kind} are {', '.join(_shown(ours))}; {name} has {', '.join(_shown(theirs))}"


def _shown(tensors: Sequence[pb.ModelInput | pb.ModelOutput]) -> list[str]:
    return [f"{tensor.name} {pb.DataType.Name(tensor.data_type)} {list(tensor.dims)}" for tensor in tensors]
