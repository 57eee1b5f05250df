"""compare: teacher and student side by side, in process and served, from one run on one machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import baseline, cold, cost, report, served
from benchmarks.bert_base import BERT_BASE, bert_base, write_repository
from benchmarks.local import (
    FULL,
    QUICK,
    REAL_TEXTS,
    STUDENT,
    TEACHER,
    THROUGHPUT_BATCH,
    Wanted,
    known_tokens,
    load_systems,
    measure_systems,
    measurement_overhead,
    read_test,
    test_logits,
    time_tokenizer,
    validation_texts,
)
from benchmarks.peers import PEERS, check_peers
from benchmarks.ratios import BATCHES, ONE_TEXT, SIGNIFICANT, Standing, find, ratios, standing_of, targets
from benchmarks.runs import Run, forms_of, open_run
from benchmarks.text_to_label import measure_texts
from compressor.errors import ArtifactError, ConfigError, GateError
from compressor.evaluate import METRIC_NAMES, Logits, queries
from compressor.report import kept, times
from compressor.report_answers import calibrations, disagreements

SCHEMA_VERSION = 2
HEADLINE_SHAPE = "1x32"
ALONE = (("p50", REAL_TEXTS), ("text to label p50", ONE_TEXT))
"""Ratios to peers that the verdict tells: of one real text."""
CONDITIONS = {
    "in_process": "one process, token ids in, logits out (tokenizing is timed apart); systems take turns, each turn "
    "after a pause and unmeasured calls; real texts are validation texts, in each round the same few for every system, "
    "padded to a multiple of 8 tokens; a shape BxT is B rows of T real tokens; throughput is batches of "
    f"{THROUGHPUT_BATCH} real texts, padded to the longest, all texts over all time",
    "text_to_label": "one process, texts in, labels out, tokenizer included; in each round the same few texts for "
    "every system, in turns",
    "start": "a new Python process for each; until its first answer; the files are in the system's cache, except for "
    "the first start after a while",
    "processor_time": "of all threads of the process, token ids in, logits out, no server; a library's threads that "
    "spin while they wait count as work",
    "served": "Triton, on the same machine unless --url names another, text in, label out; gRPC, one text per request, "
    "from one client process which shares the cores with the server; each model has the instances and threads that its "
    "repository was made with, whatever --threads says; models take turns, BERT-base on a server of its own with the "
    "student's cores; a cascade asks two models and is measured here alone. Closed loop: a thread per client, which "
    "sends when its last request is answered. Open loop: requests at random moments planned in advance, waited for "
    "from the planned moment",
    "ratios": "Hodges-Lehmann estimate over the rounds with Wilcoxon's 95 % interval (Student's t under six rounds); "
    "the systems of a round were measured one after the other",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compared, and how."""

    run: Path
    repository: Path
    url: str | None
    """host:port (gRPC) of a server that runs already; none = one is started on the repository."""
    threads: int
    seed: int
    quick: bool
    wanted: Wanted
    rates_per_s: Sequence[float]
    """Arrival rates of the open loop; none = shares of what each model answers at most."""
    price_per_core_hour: float
    """In any currency."""
    baseline: Path | None
    tolerance: float | None
    """Share that a ratio may fall by since the baseline; none = `baseline.TOLERANCE`."""
    command: str

    def __post_init__(self) -> None:
        if self.wanted.bert_base and self.url is not None:
            raise ConfigError(
                f"--bert-base with --url {self.url}: it is served on this machine beside the others, so that their "
                "times could not be compared; drop one of the two"
            )
        if self.tolerance is not None and self.baseline is None:
            raise ConfigError(
                f"--tolerance {self.tolerance:g} is how far a ratio may fall since --baseline, which is not given; "
                "give one, or drop it"
            )


