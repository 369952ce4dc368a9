"""Drawing tokens: truncations against plain Python, and independence of the batch."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.decoding import sampling
from paged_jax.decoding.sampling import SamplingParams, Uses

VOCABULARY = 40
LOGITS = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32) * 2


def kept_tokens(params: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by the definitions, in float64."""
    scores = LOGITS.astype(np.float64) / params.temperature
    order = sorted(range(VOCABULARY), key=lambda token: -scores[token])
    kept = order[: params.top_k] if params.top_k else order
    total = sum(math.exp(scores[token]) for token in kept)
    chance = {token: math.exp(scores[token]) / total for token in kept}
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= params.top_p:
            break
        nucleus.append(token)
        reached += chance[token]
    return {token for token in nucleus if chance[token] >= params.min_p * chance[order[0]]}


def draw(params: SamplingParams, draws: int, seen: np.ndarray | None = None) -> np.ndarray:
    """The first ``draws`` tokens that one row draws from the same logits."""
    rows = sampling.samplers([(params, 0)] * draws, draws)
    tokens, _ = jax.jit(sampling.sample, static_argnums=3)(
        jnp.tile(LOGITS, (draws, 1)),
        rows,
        jnp.arange(draws, dtype=jnp.int32),
        Uses.of([params]),
        None if seen is None else jnp.tile(seen, (draws, 1)),
    )
    return np.asarray(tokens)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0, top_k=VOCABULARY + 5),
    ],
)
def test_draws_are_the_kept_tokens_in_their_proportions(params: SamplingParams) -> None:
    kept = kept_tokens(params)
    draws = 4000
    drawn = draw(params, draws)
    assert set(drawn.tolist()) <= kept
    total = sum(math.exp(float(LOGITS[token]) / params.temperature) for token in kept)
    for token in kept:
        chance = math.exp(float(LOGITS[token]) / params.temperature) / total
        deviation = math.sqrt(max(chance * (1 - chance) / draws, 1e-12))
        assert abs((drawn == token).mean() - chance) <= 5 * deviation + 1e-9


def test_a_wrong_cut_would_be_seen() -> None:
    """The check above finds top-k 4 instead of 3."""
    wrong = draw(SamplingParams(temperature=0.7, top_k=4), 4000)
    assert not set(wrong.tolist()) <= kept_tokens(SamplingParams(temperature=0.7, top_k=3))


def test_greedy_and_repetition_penalty() -> None:
    best, second = np.argsort(-LOGITS)[:2]
    assert (draw(SamplingParams(temperature=0), 3) == best).all()
    seen = np.zeros(VOCABULARY, bool)
    seen[best] = True
    params = SamplingParams(temperature=0, repetition_penalty=1000.0)
    assert (draw(params, 3, seen) == second).all()
    negative = dataclasses.replace(params, repetition_penalty=1.0)
    assert (draw(negative, 3) == best).all()


def test_a_row_draws_the_same_in_any_batch() -> None:
    mixed = [
        (SamplingParams(temperature=1.0, seed=7), 2),
        (SamplingParams(temperature=0), 0),
        (SamplingParams(temperature=1.0, top_k=5, seed=7), 2),
    ]
    logits = np.random.default_rng(1).normal(size=(3, VOCABULARY)).astype(np.float32)
    nth = jnp.array([4, 0, 9], jnp.int32)
    rows = sampling.samplers(mixed, 3)
    together, logprob = sampling.sample(
        jnp.asarray(logits), rows, nth, Uses.of([params for params, _ in mixed])
    )
    for row, one in enumerate(mixed):
        alone, _ = sampling.sample(
            jnp.asarray(logits[row : row + 1]),
            sampling.samplers([one], 1),
            nth[row : row + 1],
            Uses.of([one[0]]),
        )
        assert int(alone[0]) == int(together[row])
        wide = logits[row].astype(np.float64)
        expected = wide[int(together[row])] - np.log(np.exp(wide).sum())
        assert abs(float(logprob[row]) - expected) <= 1e-5


def test_sequences_seeds_and_positions_draw_differently() -> None:
    base = SamplingParams(temperature=1.0)
    logits = jnp.zeros((1, 10_000))

    def one(params: SamplingParams, index: int, nth: int) -> int:
        rows = sampling.samplers([(params, index)], 1)
        return int(sampling.sample(logits, rows, jnp.array([nth]), Uses.of([params]))[0][0])

    drawn = {
        one(base, 0, 0),
        one(base, 1, 0),
        one(base, 0, 1),
        one(dataclasses.replace(base, seed=1), 0, 0),
    }
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_values_that_do_not_go_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
