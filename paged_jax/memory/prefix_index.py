"""An index of blocks by what they hold: a hash table under jit, with exact comparison.

An entry is a *keyed* block: its key (``prefix_keys``), the salt of its tenant, its tokens. Entries
whose keys end alike share a bucket, a linked list in order of insertion; there are at least as many
buckets as blocks. The same content may be entered for several blocks: the first is found, and
removing one leaves the others.

``find`` compares key, salt and tokens, so a wrong answer takes two chains of blocks that end in the
same tokens and share a key of 128 bits; two tenants' never, as salts are compared.
Cost: O(1) expected, and O(block size) a comparison; the arrays are written in place.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory import linked_list as lists
from paged_jax.memory import prefix_keys as keys
from paged_jax.memory.loops import at, fetch, put, when
from pallas_kernels import dims


class Index(flax.struct.PyTreeNode):
    """Entries of N blocks; those of blocks that are not keyed mean nothing."""

    keyed_N: jax.Array  # bool
    key_NA: jax.Array  # u32
    salt_N: jax.Array  # u32
    token_NS: jax.Array  # i32
    buckets: lists.LinkedLists  # blocks by the end of their key; heads from node N on

    @property
    def none(self) -> int:
        """The index that stands for no block."""
        return self.keyed_N.shape[0]


def create(blocks: int, block_size: int) -> Index:
    """No block is keyed. ``ValueError`` for sizes below 1."""
    for name, size in (("blocks", blocks), ("block_size", block_size)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    return Index(
        keyed_N=jnp.zeros(blocks, bool),
        key_NA=jnp.zeros((blocks, keys.WORDS), jnp.uint32),
        salt_N=jnp.zeros(blocks, jnp.uint32),
        token_NS=jnp.zeros((blocks, block_size), jnp.int32),
        buckets=lists.create(blocks + (1 << (blocks - 1).bit_length())),
    )


def find(index: Index, key_A: jax.Array, salt: jax.Array, token_S: jax.Array) -> jax.Array:
    """The first keyed of the blocks that hold this, ``index.none`` where there is none."""
    dims(token_S=token_S, token_NS=index.token_NS)
    head = _head(index, key_A)

    def passes(node: jax.Array) -> jax.Array:
        block = jnp.minimum(node, index.none - 1)  # a head ends the walk: what is read is not used
        return (node != head) & ~_equals(index, block, key_A, salt, token_S)

    first = at(index.buckets.next_Z, head)
    node = lax.while_loop(passes, lambda node: at(index.buckets.next_Z, node), first)
    return jnp.where(node == head, index.none, node)


def insert(
    index: Index, block: jax.Array, key_A: jax.Array, salt: jax.Array, token_S: jax.Array
) -> Index:
    """``block``, which is not keyed, is found by this from now on, after its equals."""
    return index.replace(
        keyed_N=put(index.keyed_N, block, True),
        key_NA=index.key_NA.at[block].set(key_A, mode="promise_in_bounds"),
        salt_N=index.salt_N.at[block].set(salt, mode="promise_in_bounds"),
        token_NS=index.token_NS.at[block].set(token_S, mode="promise_in_bounds"),
        buckets=lists.append(index.buckets, _head(index, key_A), block),
    )


def find_chain(
    index: Index, token_T: jax.Array, most: jax.Array | int, salt: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The blocks that hold ``token_T`` from its first token on, up to the first that is missing.

    Returns ``(block_M, found)``: at most ``most`` blocks, ``index.none`` from ``found`` on; M is
    T // block size, at least 1.
    """
    size, salt = index.token_NS.shape[1], jnp.asarray(salt, jnp.uint32)
    cells = token_T.shape[0] // size
    token_T = _at_least_a_block(token_T, size)

    def look(carry: tuple) -> tuple:
        cell, _, key_A, block_M = carry
        token_S = lax.dynamic_slice_in_dim(token_T, cell * size, size)
        key_A = keys.extend(key_A, token_S)
        block = find(index, key_A, salt, token_S)
        found = block < index.none
        return cell + found, found, key_A, block_M.at[cell].set(block)

    block_M = jnp.full(max(cells, 1), index.none, jnp.int32)
    start = jnp.int32(0), jnp.bool_(True), keys.root(salt), block_M
    found, _, _, block_M = lax.while_loop(
        lambda carry: carry[1] & (carry[0] < jnp.minimum(most, cells)), look, start
    )
    return block_M, found


def insert_chain(
    index: Index,
    block_M: jax.Array,
    token_T: jax.Array,
    span: tuple[jax.Array | int, jax.Array | int],
    key_A: jax.Array,
    salt: jax.Array,
) -> Index:
    """A sequence's blocks ``span[0]`` to before ``span[1]`` are found by their tokens from now on.

    ``key_A`` is the key before the first of them. Blocks that are keyed already stay as they are.
    """
    size = index.token_NS.shape[1]
    token_T = _at_least_a_block(token_T, size)

    def name(cell: jax.Array, carry: tuple) -> tuple:
        index, key_A = carry
        token_S = lax.dynamic_slice_in_dim(token_T, cell * size, size)
        key_A, block = keys.extend(key_A, token_S), block_M[cell]
        keyed, keyed_N = fetch(index.keyed_N, block)
        index = index.replace(keyed_N=keyed_N)
        enter = functools.partial(insert, block=block, key_A=key_A, salt=salt, token_S=token_S)
        return when(~keyed, enter, index), key_A

    return lax.fori_loop(*span, name, (index, key_A))[0]


def remove(index: Index, block: jax.Array) -> Index:
    """``block``, which is keyed, is found no more."""
    return index.replace(
        keyed_N=put(index.keyed_N, block, False), buckets=lists.remove(index.buckets, block)
    )


def faults(index: Index) -> list[str]:
    """Every broken invariant of a concrete index, in words; empty when it is sound. Host only."""
    index = jax.tree.map(np.asarray, index)
    heads = range(index.none, len(index.buckets.next_Z))
    listed = []
    for head in heads:
        listed += [(block, head) for block in lists.order(index.buckets, head)]
    found = {
        "the buckets differ from the keyed blocks": (
            sorted(block for block, _ in listed) != np.flatnonzero(index.keyed_N).tolist()
        ),
        "a block stands in another key's bucket": any(
            block < index.none and index.none + index.key_NA[block, 0] % len(heads) != head
            for block, head in listed
        ),
    }
    return [fault for fault, present in found.items() if present]


def _head(index: Index, key_A: jax.Array) -> jax.Array:
    """The head of a key's bucket; there are a power of two of them."""
    buckets = index.buckets.next_Z.shape[0] - index.none
    return index.none + (key_A[0] & jnp.uint32(buckets - 1)).astype(jnp.int32)


def _at_least_a_block(token_T: jax.Array, size: int) -> jax.Array:
    """The tokens, and behind too few of them some that are never looked at: a slice must lie in."""
    return jnp.pad(token_T, (0, max(size - token_T.shape[0], 0)))


def _equals(
    index: Index, block: jax.Array, key_A: jax.Array, salt: jax.Array, token_S: jax.Array
) -> jax.Array:
    """Whether an entry is of this key, of this tenant and of these tokens."""
    same_key = (at(index.key_NA, block) == key_A).all()
    same_tokens = (at(index.token_NS, block) == token_S).all()
    return same_key & (at(index.salt_N, block) == salt) & same_tokens
