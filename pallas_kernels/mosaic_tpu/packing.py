"""Ragged queries as the prefill kernel has them: a work list of tiles, and rows packed by piece.

The kernel copies a tile's queries and results with slices of HBM, which must start and end at whole
register tiles of 32 rows (the narrowest type's). So each tile starts a new *piece*, the fewest
tokens whose rows of one key/value head fill register tiles, and no piece holds two tiles' tokens:
no tile touches another's outputs. T tokens of B rows take less than ``T + B * piece`` places.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import query_tiles, visibility
from pallas_kernels.problem import Operands, Problem

REGISTER_ROWS = 32


class Work(NamedTuple):
    """Tiles with something to see in order of tokens, then idle ones of count 0. All i32 [I]."""

    row_I: Any
    token_I: Any  # first packed token; T where idle
    count_I: Any  # tokens
    piece_I: Any  # first piece
    position_I: Any  # the first token's place in its row
    own_I: Any  # the row's first query's place in it
    length_I: Any  # the row's
    begin_I: Any  # first key that any of the tile's queries sees
    end_I: Any  # one past the last


class Places(NamedTuple):
    """Where tokens lie among the packed ones, and back; Z places."""

    tile_T: jax.Array
    nth_T: jax.Array  # within the tile
    owned_T: jax.Array  # whether a tile has the token
    place_T: jax.Array  # Z where none has
    token_Z: jax.Array  # anything where no token lies


def piece_tokens(problem: Problem) -> int:
    """Query tokens of a piece."""
    return REGISTER_ROWS // math.gcd(REGISTER_ROWS, problem.group)


def cut(operands: Operands, problem: Problem, size: int, cores: int) -> Work:
    """The work list of tiles of ``size`` tokens, as many for each core.

    ``cores`` more are idle at its end: a core looks at its next tile.
    """
    length_B, starts_P = operands.length_B, operands.query_start_P
    assert starts_P is not None
    tiles = query_tiles.cut(starts_P, length_B, queries=problem.queries, size=size)
    length_I = length_B[tiles.row_I]
    last_I = tiles.position_I + tiles.count_I - 1
    key_range = jax.vmap(functools.partial(visibility.key_range, problem))
    begin_I, end_I = key_range(length_I, tiles.position_I, last_I)
    # Nobody checks bounds: a length past the table's end would read ids from beyond it.
    end_I = jnp.minimum(end_I, problem.row_blocks * problem.block_size)
    busy_I = (tiles.count_I > 0) & (begin_I < end_I)
    order_I = jnp.argsort(~busy_I, stable=True)
    count_I = jnp.where(busy_I, tiles.count_I, 0)[order_I]
    pieces_I = -(-count_I // piece_tokens(problem))
    work = Work(
        row_I=tiles.row_I[order_I],
        token_I=jnp.where(busy_I, tiles.token_I, problem.queries)[order_I],
        count_I=count_I,
        piece_I=jnp.cumsum(pieces_I, dtype=jnp.int32) - pieces_I,
        position_I=tiles.position_I[order_I],
        own_I=(length_I - jnp.diff(starts_P)[tiles.row_I])[order_I],
        length_I=length_I[order_I],
        begin_I=begin_I[order_I],
        end_I=end_I[order_I],
    )
    idle = Work(*(0 for _ in work))._replace(token_I=problem.queries)
    fill = (0, -len(order_I) % cores + cores)
    return jax.tree.map(
        lambda field, value: jnp.pad(field, fill, constant_values=value), work, idle
    )


def place(work: Work, problem: Problem, size: int) -> Places:
    """Places of the tokens, and room for the last tile's copy to read past them."""
    unit = piece_tokens(problem)
    most = (problem.queries // unit + problem.rows) * unit + size
    token_T = jnp.arange(problem.queries, dtype=jnp.int32)
    # Comparing all is one fused pass, a binary search a loop of a dozen.
    tile_T = jnp.searchsorted(work.token_I, token_T, side="right", method="compare_all") - 1
    nth_T = token_T - work.token_I[tile_T]
    owned_T = (tile_T >= 0) & (nth_T < work.count_I[tile_T])
    place_T = jnp.where(owned_T, work.piece_I[tile_T] * unit + nth_T, most)
    token_Z = jnp.zeros(most, jnp.int32).at[place_T].set(token_T, mode="drop")
    return Places(tile_T, nth_T, owned_T, place_T, token_Z)


def pack_queries(q_THD: jax.Array, places: Places, problem: Problem) -> jax.Array:
    """Queries as rows of each key/value head, [K, Z * G, D]: a token's G heads side by side."""
    shape = (problem.queries, problem.kv_heads, problem.group, problem.width)
    packed = q_THD.reshape(shape)[places.token_Z].transpose(1, 0, 2, 3)
    return packed.reshape(problem.kv_heads, -1, problem.width)


def unpack(
    out: jax.Array, lse: jax.Array, places: Places, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """Results by token, from packed [K, Z * G, D] and [I, K, 1, size * G].

    Where no tile has the token, anything.
    """
    T, H, K, G = problem.queries, problem.query_heads, problem.kv_heads, problem.group
    out = out.reshape(K, -1, G, problem.width)[:, places.place_T].transpose(1, 0, 2, 3)
    lse = lse.reshape(-1, K, lse.shape[-1] // G, G)[places.tile_T, :, places.nth_T]
    return out.reshape(T, H, problem.width), lse.reshape(T, H)


def pack_draft_mask(
    operands: Operands, work: Work, places: Places, problem: Problem, tokens: int
) -> jax.Array | None:
    """The draft mask by step, i8 [steps, Z * G, tokens].

    Its first step is the one that holds the row's first query; keys before that are visible.
    """
    if problem.draft is None:
        return None
    assert operands.draft_mask_TQ is not None
    steps = -(-problem.draft // tokens) + 1
    own_T1 = work.own_I[places.tile_T][:, None]
    first_T1 = jnp.maximum(own_T1, 0) // tokens * tokens
    nth = first_T1 + jnp.arange(steps * tokens, dtype=jnp.int32) - own_T1
    seen = jnp.take_along_axis(operands.draft_mask_TQ, jnp.clip(nth, 0, problem.draft - 1), axis=1)
    seen = ((nth < 0) | seen).reshape(problem.queries, steps, tokens).astype(jnp.int8)
    return jnp.repeat(seen[places.token_Z].transpose(1, 0, 2), problem.group, axis=1)


def unpack_scale(
    scale: jax.Array | None, kind: str | None, operands: Operands, problem: Problem, tokens: int
) -> tuple[jax.Array, jax.Array | None]:
    """A scale as factors of heads, f32 [K], and of tokens in order, f32 [B, steps, K, 1, tokens].

    A block's scales are a fraction of a register, which no copy can lay beside the next block's;
    they are gathered here, a 4 / D-th part of a cache of one byte a value.
    """
    K, S = problem.kv_heads, problem.block_size
    if scale is None:
        return jnp.ones(K, jnp.float32), None
    if kind == "head":
        return scale, None
    fill = -problem.row_blocks % (tokens // S)
    table_BM = jnp.pad(jnp.clip(operands.table_BM, 0, problem.blocks - 1), ((0, 0), (0, fill)))
    steps = scale[table_BM].reshape(len(table_BM), -1, tokens // S, K, S).transpose(0, 1, 3, 2, 4)
    return jnp.ones(K, jnp.float32), steps.reshape(len(table_BM), -1, K, 1, tokens)
