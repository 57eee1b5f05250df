"""config.pbtxt: golden text, round trip, warm-up bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from serving import ModelError, Queue, RepositoryError, ServedModel, triton
from serving.sources import Source

GOLDEN = """\
name: "sst2"
version_policy {
  latest {
    num_versions: 1
  }
}
max_batch_size: 4
input {
  name: "TEXT"
  data_type: TYPE_STRING
  dims: 1
}
output {
  name: "LABEL"
  data_type: TYPE_STRING
  dims: 1
}
output {
  name: "SCORE"
  data_type: TYPE_FP32
  dims: 1
}
output {
  name: "PROBABILITIES"
  data_type: TYPE_FP32
  dims: 2
  label_filename: "labels.txt"
}
output {
  name: "TRUNCATED"
  data_type: TYPE_BOOL
  dims: 1
}
instance_group {
  count: 3
  kind: KIND_CPU
}
dynamic_batching {
}
parameters {
  key: "inputs"
  value {
    string_value: "[\\"input_ids\\", \\"attention_mask\\"]"
  }
}
parameters {
  key: "intra_op_threads"
  value {
    string_value: "2"
  }
}
parameters {
  key: "labels"
  value {
    string_value: "[\\"negative\\", \\"positive\\"]"
  }
}
parameters {
  key: "max_batch_tokens"
  value {
    string_value: "8192"
  }
}
parameters {
  key: "max_tokens"
  value {
    string_value: "12"
  }
}
parameters {
  key: "onnx"
  value {
    string_value: "../../sst2_student/{version}/model.onnx"
  }
}
parameters {
  key: "pad_id"
  value {
    string_value: "7"
  }
}
model_warmup {
  name: "one"
  batch_size: 1
  inputs {
    key: "TEXT"
    value {
      data_type: TYPE_STRING
      dims: 1
      input_data_file: "a.bin"
    }
  }
}
backend: "python"
"""


def source(pad_id: int = 0) -> Source:
    """What is known of a model's files."""
    return Source(inputs=("input_ids", "attention_mask"), pad_id=pad_id, warmups=())


WARMUP = triton.Warmup(name="one", batch_size=1, inputs={"TEXT": ("a.bin", (1,))})


def test_entry_config_is_the_golden_text(make_model: Callable[..., ServedModel]) -> None:
    model = make_model(instances=3, intra_op_threads=2)
    config = triton.text_config(model, name="sst2", graph="sst2_student", source=source(7), warmups=[WARMUP])
    assert triton.to_text(config) == GOLDEN
    assert triton.from_text(GOLDEN) == config


def test_entry_config_of_a_regression_on_pairs(kit: Any, tmp_path: Path) -> None:
    config = triton.text_config(kit.score_model(tmp_path), name="stsb", graph="stsb_student", source=source())
    kinds = [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in (*config.input, *config.output)]
    string, number = config.input[0].data_type, config.output[0].data_type
    assert kinds == [("TEXT", string, [1]), ("TEXT_PAIR", string, [1]), ("VALUE", number, [1]), ("TRUNCATED", 1, [1])]
    assert config.output[0].label_filename == ""
    assert triton.parameters_of(config)["labels"] == "[]"


def test_runner_config_of_a_regression_has_one_column_without_a_name(kit: Any, tmp_path: Path) -> None:
    config = triton.runner_config(kit.score_model(tmp_path), name="stsb_student", inputs=kit.ALL_INPUTS)
    (logits,) = config.output
    assert (list(logits.dims), logits.label_filename) == ([1], "")


def test_queue_without_limits_has_no_policy(make_model: Callable[..., ServedModel]) -> None:
    # Even an empty policy makes Triton's batcher miss wake-ups.
    config = triton.text_config(make_model(), name="t", graph="t", source=source())
    assert not config.dynamic_batching.HasField("default_queue_policy")


def test_expired_requests_are_rejected(make_model: Callable[..., ServedModel]) -> None:
    # REJECT is the message's default, so the text above does not show it.
    model = make_model(queue=Queue(max_delay_us=0, max_requests=5, timeout_ms=20))
    batching = triton.text_config(model, name="t", graph="t", source=source()).dynamic_batching
    policy = batching.default_queue_policy
    assert policy.timeout_action == policy.REJECT
    assert (batching.max_queue_delay_microseconds, policy.max_queue_size) == (0, 5)
    assert policy.default_timeout_microseconds == 20_000


def test_teacher_has_its_own_graph(make_model: Callable[..., ServedModel]) -> None:
    config = triton.text_config(make_model(), name="sst2_teacher", graph="sst2_teacher", source=source())
    assert config.name == "sst2_teacher"
    assert triton.parameters_of(config)["onnx"] == "model.onnx"


def test_instances_of_a_cascade_wait_side_by_side(make_model: Callable[..., ServedModel]) -> None:
    model = make_model()
    config = triton.cascade_config(model, model, teacher_name="sst2_teacher", threshold=0.8)
    assert [(group.kind, group.count) for group in config.instance_group] == [(pb.ModelInstanceGroup.KIND_CPU, 4)]


