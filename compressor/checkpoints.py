"""Checkpoints as they are found: tokenizers, encoders and classifiers, and what of them was used.

Read are the layouts that BERTs and TinyBERTs were released in: safetensors, or a pickle of nothing but tensors; names
with or without `bert.`, and DataParallel's `module.`; LayerNorms called gamma and beta; TinyBERT's projections, one
(`fit_dense`) or one for the embedding and each layer (`fit_denses.N`).

Shape legend: D teacher width, d student width.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizerFast,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.utils import logging as transformers_logging

from compressor.errors import ModelError, SourceError
from compressor.shapes import SIZES, Sizes, check_same
from compressor.sources import PICKLED, SAFETENSORS
from compressor.tasks import Task, folded

transformers_logging.set_verbosity_error()  # "newly initialised" warnings: the load is checked and reported here
log = logging.getLogger(__name__)

Weights = dict[str, Tensor]
Projections = list[tuple[Tensor, Tensor]]
"""Weight (D, d) and bias (D): one that embedding and layers share, or one for the embedding and each layer."""
PROJECTIONS_FILE = "projections.safetensors"
HEAD = "classifier."
CLS = "cls.predictions."  # the head of a masked language model
NAMED = 4  # names that a sentence gives before it counts the rest


@dataclass(frozen=True)
class LoadReport:
    """What became of the tensors of a checkpoint."""

    used: int
    ignored: tuple[str, ...]
    """As the checkpoint names them."""
    missing: tuple[str, ...]
    """As the model names them: they start fresh."""

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)

    def sentence(self) -> str:
        """One line for the log."""
        total = self.used + len(self.ignored)
        return f"used {self.used} of {total} tensors; ignored {_names(self.ignored)}; missing {_names(self.missing)}"


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer in `folder`, made from vocab.txt if there is no more. Raises SourceError if there is none."""
    try:
        if "tokenizer_class" in _json(folder / "tokenizer_config.json"):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True)
        else:
            lower, file = _lower_case(folder)
            log.info("tokenizer of %s: %s, by its %s", folder, "lower-cases" if lower else "keeps capitals", file)
            tokenizer = BertTokenizerFast.from_pretrained(folder, local_files_only=True, do_lower_case=lower)
    except Exception as error:  # the libraries raise no narrower class for a missing or broken file
        raise SourceError(f"{folder} holds no tokenizer that can be loaded; save it with save_pretrained()") from error
    if not tokenizer.is_fast:
        raise SourceError(f"the tokenizer in {folder} has no tokenizer.json; save it as a fast tokenizer")
    return tokenizer


def load_encoder(folder: Path, task: Task) -> tuple[BertForSequenceClassification, LoadReport]:
    """A pretrained BERT with a fresh head for `task`, also where the checkpoint has one of its own.

    Raises ModelError if it is no BERT, or not a whole one.
    """
    config = _config(folder)
    _set_head(config, task)
    return _load(folder, config, read_weights(folder), keep_head=False)


def load_plain_encoder(folder: Path) -> tuple[BertForSequenceClassification, LoadReport]:
    """A pretrained BERT for work without a task. Its head is fresh and means nothing. Raises as `load_encoder`."""
    return _load(folder, _config(folder), read_weights(folder), keep_head=False)


def load_masked_lm(folder: Path) -> BertForMaskedLM:
    """A BERT masked language model with its head. Raises ModelError if it is no BERT, or not a whole one."""
    config, weights = _config(folder), read_weights(folder)
    state = {_our_name(name): tensor for name, tensor in weights.items()}
    # The output layer may be left out, as it is the word embeddings once more.
    for twin, other in (("decoder.weight", "bert.embeddings.word_embeddings.weight"), ("decoder.bias", f"{CLS}bias")):
        if CLS + twin not in state and other in state:
            state[CLS + twin] = state[other]
    needed = _needed(BertForMaskedLM, config, folder)
    missing = [name for name in needed if name not in state]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights of a masked language model (first: {missing[0]}); use a checkpoint "
            "with its masked-LM head"
        )
    misfits = [name for name, tensor in needed.items() if state[name].shape != tensor.shape]
    if misfits:
        raise ModelError(
            f"{folder} has {misfits[0]} of shape {tuple(state[misfits[0]].shape)}; its config.json asks for "
            f"{tuple(needed[misfits[0]].shape)}; use the config.json that the weights were saved with"
        )
    return BertForMaskedLM.from_pretrained(None, config=config, state_dict={name: state[name] for name in needed})


