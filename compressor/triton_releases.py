"""Which graphs a Triton release can load: its container's ONNX Runtime decides.

Releases and their ONNX Runtime: Triton's compatibility page (docs/introduction/compatibility.md of triton-inference-
server/server), read in November 2026. 24.10 is also the embedded server (2.51): loading graphs into its ONNX Runtime
1.19.2 showed IR 10 as the last that it takes. There is a release every month; one that is not listed has at least the
runtime of the last one before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from compressor.errors import ConfigError

RUNTIMES = {
    "24.06": "1.18.0",
    "24.10": "1.19.2",
    "24.12": "1.20.1",
    "25.01": "1.20.1",
    "25.02": "1.20.1",
    "25.05": "1.22.0",
    "25.06": "1.22.0",
    "25.07": "1.22.0",
    "26.01": "1.23.2",
    "26.04": "1.24.4",
    "26.05": "1.24.4",
    "26.06": "1.24.4",
    "26.07": "1.27.0",
}
OPSET = 18
IR_VERSION = 8


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a graph is written."""

    listed_release: str
    """The release itself, or the last one before it whose container is known."""
    onnxruntime: str
    """Version in the container of that one."""
    opset: int = OPSET
    ir_version: int = IR_VERSION


def format_for(release: str) -> Format:
    """The format for a release. Raises ConfigError if it is no release, or too old.

    All of them read opset 18 and IR 8, the newest that give a classifier something: LayerNormalization came with opset
    17, and what later ones add (Gelu, with 20) ONNX Runtime makes for itself. So one graph runs everywhere.
    """
    before = [listed for listed in RUNTIMES if listed <= release]
    if not re.fullmatch(r"\d\d\.(0[1-9]|1[0-2])", release, re.ASCII) or not before:
        raise ConfigError(f"export.triton_release is {release!r}; give one as year.month, {min(RUNTIMES)} or later")
    return Format(listed_release=max(before), onnxruntime=RUNTIMES[max(before)])
