"""A load for ``soak``: requests that come, fork, are preempted, stopped and aborted at random.

All of it on the device, with the engine's scheduling and memory and no model, so that a hundred
thousand steps take seconds. Whole requests and single samples end at random, also where no engine
would end them: before they have drawn, while others wait to fork from them.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.config import MOST
from paged_jax.memory import rows as memory
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
from paged_jax.scheduling.book import Book

VOCABULARY = 50
TEXTS, TENANTS = 4, 2  # beginnings that prompts share, and who asks
CLASS = 2**28  # requests that one priority has room for
MOST_PRIORITIES = MOST // CLASS


class Chances(flax.struct.PyTreeNode):
    """What may happen to a request or a sample in each step, and how large it is; scalars."""

    arrivals: jax.Array  # f32
    aborts: jax.Array  # f32
    stops: jax.Array  # f32
    ends: jax.Array  # f32
    most_prompt: jax.Array  # i32
    most_output: jax.Array  # i32
    priorities: jax.Array  # i32


class Counts(flax.struct.PyTreeNode):
    """What happened so far; i32 scalars, of requests where nothing else is said."""

    arrived: jax.Array
    finished: jax.Array
    aborted: jax.Array  # also those whose last sample was stopped
    preempted: jax.Array
    swapped: jax.Array  # of those, into host memory
    forked: jax.Array  # samples
    copied: jax.Array  # blocks
    found: jax.Array  # blocks, in the prefix cache
    decoded: jax.Array  # steps of the kind that an engine's dispatch takes


class Load(flax.struct.PyTreeNode):
    """Requests that come and go, between two steps."""

    book: Book
    memory: Rows
    key: jax.Array
    counts: Counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a load. ``ValueError`` for a pool that could not hold a request of the largest."""

    rows: int
    blocks: int
    block_size: int
    samples: int
    most_prompt: int
    most_output: int
    prefix_caching: bool = False
    swap_blocks: int = 0  # of host memory

    def __post_init__(self) -> None:
        if self.samples > self.rows:
            raise ValueError(f"samples: expected at most {self.rows}, the rows, got {self.samples}")
        shared = self.most_prompt // self.block_size
        need = shared + self.samples * (self.row_blocks - shared)
        if need > self.blocks:
            raise ValueError(
                f"blocks: {self.most_prompt} prompt and {self.samples} x {self.most_output} output"
                f" tokens may need {need} blocks of {self.block_size} slots, got {self.blocks}"
            )

    @property
    def row_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return int(blocks_of(self.most_prompt + self.most_output, self.block_size))


def create(shape: Shape, seed: int) -> Load:
    """Nobody is there."""
    held = memory.create(
        rows=shape.rows,
        blocks=shape.blocks,
        block_size=shape.block_size,
        blocks_per_row=shape.row_blocks,
        caches_prefixes=shape.prefix_caching,
    )
    tokens = shape.row_blocks * shape.block_size if shape.prefix_caching else 1
    requests = 2 * shape.rows  # slots, as an engine has: those that run, and as many that wait
    book = books.create(requests=requests, samples=shape.samples, rows=shape.rows, tokens=tokens)
    if shape.swap_blocks:
        held = held.with_host(rows=requests * shape.samples, blocks=shape.swap_blocks)
    names = [field.name for field in dataclasses.fields(Counts)]
    return Load(book, held, jax.random.key(seed), Counts(**{n: jnp.int32(0) for n in names}))


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="load")
def advance(load: Load, limits: policy.Limits, chances: Chances, *, steps: int) -> Load:
    """So many steps of the load."""
    return lax.fori_loop(0, steps, lambda _, load: _step(load, limits, chances), load)


def _step(load: Load, limits: policy.Limits, chances: Chances) -> Load:
    key, *parts = jax.random.split(load.key, 4)
    load = _end(_arrive(load.replace(key=key), chances, parts[0]), chances, parts[1])

    def serve(load: Load, *, decodes: bool) -> Load:
        return _serve(load, limits, chances, parts[2], decodes=decodes)

    calm = batching.only_decodes(load.book, load.memory, limits)
    return lax.cond(
        calm,
        functools.partial(serve, decodes=True),
        functools.partial(serve, decodes=False),
        load,
    )


