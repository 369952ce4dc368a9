"""Blocks that are kept though nobody holds them, in the order in which they were let go.

A linked list over the N blocks of a pool: any block leaves in O(1), wherever it stands, and any
number of blocks join at the end with all links written at once, in no loop.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory import linked_list as lists
from paged_jax.memory.loops import fetch


class IdleList(flax.struct.PyTreeNode):
    """The longest idle block stands first."""

    links: lists.LinkedLists  # the head is node N
    count: jax.Array  # i32


def create(blocks: int) -> IdleList:
    """No block of ``blocks`` is idle."""
    return IdleList(lists.chain(blocks, jnp.int32(0)), jnp.int32(0))


def leave(idle: IdleList, block: jax.Array) -> IdleList:
    """``block``, which is idle, is so no longer."""
    return IdleList(lists.remove(idle.links, block), idle.count - 1)


def leave_first(idle: IdleList) -> tuple[IdleList, jax.Array]:
    """The longest idle block leaves; there is one. Returns ``(idle', block)``."""
    head = jnp.int32(idle.links.next_Z.shape[0] - 1)
    block, next_Z = fetch(idle.links.next_Z, head)
    return leave(idle.replace(links=idle.links.replace(next_Z=next_Z)), block), block


def join(idle: IdleList, block_Z: jax.Array, joins_Z: jax.Array) -> IdleList:
    """The blocks of the true cells, none of them idle, become so in the order of the cells."""
    links, cells = idle.links, block_Z.shape[0]
    head = jnp.int32(links.next_Z.shape[0] - 1)
    rank_Z = jnp.cumsum(joins_Z, dtype=jnp.int32) - 1
    count = rank_Z[-1] + 1
    place_Z = jnp.where(joins_Z, rank_Z, cells)
    # In order; what stands behind the last of them is the head.
    line_Z = jnp.full(cells + 1, head).at[place_Z].set(block_Z, mode="drop")
    old_last, previous_Z = fetch(links.previous_Z, head)
    new_last = jnp.where(count > 0, line_Z[count - 1], old_last)
    node_Z = jnp.where(jnp.arange(cells) < count, line_Z[:-1], head + 1)  # past the end: dropped
    before_Z = jnp.roll(line_Z[:-1], 1).at[0].set(old_last)
    links = lists.LinkedLists(
        links.next_Z.at[old_last].set(line_Z[0]).at[node_Z].set(line_Z[1:], mode="drop"),
        previous_Z.at[node_Z].set(before_Z, mode="drop").at[head].set(new_last),
    )
    return IdleList(links, idle.count + count)
