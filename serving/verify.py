"""Finds what would stop a server at a model repository, or make it answer wrongly, before one is started.

Any repository can be checked, also one that was written by hand. What is known of the models that `repository.write`
publishes (their tokenizer, their checksums, which model opens the graph of which) is checked besides.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tritonclient.grpc import model_config_pb2 as pb

from serving import triton, versions
from serving.code_faults import code_faults
from serving.errors import RepositoryError
from serving.fields import unknown_fields
from serving.graphs import graph_faults, listed_release
from serving.repository import unpaired
from serving.versions import read_manifest, read_marker

CONFIG = "config.pbtxt"
_BACKENDS = ("python", "onnxruntime")
_PLATFORMS = {"onnxruntime_onnx": "onnxruntime"}
_FILES = {"python": "model.py", "onnxruntime": "model.onnx"}
# Folders of a model that are no versions and need not be.
_OTHER_FOLDERS = ("warmup", versions.CONFIGS)
_ANY_GPUS = 1024
_COUNTS = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode")
_NUMBERS = ("intra_op_threads", "max_batch_tokens", "max_tokens", "pad_id")
_NAMES = ("labels", "teacher_labels", "inputs")
_ACCELERATORS = {"gpu": ("tensorrt", "cuda"), "cpu": ("openvino",)}
_ITEM_BYTES = {
    **dict.fromkeys(("TYPE_BOOL", "TYPE_INT8", "TYPE_UINT8"), 1),
    **dict.fromkeys(("TYPE_INT16", "TYPE_UINT16", "TYPE_FP16", "TYPE_BF16"), 2),
    **dict.fromkeys(("TYPE_INT32", "TYPE_UINT32", "TYPE_FP32"), 4),
    **dict.fromkeys(("TYPE_INT64", "TYPE_UINT64", "TYPE_FP64"), 8),
}


class Finding(NamedTuple):
    """One fault."""

    model: str
    """Its model; "" if it is about the whole repository."""
    place: str
    """The file or folder it is in, relative to the model's."""
    fault: str
    """What is wrong, in a sentence."""


def verify(root: Path, *, release: str | None = None, gpus: int | None = None) -> list[Finding]:
    """Check a repository; [] if nothing is wrong.

    `release` is the Triton container that will serve it, 24.06 or later, with the packages of `deploy/requirements.txt`
    for models in Python; None is the embedded server. `gpus` is the number of GPUs it will find; None counts those of
    this machine. Raises RepositoryError if there is nothing to check or the release is unknown.
    """
    if release is not None:
        listed_release(release)  # refuses what is none
    if not root.is_dir():
        raise RepositoryError(f"model repository {root} is no folder; run `compressor publish`, or name another")
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError as error:
        raise RepositoryError(f"cannot read the model repository {root}: {error.strerror or error}") from error
    if not folders:
        raise RepositoryError(f"model repository {root} holds no model; run `compressor publish`, or name another")
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) if gpus is None else gpus
    found = [
        Finding(folder.name, place, fault)
        for folder in folders
        for place, fault in _readable(folder, _model(folder, release, devices))
    ]
    return found + [Finding("", place, fault) for place, fault in _readable(root, _pair_faults(root, folders))]


def served_versions(folder: Path, config: pb.ModelConfig) -> list[int]:
    """Return the versions of a model folder that its policy has Triton serve, oldest first."""
    present = versions.published(folder)
    match config.version_policy.WhichOneof("policy_choice"):
        case "all":
            return present
        case "specific":
            return sorted(config.version_policy.specific.versions)
        case _:
            return present[-(config.version_policy.latest.num_versions or 1) :]


def asked_faults(folder: Path, config: pb.ModelConfig) -> Iterator[str]:
    """Yield what is wrong between a model with a configuration and those that it asks, as they are now.

    Nothing else shows, before a request fails or is answered wrongly, that they do not fit.
    """
    parameters = triton.parameters_of(config)
    for role in ("student", "teacher"):
        asked = parameters.get(role)
        if not asked:
            continue
        try:
            other = triton.from_text((folder.parent / asked / CONFIG).read_text("utf-8"))
        except OSError:
            yield f"the model asks {asked}, which the repository lacks; a server would say READY all the same"
            continue
        except (RepositoryError, UnicodeDecodeError):
            continue  # said of that model
        if other.max_batch_size < config.max_batch_size:
            yield f"the model takes {config.max_batch_size} rows and asks {asked}, which takes {other.max_batch_size}"
        sent, taken = _names(parameters.get("inputs", "[]")), [tensor.name for tensor in other.input]
        if sent and sorted(sent) != sorted(taken):
            yield f"the model sends {sent} to {asked}, which takes {taken}"
        # A model that takes token ids has no such parameter, and names nothing.
        ours = _names(parameters.get("labels" if role == "student" else "teacher_labels", ""))
        theirs = _names(triton.parameters_of(other).get("labels", ""))
        if None not in (ours, theirs) and ours != theirs:
            yield f"the model takes the answers of {asked} for {ours}, in this order; they are {theirs}"


