"""Paged memory for a scalar loop: block tables read from their tails, work only at events.

The same memory as ``block_table``, with the same pool, in the form that a simulator on CPU wants.
A block's predecessor is the same in every table that names it, so all tables together are a
forest: ``previous_N`` leads from a sequence's last block to its first, and a sequence is its tail.
A row that stores one token a step needs a block every ``block_size`` steps, so rows wait in lists
by the phase of their next need, and a step touches those rows alone.

Cost: O(1) a step and O(1) for each block taken or dropped; memory O(blocks + sequences).
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.config import Bounds
from paged_jax.memory import linked_list as lists
from paged_jax.memory import pool as pools
from paged_jax.memory.layout import Layout, blocks_of, lay_out
from paged_jax.memory.ledger import Ledger
from paged_jax.memory.loops import fetch, repeat, when
from paged_jax.workload.arrays import RequestArrays


class BlockChains(flax.struct.PyTreeNode):
    """Block tables of Y sequences as chains of blocks, and what their ledger needs."""

    pool: pools.Pool
    previous_N: jax.Array  # i32: the block before this one in its sequences, N before the first
    tail_Y: jax.Array  # i32: last block of a sequence
    end_Y: jax.Array  # i32: step in which the sequence stores its last token
    phase: lists.LinkedLists  # rows by (step of their next need) mod block size; Y + bound nodes
    rows_S: jax.Array  # i32: rows of each phase
    joint_R: jax.Array  # bool: the samples still share the prompt's partial last block
    joint_copies: jax.Array  # i32: copies that joint requests need in their next step
    prefix_tail_X: jax.Array  # i32: last full block of each pinned prefix
    entries: jax.Array  # i32: table entries
    token: jax.Array  # i32: slots that hold a token
    internal: jax.Array  # i32: slots in blocks of live rows that no token will fill
    copies: jax.Array  # i32: blocks copied on write so far
    pool_slots: jax.Array  # i32
    block_size: jax.Array  # i32


class Stay(flax.struct.PyTreeNode):
    """One residence of a request in memory, as its scheduler knows it."""

    request: jax.Array  # i32
    generated: jax.Array  # i32: tokens of each sample that are stored again with the prompt
    step: jax.Array  # i32: step in which it is stored
    donor: jax.Array  # i32: sequence whose first blocks it shares, Y for none
    donor_tokens: jax.Array  # i32: tokens that sequence has stored


@functools.partial(jax.jit, static_argnames="bounds")
def create(
    work: RequestArrays,
    *,
    pool_slots: jax.Array,
    block_size: jax.Array,
    bounds: Bounds,
) -> BlockChains:
    """Empty memory, except for the pinned prefixes: blocks of a row that never ends."""
    sequences = work.output_Y.shape[0]
    state = BlockChains(
        pool=pools.create(pool_slots // block_size, bounds.blocks),
        previous_N=jnp.full(bounds.blocks, bounds.blocks, jnp.int32),
        tail_Y=jnp.full(sequences, bounds.blocks, jnp.int32),
        end_Y=jnp.zeros(sequences, jnp.int32),
        phase=lists.create(sequences + bounds.block_size),
        rows_S=jnp.zeros(bounds.block_size, jnp.int32),
        joint_R=jnp.zeros(work.bound, bool),
        joint_copies=jnp.int32(0),
        prefix_tail_X=jnp.full(work.prefix_tokens_X.shape, bounds.blocks, jnp.int32),
        entries=jnp.int32(0),
        token=jnp.int32(0),
        internal=jnp.int32(0),
        copies=jnp.int32(0),
        pool_slots=jnp.int32(pool_slots),
        block_size=jnp.int32(block_size),
    )
    return repeat(work.prefix_tokens_X.shape[0], lambda x, state: _pin(state, work, x), state)


def demand(state: BlockChains, step: jax.Array) -> jax.Array:
    """Blocks that the running rows take in ``step``: growth, and copies of joint requests."""
    return state.rows_S[step % state.block_size] + state.joint_copies


def free(state: BlockChains) -> jax.Array:
    """Free blocks."""
    return state.pool.free


def entries(state: BlockChains) -> tuple[jax.Array, jax.Array]:
    """Table entries, the pinned prefixes' included, and blocks in use."""
    return state.entries, state.pool.used


def need(state: BlockChains, work: RequestArrays, stay: Stay) -> jax.Array:
    """Blocks that ``store`` would take."""
    return _plan(state, work, stay)[0].need


