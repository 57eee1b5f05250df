"""What the report of a build says of its augmentation: how much was made, by what, and how far it can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compressor.artifact import Artifact
from compressor.errors import ArtifactError
from compressor.stages.augment.quality import EXAMPLES_FILE

COUNTED = "asked_rows"  # of all stages' metrics only an augmentation's have it
# In the order of the table.
KINDS = {
    "originals": "originals",
    "copies": "all copies",
    "masked_lm": "words by the masked LM only",
    "vectors": "words by vectors only",
    "both": "words by both",
}


def is_augmentation(found: Artifact) -> bool:
    """Whether an artifact of examples is an augmented one."""
    return COUNTED in found.metrics


def augmentation(artifacts: Mapping[str, Artifact]) -> dict[str, Any] | None:
    """The report's part on augmentation; None where a build has none.

    Rows and words are counts, shares run from 0 to 1. `agreement` is of the teacher's label with the one in the data,
    by kind of row; `perplexity` a masked LM's of copies and originals; `examples` have texts in parts, with whether
    each differs. Raises ArtifactError if the examples cannot be read.
    """
    found = next((found for found in artifacts.values() if is_augmentation(found)), None)
    if found is None:
        return None
    path, metrics, section = found.path / EXAMPLES_FILE, found.metrics, found.manifest["section"]
    try:
        examples = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run its stage again") from error
    facts = {**metrics, "vectors": section["vectors"], "masked_lm": section["masked_lm"], "examples": examples}
    if agreement := metrics.get("agreement"):
        facts["agreement"] = [{"kind": KINDS[name], **agreement[name]} for name in KINDS if name in agreement]
    if adapted := next((item for item in artifacts.values() if item.manifest["kind"] == "masked-lm"), None):
        wanted = ("source", "fresh_head", "provenance", "tokens", "at_start", "at_end")
        facts["adapted"] = {name: adapted.metrics[name] for name in wanted}
    return facts