def _readable(folder: Path, found: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (place, fault) of a folder as they are found, up to a file that cannot be read, which is the last fault."""
    try:
        yield from found
    except OSError as error:
        place = os.path.relpath(error.filename or folder, folder)
        yield place, f"cannot be read: {error.strerror or error}"


def _pair_faults(root: Path, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    markers = {path.name: marker for path in folders if (marker := read_marker(path))}
    for fault in unpaired(root, markers):
        yield ".", fault


def _model(folder: Path, release: str | None, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield (place, fault) for everything that is wrong with one model."""
    if not (folder / CONFIG).is_file():
        yield CONFIG, "is missing; a server that completes configurations would guess one"
        return
    configs = []
    for file in (folder / CONFIG, *sorted(folder.glob("configs/*.pbtxt"))):
        place = str(file.relative_to(folder))
        try:
            config = triton.from_text(file.read_text("utf-8"))
        except (RepositoryError, UnicodeDecodeError) as error:
            yield place, str(error)
            continue
        wrong = [(place, fault) for fault in _parameter_faults(config)]
        yield from wrong
        # What follows reads the parameters.
        if not wrong:
            configs.append((place, config))
    if not configs or configs[0][0] != CONFIG:
        return
    config = configs[0][1]
    for place, each in configs:
        # Another configuration than the usual one is for the machine that it is chosen on.
        devices = gpus if place == CONFIG else _ANY_GPUS
        found = (
            _config_faults(folder, each, release),
            _device_faults(each, devices),
            _warmup_faults(folder, each),
            _backend_faults(each),
            asked_faults(folder, each),
        )
        for fault in chain(*found):
            yield place, fault
    yield from _folder_faults(folder)
    yield from _version_faults(folder, config, release)
    for place, each in configs[1:]:
        for version in versions.published(folder):
            for fault in _file_faults(folder / str(version), each, release):
                yield place, f"version {version}: {fault}"
    yield from _content_faults(folder)


def _parameter_faults(config: pb.ModelConfig) -> Iterator[str]:
    """Those of our models that cannot be read, as a configuration by hand may have them."""
    for name, value in triton.parameters_of(config).items():
        if name in _NAMES and _names(value) is None:
            yield f'the parameter {name} is {value!r}; it must be names, as JSON: ["no", "yes"]'
        if name in _NUMBERS and not (value.isascii() and value.isdigit()):
            yield f"the parameter {name} is {value!r}; it must be a number as string_value"
        if name == "threshold" and not _is_float(value):
            yield f"the parameter threshold is {value!r}; it must be a number as string_value"
        if name == "onnx" and _format(value, "1") is None:
            yield f"the parameter onnx is {value!r}; it must be a path, with {{version}} for the number of the version"


def _names(value: str) -> list[str] | None:
    """Return the names that a parameter holds; None if it holds none."""
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


def _is_float(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _format(path: str, version: str) -> str | None:
    """Return a path with the number of a version filled in; None if it cannot be."""
    try:
        return path.format(version=version)
    except (ValueError, LookupError, AttributeError):
        return None


def _config_faults(folder: Path, config: pb.ModelConfig, release: str | None) -> Iterator[str]:
    if config.name and config.name != folder.name:
        yield f"name is {config.name!r}; it must be the folder's, {folder.name!r}"
    backend = _backend(config)
    if backend not in _BACKENDS:
        yield f"backend is {backend!r}; known: {', '.join(_BACKENDS)}"
    elif backend == "onnxruntime" and release is None:
        yield "backend is 'onnxruntime', which the embedded server lacks; name the Triton release that will serve it"
    if config.max_batch_size < 1:
        yield f"max_batch_size is {config.max_batch_size}; below 1 no requests share a batch"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        if not names:
            yield f"there is no {kind}; a server that completes configurations would guess it"
        if len(set(names)) < len(names) or not all(names):
            yield f"{kind}s are named {names}; each needs a name of its own"
        for tensor in tensors:
            if tensor.data_type == pb.TYPE_INVALID:
                yield f"{kind} {tensor.name} has no data_type"
            if not tensor.dims or any(dim == 0 or dim < -1 for dim in tensor.dims):
                yield f"{kind} {tensor.name} has dims {list(tensor.dims)}; each must be -1 or at least 1"
    yield from _label_faults(folder, config)
    for field in unknown_fields(config):
        yield f"{field} is set, which is not checked here: a server may refuse it, or answer otherwise; leave it out"


def _backend(config: pb.ModelConfig) -> str:
    return str(config.backend or _PLATFORMS.get(config.platform, config.platform))


def _label_faults(folder: Path, config: pb.ModelConfig) -> Iterator[str]:
    for tensor in config.output:
        if not tensor.label_filename:
            continue
        try:
            names = (folder / tensor.label_filename).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            yield f"{tensor.name} names the labels {tensor.label_filename}, which cannot be read: {error}"
            continue
        if len(names) != math.prod(tensor.dims) or len(set(names)) != len(names) or not all(map(str.strip, names)):
            yield f"{tensor.name} has dims {list(tensor.dims)} and {tensor.label_filename} the labels {names}"
        if "labels" in config.parameters and _names(config.parameters["labels"].string_value) != names:
            yield f"the parameter `labels` and {tensor.label_filename} differ"


def _device_faults(config: pb.ModelConfig, gpus: int) -> Iterator[str]:
    for group in config.instance_group:
        if group.kind == group.KIND_GPU:
            absent = [gpu for gpu in group.gpus if gpu >= gpus]
            if absent or not gpus:
                yield f"instance_group is KIND_GPU with the GPUs {list(group.gpus)}; the server will find {gpus}"
        elif group.gpus:
            yield f"instance_group names the GPUs {list(group.gpus)} and is not KIND_GPU, which a server refuses"
        if group.count < 1:
            yield "instance_group has no count: Triton chooses one, and each instance takes all cores"
    if not config.instance_group:
        yield "there is no instance_group: Triton chooses how many, and each instance takes all cores"


def _warmup_faults(folder: Path, config: pb.ModelConfig) -> Iterator[str]:
    inputs = {tensor.name: tensor for tensor in config.input}
    for warmup in config.model_warmup:
        if warmup.batch_size > max(config.max_batch_size, 1):
            yield f"warm-up {warmup.name} has the batch size {warmup.batch_size}; at most {config.max_batch_size}"
        if set(warmup.inputs) != set(inputs):
            yield f"warm-up {warmup.name} gives {sorted(warmup.inputs)}; the inputs are {sorted(inputs)}"
        for name, given in sorted(warmup.inputs.items()):
            if name in inputs and given.data_type != inputs[name].data_type:
                yield f"warm-up {warmup.name} gives {name} as {pb.DataType.Name(given.data_type)}"
            if name in inputs and not _fit(given.dims, inputs[name].dims):
                yield (
                    f"warm-up {warmup.name} gives {name} the dims {list(given.dims)}; "
                    f"the input has {list(inputs[name].dims)}"
                )
            if given.WhichOneof("input_data_type") == "input_data_file":
                yield from _data_faults(folder / "warmup" / given.input_data_file, given, warmup.name)


def _fit(given: Sequence[int], dims: Sequence[int]) -> bool:
    """Say whether an input takes a row of some dimensions."""
    return len(given) == len(dims) and all(
        mine > 0 and dim in (-1, mine) for mine, dim in zip(given, dims, strict=True)
    )


def _data_faults(file: Path, given: pb.ModelWarmup.Input, warmup: str) -> Iterator[str]:
    """A warm-up file holds one row: numbers as they are in memory, or strings each after its length in bytes."""
    if not file.is_file():
        yield f"warm-up {warmup} reads warmup/{file.name}, which is missing"
        return
    raw, count = file.read_bytes(), math.prod(given.dims)
    kind = pb.DataType.Name(given.data_type)
    if kind != "TYPE_STRING":
        if len(raw) != count * _ITEM_BYTES.get(kind, 0):
            yield f"warm-up {warmup}: warmup/{file.name} has {len(raw)} bytes; {count} of {kind} are other"
        return
    start = 0
    for _ in range(count):
        start += 4 + int.from_bytes(raw[start : start + 4], "little")
    if start != len(raw):
        yield f"warm-up {warmup}: warmup/{file.name} does not hold {count} strings, each after its length in bytes"


def _folder_faults(folder: Path) -> Iterator[tuple[str, str]]:
    odd = [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_dir()
        and path.name not in (*_OTHER_FOLDERS, "__pycache__", *map(str, versions.published(folder)))
        and not path.name.startswith((versions.WITHDRAWN, versions.WAITING))
    ]
    for name in odd:
        yield name, "is no version: versions are numbers that do not begin with 0"


def _version_faults(folder: Path, config: pb.ModelConfig, release: str | None) -> Iterator[tuple[str, str]]:
    wanted = served_versions(folder, config)
    if not wanted:
        yield ".", "has no version folder"
    for version in wanted:
        place = folder / str(version)
        if not place.is_dir():
            yield str(version), "is a version that the policy names and that is missing"
            continue
        for fault in _file_faults(place, config, release):
            yield str(version), fault
        if "pad_id" in config.parameters:
            for fault in _tokenizer_faults(place, config):
                yield str(version), fault


def _file_faults(version: Path, config: pb.ModelConfig, release: str | None) -> Iterator[str]:
    """What a version must hold, and its graph, as one configuration wants them."""
    backend = _backend(config)
    name = config.default_model_filename or _FILES.get(backend, "")
    if not (version / name).is_file():
        yield f"{name} is missing"
    elif backend == "python":
        yield from code_faults(version / name, config)
    graph = _graph(version, config, backend)
    if graph is not None and not graph.is_file():
        if graph != version / name:
            yield f"opens {os.path.relpath(graph, version.parent.parent)}, which is missing"
    elif graph is not None:
        # A model that asks a student leaves opening to it.
        asks = "student" in triton.parameters_of(config)
        yield from graph_faults(graph, config, None if asks else release, in_python=backend != "onnxruntime")


def _backend_faults(config: pb.ModelConfig) -> Iterator[str]:
    """What the onnxruntime backend reads besides the tensors."""
    if _backend(config) != "onnxruntime":
        return
    for name, value in triton.parameters_of(config).items():
        if name in _COUNTS and not (value.isascii() and value.isdigit()):
            yield f"the parameter {name} is {value!r}; it must be a number as string_value"
    accelerators = config.optimization.execution_accelerators
    on_gpu = any(group.kind == group.KIND_GPU for group in config.instance_group)
    for kind, found in (
        ("gpu", accelerators.gpu_execution_accelerator),
        ("cpu", accelerators.cpu_execution_accelerator),
    ):
        for accelerator in found:
            if accelerator.name not in _ACCELERATORS[kind]:
                yield f"{kind}_execution_accelerator is {accelerator.name!r}; known: {', '.join(_ACCELERATORS[kind])}"
            if kind == "gpu" and not on_gpu:
                yield f"{accelerator.name} is set and no instance_group is KIND_GPU: it would not be used"
            yield from _profile_faults(config, dict(accelerator.parameters))


def _profile_faults(config: pb.ModelConfig, parameters: Mapping[str, str]) -> Iterator[str]:
    """TensorRT's profile must name every input, in all three bounds."""
    shapes = {bound: parameters.get(f"trt_profile_{bound}_shapes") for bound in ("min", "opt", "max")}
    if not any(shapes.values()):
        return
    for bound, text in shapes.items():
        named = [part.rpartition(":")[0] for part in (text or "").split(",")]
        if sorted(named) != sorted(tensor.name for tensor in config.input):
            yield f"trt_profile_{bound}_shapes is {text!r}; it must give each input a shape: input_ids:1x8,..."


def _graph(version: Path, config: pb.ModelConfig, backend: str) -> Path | None:
    """Return the graph that a version opens; None if it opens none that is known."""
    named = _format(triton.parameters_of(config).get("onnx", ""), version.name)
    if named:
        return version / named
    file = version / (config.default_model_filename or "model.onnx")
    return file if backend == "onnxruntime" or file.is_file() else None


def _tokenizer_faults(version: Path, config: pb.ModelConfig) -> Iterator[str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
    # The library raises Exception itself.
    except Exception as error:
        yield f"tokenizer.json is none ({error})"
        return
    pad_id = int(config.parameters["pad_id"].string_value)
    if pad_id >= tokenizer.get_vocab_size():
        yield f"pad_id is {pad_id}; the tokenizer has {tokenizer.get_vocab_size()} tokens"


def _content_faults(folder: Path) -> Iterator[tuple[str, str]]:
    """Checksums of what `repository.write` published, of every version."""
    if read_marker(folder) is None:
        return
    for fault in versions.faults(folder):
        yield ".", fault
    waiting = versions.waiting(folder)
    for version in (*versions.published(folder), *([waiting] if waiting else [])):
        place = versions.place(folder, version)
        if read_manifest(place) is not None and not versions.is_as_published(folder, version):
            yield place.name, "holds files that are not the ones that were published: a checksum differs"