def grow(state: BlockChains, work: RequestArrays, step: jax.Array, rows: jax.Array) -> BlockChains:
    """Every one of ``rows`` running rows stores a token, those of this step's phase in a new block.

    The caller has seen to it that ``demand`` blocks are free and split the joint requests.
    """
    del work
    head = state.tail_Y.shape[0] + step % state.block_size

    def take(carry: tuple[BlockChains, jax.Array]) -> tuple[BlockChains, jax.Array]:
        state, row = carry
        tail, tail_Y = fetch(state.tail_Y, row)
        state, tail = _extend(state, tail, 1, 1)
        left = state.end_Y[row] - step + 1
        state = state.replace(
            tail_Y=tail_Y.at[row].set(tail),
            internal=state.internal + _excess(state.block_size, left),
            entries=state.entries + 1,
        )
        return state, state.phase.next_Z[row]

    first = state.phase.next_Z[head]
    state, _ = lax.while_loop(lambda carry: carry[1] != head, take, (state, first))
    return state.replace(token=state.token + rows)


def fork(state: BlockChains, work: RequestArrays, request: jax.Array) -> BlockChains:
    """A prompt was computed, once: the request's further samples begin to share its blocks."""
    prompt, first = work.prompt_R[request], request * work.samples
    more = work.samples - 1
    tail, tail_Y = fetch(state.tail_Y, first)
    tail_F = jnp.full(work.samples, tail)
    state = _hold_chain(state, tail, more)
    return state.replace(
        tail_Y=lax.dynamic_update_slice_in_dim(tail_Y, tail_F, first, axis=0),
        entries=state.entries + more * blocks_of(prompt, state.block_size),
        joint_copies=state.joint_copies + jnp.where(prompt % state.block_size > 0, more, 0),
    )


def split(state: BlockChains, work: RequestArrays, request: jax.Array) -> BlockChains:
    """Before their first decode step all live samples but one copy the prompt's partial block."""
    prompt = work.prompt_R[request]
    filled = prompt % state.block_size

    def own(f: jax.Array, state: BlockChains) -> BlockChains:
        row = request * work.samples + f
        return when(work.output_Y[row] > 1, lambda state: separate(state, row), state)

    def separate(state: BlockChains, row: jax.Array) -> BlockChains:
        old, tail_Y = fetch(state.tail_Y, row)
        state = state.replace(tail_Y=tail_Y)
        left = work.output_Y[row] - 1
        state = when(state.pool.refcount_N[old] > 1, lambda state: copy(state, row, old), state)
        return state.replace(internal=state.internal + _excess(state.block_size - filled, left))

    def copy(state: BlockChains, row: jax.Array, old: jax.Array) -> BlockChains:
        pool, _ = pools.drop_one(state.pool, old)
        before = state.previous_N[old]
        state, new = _extend(state.replace(pool=pool), before, 1, 1)
        return state.replace(
            tail_Y=state.tail_Y.at[row].set(new),
            joint_copies=state.joint_copies - 1,
            copies=state.copies + 1,
            token=state.token + filled,
        )

    def part(state: BlockChains) -> BlockChains:
        state = state.replace(
            joint_R=state.joint_R.at[request].set(False),
            internal=state.internal - _joint_excess(state, work, request),
        )
        return repeat(work.samples, own, state)

    return when(state.joint_R[request], part, state)


