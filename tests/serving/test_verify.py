"""Every refusal of a server is found in the files before one is started."""

import errno
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import model_config_pb2 as pb

from serving import Client, RepositoryError, ServedModel, TritonServer, read, triton, write
from serving.cascade import Cascade
from serving.control import SERVED
from serving.graphs import RELEASES
from serving.online import verify_served
from serving.verify import CONFIG, verify
from tests.serving.conftest import classification


@pytest.fixture
def published(kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path) -> Path:
    """A repository of ours, with a teacher."""
    root = tmp_path / "repository"
    write(make_model(), root, teacher=kit.tiny_model(tmp_path / "teacher"))
    return root


@pytest.fixture
def plain(kit: Any, tmp_path: Path) -> Path:
    """A repository for the onnxruntime backend, written by hand."""
    folder = tmp_path / "plain" / "bag"
    kit.write_graph(folder / "1" / "model.onnx")
    (folder / "labels.txt").write_text("negative\npositive\n")
    config = pb.ModelConfig(name="bag", backend="onnxruntime", max_batch_size=4)
    for name in kit.ALL_INPUTS:
        config.input.add(name=name, data_type=pb.TYPE_INT64, dims=[-1])
    config.output.add(name="logits", data_type=pb.TYPE_FP32, dims=[2], label_filename="labels.txt")
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    (folder / CONFIG).write_text(triton.to_text(config))
    return folder.parent


def change(folder: Path, edit: Callable[[pb.ModelConfig], Any]) -> None:
    """Edit the configuration of a model."""
    config = triton.from_text((folder / CONFIG).read_text())
    edit(config)
    (folder / CONFIG).write_text(triton.to_text(config))


def faults(root: Path, **options: Any) -> list[str]:
    """Return the findings as lines."""
    return [" ".join(finding) for finding in verify(root, **options)]


def test_a_sound_repository_has_no_findings(published: Path, plain: Path) -> None:
    assert verify(published) == []
    assert verify(published, release="24.10") == []
    assert verify(plain, release="24.10") == []


def set_dims(tensor: Any, *dims: int) -> None:
    del tensor.dims[:]
    tensor.dims.extend(dims)


EDITS: list[tuple[Callable[[pb.ModelConfig], Any], str]] = [
    (lambda c: setattr(c, "name", "other"), "name is 'other'; it must be the folder's, 'bag'"),
    (lambda c: setattr(c, "backend", "onnx"), "backend is 'onnx'; known: python, onnxruntime"),
    (lambda c: setattr(c, "max_batch_size", 0), "below 1 no requests share a batch"),
    (lambda c: set_dims(c.input[0], -1, -1), r"input_ids has dims \[-1, -1\]; without the batch axis the graph has"),
    (lambda c: set_dims(c.input[0], 128), r"input_ids has dims \[128\]; the graph's axis is open, .* write -1"),
    (lambda c: set_dims(c.input[0], 0), r"input input_ids has dims \[0\]; each must be -1 or at least 1"),
    (lambda c: set_dims(c.output[0], 3), r"logits has dims \[3\]; without the batch axis the graph has \[2\]"),
    (lambda c: set_dims(c.output[0], 3), r"logits has dims \[3\] and labels.txt the labels"),
    (lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT32), "input_ids is TYPE_INT32; the graph has TYPE_INT64"),
    (lambda c: setattr(c.input[0], "data_type", pb.TYPE_INVALID), "input input_ids has no data_type"),
    (lambda c: setattr(c.input[0], "name", "ids"), r"names the inputs \['ids'\]; the graph has \['input_ids'"),
    (lambda c: c.input.pop(), r"has 2 inputs and lacks \['token_type_ids'\]"),
    (lambda c: c.input.add(name="more", data_type=pb.TYPE_INT64, dims=[-1]), r"names the inputs \['more'\]"),
    (lambda c: setattr(c.input[1], "name", "input_ids"), "each needs a name of its own"),
    (lambda c: setattr(c.output[0], "name", "scores"), r"names the outputs \['scores'\]; the graph has \['logits'\]"),
    (lambda c: c.ClearField("output"), "there is no output"),
    (lambda c: setattr(c.instance_group[0], "count", 0), "instance_group has no count"),
    (lambda c: c.ClearField("instance_group"), "there is no instance_group"),
    (lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_GPU), "the server will find 0"),
    (lambda c: c.version_policy.specific.versions.append(7), "bag 7 is a version that the policy names"),
    (lambda c: setattr(c, "default_model_filename", "m.onnx"), "bag 1 m.onnx is missing"),
    (lambda c: setattr(c.output[0], "label_filename", "l.txt"), "names the labels l.txt, which cannot be read"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS, ids=[message[:40] for _, message in EDITS])
