"""What a server must know of one classifier."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.cores import available_cores
from serving.errors import ModelError

Text = str | tuple[str, str]
"""What a model reads: one text, or two for a model of pairs."""

Runtime = Literal["embedded", "onnxruntime"]
"""What runs the graphs: ONNX Runtime in the models' own processes, which every Triton can do, or the backend of its own
that the official containers have, and the server of the `nvidia-pytriton` package lacks."""

MAX_INSTANCES = 8
"""Each instance is a process with its own copy of the weights, so more cores than this become threads instead."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """How requests wait for a model."""

    max_delay_us: int = 0
    """Longest wait, in microseconds, for more requests to share a batch. 0 answers a lone request soonest, and requests
    that come while all instances are busy share a batch all the same."""

    max_requests: int | None = None
    """Requests that may wait; one more is refused at once. None sets no limit.

    Any limit, this one or the next, has a price in Triton (measured with 2.51, one instance, busy cores): it switches
    the batcher's prefetching off, and then about 1 request in 100 waits half a second beside an idle instance, because
    the batcher misses its wake-up. Without a limit that does not happen.
    """

    timeout_ms: int | None = None
    """A request that waited longer, in milliseconds, is refused. None lets it wait; a gRPC client that gives up takes
    its request out of the queue all the same, an HTTP client does not."""

    def __post_init__(self) -> None:
        """Raise ModelError if a number is out of range."""
        if self.max_delay_us < 0:
            raise ModelError(f"queue.max_delay_us is {self.max_delay_us}; it must be 0 (no wait) or more")
        for name, value in (("max_requests", self.max_requests), ("timeout_ms", self.timeout_ms)):
            if value is not None and value < 1:
                raise ModelError(f"queue.{name} is {value}; it must be at least 1, or None for no limit")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One classifier, as files and numbers: a text, or a pair, goes in; one of `labels`, or a number, comes out."""

    name: str
    """The task, for example "sst2"; the folders in the repository are named after it."""

    onnx: Path
    """ONNX graph: int64 [batch, sequence] `input_ids`, `attention_mask` and, if it has it, `token_type_ids`;
    float32 [batch, labels] `logits`, or [batch, 1] for a regression. One file, without external data."""

    tokenizer: Path
    """The `tokenizer.json` of the model."""

    runtime: Runtime = "embedded"
    """What runs the graph in the server."""

    gpu_onnx: Path | None = None
    """The same graph in fp16, for the GPU configurations of the runtime `onnxruntime`; None writes none."""

    labels: tuple[str, ...]
    """Label names in the order of the logits; () is a regression, which answers its one logit as a number."""

    pair: bool = False
    """Whether the model reads two texts, as [CLS] first [SEP] second [SEP]."""

    max_tokens: int
    """Longest sequence in tokens, the special ones included; a longer text, or the longer one of a pair, is cut."""

    max_batch_size: int = 64
    """Most texts that run as one batch, and the most that one request may hold."""

    max_batch_tokens: int = 8192
    """Most tokens, padding included, that run as one batch: it bounds the memory that long texts take."""

    cores: int | None = None
    """Cores of the machine that will serve; None takes those that this process may use."""

    intra_op_threads: int | None = None
    """Threads of each instance; None shares the cores among the instances."""

    instances: int | None = None
    """Processes that serve the model side by side; None makes one per core, at most 8."""

    warmup_texts: tuple[Text, ...] = ()
    """Real texts, or pairs, that run before the server says that it is ready; () starts cold."""

    response_cache: bool = False
    """Whether the server keeps answers, and gives them again to the very same request without asking the model. It is
    worth it where texts repeat; where they do not, it only costs time."""

    queue: Queue = Queue()
    """How requests wait."""

    def __post_init__(self) -> None:
        """Raise ModelError if a field is out of range."""
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "_-") for c in self.name):
            raise ModelError(
                f"model name {self.name!r} must be made of letters, digits, '_' and '-': it names a folder"
            )
        if len(self.labels) == 1 or len(set(self.labels)) != len(self.labels):
            raise ModelError(
                f"model {self.name}: labels are {self.labels}; a classifier needs 2 or more, all different, "
                "and a regression none"
            )
        for label in self.labels:
            if not label.strip() or label.splitlines() != [label]:
                raise ModelError(f"model {self.name}: label {label!r} must be one non-empty line: labels.txt holds it")
        if self.gpu_onnx is not None and self.runtime == "embedded":
            raise ModelError(
                f"model {self.name}: gpu_onnx is {self.gpu_onnx}, but the runtime is embedded, which uses processors "
                "only; choose the runtime onnxruntime"
            )
        fewest = 5 if self.pair else 3
        if self.max_tokens < fewest:
            raise ModelError(
                f"model {self.name}: max_tokens is {self.max_tokens}; "
                f"[CLS], and for each text a word and [SEP], need {fewest}"
            )
        for text in self.warmup_texts:
            if isinstance(text, tuple) != self.pair:
                rule = "two texts" if self.pair else "one text"
                raise ModelError(f"model {self.name}: warm-up text {text!r} must be {rule}: pair is {self.pair}")
        for field, value in (
            ("max_batch_size", self.max_batch_size),
            ("max_batch_tokens", self.max_batch_tokens),
            ("cores", self.cores),
            ("intra_op_threads", self.intra_op_threads),
            ("instances", self.instances),
        ):
            if value is not None and value < 1:
                raise ModelError(f"model {self.name}: {field} is {value}; it must be at least 1")

    @property
    def outputs(self) -> int:
        """Columns of the logits: one for each label, or one for the number of a regression."""
        return len(self.labels) or 1

    def shares(self) -> tuple[int, int]:
        """Return (instances, threads of each), with what was not given derived from the cores.

        One thread per instance comes first: INT8 products gain 3 to 4 times on one thread but less than 2 times on
        many, so processes side by side use the same cores better.
        """
        cores = self.cores or available_cores()
        instances = self.instances
        if instances is None:
            instances = max(1, min(MAX_INSTANCES, cores // (self.intra_op_threads or 1)))
        return instances, self.intra_op_threads or max(1, cores // instances)
