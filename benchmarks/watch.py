"""Looks at a figure again and again while something else runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 0.5


@contextmanager
def watched(figure: Callable[[], float]) -> Iterator[list[float]]:
    """The values of `figure`: one at the beginning, then one every EVERY_S seconds until the block ends."""
    found, done = [figure()], threading.Event()

    def look() -> None:
        while not done.wait(EVERY_S):
            found.append(figure())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
