"""Load on a served model, with real texts or pairs and sub-millisecond times.

    locust -f benchmarks/locustfile.py --headless -u 16 -t 30s                       # HTTP on 127.0.0.1:8000
    locust -f benchmarks/locustfile.py --headless -u 16 -t 30s --protocol grpc       # gRPC on 127.0.0.1:8001
    locust -f benchmarks/locustfile.py --headless -u 16 -t 30s --host 10.0.0.5:8000 --raw raw.csv --summary load.json

Closed loop: each user sends its next request when the last one is answered. `--rate` makes each user send at most that
many requests a second, and `--step-users` lets users come in steps until there are as many as `-u` says:

    locust -f benchmarks/locustfile.py --headless -u 8 -t 30s --rate 5               # 40 requests a second
    locust -f benchmarks/locustfile.py --headless -u 16 --step-users 4 --step-seconds 20
    locust -f benchmarks/locustfile.py --headless -u 16 -t 30s --processes 2         # two processes send

A user that waits for a late answer does not catch up: for waits from planned moments, see `python -m benchmarks
compare`. Locust's own statistics round times; the percentiles printed at the end, `--raw` and `--summary` are of the
unrounded times. `--summary` also holds what was asked of locust, and the machine and versions of it, or of its master:
those of the server are not known here. Naming a class (`GrpcClassifier`) does what `--protocol` does; naming both mixes
them. A request that is refused, or answered with something that cannot be an answer, is a failure, and any failure
makes the exit code 1. In locust's page each start begins anew, and the files hold the last run. At the end each user
waits for its answer, ten seconds at most or as many as `--stop-timeout` says.
"""

# locust comes first: it patches the sockets and threads that the client uses.
# isort: off
import locust
from locust import LoadTestShape, User, constant, constant_throughput, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

# isort: on
import argparse
import csv
import functools
import itertools
import json
import logging
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

import numpy as np

from compressor import machine
from serving.client import Client
from serving.errors import ServingError
from serving.exchange import check_answers
from serving.model import Text

PERCENTILES = (50, 90, 95, 99)
DEFAULT_TEXTS = Path("runs/sst2/1-corpus/validation.arrow")
ADDRESSES = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
FIELDS = ("request", "start_s", "response_ms", "failed")
LAST_ANSWERS_S = 10.0
TICK_S = 1
Protocol = Literal["http", "grpc"]

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One request."""

    request: str
    """Protocol, model and texts per request."""
    start_s: float
    """When it was sent: seconds since the epoch."""
    response_ms: float
    failed: bool


def add_arguments(parser: Any) -> None:
    """The options of this file, beside locust's own."""
    add = parser.add_argument
    # The user classes are chosen once, before there is a page.
    protocol = "http (port 8000) or grpc (port 8001)"
    add("--protocol", choices=sorted(ADDRESSES), default="http", help=protocol, include_in_web_ui=False)
    add("--model", default="sst2", help="Served model that takes texts, like sst2 or sst2_teacher")
    add("--batch", type=_positive, default=1, help="Texts per request. Default 1")
    add("--seed", type=int, default=0, help="Decides the order of texts of each user. Default 0")
    add("--rate", type=_not_negative, default=0.0, help="Requests a second of each user at most; 0: without a pause")
    step = "Users of each step, which come together, up to -u in all; 0: no steps"
    add("--step-users", type=int, default=0, help=step, include_in_web_ui=False)
    length = "How long a step lasts. Default 30"
    add("--step-seconds", type=_not_negative, default=30.0, help=length, include_in_web_ui=False)
    # Files are the business of who starts locust, not of who opens its page.
    texts = (
        "Texts to send: .arrow or .jsonl with 'text' in each row, and 'text_b' for pairs; .tsv with a pair a line; "
        f"else one text a line. Default {DEFAULT_TEXTS}"
    )
    add("--texts", default=str(DEFAULT_TEXTS), help=texts, include_in_web_ui=False)
    add("--raw", default="", help="CSV file for the time of each request", include_in_web_ui=False)
    summary = "JSON file for the percentiles of the raw times, with the settings, machine and versions of the load"
    add("--summary", default="", help=summary, include_in_web_ui=False)


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} must be a whole number of at least 1")
    return int(value)


