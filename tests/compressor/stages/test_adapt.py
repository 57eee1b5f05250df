"""Masked LMs made for a task: what is learnt, what is measured, what is saved, and that augmentation can use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM

from compressor.artifact import Artifact
from compressor.checkpoints import load_plain_encoder, load_tokenizer
from compressor.config import AdaptConfig
from compressor.dataset import Example, read_examples, write_examples
from compressor.errors import DataError, ModelError, SourceError
from compressor.stages import adapt as stage
from compressor.stages.adapt import (
    MaskedLanguage,
    _texts,
    adapt,
    held_out_ids,
    held_out_texts,
    masked_accuracy,
    masked_lm,
    spread,
)
from compressor.training import Tensors, _Exchange
from compressor.world import World
from tests import tiny

WORLD = World(device=torch.device("cpu"))
VOCABULARY = len(tiny.WORDS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained encoder in `base`, and room for runs that share their packed text."""
    folder = tmp_path_factory.mktemp("adapt")
    tiny.checkpoint(folder / "base", tiny.bert(vocab_size=VOCABULARY))
    return folder


@pytest.fixture(scope="module")
def corpus(root: Path) -> Artifact:
    return tiny.examples(root / "corpus", train=300)


def settings(**changes: Any) -> AdaptConfig:
    given: dict[str, Any] = {"epochs": 12.0, "learning_rate": 5e-3, "encoder_learning_rate": 5e-3, "block_tokens": 16}
    return AdaptConfig(**(given | {"batch_size": 16, "precision": "fp32"} | changes))


def run(
    root: Path, examples: Artifact, name: str, *, base: str = "base", processes: int = 1, **changes: Any
) -> Artifact:
    options: dict[str, Any] = {"base": str(root / base), "max_tokens": tiny.MAX_TOKENS, "seed": 7, "key": name}
    return adapt(settings(**changes), examples, out=root / name, processes=processes, device="cpu", **options)


@pytest.fixture(scope="module")
def made(root: Path, corpus: Artifact) -> Artifact:
    return run(root, corpus, "made")


def unseen(examples: Artifact, **changes: Any) -> dict[str, list[str]]:
    return held_out_texts(examples, _texts(settings(**changes), examples))[0]


def test_masked_tokens_of_held_out_texts_are_found_again(made: Artifact) -> None:
    for split in ("validation", "test"):
        before, after = made.metrics["at_start"][split], made.metrics["at_end"][split]
        assert before["masked_tokens"] == after["masked_tokens"] >= before["texts"] == 40
        for best in ("top_1", "top_15"):
            low, high = after[best]["interval_95"]
            assert low <= after[best]["share"] <= high
        assert after["top_1"]["share"] < after["top_15"]["share"]
        assert after["top_15"]["share"] > before["top_15"]["share"]
    # A noun ends each text, and it is one of six.
    assert made.metrics["at_end"]["test"]["top_15"]["interval_95"][0] > 0.6


def test_the_manifest_says_what_was_learnt_from(root: Path, corpus: Artifact, made: Artifact) -> None:
    metrics = made.metrics
    assert metrics["source"] == str(root / "base")
    assert metrics["fresh_head"] is True
    assert metrics["provenance"] == ["the task's training rows"]
    assert metrics["documents"] == len(read_examples(corpus.path / "train.arrow"))
    assert metrics["history"]["epochs"][-1]["losses"]["masked_lm"] < np.log(VOCABULARY)


