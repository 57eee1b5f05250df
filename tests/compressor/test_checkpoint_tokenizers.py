"""Tokenizers of checkpoints that come without all of their files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from compressor.checkpoints import (
    check_vocabulary,
    load_tokenizer,
)
from compressor.errors import ModelError, SourceError
from tests import tiny

# Tokenizers


def bare(folder: Path, *, words: tuple[str, ...] = tiny.WORDS, **config: Any) -> Path:
    """A folder with vocab.txt and config.json and no more."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16} | config))
    return folder


CASED = (*tiny.WORDS, "Good")


def test_a_vocabulary_is_enough_for_a_tokenizer(tmp_path: Path) -> None:
    made, given = load_tokenizer(bare(tmp_path / "bare")), tiny.tokenizer(tmp_path / "whole")
    text = "A GOOD film, films, ünknown"
    assert made(text, "and this.")["input_ids"] == given(text, "and this.")["input_ids"]
    assert made.is_fast


@pytest.mark.parametrize(
    ("words", "config", "tokenizer_config", "lowers", "file"),
    [
        (tiny.WORDS, {}, {}, True, "vocab.txt"),
        ((*tiny.WORDS, "ℝ", "[unused1]", "[A]"), {}, {}, True, "vocab.txt"),
        (CASED, {}, {}, False, "vocab.txt"),
        (CASED, {"do_lower_case": True}, {}, True, "config.json"),
        (tiny.WORDS, {"do_lower_case": False}, {}, False, "config.json"),
        (tiny.WORDS, {"do_lower_case": True}, {"do_lower_case": False}, False, "tokenizer_config.json"),
    ],
)
def test_whether_a_bare_tokenizer_lower_cases(
    tmp_path: Path,
    caplog: Any,
    words: tuple[str, ...],
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    lowers: bool,
    file: str,
) -> None:
    folder = bare(tmp_path, words=words, **config)
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    with caplog.at_level(logging.INFO, logger="compressor"):
        tokens = load_tokenizer(folder).tokenize("GOOD")
    assert tokens == (["good"] if lowers else ["[UNK]"])
    assert caplog.messages == [f"tokenizer of {folder}: {'lower-cases' if lowers else 'keeps capitals'}, by its {file}"]


@pytest.mark.parametrize("lowers", [True, False])
def test_a_tokenizer_json_alone_keeps_its_case(tmp_path: Path, lowers: bool) -> None:
    load_tokenizer(bare(tmp_path / "bare", do_lower_case=lowers)).save_pretrained(tmp_path / "alone")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (tmp_path / "alone" / name).unlink()
    assert load_tokenizer(tmp_path / "alone").tokenize("GOOD") == (["good"] if lowers else ["[UNK]"])


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    model = tiny.bert(vocab_size=len(tiny.WORDS) - 1)
    message = rf"has {len(tiny.WORDS)} tokens and the model {len(tiny.WORDS) - 1} word embeddings"
    with pytest.raises(ModelError, match=message):
        check_vocabulary(model, tiny.tokenizer(tmp_path), tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.bert().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"holds no tokenizer that can be loaded; save it with save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