def store(state: BlockChains, work: RequestArrays, stay: Stay) -> tuple[BlockChains, jax.Array]:
    """Stores a request's prompt and generated tokens; its live samples share what they can.

    A new request's prompt belongs to its first sample until ``fork``; its last block is accounted
    as all samples will leave it. Returns ``(state', fits)``, True where ``need`` blocks are free.
    """
    plan, base_tail, live = _plan(state, work, stay)
    size, none, request = state.block_size, state.pool.none, stay.request
    tokens = work.prompt_R[request] + stay.generated
    slack = blocks_of(tokens, size) * size - tokens
    phase = (1 + stay.step - tokens) % size

    fresh = stay.generated == 0
    holders = jnp.where(fresh, 1, live)
    state = _hold_chain(state, base_tail, holders)
    state, joint_tail = _extend(state, base_tail, plan.joint, holders)

    def begin(f: jax.Array, state: BlockChains) -> BlockChains:
        row = request * work.samples + f
        left = work.output_Y[row] - 1 - stay.generated

        def link(state: BlockChains) -> BlockChains:
            state, tail = _extend(state, joint_tail, plan.own, 1)
            return state.replace(
                tail_Y=state.tail_Y.at[row].set(jnp.where(fresh & (f > 0), none, tail)),
                end_Y=state.end_Y.at[row].set(stay.step + left),
                phase=lists.append(state.phase, state.tail_Y.shape[0] + phase, row),
                internal=state.internal + jnp.where(plan.is_joint, 0, _excess(slack, left)),
            )

        return link(state) if work.samples == 1 else when(left >= 0, link, state)

    state = repeat(work.samples, begin, state)
    blocks = plan.base + plan.joint + plan.own
    joint_slots = jnp.minimum((plan.base + plan.joint) * size, tokens)
    state = state.replace(
        rows_S=state.rows_S.at[phase].add(live),
        entries=state.entries + holders * blocks,
        token=state.token + joint_slots - plan.base * size + live * (tokens - joint_slots),
        copies=state.copies + plan.copies,
    )
    if work.samples > 1:
        state = state.replace(
            joint_R=state.joint_R.at[request].set(plan.is_joint),
            internal=state.internal
            + jnp.where(plan.is_joint, _joint_excess(state, work, request), 0),
        )
    return state, jnp.bool_(True)


def release(
    state: BlockChains,
    work: RequestArrays,
    row: jax.Array,
    tokens: jax.Array,
    step: jax.Array,
) -> BlockChains:
    """Drops the blocks of sequence ``row``, tail first; those that others hold stay.

    It has stored ``tokens`` tokens, the latest of them in ``step``.
    """
    size, request = state.block_size, row // work.samples
    slack = blocks_of(tokens, size) * size - tokens
    excess = _excess(slack, state.end_Y[row] - step)
    phase = (1 + step - tokens) % size
    tail, tail_Y = fetch(state.tail_Y, row)

    def drop(carry: tuple) -> tuple:
        block, pool, freed = carry
        before = state.previous_N[block]
        pool, is_free = pools.drop_one(pool, block)
        return before, pool, freed + is_free

    none = state.pool.none
    before = state.previous_N[tail]
    pool, tail_freed = pools.drop_one(state.pool, tail)
    _, pool, freed = lax.while_loop(
        lambda carry: carry[0] != none, drop, (before, pool, tail_freed.astype(jnp.int32))
    )
    if work.samples > 1:
        joint, joint_R = fetch(state.joint_R, request)
        excess = jnp.where(
            joint, jnp.where(tail_freed, _joint_excess(state, work, request), 0), excess
        )
        state = state.replace(
            joint_copies=state.joint_copies - (joint & ~tail_freed),
            joint_R=joint_R.at[request].set(joint & ~tail_freed),
        )
    return state.replace(
        pool=pool,
        tail_Y=tail_Y.at[row].set(none),
        phase=lists.remove(state.phase, row),
        rows_S=state.rows_S.at[phase].add(-1),
        entries=state.entries - blocks_of(tokens, size),
        token=state.token - (freed * size - jnp.where(tail_freed, slack, 0)),
        internal=state.internal - excess,
    )


def ledger(state: BlockChains, *, short: jax.Array, stranded: jax.Array) -> Ledger:
    """The ledger of this moment; paged memory is never stranded."""
    del stranded
    unallocated = state.pool.free * state.block_size
    zero = jnp.int32(0)
    return Ledger(
        token=state.token,
        reserved=state.pool.used * state.block_size - state.token - state.internal,
        internal=state.internal,
        round_up=state.pool_slots - state.pool.blocks * state.block_size,
        stranded=zero,
        short=jnp.where(short, unallocated, zero),
        cached=zero,
        free=jnp.where(short, zero, unallocated),
    )


def tables(state: BlockChains, rows: np.ndarray) -> list[np.ndarray]:
    """The block tables of the given sequences, first block first. Host only."""
    previous_N, none = np.asarray(state.previous_N), state.pool.none
    block_B = np.asarray(state.tail_Y)[rows]
    backwards = []
    while (block_B != none).any():
        backwards.append(block_B)
        block_B = np.append(previous_N, none)[block_B]
    table_BM = np.array(backwards[::-1], np.int64).T.reshape(len(rows), len(backwards))
    return [table_M[table_M != none] for table_M in table_BM]


