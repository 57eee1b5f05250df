"""augment: rows per second of word replacement, against one that works as the published code does.

The masked language model is of BERT-base's size with random weights: time needs no training.
Shape legend: V vocabulary.
"""

from __future__ import annotations

import json
import math
import operator
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.watch import watched
from compressor import artifact
from compressor.checkpoints import load_tokenizer
from compressor.config import AugmentConfig
from compressor.dataset import Example, write_examples
from compressor.errors import CompressorError, DataError, GateError
from compressor.recipe import augment_config
from compressor.sources import model_folder
from compressor.stages.augment import augmented
from compressor.stages.augment.engine import row_seed
from compressor.stages.augment.masked_lm import MaskedLM
from compressor.stages.augment.tools import Tools
from compressor.stages.augment.vectors import Vectors, load_vectors
from compressor.stages.augment.words import ENGLISH, Change, Word, changed, eligible_words
from compressor.tasks import TASKS
from compressor.world import keep_freed_memory

TASK = TASKS["sst2"]
COPIES, CANDIDATES = 20, 15
MODEL_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
TARGETS = {"times": 15.0, "vectors_rows_per_s": 20_000.0, "stage_s": 180.0, "stage_peak_gb": 1.0}

# MNLI: 392,702 pairs of texts of about 20 and 10 words, half of which can be replaced and are one piece. Each premise
# comes about three times; equal texts are computed once.
MNLI_ROWS = 392_702
MNLI_PREMISES = MNLI_ROWS / 3
MNLI_WORDS = (10.0, 5.0)
MNLI_TOKENS = (26.0, 14.0)
# One current GPU: an H100 has a peak of 989 dense bf16 TFLOP/s; a BERT in PyTorch reaches about a third of it.
GPU, GPU_FLOPS = "H100 at 330 TFLOP/s", 330e12
FLOPS_PER_TOKEN = 2 * 85e6  # weights of BERT-base without its embeddings, each used once


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    phrases: int
    """For the masked language model, in the way that is used here."""
    published_phrases: int
    """The same in the published way, which takes longer: a spread of them."""
    rows: int
    """For word vectors alone; 0 are all."""
    model: Mapping[str, int] = field(default_factory=dict)
    """Its sizes; the library's defaults are bert-base-uncased's."""


FULL = Plan(phrases=500, published_phrases=50, rows=0)
QUICK = Plan(phrases=60, published_phrases=6, rows=2000)


def measure(
    texts: Path, base: str, vectors: str, *, plan: Plan, processes: int, threads: int, seed: int, command: str
) -> dict[str, Any]:
    """Time both ways with a masked language model on the same phrases, then word vectors alone on all rows of a file.

    `texts` is a TSV file with a column sentence, as SST-2's; `base` is the source of a tokenizer. Raises DataError if
    the file has no such column.
    """
    keep_freed_memory()
    phrases = sentences(texts)
    begun = report.Begun()
    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(**plan.model)).eval().requires_grad_(False)
    tokenizer = load_tokenizer(model_folder(base, what="--base"))
    near = load_vectors(vectors)
    some, spread = phrases[: plan.phrases], max(1, min(plan.phrases, len(phrases)) // plan.published_phrases)
    config = augment_config(copies=COPIES, candidates=CANDIDATES, vectors=vectors, masked_lm="random weights")
    result = {
        "benchmark": "augment",
        "quick": plan is not FULL,
        "texts": str(texts),
        "phrases": len(some),
        "copies": COPIES,
        "candidates": CANDIDATES,
        "masked_lm": {name: getattr(model.config, name) for name in MODEL_SIZES},
        "tokenizer": base,
        "word_vectors": vectors,
        "published": published(some[::spread], model, tokenizer, near, threads=threads, seed=seed),
        "ours": ours(some, MaskedLM(model, tokenizer, threads=threads), near, config, seed=seed),
        "vectors": vectors_alone(phrases[: plan.rows or None], vectors, processes=processes, seed=seed),
        **report.context(begun, command=command, seed=seed, threads=threads),
    }
    result["times"] = result["ours"]["rows_per_s"] / result["published"]["rows_per_s"]
    result["mnli"] = mnli(result, some, tokenizer)
    return result


def sentences(texts: Path) -> list[str]:
    """Column sentence of a TSV file. Raises DataError if it has none."""
    header, *lines = (line.split("\t") for line in texts.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    if "sentence" not in header or any(len(line) != len(header) for line in lines) or not lines:
        raise DataError(f"{texts} has columns {', '.join(header)}; it must have rows with a sentence, as SST-2's")
    return [line[header.index("sentence")] for line in lines]


def published(
    phrases: Sequence[str], model: BertForMaskedLM, tokenizer: Any, near: Vectors, *, threads: int, seed: int
) -> dict[str, Any]:
    """Copies made as the published code makes them.

    One word at a time: a batch of one in float32, the unmasked text behind the masked one, every word of the
    vocabulary scored at every place and sorted; for other words the product with all vectors, sorted, never kept.
    """
    torch.set_num_threads(threads)
    stream, rows, words = random.Random(seed), 0, 0
    nearest = _published_neighbours(near)
    vocabulary = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    started = time.perf_counter()
    for phrase in phrases:
        found = list[tuple[Word, list[str]]]()
        for word in eligible_words(phrase):
            words += 1
            if len(tokenizer.tokenize(word.text)) == 1:
                masked = phrase[: word.start] + tokenizer.mask_token + phrase[word.end :]
                inputs = tokenizer(masked, phrase, return_tensors="pt")
                place = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0])
                with torch.no_grad():
                    scores_V = model(**inputs).logits[0, place]
                best = torch.argsort(scores_V, descending=True).tolist()[:CANDIDATES]
                found.append((word, [vocabulary[token] for token in best]))
            else:
                found.append((word, nearest(word.text.casefold())))
        made = {phrase}
        for _ in range(COPIES):
            changes = [
                Change(0, word.start, word.text, stream.choice(new), by_masked_lm=True)
                for word, new in found
                if new and stream.random() < 0.4
            ]
            made.add(changed(phrase, changes))
        rows += len(made)
    return _rates(phrases=len(phrases), rows=rows, words=words, seconds=time.perf_counter() - started)


