"""What a server has counted of the time that it spent on a model's requests."""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass

HAND_OVER_S = 1.1  # a model hands its counts over a second after the first of them


@dataclass(frozen=True)
class Counted:
    """Of one model, since the server started."""

    texts: float
    total_s: float
    """Between the arrival of requests in Triton's core and their answers."""
    tokenizer_s: float
    onnxruntime_s: float

    @classmethod
    def read(cls, metrics_url: str, model: str) -> Counted:
        """Read the server's metrics, once the model has handed its counts over. Raises OSError if they cannot be."""
        time.sleep(HAND_OVER_S)
        with urllib.request.urlopen(metrics_url) as answer:
            page = answer.read().decode()

        def total(name: str) -> float:
            found = re.findall(rf'^{name}{{model="{model}",version="\d+"}} (\S+)$', page, re.MULTILINE)
            return sum(map(float, found))

        return cls(
            total("compressor_texts_total"),
            total("nv_inference_request_duration_us") / 1e6,
            total("compressor_tokenise_seconds_total"),
            total("compressor_run_seconds_total"),
        )

    def parts_ms(self, before: Counted, request_ms: float) -> dict[str, float]:
        """Where the time of a mean request of one text went since `before`; `request_ms` is what its sender saw."""
        texts = self.texts - before.texts
        total, tokenizer, run = (
            1000 * (now - then) / texts
            for now, then in (
                (self.total_s, before.total_s),
                (self.tokenizer_s, before.tokenizer_s),
                (self.onnxruntime_s, before.onnxruntime_s),
            )
        )
        return {
            "client": request_ms - total,
            "triton": total - tokenizer - run,
            "tokenizer": tokenizer,
            "onnxruntime": run,
        }
