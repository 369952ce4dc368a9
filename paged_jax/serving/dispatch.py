"""What an engine runs on its device: a planned step with any mix of rows, or many decode steps.

``plan`` schedules one step and makes room; the host then packs that step's tokens and ``compute``
runs them through the model. ``decode`` does all of it on the device, step after step, for as long
as every row decodes and nobody comes or goes (``batching.only_decodes``), so nothing inside talks
to the host. All take the same decisions, those of ``batching``.

Weights, batch and limits are arguments, the batch is donated. One program serves all batches of the
same sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from paged_jax.decoding import sampling
from paged_jax.decoding.caches import Cache
from paged_jax.decoding.sampling import Samplers, Uses
from paged_jax.memory import block_table
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
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
    moment: Moment


class Drawn(flax.struct.PyTreeNode):
    """Tokens of X steps, -1 where a row drew none, and their moments; ``steps`` of them count."""

    token_XB: jax.Array  # i32
    logprob_XB: jax.Array  # f32
    moments: Moment  # each array with an axis X in front
    steps: jax.Array  # i32


@functools.partial(
    jax.jit, static_argnames=("requests", "samples", "ends"), donate_argnames="cache"
)
def create(cache: Cache, *, requests: int, samples: int, ends: int) -> Batch:
    """No requests over an empty cache; rows have room for ``ends`` tokens that end them."""
    rows, cells = cache.rows.rows, cache.table.table_BM.shape[1]
    tokens = 1 if cache.rows.prefix is None else cells * cache.table.block_size
    return Batch(
        book=books.create(requests=requests, samples=samples, rows=rows, tokens=tokens),
        cache=cache,
        token_B=jnp.zeros(rows, jnp.int32),
        end_BX=jnp.full((rows, ends), -1, jnp.int32),
        samplers=sampling.samplers([], rows),
    )


@functools.partial(jax.jit, donate_argnames="batch")
def submit(
    batch: Batch,
    new_R: jax.Array,
    rank_R: jax.Array,
    prompt_R: jax.Array,
    output_R: jax.Array,
    samples_R: jax.Array,
    salt_R: jax.Array,
    token_RT: jax.Array,
) -> Batch:
    """Enters requests into the marked slots, which are empty; ``rank_R`` holds for all."""
    book = batch.book
    new_RF = jnp.broadcast_to(new_R[:, None], book.live_RF.shape)
    sample_F = jnp.arange(book.live_RF.shape[1])
    book = book.replace(
        rank_R=rank_R,
        prompt_R=jnp.where(new_R, prompt_R, book.prompt_R),
        output_RF=jnp.where(new_RF, output_R[:, None], book.output_RF),
        drawn_RF=jnp.where(new_RF, 0, book.drawn_RF),
        live_RF=jnp.where(new_RF, sample_F < samples_R[:, None], book.live_RF),
        salt_R=jnp.where(new_R, salt_R, book.salt_R),
        token_RT=jnp.where(new_R[:, None], token_RT, book.token_RT),
    )
    return batch.replace(book=book)


@functools.partial(jax.jit, donate_argnames="batch")
def seat(
    batch: Batch,
    seated_B: jax.Array,
    token_B: jax.Array,
    end_BX: jax.Array,
    samplers: Samplers,
    seen_BV: jax.Array | None,
) -> Batch:
    """Gives the marked rows what they draw with; the others keep theirs.

    ``token_B`` is the last token that each row knows: one that has only that left to store decodes
    it, be it drawn before a preemption or the end of a prompt that was cut.
    """

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(seated_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    if seen_BV is not None and batch.seen_BV is not None:
        seen_BV = choose(seen_BV, batch.seen_BV)
    return batch.replace(
        token_B=choose(token_B, batch.token_B),
        end_BX=choose(end_BX, batch.end_BX),
        samplers=jax.tree.map(choose, samplers, batch.samplers),
        seen_BV=seen_BV,
    )


@functools.partial(jax.jit, donate_argnames="batch")
def stop(batch: Batch, stopped_RF: jax.Array) -> Batch:
    """Ends the marked samples where they are, whether they run or wait."""
    book, rows = batching.stop(batch.book, batch.cache.rows, stopped_RF)
    return batch.replace(book=book, cache=batch.cache.replace(rows=rows))


@functools.partial(jax.jit, donate_argnames="batch")
def plan(batch: Batch, limits: policy.Limits) -> tuple[Batch, Planned]:
    """Schedules a step and makes room for it."""
    batch, step = _advance(batch, limits, decodes=False)
    book = batch.book
    return batch, Planned(step, book.owner_B, book.sample_B, _moment(batch.cache, step))


@functools.partial(jax.jit, static_argnames=("graphdef", "uses"), donate_argnames="batch")
def compute(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    step: Step,
    token_T: jax.Array,
    start_P: jax.Array,
    *,
    uses: Uses,
) -> tuple[Batch, jax.Array, jax.Array]:
    """Runs a planned step: stores its packed tokens, cut into rows at ``start_P``, and draws.

    Returns the batch, and what each row drew and its log probability, [B]; -1 for nothing.
    """
    queries = token_T.shape[0]
    view, position_T = batch.cache.view(step.tokens_B > 0, start_P, queries)
    model = nnx.merge(graphdef, weights)
    hidden_TE, view = model(token_T, position_T, view)
    batch = batch.replace(cache=batch.cache.keep(view))
    draws_B, source_B = batching.draws(batch.book, batch.cache.rows, step)
    last_B = jnp.clip(start_P[source_B + 1] - 1, 0, queries - 1)
    return _draw(batch, step, model.logits(hidden_TE[last_B]), draws_B, uses)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "uses", "most_steps"), donate_argnames="batch"
)
def decode(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    limits: policy.Limits,
    steps: jax.Array,
    *,
    most_steps: int,
    uses: Uses,
) -> tuple[Batch, Drawn]:
    """Up to ``steps`` decode steps: as many as pass before somebody comes or goes, none perhaps."""
    rows, table = batch.token_B.shape[0], batch.cache.table
    model_of = functools.partial(nnx.merge, graphdef)

    def goes_on(carry: tuple[Batch, Drawn]) -> jax.Array:
        batch, drawn = carry
        calm = batching.only_decodes(batch.book, batch.cache.rows, limits)
        return (drawn.steps < steps) & calm

    def one_step(carry: tuple[Batch, Drawn]) -> tuple[Batch, Drawn]:
        batch, drawn = carry
        batch, step = _advance(batch, limits, decodes=True)
        moment = _moment(batch.cache, step)
        view, position_B = batch.cache.view(step.tokens_B > 0, None, rows)
        model = model_of(weights)
        hidden_BE, view = model(batch.token_B, position_B, view)
        batch = batch.replace(cache=batch.cache.keep(view))
        batch, token_B, logprob_B = _draw(
            batch, step, model.logits(hidden_BE), step.tokens_B > 0, uses, decodes=True
        )

        def put(many: jax.Array, one: jax.Array) -> jax.Array:
            return many.at[drawn.steps].set(one)

        return batch, Drawn(
            token_XB=put(drawn.token_XB, token_B),
            logprob_XB=put(drawn.logprob_XB, logprob_B),
            moments=jax.tree.map(put, drawn.moments, moment),
            steps=drawn.steps + 1,
        )

    nothing = Drawn(
        token_XB=jnp.full((most_steps, rows), -1, jnp.int32),
        logprob_XB=jnp.zeros((most_steps, rows)),
        moments=Moment(
            length_B=jnp.zeros((most_steps, rows), jnp.int32),
            tail_B=jnp.zeros((most_steps, len(table.length_B)), jnp.int32),
            used=jnp.zeros(most_steps, jnp.int32),
            idle=jnp.zeros(most_steps, jnp.int32),
            copies=jnp.zeros(most_steps, jnp.int32),
            short=jnp.zeros(most_steps, bool),
            passed=None if table.first_B is None else jnp.zeros(most_steps, jnp.int32),
        ),
        steps=jnp.int32(0),
    )
    return lax.while_loop(goes_on, one_step, (batch, nothing))


def pack(tokens_of: dict[int, list[int]], rows: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Up to ``most`` tokens of rows packed in the order of rows, padded to one of ``sizes``, and
    the offsets that cut them.
    """
    count_B = [len(tokens_of.get(row, ())) for row in range(rows)]
    start_P = np.concatenate([[0], np.cumsum(count_B)]).astype(np.int32)
    total = int(start_P[-1])
    token_T = np.zeros(next(size for size in sizes(most) if size >= total), np.int32)
    token_T[:total] = [token for row in sorted(tokens_of) for token in tokens_of[row]]
    return token_T, start_P


