"""Finds what would stop a server at a model repository, or make it answer wrongly, before one is started.

Any repository can be checked, also one that was written by hand. What is known of the models that `repository.write`
publishes (their tokenizer, their checksums, which model opens the graph of which) is checked besides.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tritonclient.grpc import model_config_pb2 as pb

from serving import triton, versions
from serving.errors import RepositoryError
from serving.graphs import RELEASES, graph_faults
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

    `release` is the Triton container that will serve it, one of `RELEASES`; None is the embedded server. `gpus` is the
    number of GPUs it will find; None counts those of this machine. Raises RepositoryError if there is nothing to check
    or the release is unknown.
    """
    if release is not None and release not in RELEASES:
        raise RepositoryError(f"Triton release {release!r} is not known here; known: {', '.join(RELEASES)}")
    if not root.is_dir():
        raise RepositoryError(f"model repository {root} is no folder; run `compressor publish`, or name another")
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if not folders:
        raise RepositoryError(f"model repository {root} holds no model; run `compressor publish`, or name another")
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) if gpus is None else gpus
    found = [
        Finding(folder.name, place, fault) for folder in folders for place, fault in _model(folder, release, devices)
    ]
    markers = {path.name: marker for path in folders if (marker := read_marker(path))}
    return found + [Finding("", ".", fault) for fault in unpaired(root, markers)]


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


def _model(folder: Path, release: str | None, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield (place, fault) for everything that is wrong with one model."""
    file = folder / CONFIG
    if not file.is_file():
        yield CONFIG, "is missing; a server that completes configurations would guess one"
        return
    try:
        config = triton.from_text(file.read_text("utf-8"))
    except (RepositoryError, UnicodeDecodeError) as error:
        yield CONFIG, str(error)
        return
    configs = [(CONFIG, config)]
    for other in sorted(folder.glob("configs/*.pbtxt")):
        try:
            configs.append((f"configs/{other.name}", triton.from_text(other.read_text("utf-8"))))
        except (RepositoryError, UnicodeDecodeError) as error:
            yield f"configs/{other.name}", str(error)
    for place, each in configs:
        # Another configuration than the usual one is for the machine that it is chosen on.
        devices = gpus if place == CONFIG else _ANY_GPUS
        found = (
            _config_faults(folder, each, release),
            _device_faults(each, devices),
            _warmup_faults(folder, each),
            _backend_faults(each),
            _asked_faults(folder, each),
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
        if "labels" in config.parameters and json.loads(config.parameters["labels"].string_value) != names:
            yield f"the parameter `labels` and {tensor.label_filename} differ"


def _device_faults(config: pb.ModelConfig, gpus: int) -> Iterator[str]:
    for group in config.instance_group:
        if group.kind == group.KIND_GPU:
            absent = [gpu for gpu in group.gpus if gpu >= gpus]
            if absent or not gpus:
                yield f"instance_group is KIND_GPU with the GPUs {list(group.gpus)}; the server will find {gpus}"
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
            if given.WhichOneof("input_data_type") == "input_data_file":
                yield from _data_faults(folder / "warmup" / given.input_data_file, given, warmup.name)


def _data_faults(file: Path, given: pb.ModelWarmup.Input, warmup: str) -> Iterator[str]:
    """A warm-up file holds one row: numbers as they are in memory, or strings each after its length in bytes."""
    if not file.is_file():
        yield f"warm-up {warmup} reads warmup/{file.name}, which is missing"
        return
    raw, count = file.read_bytes(), math.prod(given.dims)
    kind = pb.DataType.Name(given.data_type)
    if kind != "TYPE_STRING":
        if len(raw) != count * _ITEM_BYTES[kind]:
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
    graph = _graph(version, config, backend)
    if graph is not None and not graph.is_file():
        if graph.parent != version:
            yield f"opens {graph.relative_to(version.parent.parent)}, which is missing"
    elif graph is not None:
        yield from graph_faults(graph, config, release if backend == "onnxruntime" else None)


def _asked_faults(folder: Path, config: pb.ModelConfig) -> Iterator[str]:
    """A model that asks others gives no way to see, before a request fails, that they cannot answer it."""
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
        sent, taken = json.loads(parameters.get("inputs", "[]")), [tensor.name for tensor in other.input]
        if sent and sorted(sent) != sorted(taken):
            yield f"the model sends {sent} to {asked}, which takes {taken}"


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
    named = triton.parameters_of(config).get("onnx")
    if named:
        return (version / named.format(version=version.name)).resolve()
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
