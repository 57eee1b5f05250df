"""BERT classifiers: loading, new students, and what one forward pass shows of the inside.

Shape legend: B batch, S sequence, D hidden width, H heads, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.utils import logging as transformers_logging

from compressor.config import StudentConfig
from compressor.errors import ModelError, SourceError
from compressor.tasks import Task

transformers_logging.set_verbosity_error()  # "newly initialised" warnings: the load is checked here instead


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer saved in `folder`. Raises SourceError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True)
    except Exception as error:  # the libraries raise no narrower class for a missing or broken file
        raise SourceError(f"{folder} holds no tokenizer that can be loaded; save it with save_pretrained()") from error
    if not tokenizer.is_fast:
        raise SourceError(f"the tokenizer in {folder} has no tokenizer.json; save it as a fast tokenizer")
    return tokenizer


def load_encoder(folder: Path, task: Task) -> BertForSequenceClassification:
    """A pretrained BERT with a fresh classification head for `task`. Raises ModelError if it is no BERT."""
    config = _bert_config(folder)
    config.num_labels = len(task.labels)
    config.id2label = dict(enumerate(task.labels))
    config.label2id = {label: index for index, label in enumerate(task.labels)}
    model, report = _load(folder, config)
    _refuse_missing(folder, report, allowed=("classifier.", "bert.pooler."))
    return model


def load_classifier(folder: Path, task: Task) -> BertForSequenceClassification:
    """A fine-tuned BERT, its classes put in the task's order by name.

    Raises ModelError if it is no BERT classifier, if weights are missing, or if its labels are not the task's.
    """
    config = _bert_config(folder)
    names = [str(config.id2label[index]).casefold() for index in range(config.num_labels)]
    if sorted(names) != sorted(task.labels):
        raise ModelError(
            f"the checkpoint {folder} has labels {names}; {task.name} has {list(task.labels)}; "
            "name its classes in id2label of its config.json, in the order it was trained with"
        )
    model, report = _load(folder, config)
    _refuse_missing(folder, report, allowed=())
    order = [names.index(label) for label in task.labels]
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight[order].clone())
        model.classifier.bias.copy_(model.classifier.bias[order].clone())
    model.config.id2label = dict(enumerate(task.labels))
    model.config.label2id = {label: index for index, label in enumerate(task.labels)}
    return model


def check_vocabulary(model: BertForSequenceClassification, tokenizer: Any, folder: Path) -> None:
    """Raise ModelError if the tokenizer can make ids that the model has no embedding for."""
    rows = model.config.vocab_size
    if len(tokenizer) > rows:
        raise ModelError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens and the model {rows} word embeddings; they do not "
            "belong together; use the tokenizer that the model was trained with"
        )


def _bert_config(folder: Path) -> BertConfig:
    try:
        config, _ = BertConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    if config.get("model_type", "bert") != "bert":
        raise ModelError(f"{folder} is a {config['model_type']!r} model; only 'bert' is supported")
    return BertConfig.from_dict(config)


def _load(folder: Path, config: BertConfig) -> tuple[BertForSequenceClassification, dict[str, Any]]:
    """The checkpoint, and the library's report of what it lacks. Raises ModelError if it cannot be read."""
    try:
        model, report = BertForSequenceClassification.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    return model, report


def _unusable(folder: Path, error: Exception) -> ModelError:
    reason = str(error).strip().partition("\n")[0]
    return ModelError(f"the checkpoint {folder} cannot be loaded ({reason}); save it again with save_pretrained()")


def _refuse_missing(folder: Path, report: dict[str, Any], allowed: tuple[str, ...]) -> None:
    missing = [name for name in report["missing_keys"] if not name.startswith(allowed or ("\0",))]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights that a BERT classifier needs (first: {missing[0]}); "
            "they would start at random; use a complete checkpoint"
        )


@dataclass(frozen=True)
class Activations:
    """One forward pass."""

    logits_BC: Tensor
    hidden: tuple[Tensor, ...]
    """Embedding output, then each layer's output: (B, S, D)."""
    scores: dict[int, Tensor]
    """By layer: attention scores QK/sqrt(head size) before mask and softmax, (B, H, S, S)."""