def _arrive(load: Load, chances: Chances, key: jax.Array) -> Load:
    """Requests come into free slots."""
    book, counts = load.book, load.counts
    requests, samples = book.live_RF.shape
    keys = jax.random.split(key, 6)
    new_R = (book.rank_R == MOST) & jax.random.bernoulli(keys[0], chances.arrivals, (requests,))
    number_R = counts.arrived + jnp.cumsum(new_R) - 1
    priority_R = jax.random.randint(keys[1], (requests,), 0, chances.priorities)
    prompt_R = jax.random.randint(keys[2], (requests,), 1, chances.most_prompt + 1)
    output_RF = jax.random.randint(keys[3], (requests, samples), 1, chances.most_output + 1)
    samples_R = jax.random.randint(keys[4], (requests,), 1, samples + 1)
    new_RF = jnp.broadcast_to(new_R[:, None], (requests, samples))
    first_RF = jnp.arange(samples) < samples_R[:, None]
    salt_R, token_RT = _prompts(requests, book.token_RT.shape[1], keys[5])
    book = book.replace(
        rank_R=jnp.where(new_R, priority_R * CLASS + number_R, book.rank_R),
        prompt_R=jnp.where(new_R, prompt_R, book.prompt_R),
        output_RF=jnp.where(new_RF, output_RF, book.output_RF),
        drawn_RF=jnp.where(new_RF, 0, book.drawn_RF),
        live_RF=jnp.where(new_RF, first_RF, book.live_RF),
        salt_R=jnp.where(new_R, salt_R, book.salt_R),
        token_RT=jnp.where(new_R[:, None], token_RT, book.token_RT),
    )
    arrived = counts.arrived + new_R.sum(dtype=jnp.int32)
    return load.replace(book=book, counts=counts.replace(arrived=arrived))


def _prompts(requests: int, tokens: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tenant for each slot, and tokens that begin as one of few texts does."""
    keys = jax.random.split(key, 4)
    salt_R = jax.random.randint(keys[0], (requests,), 0, TENANTS).astype(jnp.uint32)
    which_R = jax.random.randint(keys[1], (requests,), 0, TEXTS)
    shared_R = jax.random.randint(keys[2], (requests,), 0, tokens + 1)
    position_T = jnp.arange(tokens)
    text_RT = (which_R[:, None] * 31 + position_T * position_T) % VOCABULARY
    own_RT = jax.random.randint(keys[3], (requests, tokens), 0, VOCABULARY)
    return salt_R, jnp.where(position_T < shared_R[:, None], text_RT, own_RT).astype(jnp.int32)


def _end(load: Load, chances: Chances, key: jax.Array) -> Load:
    """Requests are aborted, and samples stopped, whether they run or wait."""
    book, counts = load.book, load.counts
    abort_key, stop_key = jax.random.split(key)
    requests = len(book.rank_R)
    abort_R = jax.random.bernoulli(abort_key, chances.aborts, (requests,))
    stop_RF = jax.random.bernoulli(stop_key, chances.stops, book.live_RF.shape)
    stopped_RF = book.live_RF & (abort_R[:, None] | stop_RF)
    after, held = batching.stop(book, load.memory, stopped_RF)
    aborted = counts.aborted + _gone(book, after)
    return load.replace(book=after, memory=held, counts=counts.replace(aborted=aborted))


def _serve(
    load: Load, limits: policy.Limits, chances: Chances, key: jax.Array, *, decodes: bool
) -> Load:
    """A step of whoever runs: as an engine takes it, without the model."""
    before, counts = load.book, load.counts
    book, held, copies, step = batching.advance(before, load.memory, limits, decodes=decodes)
    draws_B, source_B = batching.draws(book, held, step)
    token_key, end_key = jax.random.split(key)
    token_B = jax.random.randint(token_key, draws_B.shape, 0, VOCABULARY)
    ends_B = jax.random.bernoulli(end_key, chances.ends, draws_B.shape)
    after, held, _ = batching.finish(book, held, step, draws_B, token_B, ends_B, decodes=decodes)
    row_B = jnp.arange(len(draws_B))
    happened = Counts(
        arrived=jnp.int32(0),
        finished=_gone(book, after),
        aborted=jnp.int32(0),
        preempted=step.preempted_R.sum(dtype=jnp.int32),
        swapped=(step.preempted_R & step.swapped_R).sum(dtype=jnp.int32),
        forked=(draws_B & (source_B != row_B)).sum(dtype=jnp.int32),
        copied=(copies.target_C < held.table.pool.none).sum(dtype=jnp.int32),
        found=(step.found_R // held.block_size).sum(dtype=jnp.int32),
        decoded=jnp.int32(decodes),
    )
    return load.replace(book=after, memory=held, counts=jax.tree.map(jnp.add, counts, happened))


def _gone(before: Book, after: Book) -> jax.Array:
    return ((before.rank_R < MOST) & (after.rank_R == MOST)).sum(dtype=jnp.int32)