def _published_neighbours(near: Vectors) -> Callable[[str], list[str]]:
    """The nearest words of one, by a product with every vector in float64 and a sort of all of them."""
    places, unit_VD = {word: place for place, word in enumerate(near.words)}, near.unit_VD.astype(np.float64)

    def nearest(word: str) -> list[str]:
        if word not in places:
            return []
        order = np.argsort(-(unit_VD @ unit_VD[places[word]]))[: CANDIDATES + 1]
        return [near.words[place] for place in order if place < len(near.words) and place != places[word]]

    return nearest


def ours(
    phrases: Sequence[str], masked_lm: MaskedLM, near: Vectors, config: AugmentConfig, *, seed: int
) -> dict[str, Any]:
    """Copies made as they are made here; the first few are made before, to warm up."""
    tools = Tools(config, ENGLISH, near, masked_lm)
    rows, seeds = [(phrase,) for phrase in phrases], [row_seed(seed, number) for number in range(len(phrases))]
    tools.answers(phrases[:20])
    started = time.perf_counter()
    answers = tools.answers(phrases)
    answered = time.perf_counter()
    count = sum(1 + len(made.copies) for made in tools.made(rows, answers, seeds))
    seconds = time.perf_counter() - started
    words = sum(len(found) for found in answers.values())
    rates = _rates(phrases=len(phrases), rows=count, words=words, seconds=seconds)
    return {**rates, "masked_lm_s": answered - started, "copies_s": seconds - (answered - started)}


def _rates(*, phrases: int, rows: int, words: int, seconds: float) -> dict[str, Any]:
    found = {"phrases": phrases, "rows": rows, "words": words, "seconds": seconds}
    return {**found, "rows_per_s": rows / seconds, "phrases_per_s": phrases / seconds}


STAGE = """\
import json, sys, time
from pathlib import Path
from compressor.artifact import Artifact
from compressor.recipe import augment_config
from compressor.stages.augment import augment_examples
folder, settings, processes, seed = Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:])
corpus, started = Artifact.open(folder / "corpus", kind="examples"), time.perf_counter()
config = augment_config(**settings)
made = augment_examples(config, corpus, seed=seed, key="benchmark", out=folder / "out", processes=processes)
seconds = time.perf_counter() - started
print(json.dumps({"rows": made.metrics["rows"], "seconds": seconds, "torch": "torch" in sys.modules}))
"""


def vectors_alone(phrases: Sequence[str], vectors: str, *, processes: int, seed: int) -> dict[str, Any]:
    """The rows of all phrases with word vectors alone: by the engine in one process, then by the stage, on disk."""
    config = augment_config(copies=COPIES, candidates=CANDIDATES, vectors=vectors)
    started = time.perf_counter()
    rows = sum(1 for _ in augmented(phrases, config, seed=seed))
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        section = {"task": TASK.model_dump(mode="json")}
        with artifact.write(folder / "corpus", "examples", key="benchmark", section=section, parents={}) as draft:
            examples = (Example((phrase,), number % 2, number) for number, phrase in enumerate(phrases))
            write_examples(draft.path / "train.arrow", examples, TASK)
        settings = json.dumps({"copies": COPIES, "candidates": CANDIDATES, "vectors": vectors})
        command = [sys.executable, "-c", STAGE, scratch, settings, str(processes), str(seed)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            watched(lambda: _memory_gb(process.pid)) as memory_gb,
        ):
            said, _ = process.communicate()
        if process.returncode:
            raise CompressorError(f"the stage ended with status {process.returncode}; what it said is above")
        told = json.loads(said)
    return {
        "originals": len(phrases),
        "rows": rows,
        "engine_s": seconds,
        "engine_rows_per_s": rows / seconds,
        "stage_rows": told["rows"],
        "stage_s": told["seconds"],
        "stage_rows_per_s": told["rows"] / told["seconds"],
        "stage_processes": processes,
        "stage_peak_gb": max(memory_gb),
        "stage_loads_torch": told["torch"],
    }


