"""The command line of the benchmarks, with the commands that measure what was made and what is served."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import making
from benchmarks.options import (
    JsonOption,
    OutOption,
    PageOutOption,
    QuickOption,
    RepositoryOption,
    RunOption,
    SeedOption,
    ThreadsOption,
)
from benchmarks.show import command, show
from compressor.errors import CompressorError
from serving.errors import ServingError

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
        float | None,
        typer.Option("--tolerance", min=0, max=1, help="Share that a ratio may fall by; 0.1 if not given."),
    ] = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: PageOutOption = None,
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
        command=command(),
    )
    result = compare.compare(question)
    show(result, compare_tables.tables(result), out, quick=quick, as_json=as_json, html=compare_page.html)
    failed = compare.failures(result)
    if failed:
        raise ServingError(f"{failed} requests failed under load; their number stands beside each concurrency and rate")
    if "baseline" in result:
        baseline.check_baseline(result["baseline"])
    compare.check_targets(result)


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
    result = int8.int8(run, threads=threads, seed=seed, quick=quick, command=command())
    show(result, int8.tables(result), out, quick=quick, as_json=as_json, check=int8.check_targets)


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
    result = serve.measure(where, plan=plan, threads=threads or available_cores(), seed=seed, command=command())
    show(result, serve.tables(result), out, quick=quick, as_json=as_json, check=serve.check_targets)


@app.command("scale")
def run_scale(
    run: RunOption = Path("runs/sst2"),
    repository: RepositoryOption = Path("model_repository"),
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: PageOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a call costs as tokens, batch, labels and clients grow; where that is not linear.

    Starts Triton on the model repository. Takes some ten minutes.
    """
    from benchmarks import scale
    from compressor.world import available_cores

    plan = scale.QUICK if quick else scale.FULL
    result = scale.scale(run, repository, plan=plan, threads=threads or available_cores(), seed=seed, command=command())
    show(result, scale.tables(result), out, quick=quick, as_json=as_json, html=scale.html)


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

    Exits with 3 if an answer was wrong, a request was lost while the server was up, the server died without being
    killed, or memory grew. Memory is not judged with --kill, which starts the server again, nor in less than two
    minutes; the result says so.
    """
    from benchmarks import serve, soak
    from compressor.world import available_cores

    where = serve.Where(repository=repository, model=model, texts=texts, teacher=False)
    minutes = minutes or (soak.QUICK_MINUTES if quick else soak.MINUTES)
    result = soak.soak(where, minutes=minutes, kills=kills, threads=available_cores(), seed=seed, command=command())
    show(result, soak.tables(result), out, quick=quick, as_json=as_json)
    soak.check(result)


for name, run in (
    ("train", making.run_train),
    ("data", making.run_data),
    ("augment", making.run_augment),
    ("starts", making.run_starts),
    ("copies", making.run_copies),
    ("words-apart", making.run_words_apart),
):
    app.command(name)(run)


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
