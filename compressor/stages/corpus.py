"""corpus: labelled text from files, a hub or the package index -> Arrow examples in splits.

Shape legend: R rows of a source's table, N those of them in a split, D different ones of these.
"""

from __future__ import annotations

import hashlib
import logging
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import CorpusConfig
from compressor.dataset import Example, write_examples
from compressor.errors import DataError, SourceError
from compressor.rows import Row, Table, checked_rows, checked_text, column_of, is_missing, listed, no_answer, written
from compressor.sources import check, hub_data, index_file, index_text, unreadable
from compressor.tables import SUFFIXES, dataset_records, kind_of, lines, records
from compressor.tasks import Names, Task, TaskConfig, folded

log = logging.getLogger(__name__)
TRAIN: Names = ("train",)  # name of the file or hub split
VALIDATION: Names = ("val", "valid")  # what a validation split may be called besides the task's own names
MAX_LABELS_FOUND = 1000
WHOLE = re.compile(r"^(-?\d+)\.0+$")  # number written with a decimal point
ROUNDED = 1e-3  # share of the spread of scores by which their storage may round them


@dataclass(frozen=True)
class Split:
    """Some rows of a table, which is read whenever they are gone through: of each, 17 bytes stay in memory."""

    read: Callable[[Iterable[bool]], Iterator[Row]]
    """Gives the rows of the table for which it is given True."""
    is_in_R: NDArray[np.bool_]
    label_N: NDArray[np.float64]
    hash_N: NDArray[np.int64]
    """Of the texts: equal ones have the same."""

    @staticmethod
    def of(read: Callable[[Iterable[bool]], Iterator[Row]]) -> Split:
        """All rows of a table; raises what reading it raises."""
        labels, hashes = array("d"), array("q")
        for texts, label in read(repeat(True)):
            labels.append(label)
            # No text holds NUL. Hashes of Python's own differ from run to run.
            digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little", signed=True))
        return Split(read, np.ones(len(labels), bool), np.array(labels), np.array(hashes))

    def part(self, is_in_N: NDArray[np.bool_]) -> Split:
        """Some of the rows."""
        is_in_R = self.is_in_R.copy()
        is_in_R[is_in_R] = is_in_N
        return Split(self.read, is_in_R, self.label_N[is_in_N], self.hash_N[is_in_N])

    def __len__(self) -> int:
        return len(self.label_N)

    def __iter__(self) -> Iterator[Row]:
        return self.read(self.is_in_R)


def corpus(config: CorpusConfig, task: Task, *, seed: int, key: str, out: Path) -> Artifact:
    """Read the source into examples: `train`, `validation`, `test`, and those extra splits of `task` that it has.

    Splits that the source does not have are cut from its rows, the same ones for the same seed. Raises DataError that
    names file and line of a malformed row, and SourceError if the source cannot be had or does not fit the task.
    """
    splits, facts = read_source(config, task, seed=seed)
    for name, rows in splits.items():
        what = f"the {name} split of {config.source}"
        _refuse_one_answer(rows, task, what)
        if not task.is_regression:
            _warn_of_absent_labels(rows, task, what)
    if task.is_regression:
        _refuse_rounding(splits["train"], f"the train split of {config.source}")
    _warn_of_imbalance(splits["train"], task, f"the train split of {config.source}")
    extra_files = {name: files for name, files in task.extra_files.items() if name in splits}
    found = task.model_copy(update={"extra_files": extra_files})
    section = {**config.model_dump(), "task": found.model_dump(mode="json")}
    with artifact.write(out, "examples", key=key, section=section, parents={}) as draft:
        for name, rows in splits.items():
            examples = (Example(texts, label, number) for number, (texts, label) in enumerate(rows))
            write_examples(draft.path / f"{name}.arrow", examples, task)
        draft.metrics.update(facts, rows={name: _counts(rows, task) for name, rows in splits.items()})
    return Artifact.open(out, kind="examples")