def test_runner_takes_only_the_inputs_of_its_graph(make_model: Callable[..., ServedModel]) -> None:
    inputs = ("input_ids", "attention_mask")
    config = triton.runner_config(make_model(instances=2, intra_op_threads=3), name="sst2_student", inputs=inputs)
    assert tuple(tensor.name for tensor in config.input) == inputs
    assert [list(tensor.dims) for tensor in config.input] == [[-1], [-1]]
    assert (config.output[0].name, list(config.output[0].dims)) == ("logits", [2])
    assert config.instance_group[0].count == 1
    assert triton.parameters_of(config)["intra_op_threads"] == "6"


def test_the_onnxruntime_backend_is_told_files_instances_and_threads(make_model: Callable[..., ServedModel]) -> None:
    model = make_model(runtime="onnxruntime", instances=2, intra_op_threads=3)
    config = triton.graph_config(model, name="sst2_student", inputs=("input_ids", "attention_mask"))
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.onnx")
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [
        ("input_ids", [-1]),
        ("attention_mask", [-1]),
    ]
    assert (config.instance_group[0].kind, config.instance_group[0].count) == (2, 2)
    assert triton.parameters_of(config) == {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "1",
        "execution_mode": "0",
    }
    # Any level that can be written is lower than the default.
    assert not config.HasField("optimization")
    assert config.HasField("dynamic_batching")


def test_gpu_configs_serve_the_fp16_graph(make_model: Callable[..., ServedModel]) -> None:
    model = make_model(runtime="onnxruntime", max_batch_size=64, max_tokens=128)
    processor = triton.graph_config(model, name="sst2_student", inputs=("input_ids", "attention_mask"))
    cuda, tensorrt = (triton.gpu_config(processor, model, tensorrt=wanted) for wanted in (False, True))
    for config in (cuda, tensorrt):
        assert config.default_model_filename == "model.fp16.onnx"
        assert config.instance_group[0].kind == config.instance_group[0].KIND_GPU
        assert config.instance_group[0].count == 1
        assert triton.parameters_of(config)["intra_op_thread_count"] == "1"
        assert config.input == processor.input
        assert triton.from_text(triton.to_text(config)) == config
    (accelerator,) = cuda.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "cuda"
    (accelerator,) = tensorrt.optimization.execution_accelerators.gpu_execution_accelerator
    given = dict(accelerator.parameters)
    assert accelerator.name == "tensorrt"
    assert {bound: given[f"trt_profile_{bound}_shapes"] for bound in ("min", "opt", "max")} == {
        "min": "input_ids:1x1,attention_mask:1x1",
        "opt": "input_ids:8x32,attention_mask:8x32",
        "max": "input_ids:64x128,attention_mask:64x128",
    }
    assert (given["precision_mode"], given["trt_engine_cache_enable"]) == ("FP16", "1")


def test_a_text_model_asks_where_the_backend_has_the_graph(make_model: Callable[..., ServedModel]) -> None:
    model = make_model(runtime="onnxruntime")
    parameters = triton.parameters_of(triton.text_config(model, name="sst2", graph="sst2_student", source=source()))
    assert parameters["student"] == "sst2_student"
    assert parameters["inputs"] == '["input_ids", "attention_mask"]'
    embedded = triton.text_config(make_model(), name="sst2", graph="sst2_student", source=source())
    assert "student" not in triton.parameters_of(embedded)


def test_the_embedded_runtime_has_no_graph_for_gpus(make_model: Callable[..., ServedModel]) -> None:
    with pytest.raises(ModelError, match=r"gpu_onnx is g\.onnx, but the runtime is embedded"):
        make_model(gpu_onnx=Path("g.onnx"))


def test_broken_text_names_the_line() -> None:
    with pytest.raises(RepositoryError, match=r"config.pbtxt is not .* \(2:1 .*publish it again"):
        triton.from_text('name: "a"\nnmae: "b"\n')


@given(st.text())
def test_warmup_text_begins_with_its_length_in_bytes(text: str) -> None:
    raw = triton.text_bytes(text)
    assert int.from_bytes(raw[:4], "little") == len(raw) - 4
    assert raw[4:].decode() == text


@given(
    labels=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=4, unique=True),
    pair=st.booleans(),
    delay=st.integers(0, 10**6),
    batch=st.integers(1, 1024),
)
def test_every_config_survives_the_round_trip(labels: list[str], pair: bool, delay: int, batch: int) -> None:
    from hypothesis import assume

    assume(len(labels) != 1)
    assume(all(label.strip() and label.splitlines() == [label] for label in labels))
    model = ServedModel(
        name="sst2",
        onnx=Path("m"),
        tokenizer=Path("t"),
        labels=tuple(labels),
        pair=pair,
        max_tokens=8,
        max_batch_size=batch,
        queue=Queue(max_delay_us=delay),
    )
    config = triton.text_config(model, name="sst2", graph="s", source=source())
    assert triton.from_text(triton.to_text(config)) == config
