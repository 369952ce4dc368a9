"""An engine that thousands of requests pass through keeps nothing of them."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from experiments.soak import resident_bytes
from paged_jax.memory import prefix_cache
from paged_jax.serving.engine import Engine
from paged_jax.serving.memory_log import MemoryLog
from paged_jax.serving.requests import Request
from tests.support import engines

KIBIBYTE, MEBIBYTE = 2**10, 2**20


class Users:
    """Who adds requests, aborts them and stops their samples, at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, np.random.default_rng(seed)
        self.requests: list[Request] = []  # that have not ended, for all that users know
        self.added = self.aborted = self.stopped = 0
        self._waiting = iter(engines.random_requests(seed, 10_000, prompt=20, output=11))

    def act(self) -> None:
        """Between two dispatches."""
        for _ in range(self.random.integers(4) if len(self.requests) < 20 else 0):
            prompt, params = next(self._waiting)
            priority, salt = self.random.integers(3, size=2).tolist()
            self.requests.append(self.engine.add(prompt, params, priority=priority, salt=salt))
            self.added += 1
        for request in self.requests:
            if self.random.random() < 0.01:
                self.engine.abort(request)
                self.aborted += 1
            sequence = request.sequences[-1]
            if sequence.token_ids and self.random.random() < 0.02:
                tokens = int(self.random.integers(len(sequence.token_ids)))
                self.engine.stop(request, sequence, tokens)
                self.stopped += 1
        self.requests = [request for request in self.requests if not request.finished]


def serve(users: Users, requests: int) -> None:
    """Until so many have been added, and all have ended."""
    engine = users.engine
    while users.added < requests or engine.busy:
        if users.added < requests:
            users.act()
        if engine.busy:
            engine.advance()
    users.requests.clear()


def sound(engine: Engine) -> None:
    rows = engine.cache.rows
    if rows.prefix is None:
        engines.check_empty(engine)
        return
    assert prefix_cache.faults(rows.table, rows.prefix) == []
    assert int(rows.room) == rows.table.pool.blocks
    assert not engine.busy


def grown(engine: Engine) -> tuple[int, int, Users]:
    """Bytes of Python's objects and of the process that 1,500 requests leave behind."""
    users = Users(engine, 1)
    serve(users, 500)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0], resident_bytes()
    serve(users, 2_000)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0], resident_bytes()
    tracemalloc.stop()
    return after[0] - before[0], after[1] - before[1], users


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_two_thousand_requests_leave_nothing(caching: bool) -> None:
    engine = engines.create(prefix_caching=caching)
    objects, resident, users = grown(engine)
    assert (users.aborted > 50, users.stopped > 50, engine.preemptions > 50) == (True,) * 3
    sound(engine)
    assert objects < 200 * KIBIBYTE
    assert resident < 16 * MEBIBYTE


@pytest.mark.slow
def test_a_log_that_keeps_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLog, "sweep", lambda self: None)
    objects, _, _ = grown(engines.create())
    assert objects > 1000 * KIBIBYTE
