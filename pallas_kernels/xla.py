"""Paged attention in plain JAX: any platform, any shape, memory of a few tiles.

An online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the list of tile pairs,
``splits`` of them a step, of one row or of several. A pair gives its largest logit m, the sum l of
e^(x - m) and the sum a of the values with the same weights; the state (M, L, A) of its query tile
takes them in as

    M' = max(M, m),   L' = e^(M - M') L + e^(m - M') l,   A' = e^(M - M') A + e^(m - M') a

and at the end out = A / L, lse = M + log L. A sink is where the state starts. On a CPU a decode
step costs one copy of the rows' caches, in tiles, and their products from L2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tile_pairs, xla_tiles
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tile_pairs import Pairs
from pallas_kernels.tiling import Tiling
from pallas_kernels.xla_tiles import TiledCall


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """Serves every problem, in key tiles of whole blocks with all heads."""
    assert tiling.tokens is not None
    if tiling.tokens % problem.block_size:
        return (
            f"tiling.tokens: expected a multiple of the block size {problem.block_size},"
            f" got {tiling.tokens}"
        )
    if tiling.heads != problem.kv_heads:
        return f"tiling.heads: expected all {problem.kv_heads} heads, got {tiling.heads}"
    if tiling.stages != 1:
        return f"tiling.stages: expected 1, got {tiling.stages}"
    return None


def default_tiling(problem: Problem) -> Tiling:
    """Key tiles of about 256 tokens; as many pairs a step as make 4 MiB, at most 32.

    Tiles of 128 where rows have few queries: the last one of a row is half empty on average, and
    such a step does little else than bring tiles in.
    """
    row_queries = -(-problem.queries // problem.rows)
    queries = min(64, 1 << (row_queries - 1).bit_length())
    about = 128 if queries <= 16 else 256
    blocks = min(max(1, about // problem.block_size), problem.row_blocks)
    tokens = blocks * problem.block_size
    # Keys or values of a pair, its logits and its queries; and no more pairs than there can be.
    numbers = tokens * problem.kv_heads * problem.width
    numbers += queries * problem.query_heads * (tokens + problem.width)
    most = tile_pairs.most_tiles(problem, queries) * -(-problem.row_blocks // blocks)
    at_once = max(1, min(2**20 // numbers, 32, most))
    return Tiling(
        queries=queries,
        tokens=tokens,
        heads=problem.kv_heads,
        splits=1 << (at_once.bit_length() - 1),  # rows tend to come in such numbers, too
        stages=1,
    )


class State(NamedTuple):
    """A softmax over some keys, of all query tiles or of one."""

    most: jax.Array  # [I, K, G, Q], the largest logit
    total: jax.Array  # [I, K, G, Q], sum of e^(logit - most)
    out: jax.Array  # [I, K, G, Q, D], sum of e^(logit - most) v


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: object
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H]; see ``ops.paged_attention``."""
    sinks_H = operands.sinks_H
    if sinks_H is None:
        sinks_H = jnp.full(problem.query_heads, -jnp.inf, jnp.float32)
    out_THD = jnp.zeros(operands.q_THD.shape, problem.dtype)
    lse_TH = jnp.broadcast_to(sinks_H, out_THD.shape[:2])
    call = xla_tiles.cut(operands, problem, tiling)
    dtype = xla_tiles.compute_type(operands)
    q = call.to_tiles(operands.q_THD.astype(dtype) * problem.scale)
    most = call.to_tiles(lse_TH.astype(dtype))
    state = State(most, (most > -jnp.inf).astype(dtype), jnp.zeros_like(q))
    assert tiling.splits is not None
    pairs = tile_pairs.every_pair(call.tiles, call.tokens)
    state = _attend_pairs(call, q, pairs, tiling.splits, state)
    out = state.out / jnp.where(state.total > 0, state.total, 1)[..., None]
    lse = state.most + jnp.log(state.total)
    return _to_tokens(out, call, out_THD), _to_tokens(lse, call, lse_TH)


def _attend_pairs(call: TiledCall, q: jax.Array, pairs: Pairs, at_once: int, state: State) -> State:
    def attend_pair(pair: jax.Array) -> tuple[jax.Array, State]:
        tile, key = pairs.at(pair)
        places = call.places(tile, key)
        k = call.load(tile, key, 0).scaled()
        logit = call.score(q[tile], k, call.operands.alibi_slope_H, places)
        logit = jnp.where(call.visible(tile, places), logit, -jnp.inf)
        # Values come when the keys are done with: both at once are more than L2 holds.
        logit, key = lax.optimization_barrier((logit, key))
        v = call.load(tile, key, 1).scaled()
        most = jnp.max(logit, axis=-1)
        weight = jnp.exp(logit - xla_tiles.finite(most)[..., None])
        out = jnp.einsum("kgqj,kjd->kgqd", weight, v, precision="highest")
        return tile, State(most, jnp.sum(weight, axis=-1), out)

    def step(pair: jax.Array, state: State) -> State:
        return _take_in(state, *jax.vmap(attend_pair)(pair))

    return tile_pairs.for_each(pairs, at_once, step, state)


def _take_in(state: State, tile: jax.Array, part: State) -> State:
    """The state with parts of tiles, of which several may be one tile's."""
    # Read before it is written, by the barrier's order, or all of it is copied in every step.
    before, most = lax.optimization_barrier((state.most[tile], state.most))
    most = most.at[tile].max(part.most)
    shift = xla_tiles.finite(most[tile])
    keep, weight = jnp.exp(before - shift), jnp.exp(part.most - shift)

    def take_in(sums: jax.Array, keep: jax.Array, terms: jax.Array) -> jax.Array:
        return sums.at[tile].set(sums[tile] * keep).at[tile].add(terms)

    return State(
        most=most,
        total=take_in(state.total, keep, weight * part.total),
        out=take_in(state.out, keep[..., None], weight[..., None] * part.out),
    )


def _to_tokens(array: jax.Array, call: TiledCall, fill: jax.Array) -> jax.Array:
    """[I, K, G, Q, ...] as [T, H, ...] in the type of ``fill``, which tokens of no tile keep."""
    array = jnp.moveaxis(array, 3, 1)
    array = array.reshape(*array.shape[:2], *fill.shape[1:]).astype(fill.dtype)
    return fill.at[call.tiles.token_IQ].set(array, mode="drop")
