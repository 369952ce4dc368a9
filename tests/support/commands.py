"""Commands run in this process, through the ``command.run`` that a shell reaches."""

from __future__ import annotations

import contextlib
import io
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
from absl import flags

from experiments import command


class Done(NamedTuple):
    """How a command ended."""

    code: object
    out: str
    err: str


def call(experiment: ModuleType, *arguments: object) -> Done:
    """Runs an experiment's ``main`` with flags of its own, which are gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    before = set(flags.FLAGS)
    experiment.define_flags()
    own = set(flags.FLAGS) - before
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setattr(sys, "argv", [experiment.__name__, *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                command.run(experiment.main, lambda: None)
    finally:
        for name in own:
            delattr(flags.FLAGS, name)
    return Done(ended.value.code, out.getvalue(), err.getvalue())


def one_line(done: Done, *parts: object) -> None:
    """The command failed, said why in one line that holds the parts, and printed nothing."""
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1
    assert all(str(part) in done.err for part in parts), done.err
