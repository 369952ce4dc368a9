"""The ledger that a run's log makes on the host, against the block table's on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.memory import rows as memory
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving import memory_log
from paged_jax.serving.memory_log import MemoryLog, Moment
from paged_jax.serving.requests import Request, Sequence

ROWS, BLOCKS, SIZE = 6, 40, 4


@dataclasses.dataclass
class Cache:
    """What a log asks of a cache."""

    table: block_table.BlockTable

    @property
    def kv(self) -> Cache:
        return self

    blocks = BLOCKS
    slot_bytes = 1


reserve = jax.jit(block_table.reserve)
fork = jax.jit(block_table.fork)
release = jax.jit(block_table.release)
ledger_of = jax.jit(lambda *state: block_table.ledger(*state[:2], pool_slots=160, short=state[2]))


def random_table(random: np.random.Generator) -> block_table.BlockTable:
    """Rows that grew, forked whole and were emptied, in a random order."""
    table = memory.create(rows=ROWS, blocks=BLOCKS, block_size=SIZE, blocks_per_row=9).table
    for _ in range(12):
        length_B = np.asarray(table.length_B)
        grows_B = random.random(ROWS) < 0.4
        count_B = np.where(grows_B, random.integers(0, 7, ROWS), 0)
        table, _, _ = reserve(table, np.minimum(count_B, 36 - length_B).astype(np.int32))
        length_B = np.asarray(table.length_B)
        held, empty = np.flatnonzero(length_B), np.flatnonzero(length_B == 0)
        parent_B = np.full(ROWS, ROWS, np.int32)
        if len(held) and len(empty):
            parent_B[random.choice(empty, random.integers(1, len(empty) + 1))] = held[0]
        table, fits = fork(table, parent_B)
        assert fits
        leaves_B = (np.asarray(table.length_B) > 0) & (random.random(ROWS) < 0.1)
        table, _ = release(table, leaves_B)
    return table


def moment_of(table: block_table.BlockTable, final_B: np.ndarray, short: bool) -> Moment:
    """What an engine records of rows that will have stored ``final_B`` tokens."""
    tail_B = block_table.last_block(table, table.length_B > 0)
    log = MemoryLog(Cache(table))  # type: ignore[arg-type]
    owners = []
    for final in final_B.tolist():
        drawn = min(final, 3)
        sequence = Sequence(token_ids=[0] * (drawn + 1))
        request = Request(None, [0] * (final - drawn), SamplingParams(), [sequence])
        owners.append((request, 0))
    log.append(
        np.asarray(table.length_B),
        np.asarray(tail_B),
        int(table.pool.used),
        owners,
        copies=0,
        short=short,
    )
    return log.moments[0]


def differences(seed: int) -> tuple[dict[str, tuple[int, int]], block_table.BlockTable]:
    """Categories that differ, as (log's, table's)."""
    random = np.random.default_rng(seed)
    table, short = random_table(random), bool(seed % 2)
    final_B = np.asarray(table.length_B) + random.integers(0, 9, ROWS)
    moment = moment_of(table, final_B, short)
    found = MemoryLog(Cache(table)).ledger(moment)  # type: ignore[arg-type]
    assert sum(found.values()) == BLOCKS * SIZE
    expected = ledger_of(table, jnp.asarray(final_B, jnp.int32), short)
    pairs = {name: (found[name], int(getattr(expected, name))) for name in CATEGORIES}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}, table


def test_the_logs_ledger_is_the_tables() -> None:
    shared = 0
    for seed in range(40):
        found, table = differences(seed)
        assert not found, seed
        tails = np.asarray(block_table.last_block(table, table.length_B > 0))
        held = tails[np.asarray(table.length_B) > 0]
        partial = np.asarray(table.length_B)[np.asarray(table.length_B) > 0] % SIZE > 0
        shared += len({*held[partial]}) < len(held[partial])
    assert shared > 5, "last blocks that several rows hold partly filled"


@pytest.mark.parametrize("fault", ["each holder counts", "as filled now"])
def test_a_wrong_ledger_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "each holder counts":
        monkeypatch.setattr(
            memory_log.np, "unique", lambda array, **_: (array, np.arange(len(array)))
        )
    else:
        monkeypatch.setattr(memory_log.np, "clip", lambda wanted, least, most: least)
    assert any(differences(seed)[0] for seed in range(10))
