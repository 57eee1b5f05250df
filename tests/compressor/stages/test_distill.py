"""Students: what is trained, what is not, and that they come near their teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compressor.artifact import Artifact
from compressor.checkpoints import PROJECTIONS_FILE, load_classifier, load_tokenizer, save_projections
from compressor.config import DistillConfig, StudentConfig
from compressor.dataset import Encoded, encode, write_examples
from compressor.errors import ModelError
from compressor.models import rescale
from compressor.objectives import Intermediate, Prediction
from compressor.stages.distill import distill, refuse_uniform, teacher_logits
from compressor.tasks import Task
from compressor.training import fit, rows_seen
from compressor.world import World
from tests import tiny
from tests.conftest import Line

WORLD = World(device=torch.device("cpu"))
SCORES = tiny.pair_task(labels=())
FIFTY = tiny.pair_task(labels=tuple(f"topic{number}" for number in range(50)))


@pytest.fixture(scope="module")
def teacher(line: Line) -> Artifact:
    return Artifact.open(line.run / "2-finetune", kind="teacher")


@pytest.fixture(scope="module")
def corpus(line: Line) -> Artifact:
    return Artifact.open(line.run / "1-corpus", kind="examples")


@pytest.fixture(scope="module")
def rows(corpus: Artifact, teacher: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    tokenizer = load_tokenizer(teacher.path)
    return encode(corpus, "train", tokenizer, tiny.MAX_TOKENS, cache=tmp_path_factory.mktemp("encoded"))


@pytest.fixture
def model(teacher: Artifact) -> Any:
    """The teacher as the stage holds it."""
    return load_classifier(teacher.path, tiny.TASK).eval().requires_grad_(False)


def run(
    config: DistillConfig,
    student: StudentConfig,
    teacher: Artifact,
    corpus: Artifact,
    out: Path,
    task: Task = tiny.TASK,
    **more: Any,
) -> Artifact:
    options: dict[str, Any] = {"max_tokens": tiny.MAX_TOKENS, "seed": 7, "key": out.name, "device": "cpu"}
    return distill(config, student, task, teacher=teacher, examples=corpus, corpus=corpus, out=out, **(options | more))


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: weights.detach().clone() for name, weights in model.state_dict().items()}


def changed(model: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weights in model.state_dict().items() if not torch.equal(weights, before[name])}


def cached(model: Any, rows: Encoded, folder: Path) -> Any:
    return teacher_logits(model, rows, None, "fp32", world=WORLD, file=folder / "logits.npy", scratch=folder)


def weights_hash(made: Artifact) -> str:
    return str(made.manifest["files"]["model.safetensors"]["sha256"])


def general(folder: Path, teacher: Artifact, *, wide: int | None = None, projections: int = 2) -> Artifact:
    """What general distillation leaves: an encoder, the teacher's tokenizer, projections to a width."""
    with tiny.sealed(folder, "general-student") as draft:
        tiny.bert(layers=1, hidden=16, intermediate_size=32).bert.save_pretrained(draft.path)
        load_tokenizer(teacher.path).save_pretrained(draft.path)
        if wide is not None:
            given = {f"projections.{number}.weight": torch.full((wide, 16), 0.1) for number in range(projections)}
            given |= {f"projections.{number}.bias": torch.full((wide,), 0.5) for number in range(projections)}
            save_file(given, draft.path / PROJECTIONS_FILE)
    return Artifact.open(folder, kind="general-student")


# What is trained.


def test_the_intermediate_stage_leaves_the_head_alone(model: Any, rows: Encoded, tmp_path: Path) -> None:
    student, config = tiny.bert(layers=1, hidden=16), tiny.distilling("intermediate", epochs=0.5)
    before = snapshot(student)
    fit(Intermediate(student, model, (1,), config), rows, config, world=WORLD, seed=7, folder=tmp_path)
    names = changed(student, before)
    assert not [name for name in names if name.startswith(("classifier", "bert.pooler"))]
    assert {"bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.output.dense.bias"} <= names


def test_the_prediction_stage_trains_the_head(model: Any, rows: Encoded, tmp_path: Path) -> None:
    student, config = tiny.bert(layers=1, hidden=16), tiny.distilling(epochs=0.5)
    before = snapshot(student)
    module = Prediction(student, cached(model, rows, tmp_path), config)
    fit(module, rows, config, world=WORLD, seed=7, folder=tmp_path)
    assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight"} <= changed(student, before)


