"""How a request's tokens are laid out in blocks, as arithmetic on counts, elementwise.

From the front: ``base`` full blocks that a pinned prefix or a donor holds already, ``joint`` new
blocks that the live samples share, ``own`` new blocks that each sample has for itself. Samples
share the whole prompt until they write: a partial last block stays joint until the first decode
step, then all samples but one copy it. After a preemption the generated tokens are recomputed in
one go, so those copies are made at once.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


class Layout(flax.struct.PyTreeNode):
    """Blocks of one request, or of many elementwise; i32."""

    base: jax.Array
    joint: jax.Array
    own: jax.Array  # of each live sample
    need: jax.Array  # blocks to take from the pool: joint and everybody's own
    copies: jax.Array  # blocks among them that begin as copies
    is_joint: jax.Array  # bool: the samples share a partial block, and will copy it


def blocks_of(tokens: Any, block_size: Any) -> Any:
    """Blocks that hold ``tokens`` tokens, ceil(tokens / block_size): host values or traced."""
    return (tokens + block_size - 1) // block_size


def lay_out(
    *,
    prompt: jax.Array,
    generated: jax.Array,
    live: jax.Array,
    shared: jax.Array,
    block_size: int | jax.Array,
) -> Layout:
    """The layout of ``live`` samples with ``prompt`` + ``generated`` tokens each.

    ``shared`` tokens of the prompt are stored already; what they fill of a last block is copied.
    """
    fresh, alone, partial = generated == 0, live == 1, prompt % block_size > 0
    base, end = shared // block_size, blocks_of(prompt + generated, block_size)
    joint_end = jnp.where(fresh | alone, end, prompt // block_size)
    rejoined = ~fresh & ~alone & partial
    return Layout(
        base=base,
        joint=joint_end - base,
        own=end - joint_end,
        need=joint_end - base + live * (end - joint_end),
        copies=jnp.where(shared % block_size > 0, 1, 0) + jnp.where(rejoined, live - 1, 0),
        is_joint=fresh & ~alone & partial,
    )
