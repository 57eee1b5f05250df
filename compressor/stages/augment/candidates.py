"""Words that could stand in another's place: nearest in a word-vector space, or likely by a masked language model.

Shape legend: V words, D dimensions, B batch, S sequence, K candidates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import SourceError
from compressor.sources import check, model_folder, package_folder
from compressor.stages.augment.words import STOP_WORDS, Word

# Frequent words come first in GloVe's files; behind these stand names, typing errors and other languages.
VOCABULARY = 100_000
QUERIES_PER_PRODUCT = 512
MASKED_PER_PASS = 64
LETTERS = re.compile(r"[^\W\d_]{2,}")


class Vectors:
    """Nearest words by cosine similarity."""

    def __init__(self, words: Sequence[str], vectors_VD: NDArray[np.float32]) -> None:
        norms_V = np.linalg.norm(vectors_VD, axis=1)
        # A zero vector has no direction: it can neither be a neighbour nor have any.
        usable = [index for index, word in enumerate(words) if norms_V[index] > 0 and LETTERS.fullmatch(word)]
        self._words = [words[index] for index in usable]
        self._unit_VD = vectors_VD[usable] / norms_V[usable, None]
        self._index = {word: place for place, word in enumerate(self._words)}

    def neighbours(self, words: Sequence[str], count: int) -> dict[str, list[str]]:
        """Up to `count` nearest words of each word (lower case), nearest first: never itself, never a stop word.

        A word without a vector has none.
        """
        known = sorted({word for word in words if word in self._index})
        found: dict[str, list[str]] = {word: [] for word in words}
        wanted = min(count + 1 + 10, len(self._words))  # itself, and some stop words to drop
        for start in range(0, len(known), QUERIES_PER_PRODUCT):
            block = known[start : start + QUERIES_PER_PRODUCT]
            similar_BV = self._unit_VD[[self._index[word] for word in block]] @ self._unit_VD.T
            best_BK = np.argpartition(-similar_BV, wanted - 1, axis=1)[:, :wanted]
            for word, best, similar in zip(block, best_BK, similar_BV, strict=True):
                order = best[np.lexsort((best, -similar[best]))]
                names = (self._words[place] for place in order)
                refused = STOP_WORDS | {word.casefold()}
                found[word] = [name for name in names if name.casefold() not in refused][:count]
        return found


def load_vectors(source: str) -> Vectors:
    """Word vectors from an installed package or a GloVe text file. Raises SourceError if they cannot be read."""
    what = "augment.vectors"
    check(source, what=what)
    kind, _, name = source.partition(":")
    if kind == "package":
        import pyarrow.parquet as pq

        folder = package_folder(name, what=what)
        matrix, index = next(iter(folder.glob("*.npy")), None), next(iter(folder.glob("*.parquet")), None)
        if matrix is None or index is None:
            raise SourceError(f"{what} is {source!r}, whose package holds no .npy matrix with a .parquet word list")
        words = pq.read_table(index).column(0).slice(0, VOCABULARY).to_pylist()
        return Vectors(words, np.array(np.load(matrix, mmap_mode="r")[:VOCABULARY], dtype=np.float32))
    if kind == "hub":
        raise SourceError(
            f"{what} is {source!r}; word vectors come from a package or a GloVe text file, not from a hub"
        )
    return _read_glove(Path(source))


def _read_glove(path: Path) -> Vectors:
    """GloVe's text format: a word, which may hold spaces, then its numbers."""
    words, rows = [], []
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline().split(" ")
            size = len(first) - 1
            file.seek(0)
            for number, line in enumerate(file, start=1):
                word, *values = line.rstrip("\n").rsplit(" ", size)
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
    return Vectors(words, np.stack(rows))


