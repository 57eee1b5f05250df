"""What a build is made of: the sections of a recipe, as frozen values that are checked."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from compressor.machine import TargetCpu
from compressor.section import Fraction, Name, Positive, Rate, Section, refuse_unused
from compressor.tasks import TaskConfig, find_task
from compressor.triton_releases import format_for

STUDENT_INITS = ("project", "teacher-layers", "random", "general")
ADAPT = "adapt"  # as augment.masked_lm: made here
ENGLISH = "en"  # as augment.stop_words: the list that comes with the package


class CorpusConfig(Section):
    """Where the labelled text comes from and how it is split."""

    source: Name
    """`index:`, `hub:`, or the path of a file or folder."""
    undecided: Annotated[float, Field(ge=0)] = 0.5
    """Rated texts whose mean rating is smaller than this in size are left out (ratings run from -4 to 4)."""
    validation: Rate = 0.1
    """Share of the rows held out to choose by, where the source has no validation split."""
    test: Rate = 0.1
    """Share of the rows held out to report on, where the source is one file."""

    @model_validator(mode="after")
    def _some_rows_are_left(self) -> CorpusConfig:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation is {self.validation} and test is {self.test}; together they must be below 1")
        return self


class AugmentConfig(Section):
    """TinyBERT's word replacement."""

    copies: Positive
    """Augmented texts asked for per original one (N_a in the paper)."""
    replace_probability: Rate = 0.4
    """Chance of each eligible word to be replaced in a copy (p_t)."""
    candidates: Positive = 15
    """Replacement words considered per word (K)."""
    vectors: Name
    """Word vectors: `package:` or the path of a GloVe text file."""
    masked_lm: Name | None = None
    """Masked language model for words that are one word piece; none = word vectors for every word."""
    stop_words: Name = ENGLISH
    """Words that are never replaced nor put in another's place: `en`, or the path of a list, a word on each line."""
    keep_names: bool = True
    """Leave words alone that have a capital within a sentence. For languages that write nouns so, turn it off."""
    regression: bool = False
    """Augment a regression as well: copies get the score of their original, although their text is another."""
    max_disagreement: Fraction | None = None
    """Drop copies whose other labels have, by the teacher, a total probability above this; none = keep all."""


Precision = Literal["auto", "fp32", "bf16", "fp16"]


class Optimisation(Section):
    """What every training stage needs to know."""

    epochs: Annotated[float, Field(gt=0, le=1000)]
    """Passes over the rows; a fraction stops part of the way."""
    learning_rate: Rate
    """Peak learning rate of AdamW."""
    batch_size: Positive = 32
    """Rows per optimiser step, over all processes together."""
    schedule: Literal["linear", "constant"] = "linear"
    """Decay of the learning rate after the warm-up."""
    warmup: Fraction = 0.1
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: Fraction = 0.01
    """Decoupled weight decay; biases and LayerNorm have none."""
    precision: Precision = "auto"
    """Arithmetic of the forward pass; `auto`: bf16 where the hardware has it, else fp16 on a GPU and fp32 on a CPU."""
    accumulate: Positive = 1
    """Parts that each process cuts its rows of a step into, to need less memory; the result is the same."""


class FinetuneConfig(Optimisation):
    """The teacher."""

    base: Name
    """Pretrained encoder that the teacher starts from."""
    teacher: Name | None = None
    """A checkpoint already fine-tuned, adopted instead of training one (also `--teacher`)."""


class StudentConfig(Section):
    """Shape and start of the student; the defaults are TinyBERT's 4 layers."""

    layers: Positive = 4
    hidden: Positive = 312
    heads: Positive = 12
    intermediate: Positive = 1200
    init: Name = "project"
    """`project`, `teacher-layers`, `random`, `general` (the recipe's [general]), or the source of a general student."""
    layer_map: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    """Teacher layer, from 1, that each student layer learns from; if not given, the last of each of equal parts."""

    @model_validator(mode="after")
    def _fits_together(self) -> StudentConfig:
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of heads ({self.heads})")
        if self.layer_map is not None:
            if len(self.layer_map) != self.layers:
                raise ValueError(
                    f"layer_map has {len(self.layer_map)} entries; it needs one for each of {self.layers} layers"
                )
            if list(self.layer_map) != sorted(set(self.layer_map)):
                raise ValueError(f"layer_map is {list(self.layer_map)}; its entries must rise")
        return self


class Imitation(Optimisation):
    """How a student learns a teacher's inside: TinyBERT's embedding, hidden and attention terms."""

    attention: Literal["scores", "relations"] = "scores"
    """Scores before softmax, head by head (TinyBERT), or relations of queries, keys and values (MiniLMv2)."""
    relation_heads: Positive = 12
    """Heads that both models' widths are cut into for relations."""
    projection: Literal["per-layer", "shared"] = "per-layer"
    """Maps from the student's to the teacher's width: one for each layer (the paper) or one for all (its code)."""
    normalisation: Literal["tokens", "published"] = "tokens"
    """Means over real tokens, or as the published code has them: padding included, cross-entropy over classes too."""

    @model_validator(mode="after")
    def _relations_have_heads(self) -> Imitation:
        if self.attention == "scores":
            refuse_unused(self, ("relation_heads",), 'attention is "scores", which are compared head by head')
        return self


