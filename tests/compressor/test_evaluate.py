"""Metrics of predictors: in process, saved, and served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.artifact import Artifact
from compressor.errors import ArtifactError
from compressor.evaluate import TorchPredictor, evaluate_saved, evaluate_served, measure, measure_splits, predict
from compressor.models import load_classifier
from serving import FakeClient
from tests import tiny

LOGITS = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 6.0]], dtype=np.float32)


def ids_as_logits(input_ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
    """Give the number of tokens of each row, which says which row it is."""
    return np.stack([mask_BS.sum(axis=1), input_ids_BS.sum(axis=1)], axis=1).astype(np.float32)


def test_accuracy_by_hand() -> None:
    found = measure(LOGITS, np.array([0, 1, 1, 1]))
    assert (found["accuracy"], found["rows"]) == (0.75, 4)
    low, high = found["interval_95"]
    assert 0.3 < low < 0.75 < high < 1


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_predictions_are_in_the_order_of_the_rows(tmp_path: Path, batch_size: int) -> None:
    encoded = tiny.encoded(tmp_path)
    found = predict(ids_as_logits, encoded, batch_size)
    assert found[:, 0].tolist() == encoded.length_N.tolist()


def test_splits_are_measured_and_their_logits_kept(tmp_path: Path) -> None:
    encoded = tiny.encoded(tmp_path)
    found = measure_splits(ids_as_logits, {"validation": encoded, "test": encoded}, tmp_path)
    assert set(found) == {"validation", "test"}
    kept = np.load(tmp_path / "test.logits.npy")
    assert found["test"]["accuracy"] == (kept.argmax(axis=1) == encoded.label_N).mean()


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
    found = evaluate_saved(saved.path, tiny.TASK, examples, "test")
    with torch.no_grad():
        loaded = load_classifier(saved.path, tiny.TASK).eval()
    from compressor.dataset import encode

    encoded = encode(examples, "test", tiny.tokenizer(tmp_path / "t"), tiny.TASK.max_tokens, cache=tmp_path / "c")
    assert found == measure(predict(TorchPredictor(loaded), encoded), encoded.label_N)


def test_evaluating_writes_nothing_into_the_artifact(tmp_path: Path) -> None:
    examples, saved = tiny.examples(tmp_path / "corpus"), tiny.saved(tmp_path / "teacher", "teacher")
    evaluate_saved(saved.path, tiny.TASK, examples, "validation")
    Artifact.open(saved.path, kind="teacher")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "teacher"]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    examples = tiny.examples(tmp_path / "corpus")
    with pytest.raises(ArtifactError, match=r"is no finished artifact of kind teacher, student, int8; give the folder"):
        evaluate_saved(examples.path, tiny.TASK, examples, "test")
    with pytest.raises(ArtifactError, match=r"is no finished artifact"):
        evaluate_saved(tmp_path / "nowhere", tiny.TASK, examples, "test")


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    examples, saved = tiny.examples(tmp_path / "corpus"), tiny.saved(tmp_path / "teacher", "teacher")
    (saved.path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"config.json is missing or was changed since it was made"):
        evaluate_saved(saved.path, tiny.TASK, examples, "test")


def test_a_served_model_is_measured_by_the_labels_that_it_answers(tmp_path: Path) -> None:
    examples = tiny.examples(tmp_path / "corpus", held_out=40)
    answers = dict(tiny.rows(40, seed=2))
    names = {text: tiny.TASK.labels[label] for text, label in answers.items()}
    right = evaluate_served(FakeClient(names), tiny.TASK, examples, "test")
    always = evaluate_served(FakeClient(lambda text: "positive"), tiny.TASK, examples, "test")
    assert (right["accuracy"], right["rows"]) == (1.0, 40)
    assert always["accuracy"] == 0.5


def test_a_served_model_of_another_task_is_refused(tmp_path: Path) -> None:
    from compressor.errors import ModelError

    examples = tiny.examples(tmp_path / "corpus")
    client = FakeClient(lambda text: "neutral", labels=("neutral", "other"))
    with pytest.raises(ModelError, match=r"answers \['neutral', 'other'\]; sst2 has \['negative', 'positive'\]"):
        evaluate_served(client, tiny.TASK, examples, "test")
