"""Closed-loop load on a running server, to be run in a process of its own. It imports the client alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from serving.client import Client
from serving.errors import ServingError

WARMUP_REQUESTS = 3


@dataclass(frozen=True, kw_only=True)
class Load:
    """Clients that each send the next request when the last one is answered, `batch` texts per request."""

    url: str
    """host:port of gRPC."""
    model: str
    """Name of the served model."""
    concurrency: int
    """Clients, each on its own thread and connection."""
    seconds: float
    """How long new requests are sent."""
    seed: int
    """Decides the order of the texts of each client."""
    batch: int = 1
    """Texts in each request."""


@dataclass(frozen=True)
class Answered:
    """What a load gave."""

    times_ms: list[float] = field(default_factory=list)
    """Of each request that was answered."""
    failures: list[str] = field(default_factory=list)
    """What each other request failed with."""
    seconds: float = 0.0
    """From the first request sent to the last answer."""
    processor_s: float = 0.0
    """Processor time of the clients meanwhile."""


def closed_loop(load: Load, texts: Sequence[str | tuple[str, str]]) -> Answered:
    """Send `texts` in a seeded order per client until the time is over. Raises ServingError if the warm-up fails."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(load.url, model=load.model)) for _ in range(load.concurrency)]
        for client in clients:
            for text in texts[:WARMUP_REQUESTS]:
                client.classify([text])
        orders = [np.random.default_rng([load.seed, number]).permutation(len(texts)) for number in range(len(clients))]
        began, spent_s = time.perf_counter(), time.process_time()

        def one_client(number: int) -> Answered:
            mine = [texts[row] for row in orders[number]]
            return _send(clients[number], mine, load.batch, began + load.seconds)

        with ThreadPoolExecutor(load.concurrency) as threads:
            parts = list(threads.map(one_client, range(load.concurrency)))
        seconds, spent_s = time.perf_counter() - began, time.process_time() - spent_s
    times_ms = [time_ms for part in parts for time_ms in part.times_ms]
    return Answered(times_ms, [failure for part in parts for failure in part.failures], seconds, spent_s)


def _send(client: Client, texts: Sequence[str | tuple[str, str]], batch: int, end: float) -> Answered:
    """One client: text after text, from the start again after the last, until `end`."""
    answered = Answered()
    endless = itertools.cycle(texts)
    while (start := time.perf_counter()) < end:
        try:
            client.classify(list(itertools.islice(endless, batch)))
        except ServingError as error:
            answered.failures.append(f"{type(error).__name__}: {error}")
        else:
            answered.times_ms.append((time.perf_counter() - start) * 1000)
    return answered
