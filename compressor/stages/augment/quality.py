"""Whether copies can be trusted: what the teacher and a masked LM make of them, and some to look at.

Shape legend: N rows, J judged rows, B batch, S sequence, C classes, M masked tokens.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from compressor.dataset import Rows, read_examples, texts_of
from compressor.progress import Progress
from compressor.statistics import bootstrap, wilson
from compressor.tasks import Task
from compressor.world import World, resolve_device

# Beside train.arrow, row by row: how many words the masked LM and the vectors replaced; 0 of an original.
COUNTS_FILE = "copies.arrow"
EXAMPLES_FILE = "examples.json"
JUDGED_COPIES = 2000  # where not every copy is judged
PERPLEXITY_COPIES = 200
EXAMPLES = 20
TEXT_LIMIT = 400  # characters of an example
MASKED_EVERY = 7  # tokens: all of a text are masked once in as many passes
ROWS_AT_ONCE = 4096
BATCH = 64
PAD_MULTIPLE = 8
PIECES = re.compile(r"\w+|\s+|[^\w\s]")

Texts = tuple[str, ...]
Probabilities = NDArray[np.float32]
Marked = list[tuple[str, bool]]
"""A text in parts, and whether each differs."""


class Teacher:
    """A fine-tuned classifier that says how sure it is of each label. Raises as `checkpoints.load_classifier`."""

    def __init__(self, folder: Path, task: Task, max_tokens: int, device: str = "auto") -> None:
        import torch

        from compressor.checkpoints import load_classifier, load_tokenizer
        from compressor.training import cast_frozen

        self._world = World(device=torch.device(_own(resolve_device(device))))
        self._model = load_classifier(folder, task).eval().to(self._world.device)
        cast_frozen(self._model, self._world)
        self._tokenizer = load_tokenizer(folder)
        self._positions = self._model.config.max_position_embeddings
        self._max_tokens = min(max_tokens, self._positions)

    def probabilities(self, rows: Sequence[Texts]) -> Probabilities:
        """Probability (J, C) of each label for each row, in the rows' order."""
        import torch

        from compressor.training import autocast

        texts = list(zip(*rows, strict=True))
        encoded = self._tokenizer(
            *map(list, texts), truncation="longest_first", max_length=self._max_tokens, return_token_type_ids=True
        )
        order = sorted(range(len(rows)), key=lambda row: len(encoded["input_ids"][row]))
        parts = list[Probabilities]()
        for first in range(0, len(order), BATCH):
            group = order[first : first + BATCH]
            longest = len(encoded["input_ids"][group[-1]])
            batch = self._tokenizer.pad(
                {name: [encoded[name][row] for row in group] for name in encoded},
                padding="max_length",
                max_length=min(self._positions, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE),
                return_tensors="pt",
            )
            with torch.inference_mode(), autocast(self._world):
                logits_BC = self._model(**batch.to(self._world.device)).logits
            parts.append(logits_BC.float().softmax(dim=1).cpu().numpy())
        found_JC = np.concatenate(parts)
        in_order_JC = np.empty_like(found_JC)
        in_order_JC[order] = found_JC
        return in_order_JC


def _own(kind: str) -> str:
    """The device of this kind for one of the processes that torchrun started on this machine."""
    import torch

    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}" if kind == "cuda" else kind