def load_classifier(folder: Path, task: Task) -> BertForSequenceClassification:
    """A BERT fine-tuned for `task`: `adopt_classifier` without its report."""
    return adopt_classifier(folder, task)[0]


def label_names(folder: Path) -> tuple[str, ...]:
    """The names of a classifier's classes, in its order. Raises ModelError if it is no BERT."""
    names = _config(folder).id2label
    return tuple(str(names[index]) for index in sorted(names))


def adopt_classifier(folder: Path, task: Task) -> tuple[BertForSequenceClassification, LoadReport]:
    """A BERT fine-tuned for `task`, its classes put in the task's order by name.

    Raises ModelError if it is no BERT, or not a whole one; if it was not fine-tuned; if its head is the one of
    TinyBERT's code, which has a ReLU before it; or if its outputs are not the task's.
    """
    config, weights = _config(folder), read_weights(folder)
    if "classifier.weight" not in weights:
        raise ModelError(
            f"the checkpoint {folder} has no classifier, so it was not fine-tuned; "
            "give it as finetune.base, or a fine-tuned one as finetune.teacher"
        )
    # TinyBERT's code has both parts in one class, whose forward pass puts the ReLU there.
    if any(name.startswith("fit_dense") for name in weights):
        raise ModelError(
            f"the checkpoint {folder} has a classifier beside TinyBERT's fit_dense, so there was a ReLU before it that "
            "models here lack, and its answers would be wrong; use it as student.init, which takes no classifier, "
            "or fine-tune it again"
        )
    outputs = len(weights["classifier.weight"])
    if task.is_regression and outputs != 1:
        raise ModelError(
            f"the checkpoint {folder} has {outputs} outputs; {task.name} is a regression and needs 1; "
            "use a checkpoint that was fine-tuned for it"
        )
    order = [0] if task.is_regression else _label_order(folder, task)
    _set_head(config, task)
    model, report = _load(folder, config, weights, keep_head=True)
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter[order])
    return model, report


def check_vocabulary(model: BertForSequenceClassification, tokenizer: Any, folder: Path) -> None:
    """Raise ModelError if the tokenizer can make ids that the model has no embedding for."""
    rows = model.config.vocab_size
    if len(tokenizer) > rows:
        raise ModelError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens and the model {rows} word embeddings; they do not "
            "belong together; use the tokenizer that the model was trained with"
        )


def general_student(
    folder: Path, shape: BertConfig, vocabulary: dict[str, int], task: Task
) -> tuple[BertForSequenceClassification, Projections | None, LoadReport]:
    """A general student from a checkpoint, without dropout, and the projections it was trained with, if it has any.

    Raises ModelError if its shape, vocabulary or projections are not what is needed.
    """
    config = _config(folder)
    check_same(Sizes.of(shape), Sizes.of(config), f"student.init {folder}")
    tokenizer = load_tokenizer(folder)
    if tokenizer.get_vocab() != vocabulary:
        raise ModelError(
            f"student.init {folder} has another vocabulary than the teacher; their token ids would not mean the same; "
            'use a student made for the teacher\'s vocabulary, or init = "project"'
        )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.classifier_dropout = None
    _set_head(config, task)
    weights = read_weights(folder)
    if (folder / PROJECTIONS_FILE).is_file():
        weights |= _read_file(folder / PROJECTIONS_FILE)
    projections, taken = _projections(folder, config, weights)
    student, report = _load(folder, config, weights, keep_head=False, taken=taken)
    check_vocabulary(student, tokenizer, folder)
    return student, projections, report


def save_projections(projections: Projections, folder: Path) -> None:
    """Keep a student's projections beside it, for the stage that goes on with it."""
    found = {}
    for number, part in enumerate(projections):
        for name, tensor in zip(("weight", "bias"), part, strict=True):
            found[f"projections.{number}.{name}"] = tensor.contiguous()
    save_file(found, folder / PROJECTIONS_FILE)


def saved_projections(folder: Path) -> Projections | None:
    """What `save_projections` kept beside the student in `folder`, if anything."""
    file = folder / PROJECTIONS_FILE
    return _projections(folder, _config(folder), _read_file(file))[0] if file.is_file() else None


