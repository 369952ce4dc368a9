"""Contiguous baselines: every row owns one chunk, promised at its start and never moved.

The verbs are those of ``block_table``, on rows: a row begins when it first writes, takes one
chunk for all tokens it was promised, lives inside it and gives it back whole. Nothing is shared,
so a fork takes a chunk of its own and copies every token. The allocator is a module, a static
part of the state: ``buddy`` or ``first_fit``, or any other with the functions of ``Allocator``.

How much a row is promised is all that tells the baselines apart (``promise``): the Orca (Max),
Orca (Pow2) and Orca (Oracle) of "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 6.1, which allocate buddy chunks.
Cost: one allocate or free for every row that begins or ends, nothing for a row that grows.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory import buddy
from paged_jax.memory import ledger as ledgers
from pallas_kernels import dims

KINDS = ("max", "pow2", "oracle")


class Allocator(Protocol):
    """Module of pure scalar functions on a frozen pytree that has a field ``pool_slots``.

    An address is a chunk's first slot, or ``pool_slots``, one past the end, where there is none.
    """

    def create(self, pool_slots: int, bound: int | None = None) -> Any: ...
    def largest_slots(self, pool_slots: int) -> int: ...
    def could_hold(self, pool_slots: int, chunk_RF: np.ndarray) -> np.ndarray: ...
    def chunk_slots(self, slots: Any) -> Any: ...
    def free_slots(self, state: Any) -> jax.Array: ...
    def allocate(self, state: Any, slots: Any) -> tuple[Any, jax.Array, jax.Array]: ...
    def free(self, state: Any, address: Any) -> tuple[Any, jax.Array]: ...


class Contiguous(flax.struct.PyTreeNode):
    """B rows of at most one chunk each, and the allocator the chunks come from."""

    chunks: Any  # the allocator's state
    address_B: jax.Array  # i32: first slot of the row's chunk, ``pool_slots`` for an empty row
    promised_B: jax.Array  # i32: tokens the row may grow to, 0 for an empty row
    length_B: jax.Array  # i32: tokens stored, 0 for an empty row
    allocator: Allocator = flax.struct.field(pytree_node=False)


class Copies(flax.struct.PyTreeNode):
    """Runs of slots to copy after a fork; addresses ``pool_slots``, 0 tokens, where none."""

    source_B: jax.Array  # i32: first slot of the parent's chunk
    target_B: jax.Array  # i32: first slot of the child's chunk
    tokens_B: jax.Array  # i32: slots to copy


def create(
    *, allocator: Allocator, rows: int, pool_slots: int, bound: int | None = None
) -> Contiguous:
    """``rows`` empty rows over an empty pool; ``bound`` as the allocator's ``create`` takes it."""
    if rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    return Contiguous(
        chunks=allocator.create(pool_slots, bound),
        address_B=jnp.full(rows, pool_slots, jnp.int32),
        promised_B=jnp.zeros(rows, jnp.int32),
        length_B=jnp.zeros(rows, jnp.int32),
        allocator=allocator,
    )


def promise(kind: str, prompt, output, max_length: int) -> jax.Array:
    """Tokens promised to a sequence of ``prompt`` and ``output`` tokens, elementwise, i32.

    ``max``: ``max_length``; ``pow2``: the prompt and the output rounded up to a power of two, at
    most ``max_length``; ``oracle``: prompt and output. Raises ``ValueError`` on another kind.
    """
    prompt, output = jnp.asarray(prompt, jnp.int32), jnp.asarray(output, jnp.int32)
    match kind:
        case "max":
            shape = jnp.broadcast_shapes(prompt.shape, output.shape)
            return jnp.full(shape, max_length, jnp.int32)
        case "pow2":
            return jnp.minimum(prompt + buddy.chunk_slots(output), max_length)
        case "oracle":
            return prompt + output
    raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")


