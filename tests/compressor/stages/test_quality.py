"""What is said of copies: agreement by method, what is dropped, perplexity, examples."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import BertForMaskedLM

from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.dataset import Example, read_examples, texts_of, write_examples
from compressor.errors import ConfigError
from compressor.stages.augment import augment_examples, quality
from compressor.stages.augment.quality import Copies, Teacher, differences, judge, perplexity
from compressor.tasks import Task
from compressor.world import World
from tests import augmenting, tiny

# Text, label, origin, words replaced by the masked LM, and by vectors.
ROWS = [
    ("a good film", 1, 0, 0, 0),
    ("a fine film", 1, 0, 1, 0),
    ("a bad film", 1, 0, 1, 0),
    ("a good movie", 1, 0, 0, 1),
    ("a dull plot", 0, 1, 0, 0),
    ("a bad script", 0, 1, 1, 1),
    ("a tedious plot", 0, 1, 0, 1),
    ("a good plot", 0, 1, 0, 2),
    ("the", 1, 2, 0, 0),
]


def written(folder: Path, rows: Sequence[tuple[Any, ...]] = ROWS, task: Task = tiny.TASK) -> Path:
    """An augmented file and what lies beside it."""
    folder.mkdir(exist_ok=True)
    texts = [row[0] if isinstance(row[0], tuple) else (row[0],) for row in rows]
    found = (Example(text, label, origin) for text, (_, label, origin, *_) in zip(texts, rows, strict=True))
    write_examples(folder / "train.arrow", found, task)
    table = pa.table({name: pa.array([row[place] for row in rows], pa.uint8()) for name, place in COUNTS.items()})
    with pa.OSFile(str(folder / "copies.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return folder


COUNTS = {"by_masked_lm": 3, "by_vectors": 4}


class ByWord:
    """A teacher that is 90 % sure, by one word."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def probabilities(self, rows: Sequence[tuple[str, ...]]) -> Any:
        self.asked += [row[-1] for row in rows]
        bad = np.array([any(word in tiny.BAD for word in row[-1].split()) for row in rows])
        return np.where(bad[:, None], [0.9, 0.1], [0.1, 0.9]).astype(np.float32)


def judged(folder: Path, teacher: Any = None, task: Task = tiny.TASK, **options: Any) -> dict[str, Any]:
    given = {"masked_lm": None, "seed": 0, "kept": Path(tempfile.mkdtemp(dir=folder))} | options
    return judge(folder, task, teacher=teacher, **given)


def examples_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "examples.json").read_text(encoding="utf-8"))


def joined(marked: Sequence[Sequence[Any]]) -> str:
    return "".join(text for text, _ in marked)


# ---- agreement


def test_agreement_is_counted_by_method_and_for_the_originals(tmp_path: Path) -> None:
    found = judged(written(tmp_path), ByWord())["agreement"]
    shares = {name: (row["rows"], row["share"]) for name, row in found.items()}
    assert shares == {
        "originals": (2, 1.0),  # the third has no copies, and was not asked about
        "copies": (6, 4 / 6),
        "masked_lm": (2, 0.5),
        "vectors": (3, pytest.approx(2 / 3)),
        "both": (1, 1.0),
    }
    low, high = found["masked_lm"]["interval_95"]
    assert (low, high) == (pytest.approx(0.0945, abs=1e-3), pytest.approx(0.9055, abs=1e-3))


def test_without_a_bound_a_sample_is_judged_and_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "JUDGED_COPIES", 3)
    teacher = ByWord()
    found = judged(written(tmp_path), teacher)
    assert found["agreement"]["copies"]["rows"] == 3
    assert len(teacher.asked) == 3 + found["agreement"]["originals"]["rows"]
    assert "dropped_rows" not in found
    assert len(read_examples(tmp_path / "train.arrow")) == len(ROWS)


def test_the_sample_is_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "JUDGED_COPIES", 2)
    asked = []
    for seed in (0, 0, 1, 2, 3):
        teacher = ByWord()
        judged(written(tmp_path), teacher, seed=seed)
        asked.append(teacher.asked)
    assert asked[0] == asked[1]
    assert any(texts != asked[0] for texts in asked)


def test_methods_that_were_not_used_are_left_out(tmp_path: Path) -> None:
    rows = [row for row in ROWS if not row[3]]
    assert set(judged(written(tmp_path, rows), ByWord())["agreement"]) == {"originals", "copies", "vectors"}


