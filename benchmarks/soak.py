"""soak: minutes of mixed load, good and bad, on one server; every answer is checked, deaths and memory are watched."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from benchmarks import report
from benchmarks.report import Table, number
from benchmarks.serve import Where, read_texts
from compressor.errors import GateError
from compressor.latency import summary
from serving import repository
from serving.client import Client
from serving.errors import DeadlineError, ServingError, UnavailableError
from serving.exchange import Answer, Classification
from serving.messages import infer_request
from serving.model import Text
from serving.online import numbers_of, version_files
from serving.runtime import TritonServer, free_port
from serving.transport import channel_options

MINUTES, QUICK_MINUTES = 30.0, 0.3
LEAST_MINUTES_OF_MEMORY = 2.0  # before that a server is still warming up, and its memory grows
MAX_GROWTH = 0.05
MAX_DIFFERENCE = 0.2  # of a probability: dynamic INT8 depends on what else is in the batch
RECONNECT_S = 0.5  # a client that was refused waits for up to this long before it looks for the server again
FATES = IN_FLIGHT, WHILE_DOWN, WHILE_UP = "in flight", "while down", "while up"
UNANSWERED = "given up", "slow"
"""Requests whose sender does not wait for an answer."""
_GOOD_CLIENTS, _STEP_S = 4, 0.02

# What must be refused, and with which words: those of the model, or of Triton itself.
REFUSALS = {
    "empty": r"^TEXT is empty",
    "100 kB": r"^TEXT is 100001 bytes long",
    "control": r"^TEXT holds the control character U\+0000",
    "not UTF-8": r"^TEXT is not UTF-8",
    "wrong type": r"data-type is 'INT64'",
    "wrong shape": r"unexpected shape for input 'TEXT'",
    "unknown model": r"unknown model: 'nobody'",
}

log = logging.getLogger(__name__)


class Lost(NamedTuple):
    """A request without the answer, or the error, that it must get; moments are of `time.perf_counter`."""

    kind: str
    began: float
    ended: float
    reason: str


class Kill(NamedTuple):
    """A process that was killed, and when the first request after it was answered."""

    what: str
    at: float
    back: float


@dataclass
class Seen:
    """What the clients saw, all threads together."""

    sent: Counter[str] = field(default_factory=Counter)
    """All requests, by what they are."""
    right: Counter[str] = field(default_factory=Counter)
    """Answers, or errors, that were as they must be."""
    lost: list[Lost] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    """Of good requests."""
    rss_bytes: list[int] = field(default_factory=list)
    """Memory of all processes of the server, each second."""
    kills: list[Kill] = field(default_factory=list)


def soak(where: Where, *, minutes: float, kills: bool, threads: int, seed: int, command: str) -> dict[str, Any]:
    """Load a server for some minutes; with `kills`, also kill it, and a model's process, in the middle.

    Raises ServingError if the repository cannot be served.
    """
    repository.read(where.repository)
    files = version_files(where.repository / where.model)
    texts = _texts(read_texts(where.texts, files.is_pair), files.is_pair, seed)
    expected = dict(zip(texts, files.answers(texts), strict=True))
    begun = report.Begun()
    seen, end = Seen(), threading.Event()
    ports = free_port(), free_port(), free_port()
    with TritonServer(where.repository, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2]) as server:
        tasks: list[Callable[[random.Random], None]] = [
            *[lambda r: _good(server, where.model, expected, seen, r)] * _GOOD_CLIENTS,
            lambda r: _churn(server, where.model, expected, seen, r),
            lambda r: _bad(server, where.model, files.is_pair, seen, r),
            lambda r: _giving_up(server, where.model, texts, seen, r),
            lambda r: _slow(server, seen, r),
        ]
        with ThreadPoolExecutor(len(tasks) + 1) as pool:
            running = [pool.submit(_repeat, task, random.Random(seed + n), end) for n, task in enumerate(tasks)]
            running.append(pool.submit(_repeat, lambda r: _measure(server, seen), random.Random(0), end))
            try:
                _pass_time(server, where, expected, seen, 60 * minutes, kills=kills)
            finally:
                end.set()
            for task in running:
                task.result()
        deaths = server.deaths()
    lost = {each: [request for request in seen.lost if fate(request, seen.kills) == each] for each in FATES}
    quarter = max(1, len(seen.rss_bytes) // 4)
    return {
        "benchmark": "soak",
        **report.context(begun, command=command, seed=seed, threads=threads),
        "minutes": minutes,
        "sent": dict(seen.sent),
        "right": dict(seen.right),
        "lost": {each: dict(Counter(request.kind for request in found)) for each, found in lost.items()},
        "reasons": {
            each: dict(Counter(request.reason for request in found).most_common(10)) for each, found in lost.items()
        },
        "wrong": seen.wrong[:20],
        "wrong_count": len(seen.wrong),
        "latency": summary(seen.times_ms),
        "rss_mb": {
            "second_quarter": float(np.median(seen.rss_bytes[quarter : 2 * quarter] or seen.rss_bytes)) / 1e6,
            "last_quarter": float(np.median(seen.rss_bytes[-quarter:])) / 1e6,
        },
        "memory_not_judged": why_unjudged(deaths, minutes),
        "deaths": deaths,
        "recoveries": [
            {"killed": kill.what, "seconds": kill.back - kill.at}
            | {each: sum(fate(request, [kill]) == each for request in seen.lost) for each in (IN_FLIGHT, WHILE_DOWN)}
            for kill in seen.kills
        ],
    }


def fate(request: Lost, kills: Sequence[Kill]) -> str:
    """Whether a lost request was in flight at a kill, was sent before the server was back, or had no such reason."""
    if any(request.began <= kill.at <= request.ended for kill in kills):
        return IN_FLIGHT
    if any(kill.at < request.began <= kill.back + RECONNECT_S for kill in kills):
        return WHILE_DOWN
    return WHILE_UP


def why_unjudged(deaths: Sequence[str], minutes: float) -> str | None:
    """Why growth of memory would say nothing; None if memory is judged."""
    if deaths:
        return "a process of the server was started again"
    if minutes < LEAST_MINUTES_OF_MEMORY:
        return f"{minutes:g} minutes are too few: in the first {LEAST_MINUTES_OF_MEMORY:g} a server still warms up"
    return None


def check(result: dict[str, Any]) -> None:
    """Raise GateError if an answer was wrong, a request lost without a kill, memory grew, or the server died by itself.

    Memory is not judged where the result says why not.
    """
    missed = []
    if result["wrong_count"]:
        missed.append(f"{result['wrong_count']} wrong answers, the first: {result['wrong'][0]}")
    lost = sum(result["lost"][WHILE_UP].values())
    if lost:
        reason = next(iter(result["reasons"][WHILE_UP]))
        missed.append(f"{lost} requests lost while the server was up, most often: {reason}")
    growth = result["rss_mb"]["last_quarter"] / result["rss_mb"]["second_quarter"] - 1
    if growth > MAX_GROWTH and result["memory_not_judged"] is None:
        missed.append(f"memory grew by {100 * growth:.1f} % (at most {100 * MAX_GROWTH:.0f})")
    if len(result["deaths"]) > len(result["recoveries"]):
        missed.append(f"{len(result['deaths']) - len(result['recoveries'])} deaths by itself: {result['deaths']}")
    if missed:
        raise GateError("; ".join(missed))


def tables(result: dict[str, Any]) -> list[Table]:
    """What was sent and what came of it, and recoveries."""
    rows = [
        [kind, str(sent), "-" if kind in UNANSWERED else str(result["right"].get(kind, 0))]
        + [str(found.get(kind, 0)) for found in result["lost"].values()]
        for kind, sent in sorted(result["sent"].items())
    ]
    memory = [[name, number(value, 1)] for name, value in result["rss_mb"].items()]
    reason = result["memory_not_judged"]
    unjudged = f"; not judged: {reason}" if reason else ""
    kills = [
        [row["killed"], number(row["seconds"], 1), str(row[IN_FLIGHT]), str(row[WHILE_DOWN])]
        for row in result["recoveries"]
    ]
    return [
        Table(
            f"{result['minutes']:g} minutes, {result['wrong_count']} wrong",
            ["request", "sent", "right", *(f"lost {each}" for each in result["lost"])],
            rows,
        ),
        Table(f"memory of the server, MB{unjudged}", ["when", "median"], memory),
        Table("killed", ["what", "seconds until right again", "lost in flight", "lost while down"], kills),
    ]


def _texts(found: Sequence[Text], is_pair: bool, seed: int) -> list[Text]:
    """Real texts, and joins of them up to about 512 words; of pairs, such joins of each side."""
    chooser = random.Random(seed)
    texts = list(dict.fromkeys(chooser.sample(list(found), min(100, len(found)))))
    sides = [" ".join(side).split() for side in (zip(*found, strict=True) if is_pair else [map(str, found)])]
    for n, length in enumerate([1, 2, 8, 30, 60, 120, 250, 510]):
        joins = [" ".join(words[n : n + length]) for words in sides]
        texts.append((joins[0], joins[1]) if is_pair else joins[0])
    return texts


def _repeat(task: Callable[[random.Random], None], chooser: random.Random, end: threading.Event) -> None:
    while not end.is_set():
        task(chooser)


def _good(
    server: TritonServer, model: str, expected: dict[Text, dict[str, float]], seen: Seen, chooser: random.Random
) -> None:
    """Twenty requests on one connection."""
    with Client(server.grpc_url, model=model) as client:
        for _ in range(20):
            _ask(client, expected, seen, chooser, "good")


def _churn(
    server: TritonServer, model: str, expected: dict[Text, dict[str, float]], seen: Seen, chooser: random.Random
) -> None:
    """One request on a connection of its own, over HTTP."""
    with Client(server.http_url, model=model, protocol="http") as client:
        _ask(client, expected, seen, chooser, "new connection")


def _ask(client: Client, expected: dict[Text, dict[str, float]], seen: Seen, chooser: random.Random, kind: str) -> None:
    text = chooser.choice(list(expected))
    seen.sent[kind] += 1
    began = time.perf_counter()
    try:
        (answer,) = client.classify([text])
    except (UnavailableError, DeadlineError) as error:
        seen.lost.append(Lost(kind, began, time.perf_counter(), str(error)))
        time.sleep(_STEP_S)
        return
    except ServingError as error:
        seen.wrong.append(f"{text!r:.60}: {error}")
        return
    seen.times_ms.append((time.perf_counter() - began) * 1000)
    mistake = mistake_of(answer, expected[text])
    if mistake is None:
        seen.right[kind] += 1
    else:
        seen.wrong.append(f"{text!r:.60}: {mistake}")


def mistake_of(answer: Answer, wanted: dict[str, float]) -> str | None:
    """What is wrong with an answer: a number, or the label where that is no close thing; None if it is right."""
    found = numbers_of(answer)
    if set(found) != set(wanted) or max(abs(found[name] - wanted[name]) for name in wanted) > MAX_DIFFERENCE:
        return f"{found} instead of {wanted}"
    if isinstance(answer, Classification):
        second, best = sorted(wanted, key=lambda name: wanted[name])[-2:]
        if wanted[best] - wanted[second] > MAX_DIFFERENCE and answer.label != best:
            return f"label {answer.label!r} with {found} instead of {wanted}"
    return None


def _bad(server: TritonServer, model: str, is_pair: bool, seen: Seen, chooser: random.Random) -> None:
    """A request that must be refused, whatever it is sent beside."""
    kind = chooser.choice(list(REFUSALS))
    raws = {"empty": b" ", "100 kB": b"a" * 100_001, "control": b"a\x00b", "not UTF-8": b"good \xff"}
    names = ("TEXT", "TEXT_PAIR") if is_pair else ("TEXT",)
    request = infer_request(model, "", {name: [raws.get(kind, b"good")] for name in names}, ())
    if kind == "wrong type":
        request.inputs[0].datatype = "INT64"
        request.raw_input_contents[0] = bytes(8)
    elif kind == "wrong shape":
        request.inputs[0].shape[:] = [1, 2]
    elif kind == "unknown model":
        request.model_name = "nobody"
    seen.sent[f"bad: {kind}"] += 1
    began = time.perf_counter()
    try:
        with grpc.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url)) as channel:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    except grpc.RpcError as error:
        status, message = error.code().name, error.details() or ""
        if status in ("INVALID_ARGUMENT", "NOT_FOUND") and re.search(REFUSALS[kind], message):
            seen.right[f"bad: {kind}"] += 1
        elif status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
            seen.lost.append(Lost(f"bad: {kind}", began, time.perf_counter(), message))
        else:
            seen.wrong.append(f"{kind}: {status} {message}")
    else:
        seen.wrong.append(f"{kind} was answered")
    time.sleep(_STEP_S)


def _giving_up(server: TritonServer, model: str, texts: Sequence[Text], seen: Seen, chooser: random.Random) -> None:
    """A request that its sender cancels after a moment, or closes the connection on."""
    text = chooser.choice(texts)
    parts = text if isinstance(text, tuple) else (text,)
    raw = {name: [part.encode()] for name, part in zip(("TEXT", "TEXT_PAIR"), parts, strict=False)}
    channel = grpc.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url))
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(infer_request(model, "", raw, ()))
    time.sleep(chooser.random() * 0.02)
    if chooser.random() < 0.5:
        call.cancel()
    channel.close()
    seen.sent["given up"] += 1
    time.sleep(_STEP_S)


def _slow(server: TritonServer, seen: Seen, chooser: random.Random) -> None:
    """A connection that sends half a request, waits and goes."""
    with contextlib.suppress(OSError), socket.create_connection((server.host, server.http_port), 5) as connection:
        connection.sendall(b"POST /v2/models/sst2/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
        seen.sent["slow"] += 1
        time.sleep(chooser.random())
    time.sleep(_STEP_S)


def _measure(server: TritonServer, seen: Seen) -> None:
    listed = subprocess.run(["ps", "-o", "rss=", "-s", str(server.pid)], capture_output=True, text=True, check=False)
    seen.rss_bytes.append(1024 * sum(map(int, listed.stdout.split())))
    time.sleep(1)


def _pass_time(
    server: TritonServer,
    where: Where,
    expected: dict[Text, dict[str, float]],
    seen: Seen,
    seconds: float,
    *,
    kills: bool,
) -> None:
    if not kills:
        time.sleep(seconds)
        return
    for what in ("/bin/tritonserver", f"/{where.model}/"):
        time.sleep(seconds / 3)
        known = len(server.deaths())
        process = _process(server, what)
        at = time.perf_counter()
        os.kill(process, signal.SIGKILL)
        while len(server.deaths()) == known:
            time.sleep(_STEP_S)
        server.wait_ready()
        with Client(server.grpc_url, model=where.model) as client:
            trial = Seen()
            _ask(client, expected, trial, random.Random(0), "after a kill")
            if trial.wrong or trial.lost:
                seen.wrong.append(f"the first request after a kill of {what}: {trial.wrong or trial.lost}")
        seen.kills.append(Kill(what, at, time.perf_counter()))
    time.sleep(seconds / 3)


def _process(server: TritonServer, what: str) -> int:
    listed = subprocess.run(
        ["ps", "-wwo", "pid=,args=", "-s", str(server.pid)], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return next(int(pid) for pid, command in lines if what in command and int(pid) != server.pid)
