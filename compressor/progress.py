"""Progress of long work: a bar on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
LINE_EVERY_S = 30.0


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep libraries from warning, while they do what is checked afterwards. Errors are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Progress:
    """Counts steps of `total`; shows rate and time left."""

    def __init__(self, what: str, *, total: int, start: int = 0, visible: bool = True) -> None:
        self._what, self._total, self._done, self._visible = what, total, start, visible
        self._first, self._began = start, time.monotonic()
        self._said = self._began
        self._terminal = visible and sys.stderr.isatty()

    def advance(self, count: int = 1) -> None:
        """Count finished steps."""
        self._done += count
        if not self._visible:
            return
        now = time.monotonic()
        if now - self._said > (0.2 if self._terminal else LINE_EVERY_S):
            self._said = now
            if self._terminal:
                sys.stderr.write(f"\r\033[K{self._line(now)}")
                sys.stderr.flush()
            else:
                log.info("%s", self._line(now))

    def note(self, text: str) -> None:
        """Say something beside the bar."""
        if self._visible:
            self.close()
            log.info("%s %s", self._what, text)

    def close(self) -> None:
        """Clear the bar."""
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _line(self, now: float) -> str:
        rate = (self._done - self._first) / max(1e-9, now - self._began)
        left_s = (self._total - self._done) / rate if rate > 0 else 0.0
        share = 100 * self._done / max(1, self._total)
        return f"{self._what} {self._done}/{self._total} ({share:.0f} %), {rate:.1f}/s, {left_s / 60:.1f} min left"