def compare(question: Question) -> dict[str, Any]:
    """Measure everything; the result is ready for `report.to_json`.

    Raises CompressorError or ServingError if run, repository, baseline, a peer or the server cannot be used.
    """
    check_peers(question.wanted.peers)
    run, before = open_run(question.run), None
    if question.baseline is not None:
        alike = {"task": run.task.name, "url": question.url, "quick": question.quick, "threads": question.threads}
        before = baseline.read_baseline(question.baseline, SCHEMA_VERSION, **alike)
    if question.url is None:
        served.check_repository(run, question.repository)
    cores = served.check_server(run, question.repository, question.url)
    if before is not None:
        check_measured(run, question, before)
    with _untrained(run, question.wanted, cores):
        pass  # it starts: better known now than after half an hour
    effort, begun = QUICK if question.quick else FULL, report.Begun()
    result: dict[str, Any] = {
        "benchmark": "compare",
        "schema_version": SCHEMA_VERSION,
        "verdict": "",
        "task": run.task.name,
        "metric": METRIC_NAMES[run.task.metric],
        "run": str(question.run),
        "repository": None if question.url else str(question.repository),
        "url": question.url,
        "quick": question.quick,
        "price_per_core_hour": question.price_per_core_hour,
        "conditions": CONDITIONS,
        "systems": _about(question.wanted),
    }
    logits = _measure_in_process(run, question, result)
    with (
        served.server(question.repository, question.url) as running,
        _untrained(run, question.wanted, cores) as untrained,
    ):
        result["served"] = served.measure_served(
            run,
            running,
            logits[STUDENT],
            effort,
            untrained=untrained,
            rates_per_s=question.rates_per_s,
            seed=question.seed,
        )
        for facts in result["served"].values():
            for row in facts["load"]:
                spent = row["server_cpu_s_per_1000_texts"]
                row["price_per_million_texts"] = (
                    None if spent is None else cost.price(spent, question.price_per_core_hour)
                )
        result["time_split_ms"] = served.time_split_ms(run, running, effort, question.seed)
        result["overhead"]["served_client_share"] = _client_share(result["time_split_ms"])
        result["server"] = {"ready_s": running.ready_s, "uss_bytes": running.memory_bytes()}
    result |= report.context(begun, command=question.command, seed=question.seed, threads=question.threads)
    result["ratios"] = ratios(result)
    result["targets"] = targets(result["ratios"], result["overhead"]["share"])
    result["verdict"] = verdict(result)
    if before is not None and question.baseline is not None:
        tolerance = baseline.TOLERANCE if question.tolerance is None else question.tolerance
        found = baseline.against_baseline(result, before, file=question.baseline, tolerance=tolerance)
        result["baseline"] = found
    return result


@contextmanager
def _untrained(run: Run, wanted: Wanted, cores: int) -> Iterator[dict[str, served.Server]]:
    """The server of BERT-base, if it is wanted, with as many cores as the student's."""
    if not wanted.bert_base:
        yield {}
        return
    from compressor.checkpoints import load_tokenizer

    with tempfile.TemporaryDirectory() as root:
        model = bert_base(run.task, len(load_tokenizer(run.teacher.path)))
        write_repository(model, run, Path(root), cores)
        del model
        with served.server(Path(root), None) as running:
            yield {BERT_BASE: running}


def check_measured(run: Run, question: Question, before: Mapping[str, Any]) -> None:
    """Raise ArtifactError if a system of the baseline will not be measured: its ratios would be missed in silence."""
    missing = {row[of] for row in before["ratios"] for of in ("system", "than")} - _about(question.wanted).keys()
    if missing and question.url is not None:
        missing -= set(served.served_names(run, question.url))
    elif missing and run.publication is not None:
        missing -= run.publication.metrics["versions"].keys()
    if missing:
        raise ArtifactError(
            f"--baseline {question.baseline} has ratios of {', '.join(sorted(missing))}, which would not be measured; "
            "give --bert-base, each --peer and a repository as the baseline's command did, or measure it again"
        )


def _client_share(split: Mapping[str, Mapping[str, float]]) -> float | None:
    """Share of client and network in a mean request to the student of one client; None if it is not known."""
    parts = next(iter(split.values()), None)
    return None if parts is None else parts["client"] / sum(parts.values())


def _measure_in_process(run: Run, question: Question, result: dict[str, Any]) -> dict[str, Logits]:
    """Add to `result` what needs no server; returns the test logits of each system."""
    effort, seed, threads = QUICK if question.quick else FULL, question.seed, question.threads
    with tempfile.TemporaryDirectory() as scratch:
        systems = load_systems(run, threads, Path(scratch), question.wanted)
        logits = test_logits(systems, effort)
        result["in_process"] = measure_systems(
            systems, run.task, logits, effort, vocabulary=known_tokens(run), seed=seed
        )
        result["overhead"] = measurement_overhead(result["in_process"], effort, seed)
        result["tokenizer"] = time_tokenizer(run, effort, seed)
        result["processor_time"] = cost.processor_seconds(
            systems, effort, price_per_core_hour=question.price_per_core_hour, seed=seed
        )
        del systems  # their threads and memory; what follows gets the machine to itself
    result["text_to_label"] = measure_texts(
        run, logits[TEACHER], effort, peers=question.wanted.peers, threads=threads, seed=seed
    )
    loaded = [name for name in (*result["in_process"], *result["text_to_label"]) if name != BERT_BASE]
    result["start"] = cost.measure_starts(
        list(dict.fromkeys(loaded)),
        forms_of(run),
        queries(validation_texts(run))[0],
        threads=threads,
        starts=effort.starts,
    )
    test, label_N = read_test(run, effort)
    chosen = {"teacher": logits[TEACHER], "int8": logits[STUDENT]}
    texts = [" / ".join(row) for row in test]
    result["disagreements"] = disagreements(run.task, texts, label_N, chosen)
    result["calibration"] = calibrations(run.task, {TEACHER: logits[TEACHER], STUDENT: logits[STUDENT]}, label_N)
    return logits


