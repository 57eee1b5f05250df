"""publish: the INT8 student, and the teacher beside it -> a Triton model repository."""

from __future__ import annotations

from pathlib import Path

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import PublishConfig
from compressor.dataset import read_examples, texts_of
from compressor.evaluate import MODEL_FILE
from compressor.tasks import Task
from serving import repository
from serving.errors import RepositoryError
from serving.model import ServedModel, Text
from serving.versions import read_manifest

WARMUP_QUANTILES = (0.1, 0.5, 0.9, 1.0)  # of the validation texts' lengths: short, usual, long, longest


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
    warmup = _warmup_texts(corpus, task)

    def served(folder: Path) -> ServedModel:
        return ServedModel(
            name=task.name,
            onnx=folder / MODEL_FILE,
            tokenizer=folder / "tokenizer.json",
            labels=task.labels,
            pair=task.is_pair,
            max_tokens=max_tokens,
            max_batch_size=config.max_batch_size,
            warmup_texts=warmup,
        )

    parents = {"int8": int8, "onnx": onnx_models, "corpus": corpus}
    with artifact.write(out, "publication", key=key, section=config.model_dump(), parents=parents) as draft:
        teacher = served(onnx_models.path / "teacher") if config.teacher else None
        folders = repository.write(served(int8.path), root, teacher=teacher)
        versions = {folder.parent.name: {"version": int(folder.name), "digest": _digest(folder)} for folder in folders}
        draft.metrics.update(repository=str(root), versions=versions)
    return Artifact.open(out, kind="publication")


def _warmup_texts(corpus: Artifact, task: Task) -> tuple[Text, ...]:
    """A short, a usual, a long and the longest text, or pair, of the validation split."""
    rows = sorted(texts_of(read_examples(corpus.path / "validation.arrow")), key=lambda texts: sum(map(len, texts)))
    chosen = dict.fromkeys(rows[round(quantile * (len(rows) - 1))] for quantile in WARMUP_QUANTILES)
    return tuple((texts[0], texts[1]) if task.is_pair else texts[0] for texts in chosen)


def is_published(publication: Artifact, root: Path) -> bool:
    """Whether `root` still holds what was published, undamaged."""
    versions = publication.metrics["versions"]
    try:
        repository.read(root)
    except RepositoryError:
        return False
    return all(_digest(root / name / str(facts["version"])) == facts["digest"] for name, facts in versions.items())


def _digest(version: Path) -> str | None:
    manifest = read_manifest(version)
    return manifest.digest if manifest else None
