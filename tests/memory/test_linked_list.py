"""Linked lists against Python lists."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

from paged_jax.memory import linked_list

NODES, HEADS = 7, 3  # heads are the nodes 7, 8, 9


def walk(lists: linked_list.LinkedLists, head: int) -> tuple[list[int], list[int]]:
    """The nodes of a list, forwards and backwards."""
    orders: list[list[int]] = [[], []]
    links = lists.next_Z.tolist(), lists.previous_Z.tolist()
    for order, link in zip(orders, links, strict=True):
        node = link[head]
        while node != head and len(order) < len(link):
            order.append(node)
            node = link[node]
    return orders[0], orders[1]


def replay(operations: int = 200) -> None:
    """Nodes wander from list to list."""
    append = jax.jit(lambda *arguments: linked_list.append(*arguments))
    remove = jax.jit(lambda *arguments: linked_list.remove(*arguments))
    rng = random.Random(0)
    lists = linked_list.create(NODES + HEADS)
    model: list[list[int]] = [[] for _ in range(HEADS)]
    for _ in range(operations):
        node = rng.randrange(NODES)
        home = next((order for order in model if node in order), None)
        if home is not None:
            lists = remove(lists, node)
            home.remove(node)
        else:
            head = rng.randrange(HEADS)
            lists = append(lists, NODES + head, node)
            model[head].append(node)
        for head, order in enumerate(model):
            assert walk(lists, NODES + head) == (order, order[::-1])


def test_lists_agree_with_python_lists():
    replay()


@pytest.mark.parametrize(
    "mutant",
    [
        ("append", lambda lists, head, node: linked_list.LinkedLists(lists.next_Z, lists.next_Z)),
        ("remove", lambda lists, node: lists.replace(next_Z=lists.next_Z.at[node].set(node))),
        (
            "append",
            lambda lists, head, node, append=linked_list.append: append(
                lists, lists.next_Z[head], node
            ),
        ),
    ],
    ids=["one way", "stays", "another place"],
)
def test_mutants_disagree(monkeypatch, mutant):
    monkeypatch.setattr(linked_list, *mutant)
    with pytest.raises(AssertionError):
        replay()


@pytest.mark.parametrize("nodes", [0, 1, 5])
def test_chain(nodes):
    lists = linked_list.chain(nodes)
    order = list(range(nodes))
    assert walk(lists, nodes) == (order, order[::-1])
    assert lists.next_Z.dtype == lists.previous_Z.dtype == jnp.int32


def test_a_chain_loses_its_first_its_last_and_its_only_node():
    lists = linked_list.chain(3)
    for node, order in ((0, [1, 2]), (2, [1]), (1, [])):
        lists = linked_list.remove(lists, jnp.int32(node))
        assert walk(lists, 3) == (order, order[::-1])
