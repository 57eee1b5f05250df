"""What the files of a model answer without a server, for comparison with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.model import Text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnxruntime import InferenceSession
    from tokenizers import Encoding, Tokenizer

PAD_MULTIPLE = 8
"""As in `entry.model`: the numbers of dynamic INT8 depend on how far a text is padded."""

LONG_PAIR, LONG_TEXT, LONGEST_ADDED = 4, 8, 100
"""As in `entry.model`."""

VALUE = "value"
"""Name of the number that a regression answers."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of one model, and how they are read."""

    onnx: Path
    tokenizer: Path
    labels: tuple[str, ...]
    """() is a regression."""
    is_pair: bool
    max_tokens: int
    pad_id: int

    def answers(self, texts: Sequence[Text]) -> list[dict[str, float]]:
        """Return for each text or pair, run alone, the probability of each label, or `VALUE` of a regression."""
        if not texts:
            return []
        answer = self.open()
        return [answer(text) for text in texts]

    def open(self, threads: int = 0) -> Callable[[Text], dict[str, float]]:
        """Load the files, with `threads` threads (0: all cores); return what answers one text or pair."""
        import numpy as np  # here: a command line that only wants its help does without

        logits_of = self.open_batches(threads)

        def answer(text: Text) -> dict[str, float]:
            (logits,) = logits_of([text])
            if not self.labels:
                return {VALUE: float(logits[0])}
            exponents = np.exp(logits.astype(np.float64) - logits.max())
            return dict(zip(self.labels, (exponents / exponents.sum()).tolist(), strict=True))

        return answer

    def open_batches(self, threads: int = 0) -> Callable[[Sequence[Text]], list[NDArray[np.float32]]]:
        """Load the files; return what gives the logits (C,) of each text or pair.

        As on the server, rows of one padded width run together, and none is padded to a longer one's.
        """
        reader, session = self.read_tokenizer(), self.read_graph(threads)

        def logits_of(texts: Sequence[Text]) -> list[NDArray[np.float32]]:
            encodings = reader.encode_batch_fast([shorten(text, reader, self.max_tokens) for text in texts])
            by_width: dict[int, list[int]] = {}
            for row, encoding in enumerate(encodings):
                by_width.setdefault(self.width(len(encoding)), []).append(row)
            found: dict[int, NDArray[np.float32]] = {}
            for width, rows in by_width.items():
                inputs = self.feed([encodings[row] for row in rows], width, session)
                found.update(zip(rows, session.run(["logits"], inputs)[0], strict=True))
            return [found[row] for row in range(len(encodings))]

        return logits_of

    def read_tokenizer(self) -> Tokenizer:
        """Load the tokenizer as the server does."""
        from tokenizers import Tokenizer

        reader = Tokenizer.from_file(str(self.tokenizer))
        reader.no_padding()
        reader.enable_truncation(self.max_tokens)
        return reader

    def read_graph(self, threads: int = 0) -> InferenceSession:
        """Load the graph as the server does."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return onnxruntime.InferenceSession(
            str(self.onnx), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )

    def width(self, tokens: int) -> int:
        """Return the number of tokens that a row is padded to."""
        return min(-(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE, self.max_tokens)

    def feed(
        self, encodings: Sequence[Encoding], width: int, session: InferenceSession
    ) -> dict[str, NDArray[np.int64]]:
        """Return the inputs of the graph, each (rows, width)."""
        import numpy as np

        for encoding in encodings:
            encoding.pad(width, pad_id=self.pad_id)
        tensors: dict[str, Any] = {
            "input_ids": [encoding.ids for encoding in encodings],
            "attention_mask": [encoding.attention_mask for encoding in encodings],
            "token_type_ids": [encoding.type_ids for encoding in encodings],
        }
        return {tensor.name: np.array(tensors[tensor.name]) for tensor in session.get_inputs()}


def shorten(text: Text, reader: Tokenizer, max_tokens: int) -> Text:
    """Return a text or a pair without the ends that are not read anyway, as in `entry.model`, which says why."""
    if not isinstance(text, tuple):
        return _shorten_one(text, reader, max_tokens)
    if max(map(len, text)) <= LONG_PAIR * max_tokens:
        return text
    first, second = ([found, *found.overflowing] for found in reader.encode_batch(text, add_special_tokens=False))
    is_first_longer = sum(map(len, first)) > sum(map(len, second))
    return (
        _cut_behind(text[0], first[: 1 + is_first_longer]),
        _cut_behind(text[1], second[: 2 - is_first_longer]),
    )


def _shorten_one(text: str, reader: Tokenizer, max_tokens: int) -> str:
    size = LONG_TEXT * max_tokens
    if len(text) <= 2 * size:
        return text
    while size < len(text):
        found = reader.encode(text[:size], add_special_tokens=False)
        if found.overflowing:
            last_word = found.overflowing[-1].word_ids[-1]
            if found.word_ids[-1] != last_word and found.offsets[-1][1] + LONGEST_ADDED <= size:
                return text[:size]
        size *= 16
    return text


def _cut_behind(text: str, parts: Sequence[Encoding]) -> str:
    return text[: parts[-1].offsets[-1][1]] if len(parts[-1]) else text
