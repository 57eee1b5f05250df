"""What the figures of each benchmark hold for: a result without it is not one."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.data import BATCH_SIZE, MAX_TOKENS, RANKS

CONDITIONS: Mapping[str, str] = {
    "train": "models with random weights on real training rows; the ways to train take turns of some steps, the first "
    "turn unmeasured",
    "data": f"pairs made from real sentences, tokenized and read by {RANKS} processes at once, batches of {BATCH_SIZE} "
    f"rows of at most {MAX_TOKENS} tokens; files may be in the system's cache",
    "augment": "real texts, a masked language model with random weights; ours on all phrases, the published way on a "
    "spread of them",
    "int8": "one process, random token ids without padding; what is compared takes turns with the same threads",
    "starts": "the run's own training rows and teacher, the same steps for every start, one process",
    "copies": "the run's own training rows and teacher, the same steps for every number of copies, one process",
    "words-apart": "the same texts, words and trained masked language model at every distance, one after another; the "
    "teacher reads a text and a copy of it as far as it can",
    "serve": "Triton on the same machine, text in, label out; clients share the cores with the server; requests and "
    "the same work in process take turns",
    "soak": "Triton on the same machine, good and bad requests from one client process; times are of good requests",
}
