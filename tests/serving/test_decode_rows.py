"""Decoding compiled for fewer rows, too: the same tokens, from the narrowest program that does."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.serving import dispatch, trace_run
from paged_jax.serving.engine import Engine
from tests.support import engines

FEWER = (1, 3)


def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every decode dispatch: the rows that ran when it began, and those it was compiled for."""
    seen: list[tuple[int, int]] = []
    decode = dispatch.decode

    def noting(*given: Any, most_rows: int, **options: Any) -> Any:
        running = int((np.asarray(given[2].book.owner_B) < len(given[2].book.prompt_R)).sum())
        seen.append((running, most_rows))
        return decode(*given, most_rows=most_rows, **options)

    monkeypatch.setattr(dispatch, "decode", noting)
    return seen


def test_requests_draw_what_they_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.create(decode_rows=FEWER)
    alone = engines.random_requests(5, 12, prompt=8, output=11)
    for prompt, params in alone:
        engines.alone(prompt, params)
    seen = widths(monkeypatch)
    with engines.compilations() as names:
        requests = [engine.add(*one) for one in alone]
        engines.finish(engine)
    assert names == []
    assert engine.preemptions > 0
    assert all(map(engines.as_alone, requests))
    assert {most for _, most in seen} == {1, 3, 6}
    for running, most in seen:
        assert most == min(size for size in (1, 3, 6) if size >= running)


def test_too_narrow_a_program_does_nothing() -> None:
    engine = engines.create(decode_rows=FEWER)
    for number in range(4):
        engine.add([number], engines.KINDS[0])
    while not (engine._calm and sum(held is not None for held in engine._row) == 4):
        engine.advance(1)
    for rows, steps in ((3, 0), (6, 2)):
        engine._batch, drawn = engine._call(dispatch.decode, 2, rows)
        assert int(drawn.steps) == steps


def test_a_warm_engine_is_as_new() -> None:
    def held(engine: Engine) -> Any:
        batch = engine._batch
        return jax.tree.map(np.asarray, (batch.book, batch.cache.rows, batch.cache.copies))

    engine = engines.create(decode_rows=FEWER, prefix_caching=True)
    new = Engine(engines.MODEL, engine.config, samples=engines.SAMPLES)
    jax.tree.map(np.testing.assert_array_equal, held(engine), held(new))


@pytest.mark.parametrize("rows", [(0,), (2, 32), (2.0,), (-1,)])
def test_what_is_not_fewer_rows_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="decode_rows: expected whole numbers from 1 and below"):
        EngineConfig(rows=32, decode_rows=rows)


def test_sizes_ascend_and_a_static_batch_keeps_those_below_its_rows() -> None:
    config = EngineConfig(rows=32, pool_slots=8192, max_length=512, decode_rows=(24, 4, 16, 4))
    assert config.decode_sizes == (4, 16, 24, 32)
    assert trace_run.static_config(config).decode_sizes == (4, 16)
