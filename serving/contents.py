"""What each model of a repository holds: its configuration, its files, and the texts that it is warmed up with."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cascade import Cascade, cascade_answers
from serving.errors import ModelError
from serving.inprocess import PAD_MULTIPLE, Files
from serving.model import ServedModel, Text
from serving.sources import Source, read_source
from serving.versions import CONFIGS, Content

if TYPE_CHECKING:
    from serving import triton

EXPECTED = "expected.json"
"""In the version folder of a model that takes texts: its warm-up texts, and what they were answered when published."""

CASCADE = "cascade.json"
"""In the version folder of a cascade: its `Cascade`, and as `models` the digests of those whose answers are stored."""

_BATCH_ROWS = 8
"""Rows of the warm-up request that stands for a batch."""


def contents_of(student: ServedModel, teacher: ServedModel | None, cascade: Cascade | None) -> list[Content]:
    """Return what to publish, each model after those that it opens or asks: they must be there before it.

    Raises ModelError if a file cannot be served, or if the models do not fit together.
    """
    teacher_name = f"{student.name}_teacher"
    source = read_source(student)
    graph = _graph(student, source, f"{student.name}_student")
    found = [graph]
    if teacher is not None:
        _check_fit(student, teacher, teacher_name)
        found += _teacher(teacher, teacher_name)
    found.append(_text_model(student, source, student.name, "entry", graph))
    if cascade is not None:
        if teacher is None or not student.labels:
            raise ModelError(f"{student.name} can have no cascade: that takes a teacher, and labels to be sure of")
        asked = {content.name: content.digest for content in found if content.name in (student.name, teacher_name)}
        found.append(_cascade(student, teacher, teacher_name, cascade, asked))
    runtime = {} if student.runtime == "embedded" else {"runtime": student.runtime}
    return [replace(content, marker={**content.marker, **runtime}) for content in found]


def _check_fit(student: ServedModel, teacher: ServedModel, name: str) -> None:
    """Raise ModelError unless a teacher can be served, and compared, beside its student."""
    if teacher.name not in (student.name, name):
        raise ModelError(f"teacher is named {teacher.name!r}; beside {student.name} it must be {name!r}")
    if sorted(teacher.labels) != sorted(student.labels):
        raise ModelError(f"teacher answers {teacher.labels} but student {student.labels}; they cannot be compared")
    if teacher.pair != student.pair:
        raise ModelError(f"teacher has pair {teacher.pair} but student {student.pair}; they cannot be compared")
    if teacher.runtime != student.runtime:
        raise ModelError(f"teacher has runtime {teacher.runtime} but student {student.runtime}; one server has one")


def _cascade(
    student: ServedModel, teacher: ServedModel, teacher_name: str, cascade: Cascade, asked: Mapping[str, str]
) -> Content:
    """Return the cascade; `asked` are the digests of its models by name."""
    from serving import triton

    config = triton.cascade_config(student, teacher, teacher_name=teacher_name, threshold=cascade.threshold)
    facts = json.dumps({**asdict(cascade), "models": asked}, indent=1).encode()
    texts = student.warmup_texts
    own, other = (files_of(model).answers(texts) for model in (student, teacher))
    answers = cascade_answers(own, other, cascade.threshold)
    return Content(
        name=config.name,
        marker={"role": "cascade"},
        files={
            **_files(student, triton.to_text(config)),
            "model.py": code("cascade.py"),
            CASCADE: facts,
            EXPECTED: _expected(texts, answers),
        },
        warmup={},
    )


def _teacher(model: ServedModel, name: str) -> list[Content]:
    """Return the teacher; with a model for its graph, where the server's backend must run that."""
    source = read_source(model)
    if model.runtime == "embedded":
        return [_text_model(model, source, name, "teacher", None)]
    graph = _graph(model, source, f"{name}_graph")
    return [graph, _text_model(model, source, name, "teacher", graph)]


def _text_model(model: ServedModel, source: Source, name: str, role: str, graph: Content | None) -> Content:
    """Return a model that takes texts; `graph` is the one that holds its graph, None if it holds that itself."""
    from serving import triton

    # Until all models are loaded the server lets none ask another: there the graph alone can be warmed up.
    warmup, requests = _text_warmups(model) if model.runtime == "embedded" else ({}, [])
    config = triton.text_config(
        model, name=name, graph=name if graph is None else graph.name, source=source, warmups=requests
    )
    files = _text_files(model, triton.to_text(config), source)
    return Content(
        name=name,
        marker={"role": role} if graph is None else {"role": role, "student": graph.name},
        files=files if graph else {**files, "model.onnx": model.onnx},
        warmup=warmup,
        depends_on=graph.digest if graph else "",
    )