def test_each_refusal_of_a_config_is_found(plain: Path, edit: Callable[[pb.ModelConfig], Any], message: str) -> None:
    change(plain / "bag", edit)
    assert re.search(message, "\n".join(faults(plain, release="24.10", gpus=0)))


def test_text_that_is_no_config_names_the_line(plain: Path) -> None:
    (plain / "bag" / CONFIG).write_text('name: "bag"\nmax_batch_size: "four"\n')
    (line,) = faults(plain, release="24.10")
    assert line.startswith("bag config.pbtxt config.pbtxt is not a Triton model configuration (2:17")
    (plain / "bag" / CONFIG).unlink()
    assert faults(plain) == ["bag config.pbtxt is missing; a server that completes configurations would guess one"]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"rows": 1}, r"its first axis must be open"),
        ({"kind": TensorProto.INT32}, "input_ids is TYPE_INT64; the graph has TYPE_INT32"),
        ({"output": "scores"}, r"names the outputs \['logits'\]; the graph has \['scores'\]"),
        ({"weights": np.zeros((9, 3), np.float32)}, r"the graph has \[3\]"),
    ],
)
def test_a_graph_that_does_not_fit_is_found(kit: Any, plain: Path, graph: dict[str, Any], message: str) -> None:
    kit.write_graph(plain / "bag" / "1" / "model.onnx", **graph)
    assert re.search(message, "\n".join(faults(plain, release="24.10")))


def test_versions_that_the_release_does_not_read_are_found(plain: Path) -> None:
    file = plain / "bag" / "1" / "model.onnx"
    model = onnx.load(str(file))
    model.ir_version = 11
    model.opset_import[0].version = 22
    onnx.save(model, str(file))
    assert faults(plain, release="24.10") == [
        "bag 1 model.onnx has IR version 11; Triton 24.10 has ONNX Runtime 1.19.2, which reads 10 at most",
        "bag 1 model.onnx has opset 22; Triton 24.10 has ONNX Runtime 1.19.2, which reads 21 at most",
    ]
    assert faults(plain, release="26.01") == []
    with pytest.raises(RepositoryError, match=r"Triton release '9' is not known here; give one as year.month, 24.06"):
        verify(plain, release="9")


def test_models_in_python_are_compared_with_the_runtime_beside_them(published: Path) -> None:
    file = published / "sst2_student" / "1" / "model.onnx"
    model = onnx.load(str(file))
    model.ir_version = 12
    onnx.save(model, str(file))
    fault = (
        "1 model.onnx has IR version 12; models in Python have ONNX Runtime 1.23.2 in the container, "
        "which reads 11 at most"
    )
    for release in ("24.10", "26.07"):
        assert {f"sst2 {fault}", f"sst2_student {fault}"} <= set(faults(published, release=release))
    assert fault not in "\n".join(faults(published))


@pytest.fixture
def asking(kit: Any, tmp_path: Path) -> Path:
    """A repository of ours for the onnxruntime backend, with a teacher, a cascade and graphs for GPUs."""
    gpu = kit.write_graph(tmp_path / "gpu.onnx")
    student, teacher = (
        kit.tiny_model(tmp_path / name, runtime="onnxruntime", gpu_onnx=gpu) for name in ("student", "teacher")
    )
    cascade = Cascade(threshold=0.5, accuracy=1, student_accuracy=1, teacher_accuracy=1, escalated=0, rows=1)
    write(student, tmp_path / "asking", teacher=teacher, cascade=cascade)
    return tmp_path / "asking"


def test_a_repository_for_the_backend_is_sound(asking: Path) -> None:
    assert read(asking) == ("sst2", "sst2_cascade", "sst2_student", "sst2_teacher", "sst2_teacher_graph")
    for release in RELEASES:
        assert verify(asking, release=release, gpus=0) == []
    for graph in ("sst2_student", "sst2_teacher_graph"):
        assert sorted(path.name for path in (asking / graph / "configs").iterdir()) == ["gpu.pbtxt", "tensorrt.pbtxt"]
        assert not (asking / graph / "1" / "model.py").exists()
    lines = faults(asking)
    assert [line.split()[0] for line in lines if "which the embedded server lacks" in line] == ["sst2_student"] * 3 + [
        "sst2_teacher_graph"
    ] * 3


