"""The model that runs inside the server: token ids in, logits out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving import ServedModel, write


@pytest.fixture
def runner(make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(make_model(), tmp_path / "repository")[1])


@pytest.fixture
def ids_request(kit: Any) -> Callable[..., Any]:
    """Return a function that makes a request of token ids, none of them padding."""

    def make(ids: list[list[int]], **other: np.ndarray) -> Any:
        tensor = np.array(ids, np.int64)
        tensors = {"input_ids": tensor, "attention_mask": np.ones_like(tensor), "token_type_ids": np.zeros_like(tensor)}
        return kit.request_of(**(tensors | other))

    return make


def test_logits_of_mixed_widths_come_back_in_order(runner: Any, ids_request: Callable[..., Any]) -> None:
    requests = [ids_request([[2, 4, 3]]), ids_request([[2, 5, 5, 3]]), ids_request([[2, 5, 3], [2, 8, 3]])]
    logits = [response.outputs["logits"].tolist() for response in runner.execute(requests)]
    assert logits == [[[0, 2]], [[4, 0]], [[2, 0], [0, 3]]]


def test_large_batches_are_cut(runner: Any, ids_request: Callable[..., Any]) -> None:
    response = runner.execute([ids_request([[2, 4, 3]] * 9)])[0]
    assert response.outputs["logits"].tolist() == [[0, 2]] * 9


@pytest.mark.parametrize(
    ("ids", "other", "message"),
    [
        ([[2, 99, 3]], {}, "the graph refused the tensors"),
        ([[2] * 13], {}, r"shape \[1, 13\]; send at least one row of 1 to 12 tokens"),
        ([[]], {}, r"shape \[1, 0\]"),
        ([[2, 4, 3]], {"attention_mask": np.ones((1, 2), np.int64)}, "all must be the same"),
        ([[2]], dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), np.ones(3)), "all must be"),
    ],
)
def test_bad_tensors_are_refused_and_their_neighbours_answered(
    kit: Any,
    runner: Any,
    ids_request: Callable[..., Any],
    ids: list[list[int]],
    other: dict[str, np.ndarray],
    message: str,
) -> None:
    requests = [ids_request([[2, 4, 3]]), ids_request(ids, **other), ids_request([[2, 5, 3]])]
    first, refused, last = runner.execute(requests)
    assert first.outputs["logits"].tolist() == [[0, 2]]
    assert last.outputs["logits"].tolist() == [[2, 0]]
    with pytest.raises(kit.FakeTritonError, match=message):
        raise refused.error
    assert refused.error.code == kit.FakeTritonError.INVALID_ARG
