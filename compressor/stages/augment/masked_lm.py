"""Words that a masked language model expects in another's place.

Shape legend: B batch, S sequence, D width, P masked places, A words that may be answers, K answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compressor.sources import model_folder
from compressor.stages.augment.words import ENGLISH, LETTERS, Word

# A pass has about this many tokens, whatever their number of texts is: enough to keep a core's matrix units busy.
TOKENS_PER_PASS = {"cpu": 1024, "cuda": 32_768}
PAD_MULTIPLE = 8
PLACES = 64  # scored against the vocabulary together
SPARE = 48  # more words than asked for are looked at again in float32, for the order of the likeliest to be exact

Answers = Mapping[int, Sequence[str]]
"""Of one text: likely words by the first character of the word in whose place they could stand."""


@dataclass(frozen=True)
class _Pass:
    """One sequence for the model."""

    ids: list[int]
    """With [CLS], [SEP] and the mask."""
    mask: int
    """Place of the mask in `ids`."""
    text: int
    """Number of the text."""
    start: int
    """First character of the masked word in its text."""
    token: int
    """The masked word."""


class MaskedLM:
    """Likely words at a masked place, for words that are one word piece.

    Every batch is padded to one of a few shapes and computed by one thread, so that an answer depends neither on the
    texts that are asked together nor on the number of threads; several batches are computed at a time.
    """

    def __init__(
        self, model: Any, tokenizer: Any, stop_words: frozenset[str] = ENGLISH, *, device: str = "cpu", threads: int = 1
    ) -> None:
        import torch
        from tokenizers import Tokenizer

        from compressor.training import cast_frozen
        from compressor.world import World

        self._world, self._threads = World(device=torch.device(device)), threads
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
            batches = self._batches(list(self._passes(texts)))
            for passes, answers in pool.map(lambda batch: (batch, self._answered(batch, count)), batches):
                for one, words in zip(passes, answers, strict=True):
                    found[one.text][one.start] = words
        return list(found)

    def _passes(self, texts: Sequence[tuple[str, Sequence[Word]]]) -> Iterator[_Pass]:
        encodings = self._rules.encode_batch([text for text, _ in texts], add_special_tokens=False)
        for number, ((_, words), encoding) in enumerate(zip(texts, encodings, strict=True)):
            yield from self._passes_of(number, words, encoding)

    def _passes_of(self, number: int, words: Sequence[Word], encoding: Any) -> Iterator[_Pass]:
        """The sequences in which the words of one text that are one piece are masked."""
        cls, mask, sep = self._frame
        ids, first_of_span = encoding.ids, dict[tuple[int, int], int]()
        for token, span in enumerate(encoding.offsets):
            first_of_span.setdefault(span, token)
        for word in words:
            place = first_of_span.get((word.start, word.end), -1)
            if place >= 0 and ids[place] != self._unknown:
                first = _window(place, len(ids), self._limit - 2)
                masked = [cls, *ids[first : first + self._limit - 2], sep]
                masked[1 + place - first] = mask
                yield _Pass(masked, 1 + place - first, number, word.start, ids[place])

    def _batches(self, passes: list[_Pass]) -> Iterator[list[_Pass]]:
        """Passes of one padded length together, as many as make a batch."""
        passes.sort(key=lambda one: _padded(len(one.ids)))
        for size, group in itertools.groupby(passes, lambda one: _padded(len(one.ids))):
            left = iter(group)
            while batch := list(itertools.islice(left, self._rows(size))):
                yield batch

    def _rows(self, size: int) -> int:
        """Sequences of `size` tokens in a batch."""
        return max(1, TOKENS_PER_PASS[self._world.device.type] // size)

    def _answered(self, passes: list[_Pass], count: int) -> list[list[str]]:
        """Likely words for every mask of a batch."""
        import torch

        from compressor.training import autocast

        size = _padded(max(len(one.ids) for one in passes))
        rows = self._rows(size)
        full = passes + passes[:1] * (rows - len(passes))  # the shape decides how sums are rounded
        ids_BS = torch.tensor([one.ids + [0] * (size - len(one.ids)) for one in full])
        mask_BS = torch.tensor([[1] * len(one.ids) + [0] * (size - len(one.ids)) for one in full])
        places = [row * size + one.mask for row, one in enumerate(passes)]
        device = self._world.device
        with torch.inference_mode():
            with autocast(self._world):
                states = self._bert(input_ids=ids_BS.to(device), attention_mask=mask_BS.to(device))
            places_PD = states.last_hidden_state.flatten(0, 1)[torch.tensor(places, device=device)].float()
            tokens = [self._likeliest(part_PD, count + 2) for part_PD in places_PD.split(PLACES)]
        found = []
        for one, chosen in zip(passes, itertools.chain.from_iterable(tokens), strict=True):
            word = self._rules.id_to_token(one.token).casefold()
            names = [self._words[place] for place in chosen if self._tokens[place] != one.token]
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


def _padded(size: int) -> int:
    return -(-size // PAD_MULTIPLE) * PAD_MULTIPLE


def _window(token: int, tokens: int, room: int) -> int:
    """First token of the window, of `room` tokens, in which a token of a text has most around it."""
    if tokens <= room:
        return 0
    step = max(1, room // 2)
    return min(tokens - room, step * max(0, (token - step // 2) // step))


def load_masked_lm(
    source: str, stop_words: frozenset[str] = ENGLISH, *, device: str = "cpu", threads: int = 1
) -> MaskedLM:
    """A BERT masked language model. Raises SourceError if it cannot be had, ModelError if it is not a whole one."""
    from compressor import checkpoints, world

    folder = model_folder(source, what="augment.masked_lm")
    world.keep_freed_memory()
    model, tokenizer = checkpoints.load_masked_lm(folder), checkpoints.load_tokenizer(folder)
    return MaskedLM(model, tokenizer, stop_words, device=device, threads=threads)