def sizes(most: int) -> list[int]:
    """The sizes of packed steps, for each of which a program is compiled: 16, 64, ..., ``most``."""
    powers = [16 * 4**n for n in range(most.bit_length())]
    return [size for size in powers if size < most] + [most]


def _advance(batch: Batch, limits: policy.Limits, *, decodes: bool) -> tuple[Batch, Step]:
    book, rows, copies, step = batching.advance(
        batch.book,
        batch.cache.rows,
        limits,
        decodes=decodes,
    )
    return batch.replace(book=book, cache=batch.cache.replace(rows=rows).copy(copies)), step


def _moment(cache: Cache, step: Step) -> Moment:
    table = cache.table
    return Moment(
        length_B=cache.rows.length_B,
        tail_B=block_table.last_block(table, table.length_B > 0),
        used=table.pool.used - cache.rows.idle,
        idle=cache.rows.idle,
        copies=cache.copies,
        short=step.verdict == policy.SHORT,
        passed=cache.rows.passed,
    )


def _draw(
    batch: Batch,
    step: Step,
    logits_BV: jax.Array,
    draws_B: jax.Array,
    uses: Uses,
    *,
    decodes: bool = False,
) -> tuple[Batch, jax.Array, jax.Array]:
    """The marked rows draw from their logits, and the step ends."""
    book = batch.book
    nth_B = book.drawn_RF.at[book.owner_B, book.sample_B].get(mode="fill", fill_value=0)
    token_B, logprob_B = sampling.sample(logits_BV, batch.samplers, nth_B, uses, batch.seen_BV)
    ends_B = (token_B[:, None] == batch.end_BX).any(axis=1)
    book, rows, _ = batching.finish(
        book, batch.cache.rows, step, draws_B, token_B, ends_B, decodes=decodes
    )
    seen_BV = batch.seen_BV
    if seen_BV is not None:
        target_B = jnp.where(draws_B, token_B, seen_BV.shape[1])
        seen_BV = seen_BV.at[jnp.arange(len(target_B)), target_B].set(True, mode="drop")
    batch = batch.replace(
        book=book,
        cache=batch.cache.replace(rows=rows),
        token_B=jnp.where(draws_B, token_B, batch.token_B),
        seen_BV=seen_BV,
    )
    return batch, jnp.where(draws_B, token_B, -1), jnp.where(draws_B, logprob_B, 0.0)
