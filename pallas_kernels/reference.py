"""The definition of paged attention: dense, slow, any type, any shape.

Gathers every row's cache whole and scores every query against all of its M * S slots, so memory is
T * H * M * S; what is not visible is masked. Computes in f32, or in f64 where an operand is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import query_tiles, visibility
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """Serves every problem, and has no tiles to set."""
    if tiling != default_tiling(problem):
        return "tiling: the reference has none to set"
    return None


def default_tiling(problem: Problem) -> Tiling:
    """One tile, the whole problem."""
    return Tiling(
        queries=problem.queries,
        tokens=problem.row_blocks * problem.block_size,
        heads=problem.kv_heads,
        splits=1,
        stages=1,
    )


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: object
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H]; see ``ops.paged_attention``."""
    q_THD, length_B = operands.q_THD, operands.length_B
    wide = "float64" in (problem.dtype, problem.cache_dtype)
    compute = jnp.dtype(jnp.float64 if wide else jnp.float32)
    starts_P = operands.query_start_P
    if starts_P is None:
        starts_P = jnp.arange(problem.rows + 1, dtype=jnp.int32)
    row_T = query_tiles.row_of_tokens(starts_P, problem.queries)
    owned_T = row_T < problem.rows
    row_T = jnp.where(owned_T, row_T, 0)
    index_T = jnp.arange(problem.queries, dtype=jnp.int32) - starts_P[row_T]
    count_T = jnp.diff(starts_P)[row_T]
    position_T = length_B[row_T] - count_T + index_T

    # Keys and values of each token's row, [T, keys, K, D]; H is K groups of G query heads.
    k, v = (_row_slots(operands, problem, side, compute)[row_T] for side in (0, 1))
    q = q_THD.astype(compute).reshape(problem.queries, problem.kv_heads, problem.group, -1)
    product = jnp.einsum("tkgd,tjkd->tkgj", q, k, precision="highest") * problem.scale
    key = jnp.arange(k.shape[1], dtype=jnp.int32)
    slope = operands.alibi_slope_H
    if slope is not None:
        slope = slope.reshape(1, problem.kv_heads, problem.group, 1)
    position = position_T[:, None, None, None]
    logit = visibility.logits(problem, product, position, key, slope)

    seen = visibility.visible(problem, position_T[:, None], key, length_B[row_T][:, None])
    if operands.draft_mask_TQ is not None:
        assert problem.draft is not None
        nth = key - (length_B[row_T] - count_T)[:, None]
        drafted = jnp.take_along_axis(
            operands.draft_mask_TQ, jnp.clip(nth, 0, problem.draft - 1), axis=1
        )
        seen &= (nth < 0) | drafted
    seen &= owned_T[:, None]
    logit = jnp.where(seen[:, None, None, :], logit, -jnp.inf)
    return _softmax(operands, problem, logit, jnp.where(seen[..., None, None], v, 0))


def _softmax(
    operands: Operands, problem: Problem, logit: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    most = jnp.max(logit, axis=-1)
    sinks = None
    if operands.sinks_H is not None:
        sinks = operands.sinks_H.reshape(1, problem.kv_heads, problem.group)
        most = jnp.maximum(most, sinks)
    shift = jnp.where(jnp.isfinite(most), most, 0)
    weight = jnp.exp(logit - shift[..., None])
    total = jnp.sum(weight, axis=-1) + (0 if sinks is None else jnp.exp(sinks - shift))
    out = jnp.einsum("tkgj,tjkd->tkgd", weight, v, precision="highest")
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = (jnp.log(total) + shift).astype(jnp.float32)
    shape = (problem.queries, problem.query_heads)
    return out.reshape(*shape, problem.width).astype(problem.dtype), lse.reshape(shape)


def _row_slots(operands: Operands, problem: Problem, side: int, compute: jnp.dtype) -> jax.Array:
    """Scaled keys (side 0) or values (1) of every row in order, [B, M * S, K, D]."""
    block_BM = jnp.clip(operands.table_BM, 0, problem.blocks - 1)
    slots = operands.kv_NUKSD[block_BM, side].astype(compute)  # [B, M, K, S, D]
    scale = (operands.k_scale, operands.v_scale)[side]
    if scale is not None:
        slots *= scale[:, None, None] if scale.ndim == 1 else scale[block_BM][..., None]
    slots = slots.transpose(0, 1, 3, 2, 4)
    return slots.reshape(problem.rows, -1, problem.kv_heads, problem.width)
