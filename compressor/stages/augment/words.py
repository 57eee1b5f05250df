"""Which words of a text may be replaced, and how a replacement is written in their place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from unicodedata import category

# Letters, with inner apostrophes and hyphens, so that "don't" and "well-made" are one word each.
WORD = re.compile(r"[^\W\d_]+(?:['’\-][^\W\d_]+)*")
# Words whose replacement changes the grammar or the meaning rather than the wording. Negations are here on purpose:
# replacing one would turn the label around; so are the stems of split ones ("wo n't") and forms without apostrophe.
STOP_WORDS = frozenset(
    """
    a about above after again against ai ain aint all also although am among an and any anybody anyone anything
    are aren arent around as at be because been before being below between both but by ca can can't cannot cant
    could couldn couldn't couldnt did didn didn't didnt do does doesn doesn't doesnt doing don don't dont down
    during each either else ever every few for from further had hadn hadn't hadnt hardly has hasn hasn't hasnt
    have haven haven't havent having he he's her here hers herself him himself his how however i i'd i'll i'm
    i've if in into is isn isn't isnt it it's its itself just lest like may me might mightn mightnt more most
    much must mustn mustnt my myself n't needn neednt neither never nevertheless no nobody none nor not nothing
    now nowhere of off often on once only or other ought our ours ourselves out over own per rather s same
    scarcely sha shall shan shan't shant she she's should shouldn shouldn't shouldnt since so some somebody
    someone something such t than that that's the their theirs them themselves then there there's these they
    they're this those though through thus to too toward towards under unless until up upon us very was wasn
    wasn't wasnt we we're were weren weren't werent what when where whether which while who whom whose why will
    with within without wo won won't wont would wouldn wouldn't wouldnt yet you you're your yours yourself
    yourselves
    """.split()  # noqa: SIM905  (a list of 250 quoted words would be harder to read)
)


# Next to one of these a word is a part of something: an address, a handle, a file name, a possessive, a tag, an entity.
JOINS_BEFORE = tuple("_@#/.-’'<&")
JOINS_AFTER = re.compile(r"[\w@/]|\.\w|://")


@dataclass(frozen=True)
class Word:
    """A replaceable word and where it stands."""

    start: int
    """First character in the text."""
    end: int
    """One past its last character."""
    text: str
    """As written."""


def eligible_words(text: str, stop_words: frozenset[str] = STOP_WORDS) -> list[Word]:
    """Words that may be replaced: letters only, no stop word, no part of an address, a number or a hyphenated word."""
    found = []
    for match in WORD.finditer(text):
        word = match.group()
        before, after = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
        # An accent or a vowel sign of its own belongs to the letter before it.
        marked = any(category(sign).startswith("M") for sign in before + after)
        joined = marked or before.isalnum() or before in JOINS_BEFORE or JOINS_AFTER.match(text, match.end())
        if word.isalpha() and not joined and len(word) > 1 and word.casefold() not in stop_words:
            found.append(Word(match.start(), match.end(), word))
    return found


def written_like(candidate: str, word: str) -> str:
    """The candidate with the capitals of the word it replaces."""
    if word.isupper() and len(word) > 1:
        return candidate.upper()
    return candidate[:1].upper() + candidate[1:] if word[:1].isupper() else candidate


def replaced(text: str, choices: list[tuple[Word, str]]) -> str:
    """`text` with some words replaced; everything between them stays as it is, byte for byte."""
    parts, end = [], 0
    for word, candidate in choices:
        parts += [text[end : word.start], written_like(candidate, word.text)]
        end = word.end
    return "".join([*parts, text[end:]])
