"""What a scheduler asks of a memory, one request at a time.

A memory is a module of pure functions on a frozen pytree of its own: ``paged`` and ``chunks`` are.
All arguments and results are scalars, so that a whole simulation compiles to one native loop.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax

from paged_jax.memory.ledger import Ledger
from paged_jax.workload.arrays import RequestArrays


class Stay(flax.struct.PyTreeNode):
    """One residence of a request in memory, as its scheduler knows it."""

    request: jax.Array  # i32
    generated: jax.Array  # i32: tokens of each sample that are stored again with the prompt
    step: jax.Array  # i32: step in which it is stored
    donor: jax.Array  # i32: sequence whose first blocks it shares, Y for none
    donor_tokens: jax.Array  # i32: tokens that sequence has stored


class Holdings(flax.struct.PyTreeNode):
    """What is held, in units of the memory: blocks, or chunks."""

    entries: jax.Array  # i32: references from sequences, and from pinned prefixes
    used: jax.Array  # i32: units in use; entries - used is what sharing avoids
    copies: jax.Array  # i32: copies made so far


class Memory(Protocol):
    """The verbs. ``need``, ``free`` and ``demand`` count in one unit: blocks, or slots."""

    def demand(self, state: Any, step: jax.Array) -> jax.Array:
        """What the running rows take in ``step``."""

    def free(self, state: Any) -> jax.Array:
        """What is free."""

    def holdings(self, state: Any) -> Holdings:
        """What is held and shared."""

    def need(self, state: Any, work: RequestArrays, stay: Stay) -> jax.Array:
        """What ``store`` would take."""

    def grow(self, state: Any, step: jax.Array, rows: jax.Array) -> Any:
        """All ``rows`` running rows store a token; ``demand`` is free."""

    def store(self, state: Any, work: RequestArrays, stay: Stay) -> tuple[Any, jax.Array]:
        """Stores a request: ``(state', fits)``. Where it does not fit the state is as before."""

    def fork(self, state: Any, work: RequestArrays, request: jax.Array) -> Any:
        """After the step that stored a new request: its further samples begin."""

    def split(self, state: Any, work: RequestArrays, request: jax.Array) -> Any:
        """Before the first decode step of a new request's samples: they part."""

    def release(
        self, state: Any, work: RequestArrays, row: jax.Array, tokens: jax.Array, step: jax.Array
    ) -> Any:
        """Sequence ``row`` leaves, with ``tokens`` tokens stored, the latest in ``step``."""

    def ledger(self, state: Any, *, short: jax.Array, stranded: jax.Array) -> Ledger:
        """The split of the pool; ``short`` and ``stranded`` say why the queue's head waits."""
