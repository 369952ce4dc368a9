"""An engine with a prefix cache: the same tokens, and the hits that plain lists of tokens say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import prefix_cache, prefix_hits
from paged_jax.serving.engine import Engine
from tests.support import models

SIZE, REQUESTS = 4, 18
SETTINGS: dict[str, Any] = {
    "block_size": SIZE,
    "pool_slots": 88,
    "max_length": 64,
    "rows": 8,
    "step_tokens": 16,  # one size of a packed step, so one program
    "backend": "reference",
}


@pytest.fixture(scope="module")
def model():
    return models.tiny()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts that begin like one of three texts, some of them twice the same."""
    random = np.random.default_rng(0)
    texts = random.integers(0, 61, (3, 20)).tolist()
    drawn = [
        texts[number % 3][: random.integers(5, 20)]
        + random.integers(0, 61, random.integers(1, 8)).tolist()
        for number in range(REQUESTS)
    ]
    drawn[-2] = drawn[4]
    return drawn


def serve(engine: Engine, prompts, samples: int) -> list[list[list[int]]]:
    requests = [
        engine.add(
            prompt,
            SamplingParams(n=samples, temperature=1, seed=number, max_tokens=10),
            salt=number % 2,
        )
        for number, prompt in enumerate(prompts)
    ]
    for _ in engine.run():
        pass
    return [[sequence.token_ids for sequence in request.sequences] for request in requests]


@pytest.mark.parametrize("samples", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_tokens_are_those_without_a_cache(model, prompts, samples: int) -> None:
    """In a pool so small that requests are preempted and cached blocks evicted."""
    plain = Engine(model, EngineConfig(**SETTINGS), samples=samples)
    expected = serve(plain, prompts, samples)
    engine = Engine(model, EngineConfig(prefix_caching=True, **SETTINGS), samples=samples)
    assert serve(engine, prompts, samples) == expected
    assert plain.preemptions > 0
    assert engine.preemptions > 0
    resumed = prefix_hits.rates(engine.hits.resumed)
    assert resumed is not None
    assert resumed.tokens > 0
    rows = engine.cache.rows
    assert rows.prefix is not None
    assert prefix_cache.faults(rows.table, rows.prefix) == []
    assert int(rows.room) == 88 // SIZE
    memory = engine.memory.settle()
    assert sum(memory.slots.values()) == pytest.approx(memory.pool_slots)
    assert memory.slots["cached"] > 0


@pytest.mark.slow
def test_hits_one_at_a_time(model, prompts) -> None:
    """Nothing is evicted: a request finds the longest beginning that its tenant has stored."""
    engine = Engine(model, EngineConfig(**SETTINGS | {"pool_slots": 2048}, prefix_caching=True))
    stored: list[tuple[int, list[int]]] = []
    tokens = found = blocks = 0
    for number, prompt in enumerate(prompts):
        salt = number % 2
        longest = 0
        for tenant, known in stored:
            alike = 0
            while alike < min(len(known), len(prompt) - 1) and known[alike] == prompt[alike]:
                alike += 1
            longest = max(longest, alike // SIZE if tenant == salt else 0)
        tokens, found, blocks = (
            tokens + len(prompt),
            found + longest * SIZE,
            blocks + -(-len(prompt) // SIZE),
        )
        ((output,),) = _serve_one(engine, prompt, salt)
        stored.append((salt, (prompt + output)[:-1]))
    rates = prefix_hits.rates(engine.hits.new)
    assert rates is not None
    assert found > 0
    assert rates.tokens == pytest.approx(found / tokens)
    assert rates.blocks == pytest.approx(found / SIZE / blocks)
    assert prefix_hits.rates(engine.hits.resumed) is None


def _serve_one(engine: Engine, prompt: list[int], salt: int) -> list[list[list[int]]]:
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=9), salt=salt)
    for _ in engine.run():
        pass
    return [[sequence.token_ids for sequence in request.sequences]]


def test_a_dense_cache_has_nothing_to_find() -> None:
    with pytest.raises(ValueError, match="prefix_caching"):
        EngineConfig(cache="dense", prefix_caching=True)