class MaskedLM:
    """Likely words at a masked place, for words that are one word piece."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._limit = int(model.config.max_position_embeddings)
        vocabulary = tokenizer.get_vocab()
        self._pieces = {index: piece for piece, index in vocabulary.items()}
        allowed = [
            index
            for piece, index in vocabulary.items()
            if LETTERS.fullmatch(piece) and piece.casefold() not in STOP_WORDS
        ]
        import torch

        self._allowed = len(allowed)
        self._banned_V = torch.ones(model.config.vocab_size, dtype=torch.bool)
        self._banned_V[allowed] = False

    def is_one_piece(self, word: str) -> bool:
        """Whether the tokenizer keeps the word whole."""
        pieces = self._tokenizer.tokenize(word)
        return len(pieces) == 1 and pieces[0] != self._tokenizer.unk_token

    def candidates(self, places: Sequence[tuple[str, Word]], count: int) -> list[list[str]]:
        """Up to `count` likely words for each (text, word), likeliest first: never itself, a fragment or a stop word.

        Texts longer than the model's window are cut to the part around the word.
        """
        encoded = [self._encode(text, word) for text, word in places]
        found: list[list[str]] = [[] for _ in places]
        order = sorted(range(len(places)), key=lambda index: len(encoded[index][0]))
        for start in range(0, len(order), MASKED_PER_PASS):
            group = order[start : start + MASKED_PER_PASS]
            for index, words in zip(group, self._pass([encoded[index] for index in group], count + 1), strict=True):
                itself = places[index][1].text.casefold()
                found[index] = [word for word in words if word.casefold() != itself][:count]
        return found

    def _encode(self, text: str, word: Word) -> tuple[list[int], int]:
        """Token ids with the word masked, and the mask's place, within the model's window."""
        tokenizer = self._tokenizer
        before = tokenizer(text[: word.start], add_special_tokens=False)["input_ids"]
        after = tokenizer(text[word.end :], add_special_tokens=False)["input_ids"]
        room = self._limit - 3  # [CLS], [MASK], [SEP]
        left = min(len(before), max(room // 2, room - len(after)))
        before, after = before[len(before) - left :], after[: room - left]
        ids = [tokenizer.cls_token_id, *before, tokenizer.mask_token_id, *after, tokenizer.sep_token_id]
        return ids, 1 + len(before)

    def _pass(self, encoded: Sequence[tuple[list[int], int]], count: int) -> list[list[str]]:
        """One forward pass; the vocabulary is scored at the masked places only."""
        import torch

        size = max(len(ids) for ids, _ in encoded)
        ids_BS = torch.full((len(encoded), size), self._tokenizer.pad_token_id)
        mask_BS = torch.zeros((len(encoded), size), dtype=torch.int64)
        for row, (ids, _) in enumerate(encoded):
            ids_BS[row, : len(ids)] = torch.tensor(ids)
            mask_BS[row, : len(ids)] = 1
        with torch.inference_mode():
            hidden_BSD = self._model.bert(input_ids=ids_BS, attention_mask=mask_BS).last_hidden_state
            masked_BD = hidden_BSD[torch.arange(len(encoded)), [place for _, place in encoded]]
            scores_BV = self._model.cls(masked_BD).masked_fill(self._banned_V, -torch.inf)
        best_BK = scores_BV.topk(min(count, self._allowed)).indices  # past these come the banned ones
        return [[self._pieces[int(index)] for index in row] for row in best_BK]


def load_masked_lm(source: str) -> MaskedLM:
    """A BERT masked language model. Raises SourceError if it cannot be had or has no masked-LM head."""
    from transformers import AutoTokenizer, BertForMaskedLM

    folder = model_folder(source, what="augment.masked_lm")
    model, report = BertForMaskedLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    missing = [name for name in report["missing_keys"] if name.startswith("cls.") and not name.endswith("decoder.bias")]
    if missing:
        raise SourceError(f"augment.masked_lm is {source!r}, which has no masked-LM head ({missing[0]} is missing)")
    return MaskedLM(model, AutoTokenizer.from_pretrained(folder, local_files_only=True))
