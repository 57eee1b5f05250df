"""The load file, run as users run it: locust patches a whole process. Its parts are tested in this one, unpatched."""

import argparse
import csv
import importlib
import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from compressor import machine
from serving.runtime import TritonServer, free_port

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "benchmarks" / "locustfile.py"


def locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run locust without its page."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def served(server: TritonServer) -> int:
    """How many requests the server has executed for the model that takes texts."""
    with urllib.request.urlopen(server.metrics_url) as page:
        found = re.search(r'^nv_inference_request_success{model="sst2",version="1"} (\d+)$', page.read().decode(), re.M)
    assert found
    return int(found[1])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file with one text a line."""
    file = tmp_path / "texts.txt"
    file.write_text("a good film\na bad film with some scenes\na fine film\n")
    return file


@pytest.mark.triton
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_run_records_each_request(tiny_server: TritonServer, texts: Path, tmp_path: Path, protocol: str) -> None:
    url = tiny_server.http_url if protocol == "http" else tiny_server.grpc_url
    raw, summary = tmp_path / "raw.csv", tmp_path / "summary.json"
    before = served(tiny_server)
    done = locust(
        *("-u", "2", "-r", "2", "-t", "1s", "--host", url, "--protocol", protocol, "--texts", str(texts)),
        *("--batch", "3", "--raw", str(raw), "--summary", str(summary)),
    )
    assert done.returncode == 0, done.stderr
    with raw.open(newline="") as file:
        rows = list(csv.DictReader(file))
    facts = json.loads(summary.read_text())
    assert (facts["machine"], facts["versions"]) == (machine.fingerprint(), machine.versions())
    (found,) = facts["requests"]
    assert found["request"] == f"{protocol.upper()} sst2 x3"
    assert (found["answered"], found["failures"]) == (len(rows), 0)
    assert len(rows) > 10
    assert served(tiny_server) - before == len(rows) + 2  # two users' first requests; none was given up at the end
    assert any("." in row["response_ms"] and float(row["response_ms"]) % 1 > 0 for row in rows)
    assert found["p50_ms"] <= found["p90_ms"]
    assert f"{protocol.upper()} sst2 x3: p50 {found['p50_ms']:.3f} ms" in done.stderr


@pytest.mark.triton
def test_users_come_in_steps_and_a_rate_holds_each_back(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    done = locust(
        *("-u", "3", "--host", tiny_server.http_url, "--step-users", "2", "--step-seconds", "1", "--rate", "20"),
        *("--texts", str(texts), "--summary", str(summary)),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(summary.read_text())
    assert facts["rate_per_s_of_each_user"] == 20
    assert [step["users"] for step in facts["steps"]] == [2, 3]  # never more than -u
    found = [step["requests"][0] for step in facts["steps"]]
    assert found[1]["answered"] > found[0]["answered"] > 0
    assert sum(row["answered"] for row in found) == facts["requests"][0]["answered"]
    for users, row in zip((2, 3), found, strict=True):
        assert 10 * users < row["answered_per_s"] < 23 * users  # a closed loop reaches hundreds


@pytest.mark.triton
def test_processes_hand_their_raw_times_to_the_master(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    raw, summary, port = tmp_path / "raw.csv", tmp_path / "summary.json", str(free_port())
    done = locust(
        *("-u", "4", "-r", "4", "-t", "2s", "--host", tiny_server.http_url, "--processes", "2"),
        *(
            "--master-bind-port",
            port,
            "--master-port",
            port,
            "--texts",
            str(texts),
            "--raw",
            str(raw),
            "--summary",
            str(summary),
        ),
    )
    assert done.returncode == 0, done.stderr
    with raw.open(newline="") as file:
        rows = list(csv.DictReader(file))
    (found,) = json.loads(summary.read_text())["requests"]
    assert found["answered"] == len(rows) > 20
    assert found["failures"] == 0
    assert any(float(row["response_ms"]) % 1 > 0 for row in rows)


@pytest.mark.triton
def test_the_web_page_starts_and_runs_a_load(tiny_server: TritonServer, texts: Path) -> None:
    with opened("--host", tiny_server.http_url, "--texts", str(texts)) as address:
        assert "locust" in fetch(address).decode().lower()
        start(address, user_count=1, spawn_rate=1, host=tiny_server.http_url, rate=10.0)

        def answered() -> int:
            stats = json.loads(fetch(f"{address}/stats/requests"))["stats"]
            return sum(row["num_requests"] for row in stats if row["name"].startswith("sst2"))

        assert eventually(lambda: answered() or None)


@pytest.mark.triton
def test_each_start_in_the_page_begins_anew(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    raw, summary = tmp_path / "raw.csv", tmp_path / "summary.json"
    arguments = ("-u", "2", "--step-users", "1", "--step-seconds", "1", "--rate", "20", "--texts", str(texts))
    with opened(*arguments, "--raw", str(raw), "--summary", str(summary)) as address:
        for batch in (1, 2):
            start(address, host=tiny_server.http_url, batch=batch)
            eventually(lambda: state(address) in ("spawning", "running"))
            eventually(lambda: state(address) == "stopped")
    facts = json.loads(summary.read_text())
    (found,) = facts["requests"]
    with raw.open(newline="") as file:
        assert {row["request"] for row in csv.DictReader(file)} == {"HTTP sst2 x2"} == {found["request"]}
    answered = [step["requests"][0]["answered"] for step in facts["steps"]]
    assert len(answered) == 2
    assert sum(answered) == found["answered"]


@contextmanager
def opened(*arguments: str) -> Iterator[str]:
    """The address of locust's page, for as long as the block runs."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--web-host", "127.0.0.1"]
    command += ["--web-port", str(port), *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as page:
        try:
            address = f"http://127.0.0.1:{port}"
            eventually(lambda: fetch(address))
            yield address
        finally:
            page.terminate()


def state(address: str) -> str:
    """What locust does, by its page itself: the figures that the page asks for are two seconds old."""
    found = re.search(r'"state": "(\w+)"', fetch(address).decode())
    assert found
    return found[1]


def start(address: str, **form: Any) -> None:
    """Send the form of the page."""
    assert json.loads(fetch(f"{address}/swarm", urllib.parse.urlencode(form).encode()))["success"] is True


def fetch(address: str, form: bytes | None = None) -> bytes:
    """The answer of the page."""
    with urllib.request.urlopen(address, form, timeout=10) as answer:
        return bytes(answer.read())


def eventually(ask: Callable[[], Any], timeout_s: float = 40.0) -> Any:
    """The first true answer of `ask`, asked again until there is one."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if found := ask():
                return found
        except OSError:
            pass  # it has not started to listen yet
        time.sleep(0.2)
    pytest.fail(f"nothing within {timeout_s:g} s")


def test_steps_up_to_no_number_of_users_are_one_sentence(texts: Path) -> None:
    # With a page: it does not ask for the number, where users come in steps.
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--web-host", "127.0.0.1"]
    command += ["--web-port", str(free_port()), "--step-users", "1", "--texts", str(texts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "--step-users 1 needs -u" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_sentence_and_an_exit_code(texts: Path) -> None:
    done = locust("-u", "1", "-t", "1s", "--host", "127.0.0.1:1", "--texts", str(texts))
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.triton
def test_pairs_for_a_model_of_single_texts_are_one_sentence(tiny_server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a film\tno film\n")
    done = locust("-u", "1", "-t", "1s", "--host", tiny_server.http_url, "--texts", str(tmp_path / "pairs.tsv"))
    assert done.returncode == 1
    assert "model sst2 reads single texts, which --texts" in done.stderr
    assert "Traceback" not in done.stderr


LIGHT = """
import runpy, sys
runpy.run_path(sys.argv[1])
print({"torch", "transformers", "onnxruntime", "datasets"} & {*sys.modules})
"""


def test_locust_starts_without_the_libraries_of_training() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, str(LOCUSTFILE)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# What follows needs no process of its own: locust is kept from patching this one.


@pytest.fixture(scope="module")
def load() -> Any:
    """The load file as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")
        return importlib.import_module("benchmarks.locustfile")


@pytest.fixture
def environment(load: Any) -> Callable[..., Any]:
    """A function that makes what locust hands to the load file, of what the command line says."""
    from locust.argument_parser import get_parser
    from locust.env import Environment
    from locust.event import Events

    def make(*arguments: str) -> Any:
        options = get_parser().parse_args(list(arguments))
        return Environment(user_classes=[load.HttpClassifier], events=Events(), parsed_options=options)

    return make


def left(load: Any, environment: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The one sentence with which locust ends before it has begun."""
    with pytest.raises(SystemExit) as found:
        load.prepare(environment)
    assert found.value.code == 1
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("-u", "2", "--step-seconds", "0.5"),
            "--step-users 1 must be above 0, and --step-seconds 0.5 at least 1: locust looks once a second",
        ),
        ((), "--step-users 1 needs -u, the users of the last step"),
    ],
)
def test_steps_that_lead_nowhere_are_refused(
    load: Any,
    environment: Callable[..., Any],
    texts: Path,
    caplog: pytest.LogCaptureFixture,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    given = environment("--headless", "--step-users", "1", "--texts", str(texts), *arguments)
    assert left(load, given, caplog) == sentence


def test_a_step_that_a_late_tick_missed_does_not_end_the_counting(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = load.Steps(argparse.Namespace(step_users=2, step_seconds=1.0, num_users=8))
    clock = iter([100.0, 102.5, 103.1])
    monkeypatch.setattr(load.time, "time", lambda: next(clock))
    shape._begins = [(0, load.time.time())]
    for passed_s, users in ((0.9, 2), (2.5, 6), (3.1, 8), (4.0, None)):  # the second step is never seen
        monkeypatch.setattr(shape, "get_run_time", lambda passed_s=passed_s: passed_s)
        assert (shape.tick() or (None,))[0] == users
    samples = [load.Sample("HTTP sst2 x1", moment_s, 1.0, False) for moment_s in (100.5, 102.6, 103.2, 103.3)]
    found = [(step["users"], step["requests"][0]["answered"]) for step in shape.summarize(samples)]
    assert found == [(2, 1), (6, 1), (8, 2)]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"text": "a film"}\n{"sentence": "a film"}', "row 2 has no key 'text' but 'sentence'; rename it"),
        ("b.jsonl", '{"text": "a", "text_b": "b"}\n{"text": "a"}', "row 2 has no key 'text_b' but 'text'; rename it"),
        ("c.jsonl", '["a film"]', "row 1 is no JSON object; it must be one with the key 'text'"),
        ("d.jsonl", '{"text": "a film"}\n{', "row 2 is no JSON (Expecting"),
    ],
)
def test_texts_under_another_key_are_one_sentence(
    load: Any,
    environment: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    text: str,
    sentence: str,
) -> None:
    file = tmp_path / name
    file.write_text(text)
    said = left(load, environment("--headless", "--texts", str(file)), caplog)
    assert said.startswith(f"--texts {file} cannot be used: {sentence}")


def test_files_that_cannot_be_used_are_one_sentence(
    load: Any, environment: Callable[..., Any], texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    none, nowhere = str(tmp_path / "none.txt"), str(tmp_path / "none" / "raw.csv")
    for flags, file in ((("--texts", none), none), (("--texts", str(texts), "--raw", nowhere), nowhere)):
        said = left(load, environment("--headless", *flags), caplog)
        assert said.startswith("--texts, --raw or --summary cannot be used: ")
        assert repr(file) in said
        caplog.clear()


def test_percentiles_are_of_answered_requests(load: Any) -> None:
    samples = [load.Sample("HTTP sst2 x1", 10.0 + i / 100, float(i + 1), i == 0) for i in range(21)]
    (found,) = load.summarize(samples)
    assert (found["answered"], found["failures"]) == (20, 1)
    assert (found["p50_ms"], found["p99_ms"]) == (11.5, None)
    assert found["answered_per_s"] == pytest.approx(20 / 0.221)


def test_the_page_offers_what_it_can_change_and_starts_anew(
    load: Any, environment: Callable[..., Any], texts: Path
) -> None:
    from locust.argument_parser import ui_extra_args_dict

    assert set(ui_extra_args_dict([])) == {"model", "batch", "seed", "rate"}
    given = environment("--texts", str(texts))
    recorder = load.Recorder(given)
    recorder.listen()

    def measured(heard: str) -> list[Any]:
        given.events.request.fire(
            request_type="HTTP", name="sst2 x1", response_time=1.0, exception=None, start_time=0.0, response_length=0
        )
        assert recorder._samples
        getattr(given.events, heard).fire(environment=given)
        return list(recorder._samples)

    assert not measured("test_start")
    assert not measured("reset_stats")
    first = [recorder.next_user().random() for _ in range(2)]
    given.events.test_start.fire(environment=given)
    assert [recorder.next_user().random() for _ in range(2)] == first


@pytest.mark.parametrize("changes", [{"batch": 0}, {"rate": -1.0}, {"rate": math.nan}])
def test_what_the_page_lets_through_is_refused(
    load: Any,
    environment: Callable[..., Any],
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, float],
) -> None:
    given = environment("--texts", str(texts))
    given.host = "127.0.0.1:1"
    monkeypatch.setattr(load.ClassifierUser, "recorder", load.Recorder(given), raising=False)
    user = load.HttpClassifier(given)
    user.on_start()  # as the parser has left it
    user.on_stop()
    vars(given.parsed_options).update(changes)
    with pytest.raises(argparse.ArgumentTypeError, match="must be a"):
        user.on_start()


def test_texts_and_pairs_are_read_from_each_kind_of_file(load: Any, tmp_path: Path) -> None:
    rows = {
        "single": {"text": ["a film", "one\tmore"]},
        "pairs": {"text": ["a film", "é"], "text_b": ["no film", "two"]},
    }
    for name, columns in rows.items():
        table = pa.table(columns)
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        lines = [json.dumps(row) for row in table.to_pylist()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "single.txt").write_text("a film\n\none\tmore\n")
    (tmp_path / "pairs.tsv").write_text("a film\tno film\né\ttwo\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "half.tsv").write_text("a film\t\n")
    (tmp_path / "three.tsv").write_text("a\tb\tc\n")
    (tmp_path / "blank.jsonl").write_text('{"text": "a", "text_b": " "}\n')
    single, pairs = ["a film", "one\tmore"], [("a film", "no film"), ("é", "two")]
    for ending in ("txt", "jsonl", "arrow"):
        assert load.read_texts(tmp_path / f"single.{ending}") == single
    for ending in ("tsv", "jsonl", "arrow"):
        assert load.read_texts(tmp_path / f"pairs.{ending}") == pairs
    for name in ("empty.txt", "half.tsv", "three.tsv", "blank.jsonl"):
        with pytest.raises(ValueError, match="must hold a"):
            load.read_texts(tmp_path / name)
