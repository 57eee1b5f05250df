"""publish: the INT8 student, and the teacher beside it -> a Triton model repository."""

from __future__ import annotations

import logging
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import PublishConfig
from compressor.dataset import read_examples, texts_of
from compressor.evaluate import FP16_FILE, MODEL_FILE
from compressor.tasks import Task
from serving import repository
from serving.cascade import Cascade, choose_threshold
from serving.contents import files_of
from serving.errors import ModelError, RepositoryError
from serving.inprocess import PAD_MULTIPLE, shorten
from serving.model import ServedModel, Text
from serving.versions import WAITING, place, read_manifest

TEACHER_WARMUPS = 16
"""Most texts that the teacher is warmed up with: 64 texts of up to 512 tokens would take BERT-base a minute."""

log = logging.getLogger(__name__)


def publish(
    config: PublishConfig,
    task: Task,
    *,
    int8: Artifact,
    onnx_models: Artifact,
    corpus: Artifact,
    max_tokens: int,
    key: str,
    out: Path,
    root: Path,
) -> Artifact:
    """Write the models into the repository `root`, and a record of the versions served to `out`.

    The same content published again changes nothing; other content becomes the next version. Raises RepositoryError
    if `root` holds models that are not ours, or cannot be written.
    """
    warmup = warmup_texts(corpus, task, int8.path / "tokenizer.json", max_tokens)

    def served(folder: Path, exported: Path, warmup: tuple[Text, ...]) -> ServedModel:
        fp16 = exported / FP16_FILE
        return ServedModel(
            name=task.name,
            onnx=folder / MODEL_FILE,
            runtime=config.runtime,
            gpu_onnx=fp16 if config.runtime == "onnxruntime" and fp16.is_file() else None,
            tokenizer=folder / "tokenizer.json",
            labels=task.labels,
            pair=task.is_pair,
            max_tokens=max_tokens,
            max_batch_size=config.max_batch_size,
            cores=config.cores,
            response_cache=config.response_cache,
            warmup_texts=warmup,
        )

    parents = {"int8": int8, "onnx": onnx_models, "corpus": corpus}
    with artifact.write(out, "publication", key=key, section=config.model_dump(), parents=parents) as draft:
        exported = {name: onnx_models.path / name for name in ("student", "teacher")}
        if config.runtime == "embedded" and (exported["student"] / FP16_FILE).is_file():
            log.warning(
                'publish: there are fp16 graphs for GPUs, and publish.runtime "embedded" serves on CPUs alone; set it '
                'to "onnxruntime", or take "gpu" out of export.targets'
            )
        student = served(int8.path, exported["student"], warmup)
        teacher = None
        if config.teacher or config.cascade:
            teacher = served(exported["teacher"], exported["teacher"], spread(warmup, TEACHER_WARMUPS))
        cascade = choose_cascade(config, task, student, teacher, corpus) if config.cascade and teacher else None
        folders = repository.write(student, root, teacher=teacher, cascade=cascade)
        versions = {
            folder.parent.name: {"version": int(folder.name.removeprefix(WAITING)), "digest": _digest(folder)}
            for folder in folders
        }
        waiting = ", ".join(folder.parent.name for folder in folders if folder.name.startswith(WAITING))
        if waiting:
            log.info("publish: a server runs on %s; new versions wait for `compressor deploy`: %s", root, waiting)
        draft.metrics.update(repository=str(root), versions=versions, cascade=cascade and asdict(cascade))
    return Artifact.open(out, kind="publication")


def choose_cascade(
    config: PublishConfig, task: Task, student: ServedModel, teacher: ServedModel, corpus: Artifact
) -> Cascade:
    """Choose on the validation rows when the student hands over. Raises ModelError if no threshold is good enough."""
    if task.is_regression:
        raise ModelError(f"publish.cascade is on, but {task.name} is a regression, which is never sure or unsure")
    rows = read_examples(corpus.path / "validation.arrow")
    texts = _texts(rows, task)
    labels = [task.labels[int(label)] for label in rows["label"]]
    answers = [files_of(model).answers(texts) for model in (student, teacher)]
    found = choose_threshold(answers[0], answers[1], labels, config.cascade_accuracy)
    log.info(
        "publish cascade: the teacher answers %.1f %% of %d validation rows (threshold %.3f); accuracy %.2f, student "
        "%.2f, teacher %.2f",
        *(100 * found.escalated, found.rows, found.threshold),
        *(100 * found.accuracy, 100 * found.student_accuracy, 100 * found.teacher_accuracy),
    )
    return found


def _texts(rows: Any, task: Task) -> list[Text]:
    return [(row[0], row[1]) if task.is_pair else row[0] for row in texts_of(rows)]


def warmup_texts(corpus: Artifact, task: Task, tokenizer: Path, max_tokens: int) -> tuple[Text, ...]:
    """A text, or pair, for each width that the server pads them to, the narrowest first.

    It is a text of the validation split; where none has the width, the beginning of all of them, one after the other.
    """
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.enable_truncation(max_tokens)
    texts = _texts(read_examples(corpus.path / "validation.arrow"), task)
    texts = [shorten(text, reader, max_tokens) for text in (*texts, *_beginnings(texts, max_tokens))]
    first_of: dict[int, Text] = {}
    sides = {0, 1} if task.is_pair else {0}
    for text, encoding in zip(texts, reader.encode_batch_fast(texts), strict=True):
        # The server refuses a text of which the tokenizer reads nothing.
        if sides <= set(encoding.sequence_ids):
            first_of.setdefault(-(-len(encoding) // PAD_MULTIPLE), text)
    return tuple(first_of[width] for width in sorted(first_of))


def _beginnings(texts: list[Text], words: int) -> list[Text]:
    """The first 1 to `words` words of all texts together, or of the firsts and of the seconds of all pairs."""
    columns = list(zip(*(text if isinstance(text, tuple) else (text,) for text in texts), strict=True))
    found = [list(islice(cycle(" ".join(column).split()), words)) for column in columns]
    joined = [[" ".join(column[:count]) for column in found] for count in range(1, words + 1)]
    return [(row[0], row[1]) if len(row) == 2 else row[0] for row in joined if row]


def spread(texts: tuple[Text, ...], most: int) -> tuple[Text, ...]:
    """Return at most `most` of the texts, evenly spread; the first and the last are among them."""
    count = min(most, len(texts))
    return tuple(texts[round(number * (len(texts) - 1) / max(1, count - 1))] for number in range(count))


def is_published(publication: Artifact, root: Path) -> bool:
    """Whether `root` still holds what was published, undamaged."""
    versions = publication.metrics["versions"]
    try:
        repository.read(root)
    except RepositoryError:
        return False
    return all(_digest(place(root / name, facts["version"])) == facts["digest"] for name, facts in versions.items())


def _digest(version: Path) -> str | None:
    manifest = read_manifest(version)
    return manifest.digest if manifest else None
