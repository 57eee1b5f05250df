"""Whether an ONNX graph answers as the PyTorch model that it was written from, on real texts at several shapes.

Shape legend: B batch, S sequence, N rows, C outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compressor import onnx_graph
from compressor.dataset import Encoded, Inputs
from compressor.errors import GateError
from compressor.evaluate import Logits, OnnxPredictor, TorchPredictor, same_answers
from compressor.models import score_scale
from compressor.tasks import Task
from compressor.world import available_cores

PARITY_SHAPES = ((1, 1), (1, 128), (8, 33))  # rows x tokens, all of them real; (1, max_tokens) comes with them
PARITY_ROWS = 256
MIXED = 64  # rows of a batch of texts of all lengths

log = logging.getLogger(__name__)


def prove(
    name: str, graph: Path, model: Any, task: Task, examples: Encoded, bound: float, *, max_tokens: int
) -> dict[str, Any]:
    """What `measure_parity` found. Raises GateError beyond the bound, or if weights or logits are no numbers."""
    onnx_graph.refuse_broken(graph)
    parity = measure_parity(graph, model, task, examples, max_tokens)
    largest = parity["max_logit_difference"]
    no_numbers = [shape for shape, difference in parity["by_shape"].items() if difference is None]
    if no_numbers:
        raise GateError(
            f"parity gate: {name}: logits that are no numbers (NaN or infinite) at {', '.join(no_numbers)}; the bound "
            f"on their difference to PyTorch is {bound:.0e}; look for weights that are not finite, or too large"
        )
    line = (
        f"{name}: largest logit difference to PyTorch {largest:.2e} on {parity['rows']} validation texts "
        f"(bound {bound:.0e})"
    )
    log.info("export %s", line)
    if not largest <= bound:
        shapes = ", ".join(f"{shape}: {difference:.2e}" for shape, difference in parity["by_shape"].items())
        raise GateError(
            f"parity gate: {line}; by rows x tokens {shapes}; the same answer to {100 * parity['agreement']:.2f} %"
        )
    return {**parity, "bound": bound, "size_bytes": graph.stat().st_size}


def measure_parity(graph: Path, model: Any, task: Task, examples: Encoded, max_tokens: int) -> dict[str, Any]:
    """Largest logit difference to PyTorch's `model` at several shapes, all texts real, and agreement on whole texts.

    One shape is a row of `max_tokens`, the longest that is served: no validation text may be as long.
    A difference is None if logits on either side are no numbers. Scores of a regression without a range of its own
    count by their spread: a difference of 1e-5 is nothing to prices.
    """
    theirs, batches = TorchPredictor(model), dict(_parity_batches(examples, model.config, max_tokens))
    # One after the other: the threads of either would slow the other down.
    expected = {shape: [theirs(inputs) for inputs in found] for shape, found in batches.items()}
    mine = OnnxPredictor(graph, threads=available_cores())
    found = {shape: [mine(inputs) for inputs in inputs_of] for shape, inputs_of in batches.items()}
    whole = f"{MIXED}xmixed"
    mine_NC, theirs_NC = (np.concatenate(logits[whole]) for logits in (found, expected))
    _, unit = score_scale(task, lambda: theirs_NC)
    by_shape = {
        shape: difference(np.concatenate(found[shape]) / (unit or 1.0), np.concatenate(expected[shape]) / (unit or 1.0))
        for shape in batches
    }
    return {
        "max_logit_difference": max((value for value in by_shape.values() if value is not None), default=None),
        "by_shape": by_shape,
        "agreement": float(same_answers(task, mine_NC, theirs_NC).mean()),
        "rows": len(mine_NC),
    }


def _parity_batches(examples: Encoded, shape: Any, max_tokens: int) -> Iterator[tuple[str, list[Inputs]]]:
    """By rows x tokens: batches made of validation texts. The longest and the shortest are always among them."""
    rows = np.random.default_rng(0).permutation(len(examples))[:PARITY_ROWS]
    length_N = examples.lengths(np.arange(len(examples)))
    rows[:2] = [length_N.argmax(), length_N.argmin()][: len(rows)]  # there may be one
    for count, tokens in dict.fromkeys((*PARITY_SHAPES, (1, max_tokens))):
        yield f"{count}x{tokens}", [_full(examples, rows, count, min(tokens, shape.max_position_embeddings))]
    mixed = [examples.batch(rows[first : first + MIXED]).inputs for first in range(0, len(rows), MIXED)]
    yield f"{MIXED}xmixed", mixed


def _full(examples: Encoded, rows: Any, count: int, tokens: int) -> Inputs:
    """A batch of `count` rows of `tokens` tokens without padding: texts one after the other, cut to that length."""
    parts: list[list[Any]] = [[], []]
    needed, place = count * tokens, 0
    while sum(map(len, parts[0])) < needed:
        ids_BS, segment_BS, mask_BS = examples.batch(rows[[place % len(rows)]]).inputs
        size = int(mask_BS.sum())
        for part, values_BS in zip(parts, (ids_BS, segment_BS), strict=True):
            part.append(values_BS[0, :size])
        place += 1
    ids_BS, segment_BS = (np.concatenate(part)[:needed].reshape(count, tokens) for part in parts)
    return Inputs(ids_BS, segment_BS, np.ones_like(ids_BS))


def difference(mine_NC: Logits, theirs_NC: Logits) -> float | None:
    """The largest difference of two sets of logits; None if it is no number."""
    largest = float(np.abs(mine_NC - theirs_NC).max())
    return largest if np.isfinite(largest) else None
