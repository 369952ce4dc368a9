"""Progress of long work on stderr: how much is done, how fast, how long still.

On a terminal one line is redrawn in place. Elsewhere (a log, CI) a plain line appears at most
every ten seconds, and one at the end, so that a log stays short and still shows life.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

TERMINAL_SECONDS = 0.1
LOG_SECONDS = 10.0
BAR_WIDTH = 30


class Progress:
    """Counts finished pieces out of ``total``; a context manager, callable from any thread.

    ``done`` pieces are there from the start (a resumed run): they fill the bar but do not count
    in the rate. ``clock`` returns seconds and is there for tests.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= done <= total:
            raise ValueError(f"done: expected 0 to {total}, got {done}")
        self._total, self._label, self._done, self._already = total, label, done, done
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._clock = clock
        self._start = self._shown = clock()
        self._lock = threading.Lock()
        self._note = ""

    def advance(self, pieces: int = 1, note: str = "") -> None:
        """Adds finished pieces and shows the state if it is time to; ``note`` ends the line."""
        with self._lock:
            self._done += pieces
            self._note = note
            now = self._clock()
            if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
                self._shown = now
                self._show(now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._show(self._clock(), last=True)

    def _show(self, now: float, last: bool = False) -> None:
        if not self._terminal:
            self._stream.write(f"{self._line(now)}\n")
        else:
            filled = BAR_WIDTH * self._done // max(self._total, 1)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            end = "\n" if last else ""
            self._stream.write(f"\r\033[K[{bar}] {self._line(now)}{end}")  # \033[K clears the line
        self._stream.flush()

    def _line(self, now: float) -> str:
        seconds = now - self._start
        fresh = self._done - self._already
        line = f"{self._label}: {self._done}/{self._total} in {_clock_text(seconds)}"
        if fresh and seconds > 0:
            left_seconds = (self._total - self._done) * seconds / fresh
            line += f", {fresh / seconds:.3g}/s, {_clock_text(left_seconds)} left"
        return f"{line}, {self._note}" if self._note else line


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
