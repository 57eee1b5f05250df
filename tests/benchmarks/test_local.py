import pytest

from benchmarks.local import throughput


def test_throughput_is_all_texts_over_all_time() -> None:
    assert throughput([100.0, 300.0], batch=32) == pytest.approx(64 / 0.4)
