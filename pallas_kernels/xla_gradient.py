"""Gradients of paged attention in plain JAX, tile by tile from the output and the lse.

With p = e^(x - lse) of the logits x, and o', l' the cotangents of the output and the lse,

    v' = p o',   x' = p (o' v - delta),   delta = o' out - l'

(FlashAttention-2, arXiv 2307.08691, section 3.1); x' goes back through bias, soft cap, product and
scales by JAX's own rules. Nothing of a row's size is kept: pairs of tiles are loaded and scored
again, and what they owe to a block is added where it lies in the pool, so that a block in several
rows gets the sum, and a slot that nobody reads exactly 0. Cost: five products a pair where the
forward pass has two, and sums as large as the pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tile_pairs, xla, xla_tiles
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.xla_tiles import Stored

# Output [T, H, D] and lse [T, H], or their cotangents.
Result = tuple[jax.Array, jax.Array]


class Owed(NamedTuple):
    """Cotangents from one pair of tiles, or from several."""

    q: jax.Array  # [K, G, Q, D]
    k: Stored
    v: Stored
    slope_H: jax.Array | None


def gradient(operands: Operands, problem: Problem, result: Result, cotangents: Result) -> Operands:
    """Cotangents of the operands, in f32, or in f64 where the computation is.

    ``result`` is what the forward pass returned, ``cotangents`` belong to it. None for operands
    that are absent or hold integers.
    """
    dtype = xla_tiles.compute_type(operands)
    out_THD, lse_TH, d_out_THD, d_lse_TH = (x.astype(dtype) for x in (*result, *cotangents))
    delta_TH = jnp.sum(d_out_THD * out_THD, axis=-1) - d_lse_TH
    sums = _add_pairs(operands, problem, lse_TH, d_out_THD, delta_TH)
    if operands.sinks_H is not None:
        weight_TH = jnp.exp(operands.sinks_H - xla_tiles.finite(lse_TH))
        sums = sums._replace(sinks_H=-jnp.sum(weight_TH * delta_TH, axis=0))
    if sums.kv_NUKSD is not None:
        sums = sums._replace(kv_NUKSD=sums.kv_NUKSD.reshape(operands.kv_NUKSD.shape))
    return sums


def _nothing(operands: Operands, problem: Problem) -> Operands:
    """Zeros for what has a gradient; the pool's as the rows of ``xla_tiles.pool_rows``."""
    dtype = xla_tiles.compute_type(operands)

    def zeros(array: jax.Array) -> jax.Array | None:
        return jnp.zeros(array.shape, dtype) if jnp.issubdtype(array.dtype, jnp.inexact) else None

    sums: Operands = jax.tree.map(zeros, operands)
    if sums.kv_NUKSD is not None:
        rows = sums.kv_NUKSD.reshape(-1, problem.block_size * problem.width)
        sums = sums._replace(kv_NUKSD=rows)
    return sums


def _add_pairs(
    operands: Operands,
    problem: Problem,
    lse_TH: jax.Array,
    d_out_THD: jax.Array,
    delta_TH: jax.Array,
) -> Operands:
    tiling = xla.default_tiling(problem)
    call = xla_tiles.cut(operands, problem, tiling)
    pairs = tile_pairs.every_pair(call.tiles, call.tokens)
    q_THD = operands.q_THD.astype(lse_TH.dtype) * problem.scale
    tiled = [call.to_tiles(array) for array in (q_THD, lse_TH, d_out_THD, delta_TH)]

    def owed_by(pair: jax.Array) -> tuple[jax.Array, jax.Array, Owed]:
        tile, key = pairs.at(pair)
        places = call.places(tile, key)
        seen = call.visible(tile, places)
        block = call.blocks(tile, key)
        k, v = (call.load(tile, key, side) for side in (0, 1))
        q, lse, d_out, delta = (array[tile] for array in tiled)

        def score(q: jax.Array, k: Stored, v: Stored, slope_H: jax.Array | None) -> Any:
            return call.score(q, k.scaled(), slope_H, places), v.scaled()

        (logit, scaled_v), pull_back = jax.vjp(score, q, k, v, operands.alibi_slope_H)
        weight = jnp.where(seen, jnp.exp(logit - xla_tiles.finite(lse)[..., None]), 0)
        d_weight = jnp.einsum("kgqd,kjd->kgqj", d_out, scaled_v, precision="highest")
        d_v = jnp.einsum("kgqj,kgqd->kjd", weight, d_out, precision="highest")
        d_q, *d_rest = pull_back((weight * (d_weight - delta[..., None]), d_v))
        return call.tiles.token_IQ[tile], block, Owed(d_q * problem.scale, *d_rest)

    def step(pair: jax.Array, sums: Operands) -> Operands:
        return _add(problem, sums, *jax.vmap(owed_by)(pair))

    assert tiling.splits is not None
    return tile_pairs.for_each(pairs, tiling.splits, step, _nothing(operands, problem))


def _add(
    problem: Problem, sums: Operands, token: jax.Array, block: jax.Array, owed: Owed
) -> Operands:
    """The sums with what pairs owe to queries ``token`` [pairs, Q] and ``block`` [pairs, ...]."""
    d_q = jnp.moveaxis(owed.q, 3, 1).reshape(*token.shape, *sums.q_THD.shape[1:])
    pool = sums.kv_NUKSD
    if pool is not None:
        for side, array in enumerate((owed.k.slots, owed.v.slots)):
            rows = xla_tiles.pool_rows(block, side, problem)
            array = array.swapaxes(0, 1).reshape(*rows.shape, -1)
            pool = pool.at[rows].add(array, mode="drop")
    slope_H = sums.alibi_slope_H
    if slope_H is not None and owed.slope_H is not None:
        slope_H += owed.slope_H.sum(axis=0)
    return sums._replace(
        q_THD=sums.q_THD.at[token].add(d_q, mode="drop"),
        kv_NUKSD=pool,
        alibi_slope_H=slope_H,
        k_scale=_add_scale(problem, sums.k_scale, block, owed.k.scale),
        v_scale=_add_scale(problem, sums.v_scale, block, owed.v.scale),
    )


def _add_scale(
    problem: Problem, sums: jax.Array | None, block: jax.Array, owed: jax.Array | None
) -> jax.Array | None:
    """A scale's sums, [K] or [N, K, S], and what pairs owe to it, [pairs, K, tokens, 1]."""
    if sums is None or owed is None:
        return None
    if sums.ndim == 1:
        return sums + owed.sum(axis=(0, 2, 3))
    owed = owed.reshape(len(block), problem.kv_heads, -1, problem.block_size)
    return sums.at[block].add(owed.swapaxes(1, 2), mode="drop")
