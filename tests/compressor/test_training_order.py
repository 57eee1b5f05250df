"""Training orders: every row once, the same batches for any number of processes, memory that does not grow."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from compressor import dataset, encoding
from compressor.dataset import (
    POOL_BATCHES,
    Encoded,
    TrainingOrder,
)
from compressor.errors import DataError
from compressor.shuffle import Permutation

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)


def made_up(length_N: Sequence[int] | np.ndarray) -> Encoded:
    """Encoded rows of the lengths given, in memory."""
    chunks = []
    for start in range(0, len(length_N), encoding.ROWS_PER_CHUNK):
        length_C = np.asarray(length_N[start : start + encoding.ROWS_PER_CHUNK])
        end = np.concatenate([[0], np.cumsum(length_C)]).astype(np.int32)
        ids, label = np.zeros(end[-1], np.uint16), np.zeros(len(length_C), np.int32)
        chunks.append(dataset._Chunk(ids, end, length_C.astype(np.uint16), label))
    return Encoded(tuple(chunks), 0, 64)


LENGTHS = np.random.default_rng(0).integers(3, 64, size=5000)
MADE_UP = made_up(LENGTHS)


def order(encoded=MADE_UP, *, size=1, batch_size=8, seed=0, epoch=0, first=0) -> list[list[np.ndarray]]:
    """Batches of each rank."""
    given = {"batch_size": batch_size, "seed": seed, "epoch": epoch, "size": size}
    return [list(TrainingOrder(encoded, rank=rank, **given).batches(first)) for rank in range(size)]


@ANY_SPEED
@given(st.integers(1, 20_000), st.integers(0, 2**32), st.integers(0, 100))
def test_a_permutation_holds_every_number_once(count, seed, epoch):
    found = Permutation(count, [seed, epoch])[0:count]
    assert_array_equal(np.sort(found), np.arange(count))


def test_a_part_of_a_permutation_is_that_part_of_the_whole():
    whole = Permutation(1000, [1])
    assert_array_equal(whole[17:400], whole[0:1000][17:400])


def test_a_permutation_shows_no_structure():
    found = Permutation(100_000, [3])[0:100_000].astype(float)
    places = np.arange(100_000)
    steps = np.diff(found)
    assert abs(np.corrcoef(found, places)[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02
    assert len(np.unique(steps)) > 60_000  # of a random order 63 %: 2 / sqrt(e) of them differ
    # Of every 1,000 places in a row the numbers spread evenly over ten tenths.
    counts = [np.bincount((part // 10_000).astype(int), minlength=10) for part in found.reshape(100, 1000)]
    assert 60 < np.mean((np.array(counts) - 100) ** 2) < 120  # 89 for a random order


def test_every_number_is_as_often_at_every_place():
    drawn = np.array([Permutation(6, [seed])[0:6] for seed in range(3000)])
    counts = np.array([np.bincount(column, minlength=6) for column in drawn.T])
    assert ((counts - 500) ** 2 / 500).sum() < 60  # chi-squared with 25 degrees of freedom


@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (1, 8), (2, 8), (3, 8), (1, 32), (2, 32), (3, 32)])
@pytest.mark.parametrize("rows", [33, 64, 997, 5000])
def test_every_row_comes_once_and_no_rank_is_without(rows, size, batch_size):
    ranks = order(made_up(LENGTHS[:rows]), size=size, batch_size=batch_size)
    assert {len(batches) for batches in ranks} == {rows // batch_size}
    assert all(len(batch) for batches in ranks for batch in batches)
    assert sorted(np.concatenate([batch for batches in ranks for batch in batches])) == list(range(rows))


@pytest.mark.parametrize("rows", [8, 9, 15, 23, 513])
def test_every_rank_up_to_the_batch_size_has_a_row_of_every_batch(rows):
    ranks = order(made_up(LENGTHS[:rows]), size=8)
    assert min(len(batch) for batches in ranks for batch in batches) >= 1


def test_rows_that_fill_no_batch_are_spread_over_all():
    (batches,) = order(made_up(LENGTHS[:997]))
    assert len(batches) == 124
    assert sorted(map(len, batches)) == [8] * 119 + [9] * 5


def test_fewer_rows_than_a_batch_are_one():
    (batches,) = order(made_up([3, 4, 5]))
    assert [len(batch) for batch in batches] == [3]


def test_more_processes_than_rows_in_a_batch_are_refused():
    with pytest.raises(DataError, match=r"a batch has 4 rows, fewer than the 5 processes .* a larger batch_size"):
        TrainingOrder(MADE_UP, batch_size=4, seed=0, epoch=0, size=5)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_together_make_the_batches_of_one_process(size):
    (alone,), ranks = order(), order(size=size)
    for step, batch in enumerate(alone):
        assert sorted(np.concatenate([batches[step] for batches in ranks])) == sorted(batch)


@pytest.mark.parametrize("first", [0, 1, POOL_BATCHES - 1, POOL_BATCHES, POOL_BATCHES + 3, 624, 625])
def test_an_epoch_goes_on_in_the_middle(first):
    for whole, rest in zip(order(size=2), order(size=2, first=first), strict=True):
        assert len(rest) == 625 - first
        assert all(map(np.array_equal, whole[first:], rest))


def test_the_length_of_an_order_is_its_number_of_batches():
    made = TrainingOrder(MADE_UP, batch_size=8, seed=0, epoch=0)
    assert len(made) == len(list(made.batches())) == 625


def test_the_order_is_fixed_by_the_seed():
    assert all(map(np.array_equal, order()[0], order()[0]))


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_the_order_differs_by_seed_and_epoch(change):
    assert not np.array_equal(np.concatenate(order()[0]), np.concatenate(order(**change)[0]))


def test_seed_and_epoch_are_not_added_up():
    assert not np.array_equal(np.concatenate(order(seed=1)[0]), np.concatenate(order(epoch=1)[0]))


def test_rows_of_a_batch_are_of_similar_length():
    (batches,) = order()
    spread = np.mean([np.ptp(LENGTHS[batch]) for batch in batches])
    assert spread < 0.1 * np.ptp(LENGTHS)


def test_short_batches_do_not_all_come_first():
    (batches,) = order()
    means = np.array([LENGTHS[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_equal_rows_are_mixed_anew_each_epoch():
    same_length = made_up(np.full(64, 9))
    (first,), (second,) = order(same_length), order(same_length, epoch=1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def peaks(rows: int) -> tuple[int, int]:
    """Bytes that training and inference take beside the rows themselves."""
    encoded = made_up(np.random.default_rng(0).integers(3, 12, size=rows))
    tracemalloc.start()
    try:
        batches = TrainingOrder(encoded, batch_size=32, seed=0, epoch=0).batches(rows // 64)
        for row_B in itertools.islice(batches, 2 * POOL_BATCHES):
            encoded.batch(row_B)
        in_training = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        for _ in itertools.islice(encoded.batches_by_length(64), 10):
            pass
        return in_training, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows():
    few, many = peaks(80_000), peaks(300_000)
    assert many[0] < 220_000  # a byte for each row that was added would be as much
    assert abs(many[0] - few[0]) < 50_000
    assert abs(many[1] - few[1]) < 50_000
