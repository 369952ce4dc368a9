"""What an engine runs on its device: a planned step with any mix of rows, or many decode steps.

``plan`` schedules one step and makes room; the host then moves blocks to or from its own memory
(``fetch``, ``put``), packs that step's tokens, and ``compute`` runs them through the model.
``decode`` does all of it on the device, step after step, for as long as every row decodes and
nobody comes or goes (``batching.only_decodes``), so nothing inside talks to the host. All take the
same decisions, those of ``batching``.

Weights, batch and limits are arguments, the batch is donated. One program serves all batches of the
same sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.decoding import beams as searching
from paged_jax.decoding import sampling
from paged_jax.decoding.beams import Searches
from paged_jax.decoding.caches import Cache
from paged_jax.decoding.sampling import Samplers, Uses
from paged_jax.memory import loops
from paged_jax.memory.block_table import Copies
from paged_jax.memory.kv_cache import KVCache
from paged_jax.model.split import Graph
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
from paged_jax.scheduling.batching import Step
from paged_jax.serving.batch import Batch, Draw, Drawn, Moment, Planned, host_of, moment_of


@functools.partial(
    jax.jit, static_argnames=("requests", "samples", "ends", "swap_blocks"), donate_argnames="cache"
)
def create(cache: Cache, *, requests: int, samples: int, ends: int, swap_blocks: int = 0) -> Batch:
    """No requests over an empty cache; rows have room for ``ends`` tokens that end them.

    ``swap_blocks``: of host memory, 0 for none.
    """
    rows, cells = cache.rows.rows, cache.table.table_BM.shape[1]
    if swap_blocks:
        held = cache.rows.with_host(rows=requests * samples, blocks=swap_blocks)
        cache = cache.replace(rows=held)
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
    how: Searches | None,
) -> Batch:
    """Enters requests into the marked slots, which are empty; ``rank_R`` holds for all."""
    book, beams = batch.book, batch.beams
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
    if beams is not None and how is not None:
        beams = searching.begin(beams, new_R, how)
        book = book.replace(joint_R=beams.how.searches_R)
    return batch.replace(book=book, beams=beams)


def allow_searches(batch: Batch) -> Batch:
    """The batch, some of whose requests may be searched from now on."""
    if batch.beams is not None:
        return batch
    requests, samples = batch.book.live_RF.shape
    nobody_R = jax.device_put(np.zeros(requests, bool))
    return batch.replace(
        book=batch.book.replace(joint_R=nobody_R),
        beams=searching.create(requests=requests, samples=samples),
    )


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
    """Schedules a step and makes room for it; no block is written yet."""
    batch, copies, step = _advance(batch, limits, decodes=False)
    book = batch.book
    return batch, Planned(
        step=step,
        owner_B=book.owner_B,
        sample_B=book.sample_B,
        copies=copies,
        moment=moment_of(batch.cache, copies, step),
        host=host_of(batch),
    )


@jax.jit
def fetch(batch: Batch, block_C: jax.Array) -> Any:
    """The bytes of blocks, for the host."""
    kv = batch.cache.kv
    assert isinstance(kv, KVCache), "rows of a dense cache are not swapped"
    return kv.read(block_C)


@functools.partial(jax.jit, donate_argnames="batch")
def put(batch: Batch, block_C: jax.Array, values: Any) -> Batch:
    """Bytes from the host in blocks; past the last one: nowhere."""
    kv = batch.cache.kv
    assert isinstance(kv, KVCache), "rows of a dense cache are not swapped"
    return batch.replace(cache=batch.cache.replace(kv=kv.put(block_C, values)))


@functools.partial(jax.jit, static_argnames=("graph", "uses"), donate_argnames="batch")
def compute(
    graph: Graph,
    weights: list[jax.Array],
    batch: Batch,
    step: Step,
    copies: Copies,
    token_T: jax.Array,
    start_P: jax.Array,
    *,
    uses: Uses,
) -> tuple[Batch, Draw]:
    """Runs a planned step: makes its copies, stores its packed tokens, cut into rows at
    ``start_P``, and draws.
    """
    queries = token_T.shape[0]
    batch = batch.replace(cache=batch.cache.copy(copies))
    view, position_T = batch.cache.view(step.tokens_B > 0, start_P, queries)
    model = graph.decoder(weights)
    hidden_TE, view = model(token_T, position_T, view)
    batch = batch.replace(cache=batch.cache.keep(view))
    draws_B, source_B = batching.draws(batch.book, batch.cache.rows, step)
    last_B = jnp.clip(start_P[source_B + 1] - 1, 0, queries - 1)
    return _draw(batch, step, model.logits(hidden_TE[last_B]), draws_B, uses)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "uses", "most_steps", "most_rows"),
    donate_argnames="batch",
)
def decode(
    graph: Graph,
    weights: list[jax.Array],
    batch: Batch,
    limits: policy.Limits,
    steps: jax.Array,
    rehearses: jax.Array,
    *,
    most_steps: int,
    most_rows: int,
    uses: Uses,
) -> tuple[Batch, Drawn]:
    """Up to ``steps`` decode steps: as many as pass before somebody comes or goes, none perhaps.

    The model computes ``most_rows`` of the batch's rows; nothing is done while more of them run.
    Where it ``rehearses``, steps pass with nobody there: what the first one sets up is there then.
    """
    rows, table = batch.token_B.shape[0], batch.cache.table

    def goes_on(carry: tuple[Batch, Drawn]) -> jax.Array:
        batch, drawn = carry
        calm = batching.only_decodes(batch.book, batch.cache.rows, limits)
        few = books.seated(batch.book).sum() <= most_rows
        return (drawn.steps < steps) & (calm | rehearses) & few

    def one_step(carry: tuple[Batch, Drawn]) -> tuple[Batch, Drawn]:
        batch, drawn = carry
        batch, copies, step = _advance(batch, limits, decodes=True)
        moment = moment_of(batch.cache, copies, step)
        batch = batch.replace(cache=batch.cache.copy(copies))
        draws_B = step.tokens_B > 0
        row_W = _rows_of(draws_B, most_rows)
        view, position_W = batch.cache.decode_view(row_W)
        model = graph.decoder(weights)
        token_W = batch.token_B.at[row_W].get(mode="clip")
        hidden_WE, view = model(token_W, position_W, view)
        batch = batch.replace(cache=batch.cache.keep(view))
        logits_BV = model.logits(hidden_WE)
        if most_rows < rows:
            logits_BV = logits_BV[jnp.cumsum(draws_B) - 1]
        batch, draw = _draw(batch, step, logits_BV, draws_B, uses, decodes=True)

        def put(many: jax.Array, one: jax.Array) -> jax.Array:
            return many.at[drawn.steps].set(one)

        return batch, drawn.replace(
            draws=jax.tree.map(put, drawn.draws, draw),
            moments=jax.tree.map(put, drawn.moments, moment),
            steps=drawn.steps + 1,
        )

    nothing = Drawn(
        draws=Draw(
            token_B=jnp.full((most_steps, rows), -1, jnp.int32),
            logprob_B=jnp.zeros((most_steps, rows)),
            parent_B=None if batch.beams is None else jnp.zeros((most_steps, rows), jnp.int32),
        ),
        moments=Moment(
            length_B=jnp.zeros((most_steps, rows), jnp.int32),
            tail_B=jnp.zeros((most_steps, len(table.length_B)), jnp.int32),
            used=jnp.zeros(most_steps, jnp.int32),
            idle=jnp.zeros(most_steps, jnp.int32),
            copies=jnp.zeros(most_steps, jnp.int32),
            short=jnp.zeros(most_steps, bool),
            passed=None if table.first_B is None else jnp.zeros(most_steps, jnp.int32),
        ),
        host=host_of(batch),
        steps=jnp.int32(0),
    )
    return lax.while_loop(goes_on, one_step, (batch, nothing))


def _rows_of(draws_B: jax.Array, most: int) -> jax.Array:
    """The rows that draw, [``most``], in their order; all in their places where there is room."""
    rows = len(draws_B)
    if most == rows:
        return jnp.where(draws_B, jnp.arange(rows, dtype=jnp.int32), rows)
    return jnp.nonzero(draws_B, size=most, fill_value=rows)[0].astype(jnp.int32)


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


def _advance(batch: Batch, limits: policy.Limits, *, decodes: bool) -> tuple[Batch, Copies, Step]:
    book, rows, copies, step = batching.advance(
        batch.book,
        batch.cache.rows,
        limits,
        decodes=decodes,
    )
    return batch.replace(book=book, cache=batch.cache.replace(rows=rows)), copies, step


def _draw(
    batch: Batch,
    step: Step,
    logits_BV: jax.Array,
    draws_B: jax.Array,
    uses: Uses,
    *,
    decodes: bool = False,
) -> tuple[Batch, Draw]:
    """The marked rows draw from their logits, and the step ends."""
    book, rows, beams, parent_B = batch.book, batch.cache.rows, batch.beams, None
    nth_B = book.drawn_RF.at[book.owner_B, book.sample_B].get(mode="fill", fill_value=0)
    token_B, logprob_B = sampling.sample(logits_BV, batch.samplers, nth_B, uses, batch.seen_BV)
    ends_B = (token_B[:, None] == batch.end_BX).any(axis=1)
    if beams is not None:
        beams, chosen = searching.choose(beams, book, logits_BV, batch.end_BX, draws_B)
        token_B = jnp.where(chosen.searches_B, chosen.token_B, token_B)
        logprob_B = jnp.where(chosen.searches_B, chosen.score_B, logprob_B)
        ends_B = jnp.where(chosen.searches_B, chosen.ends_B, ends_B)
        moves = (chosen.parent_B != jnp.arange(len(token_B))).any()
        rows = loops.when(moves, lambda rows: rows.reorder(chosen.parent_B), rows)
        parent_B = jnp.where(draws_B, chosen.parent_B, len(token_B))
    book, rows, _ = batching.finish(book, rows, step, draws_B, token_B, ends_B, decodes=decodes)
    seen_BV = batch.seen_BV
    if seen_BV is not None:
        target_B = jnp.where(draws_B, token_B, seen_BV.shape[1])
        seen_BV = seen_BV.at[jnp.arange(len(target_B)), target_B].set(True, mode="drop")
    batch = batch.replace(
        book=book,
        cache=batch.cache.replace(rows=rows),
        token_B=jnp.where(draws_B, token_B, batch.token_B),
        seen_BV=seen_BV,
        beams=beams,
    )
    draw = Draw(jnp.where(draws_B, token_B, -1), jnp.where(draws_B, logprob_B, 0.0), parent_B)
    return batch, draw
