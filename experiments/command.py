"""One way to run a command: what is wrong goes to stderr in one line, and the exit code says so.

0 is success, 1 a wrong flag or a wrong input (``ValueError``, ``OSError``), 130 an interrupt. Any
other exception is a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Parses the flags and calls ``main([program])``; never returns. Takes flags only."""

    def guarded(arguments: list[str]) -> int:
        try:
            if len(arguments) > 1:
                raise ValueError(f"expected flags only, got {arguments[1]!r}")
            main(arguments)
        except OSError as error:
            return _fail(f"{error.filename}: {error.strerror}" if error.filename else f"{error}")
        except ValueError as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        return 0

    app.run(guarded, flags_parser=_parse)
    raise AssertionError("app.run exits")


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        sys.exit(_fail(f"{error} (--help lists the flags)"))


def _fail(message: str) -> int:
    print("error:", " ".join(message.split("\n")), file=sys.stderr)
    return 1
