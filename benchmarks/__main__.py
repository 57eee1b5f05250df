"""The command line of the benchmarks. The only module here that writes to standard output."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import (
    EMBEDDED_BASE,
    EMBEDDED_VECTORS,
    JsonOption,
    OutOption,
    QuickOption,
    RepositoryOption,
    RunOption,
    SeedOption,
    SeedsOption,
    ThreadsOption,
)
from compressor.errors import CompressorError
from serving.errors import ServingError

if TYPE_CHECKING:
    from benchmarks.report import Table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Teacher and student, measured side by side. Load alone: locust -f benchmarks/locustfile.py",
)


@app.command("compare")
def run_compare(
    run: RunOption = Path("runs/sst2"),
    repository: RepositoryOption = Path("model_repository"),
    url: Annotated[str | None, typer.Option("--url", help="host:port (gRPC) of a server that runs already.")] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="Also what users take instead: transformers, optimum, torch-dynamic, openvino, openvino-int8. "
            "Once for each.",
        ),
    ] = None,
    bert_base: Annotated[
        bool, typer.Option("--bert-base", help="Also BERT-base in PyTorch, random weights: its speed and size.")
    ] = False,
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            min=0.1,
            help="Arrivals a second of the open loop, once for each; shares of the most "
            "that each model answers if not given.",
        ),
    ] = None,
    price: Annotated[float, typer.Option("--price-per-core-hour", min=0, help="Of one core, in any currency.")] = 0.04,
    against: Annotated[
        Path | None, typer.Option("--baseline", help="An earlier compare.json: exit with 3 if a ratio regressed.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, max=1, help="Share that a ratio may fall by.")
    ] = 0.1,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accuracy, latency, throughput, start, memory and cost of teacher and student, in process and served.

    Starts Triton on the model repository, unless --url says where it runs. Takes half an hour with all of it; --quick a
    minute or two. Exits with 3 if a target is missed (not with --quick), or a ratio fell since the baseline.
    """
    from benchmarks import baseline, compare, compare_page, compare_tables
    from benchmarks.local import Wanted
    from compressor.world import available_cores

    question = compare.Question(
        run=run,
        repository=repository,
        url=url,
        threads=threads or available_cores(),
        seed=seed,
        quick=quick,
        wanted=Wanted(bert_base=bert_base, peers=tuple(dict.fromkeys(peers or ()))),
        rates_per_s=tuple(rates or ()),
        price_per_core_hour=price,
        baseline=against,
        tolerance=tolerance,
        command=_command(),
    )
    result = compare.compare(question)
    html = None if out is None else compare_page.html(result)
    _show(result, compare_tables.tables(result), out, quick=quick, as_json=as_json, html=html)
    failed = compare.failures(result)
    if failed:
        raise ServingError(f"{failed} requests failed under load; their number stands beside each concurrency and rate")
    if "baseline" in result:
        baseline.check_baseline(result["baseline"])
    compare.check_targets(result)


@app.command("train")
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
    result = train.train(corpus, base, plan=plan, threads=threads or available_cores(), seed=seed, command=_command())
    _show(result, train.tables(result), out, quick=quick, as_json=as_json)
    if not quick:
        train.check_targets(result)


@app.command("data")
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
    result = data.measure(texts, folder, rows=rows, seed=seed, command=_command())
    _show(result, data.tables(result), out, quick=quick, as_json=as_json)
    if not quick:
        data.check_targets(result)


@app.command("augment")
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
        command=_command(),
    )
    _show(result, augment.tables(result), out, quick=quick, as_json=as_json)
    if not quick:
        augment.check_targets(result)


@app.command("int8")
def run_int8(
    run: RunOption = Path("runs/sst2"),
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """The INT8 student against fp32, against its own INT8 products alone, and in every batch that a server makes.

    Exits with 3 if a target is missed.
    """
    from benchmarks import int8
    from compressor.world import available_cores

    threads = threads or available_cores()
    result = int8.int8(run, threads=threads, seed=seed, quick=quick, command=_command())
    _show(result, int8.tables(result), out, quick=quick, as_json=as_json)
    if not quick:
        int8.check_targets(result)


@app.command("starts")
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
        command=_command(),
    )
    _show(result, benchmark.tables(result), out, quick=quick, as_json=as_json)


