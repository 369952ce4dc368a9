"""What an engine's programs take and give back: requests with their rows, plans, draws."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.decoding.beams import Beams
from paged_jax.decoding.caches import Cache
from paged_jax.decoding.sampling import Samplers
from paged_jax.memory import block_table
from paged_jax.memory.block_table import BlockTable, Copies
from paged_jax.scheduling import policy
from paged_jax.scheduling.batching import Step
from paged_jax.scheduling.book import Book


class Batch(flax.struct.PyTreeNode):
    """Requests, their rows and what the rows store and draw, between two steps."""

    book: Book
    cache: Cache
    token_B: jax.Array  # i32, drawn last, not stored yet
    end_BX: jax.Array  # i32, tokens that end the row's sequence, -1 for none
    samplers: Samplers
    seen_BV: jax.Array | None = None  # bool, where a row penalises repetition
    beams: Beams | None = None  # where a request is searched


class Moment(flax.struct.PyTreeNode):
    """What the memory log keeps of a step."""

    length_B: jax.Array  # i32, stored tokens
    tail_B: jax.Array  # i32, last block; of every row of the table
    used: jax.Array  # i32, blocks that rows hold
    idle: jax.Array  # i32, blocks that are kept for prefix hits
    copies: jax.Array  # i32, blocks copied so far
    short: jax.Array  # bool
    passed: jax.Array | None  # i32, cells that windows have left behind; None without windows


class Planned(flax.struct.PyTreeNode):
    """A step that was planned, for the host to pack."""

    step: Step
    owner_B: jax.Array  # i32
    sample_B: jax.Array  # i32
    copies: Copies  # to be made when blocks have moved
    moment: Moment
    host: Moment | None  # of the rows in host memory


class Draw(flax.struct.PyTreeNode):
    """What rows drew in a step."""

    token_B: jax.Array  # i32, -1 for nothing
    logprob_B: jax.Array  # f32; a beam's is of all that it holds
    parent_B: jax.Array | None  # i32, with beams: the row that it continues; B where it drew none


class Drawn(flax.struct.PyTreeNode):
    """X steps, of which ``steps`` count."""

    draws: Draw  # each array with an axis X in front
    moments: Moment  # the same
    host: Moment | None  # of the rows in host memory, all the while
    steps: jax.Array  # i32


def moment_of(cache: Cache, copies: Copies, step: Step) -> Moment:
    """The moment of a step whose copies are yet to be made."""
    return held(cache.table, cache.rows.rows).replace(
        used=cache.table.pool.used - cache.rows.idle,
        idle=cache.rows.idle,
        copies=cache.copies + cache.count(copies),
        short=step.verdict == policy.SHORT,
    )


def host_of(batch: Batch) -> Moment | None:
    """What rows hold in host memory; None where there is none."""
    host = batch.cache.rows.host
    return None if host is None else held(host.table, batch.book.live_RF.size)


def held(table: BlockTable, rows: int) -> Moment:
    """What the rows of a table hold, of which each cache group has so many."""
    return Moment(
        length_B=table.length_B[:rows],
        tail_B=block_table.last_block(table, table.length_B > 0),
        used=table.pool.used,
        idle=jnp.int32(0),
        copies=jnp.int32(0),
        short=jnp.bool_(False),
        passed=None if table.first_B is None else table.first_B.sum(dtype=jnp.int32),
    )
