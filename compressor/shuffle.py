"""A shuffled order that is computed, not stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 4


class Permutation:
    """The numbers below `count` in an order drawn from `seed`, of which any part can be asked for.

    A Feistel network (Luby and Rackoff, 1988) with tables of random numbers as round functions permutes the numbers
    of as many bits as `count` needs; a number that lands outside goes through again until it does not ("cycle
    walking", Black and Rogaway, 2002), at most two times on average. Memory: the tables, less than 8 * ROUNDS *
    3 * sqrt(count) bytes.
    """

    def __init__(self, count: int, seed: Sequence[int]) -> None:
        bits = max(2, (count - 1).bit_length())
        self._count = count
        self._right_bits = bits // 2
        random = np.random.default_rng(seed)
        sides = 1 << (bits - self._right_bits), 1 << self._right_bits
        self._tables = [
            (random.integers(sides[0], size=sides[1]), random.integers(sides[1], size=sides[0])) for _ in range(ROUNDS)
        ]

    def __getitem__(self, places: slice) -> NDArray[np.int64]:
        """The numbers at some places of the order."""
        found = np.arange(*places.indices(self._count), dtype=np.int64)
        outside = np.arange(len(found))
        while len(outside):
            found[outside] = self._mixed(found[outside])
            outside = outside[found[outside] >= self._count]
        return found

    def _mixed(self, number_B: NDArray[np.int64]) -> NDArray[np.int64]:
        left_B, right_B = number_B >> self._right_bits, number_B & ((1 << self._right_bits) - 1)
        for to_left, to_right in self._tables:
            left_B = left_B ^ to_left[right_B]
            right_B = right_B ^ to_right[left_B]
        return (left_B << self._right_bits) | right_B
