"""The ledger that a run's log makes on the host, against the block table's on the device."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.memory import rows as memory
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving import batch, memory_log
from paged_jax.serving.memory_log import MemoryLog, Moment
from paged_jax.serving.requests import Request, Sequence

ROWS, BLOCKS, SIZE = 6, 40, 4
STEPS = 200


class Kept:
    """A watcher that keeps all it is told."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.ledgers: dict[int, dict[str, int]] = {}

    def record(self, moment: Moment) -> None:
        assert moment.number == len(self.moments)
        self.moments.append(moment)

    def settle(self, moment: Moment, ledger: dict[str, int]) -> None:
        assert moment.number not in self.ledgers
        self.ledgers[moment.number] = ledger


def create() -> MemoryLog:
    return MemoryLog(blocks=BLOCKS, block_size=SIZE, slot_bytes=1)


def watched() -> tuple[MemoryLog, Kept]:
    log, watcher = create(), Kept()
    log.watcher = watcher
    return log, watcher


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
    log, watcher = watched()
    owners = []
    for final in final_B.tolist():
        drawn = min(final, 3)
        sequence = Sequence(token_ids=[0] * (drawn + 1))
        request = Request(None, [0] * (final - drawn), SamplingParams(), [sequence])
        owners.append((request, 0))
    log.append(jax.device_get(batch.held(table, ROWS)).replace(short=short), owners)
    (moment,) = watcher.moments
    return moment


def differences(seed: int) -> tuple[dict[str, tuple[int, int]], block_table.BlockTable]:
    """Categories that differ, as (log's, table's)."""
    random = np.random.default_rng(seed)
    table, short = random_table(random), bool(seed % 2)
    final_B = np.asarray(table.length_B) + random.integers(0, 9, ROWS)
    moment = moment_of(table, final_B, short)
    found = create().ledger(moment)
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


def record(log: MemoryLog, random: np.random.Generator, held: list) -> None:
    """A moment of rows that hold anything, each its own blocks."""
    length_B = np.array([random.integers(1, 25) if owner else 0 for owner in held])
    used = int((-(-length_B // SIZE)).sum())
    moment = {"length_B": length_B, "tail_B": np.arange(ROWS), "used": used, "copies": used}
    more = {"idle": 1, "short": used % 2 == 0, "passed": None}
    found: Any = types.SimpleNamespace(**moment, **more)
    log.append(found, held)


def run(log: MemoryLog, seed: int) -> list[Request]:
    """Rows that come, are preempted now and then, and end."""
    random = np.random.default_rng(seed)
    requests: list[Request] = []
    rows: list[Request] = []
    history: list[list[Request]] = []
    for _ in range(STEPS):
        while len(rows) < ROWS:
            rows.append(Request(None, [0] * random.integers(1, 9), SamplingParams(), [Sequence()]))
            requests.append(rows[-1])
        here = [one if random.random() < 0.7 else None for one in rows]
        record(log, random, [(one, 0) if one else None for one in here])
        history.append([one for one in here if one])
        for one in history[-1]:
            one.sequences[0].token_ids.append(0)
            if random.random() < 0.1:
                one.sequences[0].finish("stop", len(one.sequences[0].token_ids))
        rows = [one for one in rows if not one.finished]
        log.sweep()
        open_ = sum(any(not one.finished for one in served) for served in history)
        assert log.pending == open_ < STEPS / 2
    return requests


def test_moments_are_kept_no_longer_than_until_their_sequences_end() -> None:
    log, watcher = watched()
    for request in run(log, 0):
        for sequence in request.sequences:
            sequence.finish_reason = "length"
    before = [log.settle(skip=skip) for skip in (0, 3, 16)]
    log.sweep()
    assert log.pending == 0
    assert log.count == len(watcher.ledgers) == STEPS
    ledgers = [log.ledger(moment) for moment in watcher.moments]
    assert [watcher.ledgers[number] for number in range(STEPS)] == ledgers
    for skip, early in zip((0, 3, 16), before, strict=True):
        found = log.settle(skip=skip)
        assert found == early
        counted = range(skip, STEPS)
        for name in CATEGORIES:
            assert found.slots[name] == np.mean([ledgers[number][name] for number in counted])
        moments = [watcher.moments[number] for number in counted]
        entries = np.mean([(-(-one.length_B // SIZE)).sum() for one in moments])
        used = np.mean([one.used for one in moments])
        assert found.entry_slots == entries * SIZE
        assert found.saved_slots == pytest.approx((entries - used) * SIZE)
        assert found.running == np.mean([(one.length_B > 0).sum() for one in moments])
    with pytest.raises(ValueError, match="skip: expected 0 to 16 moments, got 17"):
        log.settle(skip=17)


def test_sequences_that_a_search_replaces_end_with_it() -> None:
    log, _ = watched()
    request = Request(None, [0], SamplingParams(n=2), [Sequence(), Sequence()])
    record(log, np.random.default_rng(0), [(request, 0), (request, 1), *[None] * 4])
    log.sweep()
    assert log.pending == 1
    request.sequences = [Sequence([1], [0.0], "length")]
    log.sweep()
    assert log.pending == 0
