"""Likely words: what a masked language model may answer, in which window, and that the batch has no say in it."""

from __future__ import annotations

import itertools
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel

from compressor.errors import ModelError
from compressor.stages.augment import masked_lm
from compressor.stages.augment.masked_lm import WORDS_APART, MaskedLM, load_masked_lm
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


@pytest.mark.parametrize(("cut", "whole"), [(1, False), (2, False), (3, False), (5, True)])
def test_a_piece_that_shares_its_characters_with_another_is_not_a_word(cut: int, whole: bool) -> None:
    """Such tokenizers take Hangul apart: a piece can end or begin within a character, and span the whole word."""
    letters = unicodedata.normalize("NFD", "사랑")
    lm = made((*PIECES, letters[:cut], f"##{letters[cut:]}"))
    (found,) = lm.answers([place("a 사랑 film", "사랑")], 5)
    assert bool(found) == whole


@pytest.mark.parametrize("words", [17, 18, 100])
def test_a_window_that_is_no_multiple_of_eight_is_not_padded_over(words: int) -> None:
    text = " ".join(["film"] * words)
    (found,) = made(window=20).answers([(text, eligible_words(text))], 3)
    assert len(found) == words


def test_control_characters_do_not_move_the_words() -> None:
    text = "a\x00 good\x1b \u200b film ."
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
    ((mask, *_),) = one.masks
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


@pytest.mark.parametrize("apart", [3, WORDS_APART])
def test_answers_do_not_depend_on_what_is_asked_beside_or_on_threads(apart: int) -> None:
    """Defect n of the published code is gone, and batches leave no trace."""
    asked = [(text, eligible_words(text)) for text in TEXTS]
    together = made(threads=3, apart=apart).answers(asked, 5)
    lm = made(apart=apart)
    assert [lm.answers([one], 5)[0] for one in asked] == together
    assert lm.answers(asked[::-1], 5)[::-1] == together
    assert lm.answers(asked * 40, 5) == together * 40


def test_groups_leave_no_trace_and_bound_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(text, eligible_words(text)) for text in TEXTS * 3]
    lm = made()
    expected = lm.answers(asked, 5)
    listed: list[int] = []
    batches = lm._batches

    def listing(passes: Any) -> Any:
        listed.append(len(passes))
        return batches(passes)

    monkeypatch.setattr(lm, "_batches", listing)
    for passes, texts in ((1, 1), (4, 2), (7, 100)):
        monkeypatch.setattr(masked_lm, "PASSES_AT_ONCE", passes)
        monkeypatch.setattr(masked_lm, "TEXTS_AT_ONCE", texts)
        assert lm.answers(asked, 5) == expected
        assert max(listed) == passes
        listed.clear()


@pytest.mark.parametrize(("apart", "passes"), [(1, 1), (2, 2), (5, 5), (20, 20), (1000, 30)])
def test_words_far_enough_apart_are_masked_in_one_pass(apart: int, passes: int) -> None:
    words = 30
    text = " ".join(["film", "plot", "good"] * 10)
    found = list(made(window=64, apart=apart)._passes([(text, eligible_words(text))]))
    plain = [PIECES.index(word) for word in text.split()]
    assert len(found) == passes
    assert sorted(mask.start for one in found for mask in one.masks) == [5 * number for number in range(words)]
    for one in found:
        places = [mask.place for mask in one.masks]
        assert all(after - before >= apart for before, after in itertools.pairwise(places))
        shown = list(one.ids)
        for mask in one.masks:
            assert shown[mask.place] == 4
            shown[mask.place] = mask.token
        assert shown == [2, *plain, 3]


def test_each_window_has_passes_of_its_own() -> None:
    text = " ".join(["film"] * 40)
    found = list(made(apart=1)._passes([(text, eligible_words(text))]))
    assert sum(len(one.masks) for one in found) == 40
    assert {len(one.ids) for one in found} == {WINDOW}
    assert len(found) == 5  # 14 tokens from the 1st, 8th, 15th, 22nd and 27th


def test_words_of_one_pass_are_hidden_from_each_other() -> None:
    text = "film " + "x " * 20 + "plot"
    alone, together = (
        made(window=64, apart=apart).answers([(text, eligible_words(text))], 5)[0] for apart in (1000, 5)
    )
    assert alone.keys() == together.keys() == {0, len(text) - 4}
    assert alone != together


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


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    folder = augmenting.saved_masked_lm(tmp_path / "lm")
    augmenting.tokenizer((*PIECES, "more")).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"the tokenizer has 27 tokens and the model 26 word embeddings; they do not"):
        load_masked_lm(folder)


@pytest.mark.parametrize("name", ["mask", "cls", "sep"])
def test_a_tokenizer_that_cannot_mask_is_refused(tmp_path: Path, name: str) -> None:
    folder = augmenting.saved_masked_lm(tmp_path / "lm")
    tokenizer = augmenting.tokenizer()
    setattr(tokenizer, f"{name}_token", None)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=rf"lm: the tokenizer has no {name} token, and no word can be masked without"):
        load_masked_lm(folder)
