from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import served
from benchmarks.counted import Counted
from benchmarks.load import Answered, Load, closed_loop
from benchmarks.local import Effort
from benchmarks.open_loop import Arrivals, Arrived
from benchmarks.runs import open_run
from compressor.tasks import TASKS
from serving import Text, triton
from serving.errors import RepositoryError, RequestError, ServingError, UnavailableError
from serving.runtime import TritonServer
from tests.conftest import Line

TEXTS = ["a good film", "a bad film with some scenes", "a fine film"]
EFFORT = Effort(rounds=1, turn_s=0.1, served_rounds=2, served_turn_s=0.3, concurrency=(1, 4), load_shares=(0.5, 0.9))


def test_a_row_joins_raw_times_and_counts_failures() -> None:
    parts = [Answered([1.0, 2.0], [], 1.0, 0.3), Answered([3.0], ["UnavailableError: full"], 0.5, 0.6)]
    row = served.load_row(4, parts, [0.25, 0.5])
    assert (row["p50_ms"], row["calls"], row["requests_per_s"], row["failures"]) == (2.0, 3, 2.0, 1)
    assert row["first_failure"] == "UnavailableError: full"
    assert (row["p50_by_round_ms"], row["requests_by_round_per_s"]) == ([1.5, 3.0], [2.0, 2.0])
    # The server also answered three requests of each of the four clients before each turn.
    assert row["server_cpu_s_per_1000_texts"] == pytest.approx(1000 * 0.75 / (4 + 3 * 4 * 2))
    assert row["client_cpu_s_per_1000_texts"] == pytest.approx(300.0)


def test_a_load_without_any_answer_is_an_error() -> None:
    parts = [Answered([1.0], ["UnavailableError: full"], 1.0), Answered([], ["DeadlineError: late"], 1.0)]
    with pytest.raises(
        ServingError, match=r"no request of 16 .* was answered in turn 2 of 2; its first failure: DeadlineError: late;"
    ):
        served.load_row(16, parts)


def test_models_take_turns_at_each_concurrency() -> None:
    sent: list[tuple[int, str, str]] = []

    def send(load: Load, texts: Sequence[Text]) -> Answered:
        sent.append((load.concurrency, load.model, load.url))
        return Answered([1.0], [], 1.0)

    models = {"sst2": served.Server(url="host:1"), "bert_base": served.Server(url="host:2")}
    rows = served.measure_loads(send, models, TEXTS, EFFORT, seed=0)
    assert [(model, url) for concurrency, model, url in sent if concurrency == 4] == [
        ("sst2", "host:1"),
        ("bert_base", "host:2"),
        ("bert_base", "host:2"),
        ("sst2", "host:1"),
    ]
    assert [row["concurrency"] for row in rows["sst2"]] == [1, 4]
    assert rows["sst2"][0]["server_cpu_s_per_1000_texts"] is None


def test_rates_are_shares_of_what_each_model_answers_and_slow_ones_are_asked_of_all() -> None:
    loads = {
        "sst2": [{"requests_per_s": 90.0}, {"requests_per_s": 100.0}],
        "sst2_teacher": [{"requests_per_s": 20.0}, {"requests_per_s": 10.0}],
    }
    rates = served.chosen_rates(loads, EFFORT)
    assert rates == {"sst2": [10.0, 18.0, 50.0, 90.0], "sst2_teacher": [10.0, 18.0]}


def test_models_take_turns_at_each_rate() -> None:
    sent: list[tuple[float, str]] = []

    def send(load: Arrivals, texts: Sequence[Text]) -> Arrived:
        sent.append((load.rate_per_s, load.model))
        return Arrived([2.0, 4.0], [0.1, 0.3], [], 0.5)

    rates = {"sst2": [10.0, 50.0], "sst2_teacher": [10.0]}
    rows = served.measure_arrivals(send, "host:1", rates, TEXTS, EFFORT, seed=0)
    assert sent == [
        (10.0, "sst2"),
        (10.0, "sst2_teacher"),
        (10.0, "sst2_teacher"),
        (10.0, "sst2"),
        *[(50.0, "sst2")] * 2,
    ]
    assert [row["rate_per_s"] for row in rows["sst2_teacher"]] == [10.0]
    (first, _) = rows["sst2"]
    assert (first["p50_ms"], first["answered_per_s"], first["failures"]) == (3.0, 4.0, 0)
    assert 0.1 < first["sent_late_p99_ms"] <= 0.3


