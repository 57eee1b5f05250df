"""Which student can learn from which teacher: rules on the sizes of models, checked before there is any weight.

Nothing is loaded here but small files, so that a plan can check them too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.config import STUDENT_INITS, BuildConfig, Imitation, StudentConfig
from compressor.errors import ModelError
from compressor.sources import package_folder

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a BERT's config.json says of its size, by the names that it has there."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int

    @staticmethod
    def of(config: Any) -> Sizes:
        """The sizes in a `BertConfig`."""
        return Sizes(**{name: getattr(config, name) for name in Sizes.__dataclass_fields__})

    def student(self, config: StudentConfig) -> Sizes:
        """The sizes of a new student of this teacher."""
        own = (config.layers, config.hidden, config.heads, config.intermediate)
        return Sizes(**(vars(self) | dict(zip(SIZES, own, strict=True))))


def at_hand(source: str) -> tuple[Path, Sizes] | None:
    """The folder and the sizes of a model that is here already; None where only its stage can say, or find fault."""
    kind, _, name = source.partition(":")
    if kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else None
    else:
        folder = package_folder(name, what="a source") if kind == "package" else Path(source)
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError):
        return None
    if not isinstance(given, dict):
        return None
    found = {"max_position_embeddings": 512, "type_vocab_size": 2} | given  # the library's, where a file is silent
    sizes = {name: size for name in Sizes.__dataclass_fields__ if isinstance(size := found.get(name), int)}
    return (folder, Sizes(**sizes)) if folder and len(sizes) == len(Sizes.__dataclass_fields__) else None


def check_recipe(config: BuildConfig) -> None:
    """Refuse students that cannot learn from their teachers, as far as their config.json files are at hand.

    Raises ModelError as the stages would, hours later.
    """
    student, is_pair = config.student, config.task.row().is_pair

    def reaches(folder: Path, sizes: Sizes) -> None:
        check_reach(sizes, max_tokens=config.max_tokens, is_pair=is_pair, folder=folder)

    if teacher := at_hand(config.finetune.teacher or config.finetune.base):
        reaches(*teacher)
        for number, stage in enumerate(config.distill):
            imitation = stage if stage.objective == "intermediate" else None
            check_student(student, teacher[1], imitation, init=None if number else student.init)
    if config.general is not None and (base := at_hand(config.general.teacher or config.finetune.base)):
        check_student(student, base[1], config.general, init=config.general.init)
        check_blocks(config.general.block_tokens, base[1], base[0])
        reaches(*base)
    elif teacher and student.init not in STUDENT_INITS and (start := at_hand(student.init)):
        check_same(teacher[1].student(student), start[1], f"student.init {start[0]}")
        reaches(*start)


def check_student(
    config: StudentConfig, teacher: Sizes, imitation: Imitation | None, *, init: str | None
) -> tuple[int, ...]:
    """The teacher's layer (from 0) for each of the student's.

    Raises ModelError if a student cannot begin as `init` says (None: it has begun already), or cannot be compared with
    the teacher as `imitation` says.
    """
    layers, student = layer_map(config.layers, teacher.num_hidden_layers, config.layer_map), teacher.student(config)
    if imitation is not None:
        refuse_unlike(imitation, student, teacher)
    if init == "project":
        check_projected(student, teacher)
    if init == "teacher-layers":
        check_copied(student, teacher)
    return layers


def layer_map(student_layers: int, teacher_layers: int, given: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Teacher layer (from 0) that each student layer learns from: `given` (from 1), or the last of each of equal parts.

    Where the depths do not divide, parts differ by one layer. 4 of 12 gives 2, 5, 8, 11; 4 of 6 gives 1, 2, 4, 5.
    Raises ModelError if the teacher is not deep enough. Source: TinyBERT's uniform mapping.
    """
    if student_layers > teacher_layers:
        raise ModelError(
            f"student.layers is {student_layers} and the teacher has {teacher_layers} layers; "
            f"1 to {teacher_layers} are possible"
        )
    if given is None:
        return tuple(round((layer + 1) * teacher_layers / student_layers + 1e-9) - 1 for layer in range(student_layers))
    if len(given) != student_layers:
        raise ModelError(
            f"student.layer_map is {list(given)} and the student has {student_layers} layers; give one entry for each"
        )
    beyond = [layer for layer in given if not 1 <= layer <= teacher_layers]
    if beyond:
        raise ModelError(
            f"student.layer_map names {beyond} and the teacher has {teacher_layers} layers; "
            f"1 to {teacher_layers} are possible"
        )
    return tuple(layer - 1 for layer in given)


