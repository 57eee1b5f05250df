"""Compares a running server with the repository that it should serve."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from serving import triton, versions
from serving.client import Answer, Classification, Client
from serving.contents import EXPECTED
from serving.errors import RepositoryError, ServingError
from serving.inprocess import VALUE, Files
from serving.model import Text
from serving.transport import served_config
from serving.verify import CONFIG, Finding, served_versions

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

PROBABILITY_BOUND = 1e-5


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
    try:
        config = triton.from_text((place / CONFIG).read_text("utf-8"))
    except OSError as error:
        raise RepositoryError(f"{folder} holds no published version ({error}); run `compressor publish`") from error
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
    """Return the texts, or pairs, that were stored with a version, each with what its files answered when published."""
    file = version / EXPECTED
    rows = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return [(tuple(row["text"]) if isinstance(row["text"], list) else row["text"], row["answer"]) for row in rows]


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
        if "pad_id" in config.parameters:
            yield from _answer_faults(folder, version, url)


def _answer_faults(folder: Path, version: int, url: str) -> Iterator[str]:
    texts = [text for text, _ in stored_answers(folder / str(version))]
    expected = version_files(folder, version).answers(texts)
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
            elif (gap := max(abs(found[name] - numbers[name]) for name in numbers)) > PROBABILITY_BOUND:
                yield f"version {version} answers {text!r} with numbers {gap:.1g} from those of its files"


def numbers_of(answer: Answer) -> dict[str, float]:
    """Return the probability of each label, or the value of a regression under its name."""
    return answer.probabilities if isinstance(answer, Classification) else {VALUE: answer.value}