def to_width(projections: Projections | None, width: int, what: str) -> Projections | None:
    """Projections to the teacher's `width`; none, and it is said, if those of `what` lead to another."""
    if projections is not None and len(projections[0][1]) != width:
        log.warning(
            "%s has projections to a width of %d; the teacher's is %d, so new ones are learnt",
            what,
            len(projections[0][1]),
            width,
        )
        return None
    return projections


def read_weights(folder: Path) -> Weights:
    """The tensors of a checkpoint by its own names, without `module.`; safetensors where there is also a pickle.

    Raises ModelError if there are none, if they cannot be read, or if the pickle holds anything else.
    """
    found = _read_file(folder / SAFETENSORS) if (folder / SAFETENSORS).is_file() else _read_pickle(folder / PICKLED)
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def _read_pickle(file: Path) -> Weights:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _unusable(file.parent, error) from error
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise _no_plain_tensors(file) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise _no_plain_tensors(file)
    return {str(name): tensor for name, tensor in found.items()}


def _read_file(file: Path) -> Weights:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file.parent, error) from error


def _config(folder: Path) -> BertConfig:
    """The configuration in `folder`; one that names no model type, as TinyBERT's, is taken for a BERT's."""
    try:
        given, _ = BertConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    except TypeError as error:
        raise _misconfigured(folder, "holds JSON but no table") from error
    if given.get("model_type", "bert") != "bert":
        raise ModelError(f"{folder} is a {given['model_type']!r} model; only 'bert' is supported")
    for name in SIZES:  # the library would take BERT-base's, and a wrong number of heads fits the weights
        if name not in given:
            raise _misconfigured(folder, f"gives no {name}")
        if not isinstance(given[name], int) or given[name] < 1:
            raise _misconfigured(folder, f"gives {name} {given[name]!r}, which is no whole number above 0")
    for name in ("is_decoder", "add_cross_attention"):  # attention is another then, which losses would not see
        if given.get(name):
            raise ModelError(f"{folder}/config.json gives {name} true, and only encoders are supported; use one")
    if str(given.get("hidden_act", "gelu")) not in ACT2FN:
        raise _misconfigured(folder, f"gives hidden_act {given['hidden_act']!r}, which the library does not know")
    try:
        return BertConfig.from_dict(given)
    except (AttributeError, TypeError, ValueError) as error:
        raise _misconfigured(folder, f"cannot be used ({error})") from error


def _needed(kind: type[PreTrainedModel], config: BertConfig, folder: Path) -> Weights:
    """The weights of a model, without values. Raises ModelError if there can be no such model."""
    try:
        with torch.device("meta"):
            return dict(kind(config).state_dict())
    except Exception as error:  # the library checks most settings by using them
        raise _misconfigured(folder, f"describes no model ({error})") from error


def _set_head(config: BertConfig, task: Task) -> None:
    config.num_labels = task.outputs
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: index for index, label in enumerate(task.labels)}


def _label_order(folder: Path, task: Task) -> list[int]:
    """The checkpoint's class of each of the task's labels. Raises ModelError unless the names are the task's."""
    names = list(label_names(folder))
    mine, theirs = (list(map(folded, known)) for known in (task.labels, names))
    if sorted(mine) != sorted(theirs):
        raise ModelError(
            f"the checkpoint {folder} has labels {names}; {task.name} has {list(task.labels)}; "
            "name its classes in id2label of its config.json, in the order it was trained with"
        )
    return [theirs.index(label) for label in mine]