def edit_gpu(folder: Path, edit: Callable[[pb.ModelConfig], Any]) -> None:
    """Edit the configuration for TensorRT."""
    file = folder / "configs" / "tensorrt.pbtxt"
    config = triton.from_text(file.read_text())
    edit(config)
    file.write_text(triton.to_text(config))


def accelerator(config: pb.ModelConfig) -> Any:
    return config.optimization.execution_accelerators.gpu_execution_accelerator[0]


GPU_EDITS: list[tuple[Callable[[pb.ModelConfig], Any], str]] = [
    (lambda c: setattr(accelerator(c), "name", "tensor_rt"), "is 'tensor_rt'; known: tensorrt, cuda"),
    (
        lambda c: accelerator(c).parameters.update(trt_profile_max_shapes="input_ids:4x12"),
        "trt_profile_max_shapes is 'input_ids:4x12'; it must give each input a shape",
    ),
    (lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_CPU), "no instance_group is KIND_GPU"),
    (lambda c: setattr(c, "default_model_filename", "m.onnx"), "version 1: m.onnx is missing"),
    (lambda c: set_dims(c.input[0], 128), r"version 1: input_ids has dims \[128\]"),
    (lambda c: c.parameters["intra_op_thread_count"].ClearField("string_value"), "intra_op_thread_count is ''"),
]


@pytest.mark.parametrize(("edit", "message"), GPU_EDITS, ids=[message[:30] for _, message in GPU_EDITS])
def test_each_refusal_of_a_gpu_config_is_found(
    asking: Path, edit: Callable[[pb.ModelConfig], Any], message: str
) -> None:
    edit_gpu(asking / "sst2_student", edit)
    assert re.search(f"sst2_student configs/tensorrt.pbtxt .*{message}", "\n".join(faults(asking, release="24.10")))


def test_what_a_model_asks_must_take_it(asking: Path) -> None:
    change(asking / "sst2_student", lambda config: setattr(config, "max_batch_size", 2))
    change(asking / "sst2_teacher_graph", lambda config: config.input.pop())
    found = "\n".join(faults(asking, release="24.10"))
    assert "sst2 config.pbtxt the model takes 4 rows and asks sst2_student, which takes 2" in found
    assert re.search(r"sst2_teacher config.pbtxt the model sends \['.*\] to sst2_teacher_graph, which takes", found)
    shutil.rmtree(asking / "sst2_student")
    assert re.search("the model asks sst2_student, which the repository lacks", "\n".join(faults(asking)))


def test_a_graph_that_is_too_short_for_its_texts_is_found(kit: Any, plain: Path, tmp_path: Path) -> None:
    graph = onnx.load(str(kit.write_graph(tmp_path / "m.onnx")))
    # Nine positions for twelve tokens.
    positions = numpy_helper.from_array(np.zeros((1, 9), np.int64), "positions")
    graph.graph.initializer.append(positions)
    graph.graph.node.insert(0, helper.make_node("Add", ["input_ids", "positions"], ["placed"]))
    graph.graph.node[1].input[1] = "placed"
    onnx.save(graph, str(tmp_path / "short.onnx"))
    model = kit.tiny_model(tmp_path / "short", onnx=tmp_path / "short.onnx", warmup_texts=())
    write(model, tmp_path / "repository")
    assert "sst2 1 model.onnx does not take a row of max_tokens, 12" in "\n".join(faults(tmp_path / "repository"))


def test_the_embedded_server_lacks_a_backend(plain: Path) -> None:
    assert "backend is 'onnxruntime', which the embedded server lacks" in faults(plain)[0]


def test_a_graph_that_does_not_open_here_is_found(published: Path) -> None:
    file = published / "sst2_student" / "1" / "model.onnx"
    model = onnx.load(str(file))
    model.ir_version = 99
    onnx.save(model, str(file))
    found = "\n".join(faults(published))
    assert "sst2_student 1 the installed ONNX Runtime does not open model.onnx" in found
    file.write_bytes(b"no graph")
    assert "sst2 1 model.onnx is not an ONNX file" in "\n".join(faults(published))
    file.unlink()
    assert "sst2 1 opens sst2_student/1/model.onnx, which is missing" in faults(published)


