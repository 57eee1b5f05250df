"""Load whose requests come at moments planned in advance, to be run in a process of its own.

A user's wait begins when the request should have been sent, not when a client was free to send it: a server that stalls
is charged for everything that waited meanwhile, and cannot slow down what asks it (no coordinated omission).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from serving.client import Client
from serving.errors import ServingError
from serving.model import Text

CONNECTIONS = 64
START_S = 0.05  # until the first moment of the plan: the threads must have begun to wait for it


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Requests of one text each, at random moments with a fixed mean rate."""

    url: str
    """host:port of gRPC."""
    model: str
    rate_per_s: float
    """Requests a second, in the mean."""
    seconds: float
    """How long requests come."""
    seed: int
    """Decides the moments and the order of texts."""


@dataclass(frozen=True)
class Arrived:
    """What a plan gave."""

    times_ms: list[float] = field(default_factory=list)
    """From the planned moment to the answer, of each request that was answered."""
    late_ms: list[float] = field(default_factory=list)
    """How long after its planned moment each request was sent."""
    failures: list[str] = field(default_factory=list)
    """What each other request failed with."""
    seconds: float = 0.0
    """From the first planned moment to the last answer."""


def plan(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Moments in seconds from 0 to `seconds`: a Poisson process, as independent users make it. At least one."""
    random = np.random.default_rng(seed)
    count = max(1, round(rate_per_s * seconds))
    # Given their number, the moments of a Poisson process are uniform: the rate is then the same for every seed.
    return [float(moment) for moment in np.sort(random.uniform(0, seconds, size=count))]


def run_plan(moments_s: Sequence[float], senders: Sequence[Callable[[int], None]]) -> Arrived:
    """Send request number n at moment n by whichever sender is free; none free, it waits, and that time counts.

    A sender takes the number of the request; a ServingError of it is a failure.
    """
    numbers = itertools.count()
    began = time.perf_counter() + START_S

    def work(send: Callable[[int], None]) -> Arrived:
        mine = Arrived()
        while (number := next(numbers)) < len(moments_s):
            due = began + moments_s[number]
            time.sleep(max(0.0, due - time.perf_counter()))
            mine.late_ms.append((time.perf_counter() - due) * 1000)
            try:
                send(number)
            except ServingError as error:
                mine.failures.append(f"{type(error).__name__}: {error}")
            else:
                mine.times_ms.append((time.perf_counter() - due) * 1000)
        return mine

    with ThreadPoolExecutor(len(senders)) as threads:
        parts = list(threads.map(work, senders))
    seconds = time.perf_counter() - began
    times_ms, late_ms, failures = (
        list(itertools.chain(*columns))
        for columns in zip(*((part.times_ms, part.late_ms, part.failures) for part in parts), strict=True)
    )
    return Arrived(times_ms, late_ms, failures, seconds)


def open_loop(load: Arrivals, texts: Sequence[Text]) -> Arrived:
    """Send `texts` in a seeded order and as planned, over CONNECTIONS connections.

    More requests than connections cannot wait on the server at once; the rest waits here, and that is counted. Raises
    ServingError if the warm-up fails.
    """
    moments = plan(load.rate_per_s, load.seconds, load.seed)
    order = np.resize(np.random.default_rng(load.seed).permutation(len(texts)), len(moments)).tolist()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(load.url, model=load.model)) for _ in range(CONNECTIONS)]
        for client in clients:
            client.classify([texts[0]])

        def sender(client: Client) -> Callable[[int], None]:
            def send(number: int) -> None:
                client.classify([texts[order[number]]])

            return send

        return run_plan(moments, [sender(client) for client in clients])
