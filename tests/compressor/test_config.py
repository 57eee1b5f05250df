"""Recipes: what is refused, and in which words."""

import re

import pytest

from compressor.config import BuildConfig, CorpusConfig, StudentConfig, load_recipe, read_recipe, recipe_text
from compressor.errors import ConfigError
from compressor.tasks import TASKS

LAPTOP = recipe_text("sst2", "laptop")


def laptop(*overrides: str) -> BuildConfig:
    return load_recipe("sst2", "laptop", overrides)


@pytest.mark.parametrize("recipe", ["laptop", "paper"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_both_recipes(task, recipe):
    assert load_recipe(task, recipe).task.name == task


def test_laptop_names_no_model_hub():
    assert '"hub:' not in LAPTOP


def test_recipe_that_is_printed_and_read_back_is_the_same(tmp_path):
    (tmp_path / "mine.toml").write_text(LAPTOP, encoding="utf-8")
    assert load_recipe(None, str(tmp_path / "mine.toml")) == laptop()


def test_max_tokens_is_the_task_s_unless_given():
    assert (laptop().max_tokens, laptop("task.max_tokens=32").max_tokens) == (TASKS["sst2"].max_tokens, 32)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("distill.0.epoch=2", "unknown key 'distill.0.epoch'; did you mean 'epochs'?"),
        ("finetune.lerning_rate=1e-5", "unknown key 'finetune.lerning_rate'; did you mean 'learning_rate'?"),
        ("studnet.layers=4", "unknown key 'studnet'; did you mean 'student'?"),
        ("task.max_token=32", "unknown key 'task.max_token'; did you mean 'max_tokens'?"),
        ("augment.copies=0", "augment.copies is 0; input should be greater than or equal to 1"),
        ("augment.copies=1.5", "augment.copies is 1.5; input should be a valid integer"),
        ("augment.copies=many", "augment.copies is 'many'; input should be a valid integer"),
        ('finetune.epochs="3"', "finetune.epochs is '3'; input should be a valid number"),
        ("finetune.epochs=true", "finetune.epochs is True; input should be a valid number"),
        ("finetune.epochs=nan", "finetune.epochs is nan; input should be "),
        ("distill.0.temperature=inf", "distill.0.temperature is inf; input should be a finite number"),
        ("corpus.undecided=inf", "corpus.undecided is inf; input should be a finite number"),
        ("corpus.test=1.0", "corpus.test is 1.0; input should be less than 1"),
        ("corpus.test=0.95", "corpus: validation is 0.1 and test is 0.95; together they must be below 1"),
        ("student.heads=7", "student: hidden is 312; it must be a multiple of heads (7)"),
        ("distill=[]", "distill is []; tuple should have at least 1 item"),
        ("distill.1.objective=final", "distill.1.objective is 'final'; input should be 'intermediate' or 'prediction'"),
        ('quantize.candidates=["int4"]', "quantize.candidates.0 is 'int4'; input should be 'dynamic' or 'static'"),
        ("export.format=tflite", "export.format is 'tflite'; input should be 'onnx'"),
        ("publish=3", "publish is 3; input should be a valid dictionary"),
        ("task.name=sst", "task.name: unknown task 'sst'; did you mean 'sst2'?"),
    ],
)
def test_a_mistake_is_named_by_key_value_and_rule(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(f"recipe sst2 laptop: {sentence}")):
        laptop(override)


def test_all_mistakes_of_a_recipe_are_in_one_report():
    with pytest.raises(ConfigError) as error:
        laptop("task.name=sst", "augment.copis=2", "finetune.epochs=0", "student.heads=7", 'seed="x"')
    for sentence in ("unknown task 'sst'", "'augment.copis'", "finetune.epochs is 0", "multiple of heads", "seed is"):
        assert sentence in str(error.value)


def test_a_missing_section_is_named():
    text = LAPTOP.replace("[corpus]", "[corpse]")
    with pytest.raises(ConfigError, match=r"corpus is missing; unknown key 'corpse'; did you mean 'corpus'\?"):
        read_recipe(text, name="mine.toml")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("seed=7", lambda config: config.seed == 7),
        ("distill.1.epochs=2.5", lambda config: config.distill[1].epochs == 2.5),
        ("distill.0.learning_rate=1e-3", lambda config: config.distill[0].learning_rate == 1e-3),
        ("corpus.source=some/folder with spaces", lambda config: config.corpus.source == "some/folder with spaces"),
        ('corpus.source="a=b.tsv"', lambda config: config.corpus.source == "a=b.tsv"),
        ("corpus.source=a=b.tsv", lambda config: config.corpus.source == "a=b.tsv"),
        ("publish.teacher=false", lambda config: config.publish.teacher is False),
        ('quantize.candidates=["static"]', lambda config: config.quantize.candidates == ("static",)),
        ("finetune.teacher=some/model", lambda config: config.finetune.teacher == "some/model"),
    ],
)
def test_set_overrides_one_value(override, read):
    assert read(laptop(override))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed", "--set 'seed' has no value; write --set section.key=value"),
        ("=3", "--set '=3' has no value"),
        ("distill.2.epochs=1", "--set distill.2.epochs: there is no entry '2'; entries run from 0 to 1"),
        ("distill.-1.epochs=1", "--set distill.-1.epochs: there is no entry '-1'"),
        ("distill.first.epochs=1", "--set distill.first.epochs: there is no entry 'first'"),
        ("distill.².epochs=1", "--set distill.².epochs: there is no entry '²'"),
        ("distill.0=1", "--set distill.0: distill is not a section"),
        ("seed.value=1", "--set seed.value: seed is not a section"),
    ],
)
def test_set_that_fits_nowhere_is_refused(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        laptop(override)


def test_later_set_wins():
    assert laptop("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("labtop", r"unknown recipe 'labtop'; did you mean 'laptop'\? \(or the path of a .toml file\)"),
        ("mine.yaml", r"unknown recipe 'mine.yaml'; "),
        ("absent.toml", r"recipe file absent.toml does not exist; `compressor recipe sst2 > absent.toml` writes one"),
    ],
)
def test_unknown_recipe_is_refused_with_a_remedy(recipe, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_recipe("sst2", recipe)


def test_named_recipe_needs_a_task():
    with pytest.raises(ConfigError, match="recipe 'laptop' needs a task; give --task"):
        load_recipe(None, "laptop")


def test_recipe_that_is_not_toml_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[task\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"recipe .*mine.toml is not TOML: .*line 1"):
        load_recipe(None, str(path))


def test_recipe_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"recipe file .*mine.toml cannot be read: "):
        load_recipe(None, str(path))


def test_recipe_for_another_task_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(LAPTOP, encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown task 'mrpc'"):
        load_recipe("mrpc", str(path))


def test_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        laptop().seed = 3


def test_defaults_of_the_student_are_tinybert_s():
    student = StudentConfig()
    assert (student.layers, student.hidden, student.heads, student.intermediate) == (4, 312, 12, 1200)


def test_shares_of_the_split_may_be_large():
    assert CorpusConfig(source="x.tsv", validation=0.45, test=0.5).test == 0.5
