"""The augment stage: for each training row the original, then up to `copies` others with some words replaced."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from datasets import Dataset

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import AugmentConfig
from compressor.dataset import Example, read_examples, task_of, texts_of, write_examples
from compressor.errors import ConfigError
from compressor.progress import Progress
from compressor.stages.augment.candidates import MaskedLM, Vectors, load_masked_lm, load_vectors
from compressor.stages.augment.words import Word, eligible_words, replaced

TRIES_PER_COPY = 3  # draws that come out equal to an earlier row are drawn again this often
ROWS_AT_ONCE = 1000  # whose candidates are in memory together
Candidates = list[tuple[Word, list[str]]]
"""Of one text: the words that can be replaced, and by what."""


def augment(config: AugmentConfig, examples: Artifact, *, seed: int, key: str, out: Path) -> Artifact:
    """Write `train` rows, augmented; labels are copied, and `origin` names the row each was made from.

    The result depends on the seed and the rows alone: each row has a random stream of its own. Raises ConfigError for
    a regression, SourceError if vectors or model cannot be had.
    """
    task = task_of(examples)
    if task.is_regression:
        raise ConfigError(
            f"augment: {task.name} is a regression, whose scores would be copied to changed texts; drop [augment]"
        )
    vectors = load_vectors(config.vectors)
    masked_lm = load_masked_lm(config.masked_lm) if config.masked_lm else None
    rows = read_examples(examples.path / "train.arrow")
    section = {**config.model_dump(), "task": task.model_dump(mode="json")}
    with artifact.write(out, "examples", key=key, section=section, parents={"corpus": examples}) as draft:
        counter = Counter()
        augmented = _augmented_rows(config, rows, vectors, masked_lm, seed, counter)
        count = write_examples(draft.path / "train.arrow", augmented, task)
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
) -> Iterator[Example]:
    words = {word.text.casefold() for block in _blocks(rows) for text in _texts(block) for word in eligible_words(text)}
    near = vectors.neighbours(sorted(words), config.candidates)
    row, progress = 0, Progress("augmented rows", total=len(rows))
    for block in _blocks(rows):
        candidates = find_candidates(config, _texts(block), near, masked_lm)
        for texts, label in zip(texts_of(block), block["label"], strict=True):
            yield Example(texts, label, row)
            found = [candidates[text] for text in texts]
            counter.without_words += not any(found)
            for copy, count in copies_of(texts, found, config, random.Random(f"{seed}-{row}")):
                counter.replaced += count
                yield Example(copy, label, row)
            row += 1
        progress.advance(len(block))
    progress.close()


def _blocks(rows: Dataset) -> Iterator[Dataset]:
    starts = range(0, len(rows), ROWS_AT_ONCE)
    return (rows.select(range(start, min(start + ROWS_AT_ONCE, len(rows)))) for start in starts)


def _texts(block: Dataset) -> list[str]:
    """All texts of some rows, each once: premises of GLUE stand in several pairs."""
    return list(dict.fromkeys(text for texts in texts_of(block) for text in texts))


def find_candidates(
    config: AugmentConfig, texts: Sequence[str], near: Mapping[str, list[str]], masked_lm: MaskedLM | None
) -> dict[str, Candidates]:
    """Replacements of each text's words: by the masked LM where a word is one piece, else from the `near` ones."""
    words = {text: eligible_words(text) for text in texts}
    by_model: dict[tuple[str, int], list[str]] = {}
    if masked_lm is not None:
        one_piece = {
            word: masked_lm.is_one_piece(word) for word in {word.text for found in words.values() for word in found}
        }
        places = [(text, word) for text, found in words.items() for word in found if one_piece[word.text]]
        answers = masked_lm.candidates(places, config.candidates)
        by_model = {(text, word.start): answer for (text, word), answer in zip(places, answers, strict=True)}
    result = {}
    for text, found in words.items():
        both = [(word, by_model.get((text, word.start)) or near[word.text.casefold()]) for word in found]
        result[text] = [(word, answers) for word, answers in both if answers]
    return result


def copies_of(
    texts: tuple[str, ...], candidates: Sequence[Candidates], config: AugmentConfig, stream: random.Random
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Up to `config.copies` distinct rows other than `texts`, each with the number of words replaced in it.

    `candidates` are of each text. In a copy of a pair one text varies and the other stays as it is; they take turns,
    and which one begins is drawn.
    """
    sides = [side for side, found in enumerate(candidates) if found]
    turn = stream.randrange(2) if len(sides) == 2 else 0
    seen, made = {texts}, 0
    for number in range(config.copies * TRIES_PER_COPY if sides else 0):
        if made == config.copies:
            return
        side = sides[(turn + number) % len(sides)]
        choices = [
            (word, stream.choice(answers))
            for word, answers in candidates[side]
            if stream.random() < config.replace_probability
        ]
        copy = (*texts[:side], replaced(texts[side], choices), *texts[side + 1 :])
        if copy not in seen:
            seen.add(copy)
            made += 1
            yield copy, len(choices)