def _plan(
    state: BlockChains, work: RequestArrays, stay: Stay
) -> tuple[Layout, jax.Array, jax.Array]:
    """Layout of a request, the last block of its base, and its live samples."""
    shared, base_tail = _base(state, work, stay)
    live = (_outputs(work, stay.request) > stay.generated).sum(dtype=jnp.int32)
    layout = lay_out(
        prompt=work.prompt_R[stay.request],
        generated=stay.generated,
        live=live if work.samples > 1 else jnp.int32(1),
        shared=shared,
        block_size=state.block_size,
    )
    return layout, base_tail, live


def _base(state: BlockChains, work: RequestArrays, stay: Stay) -> tuple[jax.Array, jax.Array]:
    """Tokens that a pinned prefix or a donor stores already, and the last full block of them."""
    size, none = state.block_size, state.pool.none
    shared, base_tail = jnp.int32(0), jnp.int32(none)
    if prefixes := work.prefix_tokens_X.shape[0]:
        prefix = work.prefix_R[stay.request]
        known, prefix = prefix < prefixes, jnp.minimum(prefix, prefixes - 1)
        shared = jnp.where(known, work.prefix_tokens_X[prefix], 0)
        base_tail = jnp.where(known, state.prefix_tail_X[prefix], none)
    if work.has_donors:
        rows = state.tail_Y.shape[0]
        known = stay.donor < rows
        donor = jnp.minimum(stay.donor, rows - 1)
        blocks = jnp.where(known, work.shared_R[stay.request] // size, 0)
        beyond = jnp.where(known, blocks_of(stay.donor_tokens, size) - blocks, 0)
        tail = jnp.where(known, state.tail_Y[donor], none)
        tail = repeat(beyond, lambda _, block: state.previous_N[block], tail)
        shared = jnp.where(blocks > 0, blocks * size, shared)
        base_tail = jnp.where(blocks > 0, tail, base_tail)
    return shared, base_tail


def _outputs(work: RequestArrays, request: jax.Array) -> jax.Array:
    """Output lengths of a request's samples, [F]."""
    return lax.dynamic_slice_in_dim(work.output_Y, request * work.samples, work.samples)


def _excess(empty: jax.Array, left: jax.Array) -> jax.Array:
    """Slots of a last block with ``empty`` empty ones that ``left`` more tokens will not fill."""
    return jnp.maximum(empty - left, 0)


def _joint_excess(state: BlockChains, work: RequestArrays, request: jax.Array) -> jax.Array:
    """``_excess`` of a prompt's partial block while the samples share it: the longest decides."""
    empty = -work.prompt_R[request] % state.block_size
    return _excess(empty, _outputs(work, request).max() - 1)


def _extend(
    state: BlockChains, tail: jax.Array, count: jax.Array | int, references: jax.Array | int
) -> tuple[BlockChains, jax.Array]:
    """Hangs ``count`` new blocks behind ``tail``. Returns ``(state', last block)``."""

    def take(_: jax.Array, carry: tuple) -> tuple:
        pool, previous_N, tail = carry
        pool, block = pools.take_one(pool, references)
        return pool, previous_N.at[block].set(tail), block

    pool, previous_N, tail = repeat(count, take, (state.pool, state.previous_N, tail))
    return state.replace(pool=pool, previous_N=previous_N), tail


def _hold_chain(state: BlockChains, tail: jax.Array, references: jax.Array | int) -> BlockChains:
    """Adds references to a block and to all before it."""

    def hold(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block, refcount_N = carry
        return state.previous_N[block], refcount_N.at[block].add(references)

    none = state.pool.none
    _, refcount_N = lax.while_loop(
        lambda carry: carry[0] != none, hold, (tail, state.pool.refcount_N)
    )
    return state.replace(pool=state.pool.replace(refcount_N=refcount_N))


def _pin(state: BlockChains, work: RequestArrays, prefix: jax.Array) -> BlockChains:
    """Stores a common prefix; the empty slots of its last block are nobody's to fill."""
    size, tokens = state.block_size, work.prefix_tokens_X[prefix]
    blocks = blocks_of(tokens, size)
    state, tail = _extend(state, jnp.int32(state.pool.none), tokens // size, 1)
    state = state.replace(prefix_tail_X=state.prefix_tail_X.at[prefix].set(tail))
    state, _ = _extend(state, tail, blocks - tokens // size, 1)
    return state.replace(
        entries=state.entries + blocks,
        token=state.token + tokens,
        internal=state.internal + blocks * size - tokens,
    )
