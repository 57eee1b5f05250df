"""The INT8 schemes that can be tried: how activations get their scale, and what else differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compressor.config import Int8Candidate

Method = Literal["min-max", "percentile", "entropy"]
Weights = Literal["signed", "unsigned"]
"""Signed weights have 7 bits where 8 would saturate (x86 without VNNI); unsigned ones, 128 for 0, always have 8."""


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """One activation scale for each call, over everything in the batch: an answer depends on its neighbours."""

    weights: Weights = "signed"
    """How 8-bit weights are stored."""
    per_channel: bool = True
    """A weight scale for each column, or one for all."""
    embeddings: bool = True
    """Whether embedding tables are INT8 too."""


@dataclass(frozen=True, kw_only=True)
class Static:
    """Activation ranges fixed beforehand, from real tokens of training texts."""

    method: Method = "min-max"
    """How a range follows from what was seen."""
    smooth: bool = False
    """Move a part of each channel's range into the weights that read it."""
    weights: Weights = "signed"
    """As in Dynamic."""
    per_channel: bool = True
    """As in Dynamic."""
    embeddings: bool = True
    """As in Dynamic."""

    def __post_init__(self) -> None:
        if self.smooth and self.method != "min-max":
            raise ValueError(f"smooth is for the method min-max, and method is {self.method}; drop one of them")


@dataclass(frozen=True, kw_only=True)
class PerRow:
    """A scale for each token, computed from it alone: exact in any batch, and nothing to calibrate."""

    weights: Weights = "signed"
    """As in Dynamic."""
    per_channel: bool = True
    """As in Dynamic."""
    embeddings: bool = True
    """As in Dynamic."""


Candidate = Dynamic | Static | PerRow

CANDIDATES: Mapping[Int8Candidate, Candidate] = {
    "static": Static(),
    "static-percentile": Static(method="percentile"),
    "static-entropy": Static(method="entropy"),
    "static-smooth": Static(smooth=True),
    "static-per-tensor": Static(per_channel=False),
    "static-qat": Static(),  # of a student that is first trained with its products rounded
    "static-u8": Static(weights="unsigned"),
    "per-row": PerRow(),
    "per-row-u8": PerRow(weights="unsigned"),
    "dynamic": Dynamic(),
    "dynamic-per-tensor": Dynamic(per_channel=False),
    "dynamic-fp32-embeddings": Dynamic(embeddings=False),
}
