"""Small real parts for the tests of augmentation: word vectors, a masked language model, rows and runs of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor import artifact, table_writer, tables
from compressor.artifact import Artifact
from compressor.config import AugmentConfig
from compressor.dataset import Example, read_examples, texts_of, write_examples
from compressor.stages.augment import augment_examples
from compressor.tasks import TASKS, Task

WINDOW = 16  # positions of the small masked LM
CONTENT = ("film", "movie", "picture", "good", "great", "fine", "bad", "poor", "awful", "plot", "story", "actor")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##s", "##ing", "the", "not", "a", ",", ".", "7", "x", *CONTENT)
# Three neighbourhoods of words, each around an axis of its own.
VECTORS: dict[str, Sequence[float]] = {
    "film": (1, 0.1, 0),
    "movie": (1, 0.2, 0),
    "picture": (1, 0.3, 0),
    "good": (0, 1, 0.1),
    "great": (0, 1, 0.2),
    "fine": (0, 1, 0.3),
    "bad": (0.1, 0, 1),
    "poor": (0.2, 0, 1),
    "awful": (0.3, 0, 1),
    "not": (0.1, 0, 1),
}
ROWS: list[tuple[Any, ...]] = [
    ("The film is good, the plot is NOT.", 1),
    ("A Bad film", 0),
    ("!!! 42", 0),
    ("good film", 1),
]
PAIRS: list[tuple[Any, ...]] = [
    ("The film is good.", "A film is good.", 1),
    ("A Bad film", "!!! 42", 0),
    ("...", "42", 0),
    ("The film is good.", "the plot is bad", 1),
]
# What a file holds that `augment-file` is given.
RECORDS: list[dict[str, Any]] = [
    {"id": "7", "review": 'The film is "good",\nthe plot is NOT.', "stars": "4"},
    {"id": "8", "review": "!!! 42", "stars": ""},
    {"id": "9", "review": "A Bad film", "stars": "1"},
]


def settings(copies: int = 3, **fields: Any) -> AugmentConfig:
    """Settings under which every word counts and is replaced half of the time."""
    given: dict[str, Any] = {"replace_probability": 0.5, "candidates": 5, "vectors": "x", "keep_names": False}
    return AugmentConfig(copies=copies, **(given | fields))


def tokenizer(pieces: Sequence[str] = PIECES, *, lowercase: bool = True) -> Any:
    """A WordPiece tokenizer of these pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def bert(size: int = len(PIECES), *, window: int = WINDOW) -> Any:
    """A masked LM with random weights, always the same."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=window,
        initializer_range=0.5,
    )
    return BertForMaskedLM(config).eval()


def saved_masked_lm(folder: Path, pieces: Sequence[str] = PIECES, *, lowercase: bool = True) -> str:
    """A folder with the masked LM and its tokenizer."""
    bert(len(pieces)).save_pretrained(folder)
    tokenizer(pieces, lowercase=lowercase).save_pretrained(folder)
    return str(folder)


def glove(file: Path, vectors: Mapping[str, Sequence[float]] = VECTORS) -> str:
    """A file in GloVe's text format."""
    lines = [" ".join([word, *(str(float(value)) for value in vector)]) for word, vector in vectors.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def examples(out: Path, rows: Sequence[tuple[Any, ...]], task: Task) -> Artifact:
    """An artifact with these training rows: texts, then the label."""
    section = {"task": task.model_dump(mode="json")}
    with artifact.write(out, "examples", key="corpus", section=section, parents={}) as draft:
        found = (Example(tuple(texts), label, number) for number, (*texts, label) in enumerate(rows))
        write_examples(draft.path / "train.arrow", found, task)
    return Artifact.open(out, kind="examples")


def run(
    folder: Path,
    rows: Sequence[tuple[Any, ...]] = ROWS,
    *,
    task: str = "sst2",
    seed: int = 0,
    name: str = "out",
    processes: int = 1,
    teacher: Artifact | None = None,
    **fields: Any,
) -> tuple[Artifact, list[tuple[Any, ...]]]:
    """Run the stage with the small vectors; gives the artifact and its rows: one text or two, label, origin."""
    config = settings(**({"vectors": glove(folder / "vectors.txt")} | fields))
    corpus = examples(folder / f"{name}-corpus", rows, TASKS[task])
    made = augment_examples(config, corpus, teacher=teacher, seed=seed, key="k", out=folder / name, processes=processes)
    data = read_examples(made.path / "train.arrow")
    found = zip(texts_of(data), data["label"], data["origin"], strict=True)
    return made, [(*texts, label, origin) for texts, label, origin in found]


def table(path: Path, rows: list[dict[str, Any]] = RECORDS) -> Path:
    """A file of these records, in the format that its name says."""
    table_writer.write(path, iter(rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [fields for _, fields in tables.records(path)]
