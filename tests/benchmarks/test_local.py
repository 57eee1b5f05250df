"""How calls are timed in process, and what the benchmark itself adds."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import local
from benchmarks.local import Effort, System, measurement_overhead, read_test, rounds_summary, throughput
from benchmarks.runs import open_run
from compressor import latency
from compressor.checkpoints import load_tokenizer
from compressor.dataset import Inputs, encode
from compressor.evaluate import OnnxPredictor, predict
from tests.conftest import Line

EFFORT = Effort(rounds=3, turn_s=0.05, served_rounds=1, served_turn_s=0.1)


def test_throughput_is_all_texts_over_all_time() -> None:
    assert throughput([100.0, 300.0], batch=32) == pytest.approx(64 / 0.4)


@pytest.mark.parametrize("batch", [1, 32])
def test_slow_and_fast_systems_read_the_same_texts_in_a_round(batch: int, line: Line, tmp_path: Path) -> None:
    run = open_run(line.run)
    encoded = encode(run.corpus, "validation", load_tokenizer(run.int8.path), run.max_tokens, cache=tmp_path)
    read: dict[str, list[list[int]]] = {"slow": [], "fast": []}

    def system(name: str, delay_s: float) -> System:
        def predictor(inputs: Inputs) -> Any:
            time.sleep(delay_s)
            read[name].append(inputs.input_ids_BS.ravel().tolist())

        return System(predictor=predictor, size_bytes=1, encoded={"validation": encoded})

    calls = local.real_calls({"slow": system("slow", 0.02), "fast": system("fast", 0.0)}, batch, seed=0)

    def read_in_round(number: int) -> set[tuple[int, ...]]:
        read["slow"].clear()
        read["fast"].clear()
        replace(EFFORT, rounds=1).time_rounds(lambda _: calls(number), 0, least=local.calls_of_a_round(batch))
        slow, fast = ({tuple(ids) for ids in read[name]} for name in ("slow", "fast"))
        assert fast == slow
        return slow

    assert read_in_round(0) != read_in_round(1)


def test_a_round_s_median_is_of_its_own_calls() -> None:
    found = rounds_summary([[1.0, 2.0, 30.0], [5.0]])
    assert (found["p50_by_round_ms"], found["p50_ms"], found["calls"]) == ([2.0, 5.0], 3.5, 4)


def test_what_the_benchmark_adds_is_a_share_of_the_fastest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SETTLE_S", 0.0)
    systems: dict[str, Any] = {
        "fast": {"latency": {"1x8": {"p50_ms": 0.5}, "8x8": {"p50_ms": 2.0}}},
        "slow": {"latency": {"1x8": {"p50_ms": 9.0}}},
    }
    shares = []
    for seed in range(5):
        found = measurement_overhead(systems, EFFORT, seed)
        assert found["fastest_p50_ms"] == 0.5
        assert found["share"] == found["empty_call_p50_ms"] / 0.5 > 0
        shares.append(found["share"])
    # The least of them: a busy machine holds up any call.
    assert min(shares) < 0.05


def test_a_quick_look_answers_the_first_test_rows(line: Line, tmp_path: Path) -> None:
    run = open_run(line.run)
    encoded = encode(run.corpus, "test", load_tokenizer(run.int8.path), run.max_tokens, cache=tmp_path)
    predictor = OnnxPredictor(run.onnx.path / "student" / "model.onnx", threads=1)
    system = System(predictor=predictor, size_bytes=1, encoded={"test": encoded})
    guesser = replace(system, is_trained=False)
    few = replace(EFFORT, test_rows=7)
    found = local.test_logits({"student": system, "guesser": guesser}, few)
    assert list(found) == ["student"]  # what is not trained answers nothing
    assert np.abs(found["student"] - predict(predictor, encoded)[:7]).max() < 1e-6
    texts, label_N = read_test(run, few)
    assert (len(texts), len(label_N)) == (7, 7)
    assert len(read_test(run, EFFORT)[0]) == 48
