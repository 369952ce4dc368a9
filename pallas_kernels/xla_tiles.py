"""A call of paged attention cut into tiles: what a pair of tiles holds, scores and sees.

The forward pass and its gradient go through the same pairs (``tile_pairs``) with these functions.
They are written for one pair; the passes ``vmap`` them over the pairs of a step.

On a CPU time goes into bringing the cache, tile by tile, into L2. What keeps that at one wide copy:
the slots of one head of a block lie together in the pool and are one row of a gather, and rows come
out in the order in which the products want them, so that nothing is transposed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tile_pairs, visibility
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tile_pairs import Tiles
from pallas_kernels.tiling import Tiling


class Stored(NamedTuple):
    """A tile of keys or of values as the cache has them, in the type of the computation."""

    slots: jax.Array  # [K, tokens, D]
    scale: jax.Array | None  # [K, tokens or 1, 1]

    def scaled(self) -> jax.Array:
        return self.slots if self.scale is None else self.slots * self.scale


class Places(NamedTuple):
    """Positions of a pair's queries and keys in their row."""

    query: jax.Array  # [Q, 1]
    key: jax.Array  # [tokens]


@dataclasses.dataclass(frozen=True)
class TiledCall:
    """A call and its query tiles."""

    operands: Operands
    problem: Problem
    tiles: Tiles
    tokens: int  # of a key tile

    def to_tiles(self, array: jax.Array) -> jax.Array:
        """[T, H, ...] as [I, K, G, Q, ...], 0 where a tile has no token."""
        array = array.at[self.tiles.token_IQ].get(mode="fill", fill_value=0)
        heads = (self.problem.kv_heads, self.problem.group)
        return jnp.moveaxis(array.reshape(*array.shape[:2], *heads, *array.shape[3:]), 1, 3)

    def places(self, tile: jax.Array, key: jax.Array) -> Places:
        """Of a query tile and the ``key``-th key tile of its row."""
        nth_Q = jnp.arange(self.tiles.token_IQ.shape[1], dtype=jnp.int32)
        nth_key = jnp.arange(self.tokens, dtype=jnp.int32)
        return Places(self.tiles.position_I[tile] + nth_Q[:, None], key * self.tokens + nth_key)

    def blocks(self, tile: jax.Array, key: jax.Array) -> jax.Array:
        """A key tile's blocks; N for those without a slot that the query tile sees.

        These are not looked up: the table may hold anything there.
        """
        problem, tiles = self.problem, self.tiles
        size, count = problem.block_size, self.tokens // problem.block_size
        nth = key * count + jnp.arange(count, dtype=jnp.int32)
        seen = (nth * size < tiles.end_I[tile]) & ((nth + 1) * size > tiles.begin_I[tile])
        block = self.operands.table_BM[tiles.row_I[tile], jnp.minimum(nth, problem.row_blocks - 1)]
        return jnp.where(seen, block, problem.blocks)

    def load(self, tile: jax.Array, key: jax.Array, side: int) -> Stored:
        """Keys (side 0) or values (1) of a key tile.

        0 in slots that no query of the tile sees, and so is their scale: there may be NaN.
        """
        operands, problem, dtype = self.operands, self.problem, compute_type(self.operands)
        block = self.blocks(tile, key)
        rows = self._rows(tile, key, block, side)
        slots = lax.bitcast_convert_type(rows, operands.kv_NUKSD.dtype).astype(dtype)
        slots = slots.reshape(problem.kv_heads, self.tokens, problem.width)
        scale = (operands.k_scale, operands.v_scale)[side]
        seen = self.visible(tile, self.places(tile, key)).any(axis=0)[:, None]
        if problem.draft is not None:  # it hides slots between those that are seen
            slots = jnp.where(seen, slots, 0)
        if scale is not None:
            by_slot = scale.ndim > 1
            scale = scale.at[block].get(mode="clip").swapaxes(0, 1) if by_slot else scale
            scale = scale.astype(dtype).reshape(problem.kv_heads, -1, 1)
            scale = jnp.where(seen, scale, 0) if by_slot else scale
        return Stored(slots, scale)

    def _rows(self, tile: jax.Array, key: jax.Array, block: jax.Array, side: int) -> jax.Array:
        """Blocks as ``pool_rows`` orders them, [K, blocks, S * D], 0 outside of the tile's range.

        The range is cut as the rows pass by, which costs nothing; afterwards it is a pass of its
        own.
        """
        problem, tiles = self.problem, self.tiles
        pool = self.operands.kv_NUKSD.reshape(-1, problem.block_size * problem.width)
        if pool.dtype.name.startswith("float8"):
            # XLA on a CPU would convert the whole pool before it gathers from it, ahead of the loop
            # over the pairs unless that has to wait for the block.
            pool, block = lax.optimization_barrier((pool, block))
            pool = lax.bitcast_convert_type(pool, jnp.uint8)
        block_of = jnp.clip(block, 0, problem.blocks - 1)
        rows = pool.at[pool_rows(block_of, side, problem)].get(mode="promise_in_bounds")
        place = (key * len(block) + jnp.arange(len(block), dtype=jnp.int32)) * problem.block_size
        number = jnp.arange(rows.shape[-1], dtype=jnp.int32)
        seen = number < self._numbers(tiles.end_I[tile] - place)
        if problem.window is not None:
            seen &= number >= self._numbers(tiles.begin_I[tile] - place)
        # A reshape inside the gather's loop would make it copy single numbers.
        return lax.optimization_barrier(jnp.where(seen, rows, jnp.zeros((), rows.dtype)))

    def _numbers(self, slots: jax.Array) -> jax.Array:
        """Of so many slots of blocks, [blocks, 1]; of none or all where it is fewer or more."""
        return jnp.clip(slots, 0, self.problem.block_size)[:, None] * self.problem.width

    def score(
        self, q: jax.Array, k: jax.Array, slope_H: jax.Array | None, places: Places
    ) -> jax.Array:
        """Logits [K, G, Q, tokens], unmasked, of scaled queries and keys."""
        product = jnp.einsum("kgqd,kjd->kgqj", q, k, precision="highest")
        if slope_H is not None:
            slope_H = slope_H.astype(k.dtype).reshape(*product.shape[:2], 1, 1)
        return visibility.logits(self.problem, product, places.query, places.key, slope_H)

    def visible(self, tile: jax.Array, places: Places) -> jax.Array:
        """Which keys the queries see, [Q, tokens]."""
        mask_TQ, token_Q = self.operands.draft_mask_TQ, self.tiles.token_IQ[tile]
        seen = visibility.visible(self.problem, *places, self.tiles.end_I[tile])
        if mask_TQ is not None:
            nth = places.key - self.tiles.drafted_I[tile]
            mask = mask_TQ.at[token_Q].get(mode="clip")
            seen &= (nth < 0) | mask[:, jnp.clip(nth, 0, mask.shape[1] - 1)]
        return seen & (token_Q < self.problem.queries)[:, None]


def cut(operands: Operands, problem: Problem, tiling: Tiling) -> TiledCall:
    """A call in query tiles and key tiles of a tiling's size."""
    assert tiling.queries is not None
    assert tiling.tokens is not None
    tiles = tile_pairs.cut(operands, problem, tiling.queries)
    return TiledCall(operands, problem, tiles, tiling.tokens)


def pool_rows(block: jax.Array, side: int, problem: Problem) -> jax.Array:
    """Rows of the pool as [N * 2 * K, S * D] with the keys (side 0) or values (1) of blocks.

    Blocks [...] have rows [K, ...].
    """
    head = jnp.arange(problem.kv_heads, dtype=jnp.int32).reshape(-1, *[1] * block.ndim)
    return (2 * block + side) * problem.kv_heads + head


def compute_type(operands: Operands) -> jnp.dtype:
    """f32, or f64 where queries or cache are."""
    wide = jnp.float64 in (operands.q_THD.dtype, operands.kv_NUKSD.dtype)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def finite(most: jax.Array) -> jax.Array:
    """What to subtract before e^x: the largest logit or the lse, or 0 where there is none."""
    return jnp.where(most > -jnp.inf, most, 0)
