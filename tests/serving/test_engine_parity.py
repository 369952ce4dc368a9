"""The simulator is the engine: a trace whose arrivals are steps, through both, step by step.

Outputs have the trace's lengths, and the simulator finds prefixes by the tokens that the engine
drew. Plans, ledgers, block tables and the steps in which requests finish are the same, and so are a
request's tokens whether it is alone or not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.model import weights
from paged_jax.model.weights import Loaded
from paged_jax.serving import trace_run, virtual_run, virtual_step
from paged_jax.serving.engine import Engine
from paged_jax.serving.served import Served
from paged_jax.workload import timed, trace
from paged_jax.workload.timed import Timed
from tests.support import models
from tests.support.models import TINY

WAYS = [
    {},
    {"prefix_caching": True},
    {"chunked_prefill": False},
    {"swap_slots": 400},
    {"swap_slots": 400, "prefix_caching": True},
    {"swap_slots": 400, "chunked_prefill": False},
]
BURST = 9  # requests that come together


def in_steps(requests: Timed, steps: int) -> Timed:
    """Arrivals at whole steps, so many for a burst: faster than they are served."""
    burst_R = np.arange(requests.count) // BURST
    return dataclasses.replace(requests, arrival_seconds_R=steps * burst_R.astype(float))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Block tables and reference counts after every step of the simulator, as it goes on."""
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    advance = virtual_step.advance

    def keep(*arguments: Any) -> Any:
        state, record = advance(*arguments)
        table = state.memory.table
        kept.append((np.array(table.table_BM), np.array(table.pool.refcount_N)))
        return state, record

    monkeypatch.setattr(virtual_step, "advance", keep)
    return kept


class Boundaries(Engine):
    """An engine that keeps its block tables at every dispatch boundary, by steps so far."""

    def advance(self, steps: int | None = None) -> Any:
        moved = super().advance(steps)
        table = self.cache.table
        self.kept: dict[int, tuple[np.ndarray, np.ndarray]] = getattr(self, "kept", {})
        self.kept[self.memory.count] = np.array(table.table_BM), np.array(table.pool.refcount_N)
        return moved


def compare(
    model: Loaded,
    config: EngineConfig,
    requests: Timed,
    prompts: list[list[int]],
    tables: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[Served, Boundaries]:
    """Serves the requests in both ways."""
    engine = Boundaries(model, config)
    live = trace_run.run(engine, requests, prompts, clock=trace_run.step_clock(engine))
    known = [one + other for one, other in zip(prompts, live.token_ids, strict=True)]
    virtual = virtual_run.run(model.config, None, config, requests, sequences=known, call_steps=1)
    for name in ("ledger_XJ", "host_XJ", "running_X", "waiting_X"):
        np.testing.assert_array_equal(getattr(virtual.steps, name), getattr(live.steps, name))
    np.testing.assert_array_equal(virtual.finish_step_R, live.finish_step_R)
    np.testing.assert_array_equal(virtual.start_seconds_R, live.start_seconds_R)
    assert {*live.steps.host_XJ.sum(axis=1).tolist()} == {config.swap_blocks * config.block_size}
    assert (virtual.preemptions, virtual.swaps) == (live.preemptions, live.swaps)
    for step, kept in engine.kept.items():
        for mine, theirs in zip(kept, tables[step - 1], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert len(engine.kept) < len(tables) == len(live.steps.seconds_X) + 1
    return live, engine


@pytest.mark.parametrize("way", [WAYS[0], *WAYS[4:]], ids=str)
def test_a_small_trace(way: dict[str, Any], tables: list[Any]) -> None:
    shape = dataclasses.replace(TINY, layers=1)
    model = Loaded(config=shape, decoder=models.random_decoder(shape), end_ids=())
    config = EngineConfig(
        block_size=4,
        pool_slots=48,
        max_length=48,
        rows=6,
        step_tokens=36,
        dispatch_steps=5,
        backend="reference",
    )
    if way:
        way = way | {"swap_slots": 40}
    random = np.random.default_rng(0)
    prompt_R, output_R = random.integers(1, (18, 18), size=(40, 2), endpoint=True).T
    requests = Timed(
        arrival_seconds_R=np.zeros(40),
        prompt_R=prompt_R,
        output_R=output_R,
        number_R=np.arange(40),
    )
    common = random.integers(61, size=18)
    prompts = [
        (common if index % 2 else random.integers(61, size=18))[:length].tolist()
        for index, length in enumerate(prompt_R)
    ]
    config = dataclasses.replace(config, **way)
    live, _ = compare(model, config, in_steps(requests, 40), prompts, tables)
    assert live.preemptions > 5
    assert (live.swaps > 3) == bool(way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_hundred_requests_of_azure(shared_data, way: dict[str, Any], tables: list[Any]) -> None:
    model = weights.load(shared_data("model_stories260k/stories260K.bin"))
    source = trace.read_trace(str(shared_data("azure_llm_2023/AzureLLMInferenceTrace_conv.csv")))
    scaled = timed.from_trace(source, limit=200, prompt_scale=0.05, output_scale=0.2)
    requests = in_steps(timed.within(scaled, 250), 60)
    random = np.random.default_rng(1)
    begin = random.integers(3, 500, size=250)
    prompts = [
        [
            *begin[: length // 2].tolist(),
            *random.integers(3, 500, size=length - length // 2).tolist(),
        ]
        for length in requests.prompt_R
    ]
    config = EngineConfig(
        block_size=8, pool_slots=900, max_length=256, rows=24, step_tokens=256, **way
    )
    live, _ = compare(model, config, requests, prompts, tables)
    assert live.preemptions > 24
    assert (live.swaps > 12) == ("swap_slots" in way)
    assert live.refused == {}
    alone = Engine(model, dataclasses.replace(config, swap_slots=None, prefix_caching=False))
    for index in range(requests.count):
        request = alone.add(prompts[index], trace_run.params(int(requests.output_R[index])))
        for _ in alone.run():
            pass
        assert request.sequences[0].token_ids == live.token_ids[index], index
