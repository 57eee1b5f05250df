"""Teachers: trained from an encoder, or adopted from a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier
from compressor.config import FinetuneConfig
from compressor.dataset import encode, write_examples
from compressor.errors import ModelError
from compressor.evaluate import evaluate_saved
from compressor.models import score_scale
from compressor.stages import finetune as stage
from compressor.stages.finetune import Supervised, _refuse_chance, finetune
from compressor.tasks import TASKS, Task
from compressor.training import fit
from compressor.world import World, launch
from tests import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.examples(tmp_path_factory.mktemp("finetune") / "corpus", train=192)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def teacher(corpus: Artifact, base: Path) -> Artifact:
    return run(tiny.finetuning(base=str(base)), corpus, corpus.path.with_name("teacher"))


def run(config: FinetuneConfig, corpus: Artifact, out: Path, **more: Any) -> Artifact:
    options: dict[str, Any] = {"max_tokens": tiny.MAX_TOKENS, "seed": 7, "key": out.name, "device": "cpu"}
    return finetune(config, tiny.TASK, corpus, out=out, **(options | more))


def rename(folder: Path, names: dict[str, str]) -> None:
    """Call the classes of a checkpoint otherwise."""
    file = folder / "config.json"
    labels = {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
    file.write_text(json.dumps(json.loads(file.read_text()) | labels))


def weights_of_each_process(world: World, corpus: Artifact, folder: Path) -> None:
    """Train for some steps and keep what each process ends with."""
    tokenizer = tiny.tokenizer(folder / str(world.rank) / "tokenizer")
    rows = encode(corpus, "train", tokenizer, tiny.MAX_TOKENS, cache=folder / "cache", world=world)
    module = Supervised(tiny.bert(seed=world.rank), tiny.TASK)
    config, rising = tiny.finetuning(epochs=1.0), iter([0.1, 0.9])
    checkpoint = folder / "checkpoint"
    history = fit(module, rows, config, world=world, seed=7, folder=checkpoint, validate=lambda: next(rising))
    torch.save(module.state_dict(), folder / f"{world.rank}.pt")
    (folder / f"{world.rank}.json").write_text(json.dumps(history["steps"]))


def test_a_teacher_learns_the_rows(teacher: Artifact) -> None:
    assert teacher.metrics["test"]["score"] > 0.9
    assert teacher.metrics["history"]["steps"] == 72


def test_a_teacher_is_saved_with_its_labels_and_tokenizer(teacher: Artifact) -> None:
    assert load_classifier(teacher.path, tiny.TASK).config.id2label == {0: "negative", 1: "positive"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "test.logits.npy"} <= set(teacher.manifest["files"])


def test_the_checkpoint_of_training_is_not_part_of_the_result(teacher: Artifact) -> None:
    assert not [name for name in teacher.manifest["files"] if "state" in name or "best" in name]


def test_the_same_seed_gives_the_same_teacher(teacher: Artifact, corpus: Artifact, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = run(tiny.finetuning(base=str(base)), corpus, tmp_path / "teacher")
    name = "model.safetensors"
    assert again.manifest["files"][name]["sha256"] == teacher.manifest["files"][name]["sha256"]


def test_the_measured_logits_are_those_of_the_saved_model(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    adopted = run(tiny.finetuning(teacher=str(teacher.path)), corpus, tmp_path / "adopted")
    for split in ("validation", "test"):
        theirs, mine = (np.load(found.path / f"{split}.logits.npy") for found in (teacher, adopted))
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_saved_teacher_is_measured_at_the_length_that_it_was_made_with(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    made = run(tiny.finetuning(teacher=str(teacher.path)), corpus, tmp_path / "adopted", max_tokens=8)
    assert (made.manifest["section"]["max_tokens"], made.manifest["section"]["seed"]) == (8, 7)
    assert evaluate_saved(made.path, corpus, "test") == made.metrics["test"] | {
        "interval_95": tuple(made.metrics["test"]["interval_95"])
    }


def adopt_constant(score: float, folder: Path) -> Artifact:
    """Adopt a regression that gives every text the same score; the data's are from 0 to 1.4."""
    task = tiny.pair_task(labels=())
    model = tiny.bert(task=task)
    torch.nn.init.constant_(model.classifier.bias, score)
    torch.nn.init.zeros_(model.classifier.weight)
    config = tiny.finetuning(teacher=str(tiny.checkpoint(folder / "checkpoint", model)))
    corpus = tiny.examples(folder / "corpus", train=8, held_out=8, task=task)
    return finetune(config, task, corpus, max_tokens=24, seed=7, key="k", out=folder / "out", device="cpu")


@pytest.mark.usefixtures("few_resamples")
def test_an_adopted_regression_of_another_scale_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_refuse_chance", lambda *_: None)
    with pytest.raises(
        ModelError, match=r"is off by 49.* on average .*: its scores are of another scale; give a teach"
    ):
        adopt_constant(50.0, tmp_path)


