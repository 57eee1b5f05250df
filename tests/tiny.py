"""Tiny real parts for the tests: BERTs, a tokenizer, labelled data that is easily learnt, a recipe made of paths."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compressor import artifact, cli, latency, machine
from compressor.artifact import Artifact
from compressor.config import DistillConfig, FinetuneConfig, StudentConfig
from compressor.dataset import Encoded, Example, encode, write_examples
from compressor.tasks import TASKS, Task

if TYPE_CHECKING:
    import pytest

TASK = TASKS["sst2"]
MAX_TOKENS = 16
VOCABULARY = 20_000  # embeddings; shaped calls draw ids below this
GOOD = ("good", "fine", "lovely", "superb", "charming", "moving")
BAD = ("bad", "dull", "awful", "boring", "clumsy", "tedious")
NOUNS = ("film", "story", "movie", "plot", "cast", "script")
FILLERS = ("a", "the", "very", "with", "and", "this", "scenes", "music", "really", "quite")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *NOUNS, *FILLERS, "##s", ".", ",")
Rows = list[tuple[str, int]]


def rows(count: int, *, seed: int = 0) -> Rows:
    """Texts whose label is decided by one word, in turns negative and positive; no text twice."""
    draw, found = random.Random(seed), dict[str, int]()
    while len(found) < count:
        label = len(found) % 2
        words = [draw.choice(FILLERS) for _ in range(draw.randint(1, 7))]
        words.insert(draw.randrange(len(words) + 1), draw.choice((BAD, GOOD)[label]))
        found[" ".join([*words, draw.choice(NOUNS)])] = label
    return list(found.items())


def bert(*, layers: int = 2, hidden: int = 32, heads: int = 4, seed: int = 0, task: Task = TASK, **shape: Any) -> Any:
    """A classifier, or the regression of its task, with fresh weights, in evaluation mode."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    given = {"vocab_size": VOCABULARY, "intermediate_size": 2 * hidden, "max_position_embeddings": 64} | shape
    names: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if task.labels:
        names = {"id2label": dict(enumerate(task.labels)), "label2id": {name: n for n, name in enumerate(task.labels)}}
    config = BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, **names, **given)
    return BertForSequenceClassification(config).eval()


def lively(model: Any, *, seed: int = 0) -> Any:
    """The model with weights of the size that training gives, and LayerNorms and biases that do something."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "LayerNorm.weight" in name:
                weights.copy_(1 + 0.1 * torch.randn_like(weights))
            else:
                weights.copy_(torch.randn_like(weights) * (0.1 if weights.ndim == 1 else 0.15))
    return model


def tokenizer(folder: Path, *, words: tuple[str, ...] = WORDS) -> Any:
    """A fast WordPiece tokenizer, saved in `folder`."""
    from transformers import BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    made = BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))
    made.save_pretrained(folder)
    return made


def checkpoint(folder: Path, model: Any | None = None, *, words: tuple[str, ...] = WORDS) -> Path:
    """A saved classifier with its tokenizer."""
    (model or bert()).save_pretrained(folder)
    tokenizer(folder, words=words)
    return folder


def pair_task(labels: tuple[str, ...] = ("different", "alike"), **facts: Any) -> Task:
    """A task of two texts; no labels make it a regression."""
    given = {"name": "pairs", "columns": (("a",), ("b",)), "label_columns": ("label",), "max_tokens": MAX_TOKENS}
    metrics = ("accuracy",) if labels else ("spearman", "pearson")
    return Task.model_validate(given | {"labels": labels, "metrics": metrics} | facts)


def task_rows(task: Task, count: int, *, seed: int = 0) -> list[Example]:
    """Examples of any task of one or two texts: the label, or the score, hangs on the words good and bad."""
    found = []
    for number, (text, label) in enumerate(rows(count, seed=seed)):
        texts = (text, f"{NOUNS[number % len(NOUNS)]} and {FILLERS[number % 3]} cast") if task.is_pair else (text,)
        found.append(Example(texts, label + 0.1 * (number % 5) if task.is_regression else label, number))
    return found


def sealed(
    out: Path, kind: str, *, parents: dict[str, Artifact] | None = None, section: dict[str, Any] | None = None
) -> Any:
    """A context that yields the draft of an artifact whose key is its name."""
    return artifact.write(out, kind, key=out.name, section=section or {}, parents=parents or {})


def examples(out: Path, *, train: int = 64, held_out: int = 40, task: Task = TASK) -> Artifact:
    """An artifact of examples in three splits."""
    with sealed(out, "examples", section={"task": task.model_dump(mode="json")}) as draft:
        for seed, (split, count) in enumerate((("train", train), ("validation", held_out), ("test", held_out))):
            write_examples(draft.path / f"{split}.arrow", task_rows(task, count, seed=seed), task)
    return Artifact.open(out, kind="examples")


def saved(out: Path, kind: str, model: Any | None = None) -> Artifact:
    """An artifact that holds a classifier: a teacher or a student."""
    with sealed(out, kind) as draft:
        checkpoint(draft.path, model)
    return Artifact.open(out, kind=kind)


def encoded(folder: Path, *, train: int = 64) -> Encoded:
    """Encoded training rows."""
    return encode(
        examples(folder / "examples", train=train),
        "train",
        tokenizer(folder / "tokenizer"),
        MAX_TOKENS,
        cache=folder / "cache",
    )


def finetuning(**changes: Any) -> FinetuneConfig:
    """Settings with which a fresh tiny BERT learns the rows."""
    given: dict[str, Any] = {"base": "base", "epochs": 6.0, "learning_rate": 5e-3, "batch_size": 16}
    return FinetuneConfig(**(given | changes))


def distilling(objective: str = "prediction", **changes: Any) -> DistillConfig:
    """Settings with which a tiny student learns from its teacher."""
    given: dict[str, Any] = {"objective": objective, "epochs": 2.0, "learning_rate": 3e-3, "batch_size": 16}
    return DistillConfig(**(given | changes))


def student(**changes: Any) -> StudentConfig:
    """The shape of a tiny student."""
    return StudentConfig(**({"layers": 1, "hidden": 16, "heads": 4, "intermediate": 32} | changes))


RECIPE = """\
seed = 7

