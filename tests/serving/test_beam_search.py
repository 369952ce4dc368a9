"""Beam search in an engine is brute force on whole texts, token for token, whoever else runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.model.views import CausalView
from paged_jax.serving.engine import Engine
from paged_jax.serving.llm import LLM
from paged_jax.serving.requests import Request
from tests.support import beam_search as brute_force
from tests.support import engines
from tests.support.moments import Moments

PROMPTS = [[3, 14, 15, 9, 26], [5], [35, 8, 9, 7, 9, 3, 2, 38, 46]]
ENDS = (7, 11, 19, 23, 31, 42, 51, 57)  # many, so that searches are done at different times
MODEL = dataclasses.replace(engines.MODEL, end_ids=ENDS)
LENGTH = 32
WAYS = ((1, 1.0, False), (2, 0.0, True), (4, 1.0, False), (6, 2.0, True), (2, 0.5, True))


@jax.jit
def padded(token_T: jax.Array) -> jax.Array:
    position_T = jnp.arange(LENGTH, dtype=jnp.int32)
    hidden, _ = MODEL.decoder(token_T, position_T, CausalView(length=LENGTH))
    return MODEL.decoder.logits(hidden)


@functools.cache
def logits_of(ids: tuple[int, ...]) -> np.ndarray:
    """Logits after a text, from a dense pass over the whole of it."""
    return np.asarray(padded(jnp.array([*ids] + [0] * (LENGTH - len(ids)))))[len(ids) - 1]


@functools.cache
def expected(
    prompt: tuple[int, ...], params: BeamSearchParams
) -> list[tuple[float, list[int], str]]:
    """Sum of log probabilities, tokens and reason of each output."""
    return brute_force.search(
        lambda ids: logits_of(tuple(ids)),
        prompt,
        width=params.beam_width,
        max_tokens=params.max_tokens,
        ends=() if params.ignore_eos else ENDS,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def check_search(request: Request) -> None:
    """A search came to what brute force comes to."""
    assert request.search is not None
    wanted = expected(tuple(request.prompt_ids), request.search.params)
    found = [(one.token_ids, one.finish_reason) for one in request.sequences]
    assert found == [(tokens, reason) for _, tokens, reason in wanted]
    sums = [sum(one.logprobs) for one in request.sequences]
    np.testing.assert_allclose(sums, [total for total, _, _ in wanted], atol=1e-3)


@pytest.mark.parametrize("cache", ["paged", pytest.param("dense", marks=pytest.mark.slow)])
def test_equals_brute_force(cache: str) -> None:
    """Searches of all widths beside each other, more than there are rows."""
    config = EngineConfig(
        cache=cache, block_size=4, pool_slots=1024, max_length=64, rows=18, backend="reference"
    )
    engine = Engine(MODEL, config, samples=6)
    moments = Moments(engine.memory)
    requests = [
        engine.add(
            prompt,
            BeamSearchParams(
                beam_width=width, max_tokens=12, length_penalty=penalty, early_stopping=early
            ),
        )
        for width, penalty, early in WAYS
        for prompt in PROMPTS
    ]
    assert sum(len(one.sequences) for one in requests) > 2 * config.rows
    engines.finish(engine)
    for request in requests:
        check_search(request)
    reasons = {one.finish_reason for request in requests for one in request.sequences}
    assert reasons == {"stop", "length"}
    moments.check(engine)


def mixed(seed: int, count: int) -> list[tuple[tuple[int, ...], Any]]:
    """Every other request is a search."""
    random = np.random.default_rng(seed)
    load: list[tuple[tuple[int, ...], Any]]
    load = [*engines.random_requests(seed, count, prompt=6, output=11)]
    for number in range(0, count, 2):
        params = BeamSearchParams(
            beam_width=int(random.choice([1, 2, 3, 3])),
            max_tokens=int(random.integers(7, 12)),
            length_penalty=float(random.choice([0.0, 1.0, 2.0])),
            early_stopping=bool(random.integers(2)),
            ignore_eos=bool(random.random() < 0.6),
        )
        load[number] = (load[number][0], params)
    return load


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    """What a request draws when nobody else is there."""
    engine = engines.create(searches=True, model=MODEL)
    request = engine.add(prompt, params)
    engines.finish(engine)
    return engines.tokens_of(request)


def check(request: Request) -> None:
    """A request came to what it comes to alone."""
    if request.search:
        check_search(request)
    else:
        assert engines.tokens_of(request) == alone(tuple(request.prompt_ids), request.params)


@pytest.mark.parametrize(
    ("swap_slots", "load"), [(None, (14, 36)), pytest.param(60, (5, 54), marks=pytest.mark.slow)]
)
def test_searches_and_samples_mix_and_are_preempted(
    swap_slots: int | None, load: tuple[int, int]
) -> None:
    engine = engines.create(searches=True, model=MODEL, swap_slots=swap_slots)
    moments = Moments(engine.memory)
    requests = [engine.add(*one) for one in mixed(*load)]
    resumed: set[Request] = set()
    together = False
    while engine.busy:
        engine.advance()
        running = {held[0] for held in engine._row if held}
        together |= len({bool(one.search) for one in running}) == 2
        resumed |= {one for one in engine._slots if one and one.begun} - running
        assert block_table.faults(engine.cache.table) == []
    engines.check_empty(engine)
    assert together
    assert (engine.swaps > 3) == bool(swap_slots)
    wide = [one for one in resumed if one.search and one.params.n > 1]
    assert len(wide) > 2
    assert max(len(one.sequences[0].token_ids) for one in wide) > engine.config.step_tokens / 3
    for request in requests:
        check(request)
    moments.check(engine)
    memory = engine.memory.settle()
    assert sum(memory.slots.values()) == pytest.approx(memory.pool_slots)


@pytest.mark.parametrize("end", ["abort", "stop"])
@pytest.mark.parametrize("stage", ["queued", "running", "preempted"])
def test_ending_a_search_frees_all_and_disturbs_nobody(end: str, stage: str) -> None:
    engine = engines.create(searches=True, model=MODEL)
    params = BeamSearchParams(beam_width=3, max_tokens=11, ignore_eos=True)
    longest = dataclasses.replace(engines.KINDS[1], n=3, max_tokens=11, ignore_eos=True)
    load = [((9, 8, 7, 6, 5), longest), *mixed(7, 15)]
    before = {"queued": 14, "running": 0, "preempted": 1}[stage]  # the two outgrow the pool
    others = [engine.add(*one) for one in load[:before]]
    victim = engine.add([1, 2, 3, 4], params)
    others += [engine.add(*one) for one in load[before:]]
    while stage != "queued":
        engine.advance()
        if victim.begun and any(held and held[0] is victim for held in engine._row) == (
            stage == "running"
        ):
            break
    assert not victim.finished
    drawn = engines.tokens_of(victim)
    if end == "abort" or stage == "queued":
        engine.abort(victim)
        assert {one.finish_reason for one in victim.sequences} == {"abort"}
        assert engines.tokens_of(victim) == drawn
    else:
        engine.stop(victim, victim.sequences[1], 1)
        assert {one.finish_reason for one in victim.sequences} == {"stop"}
        assert engines.tokens_of(victim) == [drawn[0], drawn[1][:1], drawn[2]]
    assert victim not in engine._queue + engine._slots
    assert all(held is None or held[0] is not victim for held in engine._row)
    engines.finish(engine)
    for request in others:
        check(request)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3])
def test_a_prefix_cache_finds_prompts_of_searches(samples: int) -> None:
    """With one sample a request what it draws is found, too."""
    config = dataclasses.replace(engines.CONFIG, prefix_caching=True)
    engine = Engine(MODEL, config, samples=samples)
    params = [BeamSearchParams(beam_width=samples, max_tokens=most) for most in (6, 9, 11)]
    prompt = [1, 2, 3, 4, 5, 6, 7]
    requests: list[Request] = []
    for one in params * 4:
        requests.append(engine.add(prompt[: 3 + len(requests) % 5], one))
        engine.advance()
    while engine.busy:
        engine.advance()
    assert int(engine.hits.new.tokens_hit) > 0
    for request in requests:
        check_search(request)


def test_refusals_name_the_numbers() -> None:
    llm = LLM(MODEL, block_size=4, pool_slots=16, max_length=64, rows=4)
    with pytest.raises(ValueError, match=r"pool_slots: 5 prompt and 4 x 20 output .* need 21"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=20))
    with pytest.raises(ValueError, match="beam_width: expected at most 4 sequences, got 5"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=5))
    with pytest.raises(ValueError, match="beam_width: expected at least 1, got 0"):
        BeamSearchParams(beam_width=0)
