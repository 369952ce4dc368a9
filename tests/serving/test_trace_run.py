"""Requests through an engine in time: an engine of lists, and a clock that only they turn."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving import requests as live
from paged_jax.serving import trace_run
from paged_jax.serving.admission_hits import AdmissionHits
from paged_jax.serving.served import Pulse, Served
from paged_jax.workload.timed import Timed

ROWS, STEPS, STEP_SECONDS = 2, 3, 1.0


class ListLog:
    """Settles nothing before it has to, and the last moment first."""

    def __init__(self) -> None:
        self.watcher: Any = None
        self._moments: list[Any] = []

    def append(self, owners: tuple[Any, ...], used: int) -> None:
        number = len(self._moments)
        self._moments.append(types.SimpleNamespace(number=number, owners=owners, used=used))
        self.watcher.record(self._moments[-1])

    def sweep(self) -> None:
        for moment in reversed(self._moments):
            held = 16 * moment.used
            slots = {"token": held, "free": 64 - held}
            self.watcher.settle(moment, dict.fromkeys(CATEGORIES, 0) | slots)


class ListEngine:
    """Two rows, first come first served; a dispatch has up to three steps of a second each.

    A dispatch ends when a request does. Prompts of more than 9 tokens are refused.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []
        self.submitted: list[tuple[int, float]] = []  # first token of the prompt, and when
        self.config = EngineConfig(pool_slots=64, block_size=16, rows=ROWS)
        self.preemptions = self.swaps = 0
        self.hits = AdmissionHits(self.config.block_size)
        self.memory = ListLog()
        self.logs = (self.memory,)
        self._queue: list[live.Request] = []
        self._running: list[live.Request] = []

    def add(self, prompt_ids: Sequence[int], params: Any) -> live.Request:
        assert params.ignore_eos, "outputs have the trace's lengths"
        assert params.temperature == 0
        if len(prompt_ids) > 9:
            raise ValueError("prompt: too long")
        request = live.Request(None, list(prompt_ids), params, [live.Sequence()])
        self._queue.append(request)
        self.submitted.append((prompt_ids[0], self.seconds))
        return request

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    def advance(self, steps: int | None = None) -> list[live.Request]:
        assert steps is None, "a clock of seconds knows no steps"
        while self._queue and len(self._running) < ROWS:
            self._running.append(self._queue.pop(0))
        served = list(self._running)
        for _ in range(STEPS):
            self.seconds += STEP_SECONDS
            owners = tuple((one, one.sequences[0]) for one in served)
            self.memory.append(owners, len(served))
            for request in served:
                request.sequences[0].token_ids.append(7)
                if len(request.sequences[0].token_ids) == request.params.max_tokens:
                    request.sequences[0].finish_reason = "length"
            if any(request.finished for request in served):
                break
        self._running = [request for request in served if not request.finished]
        return served

    def clock(self) -> trace_run.Clock:
        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            self.seconds += seconds

        return trace_run.Clock(seconds=lambda: self.seconds, sleep=sleep)


def serve(*rows: tuple[float, int, int], static: bool = False) -> tuple[ListEngine, Served]:
    """A run over requests of an arrival, a prompt and an output each."""
    engine = ListEngine()
    engine.seconds = 1000.0  # clocks begin anywhere
    arrival_R, prompt_R, output_R = (np.array(column) for column in zip(*rows, strict=True))
    requests = Timed(
        arrival_seconds_R=arrival_R.astype(float),
        prompt_R=prompt_R,
        output_R=output_R,
        number_R=np.arange(len(rows)),
    )
    prompts = [[index] * length for index, length in enumerate(prompt_R.tolist())]
    pulses: list[Pulse] = []
    found = trace_run.run(
        engine,  # type: ignore[arg-type] # what a run asks of an engine is all there
        requests,
        prompts,
        static=static,
        watch=pulses.append,
        clock=engine.clock(),
    )
    assert pulses[-1].finished == len(rows)
    assert pulses[-1].tokens == output_R[found.served_R].sum()
    return engine, found


def test_requests_are_submitted_when_they_are_due() -> None:
    """The second comes inside the first dispatch and has to wait for its end; the third for it."""
    engine, found = serve((0, 1, 5), (1.5, 1, 2), (2.5, 1, 1), (20, 1, 1))
    assert engine.submitted == [(0, 1000), (1, 1003), (2, 1003), (3, 1020)]
    assert engine.slept == [14]
    assert found.start_seconds_R.tolist() == [0, 3, 5, 20]
    assert found.first_seconds_R.tolist() == [3, 5, 6, 21]
    assert found.finish_seconds_R.tolist() == [5, 5, 6, 21]
    assert found.queue_seconds_R.tolist() == [0, 1.5, 2.5, 0]
    assert found.normalised_latency_R.tolist() == [1, 1.75, 3.5, 1]
    assert found.finish_step_R.tolist() == [4, 4, 5, 6]
    assert found.steps.seconds_X.tolist() == [1, 2, 3, 4, 5, 6, 21]
    assert found.steps.running_X.tolist() == [1, 1, 1, 2, 2, 1, 1]
    assert found.steps.waiting_X.tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert found.steps.used_X.tolist() == [0.25, 0.25, 0.25, 0.5, 0.5, 0.25, 0.25]
    assert [len(ids) for ids in found.token_ids] == [5, 2, 1, 1]


def test_static_batches_wait_for_their_last() -> None:
    """Two rows; the third request is there while one of them is free, and is left waiting."""
    engine, found = serve((0, 1, 1), (0, 1, 4), (0, 1, 1), (5.5, 1, 1), static=True)
    assert engine.submitted == [(0, 1000), (1, 1000), (2, 1004), (3, 1005.5)]
    assert found.finish_seconds_R.tolist() == [1, 4, 5, 6.5]
    assert found.steps.waiting_X.tolist() == [1, 1, 1, 1, 0, 0]
    assert found.steps.running_X.tolist() == [2, 1, 1, 1, 1, 1]


def test_a_refused_request_harms_nobody() -> None:
    _, alone = serve((0, 1, 2), (4, 1, 3))
    _, found = serve((0, 1, 2), (0, 10, 2), (4, 1, 3), (30, 10, 1))
    assert found.refused == {1: "prompt: too long", 3: "prompt: too long"}
    assert found.finish_seconds_R[[0, 2]].tolist() == alone.finish_seconds_R.tolist()
    assert np.isnan(found.finish_seconds_R[[1, 3]]).all()
    assert found.steps.waiting_X.tolist() == alone.steps.waiting_X.tolist()
    with pytest.raises(ValueError, match="no request can be served, the first: prompt: too long"):
        serve((0, 10, 2))


def test_static_settings_hold_as_many_slots() -> None:
    config = EngineConfig(pool_slots=1000, max_length=300, rows=8)
    static = trace_run.static_config(config)
    assert (static.cache, static.rows, static.max_length) == ("dense", 3, 300)
    with pytest.raises(ValueError, match="pool_slots: static batching reserves 300 slots a row"):
        trace_run.static_config(EngineConfig(pool_slots=299, max_length=300))