class Observed(nn.Module):
    """A classifier whose forward pass also gives hidden states and, at the layers asked for, attention scores.

    The model itself runs fused attention, which hands out no scores; they are worked out again from the outputs of
    the query and key layers, at the observed layers only.
    """

    def __init__(self, model: BertForSequenceClassification, layers: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self._layers = tuple(layers)
        self._heads = model.config.num_attention_heads
        self._seen: dict[tuple[int, str], Tensor] = {}
        for layer in self._layers:
            attention = model.bert.encoder.layer[layer].attention.self
            for name in ("query", "key"):
                getattr(attention, name).register_forward_hook(self._keep(layer, name))

    def _keep(self, layer: int, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._seen[layer, name] = output

        return hook

    def forward(self, input_ids_BS: Tensor, mask_BS: Tensor) -> Activations:
        """One pass through the model."""
        output = self.model(input_ids=input_ids_BS, attention_mask=mask_BS, output_hidden_states=True)
        scores = {layer: self._scores(layer) for layer in self._layers}
        self._seen.clear()
        return Activations(output.logits, output.hidden_states, scores)

    def _scores(self, layer: int) -> Tensor:
        query_BHSd, key_BHSd = (self._split(self._seen[layer, name]) for name in ("query", "key"))
        return query_BHSd @ key_BHSd.transpose(-1, -2) / math.sqrt(query_BHSd.shape[-1])

    def _split(self, states_BSD: Tensor) -> Tensor:
        batch, size, width = states_BSD.shape
        return states_BSD.view(batch, size, self._heads, width // self._heads).transpose(1, 2)


def layer_map(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Teacher layer (from 0) that each student layer learns from: the last of each of equal parts.

    Where the depths do not divide, parts differ by one layer. 4 of 12 gives 2, 5, 8, 11; 4 of 6 gives 1, 2, 4, 5.
    Raises ModelError if the student is deeper than the teacher. Source: TinyBERT's uniform mapping.
    """
    if student_layers > teacher_layers:
        raise ModelError(
            f"student.layers is {student_layers} and the teacher has {teacher_layers}; give the student at most as many"
        )
    return tuple(round((layer + 1) * teacher_layers / student_layers + 1e-9) - 1 for layer in range(student_layers))


def student_shape(config: StudentConfig, teacher: BertConfig) -> BertConfig:
    """The configuration of a student: its own sizes, the teacher's vocabulary, positions and labels; no dropout."""
    shape = BertConfig.from_dict(teacher.to_dict())
    shape.num_hidden_layers = config.layers
    shape.hidden_size = config.hidden
    shape.num_attention_heads = config.heads
    shape.intermediate_size = config.intermediate
    shape.hidden_dropout_prob = shape.attention_probs_dropout_prob = 0.0
    return shape


def random_student(shape: BertConfig, seed: int) -> BertForSequenceClassification:
    """A student with fresh weights."""
    torch.manual_seed(seed)
    return BertForSequenceClassification(shape)


def copied_student(shape: BertConfig, teacher: BertForSequenceClassification) -> BertForSequenceClassification:
    """A student that starts as the teacher's mapped layers. Raises ModelError if the widths differ."""
    for name in ("hidden_size", "num_attention_heads", "intermediate_size"):
        mine, theirs = getattr(shape, name), getattr(teacher.config, name)
        if mine != theirs:
            raise ModelError(
                f'init = "teacher-layers" needs the teacher\'s {name}: {theirs}, not {mine}; use init = "project"'
            )
    student = BertForSequenceClassification(shape)
    student.bert.embeddings.load_state_dict(teacher.bert.embeddings.state_dict())
    for layer, source in enumerate(layer_map(shape.num_hidden_layers, teacher.config.num_hidden_layers)):
        student.bert.encoder.layer[layer].load_state_dict(teacher.bert.encoder.layer[source].state_dict())
    student.bert.pooler.load_state_dict(teacher.bert.pooler.state_dict())
    student.classifier.load_state_dict(teacher.classifier.state_dict())
    return student


def general_student(
    folder: Path, shape: BertConfig, vocabulary: dict[str, int], task: Task
) -> BertForSequenceClassification:
    """A general student from a checkpoint. Raises ModelError if its shape or vocabulary is not what is needed."""
    student = load_encoder(folder, task)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        mine, theirs = getattr(shape, name), getattr(student.config, name)
        if mine != theirs:
            raise ModelError(f"student.init {folder} has {name} {theirs}; the recipe's [student] asks for {mine}")
    if load_tokenizer(folder).get_vocab() != vocabulary:
        raise ModelError(
            f"student.init {folder} has another vocabulary than the teacher; their token ids would not mean the same; "
            'use a student made for the teacher\'s vocabulary, or init = "project"'
        )
    student.config.hidden_dropout_prob = student.config.attention_probs_dropout_prob = 0.0
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return student
