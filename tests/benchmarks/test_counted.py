"""Where the time of a request goes, by the server's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import counted
from benchmarks.counted import Counted

PAGE = """# TYPE compressor_texts_total counter
compressor_texts_total{{model="sst2",version="1"}} {texts}
compressor_texts_total{{model="sst2",version="2"}} 5
compressor_texts_total{{model="sst2_teacher",version="1"}} 70
compressor_tokenise_seconds_total{{model="sst2",version="1"}} {tokenise_s}
compressor_run_seconds_total{{model="sst2",version="1"}} {run_s}
nv_inference_request_duration_us{{model="sst2",version="1"}} {total_us}
"""


def test_parts_are_the_differences_of_two_pages_per_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "HAND_OVER_S", 0)
    page = tmp_path / "metrics"

    def read(**numbers: float) -> Counted:
        page.write_text(PAGE.format(**numbers))
        return Counted.read(page.as_uri(), "sst2")

    before = read(texts=100, tokenise_s=0.5, run_s=2.0, total_us=4e6)
    after = read(texts=110, tokenise_s=0.502, run_s=2.01, total_us=4.02e6)
    assert (before.texts, after.texts) == (105, 115)  # of both versions, and of no other model
    parts = after.parts_ms(before, request_ms=3.0)
    assert parts == pytest.approx({"client": 1.0, "triton": 0.8, "tokenizer": 0.2, "onnxruntime": 1.0})
