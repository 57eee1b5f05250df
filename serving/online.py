"""Compares a running server with the repository that it should serve."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serving import triton, versions
from serving.cascade import cascade_answers
from serving.client import Client
from serving.contents import CASCADE, EXPECTED
from serving.errors import RepositoryError, ServingError
from serving.exchange import Answer, Classification
from serving.inprocess import VALUE, Files
from serving.model import Text
from serving.transport import served_config
from serving.verify import CONFIG, Finding, served_versions

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

PROBABILITY_BOUND = 1e-5
_ASKED = (("student", "labels"), ("teacher", "teacher_labels"))
"""Parameters of a cascade: the name of each of its models, and the labels that this had."""


def verify_served(root: Path, url: str) -> list[Finding]:
    """Ask the server at `url` (host:port of gRPC) for every model of a sound repository; [] if all is as it should be.

    Compared are what is ready, its inputs and outputs, and the answers to the stored texts with those of the same
    files opened here, to `PROBABILITY_BOUND`. Raises UnavailableError if no server answers.
    """
    found = []
    for folder in sorted(path for path in root.iterdir() if (path / CONFIG).is_file()):
        config = triton.from_text((folder / CONFIG).read_text("utf-8"))
        found += [Finding(folder.name, "server", fault) for fault in _model_faults(folder, config, url)]
    return found


def version_files(folder: Path, version: int | None = None) -> Files:
    """Return the files of a published version, the newest if not given, of a model that takes texts.

    Raises RepositoryError if it is none.
    """
    number = versions.newest(folder) if version is None else version
    place = folder / str(number)
    config = _published_config(folder, place)
    parameters = triton.parameters_of(config)
    if "onnx" not in parameters:
        raise RepositoryError(f"{folder} takes no texts; name the model that does")
    return Files(
        onnx=place / parameters["onnx"].format(version=number),
        tokenizer=place / "tokenizer.json",
        labels=tuple(json.loads(parameters["labels"])),
        is_pair="TEXT_PAIR" in [tensor.name for tensor in config.input],
        max_tokens=int(parameters["max_tokens"]),
        pad_id=int(parameters["pad_id"]),
    )


def stored_answers(version: Path) -> list[tuple[Text, dict[str, float]]]:
    """Return the texts, or pairs, that were stored with a version, each with what its files answered when published.

    Of a cascade that asks other versions of its models now, it is what the files of these answer.
    """
    rows, file = _stored(version), version / CASCADE
    if not rows or not file.is_file():
        return rows
    asked = json.loads(file.read_text("utf-8"))["models"]
    models = [version.parent.parent / name for name in asked]
    manifests = [versions.read_manifest(model / str(versions.newest(model))) for model in models]
    if [manifest and manifest.digest for manifest in manifests] == list(asked.values()):
        return rows
    texts = [text for text, _ in rows]
    # With other labels the cascade answers nothing, whatever is expected of it.
    with suppress(RepositoryError):
        return list(zip(texts, _file_answers(version, texts), strict=True))
    return rows


def _stored(version: Path) -> list[tuple[Text, dict[str, float]]]:
    file = version / EXPECTED
    rows = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return [(tuple(row["text"]) if isinstance(row["text"], list) else row["text"], row["answer"]) for row in rows]


def _file_answers(version: Path, texts: Sequence[Text]) -> list[dict[str, float]]:
    """Return what the files of a version answer; those of a cascade are its models', in the versions that it asks.

    Raises RepositoryError if these have other labels than the cascade.
    """
    folder = version.parent
    parameters = triton.parameters_of(_published_config(folder, version))
    if "threshold" not in parameters:
        return version_files(folder, int(version.name)).answers(texts)
    asked = [(parameters[name], parameters[labels]) for name, labels in _ASKED]
    files = [version_files(folder.parent / name) for name, _ in asked]
    for (name, labels), found in zip(asked, files, strict=True):
        if list(found.labels) != json.loads(labels):
            raise RepositoryError(
                f"{folder.name} was published for {name} with the labels {labels}, which has {list(found.labels)} now; "
                "deploy the cascade that was published with it"
            )
    student, teacher = (found.answers(texts) for found in files)
    return cascade_answers(student, teacher, float(parameters["threshold"]))


def _published_config(folder: Path, version: Path) -> "pb.ModelConfig":
    try:
        return triton.from_text((version / CONFIG).read_text("utf-8"))
    except OSError as error:
        raise RepositoryError(f"{folder} holds no published version ({error}); run `compressor publish`") from error


def _model_faults(folder: Path, config: "pb.ModelConfig", url: str) -> Iterator[str]:
    wanted = served_versions(folder, config)
    for version in wanted:
        served = served_config(url, folder.name, version)
        if served is None:
            yield f"version {version} is not ready"
            continue
        for kind, ours, theirs in (
            ("inputs", config.input, served.input),
            ("outputs", config.output, served.output),
        ):
            if [(t.name, t.data_type, list(t.dims)) for t in ours] != [
                (t.name, t.data_type, list(t.dims)) for t in theirs
            ]:
                yield f"version {version} has other {kind} than the repository: {[tensor.name for tensor in theirs]}"
        if served.max_batch_size != config.max_batch_size:
            yield f"version {version} takes {served.max_batch_size} rows; config.pbtxt says {config.max_batch_size}"
        yield from _answer_faults(folder, version, url)


def _answer_faults(folder: Path, version: int, url: str) -> Iterator[str]:
    texts = [text for text, _ in _stored(folder / str(version))]
    if not texts:
        return
    try:
        expected = _file_answers(folder / str(version), texts)
    except RepositoryError as error:
        yield f"version {version}: {error}"
        return
    with Client(url, model=folder.name, version=version) as client:
        for text, numbers in zip(texts, expected, strict=True):
            try:
                (answer,) = client.classify([text])
            except ServingError as error:
                yield f"version {version} does not answer {text!r}: {error}"
                continue
            found = numbers_of(answer)
            if set(found) != set(numbers):
                yield f"version {version} answers {sorted(found)}; the files have {sorted(numbers)}"
            elif (gap := gap_of(found, numbers)) > PROBABILITY_BOUND:
                yield f"version {version} answers {text!r} with numbers {gap:.1g} from those of its files"


def gap_of(found: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Return the largest difference of answers with the same names; of numbers beyond 1, as a share of them."""
    return max(abs(found[name] - number) / max(1.0, abs(number)) for name, number in wanted.items())


def numbers_of(answer: Answer) -> dict[str, float]:
    """Return the probability of each label, or the value of a regression under its name."""
    return answer.probabilities if isinstance(answer, Classification) else {VALUE: answer.value}
