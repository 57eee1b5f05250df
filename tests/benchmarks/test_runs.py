import json
import shutil
from pathlib import Path

import pytest

from benchmarks.runs import open_run
from compressor.errors import ArtifactError
from tests.conftest import Line


@pytest.fixture
def copied(line: Line, tmp_path: Path) -> Path:
    """A run folder of its own."""
    return shutil.copytree(line.run, tmp_path / "run")


def test_a_finished_run_opens(line: Line) -> None:
    run = open_run(line.run)
    assert (run.task.name, run.max_tokens) == ("sst2", 16)
    assert run.corpus.path.name == "1-corpus"
    assert run.publication is not None


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"run\.json is missing; run `compressor build`"):
        open_run(tmp_path)


def test_an_unfinished_run_names_what_is_missing(copied: Path) -> None:
    shutil.rmtree(copied / "7-quantize")
    with pytest.raises(ArtifactError, match="holds no finished artifact of kind 'int8'"):
        open_run(copied)


def test_a_partial_stage_is_not_taken_for_a_finished_one(copied: Path) -> None:
    (copied / "7-quantize").rename(copied / "7-quantize.partial")
    with pytest.raises(ArtifactError, match="holds no finished artifact of kind 'int8'"):
        open_run(copied)


def test_a_changed_file_is_refused(copied: Path) -> None:
    with (copied / "7-quantize" / "model.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ArtifactError, match=r"model\.onnx is missing or was changed"):
        open_run(copied)


def test_stages_of_different_builds_are_not_compared(copied: Path) -> None:
    manifest = copied / "7-quantize" / "manifest.json"
    facts = json.loads(manifest.read_text())
    facts["parents"]["onnx"]["content"] = "another"
    manifest.write_text(json.dumps(facts))
    with pytest.raises(ArtifactError, match=r"7-quantize was not made from the onnx in .*6-export"):
        open_run(copied)