def test_it_is_a_masked_lm_with_tied_embeddings_and_its_tokenizer(root: Path, made: Artifact) -> None:
    model, report = BertForMaskedLM.from_pretrained(made.path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert load_tokenizer(made.path).get_vocab() == load_tokenizer(root / "base").get_vocab()
    assert model.num_parameters() == made.metrics["parameters"]


def test_what_is_saved_is_what_was_measured(corpus: Artifact, made: Artifact) -> None:
    tokenizer = load_tokenizer(made.path)
    assert held_out_ids([], tokenizer, tiny.MAX_TOKENS, 7) == []
    ids = held_out_ids(unseen(corpus)["test"], tokenizer, tiny.MAX_TOKENS, 7)
    model = BertForMaskedLM.from_pretrained(made.path)
    found = masked_accuracy(model, ids, tokenizer, 0.15, "fp32", 7, WORLD)
    assert found["top_15"]["share"] == made.metrics["at_end"]["test"]["top_15"]["share"]


def test_a_head_that_the_checkpoint_has_is_gone_on_with(root: Path, corpus: Artifact, made: Artifact) -> None:
    again = run(root, corpus, "again", base="made", epochs=0.1, learning_rate=1e-6, encoder_learning_rate=1e-6)
    assert again.metrics["fresh_head"] is False
    before, after = again.metrics["at_start"]["test"], made.metrics["at_end"]["test"]
    assert before["top_15"]["share"] == after["top_15"]["share"]


def test_the_encoder_learns_at_its_own_rate(root: Path, corpus: Artifact) -> None:
    still = run(root, corpus, "still", epochs=0.5, encoder_learning_rate=1e-9)
    base, _ = load_plain_encoder(root / "base")
    model = BertForMaskedLM.from_pretrained(still.path)
    for name, weights in model.bert.state_dict().items():
        torch.testing.assert_close(weights, base.bert.state_dict()[name], rtol=0, atol=1e-6)
    fresh, _ = masked_lm(root / "base", load_tokenizer(root / "base"))
    moved = model.cls.predictions.transform.LayerNorm.weight - fresh.cls.predictions.transform.LayerNorm.weight
    assert moved.abs().max() > 1e-3


def test_the_same_seed_gives_the_same_model(root: Path, corpus: Artifact) -> None:
    one = run(root, corpus, "one", epochs=1.0)
    torch.manual_seed(1)
    other = run(root, corpus, "other", epochs=1.0)
    assert one.manifest["files"] == other.manifest["files"]


def test_more_text_is_learnt_from_where_a_corpus_is_named(root: Path, corpus: Artifact, made: Artifact) -> None:
    file = root / "more.txt"
    file.write_text("\n".join(text for text, _ in tiny.rows(100, seed=5)), encoding="utf-8")
    more = run(root, corpus, "more", corpus=(str(file),), epochs=0.1)
    half = run(root, corpus, "half", corpus=(str(file),), corpus_share=0.5, epochs=0.1)
    assert more.metrics["documents"] == made.metrics["documents"] + 100
    assert half.metrics["documents"] == made.metrics["documents"] + 50
    assert more.metrics["provenance"] == ["the task's training rows", f"the text of {file}"]


def test_a_share_is_spread_over_the_whole_corpus() -> None:
    assert list(spread(iter("abcdefghij"), 0.3)) == ["d", "g", "j"]
    assert list(spread(iter("abc"), 1.0)) == ["a", "b", "c"]


def test_both_texts_of_a_pair_are_learnt_from_and_measured_alone(root: Path, tmp_path: Path) -> None:
    pairs = tiny.examples(tmp_path / "pairs", train=60, task=tiny.pair_task())
    found = run(root, pairs, "pairs", epochs=0.1)
    assert found.metrics["documents"] == 120
    ids = held_out_ids(unseen(pairs)["test"], load_tokenizer(root / "base"), tiny.MAX_TOKENS, 0)
    assert all(row.count(3) == 1 and row[-1] == 3 for row in ids)  # one [SEP], at the end
    assert len({tuple(row) for row in ids}) == len(ids) == 40  # the second texts are trained on, too


def test_held_out_texts_that_are_trained_on_are_left_out_and_counted(root: Path, tmp_path: Path) -> None:
    task = tiny.pair_task()
    with tiny.sealed(tmp_path / "pairs", "examples", section={"task": task.model_dump(mode="json")}) as draft:
        for split, rows in {
            "train": [("a good film", f"the plot {number}") for number in range(60)],
            "validation": [("a good film", "a bad film"), ("a bad film", "the plot 3")],
            "test": [("a bad story", "a fine story")],
        }.items():
            found = [Example(texts, number % 2, number) for number, texts in enumerate(rows)]
            write_examples(draft.path / f"{split}.arrow", found, task)
    pairs = Artifact.open(tmp_path / "pairs", kind="examples")
    assert unseen(pairs) == {"validation": ["a bad film"], "test": ["a bad story", "a fine story"]}
    (tmp_path / "more.txt").write_text("a bad story\na poor story\n", encoding="utf-8")
    corpus = (str(tmp_path / "more.txt"),)
    assert unseen(pairs, corpus=corpus) == {"validation": ["a bad film"], "test": ["a fine story"]}
    made = run(root, pairs, "shared", corpus=corpus, epochs=0.1)
    assert made.metrics["held_out_dropped"] == {"validation": 2, "test": 1}
    assert [made.metrics["at_end"][split]["texts"] for split in ("validation", "test")] == [1, 1]


def batch_of(ids_BS: torch.Tensor) -> Tensors:
    zeros, row_B = torch.zeros_like(ids_BS), torch.arange(len(ids_BS))
    return Tensors(ids_BS, zeros, torch.ones_like(ids_BS), row_B, row_B)


def test_tokens_are_masked_as_bert_does_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(root / "base")
    model, _ = masked_lm(root / "base", tokenizer)
    module = MaskedLanguage(model, tokenizer, settings(mask_probability=0.25, block_tokens=18))
    torch.manual_seed(0)
    ids_BS = torch.randint(5, VOCABULARY, (5000, 18))
    ids_BS[:, 0], ids_BS[:, 9], ids_BS[:, -1] = 2, 3, 3  # [CLS], and [SEP] between two texts and at the end
    seen: dict[str, torch.Tensor] = {}
    forward = model.bert.forward

    def spy(**inputs: Any) -> Any:
        seen.update(inputs)
        return forward(**inputs)

    monkeypatch.setattr(model.bert, "forward", spy)
    targets: list[torch.Tensor] = []

    def listen(scores_MV: torch.Tensor, target_M: torch.Tensor) -> torch.Tensor:
        targets.append(target_M)
        return cross_entropy(scores_MV, target_M)

    monkeypatch.setattr(stage, "cross_entropy", listen)
    torch.manual_seed(1)
    module(batch_of(ids_BS))
    shown_BS = seen["input_ids"]
    assert targets[0].shape == (5000 * 4,)  # a quarter of 16 tokens
    assert not torch.isin(targets[0], torch.tensor([2, 3])).any()
    masked, changed = shown_BS == tokenizer.mask_token_id, shown_BS != ids_BS
    assert (changed.sum(1) <= 4).all()
    assert masked.float().sum() / 20_000 == pytest.approx(0.8, abs=0.01)
    assert (changed & ~masked).float().sum() / 20_000 == pytest.approx(0.1, abs=0.01)
    assert not changed[:, [0, 9, 17]].any()
    module(batch_of(ids_BS))
    assert not torch.equal(seen["input_ids"], shown_BS)  # others each time


def test_accuracy_counts_the_masked_tokens_only(root: Path) -> None:
    tokenizer = load_tokenizer(root / "base")
    model, _ = masked_lm(root / "base", tokenizer)
    film = tokenizer.convert_tokens_to_ids("film")
    with torch.no_grad():
        model.cls.predictions.bias[film] = 100.0  # it always answers "film"
    texts = [[2, film, film, 3], [2, 5, 6, 7, 8, 9, 10, 3]]
    found = masked_accuracy(model, texts, tokenizer, 0.5, "fp32", 0, WORLD)
    assert (found["texts"], found["masked_tokens"]) == (2, 1 + 3)
    assert found["top_1"]["share"] == 0.25
    low, high = found["top_1"]["interval_95"]
    assert (low, high) == (pytest.approx(0.046, abs=1e-3), pytest.approx(0.699, abs=1e-3))


def test_too_little_text_is_refused(root: Path, tmp_path: Path) -> None:
    few = tiny.examples(tmp_path / "few", train=2)
    with pytest.raises(DataError, match=r"the task's training text and adapt.corpus: its \d+ tokens fill \d blocks"):
        run(root, few, "few", block_tokens=64)


def test_blocks_that_the_model_cannot_read_are_refused(root: Path, corpus: Artifact) -> None:
    with pytest.raises(ModelError, match=r"adapt.block_tokens is 65 and the model .* reads at most 64 tokens"):
        run(root, corpus, "long", block_tokens=65)


def test_a_base_that_is_not_there_is_refused(root: Path, corpus: Artifact) -> None:
    with pytest.raises(SourceError, match=r"base is .*nowhere"):
        run(root, corpus, "lost", base="nowhere")


def test_an_interrupted_stage_goes_on_and_ends_the_same(
    root: Path, corpus: Artifact, made: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, steps = {"left": 20}, made.metrics["history"]["steps"]

    def cut(*arguments: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return cross_entropy(*arguments)

    monkeypatch.setattr(stage, "cross_entropy", cut)
    with pytest.raises(KeyboardInterrupt):
        run(root, corpus, "cut")
    calls["left"] = 10_000
    resumed = run(root, corpus, "cut")
    assert 0 < 10_000 - calls["left"] < steps
    assert resumed.manifest["files"] == made.manifest["files"]


def test_gradients_of_embeddings_that_are_an_output_layer_are_exchanged_whole(root: Path) -> None:
    model, _ = masked_lm(root / "base", load_tokenizer(root / "base"))
    peers: Any = None  # who are not asked yet
    assert _Exchange(model.bert, peers)._table is model.bert.embeddings.word_embeddings.weight
    assert _Exchange(model, peers)._table is None  # not by the rows of tokens in the batch: every row has one


@pytest.mark.slow
def test_two_processes_learn_as_well_as_one(root: Path, corpus: Artifact, made: Artifact) -> None:
    both = run(root, corpus, "both", processes=2)
    assert both.metrics["history"]["steps"] == made.metrics["history"]["steps"]
    assert both.metrics["at_start"] == made.metrics["at_start"]
    mine, theirs = (artifact.metrics["at_end"]["test"]["top_15"] for artifact in (both, made))
    assert mine["share"] == pytest.approx(theirs["share"], abs=0.15)
