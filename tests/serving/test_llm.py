"""``LLM`` on real and random weights: tokens do not depend on cache, batch or block size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import pool
from paged_jax.serving import settings as engine_settings
from paged_jax.serving.engine import Engine
from paged_jax.serving.llm import LLM
from tests.support import decoder as definition
from tests.support import models

PROMPTS = [[3, 14, 15, 9, 26], [5], [35, 8, 9, 7, 9, 3, 2, 38, 46], [60, 0, 60]]
SAMPLED = SamplingParams(n=4, temperature=1.0, top_p=0.95, max_tokens=9, seed=11, logprobs=True)


def slow(value: object) -> object:
    """A parameter that only ``--slow`` runs: each takes programs of its own."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def model():
    return models.tiny(end_ids=(7,))


def tokens(outputs) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture
def shuffled_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every new pool hands its blocks out in a random order."""

    def create(*sizes: int) -> pool.Pool:
        made = create_in_order(*sizes)
        order = np.random.default_rng(0).permutation(made.none)
        return made.replace(queue_N=made.queue_N[order])

    create_in_order = pool.create
    monkeypatch.setattr(pool, "create", create)
    made_before: Any = engine_settings._create_cache
    made_before.clear_cache()
    yield
    made_before.clear_cache()


def served(model, **settings) -> LLM:
    """A small engine. The reference compiles fastest, and attention is not what is tested here."""
    small: dict[str, Any] = {
        "block_size": 4,
        "pool_slots": 1024,
        "max_length": 64,
        "backend": "reference",
    }
    return LLM(model, **small | settings)


@pytest.fixture(scope="module")
def sampled(model):
    """What four requests of four samples draw."""
    return served(model, rows=16).generate(PROMPTS, SAMPLED)


@pytest.mark.parametrize("size", [slow(1), 3, slow(8), slow(16), slow(64)])
@pytest.mark.usefixtures("shuffled_pool")
def test_stories_greedy(size: int, shared_data: Callable[[str], Path]) -> None:
    """All eight texts of 200 tokens in one ragged batch; the pool holds half, so in waves."""
    folder = shared_data("model_stories260k")
    runs = json.loads((folder / "reference_greedy.json").read_text())["runs"]
    llm = LLM(
        folder / "stories260K.bin",
        block_size=size,
        pool_slots=1300,
        max_length=512,
        step_tokens=16,  # one size of a packed step, so one program
    )
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    found = llm.generate([run["prompt"] for run in runs], params)
    assert [output.prompt_ids for output in found] == [tuple(run["prompt_ids"]) for run in runs]
    assert tokens(found) == [[tuple(run["greedy_ids"])] for run in runs]
    for output, run in zip(found, runs, strict=True):
        text = (output.prompt or "") + (output.outputs[0].text or "")
        stop = len(text) if run["stop_index"] is None else len(run["text"])  # the file's text ends
        assert text.strip()[:stop] == run["text"].strip()


@pytest.mark.slow
@pytest.mark.usefixtures("shuffled_pool")
def test_stories_one_at_a_time(shared_data: Callable[[str], Path]) -> None:
    folder = shared_data("model_stories260k")
    runs = json.loads((folder / "reference_greedy.json").read_text())["runs"]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for cache in ("paged", "dense"):
        llm = LLM(folder / "stories260K.bin", cache=cache, max_length=512, dispatch_steps=199)
        for run in runs:
            assert tokens(llm.generate(run["prompt_ids"], params)) == [[tuple(run["greedy_ids"])]]


def test_tokens_do_not_depend_on_the_cache(model, sampled) -> None:
    assert len({output for group in tokens(sampled) for output in group}) > 12
    dense = served(model, rows=16, cache="dense").generate(PROMPTS, SAMPLED)
    assert tokens(dense) == tokens(sampled)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 4, "backend": "xla"},  # a request at a time
        # Prompts in pieces, and requests that are preempted.
        {"rows": 8, "block_size": 3, "pool_slots": 60, "step_tokens": 8, "dispatch_steps": 2},
    ],
    ids=["alone", "preempted"],
)
def test_tokens_do_not_depend_on_the_batch(model, sampled, settings) -> None:
    assert tokens(served(model, **settings).generate(PROMPTS, SAMPLED)) == tokens(sampled)


def test_each_sequence_equals_its_own_run(model) -> None:
    """Sequence i of a request draws with the key of (seed, i), whoever its siblings are."""
    engine = Engine(model, served(model, rows=16).config, samples=4)
    together, fewer = (
        engine.add(PROMPTS[2], dataclasses.replace(SAMPLED, n=count)) for count in (4, 2)
    )
    for _ in engine.run():
        pass
    expected = [sequence.token_ids for sequence in together.sequences[:2]]
    assert [sequence.token_ids for sequence in fewer.sequences] == expected
    assert len({tuple(sequence.token_ids) for sequence in together.sequences}) == 4


def test_samples_store_their_prompt_once(model) -> None:
    engine = Engine(model, served(model, rows=16).config, samples=4)
    engine.add(list(range(18)), dataclasses.replace(SAMPLED, max_tokens=3, ignore_eos=True))
    for _ in engine.run():
        pass
    memory = engine.memory.settle()
    # Blocks of 4: 18 tokens fill 4 and half of a fifth, once, in the first sample's name. After
    # that step all four share five blocks; three copy the fifth, and the third step fills them.
    tokens_held = [18, 4 * 4 + 4 * 3, 4 * 4 + 4 * 4]
    assert memory.slots["token"] == pytest.approx(sum(tokens_held) / 3)
    assert memory.saved_slots == pytest.approx((3 * 4 + 3 * 4) * 4 / 3)
    assert memory.copies == 3
    assert sum(memory.slots.values()) == memory.pool_slots


def test_stop_strings_end_tokens_and_streams(shared_data: Callable[[str], Path]) -> None:
    llm = LLM(
        shared_data("model_stories260k/stories260K.bin"),
        dispatch_steps=8,
        max_length=256,
        backend="reference",
    )
    greedy = SamplingParams(temperature=0, max_tokens=60)
    whole = llm.generate("Once upon a time", greedy)[0].outputs[0]
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == 60
    stopped = SamplingParams(temperature=0, max_tokens=60, stop=("park", "zebra"))
    output = llm.generate("Once upon a time", stopped)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert whole.text is not None
    assert output.text == whole.text[: whole.text.index("park")]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    *pieces, last = llm.stream("Once upon a time", stopped)
    assert "".join(map(str, pieces)) == output.text
    assert not isinstance(last, str)
    assert last.outputs[0] == output
    assert len(pieces) > 1
    ended = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=(whole.token_ids[5],))
    output = llm.generate("Once upon a time", ended)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[5]) + 1]


def test_log_probabilities_are_the_models_own(model, sampled) -> None:
    output = sampled[0].outputs[1]
    ids = [*PROMPTS[0], *output.token_ids]
    logits = definition.logits(model.config, definition.weights_of(model.decoder), ids)
    assert output.logprobs is not None
    for place, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = logits[len(PROMPTS[0]) - 1 + place]
        assert logprob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-3)
    assert output.cumulative_logprob == pytest.approx(sum(output.logprobs))


@pytest.mark.parametrize(
    ("settings", "prompts", "params", "message"),
    [
        ({}, [[1] * 60], {"max_tokens": 10}, "60 tokens and 10 to come pass the context of 64"),
        ({"pool_slots": 8}, [[1] * 9], {"max_tokens": 2}, "pool_slots"),
        ({}, [[]], {}, "no tokens"),
        ({}, [[61]], {}, "token 61"),
        ({}, ["text"], {}, "no tokenizer"),
        ({"rows": 2}, [[1]], {"n": 3}, "rows"),
        ({}, [[1]], {"stop": ("x",)}, "stop"),
        ({}, [], {}, "prompts"),
        ({}, [[1]], {"stop_token_ids": tuple(range(9))}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_named(model, settings, prompts, params, message) -> None:
    with pytest.raises(ValueError, match=message):
        served(model, **settings).generate(prompts, SamplingParams(**params))


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "sparse"},
        {"kv_dtype": "int3"},
        {"cache": "dense", "kv_dtype": "int8"},
        {"block_size": 0},
        {"pool_slots": 3},
        {"beams": 3},
    ],
)
def test_settings_that_do_not_go_are_named(model, settings) -> None:
    with pytest.raises(ValueError, match=next(reversed(settings))):
        served(model, **settings)


@pytest.mark.parametrize("kv_dtype", [slow("bf16"), "int8", slow("fp8_e4m3")])
def test_smaller_caches_say_nearly_the_same(model, sampled, kv_dtype) -> None:
    found = served(model, rows=16, kv_dtype=kv_dtype).generate(PROMPTS, SAMPLED)
    pairs = [
        (one, other)
        for group, others in zip(tokens(sampled), tokens(found), strict=True)
        for one, other in zip(group, others, strict=True)
    ]
    assert sum(one == other for one, other in pairs) >= 8
    assert found[0].memory.slot_bytes < sampled[0].memory.slot_bytes
