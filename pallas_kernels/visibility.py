"""Which stored tokens a query sees, and what its logits become: one definition for every back end.

A row of length n with m queries has its i-th query at position n - m + i. A query at position p
sees key position j when j < n, j <= p if causal, and j > p - window; its logit is
``cap * tanh(scale * q.k / cap) + slope * (j - p)``. Functions work on anything that broadcasts, in
a kernel's registers as outside. ``key_range`` is the same rule as two ends, so that what nobody
sees is skipped rather than masked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.problem import Problem


def visible(
    problem: Problem, query_position: jax.Array, key_position: jax.Array, length: jax.Array
) -> jax.Array:
    """Whether a query sees a key, draft masks apart. Shapes broadcast."""
    seen = (key_position < length) & (key_position >= 0)
    if problem.causal:
        seen &= key_position <= query_position
    if problem.window is not None:
        seen &= key_position > query_position - problem.window
    return seen


def key_range(
    problem: Problem, length: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First key position that queries at positions ``first..last`` see, and one past the last."""
    begin = jnp.int32(0)
    if problem.window is not None:
        begin = lax.max(begin, first - jnp.int32(problem.window - 1))
    end = lax.min(length, last + 1) if problem.causal else length
    return begin, end


def logits(
    problem: Problem,
    product: jax.Array,
    query_position: jax.Array,
    key_position: jax.Array,
    slope: jax.Array | None,
) -> jax.Array:
    """Logits from ``product``, q.k times both scales, in f32. Shapes broadcast."""
    if problem.soft_cap is not None:
        product = problem.soft_cap * jnp.tanh(product * (1 / problem.soft_cap))
    if slope is not None:
        product += slope * (key_position - query_position).astype(product.dtype)
    return product