def test_a_missing_repository_is_refused(line: Line, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="does not exist"):
        served.check_repository(open_run(line.run), tmp_path / "none")


@pytest.mark.triton
def test_the_processes_of_a_model_are_those_of_its_repository(line: Line, tiny_server: TritonServer) -> None:
    config = triton.from_text((line.repository / "sst2" / "config.pbtxt").read_text())
    threads = int(triton.parameters_of(config)["intra_op_threads"])
    found = served.shares(tiny_server.grpc_url, "sst2")
    assert found == {"instances": config.instance_group[0].count, "threads_of_each": threads}


class OneMissing:
    """A client of a server that lacks the teacher."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model

    def __enter__(self) -> "OneMissing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def labels(self) -> tuple[str, ...]:
        if self._model == "sst2_teacher":
            raise RequestError("unknown model sst2_teacher")
        return TASKS["sst2"].labels


def test_each_model_is_asked_for_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, line: Line) -> None:
    monkeypatch.setattr(served, "Client", OneMissing)
    monkeypatch.setattr(served, "shares", lambda url, model: {"instances": 3, "threads_of_each": 2})
    run = open_run(line.run)
    with pytest.raises(RequestError, match="sst2_teacher"):
        served.check_server(run, line.repository, "host:1")
    monkeypatch.setattr(served, "served_names", lambda run, url: ["sst2"])
    assert served.check_server(run, line.repository, "host:1") == 6


def test_no_server_is_one_sentence() -> None:
    load = Load(url="127.0.0.1:1", model="sst2", concurrency=1, seconds=0.1, seed=0)
    with pytest.raises(UnavailableError, match=r"no server answers at 127\.0\.0\.1:1"):
        closed_loop(load, TEXTS)


@pytest.mark.triton
def test_closed_loop_measures_a_real_server(tiny_server: TritonServer) -> None:
    load = Load(url=tiny_server.grpc_url, model="sst2", concurrency=2, seconds=0.5, seed=0)
    answered = closed_loop(load, TEXTS)
    assert not answered.failures
    assert len(answered.times_ms) > 10
    assert 0.4 < answered.seconds < 5
    # Two clients that wait for each answer cannot have waited longer than twice the time.
    assert sum(answered.times_ms) / 1000 <= 2 * answered.seconds


@pytest.mark.triton
def test_answers_come_in_the_order_of_the_texts(tiny_server: TritonServer) -> None:
    rows = served.ask(tiny_server.grpc_url, "sst2", [(text,) for text in TEXTS * 20], TASKS["sst2"])
    assert rows.shape == (len(TEXTS) * 20, 2)
    assert (rows.sum(axis=1) == 1).all()
    assert np.array_equal(rows[: len(TEXTS)], rows[-len(TEXTS) :])


@pytest.mark.triton
def test_the_server_counts_the_texts_that_were_sent_and_no_others(tiny_server: TritonServer) -> None:
    before = Counted.read(tiny_server.metrics_url, "sst2")
    served.ask(tiny_server.grpc_url, "sst2", [(text,) for text in TEXTS], TASKS["sst2"])
    assert Counted.read(tiny_server.metrics_url, "sst2").texts - before.texts == len(TEXTS)


@pytest.mark.triton
def test_the_parts_of_a_request_come_from_the_server(line: Line, tiny_server: TritonServer) -> None:
    running = served.Server(url=tiny_server.grpc_url, metrics_url=tiny_server.metrics_url)
    split = served.time_split_ms(open_run(line.run), running, EFFORT, seed=0)
    assert set(split) == {"sst2", "sst2_teacher"}
    for parts in split.values():
        assert list(parts) == ["client", "triton", "tokenizer", "onnxruntime"]
        assert min(parts.values()) > 0
        assert sum(parts.values()) < 1000 * EFFORT.served_turn_s
