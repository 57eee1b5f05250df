"""The command line: one typed function per command. It and its parts alone write to standard output."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compressor import cli_augment, cli_serving, cli_stages
from compressor.errors import CompressorError, ConfigError
from compressor.options import (
    CorpusOption,
    DataOption,
    DeviceOption,
    JsonOption,
    ProcessesOption,
    RecipeOption,
    RepositoryOption,
    SetOption,
    TargetCpuOption,
    TaskOption,
    TeacherOption,
    TritonReleaseOption,
    auto_recipe,
    chosen_recipe,
    with_options,
)
from compressor.world import leads
from serving.errors import ServingError

if TYPE_CHECKING:
    from compressor.artifact import Artifact
    from compressor.pipeline import Planned

INTERRUPTED = 130  # what typer exits with on Ctrl-C

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From raw text to a served INT8 student of a BERT classifier, with a report of what was lost.",
)


def build(
    task: TaskOption = None,
    recipe: RecipeOption = "auto",
    export: Annotated[Literal["onnx"], typer.Option("--export", help="Format of the exported student.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; runs/<task> if not given.")] = None,
    repository: RepositoryOption = Path("model_repository"),
    data: DataOption = None,
    teacher: TeacherOption = None,
    triton_release: TritonReleaseOption = None,
    target_cpu: TargetCpuOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away an earlier run in --out first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole line: text, teacher, augmentation, student, ONNX, INT8, model repository, report.

    Finished stages are reused; an interrupted build goes on where it was. For example:

    compressor build --task sst2 --export onnx
    """
    from compressor import pipeline
    from compressor.steps import Where, steps
    from compressor.world import refuse_together
    from serving.repository import refuse_foreign

    refuse_together("compressor build", "use --processes, or run the training stages one by one with torchrun")

    given = {"export.format": export, "export.triton_release": triton_release, "quantize.target_cpu": target_cpu}
    wanted = with_options(overrides, given)
    config, name, why = chosen_recipe(task, recipe, device, wanted, data=data, teacher=teacher)
    run = out or Path("runs") / config.task.name
    where = Where(repository=repository, processes=processes, device=device)
    line = steps(config, where)
    pipeline.check_ready(line)
    pipeline.check_recipe(config, where)
    pipeline.refuse_foreign_run(run)
    refuse_foreign(repository, config.task.name, config.publish.runtime)
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
    """Render the report unless the one there is whole and was made from these very artifacts."""
    from compressor import report

    page = run / "report.html"
    newest = max((artifact.path / "manifest.json").stat().st_mtime for artifact in artifacts.values())
    if all((run / name).is_file() for name in report.FILES) and page.stat().st_mtime > newest:
        return page
    return report.write_report(run, artifacts)


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


def recipe(
    task: Annotated[str, typer.Argument(help="Task, one of `compressor tasks`.")],
    name: Annotated[str, typer.Option("--recipe", help="auto, laptop or paper.")] = "auto",
) -> None:
    """Print a recipe, to be edited and given back with --recipe: compressor recipe sst2 > mine.toml."""
    from compressor.errors import nearest
    from compressor.recipe import RECIPES, recipe_text

    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    typer.echo(recipe_text(task, auto_recipe("auto")[0] if name == "auto" else name), nl=False)


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


def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, and which recipe it can run."""
    from compressor.machine import fingerprint, missing_extras, versions

    chosen, why = auto_recipe("auto")
    missing = missing_extras()
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


def report(run: Annotated[Path, typer.Argument(help="Run folder of a build.")]) -> None:
    """Render the report of a build again, or of what a build that stopped has finished."""
    from compressor import report as reporting
    from compressor.pipeline import so_far

    typer.echo(reporting.write_report(run, so_far(run)))


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


# The order of --help: the line, then what is asked of its results, then what helps.
for command in (
    build,
    cli_stages.corpus,
    cli_stages.finetune,
    cli_stages.adapt,
    cli_stages.augment,
    cli_stages.general,
    cli_stages.distill,
    cli_stages.export,
    cli_stages.quantize,
    cli_stages.publish,
    cli_augment.augment_file,
    evaluate,
    cli_serving.verify,
    cli_serving.serve,
    cli_serving.status,
    cli_serving.deploy,
    cli_serving.rollback,
    cli_serving.classify,
    cli_serving.classify_file,
    cli_serving.deploy_files,
    cli_serving.ui,
    recipe,
    tasks,
    doctor,
    report,
):
    app.command()(command)


def main() -> None:
    """Entry point: runs a command and turns errors into one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("compressor", "serving"):
        logging.getLogger(package).setLevel(logging.INFO if leads() else logging.WARNING)
    try:
        app()
    except (CompressorError, ServingError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            typer.echo("interrupted; finished stages are kept, and the same command goes on from here", err=True)
        raise
