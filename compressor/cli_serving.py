"""Commands that start a server and ask one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from compressor.errors import ConfigError
from compressor.options import JsonOption


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
