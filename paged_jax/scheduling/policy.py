"""The rules: who may grow, who is preempted, who is admitted, as functions of counts.

Every scheduler of the project, over whole arrays or one request at a time, asks these functions
and holds no rule of its own. They are elementwise: scalars and arrays of counts alike. The unit
is the request with all its samples; order is first come, first served, the victim is the youngest
running request (PagedAttention, section 4.5), which recomputes its tokens when it comes back, or
has waited in host memory with them.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.config import MOST

# Why nobody more was admitted in a step; what a ledger makes of the room that is left.
ADMITTED = 0  # nothing is refused so far
IDLE = 1  # nobody waits
ROWS = 2  # the head of the queue lacks rows
SHORT = 3  # the head of the queue lacks blocks or slots, or somebody was preempted
STRANDED = 4  # enough is free in all, but not in one piece
BUDGET = 5  # the step computes as many tokens as it may


class Limits(flax.struct.PyTreeNode):
    """Settings of the rules, traced so that one program serves all."""

    rows: jax.Array  # i32: most sequences that run at once
    watermark: jax.Array  # i32: blocks that stay free at an admission while others run
    tokens: jax.Array  # i32: most tokens that a step computes
    chunked: jax.Array  # bool: a prompt may be computed in several steps
    swapped: jax.Array  # i32: sequences of the smallest request that is swapped, not recomputed


def limits(
    *,
    rows: int = MOST,
    watermark: float = 0.0,
    blocks: int | None = None,
    tokens: int = MOST,
    chunked: bool = True,
    swapped: int = MOST,
) -> Limits:
    """Limits of ``rows`` running sequences and a watermark of floor(f * (blocks + 1)) blocks.

    The one more block is the null block that vLLM counts among its pool's. ``tokens`` is a step's
    budget, and ``chunked`` whether a prompt may be cut to fit it; a scheduler without a budget
    ignores both. ``swapped``: see ``swaps``. Raises ``ValueError`` for values that do not go;
    ``blocks``, the pool's, is needed with a watermark.
    """
    if not 1 <= rows <= MOST:
        raise ValueError(f"rows: expected 1 to {MOST}, got {rows}")
    if not 1 <= tokens <= MOST:
        raise ValueError(f"tokens: expected 1 to {MOST}, got {tokens}")
    if not 1 <= swapped <= MOST:
        raise ValueError(f"swapped: expected 1 to {MOST} sequences, got {swapped}")
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark: expected a fraction in [0, 1), got {watermark}")
    if (watermark and blocks is None) or (blocks is not None and blocks < 1):
        raise ValueError(f"blocks: expected the pool's, at least 1, got {blocks}")
    return Limits(
        rows=jnp.int32(rows),
        watermark=jnp.int32(int(watermark * ((blocks or 0) + 1))),
        tokens=jnp.int32(tokens),
        chunked=jnp.bool_(chunked),
        swapped=jnp.int32(swapped),
    )


def share(limits: Limits, wanted: jax.Array, before: jax.Array, left: jax.Array) -> jax.Array:
    """Tokens that a row computes which wants ``wanted``, after others who want ``before``.

    ``left`` is what the budget leaves to all of them. Uncut prompts wait for a step that takes them
    whole, and whoever comes after them waits, too.
    """
    cut = jnp.clip(left - before, 0, wanted)
    return jnp.where(limits.chunked | (cut == wanted), cut, 0)


def divide(limits: Limits, wanted_B: jax.Array, left: jax.Array) -> jax.Array:
    """Tokens that rows compute in a step, [B], of the ``wanted_B`` of each in order of service.

    Who wants one token decodes and comes first, whatever the budget; the others share what that
    leaves of ``left``.
    """
    decodes_B = wanted_B == 1
    longer_B = jnp.where(decodes_B, 0, wanted_B)
    before_B = jnp.cumsum(longer_B) - longer_B
    left -= decodes_B.sum(dtype=jnp.int32)
    return jnp.where(decodes_B, 1, share(limits, longer_B, before_B, left))


def may_grow(demand: jax.Array, free: jax.Array) -> jax.Array:
    """Whether running requests that demand ``demand`` blocks this step may all stay."""
    return demand <= free


def swaps(limits: Limits, *, sequences: jax.Array, blocks: jax.Array, room: jax.Array) -> jax.Array:
    """Whether a victim waits in host memory, with all its blocks; else it recomputes its tokens.

    From ``limits.swapped`` sequences on, if its ``blocks`` find ``room`` there: 1 swaps everybody,
    2 those whose samples would each recompute their prompt's blocks (vLLM's rule until 0.2.7).
    """
    return (sequences >= limits.swapped) & (blocks > 0) & (blocks <= room)


def judge(
    limits: Limits,
    *,
    waiting: jax.Array,
    need: jax.Array,
    free: jax.Array,
    rows: jax.Array,
    running: jax.Array,
    preempted: jax.Array,
    granted: jax.Array | int = 1,
) -> jax.Array:
    """The verdict on the head of the queue: ``ADMITTED``, or why it has to wait.

    Args:
      limits: the settings.
      waiting: whether there is a head that has arrived.
      need: blocks (or slots) that storing it takes.
      free: blocks (or slots) that are free.
      rows: sequences that it adds.
      running: sequences that run already.
      preempted: whether anybody was preempted in this step, which then admits nobody.
      granted: tokens that it would compute in this step.
    """
    reserve = jnp.where(running > 0, limits.watermark, 0)
    refusals = (
        (preempted, SHORT),
        (~waiting, IDLE),
        (running + rows > limits.rows, ROWS),
        (jnp.asarray(granted) == 0, BUDGET),
        (need + reserve > free, SHORT),
    )
    return jnp.select([refused for refused, _ in refusals], [why for _, why in refusals], ADMITTED)
