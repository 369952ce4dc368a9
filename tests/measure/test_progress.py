"""What is shown, and how often, under a clock that the test turns."""

from __future__ import annotations

import io

import pytest

from paged_jax.measure import progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run(stream: io.StringIO, pieces: int, seconds_each: float, done: int = 0) -> str:
    clock = Clock()
    with progress.Progress(100, "cells", done=done, stream=stream, clock=clock) as bar:
        for _ in range(pieces):
            clock.seconds += seconds_each
            bar.advance()
    return stream.getvalue()


def test_log_gets_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    lines = run(io.StringIO(), pieces=25, seconds_each=1.0).splitlines()
    assert lines == [
        "cells: 10/100 in 0:10, 1/s, 1:30 left",
        "cells: 20/100 in 0:20, 1/s, 1:20 left",
        "cells: 25/100 in 0:25, 1/s, 1:15 left",
    ]


def test_terminal_redraws_one_line() -> None:
    text = run(Terminal(), pieces=50, seconds_each=0.0625)
    assert text.count("\n") == 1
    assert text.count("\r") == 26  # every second piece, and the end
    assert text.endswith(f"[{'#' * 15}{'.' * 15}] cells: 50/100 in 0:03, 16/s, 0:03 left\n")


def test_pieces_of_an_earlier_run_do_not_count_in_the_rate() -> None:
    text = run(io.StringIO(), pieces=10, seconds_each=360.0, done=80)
    assert text.splitlines()[-1] == "cells: 90/100 in 1:00:00, 0.00278/s, 1:00:00 left"


def test_a_note_ends_the_line_until_the_next_one() -> None:
    stream, clock = io.StringIO(), Clock()
    with progress.Progress(4, "requests", stream=stream, clock=clock) as bar:
        for note in ("pool 40%", ""):
            clock.seconds += 10.0
            bar.advance(note=note)
    assert stream.getvalue().splitlines() == [
        "requests: 1/4 in 0:10, 0.1/s, 0:30 left, pool 40%",
        "requests: 2/4 in 0:20, 0.1/s, 0:20 left",
        "requests: 2/4 in 0:20, 0.1/s, 0:20 left",
    ]


def test_nothing_to_do_is_no_error() -> None:
    stream = Terminal()
    with progress.Progress(0, "cells", stream=stream):
        pass
    assert "cells: 0/0" in stream.getvalue()


def test_more_done_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="done: expected 0 to 3, got 4"):
        progress.Progress(3, "cells", done=4)
