"""What `compressor verify`, and `compressor publish` after it has written, say of a model repository."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def check_repository(
    repository: Path,
    *,
    release: str | None = None,
    gpus: int | None = None,
    url: str | None = None,
    as_json: bool = False,
) -> None:
    """Print what is wrong with a repository, and where `url` is given with what a server makes of it.

    Raises RepositoryError if anything is.
    """
    from serving.errors import RepositoryError
    from serving.online import verify_served
    from serving.verify import verify

    findings = verify(repository, release=release, gpus=gpus)
    if url is not None and not findings:
        findings = verify_served(repository, url)
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings]))
    for model, place, fault in [] if as_json else findings:
        typer.echo(f"{model or repository.name:<20} {place:<20} {fault}")
    if findings:
        raise RepositoryError(f"model repository {repository} has {len(findings)} faults; correct or publish it again")
    if not as_json:
        typer.echo(f"{repository}: nothing is wrong")
