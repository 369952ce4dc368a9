"""A soak finds nothing where nothing leaks, and every leak that is put in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments import soak
from experiments.soak_load import Load, Shape
from paged_jax.config import MOST
from paged_jax.memory import block_table, pool
from paged_jax.scheduling import batching, policy
from tests.support.commands import call, one_line

SMALL = (
    *("--rows=8", "--blocks=30", "--block_size=4", "--most_prompt=20", "--most_output=16"),
    *("--step_tokens=16", "--arrivals=0.2", "--aborts=0.005"),
)
NAMES = (
    *("arrived", "finished", "aborted", "preempted", "swapped", "forked", "copied", "found"),
    "decoded",
)


def test_nothing_leaks() -> None:
    """2,000 steps in which all happens that can."""
    ways = "--prefix_caching", "--swap_blocks=20"
    done = call(soak, "--steps=2000", "--call_steps=200", *ways, *SMALL)
    assert (done.code, done.err) == (0, "")
    *lines, last = done.out.splitlines()
    assert len(lines) == 10
    found = {name: int(re.findall(rf"{name} (\d+)", lines[-1])[0]) for name in NAMES}
    assert found.pop("decoded") < 2000
    assert min(found.values()) > 50, lines[-1]
    assert re.fullmatch(r"nothing leaked: \d+ requests came and are gone", last)


def forgetful_release(table: Any, released_B: Any) -> Any:
    """The first block of a row that leaves keeps a holder."""
    block_B = jnp.where(released_B, table.table_BM[:, 0], table.pool.none)
    after, valid = release_as_ever(table.replace(pool=pool.hold(table.pool, block_B)), released_B)
    return after, valid


def absent_stop(book: Any, memory: Any, stopped_RF: Any) -> Any:
    """Samples that are stopped keep their rows."""
    after, _ = stop_as_ever(book, memory, stopped_RF)
    return after.replace(owner_B=book.owner_B), memory


release_as_ever, stop_as_ever = block_table.release, batching.stop
LEAKS = [
    (block_table, "release", forgetful_release, "reference counts differ from the table"),
    pytest.param(
        *(batching, "stop", absent_stop, "a live sample of a running request has no row, or two"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("module", "name", "leak", "fault"), LEAKS)
def test_a_leak_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, leak: Callable[..., Any], fault: str
) -> None:
    monkeypatch.setattr(module, name, leak)
    # A number of steps of its own, so that the program is its own, too.
    steps = 300 + len(name)
    one_line(call(soak, f"--steps={steps}", f"--call_steps={steps}", *SMALL), "step 30", fault)


SHAPE = Shape(rows=4, blocks=20, block_size=4, samples=2, most_prompt=8, most_output=8)


@jax.jit
def one_request() -> Load:
    """A request of two samples that runs and has stored five tokens; another waits."""
    load = soak.soak_load.create(SHAPE, 0)
    memory, _, _ = load.memory.reserve(jnp.array([5, 0, 0, 0]))
    memory = memory.fork(jnp.array([4, 0, 4, 4]))
    book = load.book.replace(
        rank_R=load.book.rank_R.at[:2].set(jnp.array([7, 3])),
        running_R=load.book.running_R.at[0].set(True),
        prompt_R=load.book.prompt_R.at[0].set(5),
        live_RF=load.book.live_RF.at[:2].set(True),
        owner_B=load.book.owner_B.at[:2].set(0),
        sample_B=jnp.array([0, 1, 0, 0]),
    )
    return load.replace(book=book, memory=memory, counts=load.counts.replace(arrived=jnp.int32(2)))


BROKEN: dict[str, Callable[[Load], dict[str, Any]]] = {
    "a live sample of a running request has no row": lambda load: {
        "book": load.book.replace(sample_B=jnp.zeros(4, jnp.int32))
    },
    "a row stores more than its sequence has": lambda load: {
        "book": load.book.replace(prompt_R=load.book.prompt_R.at[0].set(4))
    },
    "a request is there without a live sample, or gone with one": lambda load: {
        "book": load.book.replace(rank_R=load.book.rank_R.at[1].set(MOST)),
        "counts": load.counts.replace(arrived=jnp.int32(1)),
    },
    "two requests have one place in the order": lambda load: {
        "book": load.book.replace(rank_R=load.book.rank_R.at[1].set(7))
    },
    "3 requests came, 0 finished, 0 were aborted, 2 are there": lambda load: {
        "counts": load.counts.replace(arrived=jnp.int32(3))
    },
}


def test_every_fault_is_named() -> None:
    load = one_request()
    assert soak.faults(load) == []
    assert soak.leaks(load) == ["2 blocks are held, 2 have references, and nobody is there"]
    for fault, broken in BROKEN.items():
        (found,) = soak.faults(load.replace(**broken(load)))
        assert found.startswith(fault)


def test_a_process_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([500, 510, 517])
    monkeypatch.setattr(soak, "resident_bytes", lambda: 2**20 * next(sizes))
    monkeypatch.setattr(soak.soak_load, "advance", lambda load, *_, steps: load)
    empty = soak.soak_load.create(SHAPE, 0)
    chances = soak.soak_load.Chances(*[jnp.float32(0)] * 7)
    with pytest.raises(ValueError, match=r"the process grew by 17.0 MiB after its first tenth"):
        soak.soak(empty, policy.limits(), chances, steps=200, call_steps=100)


def test_what_is_never_served_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.soak_load, "advance", lambda load, *_, steps: load)
    chances = soak.soak_load.Chances(*[jnp.float32(0)] * 7)
    with pytest.raises(ValueError, match="2 requests are still there 512 steps after the last"):
        soak.drain(one_request(), policy.limits(), chances, steps=100)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--steps=0",), "steps"),
        (("--samples=9",), "samples: expected at most 8, the rows, got 9"),
        (("--blocks=12",), "blocks: 20 prompt and 3 x 16 output tokens may need 17 blocks of 4"),
        (("--aborts=nan",), "aborts"),
        (("--priorities=5",), "priorities"),
        (("--steps=100000000",), "--steps: expected fewer than 268435456 / (2 x --rows)"),
        (("--nochunked_prefill",), "--step_tokens: without chunks a step has to take 35 tokens"),
    ],
)
def test_wrong_flags_are_one_line(arguments: tuple[str, ...], part: str) -> None:
    one_line(call(soak, *SMALL, *arguments), part)