@app.command("copies")
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
        command=_command(),
    )
    _show(result, benchmark.tables(result), out, quick=quick, as_json=as_json)


@app.command("serve")
def run_serve(
    repository: RepositoryOption = Path("model_repository"),
    model: Annotated[str, typer.Option("--model", help="Model that takes texts.")] = "sst2",
    texts: Annotated[Path, typer.Option("--texts", help="Arrow file of examples: what is asked.")] = Path(
        "runs/sst2/1-corpus/validation.arrow"
    ),
    teacher: Annotated[bool, typer.Option("--teacher", help="The teacher as well, at the same load.")] = False,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """One text at a time and 32 clients at once, through Triton and in process; where the time of a request goes.

    Starts Triton on the model repository. Exits with 3 if a target is missed.
    """
    from benchmarks import serve
    from compressor.world import available_cores

    plan = serve.QUICK if quick else serve.FULL
    where = serve.Where(repository=repository, model=model, texts=texts, teacher=teacher)
    result = serve.measure(where, plan=plan, threads=threads or available_cores(), seed=seed, command=_command())
    _show(result, serve.tables(result), out, quick=quick, as_json=as_json)
    if not quick:
        serve.check_targets(result)


@app.command("scale")
def run_scale(
    run: RunOption = Path("runs/sst2"),
    repository: RepositoryOption = Path("model_repository"),
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a call costs as tokens, batch, labels and clients grow; where that is not linear, and why.

    Starts Triton on the model repository. Takes some ten minutes.
    """
    from benchmarks import scale
    from compressor.world import available_cores

    plan = scale.QUICK if quick else scale.FULL
    result = scale.scale(
        run, repository, plan=plan, threads=threads or available_cores(), seed=seed, command=_command()
    )
    _show(result, scale.tables(result), out, quick=quick, as_json=as_json, html=scale.html(result))


@app.command("soak")
def run_soak(
    repository: RepositoryOption = Path("model_repository"),
    model: Annotated[str, typer.Option("--model", help="Model that takes texts.")] = "sst2",
    texts: Annotated[Path, typer.Option("--texts", help="Arrow file of examples: what is asked.")] = Path(
        "runs/sst2/1-corpus/validation.arrow"
    ),
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.1, help="How long; 30 if not given.")] = None,
    kills: Annotated[bool, typer.Option("--kill", help="Also kill -9 the server, and a model's process.")] = False,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mixed load, good and bad, slow and given up, on one server; every answer is checked, memory is watched.

    Exits with 3 if an answer was wrong, memory grew, or the server died without being killed.
    """
    from benchmarks import serve, soak
    from compressor.world import available_cores

    where = serve.Where(repository=repository, model=model, texts=texts, teacher=False)
    minutes = minutes or (soak.QUICK_MINUTES if quick else soak.MINUTES)
    result = soak.soak(where, minutes=minutes, kills=kills, threads=available_cores(), seed=seed, command=_command())
    _show(result, soak.tables(result), out, quick=quick, as_json=as_json)
    soak.check(result)


def _named(start: str) -> tuple[str, str]:
    name, _, source = start.rpartition("=")
    return name or source, source


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def _show(
    result: Mapping[str, Any],
    tables: Sequence[Table],
    out: Path | None,
    *,
    quick: bool,
    as_json: bool,
    html: str | None = None,
) -> None:
    from benchmarks import report
    from benchmarks.conditions import CONDITIONS

    result = {"conditions": CONDITIONS.get(result["benchmark"]), **result, "quick": quick}
    verdict = [result["verdict"]] if "verdict" in result else []
    text = "\n\n".join([*verdict, report.headline(result), *(table.text() for table in tables)])
    typer.echo(report.to_json(result) if as_json else text)
    if out is not None:
        report.write(out, result["benchmark"], result, tables, html)


def main() -> None:
    """Run a command and turn errors into one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("benchmarks", "compressor", "serving"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        app(prog_name="python -m benchmarks")  # leaves through SystemExit: 0 done, 2 usage, 130 interrupted
    except (CompressorError, ServingError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
