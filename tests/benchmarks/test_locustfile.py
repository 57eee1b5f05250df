"""The load file, run as users run it: locust patches a whole process, so never in this one."""

import csv
import json
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
        *("-u", "2", "-r", "2", "-t", "3s", "--host", url, "--protocol", protocol, "--texts", str(texts)),
        *("--batch", "3", "--raw", str(raw), "--summary", str(summary)),
    )
    assert done.returncode == 0, done.stderr
    with raw.open(newline="") as file:
        rows = list(csv.DictReader(file))
    (found,) = json.loads(summary.read_text())["requests"]
    assert found["request"] == f"{protocol.upper()} sst2 x3"
    assert (found["answered"], found["failures"]) == (len(rows), 0)
    assert len(rows) > 10
    assert served(tiny_server) - before == len(rows) + 2  # two users' first requests; none was given up at the end
    assert any("." in row["response_ms"] and float(row["response_ms"]) % 1 > 0 for row in rows)
    assert found["p50_ms"] <= found["p90_ms"]
    assert f"{protocol.upper()} sst2 x3: p50 {found['p50_ms']:.3f} ms" in done.stderr


@pytest.mark.triton
def test_a_rate_holds_users_back(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    done = locust(
        *("-u", "2", "-r", "2", "-t", "4s", "--host", tiny_server.grpc_url, "--protocol", "grpc", "--rate", "5"),
        *("--texts", str(texts), "--summary", str(summary)),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(summary.read_text())
    (found,) = facts["requests"]
    assert facts["rate_per_s_of_each_user"] == 5
    assert 7 < found["answered_per_s"] < 11.5  # two users, five requests a second each


@pytest.mark.triton
def test_users_come_in_steps(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    done = locust(
        *("-u", "3", "--host", tiny_server.http_url, "--step-users", "2", "--step-seconds", "2", "--rate", "20"),
        *("--texts", str(texts), "--summary", str(summary)),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(summary.read_text())
    assert [step["users"] for step in facts["steps"]] == [2, 3]  # never more than -u
    answered = [step["requests"][0]["answered"] for step in facts["steps"]]
    assert answered[1] > answered[0] > 0
    assert sum(answered) == facts["requests"][0]["answered"]


@pytest.mark.triton
def test_processes_hand_their_raw_times_to_the_master(tiny_server: TritonServer, texts: Path, tmp_path: Path) -> None:
    raw, summary, port = tmp_path / "raw.csv", tmp_path / "summary.json", str(free_port())
    done = locust(
        *("-u", "4", "-r", "4", "-t", "4s", "--host", tiny_server.http_url, "--processes", "2"),
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
    arguments = ("-u", "2", "--step-users", "1", "--step-seconds", "2", "--rate", "20", "--texts", str(texts))
    with opened(*arguments, "--raw", str(raw), "--summary", str(summary)) as address:
        for batch in (1, 2):
            start(address, host=tiny_server.http_url, batch=batch)
            eventually(lambda: json.loads(fetch(f"{address}/stats/requests"))["state"] == "running" or None)
            eventually(lambda: json.loads(fetch(f"{address}/stats/requests"))["state"] == "stopped" or None)
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


def test_steps_of_no_length_are_one_sentence(texts: Path) -> None:
    done = locust("-u", "2", "--step-users", "1", "--step-seconds", "0", "--texts", str(texts))
    assert done.returncode == 1
    assert "--step-users 1 and --step-seconds 0 must be above 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["--headless", "--web-port"])
def test_steps_up_to_no_number_of_users_are_one_sentence(texts: Path, where: str) -> None:
    mode = [where] if where == "--headless" else ["--web-host", "127.0.0.1", where, str(free_port())]
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *mode, "--step-users", "1", "--texts", str(texts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "--step-users 1 needs -u" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_sentence_and_an_exit_code(texts: Path) -> None:
    done = locust("-u", "1", "-t", "1s", "--host", "127.0.0.1:1", "--texts", str(texts))
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"text": "a film"}\n{"sentence": "a film"}', "row 2 has no key 'text' but 'sentence'; rename it"),
        ("b.jsonl", '{"text": "a", "text_b": "b"}\n{"text": "a"}', "row 2 has no key 'text_b' but 'text'; rename it"),
        ("c.jsonl", '["a film"]', "row 1 is no JSON object; it must be one with the key 'text'"),
        ("d.jsonl", '{"text": "a film"}\n{', "row 2 is no JSON (Expecting"),
    ],
)
def test_texts_under_another_key_are_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    done = locust("-u", "1", "-t", "1s", "--texts", str(file))
    assert done.returncode == 1
    assert f"--texts {file} cannot be used: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_texts_are_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    done = locust("-u", "1", "-t", "1s", "--texts", str(tmp_path / "none.txt"))
    assert done.returncode == 1
    assert "none.txt" in done.stderr
    assert "Traceback" not in done.stderr


UNITS = """
import runpy, sys
file = runpy.run_path(sys.argv[1])
from serving.exchange import Classification, Regression

def refused(label, score, probabilities, count=1):
    answer = Classification(text="a", label=label, score=score, probabilities=probabilities)
    try:
        file["check_answers"]([answer], ("negative", "positive"), count)
    except file["WrongAnswerError"]:
        return True
    return False

right = {"negative": 0.25, "positive": 0.75}
assert not refused("positive", 0.75, right)
assert refused("other", 0.75, right)
assert refused("positive", 0.75, right, count=2)
assert refused("positive", 0.25, right)
assert refused("positive", float("nan"), {"negative": float("nan"), "positive": 0.5})

def wrong_number(value, labels=()):
    try:
        file["check_answers"]([Regression(text="a", pair="b", value=value)], labels, 1)
    except file["WrongAnswerError"]:
        return True
    return False

assert not wrong_number(2.5)
assert wrong_number(float("nan"))
assert wrong_number(2.5, ("negative", "positive"))

Sample = file["Sample"]
samples = [Sample("HTTP sst2 x1", 10.0 + i / 100, float(i + 1), i == 0) for i in range(21)]
(found,) = file["summarize"](samples)
assert (found["answered"], found["failures"]) == (20, 1)
assert found["p50_ms"] == 11.5 and found["p99_ms"] is None, found
assert abs(found["answered_per_s"] - 20 / 0.221) < 1e-6, found
assert not any(name in sys.modules for name in ("torch", "compressor", "transformers"))
"""


PAGE = """
import argparse, runpy, sys
file = runpy.run_path(sys.argv[1])
from locust.argument_parser import get_parser, ui_extra_args_dict
from locust.env import Environment

assert set(ui_extra_args_dict([])) == {"model", "batch", "seed", "rate"}

options = get_parser().parse_args(["--texts", sys.argv[2]])
environment = Environment(events=file["events"], parsed_options=options)
recorder = file["Recorder"](environment)
recorder.listen()

def measured(heard):
    environment.events.request.fire(
        request_type="HTTP", name="sst2 x1", response_time=1.0, exception=None, start_time=0.0, response_length=0
    )
    assert recorder._samples
    getattr(environment.events, heard).fire(environment=environment)
    return recorder._samples

assert not measured("test_start")
assert not measured("reset_stats")

first = [recorder.next_user().random() for _ in range(2)]
environment.events.test_start.fire(environment=environment)
assert [recorder.next_user().random() for _ in range(2)] == first

def refused(**changes):
    vars(options).update(batch=1, rate=0.0)
    vars(options).update(changes)
    file["HttpClassifier"].recorder = recorder
    try:
        file["HttpClassifier"](environment).on_start()
    except argparse.ArgumentTypeError:
        return True
    return False

environment.host = "127.0.0.1:1"
assert not refused()
assert refused(batch=0) and refused(rate=-1.0) and refused(rate=float("nan"))
"""


def test_the_page_offers_what_it_can_change_and_starts_anew(texts: Path) -> None:
    command = [sys.executable, "-c", PAGE, str(LOCUSTFILE), str(texts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


READS = """
import runpy, sys
from pathlib import Path
read_texts, folder = runpy.run_path(sys.argv[1])["read_texts"], Path(sys.argv[2])
single, pairs = ["a film", "one\\tmore"], [("a film", "no film"), ("é", "two")]
assert read_texts(folder / "single.txt") == read_texts(folder / "single.jsonl") == read_texts(folder / "single.arrow")
assert read_texts(folder / "single.txt") == single
for ending in ("tsv", "jsonl", "arrow"):
    assert read_texts(folder / f"pairs.{ending}") == pairs, ending
for name in ("empty.txt", "half.tsv", "three.tsv", "blank.jsonl"):
    try:
        read_texts(folder / name)
    except ValueError:
        continue
    raise SystemExit(f"{name} was taken")
"""


def test_texts_and_pairs_are_read_from_each_kind_of_file(tmp_path: Path) -> None:
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
    command = [sys.executable, "-c", READS, str(LOCUSTFILE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.triton
def test_pairs_for_a_model_of_single_texts_are_one_sentence(tiny_server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a film\tno film\n")
    done = locust("-u", "1", "-t", "1s", "--host", tiny_server.http_url, "--texts", str(tmp_path / "pairs.tsv"))
    assert done.returncode == 1
    assert "model sst2 reads single texts, which --texts" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_answers_are_failures_and_percentiles_are_of_answered_requests() -> None:
    done = subprocess.run([sys.executable, "-c", UNITS, str(LOCUSTFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
