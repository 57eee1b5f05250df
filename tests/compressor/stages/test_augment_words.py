"""Which words may change, and that everything between them stays byte for byte."""

from __future__ import annotations

import random
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from compressor.errors import ConfigError
from compressor.stages.augment.words import (
    ADDRESS,
    ENGLISH,
    RUN,
    TAG,
    Change,
    Word,
    changed,
    eligible_words,
    load_stop_words,
    written_like,
)

ANY_SPEED = hypothesis.settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)


def names(text: str, *, keep_names: bool = False) -> list[str]:
    return [word.text for word in eligible_words(text, keep_names=keep_names)]


def change(word: Word, new: str) -> Change:
    return Change(0, word.start, word.text, new, by_masked_lm=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The film is good.", ["film", "good"]),
        ("It was not good, never great", ["good", "great"]),
        ("NOT good; Never fine", ["good", "fine"]),
        ("don't can’t isn't won't", []),
        ("it wo n't , ca n't and ai n't do", []),
        ("dont wont cant isnt", []),
        ("is nt good", ["good"]),
        ("barely watchable", ["watchable"]),
        ("it lacks wit, fails, is unable and seldom good; nope, nah, noone oughtn daren", ["wit", "good"]),
        ("the film's plot and the actor ’s face", ["plot", "actor", "face"]),
        ("a well-made film", ["film"]),
        ("R2D2 and mp3 and 3rd", []),
        ("two films, three plots, a hundred actors", ["films", "plots", "actors"]),
        ("see www.films.com/good or mail@good.org", ["see"]),
        ("http://good.org/plot?film=great&fine=bad#end and example.com", []),
        ("write to good.film@plot.org now", ["write"]),
        ("C:\\films\\good plot", ["plot"]),
        ("#great @actor film_title", []),
        ('<a href="good film">plot</a>', ["plot"]),
        ("<br />good <i>film</i> &quot;plot&amp;", ["good", "film", "plot"]),
        ("good < film > plot", ["good", "film", "plot"]),
        ("x y", []),
        ("", []),
        ("!!! 42 ...", []),
        ("café déjà", ["café", "déjà"]),
        ("cafe\u0301 film", ["film"]),
        ("हिन्दी फिल्म", []),
        ("“good”film", ["good", "film"]),
        ("👍 good 👨‍👩‍👧 film", ["good", "film"]),
        ("فيلم جيد", ["فيلم", "جيد"]),
        ("good\x00film\x1bplot", ["good", "film", "plot"]),
        ("a beau\u00adti\u00adful film", ["film"]),
        ("film می\u200cخواهم", ["film"]),
        ("good\u200bfilm plot", ["plot"]),
        ("well\u2010made and well\u2011played plot", ["plot"]),
        ("a good\u2013fine film\u2014plot \u2015 actor", ["good", "fine", "film", "plot", "actor"]),
        ("a top-10 film, a Boeing-747, B-52", ["film"]),
        ("rock&roll, rock&2 film", ["film"]),
        ("class'99 and class’99, rating=5 film", ["film"]),
        ("good- and bad-looking film", ["good", "film"]),
    ],
)
def test_words_that_may_be_replaced(text: str, words: list[str]) -> None:
    """Defect p of the published code: what is no word of letters is not touched."""
    assert names(text) == words


def test_letters_without_spaces_are_one_word() -> None:
    """Defect o of the published code: no single characters of a Chinese text are words."""
    assert names("这部电影很好。 film") == ["这部电影很好", "film"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Films about Paris are good", ["Films", "good"]),
        ('A film. Paris is good! "Great plot" - Rome; NASA\'s', ["film", "Paris", "good", "Great", "plot"]),
        ("the film NASA made", ["film", "made"]),
        ("PARIS IS GOOD FILM", ["PARIS", "GOOD", "FILM"]),
        ("I love London", ["love"]),  # too few words to be a headline
        ("I, Tom, saw a film", ["saw", "film"]),
        ("Film. Plot. Good. Fine. Rome is a fine place", ["Film", "Plot", "Good", "Fine", "Rome", "fine", "place"]),
        ("Paris. Rome. Good. We saw Oslo there", ["Paris", "Rome", "Good", "saw"]),  # first words make no headline
        ("Good Film With A Plot", ["Good", "Film", "Plot"]),
        ("fine\nParis is fine", ["fine", "Paris", "fine"]),
    ],
)
def test_a_capital_within_a_sentence_is_a_name(text: str, words: list[str]) -> None:
    assert names(text, keep_names=True) == words


