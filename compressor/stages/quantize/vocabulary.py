"""A smaller vocabulary: the word pieces that given texts use, and what any word can be spelt with.

A word whose pieces are gone is cut into smaller ones, down to letters, if its script is in the texts; the tokenizer
stays a WordPiece tokenizer.
Shape legend: V pieces before, W pieces after, D width.
"""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from compressor import onnx_graph
from compressor.checkpoints import load_tokenizer
from compressor.dataset import Encoded
from compressor.errors import ModelError
from compressor.texts import read_texts

ROWS_AT_ONCE = 1024

Pieces = NDArray[np.int64]
"""Ids of word pieces."""


def used_pieces(tokenizer: Any, examples: Encoded, sources: Iterable[str], column: str = "text") -> Pieces:
    """What to keep (W), in order: special ones, what the rows and sources' texts use, and single characters.

    These are the characters of any text, and all of the scripts that the texts use, so that other words of these can
    be spelt.
    """
    used_V = np.zeros(len(tokenizer), dtype=bool)
    used_V[tokenizer.all_special_ids] = True
    for first in range(0, len(examples), ROWS_AT_ONCE):
        rows = np.arange(first, min(first + ROWS_AT_ONCE, len(examples)))
        used_V[np.unique(examples.batch(rows).inputs.input_ids_BS)] = True
    for number, source in enumerate(sources):
        for text in read_texts(source, column, what=f"quantize.vocabulary_texts.{number}"):
            used_V[tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids] = True
    letters = {number: piece.removeprefix("##") for piece, number in tokenizer.get_vocab().items()}
    scripts = {script(letter) for number in np.flatnonzero(used_V) for letter in letters[int(number)]} - {""}
    for number, letter in letters.items():
        used_V[number] |= len(letter) == 1 and (in_any_text(letter) or script(letter) in scripts)
    return np.flatnonzero(used_V)


def in_any_text(letter: str) -> bool:
    """Whether a character is in texts of any kind: ASCII, punctuation, a symbol, or a Latin letter."""
    latin = unicodedata.name(letter, "").startswith("LATIN ")
    return letter.isascii() or latin or unicodedata.category(letter)[0] in "PS"


def script(letter: str) -> str:
    """The script that a letter or a sign on one is of, by its name: CYRILLIC, HANGUL; nothing of other characters."""
    return unicodedata.name(letter, "").split(" ")[0] if unicodedata.category(letter)[0] in "LM" else ""


def unknown_share(tokenizer: Any, examples: Encoded) -> float:
    """Share of [UNK] among the pieces of texts, as the tokenizer cut them; special pieces count too."""
    unknown = pieces = 0
    for first in range(0, len(examples), ROWS_AT_ONCE):
        inputs = examples.batch(np.arange(first, min(first + ROWS_AT_ONCE, len(examples)))).inputs
        unknown += int((inputs.input_ids_BS == tokenizer.unk_token_id).sum())
        pieces += int(inputs.mask_BS.sum())
    return unknown / pieces


def trim(student: Path, kept_W: Pieces, out: Path) -> None:
    """Write the student in `student` (ONNX, configuration, tokenizer) to `out` with the pieces of these ids alone.

    Raises ModelError if its tokenizer is not WordPiece.
    """
    out.mkdir()
    shutil.copyfile(student / "config.json", out / "config.json")
    model = onnx.load(student / "model.onnx")
    trim_table(model, kept_W)
    onnx.save(model, out / "model.onnx")
    onnx_graph.check(out / "model.onnx")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = len(kept_W)
    config["pad_token_id"] = int(np.searchsorted(kept_W, config.get("pad_token_id") or 0))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    load_tokenizer(student).save_pretrained(out)
    trim_tokenizer(out, kept_W)


def trim_table(model: Any, kept_W: Pieces) -> None:
    """Keep these rows of the table that `input_ids` are looked up in, in place."""
    name, table_VD = onnx_graph.word_embeddings(model)
    table = next(item for item in model.graph.initializer if item.name == name)
    table.CopyFrom(numpy_helper.from_array(table_VD[kept_W], name))


def trim_tokenizer(folder: Path, kept_W: Pieces) -> None:
    """Keep these pieces of the tokenizer saved in `folder`, with new ids in the old order, everywhere it names them."""
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text(encoding="utf-8"))
    if rules["model"]["type"] != "WordPiece":
        raise ModelError(
            f"the tokenizer is {rules['model']['type']}; only a WordPiece vocabulary can be trimmed; "
            "set quantize.trim_vocabulary to false"
        )
    new = {int(old): number for number, old in enumerate(kept_W)}
    vocabulary = sorted((number, piece) for piece, number in rules["model"]["vocab"].items() if number in new)
    rules["model"]["vocab"] = {piece: new[number] for number, piece in vocabulary}
    rules["added_tokens"] = [{**token, "id": new[token["id"]]} for token in rules["added_tokens"] if token["id"] in new]
    processor = rules["post_processor"]
    for token in processor.get("special_tokens", {}).values():  # of TemplateProcessing
        token["ids"] = [new[number] for number in token["ids"]]
    for end in {"sep", "cls"} & processor.keys():  # of BertProcessing
        processor[end][1] = new[processor[end][1]]
    if rules.get("padding"):
        rules["padding"]["pad_id"] = new[rules["padding"]["pad_id"]]
    file.write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for _, piece in vocabulary), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "added_tokens_decoder" in settings:
        decoder = settings["added_tokens_decoder"]
        settings["added_tokens_decoder"] = {
            str(new[int(old)]): token for old, token in decoder.items() if int(old) in new
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
