"""Which words of a text may be replaced, and how a replacement is written in their place."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from unicodedata import category

from compressor.sources import STOP_WORDS, word_list

# Letters, with inner apostrophes and hyphens, so that "don't" and "well-made" are one word each.
WORD = re.compile(r"[^\W\d_]+(?:['’\-][^\W\d_]+)*")
# What may be put in a word's place: no fragment of one, no number, no sign.
LETTERS = re.compile(r"[^\W\d_]{2,}")
# Words whose replacement changes the grammar or the meaning rather than the wording. Negations are here on purpose:
# replacing one would turn the label around; so are the stems of split ones ("wo n't"), forms without apostrophe, and
# numbers, and words that say that something is not so, or not quite ("barely funny", "lacks wit", "less charm", "almost
# perfect").
_ENGLISH = """
a about above absence absent after again against ai ain aint all almost also although am among an and any anybody
anyone anything are aren arent around as at barely be because been before being below between billion both but by ca
can can't cannot cant could couldn couldn't couldnt daren darent despite devoid did didn didn't didnt do does doesn
doesn't doesnt doing don don't dont down dozen during each eight eighteen eighty either eleven else ever every fail
failed failing fails few fewer fifteen fifth fifty first five for forty four fourteen fourth from further had hadn
hadn't hadnt half hardly has hasn hasn't hasnt have haven haven't havent having he he's her here hers herself him
himself his how however hundred i i'd i'll i'm i've if in instead into is isn isn't isnt it it's its itself just lack
lacked lacking lacks least less lesser lest like little may me might mightn mightnt million minus more most much must
mustn mustnt my myself n't nah nary nearly needn neednt neither never nevertheless nil nine nineteen ninety no nobody
non none noone nope nor not nothing now nowhere nt of off often on once one only or other ought oughtn oughtnt our ours
ourselves out over own per rarely rather s same sans scarcely second seldom seven seventeen seventy sha shall shan
shan't shant she she's should shouldn shouldn't shouldnt since six sixteen sixty so some somebody someone something
such t ten than that that's the their theirs them themselves then there there's these they they're third thirteen
thirty this those though thousand three through thus to too toward towards twelve twenty twice two unable under unless
unlike until up upon us very was wasn wasn't wasnt we we're were weren weren't werent what when where whether which
while who whom whose why will with within without wo won won't wont would wouldn wouldn't wouldnt yet you you're your
yours yourself yourselves zero
"""
ENGLISH = frozenset(_ENGLISH.split())

# Addresses, handles, tags of HTML: nothing in them is a word.
ADDRESS = re.compile(r"://|@|www\.")
RUN = re.compile(r"\S+")
TAG = re.compile(r"<[A-Za-z/!][^<>]*>")
# Next to one of these a word is a part of something: a handle, a file name, a possessive, a topic, an entity.
JOINS_BEFORE = tuple("_@#/.-’'<&=\\")
JOINS_AFTER = re.compile(r"[\w@/\\]|[.\-’'=]\w|&(?!\w+;)\w|://")  # not &amp;
DASHES = "\u2013\u2014\u2015"  # that stand between words; every other dash joins them
# Before a sentence's first word: nothing, or what ends another, with quotes and the like between.
SENTENCE_START = re.compile(r"(?:^|[.!?:;…。\n\r\u2028\u2029])[^\w.!?:;…]*$")
LOOK_BACK = 20  # characters before a word in which the end of the sentence before it is looked for
HEADLINE_WORDS = 3  # fewer cannot tell a headline from a sentence with a name: "I love London"


@dataclass(frozen=True)
class Word:
    """A replaceable word and where it stands."""

    start: int
    """First character in the text."""
    end: int
    """One past its last character."""
    text: str
    """As written."""


class Change(NamedTuple):
    """A word and what is put in its place."""

    side: int
    """Which text it is in: 0, or 1 for the second of a pair."""
    start: int
    """First character of the word in the text before any change."""
    old: str
    new: str
    by_masked_lm: bool
    """Whether the masked language model proposed it, else the word vectors."""


def load_stop_words(name: str) -> frozenset[str]:
    """The words that are never replaced, case-folded: the English ones for `en`, else those of a file, one a line.

    Raises ConfigError if there is no such list, or if it is empty.
    """
    return ENGLISH if name == "en" else word_list(name, what=STOP_WORDS)


def eligible_words(text: str, stop_words: frozenset[str] = ENGLISH, *, keep_names: bool = False) -> list[Word]:
    """Words that may be replaced: letters only, no stop word, no part of an address, a number or a hyphenated word.

    With `keep_names` no word with a capital that is not the first of a sentence either, unless most words within the
    sentences have one, as in a headline. Letters of scripts without spaces (Chinese, Japanese, Thai) in a row count as
    one word.
    """
    untouchable = [match.span() for match in TAG.finditer(text)]
    if ADDRESS.search(text):
        untouchable = sorted(untouchable + [run.span() for run in RUN.finditer(text) if ADDRESS.search(run.group())])
    firsts = [first for first, _ in untouchable]
    reaches = list(accumulate((last for _, last in untouchable), max))  # the furthest end so far
    matches = list(WORD.finditer(text))
    keep_names = keep_names and not _is_headline(text, matches)
    found = []
    for match in matches:
        word, (start, end) = match.group(), match.span()
        if len(word) < 2 or not word.isalpha() or word.casefold() in stop_words:
            continue
        before, after = text[max(0, start - 1) : start], text[end : end + 1]
        if before.isalnum() or before in JOINS_BEFORE or JOINS_AFTER.match(text, end):
            continue
        if not (before + after).isascii() and any(map(_joins, before + after)):
            continue
        spans = bisect_left(firsts, end)  # that begin before the word ends
        if spans and reaches[spans - 1] > start:
            continue
        if keep_names and word[0].isupper() and not _starts_sentence(text, start):
            continue
        found.append(Word(start, end, word))
    return found


def _is_headline(text: str, words: Iterable[re.Match[str]]) -> bool:
    """Whether most words have a capital where a sentence would not give them one, so that it tells no name."""
    within = [word for word in words if len(word.group()) > 1 and not _starts_sentence(text, word.start())]
    return len(within) >= HEADLINE_WORDS and 2 * sum(word.group()[0].isupper() for word in within) > len(within)


def _starts_sentence(text: str, start: int) -> bool:
    return SENTENCE_START.search(text[max(0, start - LOOK_BACK) : start]) is not None


def _joins(sign: str) -> bool:
    """Whether a sign beyond ASCII makes one word of what is before and after it.

    Accents and vowel signs of their own do, signs that cannot be seen (soft hyphen, zero-width joiner), and hyphens.
    """
    kind = category(sign)
    return kind.startswith("M") or kind == "Cf" or (kind == "Pd" and sign not in DASHES)


def written_like(candidate: str, word: str) -> str:
    """The candidate with the capitals of the word it replaces."""
    if word.isupper() and len(word) > 1:
        return candidate.upper()
    return candidate[:1].upper() + candidate[1:] if word[:1].isupper() else candidate


def changed(text: str, changes: Iterable[Change]) -> str:
    """`text` after some changes, in their order in it; everything between them stays as it is, byte for byte."""
    parts, end = [], 0
    for change in changes:
        parts += [text[end : change.start], change.new]
        end = change.start + len(change.old)
    return "".join([*parts, text[end:]])
