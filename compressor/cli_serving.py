"""Commands that start a server and ask one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compressor.cli_verify import check_repository
from compressor.errors import ConfigError
from compressor.options import JsonOption

if TYPE_CHECKING:
    from serving.operations import Change

_RETRIES = 30  # of a request of a long job, over two minutes: a server that died is back by then


def serve(
    repository: Annotated[Path, typer.Argument(help="Model repository.")] = Path("model_repository"),
    http_port: Annotated[int, typer.Option("--http-port", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", min=1, max=65535)] = 8002,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; another than loopback lets other machines in.")
    ] = "127.0.0.1",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the models.")] = 120.0,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="File for the server's log, a JSON object a line; rotate it by `copytruncate`."),
    ] = None,
) -> None:
    """Start Triton on loopback, wait until every model is ready, and serve until Ctrl-C.

    A server that dies, or loses the process of a model, is started again; one that dies five times within a minute is
    given up. `compressor status`, `deploy` and `rollback` work on a server that is started like this.
    """
    from serving import versions
    from serving.repository import read, settle
    from serving.runtime import TritonServer

    settle(repository)
    names = read(repository)
    for warning in [*foreign_graphs(repository), *crowded_models(repository)]:
        typer.echo(f"take care: {warning}", err=True)
    server = TritonServer(
        repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, host=host, log=log
    )
    signal.signal(signal.SIGTERM, _interrupt)
    is_ready = False
    try:
        server.start()
        server.wait_ready(timeout_s)
        is_ready = True
        typer.echo(f"ready: {', '.join(names)}")
        typer.echo(f"HTTP {server.http_url}, gRPC {server.grpc_url}, metrics {server.metrics_url}")
        if server.host in ("0.0.0.0", "::"):
            typer.echo(f"other machines may reach it at the same ports: it listens on {server.host}")
        asked = [name for name in names if (versions.read_marker(repository / name) or {}).get("role") != "student"]
        for name in asked:
            if number := versions.waiting(repository / name):
                typer.echo(f"version {number} of {name} waits for `compressor deploy --model {name}`")
        typer.echo(f"try: {_example(repository / asked[0])}; stop with Ctrl-C")
        server.wait()
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
        if not is_ready:
            raise
    finally:
        server.stop()


def _example(folder: Path) -> str:
    """A command that asks the model of this folder."""
    from serving import versions
    from serving.online import stored_answers

    stored = stored_answers(folder / str(versions.newest(folder)))
    if stored and isinstance(stored[0][0], tuple):
        return f"printf 'a man sings\\ta song is sung' | compressor classify --model {folder.name} -"
    return f'compressor classify --model {folder.name} "a gripping film"'


def foreign_graphs(repository: Path) -> list[str]:
    """What is to be known of graphs that were made for other processors than this one, once for each kind."""
    from compressor import machine, onnx_graph

    here, found = machine.int8_cpu(), dict[str, None]()
    for graph in sorted(repository.glob("*/*/*.onnx")):
        target = onnx_graph.notes(graph).get("target_cpu", here)
        if warning := machine.foreign_cpu(target, here):
            found[f"{warning}; `--set quantize.target_cpu={here}` makes INT8 for this one"] = None
    return list(found)


def crowded_models(repository: Path) -> list[str]:
    """What is to be known of models that were made for a machine with more cores than this one."""
    from serving import triton
    from serving.cores import available_cores

    cores, found = available_cores(), []
    for file in sorted(repository.glob("*/config.pbtxt")):
        config = triton.from_text(file.read_text(encoding="utf-8"))
        threads = int(triton.parameters_of(config).get("intra_op_threads", 0))
        instances = sum(group.count for group in config.instance_group)
        # One that takes tensors has no text to read, and is asked by the others.
        if "labels" in config.parameters and instances * threads > cores:
            found.append(
                f"{config.name} runs {instances} x {threads} threads, and this machine has {cores} cores: answers take "
                f"longer than they need to; publish it again here, or with `--set publish.cores={cores}`"
            )
    return found


def _interrupt(number: int, frame: object) -> None:
    """Let SIGTERM, by which service managers and scripts stop a server, end it the same way as Ctrl-C."""
    raise KeyboardInterrupt


def _undo_when_told_to_end() -> None:
    """Let a command that is told to end, or loses its terminal, undo what it began, as on Ctrl-C; `nohup` stays so."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def verify(
    repository: Annotated[Path, typer.Argument(help="Model repository, of any origin.")] = Path("model_repository"),
    release: Annotated[
        str | None,
        typer.Option("--triton-release", help="Triton container that will serve it; the embedded server if not given."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs it will find; those of this machine.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="host:port (gRPC) of a server of this repository: compare it as well.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a model repository before a server is started; fails if a server would refuse it or answer wrongly.

    Names, shapes, types, batch sizes, labels, warm-up files, versions, graphs against configurations and against what
    the server's ONNX Runtime reads, checksums. With --url also what runs, and its answers.
    """
    check_repository(repository, release=release, gpus=gpus, url=url, as_json=as_json)


def deploy_files(
    folder: Annotated[Path, typer.Argument(help="Folder to be written; new, or empty.")] = Path("deploy"),
    as_json: JsonOption = False,
) -> None:
    """Write what runs a model repository in Triton's official container: Docker, Compose, Kubernetes, and a README."""
    from serving.deployment import write_deployment

    written = write_deployment(folder)
    if as_json:
        typer.echo(json.dumps([str(path) for path in written]))
    else:
        typer.echo(f"{folder}: {len(written)} files; {folder}/README.md says how to use them")


UrlOption = Annotated[str, typer.Option("--url", help="host:port (gRPC) of a server that `compressor serve` started.")]
ModelOption = Annotated[str, typer.Option("--model", help="Model that takes texts.")]


def status(url: UrlOption = "127.0.0.1:8001", as_json: JsonOption = False) -> None:
    """Show what a running server serves: versions, states, texts answered, mean times."""
    from serving import operations
    from serving.control import find_control

    rows = operations.status(find_control(url))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    typer.echo(
        f"{'model':<24}{'version':>8}{'newest':>8}  {'state':<12}{'texts':>10}{'failed':>8}{'queue':>9}{'total':>9} ms"
    )
    for row in rows:
        times = [f"{row[name]:.2f}" if row[name] is not None else "-" for name in ("queue_ms", "total_ms")]
        typer.echo(
            f"{row['model']:<24}{row['version'] or '-':>8}{row['published'] or '-':>8}  {row['state']:<12}"
            f"{row['texts']:>10}{row['failed']:>8}{times[0]:>10}{times[1]:>10}"
        )


def deploy(
    version: Annotated[
        int | None, typer.Argument(help="Version that was published; the newest if not given.", show_default=False)
    ] = None,
    model: ModelOption = "sst2",
    url: UrlOption = "127.0.0.1:8001",
    as_json: JsonOption = False,
) -> None:
    """Make a running server answer with a published version of a model; no request fails meanwhile.

    The version is checked, loaded beside, and asked its stored texts first. If it is not fit it is withdrawn, the old
    one goes on, and the command fails with 3 if answers were wrong. If the server dies meanwhile, it waits for another
    try.
    """
    from serving import operations
    from serving.control import find_control

    _undo_when_told_to_end()
    _show_change(operations.deploy(find_control(url), model, version), as_json=as_json)


def rollback(
    model: ModelOption = "sst2",
    url: UrlOption = "127.0.0.1:8001",
    repository: Annotated[
        Path | None,
        typer.Option("--repository", help="Model repository that no server serves now: go back there, ask no server."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw the newest version of a model, and make a running server answer with the one before.

    That one is loaded beside and asked its stored texts first; if it is not fit nothing is changed.
    A server that does not come up with the newest version needs --repository: its next start serves the one before.
    """
    from serving import operations
    from serving import repository as repositories
    from serving.control import find_control, is_served

    if repository is None:
        _undo_when_told_to_end()
        _show_change(operations.rollback(find_control(url), model), as_json=as_json)
        return
    if is_served(repository):
        raise ConfigError(f"a server serves {repository} now; name its --url instead of --repository")
    older = repositories.rollback(repository, model)
    if as_json:
        typer.echo(json.dumps({"model": model, "after": older}))
    else:
        typer.echo(f"{model} is at version {older} again, from the next start of a server of {repository}")


def _show_change(change: Change, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(change)))
    elif change.before == change.after:
        typer.echo(f"{change.model} answers with version {change.after} already")
    else:
        typer.echo(
            f"{change.model} answers with version {change.after}, before with {change.before}; "
            f"{change.smoked} stored texts were answered as they must be"
        )


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
    from serving.client import Client
    from serving.exchange import Classification

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


def ui(
    url: UrlOption = "127.0.0.1:8001",
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Run folder of the build that is served: for sizes and validation texts."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="The student; its teacher is served as MODEL_teacher.")
    ] = "sst2",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the page.")] = 8080,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; another than loopback lets other machines in.")
    ] = "127.0.0.1",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")] = 10.0,
) -> None:
    """Serve a web page that shows what teacher and student say of a text, side by side, until Ctrl-C.

    The models are asked on the server at --url. With --run also their sizes, and the validation texts on which the two
    disagree.
    """
    from compressor.pipeline import finished
    from compressor.ui import STUDENT, TEACHER, Comparison, PageServer, read_run
    from serving.client import Client

    known = read_run(finished(run)) if run is not None else None
    signal.signal(signal.SIGTERM, _interrupt)
    with (
        Client(url, model=f"{model}_teacher", timeout_s=timeout_s) as teacher,
        Client(url, model=model, timeout_s=timeout_s) as student,
    ):
        comparison = Comparison(name=model, clients={TEACHER: teacher, STUDENT: student}, run=known)
        with PageServer(comparison, host=host, port=port) as server:
            typer.echo(f"page {server.url}; stop with Ctrl-C")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("stopping", err=True)


def classify_file(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Table: .csv, .tsv, .jsonl or .parquet.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Table to be written, of any of these kinds.")],
    text: Annotated[str, typer.Option("--text", help="Column of the text.")],
    text_b: Annotated[str | None, typer.Option("--text-b", help="Column of the second text of pairs.")] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="Put before the names of the added columns.")] = "",
    url: Annotated[
        str | None, typer.Option("--url", help="host:port; the default port of --protocol on loopback.")
    ] = None,
    protocol: Annotated[Literal["grpc", "http"], typer.Option("--protocol")] = "grpc",
    model: ModelOption = "sst2",
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Requests under way at a time.")] = 4,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")] = 30.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send each row of a table to a running server; all columns stay, and its answers are added as columns.

    They are label and score, or value of a regression, and error: why the server refused a row. The order is kept.

    compressor classify-file reviews.parquet answers.parquet --text review
    """
    from compressor.classify import Columns, classify_file
    from compressor.options import check_files
    from serving.client import Client

    check_files(source, out, overwrite=overwrite)
    address = url or f"127.0.0.1:{8001 if protocol == 'grpc' else 8000}"
    # Who names a server that is not there is told so at once, not after the retries of the job.
    with Client(address, model=model, protocol=protocol, timeout_s=timeout_s) as client:
        _ = client.labels
    facts = classify_file(
        source,
        out,
        Columns(text=text, text_b=text_b, prefix=prefix),
        lambda: Client(address, model=model, protocol=protocol, timeout_s=timeout_s, retries=_RETRIES),
        in_flight=in_flight,
    )
    if as_json:
        typer.echo(json.dumps({"out": str(out), **facts}))
    else:
        typer.echo(f"{out}: {facts['rows']:,} rows, {facts['refused']:,} of them refused")


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
