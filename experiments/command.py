"""One way to run a command: what is wrong goes to stderr in one line, and the exit code says so.

0 is success, 1 a wrong flag or a wrong input (``ValueError``, ``OSError``, or one that no memory is
large enough for), 130 an interrupt. Any other exception is a fault of the program and keeps its
traceback.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging


def run(main: Callable[[list[str]], None], define_flags: Callable[[], None]) -> NoReturn:
    """Defines and parses the flags, calls ``main([program])``, never returns. Takes flags only.

    Flags are defined here and not on import: experiments import each other.
    """
    define_flags()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign still gets the rest

    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs every back end it does not find

    def guarded(arguments: list[str]) -> int:
        absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax tells each file it writes
        try:
            if len(arguments) > 1:
                raise ValueError(f"expected flags only, got {arguments[1]!r}")
            main(arguments)
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            message = _message(error)
            if message is None:
                raise
            return _fail(message)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        return 0

    app.run(guarded, flags_parser=_parse)
    raise AssertionError("app.run exits")


def _message(error: Exception) -> str | None:
    """What is told of an error; None for a fault of the program."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    # JAX has no exception of its own for it.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"not enough memory: {error}"
    return None if isinstance(error, RuntimeError) else str(error)


def choices(flag: str, values: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The flag's values, each known and given once; ``ValueError`` in one line otherwise."""
    chosen = tuple(values)
    unknown = [value for value in chosen if value not in known]
    if unknown or not chosen or len(set(chosen)) < len(chosen):
        given = repr(unknown[0]) if unknown else repr(",".join(chosen))
        raise ValueError(f"--{flag}: expected some of {', '.join(known)}, each once, got {given}")
    return chosen


def numbers[Number: (int, float)](
    flag: str,
    values: Iterable[object],
    kind: type[Number],
    *,
    low: Number,
    high: Number | None = None,
) -> tuple[Number, ...]:
    """The flag's values as numbers in a range, each given once; ``ValueError`` otherwise."""
    wanted = f"{'whole numbers' if kind is int else 'numbers'} from {low}"
    wanted += "" if high is None else f" to {high}"
    chosen: list[Number] = []
    for value in values:
        try:
            number = kind(str(value))
        except ValueError:
            raise ValueError(f"--{flag}: expected {wanted}, got {value!r}") from None
        if not low <= number or (high is not None and not number <= high):
            raise ValueError(f"--{flag}: expected {wanted}, got {value}")
        chosen.append(number)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"--{flag}: expected {wanted}, each once, got {chosen}")
    return tuple(chosen)


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        sys.exit(_fail(f"{error} (--help lists the flags)"))


def _fail(message: str) -> int:
    print("error:", message.replace("\n", " "), file=sys.stderr)
    return 1
