"""The model that runs inside the server: long texts are cut before they are tokenised, with the same answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from serving import ServedModel, inprocess, write
from serving.inprocess import shorten
from tests.serving.conftest import Spy, answers
from tests.serving.test_entry_pairs import PIECES


@pytest.fixture
def entry(make_model: Callable[..., ServedModel], load_entry: Callable[[Path], Any], tmp_path: Path) -> Any:
    return load_entry(write(make_model(), tmp_path / "repository")[0])


def readers(kit: Any, folder: Path) -> Iterator[Tokenizer]:
    """Tokenizers of BERT, with and without accents and Chinese characters for words, and one of bytes as GPT-2 has."""
    words = (*kit.WORDS, "##d", "##film", "x", "\u1106", "##\u1161", "i", "##\u0307", "e", "##\u0301", "!", "[", "##fi")
    for strip, chinese in ((True, True), (False, True), (True, False), (False, False)):
        reader = Tokenizer.from_file(str(kit.write_tokenizer(folder / "pieces.json", words=(*words, "好", "##好"))))
        reader.normalizer = normalizers.BertNormalizer(strip_accents=strip, handle_chinese_chars=chinese)
        yield reader
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reader = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    reader.pre_tokenizer, reader.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    yield reader


@pytest.mark.parametrize("max_tokens", [3, 4, 12, 13])
@pytest.mark.parametrize("kind", range(5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_long_texts_are_tokenised_as_if_they_were_whole(
    kit: Any, tmp_path: Path, entry: Any, kind: int, max_tokens: int, data: st.DataObject
) -> None:
    reader = list(readers(kit, tmp_path))[kind]
    reader.add_special_tokens(["[SEP]", AddedToken("good good [x]", lstrip=True, special=True)])
    reader.enable_truncation(max_tokens)
    entry.tokenizer, entry.max_tokens = reader, max_tokens
    # Each piece many times, so that parts end in the middle of every kind of run.
    pieces = st.tuples(st.sampled_from((*PIECES, "好", "good good [x", "x] ")), st.integers(1, 90))
    runs = data.draw(st.lists(pieces, min_size=1, max_size=12))
    text = "".join(piece * count for piece, count in runs)
    (whole,), (cut,) = reader.encode_batch_fast([text]), entry.tokenise([[text]])
    assert (cut.ids, cut.type_ids, cut.sequence_ids) == (whole.ids, whole.type_ids, whole.sequence_ids)
    assert bool(cut.overflowing) == bool(whole.overflowing)
    assert shorten(text, reader, max_tokens) == entry.shorten(text)


def test_what_reads_the_files_without_a_server_has_the_same_bounds(entry: Any) -> None:
    served = entry.shorten.__globals__
    for name in ("PAD_MULTIPLE", "LONG_PAIR", "LONG_TEXT", "LONGEST_ADDED"):
        assert vars(inprocess)[name] == served[name]


def test_long_texts_lose_what_is_not_read(entry: Any) -> None:
    # max_tokens is 12: parts of 96, 1,536, ... characters, the last words of which are not trusted.
    assert entry.shorten("good " * 38 + "g") == "good " * 38 + "g"
    assert entry.shorten("good " * 10_000) == ("good " * 10_000)[:1_536]
    assert entry.shorten("好" * 30_000) == "好" * 1_536
    assert entry.shorten("\u200b" * 3_000 + "good " * 9_000) == "\u200b" * 3_000 + ("good " * 9_000)[:21_576]
    for read_whole in ("a" * 100_000, " " * 50_000 + "good", "\u200b" * 30_000 + "é"):
        assert entry.shorten(read_whole) == read_whole


def test_a_batch_of_the_longest_texts_is_not_read_whole_and_says_that_they_were_cut(kit: Any, entry: Any) -> None:
    long = [kit.text_request("good film " * 10_000) for _ in range(63)]
    entry.tokenizer = spy = Spy(entry.tokenizer)
    *cut, short = entry.execute([*long, kit.text_request("good")])
    # Whole they are 6,300,000 characters, and take seconds. Of each, parts of 96 and 1,536 characters are looked at,
    # and the second one is read.
    assert spy.read == {"encode": 63 * (96 + 1_536), "encode_batch_fast": 63 * 1_536 + len("good")}
    assert all(response.outputs["TRUNCATED"].tolist() == [[True]] for response in cut)
    assert short.outputs["TRUNCATED"].tolist() == [[False]]
    assert answers(entry, long[0]) == [["positive"]]