def refuse_unlike(config: Imitation, student: Sizes, teacher: Sizes) -> None:
    """Raise ModelError if the attention of two models of these sizes cannot be compared as `config` says."""
    if config.attention == "scores":
        mine, theirs = student.num_attention_heads, teacher.num_attention_heads
        if mine != theirs:
            raise ModelError(
                f"the student has {mine} attention heads and the teacher {theirs}; scores are compared head by head; "
                f'set attention = "relations", or student.heads to {theirs}'
            )
        return
    widths, heads = (student.hidden_size, teacher.hidden_size), config.relation_heads
    if any(width % heads for width in widths):
        raise ModelError(
            f"relation_heads is {heads}, which does not divide the widths of student and teacher, "
            f"{widths[0]} and {widths[1]}; choose a divisor of {math.gcd(*widths)}"
        )


def check_projected(student: Sizes, teacher: Sizes) -> None:
    """Raise ModelError if a student cannot be the projection of a teacher."""
    if student.hidden_size > teacher.hidden_size:
        raise ModelError(
            f'init = "project" cannot widen: student.hidden is {student.hidden_size} and the teacher\'s '
            f"{teacher.hidden_size}; give at most {teacher.hidden_size}"
        )
    if student.num_attention_heads != teacher.num_attention_heads:
        raise ModelError(
            f'init = "project" keeps the teacher\'s heads: student.heads is {student.num_attention_heads} and the '
            f"teacher's {teacher.num_attention_heads}; give {teacher.num_attention_heads}"
        )


def check_copied(student: Sizes, teacher: Sizes) -> None:
    """Raise ModelError if a student cannot be made of a teacher's layers."""
    for name in SIZES[1:]:
        mine, theirs = getattr(student, name), getattr(teacher, name)
        if mine != theirs:
            raise ModelError(
                f'init = "teacher-layers" needs the teacher\'s {name}: {theirs}, not {mine}; use init = "project"'
            )


def check_same(wanted: Sizes, found: Sizes, what: str) -> None:
    """Raise ModelError if a student that was made before is not of the shape that the recipe asks for."""
    for name in SIZES:
        mine, theirs = getattr(wanted, name), getattr(found, name)
        if mine != theirs:
            raise ModelError(f"{what} has {name} {theirs}; the recipe's [student] asks for {mine}")


def check_reach(sizes: Sizes, *, max_tokens: int, is_pair: bool, folder: Path) -> None:
    """Raise ModelError unless a model reads rows of `max_tokens`, and tells the texts of a pair apart."""
    if sizes.max_position_embeddings < max_tokens:
        raise ModelError(
            f"max_tokens is {max_tokens} and the model in {folder} reads at most {sizes.max_position_embeddings} "
            "tokens; set task.max_tokens to that or less"
        )
    if is_pair and sizes.type_vocab_size < 2:
        raise ModelError(
            f"the model in {folder} has type_vocab_size {sizes.type_vocab_size} and the task has pairs of texts, "
            "which need 2; give another checkpoint"
        )


def check_blocks(block_tokens: int, teacher: Sizes, folder: Path) -> None:
    """Raise ModelError if a teacher does not read blocks of general distillation."""
    if block_tokens > teacher.max_position_embeddings:
        raise ModelError(
            f"general.block_tokens is {block_tokens} and the teacher {folder} reads at most "
            f"{teacher.max_position_embeddings} tokens; make the blocks shorter"
        )
