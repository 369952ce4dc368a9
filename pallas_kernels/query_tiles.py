"""Packed ragged queries cut into tiles of one row each: the work list of a kernel launch.

Row b's queries are tiles ``query_start[b] + i * size``; no tile crosses into another row, so T
tokens of B rows need at most ``T // size + B`` tiles, a static number. Tokens past the last row's
are nobody's. Where copies need aligned tokens, a row's tiles start up to ``align - 1`` earlier and
the first one skips what is another row's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dims import dims


class QueryTiles(NamedTuple):
    """One entry a tile, in order of tokens; idle tiles stand last and have ``count`` 0."""

    row_I: jax.Array  # i32, 0 where idle
    token_I: jax.Array  # i32, first packed token
    count_I: jax.Array  # i32, tokens, skipped ones included, at most the tile size
    position_I: jax.Array  # i32, the first token's place in its row
    skip_I: jax.Array  # i32, leading tokens that are not the row's


def cut(
    query_start_P: jax.Array, length_B: jax.Array, *, queries: int, size: int, align: int = 1
) -> QueryTiles:
    """Tiles of ``size`` tokens over ``queries`` packed ones. Rows without tokens get none.

    A tile's first token is a multiple of ``align``, which divides ``size``.
    """
    sizes = dims(query_start_P=query_start_P, length_B=length_B)
    count_B = jnp.diff(query_start_P)
    skip_B = jnp.where(count_B > 0, query_start_P[:-1] % align, 0)
    tiles_B = -(-(count_B + skip_B) // size)
    tile_end_B = jnp.cumsum(tiles_B, dtype=jnp.int32)
    tile_I = jnp.arange((queries + (align - 1) * sizes.B) // size + sizes.B, dtype=jnp.int32)
    row_I = jnp.searchsorted(tile_end_B, tile_I, side="right").astype(jnp.int32)
    busy_I = row_I < sizes.B
    row_I = jnp.where(busy_I, row_I, 0)
    before_I = (tile_I - (tile_end_B - tiles_B)[row_I]) * size - skip_B[row_I]
    return QueryTiles(
        row_I=row_I,
        token_I=jnp.where(busy_I, query_start_P[row_I] + before_I, query_start_P[-1]),
        count_I=jnp.where(busy_I, jnp.minimum(size, count_B[row_I] - before_I), 0),
        position_I=length_B[row_I] - count_B[row_I] + before_I,
        skip_I=jnp.where(busy_I, jnp.maximum(-before_I, 0), 0),
    )


def row_of_tokens(query_start_P: jax.Array, queries: int) -> jax.Array:
    """Row of every packed token, i32 [T]; B for padding."""
    token_T = jnp.arange(queries, dtype=jnp.int32)
    return (jnp.searchsorted(query_start_P, token_T, side="right") - 1).astype(jnp.int32)
