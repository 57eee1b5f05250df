"""Metrics of any predictor on a split, and what they can show.

Shape legend: N rows, C outputs, B batch, S sequence.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from compressor.artifact import Artifact, read
from compressor.dataset import Encoded, Inputs, encode, read_examples, task_of, texts_of
from compressor.errors import ArtifactError, ModelError
from compressor.statistics import bootstrap, mcnemar, share_differences, wilson
from compressor.tasks import Task
from compressor.world import World, available_cores
from serving.client import Classifier
from serving.exchange import Classification, Regression

MODEL_FILE = "model.onnx"
FP16_FILE = "model.fp16.onnx"
INPUT_NAMES = ("input_ids", "token_type_ids", "attention_mask")  # of a graph, in the order of `Inputs`
SAME_SCORE = 0.02  # share of a regression's range within which two scores count as the same answer
Logits = NDArray[np.float32]
Labels = NDArray[Any]  # int64 classes, or float32 scores
Predictor = Callable[[Inputs], Logits]
"""Token ids, segments and mask, each (B, S) -> logits (B, C)."""


Metric = Callable[[Labels, Labels], float]


def _f1(average: str) -> Metric:
    return lambda label_N, answer_N: float(f1_score(label_N, answer_N, average=average, zero_division=0.0))


def _correlation(function: Callable[..., Any]) -> Metric:
    def correlation(label_N: Labels, answer_N: Labels) -> float:
        if np.ptp(label_N) == 0 or np.ptp(answer_N) == 0:
            return 0.0  # a constant is related to nothing
        return float(function(label_N, answer_N).statistic)

    return correlation


METRICS: Mapping[str, Metric] = {
    "accuracy": lambda label_N, answer_N: float(accuracy_score(label_N, answer_N)),
    "f1": _f1("binary"),  # of the second label
    "matthews": lambda label_N, answer_N: float(matthews_corrcoef(label_N, answer_N)),
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}
MEAN_F1 = _f1("macro")
METRIC_NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}


def predict(predictor: Predictor, examples: Encoded, batch_size: int = 64, world: World | None = None) -> Logits:
    """Logits (N, C) of every row, in the rows' order; batches of similar length.

    In a `world` of several processes each does its share and all get the whole.
    """
    rank, size = (world.rank, world.size) if world is not None else (0, 1)
    found: Logits | None = None
    for number, batch in enumerate(examples.batches_by_length(batch_size)):
        if number % size == rank or found is None:  # the first one tells every process the number of outputs
            logits_BC = predictor(batch.inputs)
            found = np.zeros((len(examples), logits_BC.shape[1]), dtype=np.float32) if found is None else found
            if number % size == rank:
                found[batch.row_B] = logits_BC
    assert found is not None  # a split has rows
    return world.sum(found) if world is not None else found


def answers(task: Task, logits_NC: Logits) -> Labels:
    """What the logits say: classes (N,), or a regression's scores (N,)."""
    return logits_NC[:, 0] if task.is_regression else logits_NC.argmax(axis=1)


def same_answers(task: Task, first_NC: Logits, second_NC: Logits) -> NDArray[np.bool_]:
    """By row: whether two models say the same; for a regression, about the same (2 % of its range)."""
    first_N, second_N = answers(task, first_NC), answers(task, second_NC)
    if not task.is_regression:
        return np.asarray(first_N == second_N)
    low, high = task.score_range or (first_N.min(), first_N.max())
    return np.asarray(np.abs(first_N - second_N) <= SAME_SCORE * (high - low))


def _metric(task: Task, name: str) -> Metric:
    """A metric of a task. F1 is the mean over the labels if it has more than two, whichever of them some rows hold."""
    return MEAN_F1 if name == "f1" and task.outputs > 2 else METRICS[name]


def scores(task: Task, logits_NC: Logits, label_N: Labels) -> dict[str, float]:
    """Every metric of the task by name, the one that models are chosen by first."""
    answer_N = answers(task, logits_NC)
    return {name: _metric(task, name)(label_N, answer_N) for name in task.metrics}


def measure(task: Task, logits_NC: Logits, label_N: Labels) -> dict[str, Any]:
    """The task's metric with its 95 % interval, every other metric, and the number of rows.

    The interval of an accuracy is Wilson's, that of other metrics from resampled rows.
    """
    found, answer_N, rows = scores(task, logits_NC, label_N), answers(task, logits_NC), len(label_N)
    if task.metric == "accuracy":
        interval = wilson(int((answer_N == label_N).sum()), rows)
    else:
        metric = _metric(task, task.metric)
        interval = bootstrap(lambda row_N: metric(label_N[row_N], answer_N[row_N]), rows)
    return {"metric": task.metric, "score": found[task.metric], "interval_95": interval, "rows": rows, "all": found}


def blind_score(task: Task, label_N: Labels) -> float:
    """The best metric that can be had without reading the texts: always the same answer."""
    if task.is_regression:
        return 0.0
    constant = range(len(task.labels))
    return max(_metric(task, task.metric)(label_N, np.full_like(label_N, label)) for label in constant)


