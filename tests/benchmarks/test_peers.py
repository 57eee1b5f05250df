"""Each peer is the real library on the same student: it must answer as the student does."""

from typing import Any

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.peers import PEERS, TextPeer, TokenPeer, check_peers
from benchmarks.runs import forms_of, open_run
from benchmarks.text_to_label import files_of, open_student
from compressor.checkpoints import load_tokenizer
from compressor.dataset import Inputs
from compressor.errors import ConfigError
from compressor.evaluate import OnnxPredictor
from serving.inprocess import Files
from tests.benchmarks.conftest import TEXTS
from tests.conftest import Line


@pytest.fixture
def forms(line: Line) -> Any:
    return forms_of(open_run(line.run))


def test_an_unknown_peer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--peer optimun is unknown; did you mean 'optimum'"):
        check_peers(["optimun"])


def test_a_peer_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package openvino, which is not installed; run `python -m pip"):
        check_peers(["openvino"])


def test_our_way_runs_rows_of_one_width_together_and_answers_as_for_each_alone(
    forms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [("good " * words).strip() for words in (1, 12, 2, 11, 3)]
    files = files_of(forms)
    expected = [files.open()(text) for text in texts]
    shapes, feed = [], Files.feed

    def watched(self: Files, encodings: Any, width: int, session: Any) -> Any:
        shapes.append((len(encodings), width))
        return feed(self, encodings, width, session)

    monkeypatch.setattr(Files, "feed", watched)
    assert open_student(forms, 1)(texts) == [max(answer, key=lambda label: answer[label]) for answer in expected]
    assert sorted(shapes) == [(2, 16), (3, 8)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that are compared with
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if isinstance(peer, TextPeer)])
def test_a_peer_that_reads_texts_answers_as_the_student(forms: Any, name: str) -> None:
    peer = PEERS[name]
    assert isinstance(peer, TextPeer)
    classify, size_bytes = peer.open(forms, 1)
    ours = open_student(forms, 1)(TEXTS)
    assert set(ours) <= {"negative", "positive"}
    found = classify(TEXTS)
    # The pipeline runs fp32, so a row at the border may go the other way.
    assert sum(a == b for a, b in zip(found, ours, strict=True)) >= (len(TEXTS) if name == "optimum" else 7)
    assert classify(TEXTS[:1]) == found[:1]
    assert size_bytes > 1000


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if isinstance(peer, TokenPeer)])
def test_a_peer_that_reads_tokens_gives_the_student_s_logits(forms: Any, name: str) -> None:
    peer = PEERS[name]
    assert isinstance(peer, TokenPeer)
    pytest.importorskip(peer.needs)
    predictor, size_bytes = peer.open(forms, 1)
    rows = load_tokenizer(forms.int8)(list(TEXTS), padding=True, return_tensors="np")
    inputs = Inputs(rows["input_ids"], rows["token_type_ids"], rows["attention_mask"])
    logits_BC = predictor(inputs)
    expected_BC = OnnxPredictor(forms.student_onnx, threads=1)(inputs)
    assert logits_BC.shape == expected_BC.shape == (len(TEXTS), 2)
    assert np.abs(logits_BC - expected_BC).max() < (1e-4 if name == "openvino" else 0.1)
    assert np.array_equal(predictor(inputs), logits_BC)
    assert size_bytes > 1000