def _refuse_one_answer(rows: Split, task: Task, what: str) -> None:
    """Raise DataError if all rows have the same label or score: nothing can be learnt or measured from them."""
    answers = np.unique(rows.label_N).tolist()
    if len(answers) >= 2:
        return
    if not answers:
        few = "rows" if task.is_regression else "rows of each label"
        raise DataError(
            f"{what} has no rows: there are too few {few} to share out; give more, or a file for each split"
        )
    kind, rule = ("score", "two scores") if task.is_regression else ("label", "two labels")
    only = answers[0] if task.is_regression else task.labels[int(answers[0])]
    raise DataError(f"{what} has only {kind} {only!r}; it needs at least {rule}; add rows with another")


def _refuse_rounding(rows: Split, what: str) -> None:
    """Raise DataError if scores are so alike beside their size that the 32 bits of their storage would mix them up."""
    error = np.abs(rows.label_N - rows.label_N.astype(np.float32)).max()
    if error > ROUNDED * rows.label_N.std():
        low, high = float(rows.label_N.min()), float(rows.label_N.max())
        raise DataError(
            f"{what} has scores from {low!r} to {high!r}, which 32-bit numbers would round by up to {error:g}; "
            "subtract a constant from all of them, such as the lowest"
        )


def _warn_of_absent_labels(rows: Split, task: Task, what: str) -> None:
    """Say which labels nothing can be learnt or measured of."""
    absent = np.setdiff1d(np.arange(task.outputs), rows.label_N).tolist()
    if absent:
        labels = listed([repr(task.labels[label]) for label in absent])
        log.warning("%s has no row with label %s, of which it can say nothing; give more such rows", what, labels)


def _warn_of_imbalance(rows: Split, task: Task, what: str) -> None:
    """Say so before hours of training if the metric hardly tells a model from the same answer to every text."""
    label_L, count_L = np.unique(rows.label_N, return_counts=True)
    share, label = count_L.max() / len(rows), label_L[count_L.argmax()]
    remedy = task.imbalance_remedy(share)
    if remedy is not None and (task.metric == "accuracy" or (task.outputs == 2 and label == 1)):  # F1 is of the second
        log.warning(
            "%.1f %% of the rows of %s have label %r, and %s hardly tells a model from that one answer; %s",
            100 * share,
            what,
            task.labels[int(label)],
            "accuracy" if task.metric == "accuracy" else "F1",
            remedy,
        )


def _counts(rows: Split, task: Task) -> dict[str, int]:
    """Rows by label, or by the range of their scores."""
    if task.is_regression:
        return {f"{rows.label_N.min():g} to {rows.label_N.max():g}": len(rows)}
    found = zip(*(column.tolist() for column in np.unique(rows.label_N, return_counts=True)), strict=True)
    return {task.labels[int(label)]: count for label, count in found}


def find_labels(config: CorpusConfig, task: TaskConfig) -> Names:
    """The labels in the training rows of a user's own task, in alphabetical order.

    For `f1` the rarer one of two comes second, because F1 is of the second. Raises DataError if there are fewer than
    two, or so many that they must be numbers, or two that are one written in two ways, and SourceError as `corpus`.
    """
    assert task.label is not None  # a task of the user's own
    check(config.source, what="corpus.source")
    if config.source.startswith("index:"):
        raise _ratings_do_not_fit(config.source, task.name)
    found, counts = dict[str, str](), Counter[str]()
    title, read = _tables(config.source, {"train": TRAIN}, only=task.label)["train"]
    rows = read()
    for where, fields in rows:
        raw = fields[column_of(fields, (task.label,), where)]
        if is_missing(raw):
            raise no_answer(where, rows, task.label, "label")
        label = _new_label(raw, where)
        known = found.setdefault(WHOLE.sub(r"\1", folded(label)), label)
        if folded(known) != folded(label):
            raise DataError(f"{where}: label {label!r} is the number of label {known!r}; write them alike")
        if known != label:
            how = "case" if known.casefold() == label.casefold() else "Unicode form"
            raise DataError(
                f"{where}: label {label!r} differs from label {known!r} in {how} alone; write them alike, or list "
                f"task.labels, which are read in any {how}"
            )
        counts[label] += 1
        if len(found) > MAX_LABELS_FOUND:
            raise DataError(
                f"{title} has more than {MAX_LABELS_FOUND:,} labels in column {task.label!r}: they look like numbers; "
                "set task.metric to 'pearson' for a regression, or list task.labels"
            )
    if len(found) < 2:
        only = f"only label {next(iter(found.values()))!r}" if found else "no rows"
        raise DataError(f"{title} has {only} in column {task.label!r}; a classifier needs at least two labels")
    labels = sorted(found.values(), key=str.casefold)
    if task.metric == "f1" and len(labels) == 2:
        labels.sort(key=lambda label: -counts[label])
    return tuple(labels)