def _memory_gb(pid: int) -> float:
    """Memory of a process and all it started; shared pages count once (PSS). 0 if one of them has just ended."""
    try:
        top = psutil.Process(pid)
        return float(sum(one.memory_full_info().pss for one in (top, *top.children(recursive=True)))) / 1e9
    except psutil.Error:
        return 0.0


def mnli(result: Mapping[str, Any], phrases: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Hours that MNLI x COPIES takes at the measured rates, on this machine and on one GPU.

    A masked word costs a pass over the tokens of its text: rates are of tokens. In texts of over 33 tokens words share
    passes, which MNLI's have not; of SST-2's phrases so few are that long that the rate comes out at most 4 % too high.
    """
    words = [len(eligible_words(phrase)) for phrase in phrases]
    lengths = [len(ids) for ids in tokenizer(list(phrases))["input_ids"]]
    share = result["ours"]["words"] / sum(words)  # of the words that can be replaced, those that are one piece
    tokens_per_s = share * sum(map(operator.mul, words, lengths)) / result["ours"]["masked_lm_s"]
    texts = (MNLI_PREMISES, MNLI_ROWS)
    tokens = sum(map(math.prod, zip(texts, MNLI_WORDS, MNLI_TOKENS, strict=True)))
    rows = MNLI_ROWS * (1 + COPIES)
    rows_h = rows / result["vectors"]["stage_rows_per_s"] / 3600
    return {
        "rows": rows,
        "tokens": tokens,
        "tokens_per_s": tokens_per_s,
        "here_h": tokens / tokens_per_s / 3600 + rows_h,
        "published_h": sum(map(operator.mul, texts, MNLI_WORDS))
        * result["published"]["seconds"]
        / result["published"]["words"]
        / 3600,
        "gpu": GPU,
        "gpu_h": tokens * FLOPS_PER_TOKEN / GPU_FLOPS / 3600 + rows_h,
        "rows_h": rows_h,
    }


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError if a target is missed."""
    alone = result["vectors"]
    missed = [
        f"{what} is {value:,.2f}; the target is at {'least' if at_least else 'most'} {bound:,.0f}"
        for what, value, bound, at_least in (
            ("rows/s with a masked LM, times the published way", result["times"], TARGETS["times"], True),
            ("rows/s with word vectors", alone["engine_rows_per_s"], TARGETS["vectors_rows_per_s"], True),
            ("seconds of the stage", alone["stage_s"], TARGETS["stage_s"], False),
            ("memory of the stage in GB", alone["stage_peak_gb"], TARGETS["stage_peak_gb"], False),
        )
        if (value < bound if at_least else value > bound)
    ]
    if missed:
        raise GateError("; ".join(missed))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for people."""
    alone, projected = result["vectors"], result["mnli"]
    ways = [
        [
            name,
            *(
                number(result[way][key], digits)
                for key, digits in (("phrases", 0), ("rows_per_s", 1), ("phrases_per_s", 2))
            ),
        ]
        for name, way in (("published way", "published"), ("here", "ours"))
    ]
    parts = [
        ["masked language model", number(result["ours"]["masked_lm_s"])],
        ["copies, with the word vectors", number(result["ours"]["copies_s"])],
    ]
    lines = [
        [
            "engine, one process: rows/s",
            number(alone["engine_rows_per_s"], 0),
            f">= {TARGETS['vectors_rows_per_s']:.0f}",
        ],
        [f"stage, {alone['stage_processes']} processes: rows", number(alone["stage_rows"], 0), ""],
        ["stage: s", number(alone["stage_s"], 1), f"<= {TARGETS['stage_s']:.0f}"],
        ["stage: memory of all processes, GB", number(alone["stage_peak_gb"]), f"<= {TARGETS['stage_peak_gb']:.0f}"],
    ]
    hours = [
        ["published way, these cores", number(projected["published_h"], 1)],
        ["here, these cores", number(projected["here_h"])],
        [f"here, one GPU ({projected['gpu']})", number(projected["gpu_h"])],
        ["of it making rows, on these cores", number(projected["rows_h"])],
    ]
    return [
        Table(
            f"Masked LM of BERT-base's size, {COPIES} copies: {result['times']:.1f} times the published way (target "
            f">= {TARGETS['times']:.0f})",
            ["way", "phrases", "rows/s", "phrases/s"],
            ways,
        ),
        Table("Where the time goes here", ["part", "s"], parts),
        Table(
            f"Word vectors alone, {alone['originals']:,} phrases, {COPIES} copies", ["figure", "value", "target"], lines
        ),
        Table(f"Projected for MNLI x {COPIES} ({projected['rows']:,} rows)", ["where", "hours"], hours),
    ]