def _not_negative(value: str) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} must be a number of at least 0")
    return number


class Recorder:
    """The raw times of a run; in a distributed run the workers send theirs to the master."""

    def __init__(self, environment: Environment) -> None:
        self.texts: list[Text] = []
        """What users send."""
        self._environment = environment
        self._options = cast(Any, environment.parsed_options)
        self._samples: list[Sample] = []
        self._numbers = itertools.count()
        # The library closes a client again when it is collected; gRPC counts that as a second channel closed, and with
        # gevent may then wait for ever. So each is closed once, by its user, and collected when the process ends.
        self._clients: list[Client] = []
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        if not isinstance(environment.runner, MasterRunner):
            self.texts = read_texts(Path(self._options.texts))
        if not self._is_worker:
            for name in (self._options.raw, self._options.summary):
                if name:
                    Path(name).touch()

    def listen(self) -> None:
        """Take part in the run."""
        heard = cast(Any, self._environment.events)  # no type hints
        heard.test_start.add_listener(self._begin)
        heard.request.add_listener(self._keep)
        heard.reset_stats.add_listener(self._clear)
        heard.spawning_complete.add_listener(self._forget_spawning)
        heard.report_to_master.add_listener(self._send)
        heard.worker_report.add_listener(self._receive)
        if not self._is_worker:
            heard.quit.add_listener(self._finish)

    def connect(self, protocol: Protocol) -> Client:
        """A client of the server at --host or the protocol's default. Raises ServingError if it is no address."""
        if protocol == "grpc":
            _make_grpc_cooperative()
        address = self._environment.host or ADDRESSES[protocol]
        self._clients.append(Client(address, model=self._options.model, protocol=protocol))
        return self._clients[-1]

    def next_user(self) -> random.Random:
        """The random stream of a new user: the same for the same seed and number of user."""
        worker = getattr(self._environment.runner, "worker_index", 0)
        return random.Random(f"{self._options.seed} {worker} {next(self._numbers)}")

    def _begin(self, **_: Any) -> None:
        """The page can start one run after the other."""
        self._clear()
        self._numbers = itertools.count()

    def _clear(self, **_: Any) -> None:
        self._samples.clear()

    def _keep(
        self, request_type: str, name: str, response_time: float, exception: Any, start_time: float, **_: Any
    ) -> None:
        self._samples.append(Sample(f"{request_type} {name}", start_time, response_time, exception is not None))

    def _forget_spawning(self, **_: Any) -> None:
        if self._environment.reset_stats:
            self._clear()

    def _send(self, data: dict[str, Any], **_: Any) -> None:
        data["raw_samples"], self._samples = [tuple(sample) for sample in self._samples], []

    def _receive(self, data: dict[str, Any], **_: Any) -> None:
        self._samples += [Sample(*sample) for sample in data.get("raw_samples", [])]

    def _finish(self, **_: Any) -> None:
        summaries = summarize(self._samples)
        if self._options.headless:
            show = logging.getLogger("locust.stats_logger").info
            show("From unrounded times of answered requests:")
            for found in summaries:
                show(_line(found))
        if self._options.raw:
            with Path(self._options.raw).open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(FIELDS)
                rows.writerows((*sample[:3], int(sample.failed)) for sample in self._samples)
        if self._options.summary:
            facts = {
                "benchmark": "locust",
                "command": sys.argv,
                "locust": locust.__version__,
                "machine": machine.fingerprint(),
                "versions": machine.versions(),
                "users": self._options.num_users,
                "seed": self._options.seed,
                "rate_per_s_of_each_user": self._options.rate or None,
                "texts": self._options.texts,
                "requests": summaries,
            }
            if isinstance(self._environment.shape_class, Steps):
                facts["steps"] = self._environment.shape_class.summarize(self._samples)
            Path(self._options.summary).write_text(
                json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8"
            )