@pytest.mark.parametrize("way", ["relative", "symlink"])
def test_a_missing_graph_is_named_however_the_repository_is(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (published / "sst2_student" / "1" / "model.onnx").unlink()
    (published / "sst2_teacher" / "1" / "model.onnx").unlink()
    (tmp_path / "link").symlink_to(published)
    monkeypatch.chdir(tmp_path)
    found = faults(Path(published.name) if way == "relative" else tmp_path / "link")
    assert "sst2 1 opens sst2_student/1/model.onnx, which is missing" in found
    assert "sst2_teacher 1 opens sst2_teacher/1/model.onnx, which is missing" in found


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", "negative, positive", "is 'negative, positive'; it must be names, as JSON"),
        ("labels", "", "is ''; it must be names, as JSON"),
        ("inputs", '{"input_ids": 1}', "it must be names, as JSON"),
        ("pad_id", "none", "is 'none'; it must be a number"),
        ("max_tokens", "-1", "is '-1'; it must be a number"),
        ("onnx", "../{model}/model.onnx", r"is '../\{model\}/model.onnx'; it must be a path, with \{version\} for"),
        ("onnx", "{", "it must be a path"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_named(published: Path, name: str, value: str, message: str) -> None:
    change(published / "sst2", lambda config: setattr(config.parameters[name], "string_value", value))
    assert re.search(
        rf"^sst2 config.pbtxt the parameter {name} .*{message}", "\n".join(faults(published)), re.MULTILINE
    )


def set_parameter(name: str, value: str | None) -> Callable[[pb.ModelConfig], Any]:
    """Return what sets a parameter, or removes it."""
    if value is None:
        return lambda config: config.parameters.pop(name)
    return lambda config: setattr(config.parameters[name], "string_value", value)


OUR_EDITS: list[tuple[str, Callable[[pb.ModelConfig], Any], str]] = [
    (
        "sst2",
        lambda c: set_dims(c.model_warmup[0].inputs["TEXT"], 2),
        r"gives TEXT the dims \[2\]; the input has \[1\]",
    ),
    (
        "sst2_student",
        lambda c: c.model_warmup[0].inputs["input_ids"].dims.append(3),
        r"the dims \[8, 3\]; .*has \[-1\]",
    ),
    ("sst2", lambda c: c.dynamic_batching.preferred_batch_size.append(9), "preferred_batch_size is set, which is not"),
    ("sst2", lambda c: c.instance_group[0].gpus.append(0), r"names the GPUs \[0\] and is not KIND_GPU"),
    ("sst2", set_parameter("max_tokens", None), r"model.py reads the parameters \['max_tokens'\], which are missing"),
    ("sst2_student", set_parameter("intra_op_threads", None), r"reads the parameters \['intra_op_threads'\]"),
    ("sst2", set_parameter("intra_op_threads", "two"), "intra_op_threads is 'two'; it must be a number"),
    ("sst2", set_parameter("threshold", "half"), "threshold is 'half'; it must be a number"),
    ("sst2", set_parameter("inputs", '["ids"]'), r'inputs is \["ids"\]; model.onnx takes .*input_ids'),
    (
        "sst2",
        lambda c: c.output.pop(2),
        r"the outputs are LABEL .*; model.py has LABEL .*PROBABILITIES TYPE_FP32 \[2\]",
    ),
    (
        "sst2",
        lambda c: set_dims(c.input[0], -1),
        r"inputs are TEXT TYPE_STRING \[-1\]; model.py has TEXT TYPE_STRING \[1\]",
    ),
]


@pytest.mark.parametrize(("model", "edit", "message"), OUR_EDITS, ids=[message[:40] for *_, message in OUR_EDITS])
def test_what_a_server_refuses_of_a_config_of_ours_is_found(
    published: Path, model: str, edit: Callable[[pb.ModelConfig], Any], message: str
) -> None:
    change(published / model, edit)
    assert re.search(f"^{model} .*{message}", "\n".join(faults(published)), re.MULTILINE)


def test_a_cascade_has_the_tensors_of_its_code(asking: Path) -> None:
    change(asking / "sst2_cascade", lambda config: config.output.pop())
    found = "\n".join(faults(asking, release="24.10"))
    assert re.search(r"sst2_cascade 1 the outputs are .*; model.py has .*, ESCALATED TYPE_BOOL \[1\]", found)


@pytest.mark.parametrize(
    ("code", "message"), [("", "has no class TritonPythonModel"), ("def x(:", "is no Python: invalid syntax")]
)
def test_code_that_the_server_cannot_start_is_found(published: Path, code: str, message: str) -> None:
    (published / "sst2" / "1" / "model.py").write_text(code)
    assert f"sst2 1 model.py {message}" in "\n".join(faults(published))


def test_a_file_that_cannot_be_read_is_a_finding(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = published / "sst2" / CONFIG, Path.read_text

    def refused(path: Path, *arguments: Any) -> str:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(Path, "read_text", refused)
    assert faults(published) == ["sst2 config.pbtxt cannot be read: Permission denied"]


def test_a_warmup_without_a_type_is_found(published: Path) -> None:
    def clear(config: pb.ModelConfig) -> None:
        config.model_warmup[0].inputs["TEXT"].data_type = pb.TYPE_INVALID

    change(published / "sst2", clear)
    assert "gives TEXT as TYPE_INVALID" in "\n".join(faults(published))


def test_a_cascade_names_the_rows_as_those_that_it_asks(asking: Path) -> None:
    def turn(config: pb.ModelConfig) -> None:
        config.parameters["labels"].string_value = '["positive", "negative"]'

    message = "the model takes the answers of {} for ['negative', 'positive'], in this order; they are ['positive',"
    for asked in ("sst2", "sst2_teacher"):
        assert f"sst2_cascade config.pbtxt {message.format(asked)}" not in "\n".join(faults(asking, release="24.10"))
        change(asking / asked, turn)
        assert f"sst2_cascade config.pbtxt {message.format(asked)}" in "\n".join(faults(asking, release="24.10"))


def flip_a_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def test_one_flipped_byte_is_found_in_every_file(published: Path) -> None:
    files = [path for path in published.rglob("*") if path.is_file() and path.name not in (".compressor.json", SERVED)]
    assert len(files) > 20
    for file in files:
        before = file.read_bytes()
        flip_a_byte(file)
        assert verify(published), file
        file.write_bytes(before)
    assert verify(published) == []


def test_a_student_that_is_not_its_entry_models_is_found(kit: Any, published: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(kit.tiny_model(tmp_path / "b", onnx=kit.write_graph(tmp_path / "b.onnx", weights=kit.WEIGHTS * 2)), other)
    shutil.rmtree(published / "sst2_student")
    shutil.copytree(other / "sst2_student", published / "sst2_student")
    assert faults(published) == ["sst2 1 holds files that are not the ones that were published: a checksum differs"]
    shutil.rmtree(published / "sst2")
    assert faults(published)[-1] == " . sst2_student has no entry model beside it"


def test_labels_warmups_and_folders_are_checked(published: Path) -> None:
    model = published / "sst2"
    (model / "labels.txt").write_text("negative\nneutral\n")
    (model / "v2").mkdir()
    (model / "01").mkdir()
    file = next((model / "warmup").iterdir())
    file.write_bytes(b"\x05\x00\x00\x00good")
    change(model, lambda config: setattr(config.model_warmup[0], "batch_size", 99))
    found = "\n".join(faults(published))
    for line in (
        "sst2 config.pbtxt the parameter `labels` and labels.txt differ",
        "sst2 v2 is no version",
        "sst2 01 is no version",
        f"warmup/{file.name} does not hold 1 strings, each after its length in bytes",
        "warm-up text0 has the batch size 99; at most 4",
        f"{model / 'labels.txt'} is not the one of version 1",
    ):
        assert line in found


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="holds no model"):
        verify(tmp_path)
    with pytest.raises(RepositoryError, match="is no folder"):
        verify(tmp_path / "absent")


@pytest.mark.triton
def test_a_running_server_is_compared_with_the_files(kit: Any, published: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(published, other)
    kit.write_graph(other / "sst2_student" / "1" / "model.onnx", weights=kit.WEIGHTS * 0.5)
    write(kit.tiny_model(tmp_path / "b", labels=("no", "yes")), other)
    with TritonServer(published, **kit.ports()) as server:
        assert verify_served(published, server.grpc_url) == []
        with Client(server.grpc_url, version=1) as client:
            assert classification(client, "good").label == "positive"
        assert "version 2 is not ready" in [finding.fault for finding in verify_served(other, server.grpc_url)]
        # The server opened its files before: what they are now answers otherwise.
        kit.write_graph(published / "sst2_student" / "1" / "model.onnx", weights=kit.WEIGHTS * 0.5)
        found = [finding.fault for finding in verify_served(published, server.grpc_url)]
        assert any("with numbers" in fault and "from those of its files" in fault for fault in found)


def test_digests_are_of_the_bytes(published: Path) -> None:
    for file in (published / "sst2" / "warmup").iterdir():
        assert file.stem == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
