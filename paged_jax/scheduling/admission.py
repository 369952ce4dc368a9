"""Who comes next: the head of the queue, what admitting it takes, and the verdict on it.

A request that was never admitted, or was preempted to recompute, begins with what the prefix cache
holds of it and computes the rest; one that waits in host memory comes back with all its rows. What
admitted prompts have yet to store counts as taken.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.config import MOST
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import book as books
from paged_jax.scheduling import policy
from paged_jax.scheduling.book import Book


class Head(flax.struct.PyTreeNode):
    """The first request in the queue, and what admitting it now would mean."""

    request: jax.Array  # i32
    tokens_F: jax.Array  # i32: its samples would compute in this step
    block_M: jax.Array  # i32: cached blocks that it begins with
    hits: jax.Array  # i32: how many
    swapped: jax.Array  # bool: it waits in host memory
    verdict: jax.Array  # i32: a constant of ``policy``


def waits(book: Book, arrived_R: jax.Array | None) -> jax.Array:
    """Requests that may be admitted, [R] bool."""
    waits_R = ~book.running_R & (book.rank_R < MOST)
    return waits_R if arrived_R is None else waits_R & arrived_R


def judge(
    book: Book,
    memory: Rows,
    limits: policy.Limits,
    waits_R: jax.Array,
    tokens_B: jax.Array,
    preempted: jax.Array,
    *,
    demand: jax.Array | int,
    stored_B: jax.Array,
) -> Head:
    """The head of the queue, and the verdict on it.

    Args:
      book, memory, limits: as they are in this step.
      waits_R: bool, who may be admitted.
      tokens_B: i32, what rows compute in this step.
      preempted: whether somebody was preempted in it.
      demand: blocks that ``tokens_B`` are yet to take.
      stored_B: i32, tokens that rows have room for then.
    """
    head = jnp.argmin(jnp.where(waits_R, book.rank_R, MOST)).astype(jnp.int32)
    live_F, known_F = book.live_RF[head], book.prompt_R[head] + book.drawn_RF[head]
    kept_F = jnp.where(live_F, memory.swapped_lengths(books.host_rows_of(book, head)), 0)
    swapped = (kept_F > 0).any()
    # Nobody waits, or it comes back with its blocks: nothing is looked up.
    known = jnp.where(live_F.shape[0] == 1, known_F[0], book.prompt_R[head])
    looked_up = jnp.where(waits_R.any() & ~swapped, known, 0)
    block_M, hits = memory.match(book.token_RT[head], looked_up, book.salt_R[head])
    begun_F = jnp.where(swapped, kept_F, jnp.where(_leads(live_F), hits * memory.block_size, 0))
    wanted_F = _wanted(book, head, kept_F) - begun_F
    need = _need(book, memory, limits, head, wanted_F, swapped) + memory.extra_need(block_M, hits)

    taken, live = tokens_B.sum(dtype=jnp.int32), live_F.sum(dtype=jnp.int32)
    # Rows that decode are not held to the budget, or a large request could never come back.
    left = jnp.maximum(limits.tokens - taken, jnp.where(swapped & (taken == 0), live, 0))
    tokens_F = policy.divide(limits, wanted_F, left)
    granted = tokens_F.sum(dtype=jnp.int32)
    rows = book.owner_B.shape[0]
    verdict = policy.judge(
        limits.replace(rows=jnp.minimum(limits.rows, rows)),
        waiting=waits_R.any(),
        need=need,
        free=memory.room - demand - _outstanding(book, memory, limits, stored_B),
        rows=live,
        running=books.seated(book).sum(dtype=jnp.int32),
        preempted=preempted,
        granted=jnp.where(granted <= left, granted, 0),
    )
    return Head(head, tokens_F, block_M, hits, swapped, verdict)


def _leads(live_F: jax.Array) -> jax.Array:
    """The first live sample, the one that stores a prompt."""
    return live_F & (jnp.cumsum(live_F) == 1)


def _wanted(book: Book, head: jax.Array, kept_F: jax.Array) -> jax.Array:
    """Tokens that the samples of the head are to have stored next, as ``batching.targets``, [F]."""
    live_F, prompt = book.live_RF[head], book.prompt_R[head]
    known_F = jnp.where(live_F, prompt + book.drawn_RF[head], 0)
    leads_F = _leads(live_F)
    follows_F = live_F & ~leads_F & (kept_F == 0)
    stops_F = leads_F & follows_F.any()
    wanted_F = jnp.where(follows_F, 0, jnp.where(stops_F, prompt, known_F))
    if book.joint_R is None:
        return wanted_F
    behind_F = (known_F > prompt) & (kept_F > 0) & (kept_F < known_F - 1)
    waits = book.joint_R[head] & behind_F.any()
    return jnp.where(waits, jnp.minimum(wanted_F, known_F - 1), wanted_F)


def _need(
    book: Book,
    memory: Rows,
    limits: policy.Limits,
    head: jax.Array,
    wanted_F: jax.Array,
    swapped: jax.Array,
) -> jax.Array:
    """Blocks that hold all that the head knows, without what it shares with others."""
    prompt, live_F, drawn_F = book.prompt_R[head], book.live_RF[head], book.drawn_RF[head]
    size = memory.block_size
    own_F = jnp.where(live_F, blocks_of(prompt + drawn_F, size) - prompt // size, 0)
    fresh = (drawn_F == 0).all()
    need = jnp.where(fresh, blocks_of(prompt, size), prompt // size + own_F.sum(dtype=jnp.int32))
    rows = jnp.where(fresh, 1, live_F.sum(dtype=jnp.int32))
    need = memory.need(need, rows, limits.tokens)
    # Rows that have forked share what they did when they were swapped out.
    forked = (wanted_F > 0).all(where=live_F)
    row_F = books.host_rows_of(book, head)
    return jnp.where(swapped & forked, memory.swapped_need(row_F, wanted_F), need)


def _outstanding(book: Book, memory: Rows, limits: policy.Limits, stored_B: jax.Array) -> jax.Array:
    """Blocks that rows with room for ``stored_B`` tokens have yet to take for what they know."""
    follows_B, _ = books.follows(book, memory)
    known_B, prompt_B, size = book.known_B(), book.prompt_B(), memory.block_size
    has_B = jnp.where(follows_B, prompt_B // size, blocks_of(stored_B, size))
    gap_B = jnp.where(follows_B & (known_B == prompt_B), 0, blocks_of(known_B, size) - has_B)
    return memory.outstanding(jnp.maximum(gap_B, 0), stored_B, limits.tokens)
