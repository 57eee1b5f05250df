"""Words that a masked language model expects in another's place.

Shape legend: B batch, S sequence, D width, P masked places, A words that may be answers, K answers.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from compressor.errors import ModelError
from compressor.sources import model_folder
from compressor.stages.augment.words import ENGLISH, LETTERS, Word

# A pass has about this many tokens, whatever their number of texts is: enough to keep a core's matrix units busy.
TOKENS_PER_PASS = {"cpu": 1024, "cuda": 32_768}
PAD_MULTIPLE = 8
TEXTS_AT_ONCE = 64  # that are cut into pieces together
PASSES_AT_ONCE = 8192  # that are in memory, and put into batches by their lengths
PLACES = 64  # scored against the vocabulary together
WORDS_APART = 32  # tokens between two that are masked in one pass
SPARE = 48  # more words than asked for are looked at again in float32, for the order of the likeliest to be exact

Answers = Mapping[int, Sequence[str]]
"""Of one text: likely words by the first character of the word in whose place they could stand."""


class _Mask(NamedTuple):
    """A masked word."""

    place: int
    """In the sequence."""
    start: int
    """Its first character in its text."""
    token: int
    """What stood there."""


@dataclass(frozen=True)
class _Pass:
    """One sequence for the model."""

    ids: list[int]
    """With [CLS], [SEP] and the masks."""
    text: int
    """Number of the text."""
    masks: list[_Mask]


class MaskedLM:
    """Likely words at a masked place, for words that are one word piece.

    Every batch is padded to one of a few shapes and computed by one thread, so that an answer depends neither on the
    texts that are asked together nor on the number of threads; several batches are computed at a time. Words of a text
    that are `apart` tokens apart or more are masked in one pass.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_words: frozenset[str] = ENGLISH,
        *,
        device: str = "cpu",
        threads: int = 1,
        apart: int = WORDS_APART,
    ) -> None:
        import torch
        from tokenizers import Tokenizer

        from compressor.training import cast_frozen
        from compressor.world import World

        self._world, self._threads, self._apart = World(device=torch.device(device)), threads, apart
        self._rules = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._rules.no_truncation()
        self._rules.no_padding()
        self._frame = tokenizer.cls_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id
        self._unknown, self._limit = tokenizer.unk_token_id, int(model.config.max_position_embeddings)
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        answers = [
            (word, token)
            for word, token in vocabulary
            if LETTERS.fullmatch(word) and word.casefold() not in stop_words and token < model.config.vocab_size
        ]
        self._words, self._tokens = [word for word, _ in answers], [token for _, token in answers]
        model = model.eval().requires_grad_(False).to(self._world.device)
        decoder = model.cls.predictions.decoder
        self._word_AD = decoder.weight.detach()[self._tokens].float()
        self._bias_A = model.cls.predictions.bias.detach()[self._tokens].float()
        self._transform, self._bert = model.cls.predictions.transform, model.bert
        cast_frozen(self._bert, self._world)
        self._quick_AD = self._word_AD.to(next(self._bert.encoder.parameters()).dtype)

    def answers(self, texts: Sequence[tuple[str, Sequence[Word]]], count: int) -> list[Answers]:
        """Up to `count` likely words for each of some words of each text, likeliest first.

        Never the word itself in any capitals, a fragment or a stop word. Words of several pieces have no entry. A text
        longer than the model's window is read window by window, each word in the one that shows most around it.
        """
        found: list[dict[int, list[str]]] = [{} for _ in texts]
        with _single_threaded(), ThreadPoolExecutor(self._threads) as pool:
            left = self._passes(texts)
            while some := list(itertools.islice(left, PASSES_AT_ONCE)):
                batches = self._batches(some)
                for passes, answers in pool.map(lambda batch: (batch, self._answered(batch, count)), batches):
                    masks = ((one.text, mask) for one in passes for mask in one.masks)
                    for (text, mask), words in zip(masks, answers, strict=True):
                        found[text][mask.start] = words
        return list(found)

    def _passes(self, texts: Sequence[tuple[str, Sequence[Word]]]) -> Iterator[_Pass]:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[first : first + TEXTS_AT_ONCE]
            encodings = self._rules.encode_batch([text for text, _ in some], add_special_tokens=False)
            for number, ((_, words), encoding) in enumerate(zip(some, encodings, strict=True), start=first):
                yield from self._passes_of(number, words, encoding)

    def _passes_of(self, number: int, words: Sequence[Word], encoding: Any) -> Iterable[_Pass]:
        """The sequences in which the words of one text, in their order, are masked if they are one piece."""
        cls, mask, sep = self._frame
        ids, whole = encoding.ids, _whole(encoding.offsets)
        of_window: dict[int, deque[_Pass]] = {}  # the passes of each, the one whose last mask is furthest back first
        for word in words:
            token = whole.get((word.start, word.end), -1)
            if token < 0 or ids[token] == self._unknown:
                continue
            first = _window(token, len(ids), self._limit - 2)
            place = 1 + token - first
            passes = of_window.setdefault(first, deque())
            if passes and place - passes[0].masks[-1].place >= self._apart:
                one = passes.popleft()
            else:
                one = _Pass([cls, *ids[first : first + self._limit - 2], sep], number, [])
            one.ids[place] = mask
            one.masks.append(_Mask(place, word.start, ids[token]))
            passes.append(one)
        return itertools.chain.from_iterable(of_window.values())

    def _batches(self, passes: list[_Pass]) -> Iterator[list[_Pass]]:
        """Passes of one padded length together, as many as make a batch."""
        passes.sort(key=lambda one: self._padded(len(one.ids)))
        for size, group in itertools.groupby(passes, lambda one: self._padded(len(one.ids))):
            left = iter(group)
            while batch := list(itertools.islice(left, self._rows(size))):
                yield batch

    def _padded(self, size: int) -> int:
        """Tokens of a sequence with its padding, which the model has positions for."""
        return min(self._limit, -(-size // PAD_MULTIPLE) * PAD_MULTIPLE)

    def _rows(self, size: int) -> int:
        """Sequences of `size` tokens in a batch."""
        return max(1, TOKENS_PER_PASS[self._world.device.type] // size)

    def _answered(self, passes: list[_Pass], count: int) -> list[list[str]]:
        """Likely words for every mask of a batch, in the order of the passes and of their masks."""
        import torch

        from compressor.training import autocast

        size = self._padded(max(len(one.ids) for one in passes))
        rows = self._rows(size)
        full = passes + passes[:1] * (rows - len(passes))  # the shape decides how sums are rounded
        ids_BS = torch.tensor([one.ids + [0] * (size - len(one.ids)) for one in full])
        mask_BS = torch.tensor([[1] * len(one.ids) + [0] * (size - len(one.ids)) for one in full])
        places = [row * size + mask.place for row, one in enumerate(passes) for mask in one.masks]
        device = self._world.device
        with torch.inference_mode():
            with autocast(self._world):
                states = self._bert(input_ids=ids_BS.to(device), attention_mask=mask_BS.to(device))
            places_PD = states.last_hidden_state.flatten(0, 1)[torch.tensor(places, device=device)].float()
            tokens = [self._likeliest(part_PD, count + 2) for part_PD in places_PD.split(PLACES)]
        found = []
        masks = (mask for one in passes for mask in one.masks)
        for mask, chosen in zip(masks, itertools.chain.from_iterable(tokens), strict=True):
            word = self._rules.id_to_token(mask.token).casefold()
            names = [self._words[place] for place in chosen if self._tokens[place] != mask.token]
            found.append([name for name in names if name.casefold() != word][:count])
        return found

    def _likeliest(self, places_PD: Any, count: int) -> list[list[int]]:
        """The likeliest words at each place, likeliest first, of equals the first in the vocabulary."""
        import torch

        asked, words = len(places_PD), len(self._words)
        filled_PD = torch.cat([places_PD, places_PD[:1].expand(PLACES - asked, -1)])
        state_PD = self._transform(filled_PD)
        quick_PA = (state_PD.to(self._quick_AD.dtype) @ self._quick_AD.T).float() + self._bias_A
        near_PK = quick_PA.topk(min(count + SPARE, words), dim=1).indices.sort(dim=1).values
        exact_PK = (self._word_AD[near_PK] @ state_PD[:, :, None]).squeeze(2) + self._bias_A[near_PK]
        order_PK = exact_PK.argsort(dim=1, descending=True, stable=True)
        best: list[list[int]] = near_PK.gather(1, order_PK)[:asked, :count].tolist()
        return best


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Let PyTorch compute each thing in one thread meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _whole(spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The tokens that share no character with another, by their spans.

    A tokenizer that takes characters apart can cut within one: then the spans of two pieces overlap.
    """
    ends, starts = [0, *(end for _, end in spans)], [*(start for start, _ in spans[1:]), math.inf]
    found = zip(spans, ends, starts, strict=False)
    return {span: token for token, (span, end, start) in enumerate(found) if end <= span[0] and span[1] <= start}


def _window(token: int, tokens: int, room: int) -> int:
    """First token of the window, of `room` tokens, in which a token of a text has most around it."""
    if tokens <= room:
        return 0
    step = max(1, room // 2)
    return min(tokens - room, step * max(0, (token - step // 2) // step))


def load_masked_lm(
    source: str, stop_words: frozenset[str] = ENGLISH, *, device: str = "cpu", threads: int = 1
) -> MaskedLM:
    """A BERT masked language model. Raises SourceError if it cannot be had, ModelError if it cannot mask words."""
    from compressor import world

    folder = model_folder(source, what="augment.masked_lm")
    world.keep_freed_memory()
    return MaskedLM(*read_masked_lm(folder), stop_words, device=device, threads=threads)


def read_masked_lm(folder: Path) -> tuple[Any, Any]:
    """The model in a folder and its tokenizer. Raises ModelError if they do not fit, or if a token is missing."""
    from compressor.checkpoints import check_vocabulary, load_masked_lm, load_tokenizer

    model, tokenizer = load_masked_lm(folder), load_tokenizer(folder)
    check_vocabulary(model, tokenizer, folder)
    missing = [name for name in ("cls", "mask", "sep") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise ModelError(
            f"{folder}: the tokenizer has no {' and no '.join(missing)} token, and no word can be masked without; use "
            "the tokenizer that the model was trained with"
        )
    return model, tokenizer
