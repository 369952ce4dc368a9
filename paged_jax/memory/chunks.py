"""Contiguous memory for a scalar loop: one chunk a sequence, work only at its two ends.

The verbs of ``paged`` over an allocator of ``contiguous``: what a sequence is promised is
reserved whole when its request is admitted, prompts are stored once for each sample, nothing
grows, nobody is preempted. A refused request is not tried again until something was freed.

Cost: O(1) a step, and one allocation or two for each request.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.memory import ledger as ledgers
from paged_jax.memory.contiguous import Allocator
from paged_jax.memory.loops import fetch, repeat, when
from paged_jax.memory.verbs import Holdings, Stay
from paged_jax.workload.arrays import RequestArrays


class Chunks(flax.struct.PyTreeNode):
    """Chunks of Y sequences, and what their ledger needs."""

    chunks: Any  # the allocator's state
    address_Y: jax.Array  # i32: first slot of a sequence's chunk
    promise_Y: jax.Array  # i32: tokens each sequence is or would be promised
    refused: jax.Array  # bool: the queue's head did not fit, and nothing was freed since
    held: jax.Array  # i32: live chunks
    promised: jax.Array  # i32: slots promised to live sequences
    token: jax.Array  # i32: slots that hold a token
    internal: jax.Array  # i32: promised slots that no token will fill
    copies: jax.Array  # i32: prompts copied for further samples so far
    allocator: Allocator = flax.struct.field(pytree_node=False)


def create(
    work: RequestArrays, *, allocator: Allocator, chunks: Any, promise_Y: jax.Array
) -> Chunks:
    """Empty memory. ``chunks`` is the state of ``allocator``, ``promise_Y`` what to promise."""
    zero = jnp.int32(0)
    return Chunks(
        chunks=chunks,
        address_Y=jnp.zeros(work.output_Y.shape, jnp.int32),
        promise_Y=promise_Y,
        refused=jnp.bool_(False),
        held=zero,
        promised=zero,
        token=zero,
        internal=zero,
        copies=zero,
        allocator=allocator,
    )


def demand(state: Chunks, step: jax.Array) -> jax.Array:
    """Slots that the running rows take in ``step``: none, they have what they were promised."""
    del state, step
    return jnp.int32(0)


def free(state: Chunks) -> jax.Array:
    """Slots in no chunk."""
    return state.allocator.free_slots(state.chunks)


def holdings(state: Chunks) -> Holdings:
    """Chunks, each in use once: nothing is shared. Copies are prompts stored once more."""
    return Holdings(state.held, state.held, state.copies)


def need(state: Chunks, work: RequestArrays, stay: Stay) -> jax.Array:
    """Slots of the chunks that ``store`` would take."""
    start = stay.request * work.samples
    promise_F = lax.dynamic_slice_in_dim(state.promise_Y, start, work.samples)
    return state.allocator.chunk_slots(promise_F).sum(dtype=jnp.int32)


def grow(state: Chunks, step: jax.Array, rows: jax.Array) -> Chunks:
    """Every one of ``rows`` running rows stores a token."""
    del step
    return state.replace(token=state.token + rows)


def fork(state: Chunks, work: RequestArrays, request: jax.Array) -> Chunks:
    """Nothing: the samples have had chunks of their own from the start."""
    del work, request
    return state


def split(state: Chunks, work: RequestArrays, request: jax.Array) -> Chunks:
    """Nothing, as for ``fork``."""
    del work, request
    return state


def store(state: Chunks, work: RequestArrays, stay: Stay) -> tuple[Chunks, jax.Array]:
    """Takes a chunk for every sample, or none at all. Returns ``(state', fits)``."""
    first = stay.request * work.samples

    def take(f: jax.Array, carry: tuple) -> tuple:
        return when(carry[-1], lambda carry: take_next(f, carry), carry)

    def take_next(f: jax.Array, carry: tuple) -> tuple:
        chunks, address_Y, taken, _ = carry
        row = first + f
        chunks, address, fits = state.allocator.allocate(chunks, state.promise_Y[row])
        return chunks, address_Y.at[row].set(address), taken + fits, fits

    def give(f: jax.Array, chunks: Any) -> Any:
        return state.allocator.free(chunks, address_Y[first + f])[0]

    chunks, address_Y, taken, fits = repeat(
        work.samples, take, (state.chunks, state.address_Y, jnp.int32(0), ~state.refused)
    )
    chunks = repeat(jnp.where(fits, 0, taken), give, chunks)
    promise_F = lax.dynamic_slice_in_dim(state.promise_Y, first, work.samples)
    final_F = work.prompt_R[stay.request] + work.outputs(stay.request)
    excess = jnp.maximum(promise_F - final_F, 0).sum(dtype=jnp.int32)
    prompts = work.samples * work.prompt_R[stay.request]
    state = state.replace(
        chunks=chunks,
        address_Y=address_Y,
        refused=~fits,
        held=state.held + jnp.where(fits, work.samples, 0),
        promised=state.promised + jnp.where(fits, promise_F.sum(dtype=jnp.int32), 0),
        token=state.token + jnp.where(fits, prompts, 0),
        internal=state.internal + jnp.where(fits, excess, 0),
        copies=state.copies + jnp.where(fits, work.samples - 1, 0),
    )
    return state, fits


def release(
    state: Chunks, work: RequestArrays, row: jax.Array, tokens: jax.Array, step: jax.Array
) -> Chunks:
    """Frees the chunk of sequence ``row``, which has stored ``tokens`` tokens."""
    del step
    address, address_Y = fetch(state.address_Y, row)
    promise = state.promise_Y[row]
    final = work.prompt_R[row // work.samples] + work.output_Y[row]
    return state.replace(
        chunks=state.allocator.free(state.chunks, address)[0],
        address_Y=address_Y,
        refused=jnp.bool_(False),
        held=state.held - 1,
        promised=state.promised - promise,
        token=state.token - tokens,
        internal=state.internal - jnp.maximum(promise - final, 0),
    )


def ledger(state: Chunks, *, short: jax.Array, stranded: jax.Array) -> ledgers.Ledger:
    """The ledger of this moment: a chunk's slots are stored, promised or rounded up."""
    unallocated = state.allocator.free_slots(state.chunks)
    return ledgers.close(
        token=state.token,
        reserved=state.promised - state.internal - state.token,
        internal=state.internal,
        round_up=state.chunks.pool_slots - unallocated - state.promised,
        unallocated=unallocated,
        short=short,
        stranded=stranded,
    )
