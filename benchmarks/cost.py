"""What a system costs beside its latency: start and memory of a process, processor time, money."""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cold
from benchmarks.forms import Forms
from benchmarks.local import THROUGHPUT_BATCH, CallsOf, Effort, System, calls_of_a_round, real_calls
from compressor.errors import ModelError
from compressor.latency import SETTLE_S
from serving.model import Text

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 300

log = logging.getLogger(__name__)


def measure_starts(
    systems: Sequence[str], forms: Forms, text: Text, *, threads: int, starts: int
) -> dict[str, dict[str, Any]]:
    """By system, after a process that loads nothing: seconds from its start to its first answer, and its memory.

    Each of `starts` processes is a new one; the median counts. The files are in the system's cache from the second
    start on. Raises ModelError if a process fails.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (cold.ALONE, *systems)}
    for number in range(starts):
        for name in found:
            log.info("start %d of %d: %s ...", number + 1, starts, name)
            found[name].append(_start(name, forms, text, threads))
    return {
        name: {
            "starts": starts,
            "first_answer_s": statistics.median(row["first_answer_s"] for row in rows),
            "uss_bytes": statistics.median(row["uss_bytes"] for row in rows),
            "rss_bytes": statistics.median(row["rss_bytes"] for row in rows),
        }
        for name, rows in found.items()
    }


def _start(system: str, forms: Forms, text: Text, threads: int) -> dict[str, float]:
    facts = asdict(forms)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        request = {
            "system": system,
            "places": {name: str(value) for name, value in facts.items() if isinstance(value, Path)},
            "facts": {name: value for name, value in facts.items() if not isinstance(value, Path)},
            "text": text,
            "threads": threads,
            "result": str(file),
        }
        began_s = time.monotonic()  # one clock for all processes of a machine
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cold", json.dumps(request)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise ModelError(f"a process that loads {system} alone fails; the last it says is: {last}")
        result = json.loads(file.read_text(encoding="utf-8"))
    return {"first_answer_s": result["answered_s"] - began_s, **result}


def processor_seconds(
    systems: Mapping[str, System], effort: Effort, *, price_per_core_hour: float, seed: int
) -> dict[str, dict[str, Any]]:
    """By system: processor seconds of all threads per 1,000 real texts, alone and in batches, and what they cost."""
    found: dict[str, dict[str, Any]] = {name: {} for name in systems}
    for batch, what in ((1, "one_at_a_time"), (THROUGHPUT_BATCH, f"batches_of_{THROUGHPUT_BATCH}")):
        log.info("in process: processor time, batch %d ...", batch)
        per_call_s = _processor_turns(real_calls(systems, batch, seed), calls_of_a_round(batch), effort, seed)
        for name, seconds in per_call_s.items():
            per_1000 = 1000 * seconds / batch
            found[name][what] = {
                "cpu_s_per_1000_texts": per_1000,
                "price_per_million_texts": price(per_1000, price_per_core_hour),
            }
    return found


def price(cpu_s_per_1000_texts: float, per_core_hour: float) -> float:
    """What a million texts cost if each core is paid for just as long as it works."""
    return 1000 * cpu_s_per_1000_texts / 3600 * per_core_hour


def _processor_turns(calls_of: CallsOf, least: int, effort: Effort, seed: int) -> dict[str, float]:
    """Processor seconds of one call of each, turn by turn; what a library's threads wait for, spinning, is counted."""
    spent_s, count = defaultdict[str, float](float), Counter[str]()
    random = np.random.default_rng(seed)
    for number in range(effort.rounds):
        calls = calls_of(number)
        for name in random.permutation(sorted(calls)).tolist():
            time.sleep(SETTLE_S)
            calls[name]()
            end, before_s, made = time.perf_counter() + effort.turn_s, time.process_time(), 0
            while made < least or time.perf_counter() < end:
                calls[name]()
                made += 1
            spent_s[name] += time.process_time() - before_s
            count[name] += made
    return {name: spent_s[name] / count[name] for name in count}