class GeneralConfig(Imitation):
    """General distillation: a pretrained teacher's inside, learnt on any text."""

    source: Name
    """Text: `package:`, `hub:`, or the path of .txt (a document a line), .tsv, .csv, .jsonl or .parquet files."""
    column: str = "text"
    """The column that holds the text in files that have columns."""
    teacher: Name | None = None
    """Pretrained encoder to learn from; finetune.base if not given."""
    init: Literal["project", "teacher-layers", "random"] = "random"
    """What the general student starts from."""
    block_tokens: Annotated[int, Field(ge=8, le=512)] = 128
    """Length of the blocks that the text is packed into, [CLS] and [SEP] included."""


class AdaptConfig(Optimisation):
    """A masked language model for augmentation, made from the teacher's base encoder: augment.masked_lm = "adapt"."""

    corpus: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Text to learn from besides the task's training rows: sources as of [general]."""
    corpus_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each corpus' documents that is used, spread evenly over it."""
    column: str = "text"
    """The column that holds the text in files that have columns."""
    epochs: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Passes over all the text; a fraction stops part of the way."""
    learning_rate: Rate = 1e-3
    """Peak learning rate of the masked-LM head."""
    encoder_learning_rate: Rate = 3e-4
    """Peak learning rate of the encoder, the word embeddings included."""
    batch_size: Positive = 32
    """Blocks per optimiser step, over all processes together."""
    block_tokens: Annotated[int, Field(ge=8, le=512)] = 64
    """Length of the blocks that the text is packed into, [CLS] and [SEP] included."""
    mask_probability: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    """Share of the tokens to be found again: 80 % of them masked, 10 % another token, 10 % left."""


class DistillConfig(Imitation):
    """One stage of distillation."""

    objective: Literal["intermediate", "prediction"]
    """Which of TinyBERT's two task stages this is."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides both models' logits in the soft cross-entropy."""

    @model_validator(mode="after")
    def _settings_are_of_the_objective(self) -> DistillConfig:
        inside, answers = ("attention", "relation_heads", "projection"), ("temperature",)
        unused = inside if self.objective == "prediction" else answers
        refuse_unused(self, unused, f"objective is {self.objective!r}")
        return self


class ExportConfig(Section):
    """The ONNX graphs and their parity gates."""

    format: Literal["onnx"] = "onnx"
    targets: Annotated[tuple[Literal["cpu", "gpu"], ...], Field(min_length=1, strict=False)] = ("cpu",)
    """`cpu` is the fp32 graph, which INT8 is made from; `gpu` adds one in fp16, for publish.runtime
    `onnxruntime`."""
    triton_release: str = "24.10"
    """Container release of the Triton that will serve, 24.06 or later: what it must be able to read."""
    exporter: Literal["auto", "optimum", "torch"] = "auto"
    """What writes the graph; `auto` is Optimum, or PyTorch itself with a Transformers that Optimum cannot work with."""
    max_logit_difference: Annotated[float, Field(gt=0)] = 1e-4
    """Parity gate: largest difference to PyTorch on any validation text."""
    max_logit_difference_fp16: Annotated[float, Field(gt=0)] = 5e-2
    """The same for the fp16 graph."""
    max_weight_outlier: Annotated[float, Field(gt=1)] = 30.0
    """Outlier gate: largest norm of a row or column of a dense weight, as a multiple of the median one of that weight,
    and of a column of an embedding table, of the word table. Healthy students, their teachers and MiniLM have at most
    6.7, and 2.5 in tables."""

    @model_validator(mode="after")
    def _has_a_cpu_graph(self) -> ExportConfig:
        if "cpu" not in self.targets:
            raise ValueError(f'targets are {list(self.targets)}; "cpu" must be among them: INT8 is made from its graph')
        format_for(self.triton_release)
        return self


Int8Candidate = Literal[
    "static",
    "static-percentile",
    "static-entropy",
    "static-smooth",
    "static-per-tensor",
    "static-u8",
    "static-qat",
    "per-row",
    "per-row-u8",
    "dynamic",
    "dynamic-per-tensor",
    "dynamic-fp32-embeddings",
]


class QuantizeConfig(Section):
    """The INT8 candidates and their accuracy gate."""

    candidates: Annotated[tuple[Int8Candidate, ...], Field(min_length=1, strict=False)] = (
        "static",
        "static-percentile",
        "static-smooth",
        "static-u8",
        "per-row",
        "per-row-u8",
        "dynamic",
        "static-qat",
    )
    """INT8 schemes to try; the fastest within the bounds wins. Those in `u8` are for targets without VNNI, others leave
    them out. `static-qat` trains, if all others miss the bounds."""
    max_metric_drop: Fraction = 0.005
    """Accuracy gate: largest loss on the validation set against the fp32 student, in any batch that a server makes."""
    max_label_flips: Fraction = 0.0
    """Invariance gate: largest share of validation texts whose answer depends on the batch that they are in; with 0
    their logits may not either, by more than 1e-5."""
    min_agreement: Fraction = 0.97
    """Agreement gate: least share of validation texts with the fp32 student's answer. Where it is less by no more than
    so few rows can show (95 %), it holds; a regression has no such gate."""
    max_excluded: Annotated[int, Field(ge=0)] = 3
    """Most dense products that a candidate that loses too much may leave in fp32, the most harmful first."""
    calibration_rows: Positive = 512
    """Training texts that set the activation ranges of the static schemes."""
    target_cpu: TargetCpu = "auto"
    """Instruction set of the machine that will serve; `auto` is this one. Without VNNI signed weights get 7 bits."""
    trim_vocabulary: bool = False
    """Keep only word pieces used by the training text, and by vocabulary_texts if given; others become smaller pieces.
    """
    vocabulary_texts: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """More text whose word pieces are kept: sources as of [general]."""
    vocabulary_column: str = "text"
    """The column that holds the text in files of `vocabulary_texts` that have columns."""

    @model_validator(mode="after")
    def _texts_have_a_use(self) -> QuantizeConfig:
        if self.vocabulary_texts and not self.trim_vocabulary:
            raise ValueError("vocabulary_texts are given and trim_vocabulary is false; set it, or drop the texts")
        if not self.vocabulary_texts:
            refuse_unused(self, ("vocabulary_column",), "there are no vocabulary_texts")
        return self


class PublishConfig(Section):
    """The model repository."""

    runtime: Literal["embedded", "onnxruntime"] = "embedded"
    """What runs the graphs: the models' own processes, which every Triton can do, or the backend of that name, which
    the official containers have."""
    max_batch_size: Positive = 64
    cores: Positive | None = None
    """Cores of the machine that will serve, which instances and threads are made for; none = those of this one."""
    teacher: bool = True
    """Also publish the teacher, for comparison through the same server."""
    response_cache: bool = False
    """Let the server keep answers for requests that repeat."""
    cascade: bool = False
    """Also publish <task>_cascade: the student answers where it is sure enough, and the teacher elsewhere."""
    cascade_accuracy: Fraction | None = None
    """Accuracy on the validation rows that the cascade must reach; none = the teacher's."""


