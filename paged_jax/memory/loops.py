"""Control flow for scalar loops that XLA compiles to one native function on CPU.

Such a loop must not copy arrays, which is what XLA does to a carried array that is read around a
write, and to what the branches of a ``lax.cond`` write. So read with ``fetch`` before a write, and
write on a condition with ``when``, a ``while`` that runs once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def at(array: jax.Array, index: jax.Array | int) -> jax.Array:
    """``array[index]`` of an index that is known to lie inside: nothing is checked or wrapped."""
    return array.at[index].get(mode="promise_in_bounds")


def put(array: jax.Array, index: jax.Array, value: jax.Array | int) -> jax.Array:
    """``array`` with ``value`` at an index that is known to lie inside."""
    return array.at[index].set(value, mode="promise_in_bounds")


def fetch(array: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(at(array, index), array)``, the value read before any write to the array returned."""
    return lax.optimization_barrier((at(array, index), array))


def when[State](condition: jax.Array, change: Callable[[State], State], state: State) -> State:
    """``change(state)`` where the scalar ``condition`` holds, else ``state``, in place."""
    once = lax.while_loop(
        lambda c: c[0], lambda c: (jnp.bool_(False), change(c[1])), (condition, state)
    )
    return once[1]


def repeat[State](
    count: jax.Array | int, change: Callable[[jax.Array, State], State], state: State
) -> State:
    """``change(i, state)`` for i = 0 .. count - 1, in place; a count of 0 or 1 may be static."""
    if isinstance(count, int) and count <= 1:
        return change(jnp.int32(0), state) if count else state
    return lax.fori_loop(0, count, change, state)


def repeat_where[State](
    count: int,
    condition: Callable[[jax.Array], jax.Array],
    change: Callable[[jax.Array, State], State],
    state: State,
) -> State:
    """``change(i, state)`` for those i < ``count`` for which ``condition(i)`` holds, at least one.

    A count of 1 leaves no choice, and no condition in the program.
    """
    if count == 1:
        return change(jnp.int32(0), state)
    return repeat(
        count, lambda i, state: when(condition(i), lambda state: change(i, state), state), state
    )
