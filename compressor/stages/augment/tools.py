"""What a process needs to replace words, and what it does with it: rows and their candidates -> copies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compressor.config import AugmentConfig
from compressor.stages.augment.copies import Copy, Options, copies_of
from compressor.stages.augment.masked_lm import Answers, MaskedLM, load_masked_lm
from compressor.stages.augment.vectors import Vectors, load_vectors
from compressor.stages.augment.words import Change, Word, eligible_words, load_stop_words, written_like

Texts = tuple[str, ...]
"""One text, or the two of a pair."""


class Made(NamedTuple):
    """What came of one row."""

    copies: list[Copy]
    duplicates: int
    """Draws that were thrown away."""
    has_words: bool
    """Whether there is a word that can be replaced."""


@dataclass(frozen=True)
class Tools:
    """Loaded once in each process."""

    config: AugmentConfig
    stop_words: frozenset[str]
    vectors: Vectors
    masked_lm: MaskedLM | None

    @classmethod
    def load(cls, config: AugmentConfig, *, device: str, threads: int) -> Tools:
        """Read everything. Raises SourceError, ModelError or ConfigError if something cannot be had."""
        stop_words = load_stop_words(config.stop_words)
        vectors, masked_lm = load_vectors(config.vectors, stop_words), None
        if config.masked_lm is not None:
            masked_lm = load_masked_lm(config.masked_lm, stop_words, device=device, threads=threads)
        return cls(config, stop_words, vectors, masked_lm)

    def answers(self, texts: Iterable[str]) -> dict[str, Answers]:
        """What the masked language model proposes for the words of some texts; each text is computed once."""
        words = {text: self._words(text) for text in texts}
        found = self.masked_lm.answers(list(words.items()), self.config.candidates) if self.masked_lm else []
        return dict(zip(words, found, strict=False))

    def made(self, rows: Sequence[Texts], answers: Mapping[str, Answers], seeds: Iterable[str]) -> Iterator[Made]:
        """What comes of each row. The draws of a row hang on its seed alone."""
        words = {text: self._words(text) for texts in rows for text in texts}
        near = self.vectors.neighbours(
            (
                word.text.casefold()
                for text, found in words.items()
                for word in found
                if not answers.get(text, {}).get(word.start)
            ),
            self.config.candidates,
        )
        for texts, seed in zip(rows, seeds, strict=True):
            options = [
                _options(side, words[text], answers.get(text, {}), near, self.stop_words)
                for side, text in enumerate(texts)
            ]
            copies, duplicates = copies_of(
                texts,
                options,
                copies=self.config.copies,
                probability=self.config.replace_probability,
                stream=random.Random(seed),
            )
            yield Made(copies, duplicates, any(options))

    def _words(self, text: str) -> list[Word]:
        return eligible_words(text, self.stop_words, keep_names=self.config.keep_names)


def _options(
    side: int,
    words: Iterable[Word],
    answers: Answers,
    near: Mapping[str, Sequence[str]],
    stop_words: frozenset[str],
) -> Options:
    """The changes that can be made to each word: what the masked language model proposes, else the near words.

    None has a capital where the word has none: that would be a name.
    """
    options = []
    for word in words:
        likely, folded = answers.get(word.start), word.text.casefold()
        written = dict.fromkeys(written_like(new, word.text) for new in likely or near[folded])
        # With capitals a word can become another: that of the Turkish dotless i is I.
        new_words = [new for new in written if new.casefold() != folded and new.casefold() not in stop_words]
        if word.text == word.text.lower():
            new_words = [new for new in new_words if new == new.lower()]
        if new_words:
            options.append([Change(side, word.start, word.text, new, bool(likely)) for new in new_words])
    return options
