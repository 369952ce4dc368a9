"""One step of serving over whole arrays: count, schedule, carry out. What an engine runs.

The same step as the simulator's, in the form that accelerators want: ``schedule`` on counts, the
verbs of ``block_table`` on all rows at once. Row r * F + f holds sample f of request r, and the
last X rows the pinned prefixes, so a table needs R * F + X rows.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.memory import block_table
from paged_jax.memory.layout import blocks_of, lay_out
from paged_jax.memory.ledger import Ledger
from paged_jax.scheduling import policy
from paged_jax.scheduling.schedule import Counts, Plan, schedule
from paged_jax.workload.arrays import RequestArrays


class Serving(flax.struct.PyTreeNode):
    """Requests between two steps."""

    table: block_table.BlockTable
    running_R: jax.Array  # bool
    generated_R: jax.Array  # i32: tokens that each live sample has generated
    fits: jax.Array  # bool: every plan so far could be carried out
    copies: jax.Array  # i32: blocks copied on write so far


class Record(flax.struct.PyTreeNode):
    """A step at its moment of record, after admission and before rows finish."""

    plan: Plan
    ledger: Ledger
    table: block_table.BlockTable


def create(work: RequestArrays, *, blocks: int, block_size: int, blocks_per_row: int) -> Serving:
    """Nobody runs; the pinned prefixes are stored."""
    sequences, prefixes = work.output_Y.shape[0], work.prefix_tokens_X.shape[0]
    table = block_table.create(
        rows=sequences + prefixes,
        blocks=blocks,
        block_size=block_size,
        blocks_per_row=blocks_per_row,
    )
    tokens_B = jnp.concatenate([jnp.zeros(sequences, jnp.int32), work.prefix_tokens_X])
    table, _, fits = block_table.reserve(table, tokens_B)
    nobody_R = jnp.zeros(work.bound, bool)
    return Serving(table, nobody_R, jnp.zeros(work.bound, jnp.int32), fits, jnp.int32(0))


def advance(
    state: Serving, work: RequestArrays, limits: policy.Limits, step: jax.Array, pool_slots: int
) -> tuple[Serving, Record]:
    """One whole step. Returns ``(state', record)``."""
    output_RF = work.output_Y.reshape(-1, work.samples)
    live_RF = output_RF > state.generated_R[:, None]
    parent_R, shared_R = _donors(state, work, live_RF)
    layout = lay_out(
        prompt=work.prompt_R,
        generated=state.generated_R,
        live=live_RF.sum(axis=1),
        shared=shared_R,
        block_size=state.table.block_size,
    )
    shares = work.has_donors or len(work.prefix_tokens_X) > 0 or work.samples > 1
    plan = schedule(
        _count(state, work, live_RF, layout.need, step),
        limits,
        freed_by=functools.partial(_freed_by, state, work) if shares else None,
    )
    state = _release(state, _pad(state, live_RF & plan.preempt_R[:, None], False))
    state = _store(state, work, plan, live_RF, parent_R, shared_R)
    ledger = block_table.ledger(
        state.table,
        _final(work, state.generated_R),
        pool_slots=pool_slots,
        short=plan.verdict == policy.SHORT,
    )
    record = Record(plan, ledger, state.table)

    fresh_R = plan.admit_R & (state.generated_R == 0)
    state = _fork_samples(state, work, fresh_R, live_RF)
    runs_R = plan.keep_R | plan.admit_R
    generated_R = state.generated_R + runs_R
    ended_RF = (output_RF == generated_R[:, None]) & runs_R[:, None]
    state = _release(state, _pad(state, ended_RF, False)).replace(
        running_R=runs_R & (output_RF > generated_R[:, None]).any(axis=1),
        generated_R=generated_R,
    )
    return state, record


def _freed_by(state: Serving, work: RequestArrays, marked_R: jax.Array) -> jax.Array:
    """Blocks that preempting the marked requests would free."""
    marked_B = _pad(state, jnp.repeat(marked_R, work.samples), False)
    return block_table.freed_by(state.table, marked_B)


def _donors(state: Serving, work: RequestArrays, live_RF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row each request may fork its first tokens from, B for none, and how many tokens."""
    rows, prefixes = state.table.length_B.shape[0], work.prefix_tokens_X.shape[0]
    tokens_X = jnp.append(work.prefix_tokens_X, 0)
    row_R = jnp.where(work.prefix_R < prefixes, rows - prefixes + work.prefix_R, rows)
    shared_R = tokens_X[work.prefix_R]
    donor_R = jnp.minimum(work.donor_R, work.bound - 1)
    blocks_R = jnp.where(state.running_R[donor_R], work.shared_R // state.table.block_size, 0)
    first_R = donor_R * work.samples + jnp.argmax(live_RF[donor_R], axis=1)
    row_R = jnp.where(blocks_R > 0, first_R, row_R)
    return row_R, jnp.where(blocks_R > 0, blocks_R * state.table.block_size, shared_R)


def _count(
    state: Serving, work: RequestArrays, live_RF: jax.Array, need_R: jax.Array, step: jax.Array
) -> Counts:
    table, sequences = state.table, work.output_Y.shape[0]
    length_Y = table.length_B[:sequences]
    held_Y = blocks_of(length_Y, table.block_size)
    partial_B = table.length_B % table.block_size > 0
    tail_Y = block_table.last_block(table, partial_B)[:sequences]
    joint_Y = table.pool.refcount_N.at[tail_Y].get(mode="fill", fill_value=0) > 1
    per_request = (-1, work.samples)
    real_R = jnp.arange(work.bound) < work.count
    grows_R = ((length_Y > 0) & ~partial_B[:sequences]).reshape(per_request).sum(axis=1)
    copies_R = jnp.maximum(joint_Y.reshape(per_request).sum(axis=1) - 1, 0)
    return Counts(
        running_R=state.running_R,
        waiting_R=real_R & ~state.running_R & live_RF.any(axis=1) & (work.arrival_R <= step),
        demand_R=grows_R + copies_R,
        private_R=held_Y.reshape(per_request).sum(axis=1),
        need_R=need_R,
        rows_R=live_RF.sum(axis=1),
        free=table.pool.free,
    )


def _final(work: RequestArrays, generated_R: jax.Array) -> jax.Array:
    """Tokens that each row will have stored in the end, [B].

    Until they fork the first sample stands for all, and the longest will fill its last block.
    """
    output_RF = work.output_Y.reshape(-1, work.samples)
    for_all_RF = (generated_R == 0)[:, None] & (jnp.arange(work.samples) == 0)
    output_RF = jnp.where(for_all_RF, output_RF.max(axis=1, keepdims=True), output_RF)
    final_RF = work.prompt_R[:, None] + output_RF - 1
    return jnp.concatenate([final_RF.ravel(), work.prefix_tokens_X])


def _store(
    state: Serving,
    work: RequestArrays,
    plan: Plan,
    live_RF: jax.Array,
    parent_R: jax.Array,
    shared_R: jax.Array,
) -> Serving:
    """Kept rows store a token; admitted requests share what is stored, then store the rest."""
    rows = state.table.length_B.shape[0]
    begins_RF = live_RF & (jnp.cumsum(live_RF, axis=1) == 1) & plan.admit_R[:, None]
    shares_RF = begins_RF & (parent_R < rows)[:, None]
    state = _fork(state, shares_RF, parent_R, shared_R)
    decodes_RF = live_RF & plan.keep_R[:, None]
    new_R = work.prompt_R - shared_R
    state = _reserve(state, jnp.where(begins_RF, new_R[:, None], decodes_RF.astype(jnp.int32)))

    again_R = plan.admit_R & (state.generated_R > 0)
    again_RF = jnp.where(live_RF & again_R[:, None], state.generated_R[:, None], 0)
    return lax.cond(
        again_R.any(),
        lambda: _reserve(_fork_samples(state, work, again_R, live_RF), again_RF),
        lambda: state,
    )


def _fork_samples(
    state: Serving, work: RequestArrays, marked_R: jax.Array, live_RF: jax.Array
) -> Serving:
    """The further live samples of the marked requests share the first one's prompt."""
    first_R = jnp.arange(work.bound) * work.samples + jnp.argmax(live_RF, axis=1)
    further_RF = live_RF & (jnp.cumsum(live_RF, axis=1) > 1) & marked_R[:, None]
    return _fork(state, further_RF, first_R, work.prompt_R)


def _fork(
    state: Serving, marked_RF: jax.Array, parent_R: jax.Array, tokens_R: jax.Array
) -> Serving:
    rows = state.table.length_B.shape[0]
    parent_RF = jnp.where(marked_RF, parent_R[:, None], rows)
    tokens_RF = jnp.where(marked_RF, tokens_R[:, None], 0)
    parent_B, tokens_B = _pad(state, parent_RF, rows), _pad(state, tokens_RF, 0)
    table, fits = block_table.fork(state.table, parent_B, tokens_B)
    return state.replace(table=table, fits=state.fits & fits)


def _reserve(state: Serving, tokens_RF: jax.Array) -> Serving:
    table, copies, fits = block_table.reserve(state.table, _pad(state, tokens_RF, 0))
    made = (copies.target_C < table.pool.none).sum(dtype=jnp.int32)
    return state.replace(table=table, fits=state.fits & fits, copies=state.copies + made)


def _release(state: Serving, marked_B: jax.Array) -> Serving:
    table, valid = block_table.release(state.table, marked_B)
    return state.replace(table=table, fits=state.fits & valid)


def _pad(state: Serving, value_RF: jax.Array, fill: int | bool) -> jax.Array:
    """A value for each sequence as one for each row, [B], ``fill`` for the pinned prefixes."""
    extra = state.table.length_B.shape[0] - value_RF.size
    return jnp.pad(value_RF.ravel(), (0, extra), constant_values=fill)