@pytest.mark.parametrize(
    ("attention", "projection", "heads"), [("scores", "per-layer", 12), ("relations", "shared", 4)]
)
def test_losses_of_the_intermediate_stage_fall(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, attention: str, projection: str, heads: int
) -> None:
    given = {"attention": attention, "projection": projection, "relation_heads": heads}
    config = tiny.distilling("intermediate", epochs=3.0, **given)
    made = run(config, tiny.student(init="random"), teacher, corpus, tmp_path / "student")
    first, *_, last = (entry["losses"] for entry in made.metrics["history"]["epochs"])
    assert set(first) == {"embedding", "hidden", "attention" if attention == "scores" else "relations"}
    assert sum(last.values()) < 0.9 * sum(first.values())


def test_a_student_comes_near_its_teacher(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    shape = tiny.student(layers=2, hidden=24)
    first = run(tiny.distilling("intermediate"), shape, teacher, corpus, tmp_path / "1")
    config = tiny.distilling(epochs=6.0, learning_rate=5e-3)
    made = run(config, shape, teacher, corpus, tmp_path / "2", start=first)
    assert made.metrics["test"]["score"] > teacher.metrics["test"]["score"] - 0.1
    assert made.manifest["parents"]["start"]["content"] == first.content
    assert "at_start" in first.metrics
    assert "at_start" not in made.metrics
    assert sorted(path.name for path in made.path.glob("*.logits.npy")) == ["test.logits.npy", "validation.logits.npy"]


@pytest.mark.usefixtures("few_resamples")
def test_a_regression_comes_near_its_teachers_scores(teacher: Artifact, tmp_path: Path) -> None:
    scorer = tiny.saved(tmp_path / "teacher", "teacher", tiny.lively(tiny.bert(task=SCORES)))
    corpus = tiny.examples(tmp_path / "corpus", train=96, task=SCORES)
    config = tiny.distilling(epochs=4.0, learning_rate=5e-3)
    made = run(config, tiny.student(layers=2, hidden=24), scorer, corpus, tmp_path / "student", SCORES)
    first, *_, last = (entry["losses"]["score"] for entry in made.metrics["history"]["epochs"])
    assert last < 0.5 * first
    assert made.metrics["validation"]["metric"] == "spearman"
    assert load_classifier(made.path, SCORES).config.num_labels == 1


@pytest.mark.parametrize("init", ["random", "project"])
@pytest.mark.usefixtures("few_resamples")
def test_a_student_learns_scores_of_any_size_alike(init: str, tmp_path: Path) -> None:
    answers = []
    for factor, offset in ((1.0, 0.0), (4096.0, 8192.0)):  # powers of two: nothing is rounded on the way
        folder = tmp_path / f"{factor:g}"
        with tiny.sealed(folder / "corpus", "examples", section={"task": SCORES.model_dump()}) as draft:
            for seed, split in enumerate(("train", "validation", "test")):
                rows = tiny.task_rows(SCORES, 96, seed=seed)
                scaled = [row._replace(label=factor * row.label + offset) for row in rows]
                write_examples(draft.path / f"{split}.arrow", scaled, SCORES)
        scorer = tiny.lively(tiny.bert(task=SCORES))
        rescale(scorer, offset, factor)
        teacher = tiny.saved(folder / "teacher", "teacher", scorer)
        corpus = Artifact.open(folder / "corpus", kind="examples")
        shape, config = tiny.student(layers=2, hidden=24, init=init), tiny.distilling(epochs=4.0, learning_rate=5e-3)
        made = run(config, shape, teacher, corpus, folder / "student", SCORES)
        answers.append((np.load(made.path / "test.logits.npy") - offset) / factor)
    assert np.abs(answers[0] - answers[1]).max() < 0.05


@pytest.mark.parametrize("init", ["random", "project"])
def test_the_same_seed_gives_the_same_student(teacher: Artifact, corpus: Artifact, tmp_path: Path, init: str) -> None:
    found = []
    for number in (1, 2):
        torch.manual_seed(number)
        shape = tiny.student(init=init, intermediate=80)
        made = run(tiny.distilling("intermediate", epochs=0.2), shape, teacher, corpus, tmp_path / str(number))
        found.append(weights_hash(made))
    assert found[0] == found[1]


def test_the_published_normalisation_pads_every_batch_to_the_limit(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    sizes = set()

    def note(module: Any, arguments: Any) -> None:
        if isinstance(module, Intermediate | Prediction):
            sizes.add(arguments[0].mask_BS.shape[1])

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        config = tiny.distilling("intermediate", normalisation="published", epochs=0.5)
        run(config, tiny.student(), teacher, corpus, tmp_path / "1")
        run(tiny.distilling(normalisation="published", epochs=0.5), tiny.student(), teacher, corpus, tmp_path / "2")
    finally:
        hook.remove()
    assert sizes == {tiny.MAX_TOKENS}


def test_the_student_is_saved_with_the_teachers_tokenizer(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    made = run(tiny.distilling("intermediate", epochs=0.1), tiny.student(), teacher, corpus, tmp_path / "student")
    assert load_tokenizer(made.path).get_vocab() == load_tokenizer(teacher.path).get_vocab()
    assert load_classifier(made.path, tiny.TASK).config.hidden_size == 16


def test_less_than_an_epoch_asks_the_teacher_for_the_rows_of_its_steps_alone(
    teacher: Artifact, rows: Encoded, tmp_path: Path
) -> None:
    config = tiny.distilling("prediction", epochs=0.5)
    seen = rows_seen(rows, config, seed=7)
    trained: list[int] = []

    class Watch(Prediction):
        def forward(self, batch: Any) -> Any:
            trained.extend(batch.row_B.tolist())
            return super().forward(batch)

    student = load_classifier(teacher.path, tiny.TASK)
    logits_NC = np.zeros((len(rows), 2), dtype=np.float32)
    fit(Watch(student, logits_NC, config), rows, config, world=WORLD, seed=7, folder=tmp_path)
    assert seen is not None
    assert sorted(trained) == seen.tolist()
    assert 0 < len(seen) < len(rows)
    assert rows_seen(rows, tiny.distilling("prediction", epochs=1), seed=7) is None


# What a student starts from.


@pytest.mark.parametrize("init", ["random", "project"])
@pytest.mark.parametrize("between", [False, True])
def test_an_intermediate_stage_goes_on_with_the_projections_of_an_earlier_one(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, init: str, between: bool
) -> None:
    config, shape = tiny.distilling("intermediate", epochs=4.0), tiny.student(init=init)
    first = run(config, shape, teacher, corpus, tmp_path / "1")
    start = first
    if between:  # a stage of prediction, which has no use for them, hands them on
        start = run(
            tiny.distilling(epochs=0.1, learning_rate=1e-9), shape, teacher, corpus, tmp_path / "p", start=first
        )
    again = run(
        tiny.distilling("intermediate", epochs=0.1, learning_rate=1e-9),
        shape,
        teacher,
        corpus,
        tmp_path / "2",
        start=start,
    )
    before, after = (made.metrics["history"]["epochs"] for made in (first, again))
    for name, loss in before[-1]["losses"].items():
        assert after[0]["losses"][name] < 1.2 * loss


def test_projections_of_an_earlier_stage_to_another_width_are_left_out(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny.sealed(tmp_path / "start", "student") as draft:
        tiny.checkpoint(draft.path, tiny.bert(layers=1, hidden=16, intermediate_size=32))
        save_projections([(torch.zeros(48, 16), torch.zeros(48))], draft.path)
    start = Artifact.open(tmp_path / "start", kind="student")
    run(tiny.distilling("intermediate", epochs=0.1), tiny.student(), teacher, corpus, tmp_path / "2", start=start)
    assert "start has projections to a width of 48; the teacher's is 32, so new ones are learnt" in caplog.text


@pytest.mark.parametrize("init", ["random", "project"])
def test_the_largest_seed_works(teacher: Artifact, corpus: Artifact, tmp_path: Path, init: str) -> None:
    config, seed = tiny.distilling("intermediate", epochs=0.1), 2**32 - 1
    assert run(config, tiny.student(init=init), teacher, corpus, tmp_path / "student", seed=seed).metrics["history"]


@pytest.mark.parametrize("init", ["random", "project"])
def test_a_score_of_a_head_that_nothing_taught_is_said_to_be_one(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, init: str
) -> None:
    shape = tiny.student(init=init)
    first = run(tiny.distilling("intermediate", epochs=0.1), shape, teacher, corpus, tmp_path / "1")
    again = run(tiny.distilling("intermediate", epochs=0.1), shape, teacher, corpus, tmp_path / "2", start=first)
    last = run(tiny.distilling(epochs=0.1), shape, teacher, corpus, tmp_path / "3", start=again)
    from_teacher = init == "project"
    assert [made.metrics["head_trained"] for made in (first, again, last)] == [from_teacher, from_teacher, True]
    assert ("at_start" in first.metrics) == from_teacher


def test_copied_layers_are_those_of_the_layer_map(corpus: Artifact, tmp_path: Path) -> None:
    deep = tiny.lively(tiny.bert(layers=3))
    teacher = tiny.saved(tmp_path / "teacher", "teacher", deep)
    shape = tiny.student(layers=2, hidden=32, intermediate=64, init="teacher-layers", layer_map=(1, 2))
    config = tiny.distilling("intermediate", epochs=0.1, learning_rate=1e-9)
    made = load_classifier(run(config, shape, teacher, corpus, tmp_path / "student").path, tiny.TASK)
    for mine, theirs in ((0, 0), (1, 1)):
        weights = [
            model.bert.encoder.layer[layer].output.dense.weight for model, layer in ((made, mine), (deep, theirs))
        ]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_copied_layers_and_their_widths_start_without_loss(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    shape = tiny.student(layers=2, hidden=32, intermediate=64, init="teacher-layers")
    config = tiny.distilling("intermediate", epochs=0.1, learning_rate=1e-9, precision="fp32")
    made = run(config, shape, teacher, corpus, tmp_path / "student")
    assert all(loss == 0 for loss in made.metrics["history"]["epochs"][0]["losses"].values())


def test_a_general_student_brings_its_projections(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    shape, config = tiny.student(init="general"), tiny.distilling("intermediate", epochs=0.1, learning_rate=1e-9)
    losses = {}
    for name, wide in (("with", 32), ("without", None)):
        start = general(tmp_path / f"general-{name}", teacher, wide=wide)
        made = run(config, shape, teacher, corpus, tmp_path / name, general=start)
        losses[name] = made.metrics["history"]["epochs"][0]["losses"]["embedding"]
        assert made.metrics["projections_used"] == (wide is not None)
        assert made.metrics["start"]["ignored"] == []
        assert made.metrics["start"]["used"] > 16
        assert not made.metrics["head_trained"]
        assert made.manifest["parents"]["general"]["content"] == start.content
    encoder = tiny.bert(layers=1, hidden=16, intermediate_size=32).bert
    assert losses["with"] != losses["without"]
    made_now = load_classifier(tmp_path / "with", tiny.TASK).bert.encoder.layer[0].output.dense.weight
    torch.testing.assert_close(made_now, encoder.encoder.layer[0].output.dense.weight, rtol=0, atol=1e-6)


def test_projections_to_another_width_are_left_out_and_it_is_said(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = general(tmp_path / "general", teacher, wide=48)
    shape = tiny.student(init=str(start.path))
    made = run(tiny.distilling("intermediate", epochs=0.1), shape, teacher, corpus, tmp_path / "student")
    assert made.metrics["projections_used"] is False
    assert "has projections to a width of 48; the teacher's is 32, so new ones are learnt" in caplog.text


def test_a_general_student_gets_the_same_fresh_parts_for_the_same_seed(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    start, found = general(tmp_path / "general", teacher), []
    for number in (1, 2):
        torch.manual_seed(number)
        shape = tiny.student(init=str(start.path))
        made = run(tiny.distilling("intermediate", epochs=0.2), shape, teacher, corpus, tmp_path / str(number))
        found.append(weights_hash(made))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("task", "shape", "sentence"),
    [
        (
            tiny.TASK,
            {"max_position_embeddings": 8},
            r"max_tokens is 16 and the model in .* reads at most 8 tokens; set",
        ),
        (SCORES, {"type_vocab_size": 1}, r"has type_vocab_size 1 and the task has pairs of texts, which need 2"),
    ],
)
def test_a_general_student_that_cannot_read_the_rows_is_refused(
    tmp_path: Path, task: Task, shape: dict[str, Any], sentence: str
) -> None:
    start = tiny.checkpoint(tmp_path / "start", tiny.bert(layers=1, hidden=16, intermediate_size=32, **shape))
    teacher = tiny.saved(tmp_path / "teacher", "teacher", tiny.lively(tiny.bert(task=task)))
    corpus, config = tiny.examples(tmp_path / "corpus", task=task), tiny.distilling("intermediate", epochs=0.1)
    with pytest.raises(ModelError, match=sentence):
        run(config, tiny.student(init=str(start)), teacher, corpus, tmp_path / "student", task)


# What is refused, before anything is tokenized.


def test_an_earlier_student_of_another_shape_is_refused(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    start = tiny.saved(tmp_path / "start", "student", tiny.bert(layers=2, hidden=16, intermediate_size=32))
    with pytest.raises(ModelError, match=r"start has num_hidden_layers 2; the recipe's \[student\] asks for 1"):
        run(tiny.distilling(), tiny.student(), teacher, corpus, tmp_path / "student", start=start)
    assert not (tmp_path / "encoded").exists()


def test_an_earlier_student_of_another_vocabulary_is_refused(
    teacher: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    with tiny.sealed(tmp_path / "start", "student") as draft:
        model = tiny.bert(layers=1, hidden=16, intermediate_size=32)
        tiny.checkpoint(draft.path, model, words=tiny.WORDS[:-2] + tiny.WORDS[:-3:-1])
    start = Artifact.open(tmp_path / "start", kind="student")
    with pytest.raises(ModelError, match=r"another vocabulary than the teacher; their token ids would not mean the"):
        run(tiny.distilling(), tiny.student(), teacher, corpus, tmp_path / "student", start=start)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"layers": 3}, r"student.layers is 3 and the teacher has 2 layers; 1 to 2 are possible"),
        ({"layer_map": (4,)}, r"layer_map names \[4\] and the teacher has 2 layers; 1 to 2 are possible"),
        ({"heads": 2}, r'the student has 2 attention heads and the teacher 4; .* set attention = "relations"'),
        ({"hidden": 64}, r'init = "project" cannot widen: student.hidden is 64 and the teacher\'s 32'),
        ({"init": "teacher-layers"}, r"needs the teacher's hidden_size: 32, not 16"),
    ],
)
def test_students_that_do_not_fit_are_refused_before_anything_is_tokenized(
    teacher: Artifact, corpus: Artifact, tmp_path: Path, shape: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        run(tiny.distilling("intermediate"), tiny.student(**shape), teacher, corpus, tmp_path / "student")
    assert not (tmp_path / "encoded").exists()


def test_a_student_of_other_heads_learns_by_relations(teacher: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    config = tiny.distilling("intermediate", attention="relations", relation_heads=8, epochs=0.1)
    made = run(config, tiny.student(heads=2, init="random"), teacher, corpus, tmp_path / "student")
    assert made.metrics["history"]["epochs"][0]["losses"]["relations"] > 0


def test_a_teacher_whose_answers_are_uniform_is_refused(tmp_path: Path) -> None:
    teacher = tiny.saved(tmp_path / "teacher", "teacher", tiny.bert(task=FIFTY))  # its head is fresh
    corpus = tiny.examples(tmp_path / "corpus", task=FIFTY)
    sentence = r"teacher hardly tells the 50 classes apart: the mean entropy .* is 3\.9\d\d, and 3\.912 is guessing; "
    with pytest.raises(ModelError, match=sentence):
        run(tiny.distilling(), tiny.student(init="random"), teacher, corpus, tmp_path / "student", FIFTY)


@pytest.mark.parametrize("classes", [2, 50])
def test_only_answers_as_good_as_uniform_are_refused(classes: int) -> None:
    sure_NC = np.where(np.arange(classes) == 1, 5.0, 0.0)[None].repeat(300, axis=0).astype(np.float32)
    refuse_uniform(sure_NC, None, Path("teacher"))
    refuse_uniform(np.where(np.arange(300)[:, None] < 9, sure_NC, 0), np.arange(9), Path("teacher"))
    for unsure_NC in (np.zeros_like(sure_NC), sure_NC / 30, np.full_like(sure_NC, np.nan)):
        with pytest.raises(ModelError, match=rf"hardly tells the {classes} classes apart"):
            refuse_uniform(unsure_NC, None, Path("teacher"))
    refuse_uniform(np.zeros((300, 1), dtype=np.float32), None, Path("teacher"))  # a regression has no classes
