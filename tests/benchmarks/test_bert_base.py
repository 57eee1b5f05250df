from pathlib import Path

import numpy as np
import pytest

from benchmarks.bert_base import BERT_BASE, bert_base, write_repository
from benchmarks.runs import open_run
from benchmarks.served import ask, server
from compressor.checkpoints import load_classifier, load_tokenizer
from compressor.dataset import encode, read_examples, texts_of
from compressor.evaluate import TorchPredictor, predict
from compressor.tasks import TASKS
from tests.conftest import Line


def test_it_has_the_size_of_bert_base_and_reads_a_larger_vocabulary() -> None:
    model = bert_base(TASKS["sst2"], vocabulary=31_102)
    # 110 million of bert-base-uncased, 580 tokens more, and no head of the language model
    assert model.num_parameters() == 109_483_778 + 580 * 768
    assert (model.config.vocab_size, model.config.num_labels, model.training) == (31_102, 2, False)
    assert bert_base(TASKS["stsb"], vocabulary=100).config.num_labels == 1


@pytest.mark.triton
@pytest.mark.slow
def test_the_server_answers_what_the_model_answers_in_process(line: Line, tmp_path: Path) -> None:
    run = open_run(line.run)
    model = load_classifier(run.student.path, run.task)  # a tiny model stands for the big one
    write_repository(model, run, tmp_path / "repository", cores=1)
    texts = texts_of(read_examples(run.corpus.path / "test.arrow"))
    with server(tmp_path / "repository", None) as running:
        answers_NC = ask(running.url, BERT_BASE, texts, run.task)
    encoded = encode(run.corpus, "test", load_tokenizer(run.student.path), run.max_tokens, cache=tmp_path)
    expected_NC = predict(TorchPredictor(model), encoded)
    assert np.array_equal(answers_NC.argmax(1), expected_NC.argmax(1))