def summarize(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """By kind of request: counts, answered requests a second, and percentiles in ms of those answered.

    A percentile is None unless at least one answer is expected beyond it.
    """
    found = []
    for name in sorted({sample.request for sample in samples}):
        mine = [sample for sample in samples if sample.request == name]
        times_ms = [sample.response_ms for sample in mine if not sample.failed]
        began = min(sample.start_s for sample in mine)
        seconds = max(sample.start_s + sample.response_ms / 1000 for sample in mine) - began
        row: dict[str, Any] = {"request": name, "answered": len(times_ms), "failures": len(mine) - len(times_ms)}
        row["answered_per_s"] = len(times_ms) / seconds if seconds > 0 else None
        for percent in PERCENTILES:
            known = len(times_ms) * (100 - percent) >= 100 or (percent == 50 and times_ms)
            row[f"p{percent}_ms"] = float(np.percentile(times_ms, percent)) if known else None
        found.append(row)
    return found


def _line(found: dict[str, Any]) -> str:
    times = (found[f"p{percent}_ms"] for percent in PERCENTILES)
    shown = ", ".join(
        f"p{percent} {'-' if value is None else f'{value:.3f} ms'}"
        for percent, value in zip(PERCENTILES, times, strict=True)
    )
    return f"{found['request']}: {shown}; {found['answered']} answered, {found['failures']} failures"


def read_texts(path: Path) -> list[Text]:
    """The texts, or pairs, of a file. Raises ValueError if it has none, OSError if it cannot be read."""
    if path.suffix == ".arrow":
        import pyarrow as pa

        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()
        rows = _texts_of(table.to_pylist())
    else:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        if path.suffix == ".jsonl":
            rows = _texts_of([_read_json(number, line) for number, line in enumerate(lines, 1)])
        else:
            rows = [tuple(line.split("\t")) if path.suffix == ".tsv" else (line,) for line in lines]
    if not rows or not all(isinstance(text, str) and text.strip() for row in rows for text in row):
        raise ValueError("each row must hold a text, and there must be one at least")
    if path.suffix == ".tsv" and any(len(row) != 2 for row in rows):
        raise ValueError("each line of a .tsv must hold a pair: first, tab, second")
    return [row if len(row) == 2 else row[0] for row in rows]


def _read_json(number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"row {number} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"row {number} is no JSON object; it must be one with the key 'text'")
    return found


def _texts_of(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The values of 'text', and of 'text_b' if the first row has one. Raises ValueError if a row lacks one."""
    keys = ("text", "text_b") if rows and "text_b" in rows[0] else ("text",)
    for number, row in enumerate(rows, 1):
        for key in keys:
            if key not in row:
                has = ", ".join(map(repr, row)) or "nothing"
                raise ValueError(f"row {number} has no key {key!r} but {has}; rename it, or name another file")
    return [tuple(row[key] for key in keys) for row in rows]


class Steps(LoadTestShape):
    """Users that come in steps; after the last step the run ends."""

    abstract = True  # locust must not take it by itself: `prepare` does, if steps are asked for

    def __init__(self, options: Any) -> None:
        cast(Any, super()).__init__()  # no type hints
        self._options = options
        self._begins: list[tuple[int, float]] = []  # number of a step, and its moment

    def reset_time(self) -> None:
        """Begin with the first step. Locust calls it at each start, with workers once more when they start."""
        cast(Any, super()).reset_time()  # no type hints
        self._begins = [(0, time.time())]

    def tick(self) -> tuple[int, float] | None:
        """How many users there are to be now, and how many of them come in a second; None: the end."""
        number = int(cast(Any, self).get_run_time() // self._options.step_seconds)
        if number * self._options.step_users >= self._options.num_users:
            return None
        if number > self._begins[-1][0]:  # not always the next: a tick may come late
            self._begins.append((number, time.time()))
        return self._users(number), self._options.step_users

    def _users(self, number: int) -> int:
        return int(min((number + 1) * self._options.step_users, self._options.num_users))

    def summarize(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """By step: how many users there were, and the figures of the requests that were sent meanwhile."""
        found = []
        for (number, begin_s), (_, end_s) in itertools.pairwise([*self._begins, (0, math.inf)]):
            mine = [sample for sample in samples if begin_s <= sample.start_s < end_s]
            found.append({"users": self._users(number), "requests": summarize(mine)})
        return found


class ClassifierUser(User):
    """Sends real texts, one request after the other."""

    abstract = True
    protocol: Protocol
    recorder: Recorder
    """Of the run; set when locust starts."""

    def on_start(self) -> None:
        """Connect, and send one request that does not count: connecting is not what is measured."""
        options = cast(Any, self.environment.parsed_options)
        # The page sets them past the checks of the parser.
        batch, rate = _positive(str(options.batch)), _not_negative(str(options.rate))
        texts = list(self.recorder.texts)
        self.recorder.next_user().shuffle(texts)
        self._texts = itertools.cycle(texts)
        self._batch = batch
        self._pause = constant_throughput(rate) if rate else constant(0)
        self._name = f"{options.model} x{batch}"
        self._server = self.recorder.connect(self.protocol)
        try:
            self._server.classify([next(self._texts) for _ in range(self._batch)])
        except ServingError as error:
            log.warning("warm-up request failed: %s", error)

    def wait_time(self) -> float:
        """Seconds until the next request, none in a closed loop."""
        return float(self._pause(self))

    def on_stop(self) -> None:
        """Disconnect."""
        self._server.close()

    @task
    def classify(self) -> None:
        """One request."""
        texts = [next(self._texts) for _ in range(self._batch)]
        exception: Exception | None = None
        start_time, start = time.time(), time.perf_counter()
        try:
            answers = self._server.classify(texts)
            response_ms = (time.perf_counter() - start) * 1000
            check_answers(answers, self._server.labels, len(texts))
        except ServingError as error:
            response_ms, exception = (time.perf_counter() - start) * 1000, error
        self.environment.events.request.fire(
            request_type=self.protocol.upper(),
            name=self._name,
            response_time=response_ms,
            response_length=0,
            exception=exception,
            context={},
            start_time=start_time,
        )


class HttpClassifier(ClassifierUser):
    """Over HTTP."""

    protocol = "http"


class GrpcClassifier(ClassifierUser):
    """Over gRPC."""

    protocol = "grpc"


@functools.cache
def _make_grpc_cooperative() -> None:
    """Let gRPC wait in greenlets; once, and not before a process that locust forks off has been forked."""
    from grpc.experimental import gevent

    gevent.init_gevent()


def prepare(environment: Environment, **_: Any) -> None:
    """Choose the user class, read the texts, and see whether the server is ready; leave with one sentence if not."""
    options = cast(Any, environment.parsed_options)
    # Locust would end users in the middle of a request, and a call given up can kill Triton (docs/decisions.md, 40).
    environment.stop_timeout = environment.stop_timeout or LAST_ANSWERS_S
    if not options.user_classes:
        environment.user_classes = [
            kind for kind in environment.user_classes if getattr(kind, "protocol", None) == options.protocol
        ]
    try:
        recorder = Recorder(environment)
    except OSError as error:
        _leave(f"--texts, --raw or --summary cannot be used: {error}")
    except ValueError as error:
        _leave(f"--texts {options.texts} cannot be used: {error}")
    if options.step_users and not isinstance(environment.runner, WorkerRunner):
        if options.num_users is None:
            # Where users come in steps, locust's page does not ask how many.
            _leave(f"--step-users {options.step_users} needs -u, the users of the last step")
        if options.step_users < 0 or options.step_seconds < TICK_S:
            _leave(
                f"--step-users {options.step_users} must be above 0, and --step-seconds {options.step_seconds:g} "
                f"at least {TICK_S}: locust looks once a second"
            )
        environment.shape_class = Steps(options)
        environment.shape_class.runner = environment.runner
    ClassifierUser.recorder = recorder
    recorder.listen()
    if options.headless and not isinstance(environment.runner, MasterRunner):
        for protocol in {kind.protocol for kind in environment.user_classes if issubclass(kind, ClassifierUser)}:
            try:
                with recorder.connect(protocol) as client:
                    labels, is_pair = client.labels, client.is_pair
            except ServingError as error:
                _leave(str(error))
            if isinstance(recorder.texts[0], tuple) != is_pair:
                wanted = "pairs" if is_pair else "single texts"
                _leave(
                    f"model {options.model} reads {wanted}, which --texts {options.texts} does not hold; name another"
                )
            log.info("%s answers %s", options.model, ", ".join(labels) or "numbers")


def _leave(sentence: str) -> NoReturn:
    log.error(sentence)
    sys.exit(1)


hooks = cast(Any, events)  # no type hints
hooks.init_command_line_parser.add_listener(add_arguments)
hooks.init.add_listener(prepare)
