"""Copies of a row: which of its words are replaced, drawn so that no copy comes twice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from compressor.stages.augment.words import Change, changed

TRIES = 4  # draws that give nothing new, before a copy is taken from those that are left
FEW = 1000  # texts that can be made of one, up to which they are listed to find those that are left

Options = Sequence[Sequence[Change]]
"""Of one text: for each word that can be replaced, in their order, the changes to choose from, which all differ."""


class Copy(NamedTuple):
    """A row with some words replaced."""

    texts: tuple[str, ...]
    changes: list[Change]


class Variants:
    """The texts that can be made of one, each once and never itself."""

    def __init__(self, text: str, options: Options, probability: float, stream: random.Random) -> None:
        self._text, self._options, self._stream = text, options, stream
        # The distance to the next replaced word has a geometric distribution.
        self._log = math.log1p(-probability)
        self._any = -math.expm1(len(options) * self._log)
        self._total = math.prod(len(changes) + 1 for changes in options)
        self._seen = {text}
        self._rest: list[int] | None = None  # numbers of the texts that are left, once these are listed
        self.duplicates = 0
        """Draws that were thrown away."""

    @property
    def left(self) -> int:
        """How many texts can still be drawn."""
        return self._total - len(self._seen)

    def draw(self) -> tuple[str, list[Change]]:
        """A text that was not drawn before, and its changes; there must be one left.

        Each word is replaced with the given probability, given that one is at least. Where that gives nothing new
        several times, one of the texts that are left is drawn instead, all of them as likely.
        """
        for _ in range(TRIES if self._rest is None else 0):
            changes = self._some()
            text = changed(self._text, changes)
            if text not in self._seen:
                return self._kept(text, changes)
            self.duplicates += 1
        if self._rest is None and self._total <= FEW:
            self._rest = [number for number in range(1, self._total) if self._made(number)[0] not in self._seen]
            self._stream.shuffle(self._rest)
        if self._rest is not None:
            return self._kept(*self._made(self._rest.pop()))
        while True:
            text, changes = self._made(self._stream.randrange(1, self._total))
            if text not in self._seen:
                return self._kept(text, changes)

    def _kept(self, text: str, changes: list[Change]) -> tuple[str, list[Change]]:
        self._seen.add(text)
        return text, changes

    def _some(self) -> list[Change]:
        """Changes of at least one word."""
        draw, options = self._stream.random, self._options
        place = min(len(options) - 1, int(math.log1p(-draw() * self._any) / self._log))
        changes = []
        while place < len(options):
            choice = options[place]
            changes.append(choice[int(draw() * len(choice))])
            place += 1 + int(math.log1p(-draw()) / self._log)
        return changes

    def _made(self, number: int) -> tuple[str, list[Change]]:
        """One of the texts, which are numbered from 0, the text itself."""
        changes = []
        for choice in self._options:
            number, chosen = divmod(number, len(choice) + 1)
            if chosen:
                changes.append(choice[chosen - 1])
        return changed(self._text, changes), changes


def copies_of(
    texts: tuple[str, ...], options: Sequence[Options], *, copies: int, probability: float, stream: random.Random
) -> tuple[list[Copy], int]:
    """`copies` distinct rows other than `texts`, each with its changes, and the number of draws thrown away.

    There are fewer only where no more can be made. `options` are of each text. In a copy of a pair one text varies and
    the other stays as it is; they take turns, and which one begins is drawn; one that has no more copies leaves its
    turns to the other.
    """
    sides = [side for side, found in enumerate(options) if found]
    variants = {side: Variants(texts[side], options[side], probability, stream) for side in sides}
    turn = stream.randrange(2) if len(sides) == 2 else 0
    made = list[Copy]()
    while len(made) < copies and (open_sides := [side for side in sides if variants[side].left]):
        side = open_sides[turn % len(open_sides)]
        text, changes = variants[side].draw()
        made.append(Copy((*texts[:side], text, *texts[side + 1 :]), changes))
        turn += 1
    return made, sum(side.duplicates for side in variants.values())
