"""The whole line on a task of the user's own: scores of pairs, with a student that starts from a general one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor import statistics
from compressor.pipeline import finished
from tests import tiny

OWN = """\
seed = 7

[task]
name = "alike"
columns = ["a", "b"]
label = "score"
metric = "spearman"
max_tokens = 24

[corpus]
source = {data}

[finetune]
base = {base}
epochs = 8
learning_rate = 5e-3
batch_size = 16

[general]
source = {text}
epochs = 1
learning_rate = 3e-3
batch_size = 8
block_tokens = 16

[student]
layers = 1
hidden = 16
heads = 4
intermediate = 32
init = "general"

[[distill]]
objective = "intermediate"
attention = "relations"
relation_heads = 4
epochs = 1
learning_rate = 3e-3
batch_size = 16

[[distill]]
objective = "prediction"
epochs = 4
learning_rate = 3e-3
batch_size = 16

[quantize]
candidates = ["static", "per-row"]
max_metric_drop = 0.1
calibration_rows = 16
"""


def own_recipe(folder: Path) -> Path:
    """A recipe for scores of pairs in a CSV file, whose student starts from a general one."""
    task, places = tiny.pair_task(labels=()), {"base": tiny.checkpoint(folder / "base")}
    for name, seed, count in (("train", 0, 192), ("dev", 1, 48), ("test", 2, 48)):
        places["data"] = folder / "data"
        places["data"].mkdir(exist_ok=True)
        lines = [f"{row.texts[0]},{row.texts[1]},{row.label:.1f}\n" for row in tiny.task_rows(task, count, seed=seed)]
        (places["data"] / f"{name}.csv").write_text("a,b,score\n" + "".join(lines), encoding="utf-8")
    places["text"] = folder / "text.txt"
    places["text"].write_text("\n\n".join(text for text, _ in tiny.rows(200, seed=3)), encoding="utf-8")
    recipe = folder / "own.toml"
    recipe.write_text(OWN.format(**{name: json.dumps(str(path)) for name, path in places.items()}), encoding="utf-8")
    return recipe


@pytest.mark.slow
def test_a_regression_of_pairs_goes_the_whole_way_from_a_general_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A correlation of resampled rows takes long; how the intervals come about is not what this test is about.
    monkeypatch.setattr(statistics, "RESAMPLES", 50)
    recipe, run = own_recipe(tmp_path), tmp_path / "run"
    places = ("--recipe", recipe, "--out", run, "--repository", tmp_path / "repository")
    done = tiny.main(monkeypatch, capsys, "build", *places, "--json", hasty=True)
    assert done.code == 0, done.err
    assert list(finished(run)) == [
        "1-corpus",
        "2-finetune",
        "3-general",
        "4-distill-intermediate",
        "5-distill-prediction",
        "6-export",
        "7-quantize",
        "8-publish",
    ]
    facts = json.loads(done.out)
    assert facts["task"]["metric"] == "Spearman correlation"
    teacher, student, int8 = (row["test"]["score"] for row in facts["systems"])
    assert min(teacher, student) > 0.7
    assert int8 > 0.6  # without VNNI weights have 7 bits
    assert (tmp_path / "repository" / "alike" / "config.pbtxt").is_file()