NEGATIONS = """
absence absent almost barely cannot devoid fail few fewer hardly instead lack lacking lacks least less lesser little
minus nearly neither never no nobody non none nor not nothing nowhere rarely scarcely seldom unable unlike without
"""


@pytest.mark.parametrize("negation", NEGATIONS.split())
def test_negations_are_never_replaced(negation: str) -> None:
    assert names(f"{negation} {negation.upper()} {negation.title()}") == []


def test_what_turns_the_meaning_round_stays_in_a_sentence() -> None:
    assert names("little wit, less charm, fewer laughs; an almost perfect non story") == [
        "wit",
        "charm",
        "laughs",
        "perfect",
        "story",
    ]


def test_stop_words_are_lower_case() -> None:
    assert {word.casefold() for word in ENGLISH} == ENGLISH


def test_stop_words_can_be_a_list_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("\ufeffnicht\nKein\n\nder\n", encoding="utf-8")
    words = load_stop_words(str(tmp_path / "de.txt"))
    assert words == {"nicht", "kein", "der"}
    assert [word.text for word in eligible_words("Der Film ist nicht the end", words)] == ["Film", "ist", "the", "end"]


def test_a_missing_or_empty_list_of_stop_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'stop_words is \'de\', and there is no such file; use "en" or the path of'):
        load_stop_words("de")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"empty\.txt holds no word; negations at least"):
        load_stop_words(str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"nicht\nf\xfcr\n")
    with pytest.raises(ConfigError, match=r"latin\.txt cannot be read: .*; save it as UTF-8 text"):
        load_stop_words(str(tmp_path / "latin.txt"))


@ANY_SPEED
@given(st.text())
def test_words_stand_where_they_say(text: str) -> None:
    for word in eligible_words(text):
        assert text[word.start : word.end] == word.text


LONG = ("a", "@", "<a", "a'", "电", "<b>good</b> ", "a@b.org good ", "Good film. ", "good\u0301 ")


@pytest.mark.parametrize("unit", LONG)
def test_a_text_ten_times_as_long_takes_no_hundred_times_as_long(unit: str) -> None:
    def least_s(text: str) -> float:
        """Of the processor, not of the clock: a busy machine does not count."""
        seconds = []
        for _ in range(3):
            started = time.thread_time()
            eligible_words(text, keep_names=True)
            seconds.append(time.thread_time() - started)
        return min(seconds)

    short = unit * (10_000 // len(unit))
    assert least_s(short * 10) < 30 * least_s(short) + 0.01


@ANY_SPEED
@given(st.text(alphabet="ab<>/@. '", max_size=60))
def test_no_word_stands_in_a_tag_or_an_address(text: str) -> None:
    spans = [match.span() for match in TAG.finditer(text)]
    spans += [run.span() for run in RUN.finditer(text) if ADDRESS.search(run.group())]
    for word in eligible_words(text, frozenset()):
        assert not any(first < word.end and word.start < last for first, last in spans)


@pytest.mark.parametrize(
    ("candidate", "word", "written"),
    [
        ("movie", "film", "movie"),
        ("movie", "Film", "Movie"),
        ("movie", "FILM", "MOVIE"),
        ("élan", "Film", "Élan"),
        ("movie", "iPhone", "movie"),
    ],
)
def test_a_candidate_takes_the_capitals_of_the_word(candidate: str, word: str, written: str) -> None:
    assert written_like(candidate, word) == written


@ANY_SPEED
@given(st.text(), st.integers(0, 2**32))
def test_text_outside_the_replaced_words_is_kept_byte_for_byte(text: str, seed: int) -> None:
    """Defects d and e of the published code: no spacing, case, accent or quote changes."""
    words = eligible_words(text)
    chosen = random.Random(seed).sample(words, k=random.Random(seed).randint(0, len(words)))
    chosen.sort(key=lambda word: word.start)
    copy = changed(text, [change(word, "\x00") for word in chosen])
    outside, end = [], 0
    for word in chosen:
        outside.append(text[end : word.start])
        end = word.end
    assert copy.split("\x00") == [*outside, text[end:]] or "\x00" in text


def test_spaces_quotes_accents_and_case_around_a_replacement_stay() -> None:
    """Defects d and e of the published code."""
    text = '  He said  "GOOD"\tfilm —\u2028Café, naïve\r\n'
    word = next(word for word in eligible_words(text) if word.text == "film")
    assert changed(text, [change(word, "movie")]) == text.replace("film", "movie")
