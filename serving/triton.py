"""`config.pbtxt` of each model, made and read back through Triton's own protobuf message.

Text is never put together by hand: a misspelt field or a wrong type cannot be written. The fields are those of
`model_config.proto` (https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from serving.errors import RepositoryError
from serving.model import ServedModel
from serving.sources import Source

LABELS_FILE = "labels.txt"
GPU_GRAPH = "model.fp16.onnx"
ENGINE_CACHE = "/var/cache/triton"
"""Folder of the server's container that keeps TensorRT's engines; making one takes minutes."""
_USUAL_ROWS, _USUAL_TOKENS = 8, 32  # what engines are tuned for
CASCADE_INSTANCES = 4
"""Triton gives an instance the next batch only when all of the last one is answered, so that one row for the teacher
would hold up every other request. They only wait, and take no core; each is a Python process of about 35 MB."""
TEXTS = ("TEXT", "TEXT_PAIR")
"""Inputs that take text; a model of single texts has the first alone."""


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """One request that Triton sends to a model before it says that the model is ready."""

    name: str
    """Its name in the server's log."""

    batch_size: int
    """How often the row is repeated."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """For each input, the file in the model's `warmup` folder that holds one row, and the dimensions of the row."""


def text_bytes(text: str) -> bytes:
    """Return a text as Triton reads it from a warm-up file: its length in bytes (not characters), then UTF-8."""
    raw = text.encode("utf-8")
    return len(raw).to_bytes(4, "little") + raw


def text_config(
    model: ServedModel, *, name: str, graph: str, source: Source, warmups: Sequence[Warmup] = ()
) -> pb.ModelConfig:
    """Return the config of a model that clients call, with the graph that the model `graph` holds; it may be itself.

    Texts in: TEXT, and TEXT_PAIR where the model reads pairs; strings [1]. Out: LABEL string [1], SCORE float32 [1] and
    PROBABILITIES float32 [labels], or, of a regression, VALUE float32 [1]; and TRUNCATED bool [1], whether the text was
    longer than the model reads. With the runtime `onnxruntime` the model asks `graph`; otherwise it opens the file.
    """
    instances, threads = model.shares()
    config = _base(model, name, instances, warmups)
    if model.response_cache:
        config.response_cache.enable = True
    add_texts(config, is_pair=model.pair, labels=model.labels)
    parameters = {
        "inputs": json.dumps(source.inputs),
        "intra_op_threads": str(threads),
        "max_batch_tokens": str(model.max_batch_tokens),
        "max_tokens": str(model.max_tokens),
        # Where it is also tells `verify` what an asked model runs.
        "onnx": "model.onnx" if graph == name else f"../../{graph}/{{version}}/model.onnx",
        "pad_id": str(source.pad_id),
        # Triton does not hand labels.txt out, so clients read the names here; none says that it is a regression.
        "labels": json.dumps(model.labels),
    }
    if model.runtime == "onnxruntime":
        parameters["student"] = graph
    _set_parameters(config, parameters)
    return config


def cascade_config(
    student: ServedModel, teacher: ServedModel, *, teacher_name: str, threshold: float
) -> pb.ModelConfig:
    """Return the config of the model that asks the student, and the teacher where that one is unsure.

    Its inputs and outputs are the entry model's, and ESCALATED bool [1]: whether the teacher answered.
    """
    config = _base(student, f"{student.name}_cascade", CASCADE_INSTANCES, ())
    add_texts(config, is_pair=student.pair, labels=student.labels)
    add_escalated(config)
    parameters = {
        "labels": json.dumps(student.labels),
        "teacher_labels": json.dumps(teacher.labels),
        "student": student.name,
        "teacher": teacher_name,
        "threshold": repr(threshold),
    }
    _set_parameters(config, parameters)
    return config


def runner_config(
    model: ServedModel, *, name: str, inputs: Sequence[str], warmups: Sequence[Warmup] = ()
) -> pb.ModelConfig:
    """Return the config of the model that takes token ids and answers logits.

    One instance with all the threads: the entry model does the daily work in its own processes, this one is called to
    compare, and a second copy of every process would only cost memory.
    """
    instances, threads = model.shares()
    config = _base(model, name, 1, warmups)
    for tensor in inputs:
        config.input.add(name=tensor, data_type=pb.TYPE_INT64, dims=[-1])
    _add_numbers(config, "logits", model.labels)
    _set_parameters(config, {"intra_op_threads": str(instances * threads), "max_tokens": str(model.max_tokens)})
    return config


def graph_config(
    model: ServedModel, *, name: str, inputs: Sequence[str], warmups: Sequence[Warmup] = ()
) -> pb.ModelConfig:
    """Return the config of the model that Triton's onnxruntime backend runs on the processor: token ids to logits."""
    instances, threads = model.shares()
    config = _base(model, name, instances, warmups, backend="onnxruntime")
    config.default_model_filename = "model.onnx"
    for tensor in inputs:
        config.input.add(name=tensor, data_type=pb.TYPE_INT64, dims=[-1])
    _add_numbers(config, "logits", model.labels)
    # The graph's own level of optimization stays: the backend's default is all of it.
    _set_parameters(
        config, {"intra_op_thread_count": str(threads), "inter_op_thread_count": "1", "execution_mode": "0"}
    )
    return config