def paired(task: Task, first_NC: Logits, second_NC: Logits, label_N: Labels) -> dict[str, Any]:
    """How two models' answers to the same rows compare: agreement, and the difference of the task's metric.

    Both with 95 % intervals that use the pairing; classifiers get McNemar's test as well.
    """
    rows = len(label_N)
    facts: dict[str, Any] = {"agreement": float(same_answers(task, first_NC, second_NC).mean())}
    first_N, second_N = answers(task, first_NC), answers(task, second_NC)
    if not task.is_regression:
        facts |= mcnemar(first_N == label_N, second_N == label_N)
    if task.metric == "accuracy":
        right, discordant = int((first_N == label_N).sum()), (facts["only_first_right"], facts["only_second_right"])
        return facts | share_differences(right, *discordant, rows)
    metric = _metric(task, task.metric)
    ours, theirs = metric(label_N, first_N), metric(label_N, second_N)
    spread = bootstrap(lambda row: metric(label_N[row], first_N[row]) - metric(label_N[row], second_N[row]), rows)
    facts |= {"difference": ours - theirs, "difference_95": list(spread)}
    if theirs <= 0:
        return facts
    low, high = bootstrap(
        lambda row: _ratio(metric(label_N[row], first_N[row]), metric(label_N[row], second_N[row])), rows
    )
    return facts | {"ratio": ours / theirs} | ({"ratio_95": [low, high]} if not math.isnan(low) else {})


def _ratio(above: float, below: float) -> float:
    """No number where it says nothing: an interval with some of these is not one."""
    return above / below if below > 0 else math.nan


def measure_splits(
    predictor: Predictor, task: Task, encoded: Mapping[str, Encoded], out: Path, world: World | None = None
) -> dict[str, Any]:
    """Metrics on the held-out splits; the logits are kept in `out`, so that later stages can compare row by row.

    In a `world` of several processes each does its share, and the leader keeps the logits.
    """
    metrics = {}
    for split in task.held_out:
        logits_NC = predict(predictor, encoded[split], world=world)
        if world is None or world.is_leader:
            np.save(out / f"{split}.logits.npy", logits_NC)
        metrics[split] = measure(task, logits_NC, encoded[split].label_N)
    return metrics


def evaluate_saved(folder: Path, examples: Artifact, split: str) -> dict[str, Any]:
    """Metrics of a saved teacher, student or INT8 model on a split of `examples`.

    Raises ArtifactError if `folder` holds no such artifact.
    """
    from compressor.checkpoints import load_classifier, load_tokenizer

    found, task = read(folder), task_of(examples)
    kinds = ("teacher", "student", "int8")
    if found is None or found.manifest["kind"] not in kinds:
        raise ArtifactError(f"{folder} is no finished artifact of kind {', '.join(kinds)}; give the folder of one")
    artifact = Artifact.open(folder, kind=found.manifest["kind"])
    max_tokens = artifact.manifest["section"].get("max_tokens") or task.max_tokens
    with tempfile.TemporaryDirectory() as scratch:
        encoded = encode(examples, split, load_tokenizer(folder), max_tokens, cache=Path(scratch))
        predictor: Predictor
        if artifact.manifest["kind"] == "int8":
            predictor = OnnxPredictor(folder / MODEL_FILE, threads=available_cores())
        else:
            predictor = TorchPredictor(load_classifier(folder, task))
        return measure(task, predict(predictor, encoded), encoded.label_N)


def evaluate_served(client: Classifier, examples: Artifact, split: str) -> dict[str, Any]:
    """Metrics of a served model on a split, asked as a client asks: texts in, labels or values out.

    Raises ModelError if it answers other labels than the task's.
    """
    task, rows = task_of(examples), read_examples(examples.path / f"{split}.arrow")
    check_served(client, task)
    return measure(task, served_logits(client, task, texts_of(rows)), np.array(rows["label"]))


def check_served(client: Classifier, task: Task) -> None:
    """Raise ModelError if a served model answers other labels than the task's, or reads other texts."""
    if sorted(client.labels) != sorted(task.labels) or client.is_pair != task.is_pair:
        kinds = ["pairs" if pair else "texts" for pair in (client.is_pair, task.is_pair)]
        raise ModelError(
            f"the served model answers {list(client.labels)} to {kinds[0]}; {task.name} has {list(task.labels)} and "
            f"{kinds[1]}; give the address of a server of this task"
        )


def served_logits(client: Classifier, task: Task, texts: Sequence[tuple[str, ...]]) -> Logits:
    """What a served model answers (N, C): its values, or 1 for the label it gives and 0 for the others."""
    found = np.zeros((len(texts), task.outputs), dtype=np.float32)
    for row, answer in enumerate(client.classify(queries(texts))):
        match answer:
            case Classification(label=label):
                found[row, task.labels.index(label)] = 1.0
            case Regression(value=value):
                found[row, 0] = value
            case _:
                assert_never(answer)
    return found


def queries(texts: Sequence[tuple[str, ...]]) -> list[str | tuple[str, str]]:
    """Texts as a client takes them: alone, or both of a pair."""
    return [text[0] if len(text) == 1 else (text[0], text[1]) for text in texts]


class TorchPredictor:
    """A PyTorch classifier in fp32, on its own device."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def __call__(self, inputs: Inputs) -> Logits:
        """Logits (B, C)."""
        import torch

        with torch.inference_mode():
            ids, segment, mask = (torch.from_numpy(array).to(self._model.device) for array in inputs)
            output = self._model(input_ids=ids, token_type_ids=segment, attention_mask=mask)
            logits: Logits = output.logits.float().cpu().numpy()
        return logits


class OnnxPredictor:
    """An ONNX classifier in ONNX Runtime on the CPU."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        # The fused operator is slower on CPUs than the Add and LayerNormalization it replaces.
        self._session = ort.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )
        self._inputs = [item.name for item in self._session.get_inputs()]

    def __call__(self, inputs: Inputs) -> Logits:
        """Logits (B, C)."""
        feeds = dict(zip(INPUT_NAMES, inputs, strict=True))
        logits: Logits = self._session.run(["logits"], {name: feeds[name] for name in self._inputs})[0]
        return logits
