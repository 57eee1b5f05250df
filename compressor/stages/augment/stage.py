"""The augment stage: for each training row the original, then up to `copies` texts with some words replaced."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import AugmentConfig
from compressor.dataset import read_examples, write_examples
from compressor.stages.augment.candidates import MaskedLM, Vectors, load_masked_lm, load_vectors
from compressor.stages.augment.words import Word, eligible_words, replaced

TRIES_PER_COPY = 3  # draws that come out equal to an earlier text are drawn again this often
Candidates = list[tuple[Word, list[str]]]


def augment(config: AugmentConfig, examples: Artifact, *, seed: int, key: str, out: Path) -> Artifact:
    """Write `train` rows, augmented; labels are copied, and `origin` names the row each text was made from.

    The result depends on the seed and the rows alone: each row has a random stream of its own.
    """
    vectors = load_vectors(config.vectors)
    masked_lm = load_masked_lm(config.masked_lm) if config.masked_lm else None
    rows = read_examples(examples.path / "train.arrow")
    with artifact.write(out, "examples", key=key, section=config.model_dump(), parents={"corpus": examples}) as draft:
        counter = Counter()
        count = write_examples(
            draft.path / "train.arrow", _augmented_rows(config, rows, vectors, masked_lm, seed, counter)
        )
        asked = len(rows) * (1 + config.copies)
        draft.metrics.update(
            original_rows=len(rows),
            rows=count,
            asked_rows=asked,
            missing_rows=asked - count,
            replaced_words_per_copy=counter.replaced / max(1, count - len(rows)),
            rows_without_words=counter.without_words,
        )
    return Artifact.open(out, kind="examples")


class Counter:
    """What happened, for the report."""

    replaced = 0
    without_words = 0


def _augmented_rows(
    config: AugmentConfig, rows: Dataset, vectors: Vectors, masked_lm: MaskedLM | None, seed: int, counter: Counter
) -> Iterator[tuple[str, int, int]]:
    texts = rows["text"]
    words = [eligible_words(text) for text in texts]
    candidates = find_candidates(config, texts, words, vectors, masked_lm)
    for row, (text, label) in enumerate(zip(texts, rows["label"], strict=True)):
        yield text, label, row
        counter.without_words += not candidates[row]
        for copy, count in copies_of(text, candidates[row], config, random.Random(f"{seed}-{row}")):
            counter.replaced += count
            yield copy, label, row


def find_candidates(
    config: AugmentConfig,
    texts: Sequence[str],
    words: Sequence[Sequence[Word]],
    vectors: Vectors,
    masked_lm: MaskedLM | None,
) -> list[Candidates]:
    """Replacements of each text's words: by the masked LM where a word is one piece, else by the word vectors."""
    if masked_lm is None:
        by_model: dict[tuple[int, int], list[str]] = {}
    else:
        one_piece = {word: masked_lm.is_one_piece(word) for word in {word.text for found in words for word in found}}
        places = [(row, word) for row, found in enumerate(words) for word in found if one_piece[word.text]]
        answers = masked_lm.candidates([(texts[row], word) for row, word in places], config.candidates)
        by_model = {(row, word.start): answer for (row, word), answer in zip(places, answers, strict=True)}
    near = vectors.neighbours(sorted({word.text.casefold() for found in words for word in found}), config.candidates)
    result = []
    for row, found in enumerate(words):
        both = [(word, by_model.get((row, word.start)) or near[word.text.casefold()]) for word in found]
        result.append([(word, answers) for word, answers in both if answers])
    return result


def copies_of(
    text: str, candidates: Candidates, config: AugmentConfig, stream: random.Random
) -> Iterator[tuple[str, int]]:
    """Up to `config.copies` distinct texts other than `text`, each with the number of words replaced in it."""
    seen = {text}
    made = 0
    for _ in range(config.copies * TRIES_PER_COPY if candidates else 0):
        if made == config.copies:
            return
        choices = [
            (word, stream.choice(answers))
            for word, answers in candidates
            if stream.random() < config.replace_probability
        ]
        copy = replaced(text, choices)
        if copy not in seen:
            seen.add(copy)
            made += 1
            yield copy, len(choices)