def _graph(model: ServedModel, source: Source, name: str) -> Content:
    """Return the model that takes token ids: of the onnxruntime backend, or a Python one in its place."""
    from serving import triton

    warmup, requests = _token_warmups(model, source)
    files: dict[str, Path | bytes] = {"model.onnx": model.onnx}
    if model.runtime == "embedded":
        config = triton.runner_config(model, name=name, inputs=source.inputs, warmups=requests)
        files["model.py"] = code("runner.py")
    else:
        config = triton.graph_config(model, name=name, inputs=source.inputs, warmups=requests)
    if model.gpu_onnx is not None:
        files[triton.GPU_GRAPH] = model.gpu_onnx
        for option, tensorrt in (("gpu", False), ("tensorrt", True)):
            text = triton.to_text(triton.gpu_config(config, model, tensorrt=tensorrt))
            files[f"{CONFIGS}/{option}.pbtxt"] = text.encode()
    return Content(
        name=name,
        marker={"role": "student"},
        files=_files(model, triton.to_text(config)) | files,
        warmup=warmup,
    )


def _token_warmups(model: ServedModel, source: Source) -> "tuple[dict[str, bytes], list[triton.Warmup]]":
    """Return the warm-up files by name, and the requests: each text or pair, padded as the model that asks pads it."""
    import numpy as np

    from serving import triton

    warmup: dict[str, bytes] = {}
    requests = []
    for number, (ids, type_ids) in enumerate(source.warmups):
        width = min(-(-len(ids) // PAD_MULTIPLE) * PAD_MULTIPLE, model.max_tokens)
        padding = (0, width - len(ids))
        tensors = {
            "input_ids": np.pad(ids, padding, constant_values=source.pad_id),
            "attention_mask": np.pad(np.ones(len(ids)), padding),
            "token_type_ids": np.pad(type_ids, padding),
        }
        inputs = {}
        for tensor in source.inputs:
            raw = tensors[tensor].astype("<i8").tobytes()
            inputs[tensor] = (_file_name(raw), (width,))
            warmup[_file_name(raw)] = raw
        requests.append(triton.Warmup(name=f"text{number}", batch_size=1, inputs=inputs))
    return warmup, requests


def _text_warmups(model: ServedModel) -> "tuple[dict[str, bytes], list[triton.Warmup]]":
    """Return the warm-up files by name, and the requests: each text or pair alone, and the longest as a batch."""
    from serving import triton

    examples = [
        [triton.text_bytes(part) for part in (text if isinstance(text, tuple) else (text,))]
        for text in model.warmup_texts
    ]
    named = [(f"text{number}", 1, raws) for number, raws in enumerate(examples)]
    rows = min(_BATCH_ROWS, model.max_batch_size)
    if examples and rows > 1:
        named.append(("batch", rows, max(examples, key=lambda raws: sum(map(len, raws)))))
    requests = [
        triton.Warmup(
            name=name,
            batch_size=size,
            # A single text fills the first input alone.
            inputs={tensor: (_file_name(raw), (1,)) for tensor, raw in zip(triton.TEXTS, raws, strict=False)},
        )
        for name, size, raws in named
    ]
    return {_file_name(raw): raw for raws in examples for raw in raws}, requests


def files_of(model: ServedModel, *, pad_id: int | None = None) -> Files:
    """Return what answers as a model will, before it is published; `pad_id` is read from its tokenizer if not given."""
    return Files(
        onnx=model.onnx,
        tokenizer=model.tokenizer,
        labels=model.labels,
        is_pair=model.pair,
        max_tokens=model.max_tokens,
        pad_id=read_source(model).pad_id if pad_id is None else pad_id,
    )


def _text_files(model: ServedModel, config: str, source: Source) -> dict[str, Path | bytes]:
    """Return what a model that takes texts needs, and what it must answer: whoever deploys it asks for that first."""
    answers = files_of(model, pad_id=source.pad_id).answers(model.warmup_texts)
    return {
        **_files(model, config),
        "model.py": code("model.py"),
        "tokenizer.json": model.tokenizer,
        EXPECTED: _expected(model.warmup_texts, answers),
    }


def _expected(texts: Sequence[Text], answers: Sequence[dict[str, float]]) -> bytes:
    rows = [{"text": text, "answer": answer} for text, answer in zip(texts, answers, strict=True)]
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def _files(model: ServedModel, config: str) -> dict[str, Path | bytes]:
    labels = "".join(f"{label}\n" for label in model.labels).encode()
    return {**({"labels.txt": labels} if labels else {}), "config.pbtxt": config.encode()}


def code(module: str) -> bytes:
    """Return a module of `serving.entry`, as it stands in the version folder of a model."""
    return resources.files("serving.entry").joinpath(module).read_bytes()


def _file_name(raw: bytes) -> str:
    return f"{hashlib.sha256(raw).hexdigest()[:16]}.bin"