def reserve(
    state: Contiguous, tokens_B: jax.Array, promise_B: jax.Array
) -> tuple[Contiguous, jax.Array]:
    """Makes room for ``tokens_B`` more tokens in each row, or for none at all.

    Args:
      state: the rows and their pool.
      tokens_B: i32, tokens that each row is about to write, 0 for rows that rest.
      promise_B: i32, tokens promised to each row that begins (was empty, writes now); they take
        their chunks in row order. Rows that live keep the promise they have.

    Returns:
      ``(state', fits)``. ``fits`` is False, and the state unchanged, when a chunk is lacking, when
      a row would pass its promise, or when an entry of ``tokens_B`` is negative.
    """
    dims(tokens_B=tokens_B, promise_B=promise_B, length_B=state.length_B)
    begins_B = (state.length_B == 0) & (tokens_B > 0)
    promised_B = jnp.where(begins_B, promise_B, state.promised_B)
    legal = ((tokens_B >= 0) & (tokens_B <= promised_B - state.length_B)).all()
    return _begin(state, begins_B, promised_B, tokens_B, legal)


def fork(
    state: Contiguous,
    parent_B: jax.Array,
    tokens_B: jax.Array | None = None,
    promise_B: jax.Array | None = None,
) -> tuple[Contiguous, Copies, jax.Array]:
    """Lets empty rows begin as copies of other rows, in chunks of their own.

    Args:
      state: the rows and their pool.
      parent_B: i32, the row that row b becomes a copy of, B for rows that stay as they are.
      tokens_B: i32, how many of the parent's tokens row b copies. Default: all.
      promise_B: i32, tokens promised to each child. Default: the parent's promise.

    Returns:
      ``(state', copies, fits)``. ``fits`` is False, and the state unchanged, when a chunk is
      lacking, when a child is not empty or is promised less than it copies, or when a parent holds
      no tokens or fewer than asked for.
    """
    sizes = dims(parent_B=parent_B, length_B=state.length_B)
    child_B = parent_B != sizes.B
    known_B = (parent_B >= 0) & (parent_B < sizes.B)
    parent_B = jnp.where(known_B, parent_B, 0)
    stored_B = state.length_B[parent_B]
    tokens_B = stored_B if tokens_B is None else tokens_B
    promise_B = state.promised_B[parent_B] if promise_B is None else promise_B
    dims(parent_B=parent_B, tokens_B=tokens_B, promise_B=promise_B)
    legal_B = known_B & (state.length_B == 0) & (tokens_B > 0) & (tokens_B <= stored_B)
    legal_B &= tokens_B <= promise_B
    promised_B = jnp.where(child_B, promise_B, state.promised_B)
    tokens_B = jnp.where(child_B, tokens_B, 0)
    source_B = state.address_B[parent_B]
    state, fits = _begin(state, child_B, promised_B, tokens_B, (legal_B | ~child_B).all())
    made_B, none = child_B & fits, state.chunks.pool_slots
    copies = Copies(
        source_B=jnp.where(made_B, source_B, none),
        target_B=jnp.where(made_B, state.address_B, none),
        tokens_B=jnp.where(made_B, tokens_B, 0),
    )
    return state, copies, fits


def release(state: Contiguous, released_B: jax.Array) -> tuple[Contiguous, jax.Array]:
    """Empties the rows marked in ``released_B`` (bool) and frees their chunks, in row order.

    Returns ``(state', valid)``. ``valid`` is False, and the state unchanged, when a marked row is
    empty: releasing twice is an error.
    """
    dims(released_B=released_B, length_B=state.length_B)
    if released_B.dtype != jnp.bool_:
        raise ValueError(f"released_B: expected bool, got {released_B.dtype}")
    valid = (~released_B | (state.length_B > 0)).all()
    released_B = released_B & valid
    state = state.replace(
        chunks=_free_rows(state, state.chunks, state.address_B, released_B),
        address_B=jnp.where(released_B, state.chunks.pool_slots, state.address_B),
        promised_B=jnp.where(released_B, 0, state.promised_B),
        length_B=jnp.where(released_B, 0, state.length_B),
    )
    return state, valid


