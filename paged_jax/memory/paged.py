"""Paged memory for a scalar loop: blocks on demand, work only at events.

The same memory as ``block_table``, over the same pool, in the form that a simulator on CPU wants.
Tables are chains of blocks (``block_chain``). A row that stores one token a step needs a block
every ``block_size`` steps, so rows wait in lists by the phase of their next need, and a step
touches those rows alone. The ledger is kept as three running sums: a row's slack and what it has
still to store shrink together, so its share of ``internal`` changes only at events.

Cost: O(1) a step and O(1) for each block taken or dropped; memory O(blocks + sequences).
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory import block_chain
from paged_jax.memory import ledger as ledgers
from paged_jax.memory import linked_list as lists
from paged_jax.memory import pool as pools
from paged_jax.memory.layout import Layout, blocks_of, lay_out
from paged_jax.memory.loops import fetch, repeat, repeat_where, when
from paged_jax.memory.verbs import Holdings, Stay
from paged_jax.workload.arrays import RequestArrays


class Paged(flax.struct.PyTreeNode):
    """Block tables of Y sequences, and what their ledger needs."""

    chains: block_chain.Chains
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

    @property
    def pool(self) -> pools.Pool:
        """The pool under the chains."""
        return self.chains.pool


@functools.partial(jax.jit, static_argnames=("blocks_bound", "block_size_bound"))
def create(
    work: RequestArrays,
    *,
    pool_slots: jax.Array,
    block_size: jax.Array,
    blocks_bound: int,
    block_size_bound: int,
) -> Paged:
    """Empty memory, except for the pinned prefixes: blocks of a row that never ends."""
    sequences = work.output_Y.shape[0]
    state = Paged(
        chains=block_chain.create(pool_slots // block_size, blocks_bound),
        tail_Y=jnp.full(sequences, blocks_bound, jnp.int32),
        end_Y=jnp.zeros(sequences, jnp.int32),
        phase=lists.create(sequences + block_size_bound),
        rows_S=jnp.zeros(block_size_bound, jnp.int32),
        joint_R=jnp.zeros(work.bound, bool),
        joint_copies=jnp.int32(0),
        prefix_tail_X=jnp.full(work.prefix_tokens_X.shape, blocks_bound, jnp.int32),
        entries=jnp.int32(0),
        token=jnp.int32(0),
        internal=jnp.int32(0),
        copies=jnp.int32(0),
        pool_slots=jnp.int32(pool_slots),
        block_size=jnp.int32(block_size),
    )
    return repeat(work.prefix_tokens_X.shape[0], lambda x, state: _pin(state, work, x), state)


def demand(state: Paged, step: jax.Array) -> jax.Array:
    """Blocks that the running rows take in ``step``: growth, and copies of joint requests."""
    return state.rows_S[step % state.block_size] + state.joint_copies


def free(state: Paged) -> jax.Array:
    """Free blocks."""
    return state.pool.free


def holdings(state: Paged) -> Holdings:
    """Table entries, the pinned prefixes' included, blocks in use, and blocks copied."""
    return Holdings(state.entries, state.pool.used, state.copies)


def need(state: Paged, work: RequestArrays, stay: Stay) -> jax.Array:
    """Blocks that ``store`` would take."""
    return _plan(state, work, stay)[0].need


def grow(state: Paged, step: jax.Array, rows: jax.Array) -> Paged:
    """Every one of ``rows`` running rows stores a token, those of this step's phase in a new block.

    The caller has seen to it that ``demand`` blocks are free and split the joint requests.
    """
    head = state.tail_Y.shape[0] + step % state.block_size

    def take(carry: tuple[Paged, jax.Array]) -> tuple[Paged, jax.Array]:
        state, row = carry
        tail, tail_Y = fetch(state.tail_Y, row)
        chains, tail = block_chain.extend(state.chains, tail, 1, 1)
        left = state.end_Y[row] - step + 1
        state = state.replace(
            chains=chains,
            tail_Y=tail_Y.at[row].set(tail),
            internal=state.internal + _excess(state.block_size, left),
            entries=state.entries + 1,
        )
        return state, state.phase.next_Z[row]

    first = state.phase.next_Z[head]
    state, _ = lax.while_loop(lambda carry: carry[1] != head, take, (state, first))
    return state.replace(token=state.token + rows)


def fork(state: Paged, work: RequestArrays, request: jax.Array) -> Paged:
    """A prompt was computed, once: the request's further samples begin to share its blocks."""
    prompt, first = work.prompt_R[request], request * work.samples
    more = work.samples - 1
    tail, tail_Y = fetch(state.tail_Y, first)
    tail_F = jnp.full(work.samples, tail)
    return state.replace(
        chains=block_chain.hold(state.chains, tail, more),
        tail_Y=lax.dynamic_update_slice_in_dim(tail_Y, tail_F, first, axis=0),
        entries=state.entries + more * blocks_of(prompt, state.block_size),
        joint_copies=state.joint_copies + jnp.where(prompt % state.block_size > 0, more, 0),
    )


def split(state: Paged, work: RequestArrays, request: jax.Array) -> Paged:
    """Before their first decode step all live samples but one copy the prompt's partial block."""
    prompt = work.prompt_R[request]
    filled = prompt % state.block_size

    def runs(f: jax.Array) -> jax.Array:
        return work.output_Y[request * work.samples + f] > 1

    def separate(f: jax.Array, state: Paged) -> Paged:
        row = request * work.samples + f
        old, tail_Y = fetch(state.tail_Y, row)
        state = state.replace(tail_Y=tail_Y)
        left = work.output_Y[row] - 1
        state = when(state.pool.refcount_N[old] > 1, lambda state: copy(state, row, old), state)
        return state.replace(internal=state.internal + _excess(state.block_size - filled, left))

    def copy(state: Paged, row: jax.Array, old: jax.Array) -> Paged:
        chains, new = block_chain.replace_tail(state.chains, old)
        return state.replace(
            chains=chains,
            tail_Y=state.tail_Y.at[row].set(new),
            joint_copies=state.joint_copies - 1,
            copies=state.copies + 1,
            token=state.token + filled,
        )

    def part(state: Paged) -> Paged:
        state = state.replace(
            joint_R=state.joint_R.at[request].set(False),
            internal=state.internal - _joint_excess(state, work, request),
        )
        return repeat_where(work.samples, runs, separate, state)

    return when(state.joint_R[request], part, state)


