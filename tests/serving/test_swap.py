"""Preempted requests in host memory: their bytes come back, and nothing else is read meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.memory import block_table, prefix_cache
from paged_jax.scheduling.batching import Step
from paged_jax.serving import dispatch, host_memory
from paged_jax.serving.engine import Engine
from paged_jax.serving.host_memory import HostMemory
from paged_jax.serving.requests import Request
from tests.support import engines
from tests.support.moments import Moments

SWAP: dict[str, Any] = {"swap_slots": 60}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every device block that was swapped out holds NaN from then on, until somebody writes it."""
    moved: list[int] = []
    move = HostMemory.move

    def spoil(memory: HostMemory, batch: Any, step: Step, slots: Any) -> Any:
        batch = move(memory, batch, step, slots)
        out_Z = np.repeat(step.swapped_R & step.preempted_R, engines.SAMPLES)
        block_Z = np.asarray(batch.cache.rows.host.device_ZM)[out_Z].ravel()
        for block in block_Z[block_Z < batch.cache.table.pool.none]:
            moved.append(int(block))
            block_C = np.full(host_memory.CALL_BLOCKS, batch.cache.table.pool.none, np.int32)
            block_C[0] = block
            nan = jax.tree.map(
                lambda x: np.full(x.shape, np.nan, x.dtype), dispatch.fetch(batch, block_C)
            )
            batch = dispatch.put(batch, block_C, nan)
        return batch

    monkeypatch.setattr(HostMemory, "move", spoil)
    return moved


def serve(engine: Engine, load: list[Any]) -> list[Request]:
    """Serves a load with sound tables on both sides at every dispatch."""
    requests = [engine.add(*one) for one in load]
    while engine.busy:
        engine.advance()
        host = engine.cache.rows.host
        assert host is not None
        assert faults(engine) == []
        waiting = {one for one in engine._slots if one and one.swapped}
        held = np.asarray(host.table.length_B).reshape(-1, engines.SAMPLES).any(axis=1)
        assert waiting == {one for one, here in zip(engine._slots, held, strict=True) if here}
    check_empty(engine)
    return requests


def check_empty(engine: Engine) -> None:
    rows = engine.cache.rows
    assert rows.host is not None
    assert faults(engine) == []
    assert int(rows.table.pool.used - rows.idle) == int(rows.host.table.pool.used) == 0
    assert not engine.busy


def faults(engine: Engine) -> list[str]:
    """Of the tables on both sides."""
    rows = engine.cache.rows
    assert rows.host is not None
    if rows.prefix is None:
        found = block_table.faults(rows.table)
    else:
        found = prefix_cache.faults(rows.table, rows.prefix)
    return found + block_table.faults(rows.host.table)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_swapped_requests_draw_as_if_alone(poisoned: list[int], prefix_caching: bool) -> None:
    load = engines.random_requests(3, 24, prompt=20, output=11)
    engine = engines.create(**SWAP, prefix_caching=prefix_caching)
    moments = Moments(engine.logs[1])
    requests = serve(engine, load)
    assert poisoned
    for log in engine.logs:
        log.sweep()
    slots = [sum(ledger.values()) for ledger in moments.ledgers.values()]
    assert slots == [60] * engine.memory.count
    assert max(ledger["token"] for ledger in moments.ledgers.values()) > 20
    assert 0 < engine.swaps <= engine.preemptions
    assert all(map(engines.as_alone, requests))


def test_groups_alone_are_swapped(poisoned: list[int]) -> None:
    """Requests of one sample recompute, as do those for whom host memory has no room."""
    load = engines.random_requests(3, 24, prompt=20, output=11)
    engine = engines.create(**SWAP, swap_sequences=2)
    requests = [engine.add(*one) for one in load]
    swapped: set[Request] = set()
    while engine.busy:
        engine.advance()
        swapped |= {one for one in requests if one.swapped}
    check_empty(engine)
    assert {one.params.n for one in swapped} == {3}
    assert 0 < engine.swaps < engine.preemptions
    assert all(map(engines.as_alone, requests))


def test_bytes_that_stay_away_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "_restore", lambda memory, batch, *_: batch)
    engine = engines.create(**SWAP)
    requests = serve(engine, engines.random_requests(3, 24, prompt=20, output=11))
    assert engine.swaps
    assert not all(map(engines.as_alone, requests))


@pytest.mark.parametrize("whole", [True, False])
def test_who_leaves_host_memory_frees_it(poisoned: list[int], whole: bool) -> None:
    """Aborted, or one sample of three stopped, while the request waits there."""
    engine = engines.create(**SWAP)
    load = engines.random_requests(7, 9, prompt=6, output=11)
    others = [engine.add(ids, dataclasses.replace(one, max_tokens=11)) for ids, one in load]
    left: list[Request] = []
    while engine.busy:
        for request in [one for one in others if one.swapped and one not in left]:
            kept = [sequence.token_ids[:1] for sequence in request.sequences]
            if whole:
                engine.abort(request)
            elif request.params.n > 1:
                engine.stop(request, request.sequences[-1], len(kept[-1]))
            else:
                continue
            left.append(request)
            assert faults(engine) == []
        engine.advance()
    check_empty(engine)
    assert left
    assert all(map(engines.as_alone, set(others) - {*left}))
    for request in left:
        found = engines.tokens_of(request)
        alone = engines.alone(tuple(request.prompt_ids), request.params)
        assert found[:-1] == alone[:-1] or whole
        assert all(one == all_[: len(one)] for one, all_ in zip(found, alone, strict=True))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"swap_slots": 8, "block_size": 16}, "swap_slots: 8 is less than one block of 16"),
        ({"swap_slots": 64, "cache": "dense"}, "swap_slots: rows of a dense cache are not"),
        ({"swap_slots": 0}, "swap_slots: expected a whole number"),
        ({"swap_sequences": 0}, "swap_sequences: expected a whole number"),
    ],
)
def test_settings_that_do_not_go(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(**changes)