class BuildConfig(Section):
    """A whole recipe."""

    task: TaskConfig
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the splits, the augmentation, the order of rows, dropout and new weights."""
    corpus: CorpusConfig
    augment: AugmentConfig | None = None
    adapt: AdaptConfig | None = None
    finetune: FinetuneConfig
    general: GeneralConfig | None = None
    student: StudentConfig
    distill: Annotated[tuple[DistillConfig, ...], Field(min_length=1, strict=False)]
    export: ExportConfig = ExportConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    publish: PublishConfig = PublishConfig()

    @property
    def adaptation(self) -> AdaptConfig | None:
        """How the masked LM of the augmentation is made, if it is made here."""
        if self.augment is None or self.augment.masked_lm != ADAPT:
            return None
        return self.adapt or AdaptConfig()

    @property
    def max_tokens(self) -> int:
        """Longest input in word pieces."""
        return self.task.max_tokens or self.task.row().max_tokens

    @model_validator(mode="after")
    def _sections_fit_together(self) -> BuildConfig:
        is_regression = self.task.is_regression if self.task.is_own else find_task(self.task.name).is_regression
        if self.augment is not None and is_regression and not self.augment.regression:
            raise ValueError(
                f"{self.task.name} is a regression, and [augment] would copy scores to changed texts; drop it, or set "
                "augment.regression = true"
            )
        if self.augment is not None and is_regression and self.augment.max_disagreement is not None:
            raise ValueError(f"{self.task.name} is a regression, whose teacher has no labels; drop max_disagreement")
        if self.student.init == "general" and self.general is None:
            raise ValueError('student.init is "general" and the recipe has no [general]; add one')
        if self.general is not None and self.student.init != "general":
            raise ValueError(
                f"the recipe has a [general] that nothing begins with: student.init is {self.student.init!r}; "
                'set it to "general", or drop the section'
            )
        if is_regression:
            for stage in self.distill:
                refuse_unused(stage, ("temperature",), f"{self.task.name} is a regression")
        kinds = [self.general.projection] if self.general is not None else []
        kinds += [stage.projection for stage in self.distill if stage.objective == "intermediate"]
        if ("per-layer", "shared") in pairwise(kinds):
            raise ValueError(
                'a stage has projection "shared" after one with "per-layer", whose projections it goes on with; '
                "set both alike"
            )
        if self.adapt is not None and self.adaptation is None:
            raise ValueError('[adapt] makes the model of augment.masked_lm = "adapt", which is not set; set or drop it')
        return self
