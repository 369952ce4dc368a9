"""Contiguous allocators in plain Python, and a check that replays random traces against them.

The two models share nothing with the code under test: sets of free addresses per order, and a
sorted list of intervals. A trace is drawn by driving a model; the allocator under test replays it
in one scan, and must agree in every answer and return to the empty pool at the end.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class BuddyModel:
    """Free addresses in one set per order."""

    def __init__(self, pool_slots: int) -> None:
        self.pool_slots = pool_slots
        self.live: dict[int, int] = {}  # address -> order
        self.free: dict[int, set[int]] = {order: set() for order in range(32)}
        self.regions: set[tuple[int, int]] = set()
        address = 0
        for order in reversed(range(32)):
            if address + 2**order <= pool_slots:
                self.free[order].add(address)
                self.regions.add((order, address))
                address += 2**order

    def free_slots(self) -> int:
        return sum(2**order * len(addresses) for order, addresses in self.free.items())

    def allocate(self, slots: int) -> int | None:
        wanted = next((order for order in range(32) if 2**order >= slots), 32)
        order = next((order for order in range(wanted, 32) if self.free[order]), None)
        if slots < 1 or order is None:
            return None
        address = min(self.free[order])
        self.free[order].remove(address)
        while order > wanted:
            order -= 1
            self.free[order].add(address + 2**order)
        self.live[address] = order
        return address

    def release(self, address: int) -> bool:
        if address not in self.live:
            return False
        order = self.live.pop(address)
        while (order, address) not in self.regions:
            buddy = address - 2**order if address // 2**order % 2 else address + 2**order
            if buddy not in self.free[order]:
                break
            self.free[order].remove(buddy)
            address, order = min(address, buddy), order + 1
        self.free[order].add(address)
        return True


class FirstFitModel:
    """Live chunks as a list of (start, end), sorted."""

    def __init__(self, pool_slots: int) -> None:
        self.pool_slots = pool_slots
        self.chunks: list[tuple[int, int]] = []

    @property
    def live(self) -> list[int]:
        return [start for start, _ in self.chunks]

    def free_slots(self) -> int:
        return self.pool_slots - sum(end - start for start, end in self.chunks)

    def allocate(self, slots: int) -> int | None:
        starts = [start for start, _ in self.chunks] + [self.pool_slots]
        ends = [0] + [end for _, end in self.chunks]
        for gap_start, gap_end in zip(ends, starts, strict=True):
            if 1 <= slots <= gap_end - gap_start:
                self.chunks = sorted([*self.chunks, (gap_start, gap_start + slots)])
                return gap_start
        return None

    def release(self, address: int) -> bool:
        kept = [chunk for chunk in self.chunks if chunk[0] != address]
        found = len(kept) < len(self.chunks)
        self.chunks = kept
        return found


Model = BuddyModel | FirstFitModel


@dataclasses.dataclass(frozen=True)
class Trace:
    """Operations and a model's answers, T of each; frees everything at the end."""

    frees_T: np.ndarray  # bool: free the address `value`, else allocate `value` slots
    value_T: np.ndarray
    address_T: np.ndarray  # of a chunk allocated; the pool's slots where none
    accepted_T: np.ndarray
    unallocated_T: np.ndarray


def draw(model: Model, seed: int, length: int = 2048) -> Trace:
    """A random trace that fills and drains the pool, with refused operations among the rest."""
    rng, pool_slots, rows = random.Random(seed), model.pool_slots, []

    def record(frees: bool, value: int) -> None:
        if frees:
            address, accepted = None, model.release(value)
        else:
            address = model.allocate(value)
            accepted = address is not None
        address = pool_slots if address is None else address
        rows.append((frees, value, address, accepted, model.free_slots()))

    while len(rows) + len(model.live) < length - 1:
        live, filling = list(model.live), len(rows) // 256 % 2 == 0
        if rng.random() < 0.1:  # to be refused: no chunk's first slot, or no slots
            record(True, rng.choice([-1, pool_slots, rng.randrange(pool_slots), 2**30]))
            record(False, rng.choice([0, -3, pool_slots + 1, 2**30]))
        elif live and rng.random() < (0.4 if filling else 0.6):
            record(True, rng.choice(live))
        else:
            record(False, int(2 ** rng.uniform(0, 12)))
    for address in rng.sample(list(model.live), len(model.live)):
        record(True, address)
    while len(rows) < length:  # one length, one compilation
        record(True, 0)
    return Trace(*map(np.array, zip(*rows, strict=True)))


def replayer(allocator):
    """Jitted ``(state, trace) -> (state', (address_T, accepted_T, unallocated_T, same_T))``."""

    def step(state, operation):
        frees, value = operation
        freed, valid = allocator.free(state, jnp.where(frees, value, -1))
        after, address, fits = allocator.allocate(freed, jnp.where(frees, 0, value))
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
        same = jnp.stack([(old == new).all() for old, new in leaves]).all()
        answers = address, jnp.where(frees, valid, fits), allocator.free_slots(after), same
        return after, answers

    return jax.jit(lambda state, frees_T, value_T: lax.scan(step, state, (frees_T, value_T)))


def disagreements(replay, allocator, trace: Trace, pool_slots: int, bound: int | None) -> list[str]:
    """What an allocator got wrong in a trace, in words."""
    empty = allocator.create(pool_slots, bound)
    state, answers = replay(empty, trace.frees_T, trace.value_T.astype(np.int32))
    address_T, accepted_T, unallocated_T, same_T = map(np.asarray, answers)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(empty), strict=True)
    found = {
        "address": (address_T != trace.address_T).any(),
        "accepted": (accepted_T != trace.accepted_T).any(),
        "free slots": (unallocated_T != trace.unallocated_T).any(),
        "a refused operation changed the state": not same_T[~trace.accepted_T].all(),
        "not as empty as at first": not all((old == new).all() for old, new in leaves),
    }
    return [fault for fault, present in found.items() if present]


def compiled_loop(allocator) -> tuple[bool, list[str]]:
    """Whether XLA compiles a loop over both verbs to one native function on CPU, and its copies."""

    def body(carry):
        step, state, held = carry
        state, valid = allocator.free(state, held)
        state, held, fits = allocator.allocate(state, step % 90 + 1)
        return step + 1 + valid + fits, state, held

    run = jax.jit(lambda carry: lax.while_loop(lambda carry: carry[0] < 99, body, carry))
    carry = jnp.int32(0), allocator.create(96), jnp.int32(96)
    return native_loop(run.lower(carry).compile())


def native_loop(compiled: Any) -> tuple[bool, list[str]]:
    """Whether the program's outermost loop is one native function, and array copies in bodies."""
    text = compiled.as_text()
    assert text is not None
    start = text.index("\nENTRY")
    copies = re.findall(r"\S+\[\d{2,}\]\S* copy\(.*", text[:start])
    return "small_call" in text[start:], copies