@dataclass(frozen=True)
class Copies:
    """What is known of the rows of an augmented file: originals and copies."""

    label_N: NDArray[Any]
    origin_N: NDArray[Any]
    by_masked_lm_N: NDArray[np.uint8]
    by_vectors_N: NDArray[np.uint8]

    @classmethod
    def read(cls, folder: Path) -> Copies:
        """Of `train.arrow` and what lies beside it."""
        columns = [_columns(folder / "train.arrow", "label", "origin")]
        columns.append(_columns(folder / COUNTS_FILE, "by_masked_lm", "by_vectors"))
        return cls(*(column for pair in columns for column in pair))

    @property
    def is_copy_N(self) -> NDArray[np.bool_]:
        """Which rows have something replaced."""
        return (self.by_masked_lm_N > 0) | (self.by_vectors_N > 0)

    def originals(self, row_J: Rows) -> Rows:
        """The row that each of some rows was made from."""
        original_O = np.flatnonzero(~self.is_copy_N)
        return original_O[np.searchsorted(self.origin_N[original_O], self.origin_N[row_J])]

    def methods(self) -> dict[str, NDArray[np.bool_]]:
        """Which rows were changed by what."""
        lm_N, vectors_N = self.by_masked_lm_N > 0, self.by_vectors_N > 0
        return {"masked_lm": lm_N & ~vectors_N, "vectors": vectors_N & ~lm_N, "both": lm_N & vectors_N}


