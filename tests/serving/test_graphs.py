"""Which releases a graph can be compared with."""

import onnx
import pytest
from tritonclient.grpc import model_config_pb2 as pb

from serving.errors import RepositoryError
from serving.graphs import IN_PYTHON, RELEASES, graph_faults, listed_release


def test_a_release_that_is_not_listed_reads_what_the_one_before_it_does(kit, tmp_path):
    assert [listed_release(release) for release in ("24.06", "24.09", "25.12", "30.01")] == [
        "24.06",
        "24.06",
        "25.07",
        max(RELEASES),
    ]
    file = kit.write_graph(tmp_path / "model.onnx")
    model = onnx.load(file)
    model.ir_version = 11
    onnx.save(model, file)
    assert next(graph_faults(file, pb.ModelConfig(), "25.03")) == (
        "model.onnx has IR version 11; Triton 25.03 is not listed here, and 25.02 before it has ONNX Runtime 1.20.1, "
        "which reads 10 at most"
    )


@pytest.mark.parametrize(("ir_version", "opset"), [(11, 23), (12, 23), (11, 24)])
def test_models_in_python_have_their_own_runtime_in_every_container(kit, tmp_path, ir_version, opset):
    assert IN_PYTHON in RELEASES.values()
    file = kit.write_graph(tmp_path / "model.onnx")
    model = onnx.load(file)
    model.ir_version, model.opset_import[0].version = ir_version, opset
    onnx.save(model, file)
    config = pb.ModelConfig()
    config.input.add(name="TEXT", data_type=pb.TYPE_STRING)
    for release in RELEASES:
        found = [line for line in graph_faults(file, config, release, in_python=True) if "in Python" in line]
        assert bool(found) == ((ir_version, opset) != (11, 23))


@pytest.mark.parametrize("release", ["24.05", "24.13", "25.1", "latest", "25.001", "25.0१"])
def test_what_is_no_release_is_refused_with_the_rule(release):
    with pytest.raises(RepositoryError, match=r"is not known here; give one as year.month, 24\.06 or later"):
        listed_release(release)