@pytest.mark.usefixtures("few_resamples")
def test_the_error_of_a_regression_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_refuse_chance", lambda *_: None)
    metrics = adopt_constant(0.7, tmp_path).metrics
    assert metrics["absolute_error"] == pytest.approx(metrics["blind_absolute_error"], abs=0.1)


@pytest.mark.parametrize("labels", [("different", "alike"), ()], ids=["classifier", "regression"])
@pytest.mark.usefixtures("few_resamples")
def test_a_teacher_of_pairs_learns(labels: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    task = tiny.pair_task(labels=labels)
    corpus = tiny.examples(tmp_path / "corpus", train=192, task=task)
    options: dict[str, Any] = {"max_tokens": 24, "seed": 7, "key": "teacher", "device": "cpu"}
    made = finetune(tiny.finetuning(base=str(base)), task, corpus, out=tmp_path / "teacher", **options)
    assert made.metrics["test"]["metric"] == task.metric
    assert made.metrics["test"]["score"] > 0.6  # a part of the scores is noise
    assert load_classifier(made.path, task).config.num_labels == task.outputs


@pytest.mark.usefixtures("few_resamples")
def test_scores_of_any_size_are_learnt_alike(base: Path, tmp_path: Path) -> None:
    task, answers = tiny.pair_task(labels=()), []
    for factor, offset in ((1.0, 0.0), (1000.0, 250_000.0)):
        with tiny.sealed(tmp_path / f"corpus{factor:g}", "examples", section={"task": task.model_dump()}) as draft:
            for seed, (split, count) in enumerate((("train", 192), ("validation", 40), ("test", 40))):
                rows = tiny.task_rows(task, count, seed=seed)
                scaled = [row._replace(label=factor * row.label + offset) for row in rows]
                write_examples(draft.path / f"{split}.arrow", scaled, task)
        corpus = Artifact.open(tmp_path / f"corpus{factor:g}", kind="examples")
        options: dict[str, Any] = {"max_tokens": 24, "seed": 7, "key": "teacher", "device": "cpu"}
        out = tmp_path / f"teacher{factor:g}"
        made = finetune(tiny.finetuning(base=str(base)), task, corpus, out=out, **options)
        answers.append((np.load(made.path / "test.logits.npy") - offset) / factor)
    assert np.corrcoef(answers[0].ravel(), answers[1].ravel())[0, 1] > 0.99
    assert np.abs(answers[0] - answers[1]).max() < 0.1


def test_scores_with_a_range_are_learnt_as_they_are_written() -> None:
    score_N = np.array([1.0, 2.0, 6.0], dtype=np.float32)

    def unread() -> Any:
        raise AssertionError("of millions of rows, nothing is read that is not needed")

    assert score_scale(TASKS["stsb"], unread) == (0.0, 1.0)
    assert score_scale(tiny.TASK, unread) == (0.0, 1.0)
    mean, spread = score_scale(tiny.pair_task(labels=()), lambda: score_N)
    assert mean == 3.0
    assert spread == pytest.approx(np.sqrt(14 / 3))


def test_wnli_is_refused_with_what_is_known_of_it(base: Path, tmp_path: Path) -> None:
    corpus = tiny.examples(tmp_path / "corpus", task=TASKS["wnli"])
    config = tiny.finetuning(base=str(base), epochs=0.01, learning_rate=1e-9)
    with pytest.raises(ModelError, match=r"a BERT seldom does better on WNLI, .* give a checkpoint that does as"):
        finetune(config, TASKS["wnli"], corpus, max_tokens=24, seed=7, key="t", out=tmp_path / "t", device="cpu")


@pytest.mark.parametrize(
    ("shape", "task", "sentence"),
    [
        (
            {"max_position_embeddings": 9},
            tiny.TASK,
            r"max_tokens is 16 and the model in .* reads at most 9 tokens; set",
        ),
        (
            {"type_vocab_size": 1},
            tiny.pair_task(),
            r"has type_vocab_size 1 and the task has pairs of texts, which need",
        ),
    ],
)
def test_a_model_that_cannot_read_the_rows_is_refused(
    shape: dict[str, int], task: Task, sentence: str, tmp_path: Path
) -> None:
    folder = tiny.checkpoint(tmp_path / "base", tiny.bert(task=task, **shape))
    corpus = tiny.examples(tmp_path / "corpus", task=task)
    with pytest.raises(ModelError, match=sentence):
        finetune(tiny.finetuning(base=str(folder)), task, corpus, max_tokens=16, seed=7, key="t", out=tmp_path / "t")


def test_a_model_whose_positions_are_no_multiple_of_the_padding_is_used_to_its_last(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "base", tiny.bert(max_position_embeddings=9))
    corpus = tiny.examples(tmp_path / "corpus", train=192)
    made = run(tiny.finetuning(base=str(folder)), corpus, tmp_path / "teacher", max_tokens=9)
    assert made.metrics["test"]["score"] > 0.9


def test_an_adopted_teacher_is_not_trained(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    adopted = run(tiny.finetuning(teacher=str(teacher.path)), corpus, tmp_path / "adopted")
    assert "history" not in adopted.metrics
    theirs, mine = (load_classifier(found.path, tiny.TASK).state_dict() for found in (teacher, adopted))
    assert all(torch.equal(mine[name], weights) for name, weights in theirs.items())


def test_an_adopted_teacher_with_its_labels_in_the_other_order_keeps_its_answers(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    model = load_classifier(teacher.path, tiny.TASK)
    with torch.no_grad():
        for weights in (model.classifier.weight, model.classifier.bias):
            weights.copy_(weights.flip(0).clone())
    rename(tiny.checkpoint(tmp_path / "turned", model), {"0": "positive", "1": "negative"})
    adopted = run(tiny.finetuning(teacher=str(tmp_path / "turned")), corpus, tmp_path / "adopted")
    assert adopted.metrics["test"] == teacher.metrics["test"]


def test_an_adopted_teacher_with_other_labels_is_refused(corpus: Artifact, tmp_path: Path) -> None:
    rename(tiny.checkpoint(tmp_path / "other"), {"0": "LABEL_0", "1": "LABEL_1"})
    with pytest.raises(ModelError, match=r"has labels \['LABEL_0', 'LABEL_1'\]; sst2 has"):
        run(tiny.finetuning(teacher=str(tmp_path / "other")), corpus, tmp_path / "adopted")


def test_an_adopted_teacher_with_swapped_names_is_refused_as_no_better_than_chance(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    folder = tiny.checkpoint(tmp_path / "swapped", load_classifier(teacher.path, tiny.TASK))
    rename(folder, {"0": "positive", "1": "negative"})
    with pytest.raises(ModelError, match=r"swapped has accuracy .* the same answer to every text has 50.0;"):
        run(tiny.finetuning(teacher=str(folder)), corpus, tmp_path / "adopted")
    assert not (tmp_path / "adopted").exists()


def test_an_adopted_teacher_with_another_vocabulary_is_refused(corpus: Artifact, tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "small", tiny.bert(vocab_size=10))
    with pytest.raises(ModelError, match=r"the tokenizer has \d+ tokens and the model 10 word embeddings"):
        run(tiny.finetuning(teacher=str(folder)), corpus, tmp_path / "adopted")


def test_a_teacher_that_learnt_nothing_is_refused(corpus: Artifact, base: Path, tmp_path: Path) -> None:
    config = tiny.finetuning(base=str(base), epochs=0.01, learning_rate=1e-9)
    with pytest.raises(ModelError, match=r"a student would learn noise; train it longer, give it more rows, or check"):
        run(config, corpus, tmp_path / "teacher")


@pytest.mark.parametrize(
    ("name", "metric", "advice"),
    [
        ("fraud", "accuracy", 'such a metric hardly shows what was learnt; set task.metric = "matthews"'),
        (
            "fraud",
            "f1",
            'set task.metric = "matthews", or list task.labels with the one that is looked for as the seco',
        ),
        (
            "fraud",
            "matthews",
            "a student would learn noise; train it longer, give it more rows, or check the checkpoint",
        ),
        (
            "sst2",
            "accuracy",
            "a student would learn noise; train it longer, give it more rows, or check the checkpoint",
        ),
    ],
)
def test_a_teacher_that_its_metric_cannot_tell_from_one_answer_is_refused_with_a_metric_that_can(
    name: str, metric: str, advice: str
) -> None:
    task = tiny.TASK.model_copy(update={"name": name, "metrics": (metric,)})
    found = {"metric": metric, "score": 0.975, "interval_95": (0.965, 0.983), "rows": 1000}
    with pytest.raises(ModelError, match=f"; {re.escape(advice)}"):
        _refuse_chance({"validation": found, "blind": 0.97}, "base", task)


@pytest.mark.slow
@pytest.mark.usefixtures("cold_processes")  # an order that hash seeds decide would differ between them
def test_two_processes_end_with_the_same_weights(corpus: Artifact, tmp_path: Path) -> None:
    launch(weights_of_each_process, corpus, tmp_path, processes=2, device="cpu")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(second[name], weights) for name, weights in first.items())
    # Twice as many processes do not mean twice as many steps: the batch is shared.
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [12, 12]


@pytest.mark.slow
def test_two_processes_train_a_teacher(corpus: Artifact, base: Path, tmp_path: Path) -> None:
    made = run(tiny.finetuning(base=str(base)), corpus, tmp_path / "teacher", processes=2)
    assert made.metrics["test"]["score"] > 0.9
