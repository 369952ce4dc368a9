"""Engines of one shape for tests: their programs are compiled once a process, for all of them.

The pool is so small that a few long requests fill it. Every engine is warmed, so what its device
programs are is decided here; ``first_compilations`` says what making the first of them compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.model.weights import Loaded
from paged_jax.serving.engine import Engine
from paged_jax.serving.requests import Request
from tests.support import models

CONFIG = EngineConfig(
    block_size=2, pool_slots=40, max_length=40, rows=6, step_tokens=8, dispatch_steps=8
)
SAMPLES = 3
# Together they ask for all that can be compiled in.
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, repetition_penalty=1.5),
)
SEARCH = BeamSearchParams(beam_width=3)
MODEL = models.tiny()


def create(*, searches: bool = False, model: Loaded = MODEL, **changes: Any) -> Engine:
    """A warmed engine; ``changes`` are settings that few programs depend on.

    ``searches``: it is warm for beam search, too. ``model`` may have end tokens of its own.
    """
    first_compilations(searches)
    return _create(searches, model, **changes)


def _create(searches: bool, model: Loaded, **changes: Any) -> Engine:
    engine = Engine(model, dataclasses.replace(CONFIG, **changes), samples=SAMPLES)
    engine.warm(*KINDS, *[SEARCH] * searches)
    return engine


@functools.cache
def first_compilations(searches: bool = False) -> tuple[str, ...]:
    """What the first such engine of the process compiled, from making it to its being warm."""
    with compilations() as names:
        _create(searches, MODEL)
    return tuple(names)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles meanwhile, by name."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def tokens_of(request: Request) -> list[list[int]]:
    return [sequence.token_ids for sequence in request.sequences]


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    """What a request draws when nobody else is there."""
    engine = create()
    request = engine.add(prompt, params)
    finish(engine)
    assert engine.preemptions == 0
    return tokens_of(request)


def as_alone(request: Request) -> bool:
    """Whether a request has drawn what it draws alone."""
    return tokens_of(request) == alone(tuple(request.prompt_ids), request.params)


def finish(engine: Engine) -> None:
    """Serves all there is; nothing is left behind."""
    for _ in engine.run():
        pass
    check_empty(engine)


def check_empty(engine: Engine) -> None:
    """Host and device hold nothing."""
    table = engine.cache.table
    assert block_table.faults(table) == []
    assert int(table.pool.used) == 0
    assert not engine.busy
    assert engine._row == [None] * engine.config.rows
    assert not np.asarray(engine._batch.book.live_RF).any()


def random_requests(
    seed: int, count: int, *, prompt: int, output: int
) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Requests of up to so many tokens; a third has three samples, and all kinds of sampling."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        samples = SAMPLES if number % 3 == 2 else 1
        length = int(random.integers(1, prompt if samples == 1 else min(prompt, 6) + 1))
        params = dataclasses.replace(
            KINDS[random.integers(len(KINDS))],
            n=samples,
            seed=number,
            max_tokens=int(random.integers(output // 2, output + 1)),
        )
        made.append((tuple(random.integers(0, 61, length).tolist()), params))
    return made
