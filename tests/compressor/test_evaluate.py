"""Metrics of predictors: in process, saved, and served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.artifact import Artifact
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.dataset import Inputs, encode
from compressor.errors import ArtifactError
from compressor.evaluate import (
    TorchPredictor,
    blind_score,
    evaluate_saved,
    evaluate_served,
    measure,
    measure_splits,
    paired,
    predict,
    same_answers,
    scores,
)
from compressor.tasks import TASKS
from compressor.world import World, launch
from serving import FakeClient
from tests import tiny

F1_TASK = tiny.pair_task(metrics=("f1", "accuracy"))
LOGITS = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 6.0]], dtype=np.float32)


def ids_as_logits(inputs: Inputs) -> np.ndarray:
    """Give the number of tokens of each row, which says which row it is."""
    return np.stack([inputs.mask_BS.sum(axis=1), inputs.input_ids_BS.sum(axis=1)], axis=1).astype(np.float32)


def one_hot(answers: list[int], labels: int = 2) -> np.ndarray:
    return np.eye(labels, dtype=np.float32)[answers]


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


def test_accuracy_by_hand() -> None:
    found = measure(tiny.TASK, LOGITS, np.array([0, 1, 1, 1]))
    assert (found["metric"], found["score"], found["rows"], found["all"]) == ("accuracy", 0.75, 4, {"accuracy": 0.75})
    low, high = found["interval_95"]
    assert 0.3 < low < 0.75 < high < 1


def test_f1_and_accuracy_by_hand() -> None:
    # 2 of 3 answers "equivalent" are right, and 2 of 4 such rows are found: F1 = 2 * 2 / (3 + 4).
    found = scores(F1_TASK, one_hot([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 1, 1, 0]))
    assert found == pytest.approx({"f1": 4 / 7, "accuracy": 0.5})
    assert next(iter(found)) == F1_TASK.metric


def test_f1_of_more_than_two_labels_is_their_mean() -> None:
    task = tiny.pair_task(labels=("a", "b", "c"), metrics=("f1",))
    found = scores(task, one_hot([0, 1, 1, 2], labels=3), np.array([0, 1, 2, 2]))
    assert found["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


@pytest.mark.usefixtures("few_resamples")
def test_f1_of_three_labels_is_their_mean_also_on_rows_that_hold_two() -> None:
    task = tiny.pair_task(labels=("a", "b", "c"), metrics=("f1",))
    label_N, answer_N = [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1]
    # F1 of "a": 2 * 2 / (2 + 3), of "b": 2 * 3 / (4 + 3)
    expected = pytest.approx((4 / 5 + 6 / 7) / 2)
    logits_NC = one_hot(answer_N, labels=3)
    found = measure(task, logits_NC, np.array(label_N))
    assert found["score"] == found["all"]["f1"] == expected
    assert blind_score(task, np.array(label_N)) == pytest.approx(1 / 3)  # 2 / 3 of one, 0 of the other
    blind = one_hot([0] * 6, labels=3)
    assert paired(task, logits_NC, blind, np.array(label_N))["ratio"] == pytest.approx((4 / 5 + 6 / 7) / 2 * 3)


@pytest.mark.usefixtures("few_resamples")
def test_matthews_by_hand() -> None:
    # 4 true positives, 3 true negatives, 1 false positive, 2 false negatives
    label_N = np.array([1] * 6 + [0] * 4)
    found = measure(TASKS["cola"], one_hot([1] * 4 + [0] * 2 + [0] * 3 + [1]), label_N)
    assert found["score"] == pytest.approx((4 * 3 - 1 * 2) / (5 * 6 * 4 * 5) ** 0.5)
    assert found["all"]["accuracy"] == 0.7
    assert found["interval_95"][0] < found["score"] < found["interval_95"][1] <= 1


def test_always_the_same_answer_has_a_matthews_correlation_of_0() -> None:
    assert scores(TASKS["cola"], one_hot([1, 1, 1]), np.array([0, 1, 1]))["matthews"] == 0


def test_correlations_by_hand() -> None:
    found = scores(TASKS["stsb"], column(1, 2, 3, 5), np.array([0.0, 1.0, 4.0, 3.0], dtype=np.float32))
    assert found["spearman"] == pytest.approx(0.8)
    # deviations -1.75 -0.75 0.25 2.25 and -2 -1 2 1
    assert found["pearson"] == pytest.approx((3.5 + 0.75 + 0.5 + 2.25) / (8.75 * 10) ** 0.5)


def test_a_constant_score_correlates_with_nothing() -> None:
    found = scores(TASKS["stsb"], column(2, 2, 2), np.array([1.0, 2.0, 3.0], dtype=np.float32))
    assert found == {"spearman": 0.0, "pearson": 0.0}


def test_blind_scores() -> None:
    label_N = np.array([0, 1, 1, 1])
    assert blind_score(tiny.TASK, label_N) == 0.75
    assert blind_score(F1_TASK, label_N) == pytest.approx(6 / 7)  # always the second label
    assert blind_score(TASKS["cola"], label_N) == 0
    assert blind_score(TASKS["stsb"], np.array([1.0, 2.0])) == 0


def test_same_answers_are_equal_labels_or_scores_within_a_fiftieth_of_the_range() -> None:
    assert same_answers(tiny.TASK, LOGITS, LOGITS[::-1].copy()).tolist() == [False, False, False, False]
    assert same_answers(tiny.TASK, LOGITS, LOGITS * 2).all()
    assert same_answers(TASKS["stsb"], column(1, 1, 1), column(1.09, 0.95, 1.11)).tolist() == [True, True, False]
    own = TASKS["stsb"].model_copy(update={"score_range": None})
    assert same_answers(own, column(0, 100, 50), column(1.9, 98, 47)).tolist() == [True, True, False]


def test_paired_compares_answers_and_right_answers() -> None:
    label_N = np.array([0, 1, 1, 0])
    # answers 0 1 0 1: right, right, wrong, wrong; and 0 0 1 1: right, wrong, right, wrong
    found = paired(tiny.TASK, one_hot([0, 1, 0, 1]), one_hot([0, 0, 1, 1]), label_N)
    expected = {"agreement": 0.5, "only_first_right": 1, "only_second_right": 1, "p_value": 1.0, "difference": 0.0}
    assert {name: found[name] for name in expected} == expected
    assert found["difference_95"][0] < 0 < found["difference_95"][1]
    assert found["ratio"] == 1


@pytest.mark.usefixtures("few_resamples")
def test_paired_regressions_are_compared_by_their_metric() -> None:
    label_N = np.arange(40, dtype=np.float32) / 8
    noise = np.random.default_rng(0).normal(0, 1.5, size=40).astype(np.float32)
    good, poor = label_N[:, None] + 0.01, (label_N + noise)[:, None]
    found = paired(TASKS["stsb"], good, poor, label_N)
    assert "p_value" not in found
    theirs = scores(TASKS["stsb"], poor, label_N)["spearman"]
    assert found["difference"] == pytest.approx(1 - theirs)
    assert 0 < found["difference_95"][0] < found["difference"] < found["difference_95"][1]
    assert found["ratio"] == pytest.approx(1 / theirs)


@pytest.mark.usefixtures("few_resamples")
def test_paired_classifiers_of_another_metric_get_both() -> None:
    found = paired(F1_TASK, one_hot([1, 0, 1, 1]), one_hot([1, 1, 0, 1]), np.array([1, 0, 1, 1]))
    assert found["difference"] == pytest.approx(1 - 4 / 6)
    assert found["only_first_right"] == 2


def predict_together(world: World, corpus: Artifact, tokenizer: Path, folder: Path) -> None:
    encoded = encode(corpus, "train", load_tokenizer(tokenizer), tiny.MAX_TOKENS, cache=folder, world=world)
    np.save(folder / f"{world.rank}.npy", predict(ids_as_logits, encoded, 7, world=world))


@pytest.mark.slow
def test_several_processes_share_the_work_and_all_get_the_whole(tmp_path: Path) -> None:
    corpus, folder = tiny.examples(tmp_path / "corpus"), tmp_path / "tokenizer"
    tokenizer = tiny.tokenizer(folder)
    launch(predict_together, corpus, folder, tmp_path, processes=2, device="cpu")
    alone = predict(ids_as_logits, encode(corpus, "train", tokenizer, tiny.MAX_TOKENS, cache=tmp_path), 7)
    for rank in (0, 1):
        assert np.array_equal(np.load(tmp_path / f"{rank}.npy"), alone)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_predictions_are_in_the_order_of_the_rows(tmp_path: Path, batch_size: int) -> None:
    encoded = tiny.encoded(tmp_path)
    found = predict(ids_as_logits, encoded, batch_size)
    assert found[:, 0].tolist() == encoded.lengths(np.arange(len(encoded))).tolist()


def test_splits_are_measured_and_their_logits_kept(tmp_path: Path) -> None:
    encoded = tiny.encoded(tmp_path)
    found = measure_splits(ids_as_logits, tiny.TASK, {"validation": encoded, "test": encoded}, tmp_path)
    assert set(found) == {"validation", "test"}
    kept = np.load(tmp_path / "test.logits.npy")
    assert found["test"]["score"] == (kept.argmax(axis=1) == encoded.label_N).mean()


def test_padding_and_company_change_no_prediction_of_pytorch(tmp_path: Path) -> None:
    encoded = tiny.encoded(tmp_path)
    predictor = TorchPredictor(tiny.lively(tiny.bert()))
    np.testing.assert_allclose(predict(predictor, encoded, 1), predict(predictor, encoded, 64), atol=1e-5)


def test_predicting_uses_no_dropout_and_no_gradient(tmp_path: Path) -> None:
    encoded, model = tiny.encoded(tmp_path), tiny.bert()
    model.train()
    predictor = TorchPredictor(model)
    first, again = predict(predictor, encoded), predict(predictor, encoded)
    assert np.array_equal(first, again)
    assert all(weights.grad is None for weights in model.parameters())


def test_a_saved_model_gives_the_figures_of_the_model(tmp_path: Path) -> None:
    model = tiny.lively(tiny.bert())
    examples, saved = tiny.examples(tmp_path / "corpus"), tiny.saved(tmp_path / "teacher", "teacher", model)
    found = evaluate_saved(saved.path, examples, "test")
    with torch.no_grad():
        loaded = load_classifier(saved.path, tiny.TASK).eval()
    encoded = encode(examples, "test", tiny.tokenizer(tmp_path / "t"), tiny.TASK.max_tokens, cache=tmp_path / "c")
    assert found == measure(tiny.TASK, predict(TorchPredictor(loaded), encoded), encoded.label_N)


def test_evaluating_writes_nothing_into_the_artifact(tmp_path: Path) -> None:
    examples, saved = tiny.examples(tmp_path / "corpus"), tiny.saved(tmp_path / "teacher", "teacher")
    evaluate_saved(saved.path, examples, "validation")
    Artifact.open(saved.path, kind="teacher")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "teacher"]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    examples = tiny.examples(tmp_path / "corpus")
    with pytest.raises(ArtifactError, match=r"is no finished artifact of kind teacher, student, int8; give the folder"):
        evaluate_saved(examples.path, examples, "test")
    with pytest.raises(ArtifactError, match=r"is no finished artifact"):
        evaluate_saved(tmp_path / "nowhere", examples, "test")


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    examples, saved = tiny.examples(tmp_path / "corpus"), tiny.saved(tmp_path / "teacher", "teacher")
    (saved.path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"config.json is missing or was changed since it was made"):
        evaluate_saved(saved.path, examples, "test")


def test_a_served_model_is_measured_by_the_labels_that_it_answers(tmp_path: Path) -> None:
    examples = tiny.examples(tmp_path / "corpus", held_out=40)
    answers = dict(tiny.rows(40, seed=2))
    names = {text: tiny.TASK.labels[label] for text, label in answers.items()}
    right = evaluate_served(FakeClient(names), examples, "test")
    always = evaluate_served(FakeClient(lambda text: "positive"), examples, "test")
    assert (right["score"], right["rows"]) == (1.0, 40)
    assert always["score"] == 0.5


def test_a_served_model_of_another_task_is_refused(tmp_path: Path) -> None:
    from compressor.errors import ModelError

    examples = tiny.examples(tmp_path / "corpus")
    client = FakeClient(lambda text: "neutral", labels=("neutral", "other"))
    with pytest.raises(
        ModelError, match=r"answers \['neutral', 'other'\] to texts; sst2 has \['negative', 'positive'\]"
    ):
        evaluate_served(client, examples, "test")


@pytest.mark.usefixtures("few_resamples")
def test_a_served_regression_of_pairs_is_measured_by_its_values(tmp_path: Path) -> None:
    task = tiny.pair_task(labels=())
    examples = tiny.examples(tmp_path / "corpus", task=task)
    truth = {row.texts: row.label for row in tiny.task_rows(task, 40, seed=2)}
    client = FakeClient(lambda text: truth[text], labels=(), pair=True)
    assert evaluate_served(client, examples, "test")["all"] == pytest.approx({"spearman": 1.0, "pearson": 1.0})
