"""Circular doubly linked lists in two flat arrays, for scalar loops under jit.

Nodes are array indices; every list has a head node of its own, so inserting and removing need no
branch: an empty list is a head that points at itself. Cost: O(1) an operation.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.memory.loops import fetch


class LinkedLists(flax.struct.PyTreeNode):
    """Lists over the nodes 0..Z-1. A node stands in at most one list."""

    next_Z: jax.Array  # i32
    previous_Z: jax.Array  # i32


def create(nodes: int) -> LinkedLists:
    """``nodes`` lists of a single node each: every node may serve as a head."""
    # Two arrays, not one twice: a state that is donated may hold no buffer twice.
    return LinkedLists(jnp.arange(nodes, dtype=jnp.int32), jnp.arange(nodes, dtype=jnp.int32))


def chain(nodes: int, count: jax.Array | None = None) -> LinkedLists:
    """One list of the first ``count`` nodes, by default all, in ascending order.

    Its head is the node ``nodes``; the nodes from ``count`` on stand in no list.
    """
    index_Z = jnp.arange(nodes + 1, dtype=jnp.int32)
    count = jnp.int32(nodes) if count is None else count
    last = jnp.where(count > 0, count - 1, nodes)
    return LinkedLists(
        jnp.roll(index_Z, -1).at[last].set(nodes), jnp.roll(index_Z, 1).at[nodes].set(last)
    )


def append(lists: LinkedLists, head: jax.Array, node: jax.Array) -> LinkedLists:
    """``node``, which stands alone, becomes the last of the list of ``head``."""
    last, previous_Z = fetch(lists.previous_Z, head)
    return LinkedLists(
        lists.next_Z.at[last].set(node).at[node].set(head),
        previous_Z.at[node].set(last).at[head].set(node),
    )


def remove(lists: LinkedLists, node: jax.Array) -> LinkedLists:
    """``node`` leaves its list and stands alone. Its own links keep their last values."""
    after, next_Z = fetch(lists.next_Z, node)
    before, previous_Z = fetch(lists.previous_Z, node)
    return LinkedLists(next_Z.at[before].set(after), previous_Z.at[after].set(before))


def order(lists: LinkedLists, head: int) -> list[int]:
    """The nodes of a list, up to the first that is not linked back to the one before. Host only."""
    next_Z, previous_Z = np.asarray(lists.next_Z), np.asarray(lists.previous_Z)
    nodes, before, node = [], head, int(next_Z[head])
    while node != head and previous_Z[node] == before:
        nodes.append(node)
        before, node = node, int(next_Z[node])
    return nodes