def gpu_config(processor: pb.ModelConfig, model: ServedModel, *, tensorrt: bool) -> pb.ModelConfig:
    """Return what `graph_config` made, for the fp16 graph on GPUs: with CUDA alone, or with TensorRT where it can.

    An engine of TensorRT serves the shapes of its profile: from one token to a full batch of the longest rows.
    """
    config = pb.ModelConfig()
    config.CopyFrom(processor)
    config.default_model_filename = GPU_GRAPH
    del config.instance_group[:]
    # One on each GPU that the server finds.
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=1)
    # Threads of the processor have nothing to do, and would only spin.
    _set_parameters(config, {"intra_op_thread_count": "1"})
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add()
    if not tensorrt:
        accelerator.name = "cuda"
        accelerator.parameters["use_ep_level_unified_stream"] = "1"
        return config
    accelerator.name = "tensorrt"
    parameters = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": str(2**30),
        # Sums of squares in fp16 overflow.
        "trt_layer_norm_fp32_fallback": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": ENGINE_CACHE,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": ENGINE_CACHE,
    }
    rows = min(model.max_batch_size, _USUAL_ROWS), min(model.max_tokens, _USUAL_TOKENS)
    for bound, shape in (("min", (1, 1)), ("opt", rows), ("max", (model.max_batch_size, model.max_tokens))):
        parameters[f"trt_profile_{bound}_shapes"] = ",".join(
            f"{tensor.name}:{shape[0]}x{shape[1]}" for tensor in config.input
        )
    for key, value in sorted(parameters.items()):
        accelerator.parameters[key] = value
    return config


def to_text(config: pb.ModelConfig) -> str:
    """Return a config as the text of `config.pbtxt`."""
    text: str = text_format.MessageToString(config, as_utf8=True)
    return text


def from_text(text: str) -> pb.ModelConfig:
    """Return the config that a `config.pbtxt` holds; raise RepositoryError with line and reason if it holds none."""
    try:
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise RepositoryError(
            f"config.pbtxt is not a Triton model configuration ({error}); publish it again"
        ) from error


def parameters_of(config: pb.ModelConfig) -> dict[str, str]:
    """Return the parameters of a config as plain text."""
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def add_texts(config: pb.ModelConfig, *, is_pair: bool, labels: Sequence[str]) -> None:
    """Add the inputs and outputs of a model that takes texts; no labels are a regression."""
    for tensor in TEXTS if is_pair else TEXTS[:1]:
        config.input.add(name=tensor, data_type=pb.TYPE_STRING, dims=[1])
    if labels:
        config.output.add(name="LABEL", data_type=pb.TYPE_STRING, dims=[1])
        config.output.add(name="SCORE", data_type=pb.TYPE_FP32, dims=[1])
    _add_numbers(config, "PROBABILITIES" if labels else "VALUE", labels)
    config.output.add(name="TRUNCATED", data_type=pb.TYPE_BOOL, dims=[1])


def add_escalated(config: pb.ModelConfig) -> None:
    """Add the output that a cascade has besides."""
    config.output.add(name="ESCALATED", data_type=pb.TYPE_BOOL, dims=[1])


def _add_numbers(config: pb.ModelConfig, name: str, labels: Sequence[str]) -> None:
    """Add an output of one float32 for each label, or of one without a name for a regression."""
    config.output.add(
        name=name, data_type=pb.TYPE_FP32, dims=[len(labels) or 1], label_filename=LABELS_FILE if labels else ""
    )


def _base(
    model: ServedModel, name: str, instances: int, warmups: Sequence[Warmup], *, backend: str = "python"
) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=model.max_batch_size)
    config.version_policy.latest.num_versions = 1
    # Without a count Triton chooses one itself, and each instance then takes all cores.
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=instances)
    # Present even where nothing in it differs from the defaults: without it Triton batches nothing.
    config.dynamic_batching.SetInParent()
    config.dynamic_batching.max_queue_delay_microseconds = model.queue.max_delay_us
    if model.queue.max_requests is not None or model.queue.timeout_ms is not None:
        # An empty policy would already switch prefetching off, see `Queue`.
        policy = config.dynamic_batching.default_queue_policy
        policy.max_queue_size = model.queue.max_requests or 0
        policy.default_timeout_microseconds = (model.queue.timeout_ms or 0) * 1000
        policy.timeout_action = pb.ModelQueuePolicy.REJECT
    for warmup in warmups:
        message = config.model_warmup.add(name=warmup.name, batch_size=warmup.batch_size)
        for tensor, (file, dims) in warmup.inputs.items():
            kind = pb.TYPE_STRING if tensor in TEXTS else pb.TYPE_INT64
            message.inputs[tensor].CopyFrom(pb.ModelWarmup.Input(data_type=kind, dims=dims, input_data_file=file))
    return config


def _set_parameters(config: pb.ModelConfig, parameters: Mapping[str, str]) -> None:
    for name, value in sorted(parameters.items()):
        config.parameters[name].string_value = value