def ledger(
    state: Contiguous,
    final_B: jax.Array,
    *,
    short: jax.Array | bool = False,
    stranded: jax.Array | bool = False,
) -> ledgers.Ledger:
    """The ledger of this moment.

    Args:
      state: the rows and their pool.
      final_B: i32, tokens that each row will hold in the end.
      short: whether the queue's head was refused for want of free slots.
      stranded: whether it was refused although enough slots are free in all.
    """
    dims(final_B=final_B, length_B=state.length_B)
    unallocated = state.allocator.free_slots(state.chunks)
    token, promised = (x_B.sum(dtype=jnp.int32) for x_B in (state.length_B, state.promised_B))
    internal = jnp.maximum(state.promised_B - final_B, 0).sum(dtype=jnp.int32)
    return ledgers.close(
        token=token,
        reserved=promised - internal - token,
        internal=internal,
        round_up=state.chunks.pool_slots - unallocated - promised,
        unallocated=unallocated,
        short=short,
        stranded=stranded,
    )


def faults(state: Contiguous) -> list[str]:
    """Every broken invariant of a concrete state, in words; empty when it is sound. Host only."""
    length_B, promised_B = np.asarray(state.length_B), np.asarray(state.promised_B)
    start_B, pool_slots = np.asarray(state.address_B), int(state.chunks.pool_slots)
    live_B = length_B > 0
    chunk_B = np.where(live_B, state.allocator.chunk_slots(promised_B), 0)
    order_B = np.lexsort((chunk_B, start_B))
    end_B = (start_B + chunk_B)[order_B]
    unallocated = int(state.allocator.free_slots(state.chunks))
    found = {
        "an empty row has a chunk or a promise": (
            (start_B[~live_B] != pool_slots).any() or promised_B[~live_B].any()
        ),
        "a row is longer than its promise": (length_B > promised_B).any(),
        "two chunks overlap": (end_B[:-1] > start_B[order_B][1:]).any(),
        "a chunk lies outside the pool": (start_B < 0).any() or (end_B > pool_slots).any(),
        "slots are neither free nor in a row's chunk": chunk_B.sum() + unallocated != pool_slots,
    }
    return [fault for fault, present in found.items() if present]


def _begin(
    state: Contiguous, begins_B: jax.Array, promised_B: jax.Array, tokens_B: jax.Array, legal
) -> tuple[Contiguous, jax.Array]:
    """Gives each row that begins a chunk for its promise, all or none, then adds the tokens."""
    none = state.chunks.pool_slots

    def take(carry):
        chunks, address_B, waiting_B, _ = carry
        row = jnp.argmax(waiting_B)
        chunks, address, fits = state.allocator.allocate(chunks, promised_B[row])
        return chunks, address_B.at[row].set(address), waiting_B.at[row].set(False), fits

    chunks, taken_B, _, fits = lax.while_loop(
        lambda carry: carry[3] & carry[2].any(),
        take,
        (state.chunks, jnp.full_like(state.address_B, none), begins_B, legal),
    )
    # Freeing exactly inverts allocating, so a refusal is undone without a copy of the pool.
    chunks = _free_rows(state, chunks, taken_B, (taken_B != none) & ~fits)
    state = state.replace(
        chunks=chunks,
        address_B=jnp.where(begins_B & fits, taken_B, state.address_B),
        promised_B=jnp.where(begins_B & fits, promised_B, state.promised_B),
        length_B=state.length_B + jnp.where(fits, tokens_B, 0),
    )
    return state, fits


def _free_rows(state: Contiguous, chunks: Any, address_B: jax.Array, freed_B: jax.Array) -> Any:
    def give(carry):
        chunks, waiting_B = carry
        row = jnp.argmax(waiting_B)
        chunks, _ = state.allocator.free(chunks, address_B[row])
        return chunks, waiting_B.at[row].set(False)

    return lax.while_loop(lambda carry: carry[1].any(), give, (chunks, freed_B))[0]
