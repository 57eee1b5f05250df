"""Knows which fields of a model's configuration are looked at before a server is started."""

from collections.abc import Iterator

from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2 as pb

# What `triton` writes, and what `verify` looks at besides.
_FIELDS = {
    *("name", "backend", "platform", "max_batch_size", "default_model_filename", "parameters"),
    *("response_cache", "response_cache.enable"),
    *(f"version_policy.{policy}" for policy in ("all", "latest", "latest.num_versions", "specific.versions")),
    *(f"input.{field}" for field in ("name", "data_type", "dims")),
    *(f"output.{field}" for field in ("name", "data_type", "dims", "label_filename")),
    *(f"instance_group.{field}" for field in ("kind", "count", "gpus")),
    *("dynamic_batching", "dynamic_batching.max_queue_delay_microseconds", "dynamic_batching.default_queue_policy"),
    *(
        f"dynamic_batching.default_queue_policy.{field}"
        for field in ("max_queue_size", "default_timeout_microseconds", "timeout_action")
    ),
    *(f"model_warmup.{field}" for field in ("name", "batch_size")),
    *(f"model_warmup.inputs.{field}" for field in ("data_type", "dims", "zero_data", "input_data_file")),
    *(
        f"optimization.execution_accelerators.{kind}_execution_accelerator.{field}"
        for kind in ("cpu", "gpu")
        for field in ("name", "parameters")
    ),
}


def unknown_fields(config: pb.ModelConfig) -> list[str]:
    """Return each field, by its path, that a configuration sets and that is not looked at."""
    return sorted(set(_fields(config)) - _FIELDS)


def _fields(message: Message, path: str = "") -> Iterator[str]:
    """Yield each field that a message sets by its path, such as input.dims."""
    for field, value in message.ListFields():
        here = f"{path}{field.name}"
        if field.message_type is None or field.name == "parameters":
            yield here
            continue
        is_map = field.message_type.GetOptions().map_entry
        for each in value.values() if is_map else [value] if isinstance(value, Message) else value:
            yield from list(_fields(each, f"{here}.")) or [here]
