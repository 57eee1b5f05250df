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

        reader, session = self.read_tokenizer(), self.read_graph(threads)

        def answer(text: Text) -> dict[str, float]:
            encoding = reader.encode(*text) if isinstance(text, tuple) else reader.encode(text)
            (logits,) = session.run(["logits"], self.feed(encoding, session))[0]
            if not self.labels:
                return {VALUE: float(logits[0])}
            exponents = np.exp(logits.astype(np.float64) - logits.max())
            return dict(zip(self.labels, (exponents / exponents.sum()).tolist(), strict=True))

        return answer

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

    def feed(self, encoding: Encoding, session: InferenceSession) -> dict[str, NDArray[np.int64]]:
        """Return the inputs of the graph for one row, padded as the server does."""
        import numpy as np

        encoding.pad(min(-(-len(encoding) // PAD_MULTIPLE) * PAD_MULTIPLE, self.max_tokens), pad_id=self.pad_id)
        tensors: dict[str, Any] = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        return {tensor.name: np.array([tensors[tensor.name]]) for tensor in session.get_inputs()}
