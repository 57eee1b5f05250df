"""Rows of rated sentences from the package index, and of a hub."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import datasets
import pytest

from compressor import sources
from compressor.config import CorpusConfig
from compressor.errors import DataError, SourceError
from compressor.stages.corpus import read_ratings, read_source
from tests.compressor.stages.test_corpus import MANY, SST2, make, single

# ---- rated texts


def ratings(folder: Path, text: str) -> Path:
    path = folder / "ratings.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_undecided_ratings_are_left_out_and_counted(tmp_path):
    path = ratings(tmp_path, "a_1\t2.5\tgood\r\na_2\t-0.4\tso so\r\na_3\t-1.0\tbad\r\na_4\t0.5\tjust enough\r\n")
    assert read_ratings(path, 0.5, SST2) == (
        [(("good",), 1), (("bad",), 0), (("just enough",), 1)],
        1,
    )


def test_a_rating_of_nothing_is_never_a_label(tmp_path):
    assert read_ratings(ratings(tmp_path, "1\t0.0\tneither\n2\t0.1\tgood\n"), 0.0, SST2) == ([(("good",), 1)], 1)


@pytest.mark.parametrize("line", ["a\t1.0", "a\tmany\ttext", "a"])
def test_a_malformed_rating_is_named_by_file_and_line(line, tmp_path):
    with pytest.raises(DataError, match=r"ratings.txt, line 2: needs an id, a rating and a text, separated by tabs"):
        read_ratings(ratings(tmp_path, f"1\t2.0\tgood\n{line}\n"), 0.5, SST2)


def test_the_index_source_is_split_and_says_where_it_comes_from(tmp_path, monkeypatch):
    path = ratings(tmp_path, "".join(f"{n}\t{2 if n % 2 else -2}\ttext {n}\n" for n in range(100)) + "x\t0.1\tno\n")
    monkeypatch.setattr("compressor.stages.corpus.index_text", lambda source: path)
    made = make(Path("index:vaderSentiment==3.3.2"), tmp_path / "out")
    assert made.metrics["undecided_left_out"] == 1
    assert made.metrics["provenance"] == sources.MOVIE_SNIPPETS.provenance
    assert sum(sum(counts.values()) for counts in made.metrics["rows"].values()) == 100


# ---- a hub


def hub_split(texts: Sequence[str], labels: Sequence[int], names: Sequence[str] = SST2.labels) -> datasets.Dataset:
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
    )
    return datasets.Dataset.from_dict({"sentence": list(texts), "label": list(labels)}, features=features)


@pytest.fixture
def hub(monkeypatch):
    """Sets what the hub has."""

    def answer(found):
        def load_dataset(name, config):
            if isinstance(found, Exception):
                raise found
            return datasets.DatasetDict(found)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return answer


def read_hub() -> dict[str, list[tuple[str, float]]]:
    found, _ = read_source(CorpusConfig(source="hub:nyu-mll/glue"), SST2, seed=0)
    return {split: single(rows) for split, rows in found.items()}


def hub_train(names: Sequence[str] = SST2.labels) -> datasets.Dataset:
    texts, labels = zip(*MANY, strict=True)
    return hub_split(texts, labels, names)


@pytest.mark.parametrize("names", [("negative", "positive"), ("positive", "negative")])
def test_hub_labels_are_read_by_name_not_by_position(names, hub):
    hub({"train": hub_train(names), "validation": hub_split(["a", "b"], [0, 1], names)})
    assert read_hub()["test"] == [("a", SST2.labels.index(names[0])), ("b", SST2.labels.index(names[1]))]


def test_hub_split_with_withheld_labels_is_left_out(hub):
    hub({"train": hub_train(), "validation": hub_split(["a", "b"], [0, 1]), "test": hub_split(["c"], [-1])})
    assert read_hub()["test"] == [("a", 0), ("b", 1)]


def test_hub_splits_of_other_names_are_passed_over(hub):
    hub({"train": hub_train(), "unsupervised": hub_split(["c"], [0])})
    assert sorted(chain(*read_hub().values())) == sorted(MANY)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub (LocalEntryNotFoundError)"),
        datasets.exceptions.DatasetNotFoundError("doesn't exist on the Hub or cannot be accessed"),
        OSError("Network is unreachable"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hub_that_cannot_be_reached_gives_one_sentence_with_the_remedy(error, hub):
    hub(error)
    sentence = "^corpus.source is hub:nyu-mll/glue, .* cannot be reached .* path of a local copy .* --recipe laptop"
    with pytest.raises(SourceError, match=sentence):
        read_hub()


def test_hub_without_the_task_s_configuration_says_what_to_write(hub):
    hub(ValueError("BuilderConfig 'sst2' not found. Available: ['default']"))
    with pytest.raises(SourceError, match=r"write hub:nyu-mll/glue:configuration, .* is one of default$"):
        read_hub()


def test_hub_labels_of_another_task_are_refused(hub):
    hub({"train": hub_train(("no", "yes"))})
    with pytest.raises(
        DataError, match=r"hub:nyu-mll/glue, train, row 1: label 'no' is unknown; labels of sst2 are negative"
    ):
        read_hub()


def test_hub_columns_of_another_task_are_refused(hub):
    hub({"train": hub_train().rename_column("sentence", "text")})
    with pytest.raises(DataError, match=r"glue, train, row 1: no column 'sentence'; found 'text', 'label'"):
        read_hub()


def test_hub_texts_are_checked_too(hub):
    hub({"train": hub_split(["good", " "], [1, 0])})
    with pytest.raises(DataError, match=r"hub:nyu-mll/glue, train, row 2, column 'sentence': the text is empty"):
        read_hub()


def test_hub_without_training_rows_is_refused(hub):
    hub({"test": hub_split(["a"], [1])})
    with pytest.raises(DataError, match=r"hub:nyu-mll/glue holds no training rows; it has 'test'"):
        read_hub()
