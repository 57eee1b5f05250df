"""Likely words: what a masked language model may answer, in which window, and that the batch has no say in it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel

from compressor.errors import ModelError
from compressor.stages.augment.masked_lm import MaskedLM, load_masked_lm
from compressor.stages.augment.words import ENGLISH, Word, eligible_words
from tests import augmenting
from tests.augmenting import CONTENT, PIECES, WINDOW


def made(pieces: Sequence[str] = PIECES, *, lowercase: bool = True, window: int = WINDOW, **given: Any) -> MaskedLM:
    tokenizer = augmenting.tokenizer(pieces, lowercase=lowercase)
    return MaskedLM(augmenting.bert(len(pieces), window=window), tokenizer, **given)


def place(text: str, word: str) -> tuple[str, list[Word]]:
    start = text.index(word)
    return text, [Word(start, start + len(word), word)]


def ask(lm: MaskedLM, text: str, word: str, count: int = 100) -> list[str]:
    ((found,),) = (answers.values() for answers in lm.answers([place(text, word)], count))
    return list(found)


def test_answers_are_whole_words_of_the_vocabulary() -> None:
    """Defect b of the published code: neither the word itself, nor a fragment, a sign or a special token."""
    assert set(ask(made(), "a good film", "film")) == set(CONTENT) - {"film"}


@pytest.mark.parametrize("written", ["film", "Film", "FILM"])
def test_answers_never_hold_the_word_itself(written: str) -> None:
    assert "film" not in ask(made(), f"a good {written}", written)


def test_answers_never_hold_the_word_as_the_model_reads_it() -> None:
    assert "film" not in ask(made(), "a good fílm", "fílm")


def test_answers_of_a_cased_model_hold_no_stop_word_and_no_twin() -> None:
    lm = made((*PIECES, "Film", "Not", "The"), lowercase=False)
    assert not {"Film", "Not", "The"} & set(ask(lm, "a good film", "film"))


def test_answers_with_other_stop_words() -> None:
    assert set(CONTENT) - {"film", "movie"} | {"the", "not"} == set(
        ask(made(stop_words=frozenset({"movie"})), "a good film", "film")
    )


@pytest.mark.parametrize("count", [1, 4])
def test_answers_are_as_many_as_asked_for(count: int) -> None:
    found = ask(made(), "a good film", "film", count)
    assert len(found) == len(set(found)) == count


def test_answers_are_the_likeliest_by_the_whole_model() -> None:
    tokenizer = augmenting.tokenizer()
    ids = tokenizer("a good [MASK] .", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        scores_V = augmenting.bert()(ids).logits[0, 3]
    expected = sorted(set(CONTENT) - {"film"}, key=lambda word: -scores_V[PIECES.index(word)])
    assert ask(made(), "a good film .", "film", 5) == expected[:5]


def test_the_model_does_not_see_the_word_it_replaces() -> None:
    """Defect b of the published code: there the model reads the unmasked text beside the masked one."""
    films, movies = (ask(made(), f"a good {word} .", word) for word in ("film", "movie"))
    assert [word for word in films if word != "movie"] == [word for word in movies if word != "film"]


@pytest.mark.parametrize(
    ("word", "whole"), [("film", True), ("Film", True), ("films", False), ("zyzzyva", False), ("e" * 200, False)]
)
def test_only_a_word_that_is_one_piece_has_answers(word: str, whole: bool) -> None:
    """Defect p of the published code: what the tokenizer does not know, or gives up, is not one piece."""
    (found,) = made().answers([place(f"a good {word} .", word)], 5)
    assert bool(found) == whole


def test_control_characters_do_not_move_the_words() -> None:
    text = "a\x00 good\x1b film\u200b ."
    lm = made()
    (found,) = lm.answers([(text, eligible_words(text))], 5)
    assert {text[start : start + 4] for start in found} == {"good", "film"}


@pytest.mark.parametrize("words", [1, WINDOW - 2, WINDOW - 1, 40, 200])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 1.0])
def test_a_text_over_the_window_is_read_where_the_word_is(words: int, where: float) -> None:
    """Defect a of the published code: there the limit is a number in the code, and what is behind it is cut off."""
    before = int(where * (words - 1))
    text = " ".join(["good"] * before + ["film"] + ["bad"] * (words - 1 - before))
    (one,) = made()._passes([place(text, "film")])
    mask = one.mask
    assert len(one.ids) == min(words + 2, WINDOW)
    assert (one.ids[0], one.ids[mask], one.ids[-1]) == (2, 4, 3)
    assert one.ids[1:mask] == [PIECES.index("good")] * (mask - 1)
    assert one.ids[mask + 1 : -1] == [PIECES.index("bad")] * (len(one.ids) - mask - 2)
    quarter = (WINDOW - 2) // 4
    assert min(mask - 1, before) >= min(before, quarter)
    assert len(one.ids) - mask - 2 >= min(words - 1 - before, quarter)


@pytest.mark.parametrize("word", ["film", "good"])
def test_every_word_of_a_long_text_has_answers(word: str) -> None:
    """Defect a of the published code."""
    text = " ".join([word] * 900)
    (found,) = made(threads=2).answers([(text, eligible_words(text))], 3)
    assert sorted(found) == [5 * number for number in range(900)]
    assert {len(words) for words in found.values()} == {3}


TEXTS = ("a good film", "film", "the plot is bad , the film is good , the end", "a film . " * 9, "bad")


def test_answers_do_not_depend_on_what_is_asked_beside_or_on_threads() -> None:
    """Defect n of the published code is gone, and batches leave no trace."""
    asked = [(text, eligible_words(text)) for text in TEXTS]
    together = made(threads=3).answers(asked, 5)
    lm = made()
    assert [lm.answers([one], 5)[0] for one in asked] == together
    assert lm.answers(asked[::-1], 5)[::-1] == together
    assert lm.answers(asked * 40, 5) == together * 40


def test_batches_have_a_few_shapes_and_hold_every_pass_once() -> None:
    lm = made()
    passes = list(lm._passes([(text, eligible_words(text)) for text in TEXTS * 50]))
    batches = list(lm._batches(list(passes)))
    assert sorted(id(one) for batch in batches for one in batch) == sorted(map(id, passes))
    for batch in batches:
        assert len({-(-len(one.ids) // 8) for one in batch}) == 1
        assert len(batch) <= 1024 // len(batch[0].ids)


def test_pytorch_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    ask(made(threads=2), "a good film", "film")
    assert torch.get_num_threads() == before


def test_a_masked_lm_is_loaded_from_a_folder(tmp_path: Path) -> None:
    asked = place("a good film", "film")
    assert load_masked_lm(augmenting.saved_masked_lm(tmp_path)).answers([asked], 5) == made().answers([asked], 5)


def test_a_masked_lm_is_loaded_from_a_pickle_of_tensors_without_the_twins(tmp_path: Path) -> None:
    folder = Path(augmenting.saved_masked_lm(tmp_path / "new"))
    state = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
        if "decoder" not in name
    }
    shutil.copytree(folder, tmp_path / "old", ignore=lambda *_: ["model.safetensors"])
    torch.save(old, tmp_path / "old" / "pytorch_model.bin")
    asked = place("a good film", "film")
    assert load_masked_lm(str(tmp_path / "old")).answers([asked], 5) == made().answers([asked], 5)


def test_an_encoder_without_masked_lm_head_is_refused(tmp_path: Path) -> None:
    BertModel(augmenting.bert().config).save_pretrained(tmp_path)
    augmenting.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks \d+ weights of a masked language model \(first: cls\..*head"):
        load_masked_lm(str(tmp_path))


def test_a_head_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = Path(augmenting.saved_masked_lm(tmp_path))
    config = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config.replace(f'"vocab_size": {len(PIECES)}', '"vocab_size": 99'))
    with pytest.raises(ModelError, match=r"has .* of shape \(26, 16\); its config.json asks for \(99, 16\)"):
        load_masked_lm(str(folder))


def test_stop_words_are_no_answers_by_default() -> None:
    assert not ENGLISH & set(ask(made(), "a good film", "film"))
