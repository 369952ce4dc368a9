"""Swap as a production engine defines it (allocator cases I), and the bytes behind it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import block_table, kv_cache, rows
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books

B, N, HOST, S, M, F = 4, 12, 9, 4, 5, 2  # F rows of a request; two requests


@pytest.fixture
def held() -> Rows:
    """Request 0 in rows 2 and 0: 6 tokens that both share, then 3 of each one's own."""
    memory = rows.create(rows=B, blocks=N, block_size=S, blocks_per_row=M)
    memory, _, _ = memory.reserve(jnp.array([0, 0, 6, 0]))
    memory = memory.fork(jnp.array([2, B, B, B]))
    memory, copies, fits = memory.reserve(jnp.array([3, 0, 3, 0]))
    assert bool(fits)
    assert np.asarray(copies.target_C < N).sum() == 1
    return memory.with_host(rows=4, blocks=HOST)


ROW_F, TO_F = jnp.array([2, 0]), jnp.array([0, 1])


def test_a_table_goes_and_comes_back_block_by_block(held: Rows) -> None:
    """I1, I4: 5 blocks of two tables of 3, the shared one once; counts go with them."""
    before = held.table
    assert int(held.blocks(ROW_F)) == 5
    out = held.swap_out(ROW_F, TO_F).release(jnp.array([True, False, True, False]))
    assert out.host is not None
    assert int(out.table.pool.free - before.pool.free) == 5 == HOST - int(out.host_room)
    assert int(out.table.pool.free) == N
    device_FM, host_FM = (np.asarray(x)[:F] for x in (out.host.device_ZM, out.host.host_ZM))
    table_FM = np.asarray(before.table_BM)[[2, 0]]
    assert device_FM[0, :3].tolist() == table_FM[0, :3].tolist()
    assert device_FM[1].tolist() == [N, *table_FM[1, 1:3], N, N]  # the shared block moved already
    there_FM = np.asarray(out.host.table.table_BM)[:F]
    assert there_FM[0, :3].tolist() == host_FM[0, :3].tolist()
    assert there_FM[1, :3].tolist() == [host_FM[0, 0], *host_FM[1, 1:3]]
    assert out.swapped_lengths(TO_F).tolist() == [9, 9]
    assert block_table.faults(out.table) == block_table.faults(out.host.table) == []

    # Two more tokens each fit the last blocks, four more take a block each.
    assert int(out.swapped_need(TO_F, jnp.array([2, 2]))) == 5
    assert int(out.swapped_need(TO_F, jnp.array([4, 4]))) == 7
    back = out.swap_in(TO_F, jnp.array([1, 3]))
    assert back.host is not None
    assert int(back.host_room) == HOST
    assert not np.asarray(back.host.table.length_B).any()
    new_FM = np.asarray(back.table.table_BM)[[1, 3], :3]
    assert new_FM[0, 0] == new_FM[1, 0]
    assert len(set(new_FM.ravel())) == 5
    assert np.asarray(back.table.pool.refcount_N)[new_FM[0]].tolist() == [2, 1, 1]
    assert back.length_B.tolist() == [0, 9, 0, 9]
    assert block_table.faults(back.table) == block_table.faults(back.host.table) == []
    # What came back is where the last move says.
    assert np.asarray(back.host.device_ZM)[0, :3].tolist() == new_FM[0].tolist()
    assert np.asarray(back.host.host_ZM)[0, :3].tolist() == host_FM[0, :3].tolist()


@pytest.mark.parametrize(("tokens", "comes"), [(5, True), (7, True), (8, False)])
def test_who_cannot_grow_does_not_come_back(tokens: int, comes: bool) -> None:
    """I2: one block of 8 slots on both sides; the next token needs a slot, too."""
    book = books.create(requests=1, samples=1, rows=1).replace(
        rank_R=jnp.zeros(1, jnp.int32),
        prompt_R=jnp.array([tokens]),
        output_RF=jnp.array([[9]]),
        drawn_RF=jnp.array([[1]]),
        live_RF=jnp.ones((1, 1), bool),
    )
    memory = rows.create(rows=1, blocks=1, block_size=8, blocks_per_row=2)
    memory, _, _ = memory.reserve(jnp.array([tokens]))
    one = jnp.zeros(1, jnp.int32)
    memory = memory.with_host(rows=1, blocks=1).swap_out(one, one).release(jnp.ones(1, bool))
    _, memory, _, step = jax.jit(batching.advance)(book, memory, policy.limits())
    assert step.admitted_R.tolist() == step.swapped_R.tolist() == [comes]
    assert memory.length_B.tolist() == [tokens + 1 if comes else 0]
    assert int(step.verdict) == (policy.IDLE if comes else policy.SHORT)


def test_who_is_swapped() -> None:
    """I5: with ``swapped=2`` a single sequence recomputes, a group is swapped; never in part."""
    limits = policy.limits(swapped=2)

    def swaps(sequences: int, blocks: int, room: int) -> bool:
        given = {"sequences": sequences, "blocks": blocks, "room": room}
        return bool(policy.swaps(limits, **{name: jnp.int32(x) for name, x in given.items()}))

    assert not swaps(1, 3, 9)
    assert swaps(2, 3, 3)
    assert not swaps(2, 4, 3)
    assert not swaps(2, 0, 3)  # nothing is stored yet


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_bytes_return_in_every_layer(dtype: str) -> None:
    cache = kv_cache.create(layers=3, blocks=N, block_size=S, kv_heads=2, width=8, dtype=dtype)
    random = np.random.default_rng(0)
    slot_T = jnp.arange(N * S)
    for layer in range(3):
        k, v = random.normal(size=(2, N * S, 2, 8)).astype(np.float32)
        cache = cache.write(layer, jnp.asarray(k), jnp.asarray(v), slot_T)
    away = jax.device_get(cache.read(jnp.array([7, 2, N])))
    back = cache.put(jnp.array([3, 11, N]), away)
    for name in kv_cache.ARRAYS:
        old, new = getattr(cache, name), getattr(back, name)
        if old is None:
            continue
        old, new = (np.array(x, np.float32).reshape(3, N, -1) for x in (old, new))
        old[:, [3, 11]] = old[:, [7, 2]]
        np.testing.assert_array_equal(new, old)