def _new_label(raw: Any, where: str) -> str:
    """A label that no list holds yet. Raises DataError if it cannot be one."""
    label = written(raw)
    if not (isinstance(raw, str | int) or (isinstance(raw, float) and raw.is_integer())):
        raise DataError(
            f"{where}: label {raw!r} is no text, whole number, true or false; "
            "set task.metric to 'pearson' to predict numbers"
        )
    if label.splitlines() != [label]:
        raise DataError(f"{where}: label {raw!r} has a line break; a label is one line; correct it or drop the row")
    return label


def read_source(config: CorpusConfig, task: Task, *, seed: int) -> tuple[dict[str, Split], dict[str, Any]]:
    """Rows of each split, and what the report says about where they come from. Raises as `corpus` does."""
    check(config.source, what="corpus.source")
    kind, _, name = config.source.partition(":")
    if kind == "index":
        if task.is_pair or {label.casefold() for label in task.labels} != {"negative", "positive"}:
            raise _ratings_do_not_fit(config.source, task.name)
        source = index_file(name, what="corpus.source")
        rows, skipped = read_ratings(index_text(source), config.undecided, task)
        facts: dict[str, Any] = {"provenance": source.provenance, "undecided_left_out": skipped}
        whole = Split.of(partial(compress, rows))
        return _split(whole, task, config, seed=seed), facts | {"splits": "cut from one list of rows"}
    names = {
        "train": TRAIN,
        "validation": (*task.validation_files, *VALIDATION),
        "test": task.test_files,
        **task.extra_files,
    }
    tables = _tables(config.source, names, header=task.tsv_header, hub_config=task.hub_config, gaps=task.has_gaps)
    left_out = Counter[str]()
    read = {
        split: Split.of(partial(checked_rows, table, task, may_lack_labels=split == "test", left_out=left_out))
        for split, table in tables.items()
    }
    found = {split: rows for split, rows in read.items() if rows}
    extra = {split: found.pop(split) for split in task.extra_files if split in found}
    if kind == "hub":
        own_name = task.hub_config is None or ":" in name
        facts = {"provenance": config.source if own_name else f"{task.hub_config} of {config.source}"}
    else:
        path = Path(config.source)
        facts = {"provenance": f"{'files in ' if path.is_dir() else ''}{path.name}"}
    if left_out:
        facts["incomplete_left_out"] = left_out.total()
        for title, count in left_out.items():
            log.warning("%s: %d rows lack a text or a label and are left out", title, count)
    if set(found) == {"train"}:
        return _split(found["train"], task, config, seed=seed) | extra, facts | {"splits": "cut from one list of rows"}
    if "test" in found and "validation" in found:
        how = "as given; validation is used for choosing, test only for reporting"
        return found | extra, facts | {"splits": how}
    # One held-out file: report on it, and choose on rows kept out of training, or the figures would flatter.
    reported = found["test"] if "test" in found else found["validation"]
    train, validation = _hold_out(found["train"], task, config.validation, seed=seed)
    how = "one held-out file, used only for reporting; validation, used for choosing, is cut from train"
    return {"train": train, "validation": validation, "test": reported} | extra, facts | {"splits": how}


def _ratings_do_not_fit(source: str, task: str) -> SourceError:
    return SourceError(
        f"corpus.source is {source!r}, which holds single texts that are negative or positive; "
        f"for {task} give your own with --data"
    )


