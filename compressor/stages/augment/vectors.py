"""Words that stand near another in a space of word vectors.

Shape legend: V words, D dimensions, Q queries, G groups of words, K nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compressor.errors import SourceError
from compressor.sources import VECTORS, check, vector_files
from compressor.stages.augment.words import ENGLISH, LETTERS

# Frequent words come first in GloVe's files; behind these stand names, typing errors and other languages.
VOCABULARY = 100_000
QUERIES = 64  # of one product: with 100,000 words it has 26 MB
GROUP = 64  # words of which only the nearest is looked at first
SPARE = 9  # more words than asked for are found: the query itself and its twins in other capitals are among them
Floats = NDArray[np.float32]


class Vectors:
    """Nearest words by cosine similarity. What was asked once is kept."""

    def __init__(self, words: Sequence[str], vectors_VD: Floats, stop_words: frozenset[str] = ENGLISH) -> None:
        norms_V = np.linalg.norm(vectors_VD, axis=1)
        # A zero vector has no direction: it can neither be a neighbour nor have any.
        usable = [
            index
            for index, word in enumerate(words)
            if norms_V[index] > 0 and LETTERS.fullmatch(word) and word.casefold() not in stop_words
        ]
        self.words = [words[index] for index in usable]
        size = -(-len(usable) // GROUP) * GROUP
        # The last group is filled up with words of no direction, which come out as the farthest.
        self.unit_VD = np.zeros((size, vectors_VD.shape[1]), dtype=np.float32)
        self.unit_VD[: len(usable)] = vectors_VD[usable] / norms_V[usable, None]
        self._index = dict[str, int]()
        for place, word in enumerate(self.words):
            self._index.setdefault(word.casefold(), place)  # of a word in several capitals the most frequent
        self._known = dict[tuple[str, int], list[str]]()

    def neighbours(self, words: Iterable[str], count: int) -> dict[str, list[str]]:
        """Up to `count` nearest words of each word (case-folded): nearest first, of equals the more frequent.

        Never the word itself in any capitals, never a stop word. A word without a vector has none. The answers do not
        depend on which words are asked together.
        """
        asked = dict.fromkeys(words)
        new = [word for word in asked if (word, count) not in self._known]
        with_vector = [word for word in new if word in self._index]
        self._known.update({(word, count): [] for word in new})
        for start in range(0, len(with_vector), QUERIES):
            block = with_vector[start : start + QUERIES]
            rows_Q = [self._index[word] for word in block]
            for word, found in zip(block, self._nearest(rows_Q, count + SPARE), strict=True):
                names = [self.words[place] for place in found]
                self._known[word, count] = [name for name in names if name.casefold() != word][:count]
        return {word: self._known[word, count] for word in asked}

    def _nearest(self, rows_Q: list[int], count: int) -> list[list[int]]:
        """The `count` nearest words of some, among them themselves: nearest first, equals in their order.

        A group can hold one of the `count` nearest only if its own nearest is among the `count` nearest of all groups,
        so that few words are sorted.
        """
        size = len(self.unit_VD)
        similar_QV = self.unit_VD[rows_Q] @ self.unit_VD.T
        similar_QV[:, len(self.words) :] = -np.inf
        similar_QGg = similar_QV.reshape(len(rows_Q), size // GROUP, GROUP)
        # How a product rounds depends on its shape; so some more are taken than are asked for, and compared exactly.
        wanted = min(count + SPARE, len(self.words))
        groups = min(wanted, size // GROUP)
        best_QG = np.argpartition(-similar_QGg.max(axis=2), groups - 1, axis=1)[:, :groups]
        best_QG.sort(axis=1)
        some_QK = np.take_along_axis(similar_QGg, best_QG[:, :, None], axis=1).reshape(len(rows_Q), -1)
        chosen_QK = np.argpartition(-some_QK, wanted - 1, axis=1)[:, :wanted]
        place_QK = np.take_along_axis(best_QG, chosen_QK // GROUP, axis=1) * GROUP + chosen_QK % GROUP
        place_QK.sort(axis=1)
        near_QKD = self.unit_VD[place_QK].astype(np.float64)
        exact_QK = (near_QKD * self.unit_VD[rows_Q][:, None].astype(np.float64)).sum(axis=2)
        order_QK = np.argsort(-exact_QK, axis=1, kind="stable")
        found: list[list[int]] = np.take_along_axis(place_QK, order_QK, axis=1)[:, :count].tolist()
        return found


def load_vectors(source: str, stop_words: frozenset[str] = ENGLISH) -> Vectors:
    """Word vectors from an installed package or a GloVe text file. Raises SourceError if they cannot be read."""
    check(source, what=VECTORS)
    file, *index = vector_files(source, what=VECTORS)
    if not index:
        return Vectors(*_read_glove(file), stop_words)
    import pyarrow.parquet as pq

    words = pq.read_table(index[0]).column(0).slice(0, VOCABULARY).to_pylist()
    vectors_VD = np.array(np.load(file, mmap_mode="r")[:VOCABULARY], dtype=np.float32)
    return Vectors(words, vectors_VD, stop_words)


def _read_glove(path: Path) -> tuple[list[str], Floats]:
    """GloVe's text format: a word, which may hold spaces, then its numbers."""
    words, rows = [], []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            first = file.readline().split(" ")
            size = len(first) - 1
            file.seek(0)
            for number, line in enumerate(file, start=1):
                word, *values = line.rstrip("\r\n").rsplit(" ", size)
                try:
                    rows.append(np.array(values, dtype=np.float32))
                except ValueError as error:
                    raise SourceError(f"{path}, line {number}: not a word and {size} numbers") from error
                words.append(word)
                if number == VOCABULARY:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"augment.vectors {path} cannot be read: {error}") from error
    if size < 2 or any(len(row) != size for row in rows):  # word2vec's text format begins with two numbers
        raise SourceError(f"augment.vectors {path} is not in GloVe's text format: a word and its numbers on each line")
    return words, np.stack(rows)
