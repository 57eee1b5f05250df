"""Graphs and tokenizers that a server could not run are refused before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from serving import ModelError, ServedModel
from serving.sources import read_source


def test_inputs_padding_and_warmup_ids_are_read(kit: Any, make_model: Callable[..., ServedModel]) -> None:
    source = read_source(make_model(max_tokens=4))
    assert source.inputs == kit.ALL_INPUTS
    assert source.pad_id == 0
    assert source.warmups == (((2, 1, 4, 3), (0, 0, 0, 0)), ((2, 1, 5, 3), (0, 0, 0, 0)))


def test_warmup_pairs_are_cut_from_the_longer_text_and_carry_their_segments(kit: Any, tmp_path: Path) -> None:
    pairs = (("good", "bad film"), ("good bad fine film", "é"))
    source = read_source(kit.pair_model(tmp_path, max_tokens=6, warmup_texts=pairs))
    assert source.warmups == (((2, 4, 3, 5, 7, 3), (0, 0, 0, 1, 1, 1)), ((2, 4, 5, 3, 8, 3), (0, 0, 0, 0, 1, 1)))


def test_regression_must_have_one_column(kit: Any, tmp_path: Path) -> None:
    assert read_source(kit.score_model(tmp_path)).inputs == kit.ALL_INPUTS
    with pytest.raises(
        ModelError, match=r"logits has .* \['batch', 2\]; it must be float32 \[batch, 1\] for a regression"
    ):
        read_source(kit.score_model(tmp_path, onnx=kit.write_graph(tmp_path / "two.onnx")))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"inputs": ("input_ids", "attention_mask", "ids")}, "has the inputs .*'ids'.*; it must have"),
        ({"kind": TensorProto.INT32}, r"input_ids has the element type 6 .*it must be int64 \[batch, sequence\]"),
        ({"rows": 1}, r"input_ids has .* \[1, 'sequence'\]; .*dynamic axes"),
        ({"output": "scores"}, r"has the outputs \('scores',\); one must be `logits`"),
        (
            {"weights": np.zeros((9, 3), np.float32)},
            r"logits has .* \['batch', 3\]; it must be float32 \[batch, 2 labels\]",
        ),
    ],
)
def test_graph_that_does_not_fit_is_refused(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path, graph: dict[str, Any], message: str
) -> None:
    file = kit.write_graph(tmp_path / "other.onnx", **graph)
    with pytest.raises(ModelError, match=message):
        read_source(make_model(onnx=file))


def test_graph_with_weights_in_a_second_file_is_refused(make_model: Callable[..., ServedModel], tmp_path: Path) -> None:
    model = make_model()
    graph = onnx.load(str(model.onnx))
    onnx.save(graph, str(tmp_path / "a.onnx"), save_as_external_data=True, location="a.data", size_threshold=0)
    with pytest.raises(ModelError, match="keeps weights in a second file"):
        read_source(make_model(onnx=tmp_path / "a.onnx"))


def test_files_that_are_none_of_theirs_are_refused(make_model: Callable[..., ServedModel], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is neither")
    with pytest.raises(ModelError, match="is not an ONNX file"):
        read_source(make_model(onnx=text))
    with pytest.raises(ModelError, match=r"is not a tokenizer.json"):
        read_source(make_model(tokenizer=text))
    model = make_model()
    model.onnx.unlink()
    with pytest.raises(ModelError, match=r"model.onnx is no file; give the path"):
        read_source(model)


def test_tokenizer_without_padding_is_refused(kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path) -> None:
    file = kit.write_tokenizer(tmp_path / "t.json", words=("x", *kit.WORDS[1:]))
    with pytest.raises(ModelError, match=r"has none of the padding tokens"):
        read_source(make_model(tokenizer=file))


def test_tokenizer_that_fails_at_an_unknown_word_is_refused(
    kit: Any, make_model: Callable[..., ServedModel], tmp_path: Path
) -> None:
    file = kit.write_tokenizer(tmp_path / "t.json", words=[word for word in kit.WORDS if word != "[UNK]"])
    with pytest.raises(ModelError, match=r"t\.json does not read every text \(.*\[UNK\].*\); add its unknown token"):
        read_source(make_model(tokenizer=file, warmup_texts=("good",)))
