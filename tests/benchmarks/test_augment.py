from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import augment
from compressor import machine
from compressor.errors import DataError, GateError
from tests import augmenting

VECTORS = {"engine_rows_per_s": 30_000.0, "stage_s": 20.0, "stage_peak_gb": 0.5}


def test_the_column_of_sentences_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('sentence\tlabel\na "film\t1\nplot\t0\n', encoding="utf-8")
    assert augment.sentences(tmp_path / "a.tsv") == ['a "film', "plot"]
    (tmp_path / "b.tsv").write_text("text\tlabel\na\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.tsv has columns text, label; it must have rows with a sentence"):
        augment.sentences(tmp_path / "b.tsv")


def test_the_seed_decides_and_the_result_says_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, int] = {}
    for way in ("published", "ours", "vectors_alone"):

        def measured(*_: Any, seed: int, way: str = way, **__: Any) -> dict[str, Any]:
            given[way] = seed
            return {"rows_per_s": 1.0}

        monkeypatch.setattr(augment, way, measured)
    monkeypatch.setattr(augment, "mnli", lambda *_: {})
    monkeypatch.setattr(machine, "LOOK_S", 0.01)
    augmenting.saved_masked_lm(tmp_path / "lm")
    (tmp_path / "a.tsv").write_text("sentence\nfilm\nplot\n", encoding="utf-8")
    near = augmenting.glove(tmp_path / "vectors.txt")
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"), 1)
    plan = augment.Plan(phrases=2, published_phrases=1, rows=0, model={"vocab_size": 50, **sizes})
    result = augment.measure(
        tmp_path / "a.tsv", str(tmp_path / "lm"), near, plan=plan, processes=1, threads=1, seed=7, command="c"
    )
    assert given == {"published": 7, "ours": 7, "vectors_alone": 7}
    assert result["masked_lm"] == {"vocab_size": 50, **sizes}
    told = ("seed", "copies", "candidates", "tokenizer", "word_vectors")
    assert [result[name] for name in told] == [7, 20, 15, str(tmp_path / "lm"), near]


def test_a_result_that_meets_the_targets_passes() -> None:
    augment.check_targets({"times": 15.0, "vectors": VECTORS})


@pytest.mark.parametrize(
    ("times", "change", "sentence"),
    [
        (14.0, {}, r"times the published way is 14\.00; the target is at least 15"),
        (15.0, {"engine_rows_per_s": 100.0}, r"rows/s with word vectors is 100\.00; the target is at least 20,000"),
        (15.0, {"stage_s": 181.0}, r"seconds of the stage is 181\.00; the target is at most 180"),
        (15.0, {"stage_peak_gb": 1.2}, r"memory of the stage in GB is 1\.20; the target is at most 1"),
    ],
)
def test_a_missed_target_is_told_with_its_bound(times: float, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GateError, match=sentence):
        augment.check_targets({"times": times, "vectors": VECTORS | change})
