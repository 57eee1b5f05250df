"""Which student can learn from which teacher, and that a recipe is refused before any stage starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor import shapes
from compressor.config import BuildConfig
from compressor.errors import ModelError
from compressor.recipe import load_recipe, read_recipe
from compressor.shapes import Sizes, at_hand, layer_map
from tests import tiny

GENERAL = '\n[general]\nsource = "."\nepochs = 1\nlearning_rate = 1e-3\nblock_tokens = 16\n'


@pytest.mark.parametrize(
    ("student", "teacher", "layers"),
    [(4, 12, (2, 5, 8, 11)), (6, 12, (1, 3, 5, 7, 9, 11)), (4, 6, (1, 2, 4, 5)), (1, 6, (5,)), (3, 3, (0, 1, 2))],
)
def test_layer_map_takes_the_last_layer_of_equal_parts(student: int, teacher: int, layers: tuple[int, ...]) -> None:
    assert layer_map(student, teacher) == layers


@pytest.mark.parametrize("teacher", range(1, 25))
def test_layer_map_is_rising_and_ends_at_the_last_layer(teacher: int) -> None:
    for student in range(1, teacher + 1):
        found = layer_map(student, teacher)
        assert len(set(found)) == student
        assert list(found) == sorted(found)
        assert found[-1] == teacher - 1


def test_layer_map_counts_from_1_where_it_is_given() -> None:
    assert layer_map(3, 12, (1, 6, 12)) == (0, 5, 11)


@pytest.mark.parametrize(
    ("layers", "given", "sentence"),
    [
        (7, None, r"student.layers is 7 and the teacher has 6 layers; 1 to 6 are possible"),
        (7, (1, 2, 3, 4, 5, 6, 7), r"student.layers is 7 and the teacher has 6 layers; 1 to 6 are possible"),
        (3, (2, 7, 12), r"layer_map names \[7, 12\] and the teacher has 6 layers; 1 to 6 are possible"),
        (3, (2, 6), r"layer_map is \[2, 6\] and the student has 3 layers; give one entry for each"),
    ],
)
def test_impossible_layer_maps_are_refused(layers: int, given: tuple[int, ...] | None, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        layer_map(layers, 6, given)


# A recipe, before any stage starts. Its teacher has 2 layers of 4 heads, a width of 32 and 64 positions.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"))


def recipe(base: Path, *overrides: str, more: str = "") -> BuildConfig:
    text = tiny.RECIPE.format(data='"data"', vectors='"vectors"', base=json.dumps(str(base))) + more
    return read_recipe(text, overrides, name="mine.toml")


def test_a_student_that_fits_is_let_through(base: Path) -> None:
    shapes.check_recipe(recipe(base))
    shapes.check_recipe(recipe(base, "student.init=general", more=GENERAL))
    relations = 'distill.0.attention="relations"', "distill.0.relation_heads=8", "student.init=random"
    shapes.check_recipe(recipe(base, *relations, "student.heads=2"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("student.layers=9",), r"student.layers is 9 and the teacher has 2 layers; 1 to 2 are possible"),
        (("student.layer_map=[4]",), r"student.layer_map names \[4\] and the teacher has 2 layers"),
        (("student.heads=2",), r'has 2 attention heads and the teacher 4; .* set attention = "relations"'),
        (("student.heads=2", 'distill.0.attention="relations"', "distill.0.relation_heads=8"), r"keeps the teacher's"),
        (('distill.0.attention="relations"',), r"relation_heads is 12, which does not divide .* 16 and 32; choose"),
        (("student.hidden=64",), r'init = "project" cannot widen: student.hidden is 64 and the teacher\'s 32'),
        (("student.init=teacher-layers",), r"needs the teacher's hidden_size: 32, not 16; use init = \"project\""),
        (("task.max_tokens=65",), r"max_tokens is 65 and the model in .* reads at most 64 tokens; set task.max_tokens"),
        (("task.name=rte",), r"has type_vocab_size 1 and the task has pairs of texts, which need 2"),
    ],
)
def test_a_student_that_cannot_fit_is_refused(
    base: Path, tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    if "task.name=rte" in overrides:
        base = tiny.checkpoint(tmp_path, tiny.bert(type_vocab_size=1))
    with pytest.raises(ModelError, match=sentence):
        shapes.check_recipe(recipe(base, *overrides))


def test_the_teacher_that_is_adopted_comes_before_the_base(base: Path, tmp_path: Path) -> None:
    deep = tiny.checkpoint(tmp_path, tiny.bert(layers=3))
    shapes.check_recipe(recipe(base, "student.layers=3", f"finetune.teacher={deep}"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("general.block_tokens=65",), r"general.block_tokens is 65 and the teacher .* reads at most 64 tokens"),
        (("general.init=teacher-layers",), r"needs the teacher's hidden_size: 32, not 16"),
        (("general.attention=relations", "general.relation_heads=3"), r"relation_heads is 3, which does not divide"),
    ],
)
def test_a_general_student_that_cannot_fit_is_refused(base: Path, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        shapes.check_recipe(recipe(base, "student.init=general", *overrides, more=GENERAL))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"layers": 2}, r"student.init .* has num_hidden_layers 2; the recipe's \[student\] asks for 1"),
        ({"max_position_embeddings": 8}, r"max_tokens is 16 and the model in .* reads at most 8 tokens"),
    ],
)
def test_a_start_that_cannot_fit_is_refused(base: Path, tmp_path: Path, shape: dict[str, Any], sentence: str) -> None:
    given = {"layers": 1, "hidden": 16, "intermediate_size": 32} | shape
    start = tiny.checkpoint(tmp_path, tiny.bert(**given))
    with pytest.raises(ModelError, match=sentence):
        shapes.check_recipe(recipe(base, f"student.init={start}"))


def test_a_model_of_the_hub_is_looked_at_where_it_was_fetched_before(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(base, "finetune.base=hub:someone/model", "student.layers=9")
    shapes.check_recipe(config)  # nothing is at hand
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(base / file))
    with pytest.raises(ModelError, match=r"student.layers is 9 and the teacher has 2 layers"):
        shapes.check_recipe(config)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": "wide"}', "{}"])
def test_what_a_config_json_does_not_say_is_left_to_the_stage(tmp_path: Path, text: str) -> None:
    assert at_hand(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(text)
    assert at_hand(str(tmp_path)) is None


def test_sizes_of_a_file_are_those_of_the_loaded_configuration(base: Path) -> None:
    found = at_hand(str(base))
    assert found == (base, Sizes.of(tiny.bert().config))


@pytest.mark.parametrize("task", ["sst2", "mnli"])
def test_a_recipe_of_ours_fits_the_model_that_it_names(task: str) -> None:
    shapes.check_recipe(load_recipe(task, "laptop", ("corpus.source=data",)))
