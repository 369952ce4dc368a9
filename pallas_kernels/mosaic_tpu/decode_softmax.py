"""A tile of decode: all heads at once, phase by phase, two heads a product.

Phases (all q.k, one softmax, all p.v) give the matrix unit independent products to work on while
the cache is pushed through it: 16 bundles per 64 KiB at best. Two heads share a product where they
fit a unit of 256: their keys stand side by side, their queries are a block diagonal, and of p.v
each takes its half. The softmax is online (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import visibility
from pallas_kernels.mosaic_tpu import parts
from pallas_kernels.mosaic_tpu.decode_copies import Inputs, Scratch
from pallas_kernels.problem import Problem


class Statistics(NamedTuple):
    """Softmax over the keys so far. Reducing lanes is slow, so the sum of weights waits for it."""

    most: jax.Array  # [R, 1]
    total: jax.Array  # [R, lanes]: a part of the sum of weights in every lane
    sum: jax.Array  # [R, D]: of weighted values


def heads_together(problem: Problem) -> int:
    """Key/value heads of one product."""
    return 2 if problem.kv_heads % 2 == 0 and problem.width <= parts.LANES else 1


def padded_group(problem: Problem) -> int:
    """Query heads of a key/value head, padded so that a product has whole sublanes."""
    unit = parts.SUBLANES // heads_together(problem)
    return -(-problem.group // unit) * unit


def products(problem: Problem) -> list[tuple[range, slice]]:
    """Key/value heads of each product, and their rows among the R = K * padded group."""
    together, group = heads_together(problem), padded_group(problem)
    return [
        (range(first, first + together), slice(first * group, (first + together) * group))
        for first in range(0, problem.kv_heads, together)
    ]


def factors(problem: Problem, q: jax.Array) -> list[jax.Array]:
    """The queries [R, D] as a factor of each product; of two heads, a block diagonal."""
    q = q.astype(parts.compute_type(problem))
    rows_of_products = [q[rows] for _, rows in products(problem)]
    if heads_together(problem) == 1:
        return rows_of_products
    upper = _is_first_head(problem)
    return [
        jnp.concatenate([jnp.where(upper, rows, 0), jnp.where(upper, 0, rows)], axis=1)
        for rows in rows_of_products
    ]


def nothing(inputs: Inputs) -> Statistics:
    """Statistics before the first key: a sink is a key that has been seen, with value 0."""
    _, R, D = inputs.q.shape
    most = jnp.full((R, 1), -jnp.inf, jnp.float32) if inputs.sink is None else inputs.sink[...]
    first_lane = lax.broadcasted_iota(jnp.int32, (R, parts.LANES), 1) == 0
    total = (first_lane & (most > -jnp.inf)).astype(jnp.float32)
    return Statistics(most, total, jnp.zeros((R, D), jnp.float32))


def attend_tile(
    problem: Problem,
    inputs: Inputs,
    scratch: Scratch,
    q: list[jax.Array],
    stage: jax.Array,
    position: jax.Array,
    length: jax.Array,
    before: Statistics,
) -> Statistics:
    """Takes a tile's keys in. At least one is seen, so the largest logit is no -inf."""
    tokens = parts.tokens(scratch.kv)
    key = position + lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
    seen = visibility.visible(problem, length - 1, key, length)

    def side_by_side(side: int, heads: range) -> jax.Array:
        tiles = [parts.head(scratch.kv, stage, side, head, problem) for head in heads]
        return jnp.concatenate(tiles, axis=1)

    product = jnp.concatenate(
        [
            parts.dot(factor, side_by_side(0, heads), (1, 1))
            for factor, (heads, _) in zip(q, products(problem), strict=True)
        ]
    )
    product *= problem.scale
    if inputs.k_factor is not None:
        product *= inputs.k_factor[...]
    if scratch.k_scale is not None:
        product *= _slot_scale(problem, scratch.k_scale, stage)
    slope = None if inputs.slope is None else inputs.slope[...]
    logit = visibility.logits(problem, product, length - 1, key, slope)
    logit = jnp.where(seen, logit, -jnp.inf)

    most = jnp.maximum(before.most, jnp.max(logit, axis=1, keepdims=True))
    fade = jnp.exp(before.most - most)
    weight = jnp.exp(logit - most)
    total = before.total * fade
    for lane in range(0, tokens, parts.LANES):
        total += weight[:, lane : lane + parts.LANES]

    if scratch.v_scale is not None:
        # The scale of a token that nobody sees may be NaN, and 0 * NaN is NaN.
        weight *= jnp.where(seen, _slot_scale(problem, scratch.v_scale, stage), 0.0)
    weight = weight.astype(parts.compute_type(problem))
    value = jnp.concatenate(
        [
            _own_half(problem, parts.dot(weight[rows], side_by_side(1, heads), (1, 0)))
            for heads, rows in products(problem)
        ]
    )
    return Statistics(most, total, before.sum * fade + value)


def _slot_scale(problem: Problem, buffer: Any, stage: jax.Array) -> jax.Array:
    """A tile's scales for every row of the logits, [R, tokens]."""
    blocks = [buffer[stage, nth] for nth in range(buffer.shape[1])]
    return jnp.repeat(jnp.concatenate(blocks, axis=1), padded_group(problem), axis=0)


def _own_half(problem: Problem, product: jax.Array) -> jax.Array:
    """Of p.v with two heads' values side by side, each row's with its own head."""
    if heads_together(problem) == 1:
        return product
    D = problem.width
    return jnp.where(_is_first_head(problem), product[:, :D], product[:, D:])


def _is_first_head(problem: Problem) -> jax.Array:
    """Which rows of a product of two heads are the first one's, over D lanes."""
    shape = (2 * padded_group(problem), problem.width)
    return lax.broadcasted_iota(jnp.int32, shape, 0) < padded_group(problem)
