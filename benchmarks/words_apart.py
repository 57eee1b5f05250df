"""words-apart: what a masked language model answers when several words of a text are masked in one pass.

Shape legend: N texts, M copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.runs import by_kind, required
from compressor.dataset import Rows, task_of
from compressor.errors import ConfigError, DataError
from compressor.recipe import augment_config
from compressor.sources import model_folder
from compressor.stages.augment.engine import row_seed
from compressor.stages.augment.masked_lm import WORDS_APART, Answers, MaskedLM, read_masked_lm
from compressor.stages.augment.quality import Teacher
from compressor.stages.augment.tools import Tools
from compressor.stages.augment.vectors import load_vectors
from compressor.stages.augment.words import ENGLISH, eligible_words
from compressor.statistics import wilson
from compressor.texts import read_texts
from compressor.world import keep_freed_memory

CANDIDATES = 15
ENDLESS = 1_000_000  # tokens: more than any text has
DISTANCES = (ENDLESS, 64, WORDS_APART, 16, 8)
WARMUP_TEXTS = 2


def compare_distances(
    run: Path,
    source: str,
    column: str,
    *,
    masked_lm: str | None,
    vectors: str,
    texts: int,
    threads: int,
    seed: int,
    command: str,
) -> dict[str, Any]:
    """Ask for the words of some texts at each distance; compare answers, time and the copies that come of them.

    The texts are spread over the documents of `source`. `masked_lm` is the source of a trained model; none = that of
    the run, whose teacher says whether a copy keeps the label that it gives the original. Raises CompressorError if
    something cannot be had.
    """
    keep_freed_memory()
    made = by_kind(run)
    corpus, teacher = (required(made, kind, run) for kind in ("examples", "teacher"))
    task = task_of(corpus)
    if task.is_pair or task.is_regression:
        raise ConfigError(f"--run {run} is of {task.name}; give one whose teacher labels single texts")
    if masked_lm is None and "masked-lm" not in made:
        raise ConfigError(f"--run {run} has made no masked language model; name one with --masked-lm")
    folder = made["masked-lm"].path if masked_lm is None else model_folder(masked_lm, what="--masked-lm")
    model, tokenizer = read_masked_lm(folder)
    config = augment_config(copies=1, candidates=CANDIDATES, vectors=vectors, masked_lm=str(folder))
    near, some = load_vectors(vectors, ENGLISH), _spread(read_texts(source, column, what="--texts"), texts)
    if not any(eligible_words(text) for text in some):
        raise DataError(f"--texts {source} holds no word that could be replaced")
    judge = Teacher(teacher.path, task, max_tokens=ENDLESS)
    label_N = judge.probabilities([(text,) for text in some]).argmax(axis=1)
    begun = report.Begun()
    alone, rows = list[Answers](), list[dict[str, Any]]()
    for apart in DISTANCES:
        tools = Tools(config, ENGLISH, near, MaskedLM(model, tokenizer, threads=threads, apart=apart))
        tools.answers(some[:WARMUP_TEXTS])
        started = time.perf_counter()
        answers = tools.answers(some)
        seconds = time.perf_counter() - started
        found = [answers[text] for text in some]
        if not any(found):
            raise DataError(f"--texts {source} holds no word that is one word piece of {folder}; give other texts")
        alone = alone or found
        rows.append(
            {
                "apart_tokens": None if apart == ENDLESS else apart,
                "seconds": seconds,
                "words_per_s": sum(map(len, found)) / seconds,
                **_likeness(alone, found),
                **_kept_labels(tools, some, answers, judge, label_N, seed),
            }
        )
    lengths = [len(ids) for ids in tokenizer(some, truncation=False)["input_ids"]]
    return {
        "benchmark": "words-apart",
        "run": str(run),
        **report.context(begun, command=command, seed=seed, threads=threads),
        "texts": source,
        "masked_lm": str(folder),
        "texts_asked": len(some),
        "tokens_per_text": sum(lengths) / len(lengths),
        "candidates": CANDIDATES,
        "distances": rows,
    }


def _spread(documents: Iterator[str], count: int) -> list[str]:
    """`count` different texts, evenly from all that are not empty."""
    texts = list(dict.fromkeys(text for text in documents if text.strip()))
    return texts[:: max(1, len(texts) // count)][:count]


def _likeness(alone: Sequence[Answers], together: Sequence[Answers]) -> dict[str, Any]:
    """How much of the answers of words that are masked alone comes back: the likeliest, and of all candidates."""
    pairs = [(first[start], second[start]) for first, second in zip(alone, together, strict=True) for start in first]
    return {
        "words": len(pairs),
        "same_likeliest": sum(first[:1] == second[:1] for first, second in pairs) / len(pairs),
        "shared_candidates": sum(len({*first} & {*second}) for first, second in pairs)
        / sum(len(first) for first, _ in pairs),
    }


def _kept_labels(
    tools: Tools, texts: Sequence[str], answers: Mapping[str, Answers], judge: Teacher, label_N: Rows, seed: int
) -> dict[str, Any]:
    """How often the teacher gives a copy of a text the label (N,) that it gives the text."""
    made = tools.made([(text,) for text in texts], answers, [row_seed(seed, row) for row in range(len(texts))])
    copies = {row: one.copies[0].texts for row, one in enumerate(made) if one.copies}
    found_M = judge.probabilities(list(copies.values())).argmax(axis=1)
    same = int((found_M == label_N[list(copies)]).sum())
    return {
        "copies": len(copies),
        "label_kept": same / len(copies),
        "label_kept_interval_95": wilson(same, len(copies)),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for people."""
    rows = result["distances"]
    lines = [
        [
            "one word in a pass" if row["apart_tokens"] is None else str(row["apart_tokens"]),
            number(row["words_per_s"], 0),
            number(rows[0]["seconds"] / row["seconds"]),
            number(100 * row["same_likeliest"], 1),
            number(100 * row["shared_candidates"], 1),
            "{:.1f} ({:.1f} to {:.1f})".format(
                *(100 * value for value in (row["label_kept"], *row["label_kept_interval_95"]))
            ),
        ]
        for row in rows
    ]
    return [
        Table(
            f"{result['texts_asked']} texts of {result['tokens_per_text']:.0f} tokens, {rows[0]['words']:,} words; "
            f"{WORDS_APART} is what augment uses",
            ["tokens apart", "words/s", "times", "same likeliest, %", "same candidates, %", "label kept, %"],
            lines,
        )
    ]
