"""Flags that hold lists: every wrong value is named in one line."""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest

from experiments import command
from tests.support.commands import call, one_line


def test_choices_are_known_and_given_once():
    assert command.choices("letters", ["b", "a"], "abc") == ("b", "a")
    for values, named in ((["a", "d"], "'d'"), (["a", "a"], "'a,a'"), ([], "''")):
        with pytest.raises(ValueError, match=f"--letters: expected some of a, b, c.*got {named}"):
            command.choices("letters", values, "abc")


def test_numbers_are_in_range_and_given_once():
    assert command.numbers("sizes", ["16", "1"], int, low=1) == (16, 1)
    assert command.numbers("shares", ["0", "0.5"], float, low=0.0, high=1.0) == (0.0, 0.5)
    for values in (["x"], ["1.5"], ["0"], ["1", "1"], []):
        with pytest.raises(ValueError, match="--sizes: expected whole numbers from 1"):
            command.numbers("sizes", values, int, low=1)
    for values in (["1.01"], ["nan"], ["-0.1"], ["0", "0.0"]):
        with pytest.raises(ValueError, match=r"--shares: expected numbers from 0.0 to 1.0"):
            command.numbers("shares", values, float, low=0.0, high=1.0)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 TiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n9 bytes."),
    ],
)
def test_too_little_memory_is_one_line(error: Exception) -> None:
    one_line(call(failing(error)), "not enough memory: ", str(error).replace("\n", " "))


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault"):
        call(failing(RuntimeError("a fault")))


def failing(error: Exception) -> Any:
    """A command that raises."""

    def main(_: list[str]) -> None:
        raise error

    return types.SimpleNamespace(__name__="failing", main=main, define_flags=lambda: None)
