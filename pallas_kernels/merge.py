"""Attention over parts of a cache, put together: flash-decoding's merge, sinks, shared prefixes.

Attention over disjoint sets of keys A and B has ``lse = log(e^lse_a + e^lse_b)`` and
``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``; an empty set has lse -inf and weighs
nothing. A sink is a key with a given logit and no value. Splits of a row, cascades over a shared
prefix and sinks are all this one rule (Dao et al., Flash-Decoding, 2023; Ye et al., FlashInfer,
arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dims import dims


def merge_attention(
    out_a_THD: jax.Array, lse_a_TH: jax.Array, out_b_THD: jax.Array, lse_b_TH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint key sets, from that over each.

    Outputs [T, H, D] and natural-log normalisers [T, H], f32. Returns the output in a's type and
    the lse in f32; where both are empty, 0 and -inf.
    """
    dims(out_a_THD=out_a_THD, lse_a_TH=lse_a_TH, out_b_THD=out_b_THD, lse_b_TH=lse_b_TH)
    lse_a_TH, lse_b_TH = lse_a_TH.astype(jnp.float32), lse_b_TH.astype(jnp.float32)
    out_THD = _part(out_a_THD, lse_a_TH, lse_b_TH) + _part(out_b_THD, lse_b_TH, lse_a_TH)
    return out_THD.astype(out_a_THD.dtype), _union(lse_a_TH, lse_b_TH)


def merge_splits(
    out: jax.Array, lse: jax.Array, *, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Attention over all splits from the normalised output and lse of each; splits lead."""
    most = jnp.max(lse, axis=0)
    shift = jnp.where(jnp.isfinite(most), most, 0.0)
    weight = jnp.exp(lse - shift)
    total = jnp.sum(weight, axis=0)
    share = weight / jnp.where(total > 0, total, 1.0)
    merged = jnp.sum(jnp.where(weight[..., None] > 0, share[..., None] * out, 0.0), axis=0)
    return merged.astype(dtype), jnp.log(total) + shift


def add_sinks(
    out_THD: jax.Array, lse_TH: jax.Array, sinks_H: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention with one more key a head, of logit ``sinks_H`` and value 0."""
    return _part(out_THD, lse_TH, sinks_H).astype(out_THD.dtype), _union(lse_TH, sinks_H)


def _part(out_THD: jax.Array, lse_TH: jax.Array, other: jax.Array) -> jax.Array:
    """``out`` times its share ``e^lse / (e^lse + e^other)``, in f32 at least.

    A difference of the two, not of either and their union, which is rounded where both are large.
    0 for an empty set, whatever its output holds.
    """
    empty_TH = lse_TH == -jnp.inf
    share_TH = jax.nn.sigmoid(jnp.where(empty_TH, 0.0, lse_TH - other))
    wide = jnp.promote_types(out_THD.dtype, jnp.float32)
    return jnp.where(empty_TH[..., None], 0.0, share_TH[..., None] * out_THD.astype(wide))


def _union(lse_TH: jax.Array, other: jax.Array) -> jax.Array:
    """``log(e^lse + e^other)``; where both are -inf its gradient is 0, that of logaddexp NaN."""
    empty_TH = jnp.maximum(lse_TH, other) == -jnp.inf
    some = jnp.logaddexp(jnp.where(empty_TH, 0.0, lse_TH), jnp.where(empty_TH, 0.0, other))
    return jnp.where(empty_TH, -jnp.inf, some)