def _load(
    folder: Path, config: BertConfig, weights: Weights, *, keep_head: bool, taken: Collection[str] = ()
) -> tuple[BertForSequenceClassification, LoadReport]:
    """The model with these weights; `taken` are in use elsewhere.

    Raises ModelError if weights that the encoder needs are missing or of another shape, or if it has no use for some.
    The pooler may be missing where the head is fresh.
    """
    needed = _needed(BertForSequenceClassification, config, folder)
    used, ignored = dict[str, str](), list[str]()
    for name in weights:
        ours = _our_name(name)
        if ours in needed and ours not in used and (keep_head or not ours.startswith(HEAD)):
            used[ours] = name
        elif name not in taken:
            ignored.append(name)
    report = LoadReport(len(weights) - len(ignored), tuple(ignored), tuple(name for name in needed if name not in used))
    # A load that leaves nothing over, as of each of the tool's own models, is not worth a line on the screen.
    level = logging.INFO if report.ignored or report.missing else logging.DEBUG
    log.log(level, "checkpoint %s: %s", folder, report.sentence())
    missing = [name for name in report.missing if keep_head or not name.startswith((HEAD, "bert.pooler."))]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights that a BERT {'classifier' if keep_head else 'encoder'} needs "
            f"(first: {missing[0]}); they would start at random; use a complete checkpoint"
        )
    misfits = [name for name in ignored if _our_name(name).startswith("bert.encoder.")]
    misfits += [name for ours, name in used.items() if weights[name].shape != needed[ours].shape]
    if misfits:
        raise ModelError(
            f"{folder} has {misfits[0]} of shape {tuple(weights[misfits[0]].shape)}, which is no part of the model in "
            "its config.json; use the config.json that the weights were saved with"
        )
    state = {ours: weights[name] for ours, name in used.items()}
    return BertForSequenceClassification.from_pretrained(None, config=config, state_dict=state), report


def _our_name(name: str) -> str:
    """What the model calls a weight of a checkpoint."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def _projections(folder: Path, config: BertConfig, weights: Weights) -> tuple[Projections | None, set[str]]:
    """Projections and the names of their tensors. A checkpoint may have no biases. Raises ModelError if none fit."""
    for family in (r"projections\.\d+", r"fit_denses\.\d+", "fit_dense"):
        stems = [name.removesuffix(".weight") for name in weights if re.fullmatch(rf"{family}\.weight", name)]
        if stems:
            break
    else:
        return None, set()
    stems.sort(key=lambda stem: int(stem.rpartition(".")[2]) if "." in stem else 0)
    layers, narrow = config.num_hidden_layers, config.hidden_size
    found = [weights[f"{stem}.weight"].float() for stem in stems]
    shapes = [tuple(weight.shape) for weight in found]
    if len(shapes) not in (1, layers + 1) or set(shapes) != {(shapes[0][0], narrow)}:
        raise ModelError(
            f"the student {folder} has projections of shapes {shapes}; a student of {layers} layers has 1 or "
            f"{layers + 1}, all (teacher width, {narrow}); use a complete checkpoint"
        )
    biases = [weights.get(f"{stem}.bias", torch.zeros(shapes[0][0])).float() for stem in stems]
    names = {f"{stem}.{part}" for stem in stems for part in ("weight", "bias")}
    return list(zip(found, biases, strict=True)), names


def _lower_case(folder: Path) -> tuple[bool, str]:
    """Whether the tokenizer lower-cases, and the file that says so; where none does, the vocabulary shows it.

    A vocabulary made from lower-case text has no piece with a capital but the special ones in brackets.
    """
    normalizer = _json(folder / "tokenizer.json").get("normalizer") or {}
    for name, said in (
        ("tokenizer_config.json", _json(folder / "tokenizer_config.json").get("do_lower_case")),
        ("tokenizer.json", normalizer.get("lowercase")),
        ("config.json", _json(folder / "config.json").get("do_lower_case")),
    ):
        if isinstance(said, bool):
            return said, name
    pieces = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    # Not isupper(): some symbols are capitals that have no lower-case form.
    return not any(piece != piece.lower() for piece in pieces if not re.fullmatch(r"\[.*\]", piece)), "vocab.txt"


def _json(file: Path) -> dict[str, Any]:
    """The table in a JSON file; an empty one if there is no such file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (", ".join(names[:NAMED]) or "none") + more


def _unusable(folder: Path, error: Exception) -> ModelError:
    reason = str(error).strip().partition("\n")[0]
    return ModelError(f"the checkpoint {folder} cannot be loaded ({reason}); save it again with save_pretrained()")


def _misconfigured(folder: Path, mistake: str) -> ModelError:
    return ModelError(f"{folder}/config.json {mistake}; use the one that the weights were saved with")


def _no_plain_tensors(file: Path) -> ModelError:
    return ModelError(
        f"{file} is damaged or holds more than tensors by name, and a pickle of anything else can run code; "
        "save the model again with save_pretrained()"
    )
