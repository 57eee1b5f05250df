"""One process that loads one system, answers one text, and says how much memory that took.

`benchmarks.cost` starts it and takes the time, so what is imported here before a system is loaded is kept small.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.forms import Forms

if TYPE_CHECKING:
    from serving.model import Text

ALONE = "process_alone"
"""Loads nothing: what is left of the others' time and memory without it is Python's own."""


def answer_of(system: str, forms: Forms, threads: int) -> Callable[[Text], object]:
    """Load a system; return what answers one text or pair."""
    if system == ALONE:
        return lambda text: None
    if system == "teacher_pytorch":
        return _pytorch(forms, threads)
    graphs = {
        "teacher_onnx": (forms.teacher_onnx, forms.teacher),
        "student_fp32": (forms.student_onnx, forms.int8),
        "student_int8": (forms.int8_graph, forms.int8),
    }
    if system in graphs:
        from serving.inprocess import Files

        graph, folder = graphs[system]
        return Files(
            onnx=graph,
            tokenizer=folder / "tokenizer.json",
            labels=forms.labels,
            is_pair=forms.is_pair,
            max_tokens=forms.max_tokens,
            pad_id=forms.pad_id,
        ).open(threads)
    return _peer(system, forms, threads)


def _pytorch(forms: Forms, threads: int) -> Callable[[Text], object]:
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(forms.teacher)
    model = BertForSequenceClassification.from_pretrained(forms.teacher).eval()

    def answer(text: Text) -> object:
        columns = text if isinstance(text, tuple) else (text,)
        with torch.inference_mode():
            inputs = tokenizer(*columns, truncation=True, max_length=forms.max_tokens, return_tensors="pt")
            return model(**inputs).logits.tolist()

    return answer


def _peer(name: str, forms: Forms, threads: int) -> Callable[[Text], object]:
    import numpy as np
    from tokenizers import Tokenizer

    from benchmarks.peers import PEERS, TextPeer

    peer = PEERS[name]
    if isinstance(peer, TextPeer):
        classify, _ = peer.open(forms, threads)
        return lambda text: classify([text])
    predictor, _ = peer.open(forms, threads)
    reader = Tokenizer.from_file(str(forms.int8 / "tokenizer.json"))
    reader.no_padding()
    reader.enable_truncation(forms.max_tokens)

    def answer(text: Text) -> object:
        row = reader.encode(*text) if isinstance(text, tuple) else reader.encode(text)
        from compressor.dataset import Inputs

        return predictor(Inputs(*(np.array([part]) for part in (row.ids, row.type_ids, row.attention_mask))))

    return answer


def main() -> None:
    """Read the request from the first argument, a JSON object; write the result to the file that it names."""
    request = json.loads(sys.argv[1])
    facts: dict[str, Any] = request["facts"] | {"labels": tuple(request["facts"]["labels"])}
    facts |= {name: Path(value) for name, value in request["places"].items()}
    forms = Forms(**facts)
    text = request["text"]
    answer_of(request["system"], forms, request["threads"])(tuple(text) if isinstance(text, list) else text)
    import time

    answered_s = time.monotonic()
    import psutil

    memory = psutil.Process().memory_full_info()
    result = {"answered_s": answered_s, "uss_bytes": memory.uss, "rss_bytes": memory.rss}
    Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