def read_ratings(path: Path, undecided: float, task: Task) -> tuple[list[Row], int]:
    """Rated sentences (id, mean rating, text; tab-separated) as rows, and how many were left out as undecided."""
    negative, positive = task.label_index("negative"), task.label_index("positive")
    assert negative is not None
    assert positive is not None
    rows, skipped = list[Row](), 0
    for number, line in lines(path):
        fields = line.split("\t")
        try:
            _, rating, text = fields[0], float(fields[1]), fields[2]
        except (IndexError, ValueError) as error:
            raise DataError(f"{path}, line {number}: needs an id, a rating and a text, separated by tabs") from error
        if abs(rating) < undecided or not rating:
            skipped += 1
        else:
            label = positive if rating > 0 else negative
            rows.append(((checked_text(text.strip(), f"{path}, line {number}"),), label))
    return rows, skipped


def _split(rows: Split, task: Task, config: CorpusConfig, *, seed: int) -> dict[str, Split]:
    """Train, validation and test rows cut from one list, fixed by the seed."""
    rest, test = _hold_out(rows, task, config.test, seed=seed)
    train, validation = _hold_out(rest, task, config.validation / (1 - config.test), seed=seed + 1)
    return {"train": train, "validation": validation, "test": test}


def _hold_out(rows: Split, task: Task, share: float, *, seed: int) -> tuple[Split, Split]:
    """Rows to keep and rows held out, each label in proportion. Equal texts fall on the same side.

    A pair is equal to another if both texts are: one premise with two hypotheses may fall on both sides.
    """
    random = np.random.default_rng(seed)
    label_N, hash_N = rows.label_N, rows.hash_N
    order_N = np.lexsort((label_N, hash_N))  # equal rows come together, as they stand in the file
    is_first_N = np.ones(len(rows), bool)
    is_first_N[1:] = (np.diff(hash_N[order_N]) != 0) | (np.diff(label_N[order_N]) != 0)
    first_D = np.sort(order_N[is_first_N])  # numbers of the D rows that are different
    label_D = np.zeros(len(first_D)) if task.is_regression else label_N[first_D]
    is_drawn_N = np.zeros(len(rows), bool)
    for label in np.unique(label_D):
        group = first_D[label_D == label]
        is_drawn_N[group[random.permutation(len(group))[: round(share * len(group))]]] = True
    is_held_N = np.isin(hash_N, hash_N[is_drawn_N])
    return rows.part(~is_held_N), rows.part(is_held_N)


def _tables(
    source: str,
    names: Mapping[str, Names],
    *,
    header: Names = (),
    hub_config: str | None = None,
    only: str | None = None,
    gaps: bool = False,
) -> dict[str, Table]:
    """The table of each split of a hub data set, a folder, or one file (`train`); `names` are what each may be called.

    Nothing is read yet. Warns of tables that are of none, unless `only` one column is wanted. Raises DataError if there
    is no `train`, or more than one table for a split.
    """
    kind, _, name = source.partition(":")
    path = Path(source)
    there: list[tuple[str, str, Table]]  # name, name with its ending, table
    if kind == "hub":
        loaded = hub_data(name, what="corpus.source", config=hub_config)
        titles = {split: f"{source}, {split}" for split in loaded}
        there = [
            (split, split, (title, partial(dataset_records, loaded[split], title))) for split, title in titles.items()
        ]
        remedy = f"it has {', '.join(map(repr, loaded))}"
    elif path.is_file():
        return {"train": (str(path), partial(records, path, header=header, only=only, gaps=gaps))}
    else:
        try:
            files = sorted(file for file in path.iterdir() if kind_of(file) in SUFFIXES)
        except OSError as error:
            raise unreadable(path, error) from error
        read = partial(records, header=header, only=only, gaps=gaps)
        there = [(file.stem.lower(), file.name, (str(file), partial(read, file))) for file in files]
        remedy = f"put train{' or train'.join(SUFFIXES)} there"
    found = {}
    for split, known in names.items():
        tables = [(called, table) for stem, called, table in there if stem in known]
        if len(tables) > 1:
            raise DataError(f"{source} holds both {tables[0][0]} and {tables[1][0]}; keep one of them for {split}")
        if tables:
            found[split] = tables[0][1]
    if "train" not in found:
        raise DataError(f"{source} holds no training rows; {remedy}")
    unused = [called for _, called, table in there if table not in found.values()]
    if unused and only is None:
        may_be = ", ".join(chain(*names.values()))
        log.warning(
            "%s: not used, because no split is called so: %s; splits are called %s", source, ", ".join(unused), may_be
        )
    return found
