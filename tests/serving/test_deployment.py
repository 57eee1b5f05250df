"""The files for the official container: valid by their own tools, and a start that closes what must be closed."""

import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from serving import Client, RepositoryError, free_port, write
from serving.deployment import write_deployment
from serving.graphs import IN_PYTHON, RELEASES
from serving.triton import ENGINE_CACHE
from serving.wheel import environment, find_wheel, prepare_backends, prepare_binary

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "deploy"
    write_deployment(folder)
    return folder


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RepositoryError, match="is there and not an empty folder"):
        write_deployment(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_linter_of_dockerfiles_finds_nothing(files: Path) -> None:
    found = subprocess.run([BIN / "hadolint", files / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("name", ["deployment", "service", "disruption", "autoscaler"])
def test_manifests_are_what_kubernetes_takes(files: Path, name: str) -> None:
    import kubernetes_validate

    manifest = yaml.safe_load((files / "kubernetes" / f"{name}.yaml").read_text())
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    manifest["spec"]["mispelt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_autoscaler_alone_says_how_many_there_are(files: Path) -> None:
    deployment, autoscaler = (
        yaml.safe_load((files / "kubernetes" / name).read_text()) for name in ("deployment.yaml", "autoscaler.yaml")
    )
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]


def test_the_gpu_patch_is_one_of_the_deployment(files: Path) -> None:
    deployment, patch, all_of_them = (
        yaml.safe_load((files / "kubernetes" / name).read_text())
        for name in ("deployment.yaml", "gpu-patch.yaml", "kustomization.yaml")
    )
    assert patch["metadata"]["name"] == deployment["metadata"]["name"]
    (mine,), (theirs,) = (each["spec"]["template"]["spec"]["containers"] for each in (patch, deployment))
    assert mine["name"] == theirs["name"]
    assert {f"kubernetes/{name}" for name in all_of_them["resources"]} <= {
        str(path.relative_to(files)) for path in files.rglob("*.yaml")
    }


def test_compose_starts_what_the_other_files_speak_of(files: Path) -> None:
    compose, gpu, prometheus = (
        yaml.safe_load((files / name).read_text()) for name in ("compose.yaml", "compose.gpu.yaml", "prometheus.yml")
    )
    services = compose["services"]
    exposed = re.search(r"^EXPOSE (.*)$", (files / "Dockerfile").read_text(), re.MULTILINE)
    assert exposed is not None
    ports = exposed[1].split()
    # Nothing is open to other machines, and every port is one that the server has.
    published = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert {port.rpartition(":")[2] for port in services["triton"]["ports"]} < set(ports)
    ((target,),) = [each["targets"] for scrape in prometheus["scrape_configs"] for each in scrape["static_configs"]]
    assert target.split(":")[0] in services
    assert target.split(":")[1] in ports
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    folder = mounted["./prometheus.yml"].rpartition("/")[0]
    for name in prometheus["rule_files"]:
        assert mounted[f"./{name}"] == f"{folder}/{name}"
        assert (files / name).is_file()
    assert set(gpu["services"]) < set(services)
    for file in (compose, gpu):
        named = [volume.split(":")[0] for service in file["services"].values() for volume in service.get("volumes", [])]
        assert {name for name in named if not name.startswith(".")} == set(file["volumes"])
    assert gpu["services"]["triton"]["command"][0] == "/opt/compressor/start.sh"


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_gives(files: Path) -> None:
    autoscaler, adapter, alerts = (
        yaml.safe_load((files / name).read_text())
        for name in ("kubernetes/autoscaler.yaml", "kubernetes/adapter-values.yaml", "alerts.yml")
    )
    (rule,), (metric,) = adapter["rules"]["custom"], autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    # What Prometheus itself records under this name is the same, and the alerts ask for nothing of ours beside it.
    rules = [each for group in alerts["groups"] for each in group["rules"]]
    recorded = {each["record"]: each["expr"] for each in rules if "record" in each}
    assert set(recorded) == {rule["name"]["as"]}
    plain = rule["metricsQuery"].replace("<<.GroupBy>>", "job, instance").replace("{<<.LabelMatchers>>}", "")
    assert "".join(plain.split()) == "".join(recorded[rule["name"]["as"]].split())
    for alert in rules:
        if "alert" in alert:
            assert set(re.findall(r"\btriton_\w+", alert["expr"])) <= set(recorded)
    failing = next(each for each in rules if each.get("alert") == "TritonFailing")
    assert {"nv_inference_request_failure", "nv_inference_request_success"} == set(
        re.findall(r"\bnv_\w+", failing["expr"])
    )


def test_all_files_mean_the_same_places_and_versions(files: Path) -> None:
    texts = {path.name: path.read_text() for path in files.rglob("*") if path.is_file()}
    for name in ("Dockerfile", "compose.gpu.yaml", "deployment.yaml"):
        assert ENGINE_CACHE in texts[name]
    (release,) = [line.removeprefix("ARG TRITON=") for line in texts["Dockerfile"].splitlines() if "ARG TRITON" in line]
    assert release in RELEASES
    assert f"TRITON: ${{TRITON:-{release}}}" in texts["compose.yaml"]
    # The tokenizer that answers must be the one that trained.
    pinned = dict(line.split("==") for line in texts["requirements.txt"].split())
    assert pinned["tokenizers"] == distribution("tokenizers").version
    assert pinned["onnxruntime"] == IN_PYTHON.onnxruntime
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert {"deploy/*", "deploy/kubernetes/*"} <= set(project["tool"]["setuptools"]["package-data"]["serving"])


@pytest.fixture(scope="module")
def started(
    kit: Any, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, int], Path]]:
    """The script of the image, with the installed server in place of the container's: its process, ports and log.

    The last test ends it.
    """
    folder = tmp_path_factory.mktemp("started")
    write(kit.tiny_model(folder / "model", response_cache=True), folder / "models")
    wheel = find_wheel()
    binary, backends = prepare_binary(wheel, folder), prepare_backends(wheel, folder)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "tritonserver").write_text(
        f"#!/bin/sh\nexec {binary} --backend-directory={backends} --cache-directory={wheel.caches} "
        '--allow-gpu-metrics=false "$@"\n'
    )
    (programs / "tritonserver").chmod(0o755)
    variables = environment(wheel)
    variables |= {
        "PATH": f"{programs}:{variables['PATH']}",
        "ADDRESS": "127.0.0.1",
        "MODELS": str(folder / "models"),
    }
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    command = [str(files / "start.sh"), *(f"--{name}-port={port}" for name, port in ports.items())]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        with Client(f"127.0.0.1:{ports['grpc']}", retries=8) as client:
            client.classify(["good"])
        yield process, ports, log
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@pytest.mark.parametrize(("name", "ends"), [("triton_python_backend_stub", True), ("kubectl_exec", False)])
def test_only_a_dead_model_process_ends_the_server(files: Path, tmp_path: Path, name: str, ends: bool) -> None:
    for program, lines in {
        "tritonserver": f"{name} &\nexec /bin/sleep 60",  # waits for no child, as Triton does
        name: "exit 0",
        "sleep": "exec /bin/sleep 0.05",
    }.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / program).chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODELS": str(tmp_path)}
    process = subprocess.Popen([files / "start.sh"], env=variables, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    dead: list[str] = []
    try:
        process.wait(20 if ends else 2)
    except subprocess.TimeoutExpired:
        statuses = [Path(f"/proc/{child}/status").read_text() for child in children.read_text().split()]
        dead = [status for status in statuses if "State:\tZ" in status]
    finally:
        process.kill()
        process.wait()  # what watches it ends only then
        _, said = process.communicate()
    assert bool(dead) != ends
    assert ("the process of a model has died" in said) == ends


@pytest.mark.triton
def test_the_start_of_the_image_lets_nobody_change_models(started: tuple[Any, dict[str, int], Path]) -> None:
    _, ports, _ = started
    control = InferenceServerClient(f"127.0.0.1:{ports['grpc']}", channel_args=[("grpc.enable_http_proxy", 0)])
    for call in (
        lambda: control.load_model("sst2"),
        lambda: control.unload_model("sst2"),
        control.get_system_shared_memory_status,
        control.get_log_settings,
        lambda: control.get_trace_settings("sst2"),
    ):
        with pytest.raises((InferenceServerException, grpc.RpcError), match=r"admin-key|restricted"):
            call()
    control.close()


@pytest.mark.triton
def test_the_metrics_that_are_asked_for_are_there(started: tuple[Any, dict[str, int], Path], files: Path) -> None:
    _, ports, _ = started
    texts = [(files / name).read_text() for name in ("alerts.yml", "kubernetes/adapter-values.yaml")]
    asked = {name for text in texts for name in re.findall(r"\b(?:nv|compressor)_\w+", text)}
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics") as page:
        there = set(re.findall(r"^# TYPE (\w+)", page.read().decode(), re.MULTILINE))
    assert len(asked) >= 2
    assert asked <= there


@pytest.mark.triton
def test_a_model_process_that_dies_ends_the_server(started: tuple[Any, dict[str, int], Path]) -> None:
    process, _, log = started
    assert process.poll() is None
    found = subprocess.run(["ps", "-wwo", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, check=True)
    stubs = [
        int(line.split()[0]) for line in found.stdout.decode().splitlines() if "triton_python_backend_stub" in line
    ]
    os.kill(stubs[0], signal.SIGKILL)
    process.wait(60)
    assert "the process of a model has died; the server ends" in log.read_text()
