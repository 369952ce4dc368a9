"""Beam search with copy-on-write against brute force on whole texts, token for token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.model.views import CausalView
from paged_jax.serving import beam_search
from tests.support import beam_search as brute_force
from tests.support import models

PROMPTS = [[3, 14, 15, 9, 26], [5], [35, 8, 9, 7, 9, 3, 2, 38, 46]]
LENGTH = 32


@pytest.fixture(scope="module")
def model():
    return models.tiny(end_ids=(7, 11))


@pytest.fixture(scope="module")
def logits_of(model):
    """Logits after a text, from a dense pass over the whole of it."""

    @jax.jit
    def padded(token_T: jax.Array) -> jax.Array:
        position_T = jnp.arange(LENGTH, dtype=jnp.int32)
        hidden, _ = model.decoder(token_T, position_T, CausalView(length=LENGTH))
        return model.decoder.logits(hidden)

    def last(ids: list[int]) -> np.ndarray:
        return np.asarray(padded(jnp.array(ids + [0] * (LENGTH - len(ids)))))[len(ids) - 1]

    return last


@pytest.mark.parametrize(
    ("cache", "width", "penalty", "early"),
    [
        pytest.param("paged", 1, 1.0, False, marks=pytest.mark.slow),
        ("paged", 2, 0.0, True),
        pytest.param("paged", 4, 1.0, False, marks=pytest.mark.slow),
        ("paged", 6, 2.0, True),
        ("dense", 4, 1.0, False),
        pytest.param("dense", 2, 0.5, True, marks=pytest.mark.slow),
    ],
)
def test_equals_brute_force(model, logits_of, cache, width, penalty, early) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, length_penalty=penalty, early_stopping=early
    )
    config = EngineConfig(
        cache=cache, block_size=4, pool_slots=1024, max_length=64, rows=18, backend="reference"
    )
    requests, logs = beam_search.run(model, config, PROMPTS, params)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        expected = brute_force.search(
            logits_of,
            prompt,
            width=width,
            max_tokens=12,
            ends=model.end_ids,
            length_penalty=penalty,
            early_stopping=early,
        )
        found = [(one.token_ids, one.finish_reason) for one in request.sequences]
        assert found == [(tokens, reason) for _, tokens, reason in expected]
        totals = [total for total, _, _ in expected]
        np.testing.assert_allclose(
            [one.logprobs[0] for one in request.sequences], totals, atol=1e-3
        )
    memory = logs[0].settle(*logs[1:])
    assert sum(memory.slots.values()) == pytest.approx(memory.pool_slots)


@pytest.mark.slow
def test_waves_give_the_same_outputs(model) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    wide = EngineConfig(block_size=4, pool_slots=1024, max_length=64, rows=9, backend="reference")
    narrow = EngineConfig(
        block_size=4, pool_slots=44, max_length=64, rows=9, step_tokens=9, backend="reference"
    )
    one, _ = beam_search.run(model, wide, PROMPTS, params)
    several, logs = beam_search.run(model, narrow, PROMPTS, params)
    assert len(logs) > 1
    assert [[s.token_ids for s in r.sequences] for r in one] == [
        [s.token_ids for s in r.sequences] for r in several
    ]


def test_refusals_name_the_numbers(model) -> None:
    config = EngineConfig(block_size=4, pool_slots=16, max_length=64, rows=4)
    with pytest.raises(ValueError, match="pool_slots"):
        beam_search.run(model, config, PROMPTS, BeamSearchParams(beam_width=4, max_tokens=20))
    with pytest.raises(ValueError, match="beam_width"):
        beam_search.run(model, config, PROMPTS, BeamSearchParams(beam_width=5))
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearchParams(beam_width=0)