def _about(wanted: Wanted) -> dict[str, str]:
    """What each system is."""
    found = {
        TEACHER: "the teacher in PyTorch, fp32",
        "teacher_onnx": "the teacher in ONNX Runtime, fp32",
        "student_fp32": "the student in ONNX Runtime, fp32",
        STUDENT: "the student in ONNX Runtime, INT8: what is served",
    }
    if wanted.bert_base:
        found[BERT_BASE] = "BERT-base in PyTorch, fp32, random weights: its speed and size only"
    return found | {name: PEERS[name].about for name in wanted.peers} | {cold.ALONE: "Python, nothing loaded"}


def verdict(result: Mapping[str, Any]) -> str:
    """The comparison in a sentence."""
    teacher, student = result["in_process"][TEACHER], result["in_process"][STUDENT]
    shape = headline_shape(student)
    speed = find(result["ratios"], "p50", shape, TEACHER)
    assert speed is not None  # teacher and student are always measured
    size = times(teacher["size_bytes"], student["size_bytes"], "smaller", "larger")
    busy = "; other work kept the machine busy: do not publish these times" if result["machine_was_busy"] else ""
    quick = "; a quick look, not a measurement" if result["quick"] else ""
    tail = f"{_against_peers(result)}{quick}{busy}"
    return (
        f"The INT8 student {_kept(student['test'], teacher['test'], result['metric'])}, is {size}, and answers "
        f"{shape.replace('x', ' x ')} tokens {_faster(speed)} the teacher in PyTorch{tail}."
    )


def _kept(ours: Mapping[str, Any], theirs: Mapping[str, Any], metric: str) -> str:
    """The student's metric on the test rows and the teacher's, and whether chance explains the difference."""
    score, other, pair = ours["score"], theirs["score"], ours["against_teacher"]  # the pair is teacher, student
    if metric == "accuracy":
        differs, shown = pair["p_value"] < SIGNIFICANT, f"McNemar p = {pair['p_value']:.2g}"
    else:
        low, high = (-100 * end for end in reversed(pair["difference_95"]))
        differs, shown = low > 0 or high < 0, f"95 % interval of the difference {low:+.1f} to {high:+.1f} points"
    chance = "more than chance explains" if differs else "which chance can explain"
    share = kept(score, other)
    return f"{share} the teacher's test {metric} ({100 * score:.1f} against {100 * other:.1f}, {chance}: {shown})"


def _faster(speed: Mapping[str, Any]) -> str:
    """How the student's time stands to another's, as far as the rounds tell."""
    ratio, interval = speed["ratio"], speed["interval_95"]
    words = times(ratio, 1.0, "faster", "slower")
    if interval is None:
        return f"{words} (one round, no interval) than"
    low, high = interval
    if standing_of(speed) is Standing.OPEN:
        return f"in a time not told apart ({words}, 95 % interval of the ratio {low:.2f} to {high:.2f}) from that of"
    low, high = (low, high) if ratio >= 1 else (1 / high, 1 / low)
    return f"{words} (95 % interval {low:.1f} to {high:.1f}) than"


def headline_shape(system: Mapping[str, Any]) -> str:
    """The shape that verdict and plots speak of."""
    shapes = [what for what in system["latency"] if what != REAL_TEXTS]
    return HEADLINE_SHAPE if HEADLINE_SHAPE in shapes else shapes[0]


def _against_peers(result: Mapping[str, Any]) -> str:
    """The tail of the verdict: how the student stands to each peer on one text, and which is faster in batches."""
    rows = [row for row in result["ratios"] if row["than"] in PEERS]
    one = [row for row in rows if (row["figure"], row["where"]) in ALONE]
    said = {
        Standing.AHEAD: "it is faster than",
        Standing.OPEN: "the rounds cannot tell it from",
        Standing.BEHIND: "it is slower than",
    }
    parts = []
    for standing, words in said.items():
        names = [f"{row['than']} ({row['ratio']:.2g} times)" for row in one if standing_of(row) is standing]
        parts += [f"{words} {', '.join(names)}"] if names else []
    found = f"; on one text {'; '.join(parts)}" if parts else ""
    slower = [row for row in rows if row["where"] == BATCHES and standing_of(row) is Standing.BEHIND]
    names = [f"{row['than']} ({row['ratio']:.2g} times)" for row in slower]
    return f"{found}; in batches it is slower than {', '.join(names)}" if names else found


def failures(result: Mapping[str, Any]) -> int:
    """Requests that failed under load, all models together."""
    rows = [row for model in result["served"].values() for row in (*model["load"], *model["open_loop"])]
    return sum(row["failures"] for row in rows)


def check_targets(result: Mapping[str, Any]) -> None:
    """Raise GateError for each target that a full measurement misses."""
    missed = [
        f"{row['target']} is {row['value']:.2f}, the target is {row['rule']} {row['bound']:g}"
        for row in result["targets"]
        if not row["is_met"]
    ]
    if missed and not result["quick"]:
        busy = " (the machine was busy with other work)" if result["machine_was_busy"] else ""
        raise GateError(f"targets missed{busy}: {'; '.join(missed)}")