def test_without_copies_there_is_nothing_to_say(tmp_path: Path) -> None:
    rows = [row for row in ROWS if not row[3] and not row[4]]
    assert judged(written(tmp_path, rows), ByWord(), max_disagreement=0.5) == {}
    assert examples_of(tmp_path) == []


def test_answers_of_an_interrupted_run_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ROWS_AT_ONCE", 4)
    expected = judged(written(tmp_path), ByWord(), max_disagreement=0.5)
    texts = [row[0] for row in ROWS]
    teacher, kept = ByWord(), tmp_path / "kept"
    kept.mkdir()
    probabilities = teacher.probabilities

    def interrupted(rows: Sequence[tuple[str, ...]]) -> Any:
        if teacher.asked:
            raise KeyboardInterrupt
        return probabilities(rows)

    monkeypatch.setattr(teacher, "probabilities", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judged(written(tmp_path), teacher, max_disagreement=0.5, kept=kept)
    assert teacher.asked == texts[:4]
    teacher = ByWord()
    assert judged(tmp_path, teacher, max_disagreement=0.5, kept=kept) == expected
    assert teacher.asked == texts[4:]


class Together(World):
    """One of two processes, neither of which waits for the other; the leader knows the beginnings of all blocks."""

    def broadcast(self, value: Any) -> Any:
        return [0, 4, 8]

    def barrier(self) -> None:
        pass


def test_processes_that_are_together_share_the_judging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ROWS_AT_ONCE", 4)
    expected = judged(written(tmp_path / "alone"), ByWord(), max_disagreement=0.5)
    kept, texts, found = written(tmp_path / "two") / "kept", [row[0] for row in ROWS], {}
    kept.mkdir()
    for rank, asked in ((1, texts[4:8]), (0, texts[:4] + texts[8:])):
        teacher, world = ByWord(), Together(rank=rank, size=2, device=torch.device("cpu"))
        found[rank] = judged(tmp_path / "two", teacher, max_disagreement=0.5, kept=kept, world=world)
        assert teacher.asked == asked
    assert found == {1: {}, 0: expected}
    for name in ("train.arrow", "copies.arrow", "examples.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


# ---- dropping


def test_copies_that_the_teacher_labels_otherwise_are_dropped(tmp_path: Path) -> None:
    folder = written(tmp_path)
    found = judged(folder, ByWord(), max_disagreement=0.5)
    assert (found["max_disagreement"], found["dropped_rows"]) == (0.5, 2)
    data = read_examples(folder / "train.arrow")
    wanted = [row for row in ROWS if row[0] not in ("a bad film", "a good plot")]
    assert list(zip(data["text"], data["label"], data["origin"], strict=True)) == [row[:3] for row in wanted]
    copies = Copies.read(folder)
    assert copies.by_masked_lm_N.tolist() == [row[3] for row in wanted]
    assert copies.by_vectors_N.tolist() == [row[4] for row in wanted]
    assert found["agreement"]["copies"]["rows"] == 6  # of all that were made
    assert not {joined(example["copy"]) for example in examples_of(folder)} & {"a bad film", "a good plot"}


@pytest.mark.parametrize(("bound", "dropped"), [(0.95, 0), (0.85, 2), (0.05, 6), (0.0, 6)])
def test_the_bound_is_on_the_total_probability_of_other_labels(tmp_path: Path, bound: float, dropped: int) -> None:
    folder = written(tmp_path)
    assert judged(folder, ByWord(), max_disagreement=bound)["dropped_rows"] == dropped
    # Originals stay, whatever the teacher says of them.
    assert len(read_examples(folder / "train.arrow")) == len(ROWS) - dropped


# ---- the teacher


@pytest.mark.parametrize("task", [tiny.TASK, tiny.pair_task(("no", "yes", "perhaps"))], ids=["texts", "pairs"])
def test_a_teacher_gives_the_models_probabilities_in_the_rows_order(tmp_path: Path, task: Task) -> None:
    folder = tiny.checkpoint(tmp_path / "teacher", tiny.lively(tiny.bert(task=task)))
    rows = [row.texts for row in tiny.task_rows(task, 150)]
    found = Teacher(folder, task, tiny.MAX_TOKENS, "cpu").probabilities(rows)
    assert found.shape == (150, task.outputs)
    model, tokenizer = load_classifier(folder, task), load_tokenizer(folder)
    for row in (0, 77, 149):
        with torch.inference_mode():
            inputs = tokenizer(*rows[row], truncation="longest_first", max_length=tiny.MAX_TOKENS, return_tensors="pt")
            expected = model(**inputs).logits.softmax(dim=1)[0].numpy()
        np.testing.assert_allclose(found[row], expected, atol=0.02)  # bf16 where the processor has it


def test_a_teacher_whose_window_is_no_multiple_of_eight_is_not_padded_over(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "teacher", tiny.lively(tiny.bert(max_position_embeddings=20)))
    found = Teacher(folder, tiny.TASK, 512, "cpu").probabilities([("film " * 100,), ("film",)])
    np.testing.assert_allclose(found.sum(axis=1), [1, 1], rtol=1e-5)


@pytest.mark.parametrize(("rank", "device"), [(None, "cuda:0"), ("1", "cuda:1"), ("3", "cuda:1")])
def test_processes_of_torchrun_judge_on_gpus_of_their_own(
    rank: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert (quality._own("cuda"), quality._own("cpu")) == (device, "cpu")


# ---- examples


def test_examples_show_what_was_changed(tmp_path: Path) -> None:
    folder = written(tmp_path)
    judged(folder, ByWord())
    found = {joined(example["copy"]): example for example in examples_of(folder)}
    assert set(found) == {row[0] for row in ROWS if row[3] or row[4]}
    assert found["a bad film"] == {
        "original": [["a ", False], ["good", True], [" film", False]],
        "copy": [["a ", False], ["bad", True], [" film", False]],
        "label": "positive",
        "by_masked_lm": 1,
        "by_vectors": 0,
        "teacher": "negative",
        "teacher_probability": 0.9,
    }


def test_of_a_pair_the_changed_text_is_shown_and_the_other_beside_it(tmp_path: Path) -> None:
    task = tiny.pair_task()
    rows = [(("a film", "a good plot"), 1, 0, 0, 0), (("a film", "a fine plot"), 1, 0, 0, 1)]
    folder = written(tmp_path, rows, task)
    judged(folder, task=task)
    (example,) = examples_of(folder)
    assert (example["beside"], example["changed_text"]) == ("a film", "second")
    assert joined(example["original"]) == "a good plot"
    assert "teacher" not in example


def test_at_most_twenty_are_shown(tmp_path: Path) -> None:
    rows = [("a good film", 1, 0, 0, 0), *((f"a {word} film {n}", 1, 0, 0, 1) for word in tiny.BAD for n in range(9))]
    judged(written(tmp_path, rows))
    assert len(examples_of(tmp_path)) == 20


def test_differences_keep_both_texts_and_cut_long_ones() -> None:
    first, second = differences("“Good” film,  it's", "“Great” film,  it's")
    assert first == [("“", False), ("Good", True), ("” film,  it's", False)]
    assert joined(second) == "“Great” film,  it's"
    long, _ = differences("good " * 1000, "fine " * 1000)
    assert len(joined(long)) == quality.TEXT_LIMIT


# ---- perplexity


def masked_lm(folder: Path) -> Path:
    """A masked LM that says "film" is nine times as likely as "plot", and nothing of other words."""
    model = BertForMaskedLM(tiny.bert(vocab_size=len(tiny.WORDS)).config)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer(folder)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        bias_V = model.cls.predictions.bias
        bias_V.fill_(-100.0)
        bias_V[tokenizer.convert_tokens_to_ids("film")] = math.log(0.9)
        bias_V[tokenizer.convert_tokens_to_ids("plot")] = math.log(0.1)
    model.save_pretrained(folder)
    return folder


def test_perplexity_is_that_of_the_changed_texts(tmp_path: Path) -> None:
    pairs = [(("film film",), ("film plot",))] * 4
    found = perplexity(masked_lm(tmp_path), pairs)
    assert found["copies_judged"] == 4
    assert found["originals"] == pytest.approx(1 / 0.9, rel=1e-4)
    assert found["copies"] == pytest.approx((1 / 0.9 / 0.1) ** 0.5, rel=1e-4)
    assert found["ratio"] == pytest.approx(found["copies"] / found["originals"])
    assert found["ratio_95"] == (pytest.approx(found["ratio"]), pytest.approx(found["ratio"]))


def test_perplexity_is_computed_on_the_device_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(name: str) -> str:
        asked.append(name)
        return "cpu"

    monkeypatch.setattr(quality, "resolve_device", resolve)
    folder = written(tmp_path / "rows", [("film film", 1, 0, 0, 0), ("film plot", 1, 0, 1, 0)])
    for name in ("cuda", "auto", "cpu"):
        judged(folder, masked_lm=masked_lm(tmp_path / "model"), device=name)
    assert asked == ["cuda", "auto", "cpu"]


def test_of_a_pair_only_the_changed_text_counts(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path)
    alone = perplexity(folder, [(("film",), ("plot",))])
    assert perplexity(folder, [(("plot plot", "film"), ("plot plot", "plot"))]) == alone


def test_texts_longer_than_the_models_window_are_cut(tmp_path: Path) -> None:
    found = perplexity(masked_lm(tmp_path), [(("film " * 500,), ("plot " * 500,))])
    assert found["originals"] == pytest.approx(1 / 0.9, rel=1e-4)


def test_judging_with_a_masked_lm_reports_its_perplexity(tmp_path: Path) -> None:
    rows = [("film film", 1, 0, 0, 0), ("film plot", 1, 0, 1, 0)]
    folder = written(tmp_path / "rows", rows)
    found = judged(folder, masked_lm=masked_lm(tmp_path / "model"))
    assert found["perplexity"]["ratio"] == pytest.approx(3.0, rel=1e-4)
    assert texts_of(read_examples(folder / "train.arrow")) == [("film film",), ("film plot",)]


# ---- in the stage


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.saved(tmp_path_factory.mktemp("teacher") / "made", "teacher", tiny.lively(tiny.bert()))


def augmented(folder: Path, corpus: Artifact, name: str, teacher: Artifact | None, **fields: Any) -> Artifact:
    config = augmenting.settings(vectors=str(tiny.vectors(folder / "vectors.txt")), **fields)
    return augment_examples(config, corpus, teacher=teacher, max_tokens=16, seed=3, key=name, out=folder / name)


def test_the_stage_keeps_what_the_judges_say(tmp_path: Path, teacher: Artifact) -> None:
    corpus = tiny.examples(tmp_path / "corpus", train=40)
    made = augmented(tmp_path, corpus, "made", teacher)
    metrics = made.metrics
    assert metrics["rows"] == len(read_examples(made.path / "train.arrow")) == 160
    assert (metrics["agreement"]["originals"]["rows"], metrics["agreement"]["copies"]["rows"]) == (40, 120)
    assert set(made.manifest["parents"]) == {"corpus", "teacher"}
    assert set(made.manifest["files"]) == {"train.arrow", "copies.arrow", "examples.json"}
    dropped = augmented(tmp_path, corpus, "dropped", teacher, max_disagreement=0.5)
    assert 0 < dropped.metrics["dropped_rows"] < 120
    assert dropped.metrics["rows"] == 160 - dropped.metrics["dropped_rows"]
    assert dropped.metrics["rows"] == len(read_examples(dropped.path / "train.arrow"))
    # What is left is what the teacher says: two labels, of which it gives the copied one at least a half.
    left = dropped.metrics["agreement"]["copies"]["share"] * 120
    assert dropped.metrics["rows"] - 40 == round(left)


def test_without_a_teacher_the_stage_drops_nothing_and_refuses_to(tmp_path: Path) -> None:
    corpus = tiny.examples(tmp_path / "corpus", train=10)
    metrics = augmented(tmp_path, corpus, "made", None).metrics
    assert not {"agreement", "perplexity", "dropped_rows"} & set(metrics)
    with pytest.raises(ConfigError, match=r"max_disagreement is 0.5, and there is no teacher that gives labels"):
        augmented(tmp_path, corpus, "dropped", None, max_disagreement=0.5)


def test_scores_of_a_regression_are_not_judged(tmp_path: Path, teacher: Artifact) -> None:
    corpus = tiny.examples(tmp_path / "corpus", train=10, task=tiny.pair_task(()))
    made = augmented(tmp_path, corpus, "made", teacher, regression=True)
    assert "agreement" not in made.metrics
    assert re.fullmatch(r"\d\.\d\d", examples_of(made.path)[0]["label"])
