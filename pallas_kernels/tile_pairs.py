"""The XLA path's work list: pairs of a query tile and a key tile that have something to do.

Each row's queries are cut into tiles (``query_tiles``), its stored tokens into tiles of whole
blocks. Of all pairs only those with a key that some query sees are listed, row after row, so that
a loop over the list costs what is there and not what there is room for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import query_tiles, visibility
from pallas_kernels.problem import Operands, Problem


class Tiles(NamedTuple):
    """What every query tile is. The last one is idle: pairs past the end of a list belong to it."""

    row_I: jax.Array
    token_IQ: jax.Array  # packed tokens; T, one past the last, where the tile has none
    position_I: jax.Array  # the first token's place in its row
    last_I: jax.Array  # the last one's
    length_I: jax.Array  # of the row
    drafted_I: jax.Array  # place of the row's first query
    begin_I: jax.Array  # first key position that some query sees
    end_I: jax.Array  # one past the last; 0 where idle


class Pairs(NamedTuple):
    """For every query tile ``count`` key tiles from ``first`` on."""

    end_I: jax.Array  # running total of the counts
    count_I: jax.Array
    first_I: jax.Array

    def at(self, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Query tile and key tile of the n-th pair."""
        tile = jnp.sum(pair >= self.end_I, dtype=jnp.int32)
        tile = jnp.minimum(tile, len(self.end_I) - 1)
        nth = pair - (self.end_I - self.count_I)[tile]
        return tile, self.first_I[tile] + nth


def cut(operands: Operands, problem: Problem, size: int) -> Tiles:
    """The query tiles of a call, of ``size`` tokens."""
    starts_P = operands.query_start_P
    if starts_P is None:
        starts_P = jnp.arange(problem.rows + 1, dtype=jnp.int32)
    cut = query_tiles.cut(starts_P, operands.length_B, queries=problem.queries, size=size)
    most = most_tiles(problem, size)
    cut = jax.tree.map(lambda array: jnp.pad(array[:most], (0, 1)), cut)
    busy_I, last_I = cut.count_I > 0, cut.position_I + cut.count_I - 1
    length_I = jnp.where(busy_I, operands.length_B[cut.row_I], 0)
    begin_I, end_I = _key_range(problem, length_I, cut.position_I, last_I)
    nth_Q = jnp.arange(size, dtype=jnp.int32)
    token_IQ = cut.token_I[:, None] + nth_Q
    return Tiles(
        row_I=cut.row_I,
        token_IQ=jnp.where(nth_Q < cut.count_I[:, None], token_IQ, problem.queries),
        position_I=cut.position_I,
        last_I=last_I,
        length_I=length_I,
        drafted_I=length_I - jnp.diff(starts_P)[cut.row_I],
        begin_I=begin_I,
        end_I=jnp.where(busy_I, end_I, 0),
    )


def most_tiles(problem: Problem, size: int) -> int:
    """As many query tiles as a call can need: the last one of every row may hold one token."""
    return (problem.queries + problem.rows * (size - 1)) // size


def every_pair(tiles: Tiles, tokens: int) -> Pairs:
    """All pairs, for key tiles of ``tokens``."""
    first_I = tiles.begin_I // tokens
    count_I = jnp.maximum(-(-tiles.end_I // tokens) - first_I, 0)
    return Pairs(jnp.cumsum(count_I), count_I, first_I)


def for_each[Carry](
    pairs: Pairs, at_once: int, step: Callable[[jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """``carry`` after ``step(pair, carry)`` on the numbers of ``at_once`` pairs at a time."""

    def advance(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        first, carry = state
        return first + at_once, step(first + jnp.arange(at_once, dtype=jnp.int32), carry)

    def unfinished(state: tuple[jax.Array, Carry]) -> jax.Array:
        return state[0] < pairs.end_I[-1]

    return lax.while_loop(unfinished, advance, (jnp.int32(0), carry))[1]


def _key_range(
    problem: Problem, length_I: jax.Array, first_I: jax.Array, last_I: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``visibility.key_range`` of every tile, within the table."""
    stored_I = jnp.minimum(length_I, problem.row_blocks * problem.block_size)
    key_range = functools.partial(visibility.key_range, problem)
    return jax.vmap(key_range)(stored_I, first_I, last_I)