def judge(
    folder: Path,
    task: Task,
    *,
    teacher: Teacher | None,
    masked_lm: Path | None,
    max_disagreement: float | None = None,
    seed: int,
    kept: Path,
    world: World | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Judge the copies in `folder`, and drop those that the teacher labels otherwise, if that is asked for.

    With `max_disagreement` every copy is judged, otherwise a sample; dropped is one whose other labels have, by the
    teacher, a total probability above it: `train.arrow` and `copies.arrow` are written again without it. Twenty copies
    go to `examples.json`. Returns facts for the metrics, each where there is what it needs: `agreement` by method,
    `dropped_rows`, `perplexity` before and after (of a sample).

    The teacher's answers are written to the folder `kept` as they come, and those found there are taken. If processes
    were started together (`world`), each asks for its share of them; the rest, and the facts, are the leader's.
    """
    copies, facts = Copies.read(folder), dict[str, Any]()
    draw = np.random.default_rng([seed, len(copies.label_N)])
    sample_M = np.sort(draw.permutation(np.flatnonzero(copies.is_copy_N))[:JUDGED_COPIES])
    is_kept_N = np.ones(len(copies.label_N), dtype=bool)
    probability_NC = None
    if teacher is not None and len(sample_M):
        everything = np.arange(len(copies.label_N))
        of_sample = np.unique(np.concatenate([sample_M, copies.originals(sample_M)]))
        row_J = of_sample if max_disagreement is None else everything
        _ask(folder, teacher, row_J, kept, world)
    if world is not None and not world.is_leader:
        return {}
    if teacher is not None and len(sample_M):
        probability_NC = _answers(row_J, kept, len(copies.label_N), task)
        facts["agreement"] = agreement(copies, probability_NC)
        if max_disagreement is not None:
            doubt_N = 1 - probability_NC[everything, copies.label_N]
            is_kept_N = ~copies.is_copy_N | (doubt_N <= max_disagreement)
            facts |= {"max_disagreement": max_disagreement, "dropped_rows": int((~is_kept_N).sum())}
    left_M = sample_M[is_kept_N[sample_M]]
    pairs = _pairs(folder, copies, draw.permutation(left_M)[: max(EXAMPLES, PERPLEXITY_COPIES)])
    examples = [_example(task, copies, pair, probability_NC) for pair in pairs[:EXAMPLES]]
    (folder / EXAMPLES_FILE).write_text(json.dumps(examples, ensure_ascii=False, indent=1), encoding="utf-8")
    if masked_lm is not None and pairs:
        facts["perplexity"] = perplexity(masked_lm, [(pair.original, pair.copy) for pair in pairs], device)
    if not is_kept_N.all():
        for name in ("train.arrow", COUNTS_FILE):
            _keep(folder / name, is_kept_N)
    return facts


class Pair(NamedTuple):
    """A copy and what it was made from."""

    row: int
    """Of the copy."""
    original: Texts
    copy: Texts


def _ask(folder: Path, teacher: Teacher, row_J: Rows, kept: Path, world: World | None) -> None:
    """Write the teacher's probabilities for some rows, block by block, unless they are there."""
    rows = read_examples(folder / "train.arrow")
    missing = [first for first in range(0, len(row_J), ROWS_AT_ONCE) if not _judged(kept, first).is_file()]
    rank, size = 0, 1
    if world is not None:
        missing, rank, size = world.broadcast(missing), world.rank, world.size
    progress = Progress("judged rows", total=len(row_J), start=max(0, len(row_J) - len(missing) * ROWS_AT_ONCE))
    for first in missing[rank::size]:
        row_B = row_J[first : first + ROWS_AT_ONCE]
        keep_answers(teacher, texts_of(rows.select(row_B)), _judged(kept, first))
        progress.advance(min(len(row_J), len(row_B) * size))
    progress.close()
    if world is not None:
        world.barrier()


def keep_answers(teacher: Teacher, rows: Sequence[Texts], file: Path) -> None:
    """Write the teacher's probabilities (J, C) for some rows; the file has its name when it is whole."""
    partial = file.with_suffix(".new")
    with partial.open("wb") as sink:
        np.save(sink, teacher.probabilities(rows))
    partial.replace(file)


def _answers(row_J: Rows, kept: Path, count: int, task: Task) -> Probabilities:
    """The teacher's probabilities (N, C): of the rows that it was asked about, elsewhere nan."""
    found_NC = np.full((count, len(task.labels)), np.nan, dtype=np.float32)
    for first in range(0, len(row_J), ROWS_AT_ONCE):
        found_NC[row_J[first : first + ROWS_AT_ONCE]] = np.load(_judged(kept, first))
    return found_NC


def _judged(kept: Path, first: int) -> Path:
    return kept / f"judged-{first:012}.npy"


def agreement(copies: Copies, probability_NC: Probabilities) -> dict[str, dict[str, Any]]:
    """How often the teacher's likeliest label is the one in the data, by method and for the originals.

    Only rows that it was asked about count; a kind that has none is left out. The 95 % intervals are Wilson's.
    """
    asked_N = ~np.isnan(probability_NC[:, 0])
    same_N = np.zeros(len(asked_N), dtype=bool)
    same_N[asked_N] = probability_NC[asked_N].argmax(axis=1) == copies.label_N[asked_N]
    kinds = {"originals": ~copies.is_copy_N, "copies": copies.is_copy_N, **copies.methods()}
    facts = {}
    for name, is_kind_N in kinds.items():
        rows, same = int((asked_N & is_kind_N).sum()), int((same_N & is_kind_N).sum())
        if rows:
            facts[name] = {"rows": rows, "share": same / rows, "interval_95": wilson(same, rows)}
    return facts


def _pairs(folder: Path, copies: Copies, row_M: Rows) -> list[Pair]:
    rows = read_examples(folder / "train.arrow")
    made, from_ = (texts_of(rows.select(number_M)) for number_M in (row_M, copies.originals(row_M)))
    return [Pair(*parts) for parts in zip(row_M.tolist(), from_, made, strict=True)]


def _example(task: Task, copies: Copies, pair: Pair, probability_NC: Probabilities | None) -> dict[str, Any]:
    """A copy beside its original, with what differs, for people to look at."""
    sides = [side for side, (first, second) in enumerate(zip(pair.original, pair.copy, strict=True)) if first != second]
    original, copy = differences(pair.original[sides[0]], pair.copy[sides[0]])
    label = copies.label_N[pair.row]
    facts = {
        "original": original,
        "copy": copy,
        "label": task.labels[label] if task.labels else f"{label:.2f}",
        "by_masked_lm": int(copies.by_masked_lm_N[pair.row]),
        "by_vectors": int(copies.by_vectors_N[pair.row]),
    }
    if task.is_pair:
        other = pair.original[1 - sides[0]]
        facts |= {"beside": other[:TEXT_LIMIT], "changed_text": ("first", "second")[sides[0]]}
    if probability_NC is not None:
        best = int(probability_NC[pair.row].argmax())
        facts |= {"teacher": task.labels[best], "teacher_probability": round(float(probability_NC[pair.row, best]), 3)}
    return facts


def differences(first: str, second: str) -> tuple[Marked, Marked]:
    """Both texts in parts that are alike (False) or differ (True), word by word; long ones are cut."""
    sides = [PIECES.findall(text[:TEXT_LIMIT]) for text in (first, second)]
    found: tuple[Marked, Marked] = ([], [])
    for kind, *places in difflib.SequenceMatcher(a=sides[0], b=sides[1], autojunk=False).get_opcodes():
        for marked, pieces, (start, end) in zip(found, sides, (places[:2], places[2:]), strict=True):
            if start < end:
                marked.append(("".join(pieces[start:end]), kind != "equal"))
    return found


def perplexity(folder: Path, pairs: Sequence[tuple[Texts, Texts]], device: str = "auto") -> dict[str, Any]:
    """How surprised a masked LM is by the changed texts of copies and by the same texts before, per token.

    A pseudo-perplexity: every token of a text is masked once, every seventh at a time. The interval of the ratio is
    from resampled pairs. Computed in float32. Raises ConfigError if there is no such device.
    """
    import torch

    from compressor.checkpoints import load_masked_lm, load_tokenizer

    model = load_masked_lm(folder).eval().to(_own(resolve_device(device)))
    tokenizer = load_tokenizer(folder)
    limit = model.config.max_position_embeddings
    texts = [
        [first, second]
        for original, copy in pairs
        for first, second in zip(original, copy, strict=True)
        if first != second
    ]
    ids = tokenizer([text for both in texts for text in both], truncation=True, max_length=limit)["input_ids"]
    with torch.inference_mode():
        losses = np.array([_surprise(model, tokenizer, row) for row in ids]).reshape(len(texts), 2, 2)

    def ratio(row_N: NDArray[np.intp]) -> float:
        (before, count), (after, count_after) = losses[row_N].sum(axis=0)
        return math.exp(after / count_after - before / count)

    (before, count), (after, count_after) = losses.sum(axis=0)
    return {
        "copies_judged": len(texts),
        "originals": math.exp(before / count),
        "copies": math.exp(after / count_after),
        "ratio": ratio(np.arange(len(texts))),
        "ratio_95": bootstrap(ratio, len(texts)),
    }


def _surprise(model: Any, tokenizer: Any, ids: list[int]) -> tuple[float, int]:
    """Sum of the losses of a text's tokens, each masked once, and their number."""
    import torch
    from torch.nn.functional import cross_entropy

    place_S = torch.arange(len(ids))
    passes = min(MASKED_EVERY, len(ids) - 2)
    is_masked_BS = place_S % passes == torch.arange(passes)[:, None]
    is_masked_BS[:, [0, -1]] = False  # the frame
    is_masked_BS = is_masked_BS.to(model.device)
    ids_BS = torch.tensor(ids, device=model.device).expand(passes, -1)
    shown_BS = ids_BS.masked_fill(is_masked_BS, tokenizer.mask_token_id)
    scores_MV = model.cls(model.bert(input_ids=shown_BS).last_hidden_state[is_masked_BS])
    return float(cross_entropy(scores_MV, ids_BS[is_masked_BS], reduction="sum")), int(is_masked_BS.sum())


def _columns(path: Path, *names: str) -> list[NDArray[Any]]:
    # Mapped, and without the texts: those of all copies are gigabytes, in every process.
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().select(list(names))
    return [table.column(name).to_numpy() for name in names]


def _keep(path: Path, is_kept_N: NDArray[np.bool_]) -> None:
    """Write an Arrow file again with some of its rows only."""
    partial, first = path.with_suffix(".kept"), 0
    with (
        pa.OSFile(str(path)) as source,
        pa.ipc.open_stream(source) as reader,
        pa.OSFile(str(partial), "wb") as file,
        pa.ipc.new_stream(file, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch.filter(pa.array(is_kept_N[first : first + len(batch)])))
            first += len(batch)
    partial.replace(path)