[task]
name = "sst2"
max_tokens = 16

[corpus]
source = {data}

[augment]
copies = 1
candidates = 4
vectors = {vectors}

[finetune]
base = {base}
epochs = 6
learning_rate = 5e-3
batch_size = 16

[student]
layers = 1
hidden = 16
heads = 4
intermediate = 32

[[distill]]
objective = "intermediate"
epochs = 1
learning_rate = 3e-3
batch_size = 16

[[distill]]
objective = "prediction"
epochs = 2
learning_rate = 3e-3
batch_size = 16

[quantize]
candidates = ["static", "per-row", "dynamic"]
max_metric_drop = 0.1
calibration_rows = 16

[publish]
max_batch_size = 8
"""


def data_folder(folder: Path) -> Path:
    """Labelled text in GLUE's files."""
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate((("train", 192), ("dev", 48), ("test", 48))):
        lines = [f"{text}\t{label}\n" for text, label in rows(count, seed=seed)]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines), encoding="utf-8")
    return folder


def vectors(file: Path) -> Path:
    """Word vectors in GloVe's text format: words of one kind are neighbours."""
    draw, lines = random.Random(0), list[str]()
    for direction, kind in enumerate((GOOD, BAD, NOUNS, FILLERS)):
        for word in kind:
            numbers = [draw.gauss(0, 0.1) + (place == direction) for place in range(8)]
            lines.append(" ".join([word, *(f"{number:.4f}" for number in numbers)]) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    return file


def recipe(folder: Path) -> Path:
    """A recipe that needs nothing but paths in `folder`: a whole build takes seconds."""
    sources = {"data": data_folder(folder / "data"), "vectors": vectors(folder / "vectors.txt")}
    sources["base"] = checkpoint(folder / "base")
    file = folder / "tiny.toml"
    text = RECIPE.format(**{name: json.dumps(str(path)) for name, path in sources.items()})
    file.write_text(text, encoding="utf-8")
    return file


# Timing is most of a tiny build's time; what it measures is not what these tests are about.
HASTY = """\
import sys
from compressor import latency
latency.time_in_turns.__kwdefaults__.update(rounds=1, turn_s=0.0)
latency.SETTLE_S = 0.0
from compressor import machine
machine.LOOK_S = 0.1
sys.argv[0] = "compressor"
from compressor.cli import main
main()
"""


def command(*arguments: object, hasty: bool = False) -> list[str]:
    """The command line as a program; `hasty` shortens the timing of models."""
    program = ["-c", HASTY] if hasty else ["-m", "compressor"]
    return [sys.executable, *program, *map(str, arguments)]


def run(
    *arguments: object, hasty: bool = False, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end in a process of its own."""
    return subprocess.run(
        command(*arguments, hasty=hasty),
        input=stdin,
        capture_output=True,
        check=False,
        timeout=200,
        env=os.environ | environment,
    )


class Ended(NamedTuple):
    """How a command that ran in this process ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


def main(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
    hasty: bool = False,
    stdin: bytes = b"",
    entry: Callable[[], None] = cli.main,
) -> Ended:
    """Run a command to its end in this process, which saves a program's start and imports.

    What it logs, such as the lines of a build, is not in `err`: under pytest it goes to `caplog`. `hasty` shortens the
    timing of models, and lets libraries warn, as the exporter and the quantizer do.
    """
    if hasty:
        hurry(monkeypatch)
    monkeypatch.setattr(sys, "argv", [entry.__module__.partition(".")[0], *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    capsys.readouterr()  # what was written before is not the command's
    with warnings.catch_warnings():
        if hasty:
            warnings.simplefilter("ignore")
        try:
            entry()
        except SystemExit as ended:
            return Ended(int(ended.code or 0), *capsys.readouterr())
    raise AssertionError("the command did not exit")


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HASTY does in a program."""
    defaults: Any = latency.time_in_turns.__kwdefaults__
    monkeypatch.setitem(defaults, "rounds", 1)
    monkeypatch.setitem(defaults, "turn_s", 0.0)
    monkeypatch.setattr(latency, "SETTLE_S", 0.0)
    monkeypatch.setattr(machine, "LOOK_S", 0.1)


def sentence(done: Ended, code: int = 1) -> str:
    """The error of a command that ended with `code`: one sentence, nothing on standard output."""
    assert done.code == code, done.err
    assert done.out == ""
    return done.err.splitlines()[-1]
