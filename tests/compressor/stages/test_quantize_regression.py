"""INT8 of a regression: its scores are those of fp32, and not only in the same order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.bounds import Bounds
from compressor.dataset import encode
from compressor.errors import GateError
from compressor.evaluate import Logits
from compressor.stages.quantize.choice import choose
from compressor.stages.quantize.scoring import Scorer
from compressor.tasks import Task
from tests import tiny

BOUNDS = Bounds(max_metric_drop=0.005, max_label_flips=0.0, min_agreement=0.97)


def scorer(folder: Path, task: Task, fp32_N1: Logits) -> Scorer:
    rows = encode(
        tiny.examples(folder / "examples", held_out=len(fp32_N1), task=task),
        "validation",
        tiny.tokenizer(folder / "tokenizer"),
        tiny.MAX_TOKENS,
        cache=folder,
    )
    return Scorer(task, rows, fp32_N1, 1, fp32=folder, fp32_validation=rows)


def table(folder: Path, monkeypatch: pytest.MonkeyPatch, scale: float, offset: float) -> list[dict[str, Any]]:
    """Of fp32, and of a candidate whose scores are those of fp32 times `scale`, plus `offset`."""
    fp32_N1 = np.array([[1], [2], [3], [4]], np.float32)
    found = {"fp32": fp32_N1, "static": scale * fp32_N1 + offset}
    monkeypatch.setattr(Scorer, "_by_composition", lambda _, scheme, *__: dict.fromkeys(("1", "8"), found[scheme]))
    scored = scorer(folder, tiny.pair_task(labels=(), score_range=(0.0, 5.0)), fp32_N1)
    return [scored.row(scheme, folder) | {"p50_ms": {"1x32": 1.0}} for scheme in found]


def test_logits_of_a_regression_without_a_range_differ_by_shares_of_their_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices_N1 = np.array([[1e5], [2e5], [3e5], [4e5]], np.float32)
    monkeypatch.setattr(Scorer, "_by_composition", lambda *_: {"1": prices_N1, "8": prices_N1 + 1})
    row = scorer(tmp_path, tiny.pair_task(labels=()), prices_N1).row("static", tmp_path)
    assert row["batch_logit_difference"] == pytest.approx(1 / prices_N1.std())


@pytest.mark.parametrize(("scale", "offset", "difference"), [(1, 2, 1.79), (0.1, 0, 2.20), (10, -7, 16.53)])
def test_scores_far_from_fp32s_do_not_win_by_their_correlation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, offset: float, difference: float
) -> None:
    rows = table(tmp_path, monkeypatch, scale, offset)
    assert (rows[1]["drop"], rows[1]["flips"]) == (0.0, 0.0)
    assert rows[1]["score_difference_fp32"] == pytest.approx(difference, abs=0.01)
    assert BOUNDS.faults(rows[1]) == [f"scores differ from those of fp32 by {difference:.2f} of their spread"]
    assert BOUNDS.excess(rows[1]) == pytest.approx(difference - 0.25, abs=0.01)
    message = rf"scores differ from those of fp32 by {difference:.2f} of their spread, the bound is 0\.25;"
    with pytest.raises(GateError, match=message):
        choose(rows, BOUNDS)


def test_scores_close_to_fp32s_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(tmp_path, monkeypatch, 1.01, 0.01)
    assert 0 < rows[1]["score_difference_fp32"] < 0.25
    assert BOUNDS.excess(rows[1]) == 0
    assert choose(rows, BOUNDS) == "static"