def store(state: Paged, work: RequestArrays, stay: Stay) -> tuple[Paged, jax.Array]:
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
    chains = block_chain.hold(state.chains, base_tail, holders)
    chains, joint_tail = block_chain.extend(chains, base_tail, plan.joint, holders)

    def runs(f: jax.Array) -> jax.Array:
        return work.output_Y[request * work.samples + f] > stay.generated

    def begin(f: jax.Array, state: Paged) -> Paged:
        row = request * work.samples + f
        left = work.output_Y[row] - 1 - stay.generated
        chains, tail = block_chain.extend(state.chains, joint_tail, plan.own, 1)
        return state.replace(
            chains=chains,
            tail_Y=state.tail_Y.at[row].set(jnp.where(fresh & (f > 0), none, tail)),
            end_Y=state.end_Y.at[row].set(stay.step + left),
            phase=lists.append(state.phase, state.tail_Y.shape[0] + phase, row),
            internal=state.internal + jnp.where(plan.is_joint, 0, _excess(slack, left)),
        )

    state = repeat_where(work.samples, runs, begin, state.replace(chains=chains))
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
    state: Paged,
    work: RequestArrays,
    row: jax.Array,
    tokens: jax.Array,
    step: jax.Array,
) -> Paged:
    """Drops the blocks of sequence ``row``, tail first; those that others hold stay.

    It has stored ``tokens`` tokens, the latest of them in ``step``.
    """
    size, request = state.block_size, row // work.samples
    slack = blocks_of(tokens, size) * size - tokens
    excess = _excess(slack, state.end_Y[row] - step)
    phase = (1 + step - tokens) % size
    tail, tail_Y = fetch(state.tail_Y, row)
    chains, freed, tail_freed = block_chain.drop(state.chains, tail)
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
        chains=chains,
        tail_Y=tail_Y.at[row].set(state.pool.none),
        phase=lists.remove(state.phase, row),
        rows_S=state.rows_S.at[phase].add(-1),
        entries=state.entries - blocks_of(tokens, size),
        token=state.token - (freed * size - jnp.where(tail_freed, slack, 0)),
        internal=state.internal - excess,
    )


def ledger(state: Paged, *, short: jax.Array, stranded: jax.Array) -> ledgers.Ledger:
    """The ledger of this moment; ``store`` never leaves paged memory stranded."""
    return ledgers.close(
        token=state.token,
        reserved=state.pool.used * state.block_size - state.token - state.internal,
        internal=state.internal,
        round_up=state.pool_slots - state.pool.blocks * state.block_size,
        unallocated=state.pool.free * state.block_size,
        short=short,
        stranded=stranded,
    )


def tables(state: Paged, row_B: np.ndarray) -> list[np.ndarray]:
    """The block tables of the given sequences. Host only."""
    return block_chain.tables(state.chains, np.asarray(state.tail_Y)[row_B])


def _plan(state: Paged, work: RequestArrays, stay: Stay) -> tuple[Layout, jax.Array, jax.Array]:
    """Layout of a request, the last block of its base, and its live samples."""
    shared, base_tail = _base(state, work, stay)
    live = (work.outputs(stay.request) > stay.generated).sum(dtype=jnp.int32)
    layout = lay_out(
        prompt=work.prompt_R[stay.request],
        generated=stay.generated,
        live=live if work.samples > 1 else jnp.int32(1),
        shared=shared,
        block_size=state.block_size,
    )
    return layout, base_tail, live


def _base(state: Paged, work: RequestArrays, stay: Stay) -> tuple[jax.Array, jax.Array]:
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
        tail = block_chain.block_before(state.chains, tail, beyond)
        shared = jnp.where(blocks > 0, blocks * size, shared)
        base_tail = jnp.where(blocks > 0, tail, base_tail)
    return shared, base_tail


def _excess(empty: jax.Array, left: jax.Array) -> jax.Array:
    """Slots of a last block with ``empty`` empty ones that ``left`` more tokens will not fill."""
    return jnp.maximum(empty - left, 0)


def _joint_excess(state: Paged, work: RequestArrays, request: jax.Array) -> jax.Array:
    """``_excess`` of a prompt's partial block while the samples share it: the longest decides."""
    empty = -work.prompt_R[request] % state.block_size
    return _excess(empty, work.outputs(request).max() - 1)


def _pin(state: Paged, work: RequestArrays, prefix: jax.Array) -> Paged:
    """Stores a common prefix; the empty slots of its last block are nobody's to fill."""
    size, tokens = state.block_size, work.prefix_tokens_X[prefix]
    blocks = blocks_of(tokens, size)
    first = jnp.int32(state.pool.none)
    chains, tail = block_chain.extend(state.chains, first, tokens // size, 1)
    chains, _ = block_chain.extend(chains, tail, blocks - tokens // size, 1)
    return state.replace(
        chains=chains,
        prefix_tail_X=state.prefix_tail_X.at[prefix].set(tail),
        entries=state.entries + blocks,
        token=state.token + tokens,
        internal=state.internal + blocks * size - tokens,
    )
