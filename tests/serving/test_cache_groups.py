"""A model of alternating windows on two cache groups: the same tokens out of fewer blocks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import DeviceConfig, EngineConfig, ModelConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table, cache_groups
from paged_jax.memory import rows as memory
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.memory.rows import Rows
from paged_jax.model import weights
from paged_jax.model.weights import Loaded
from paged_jax.serving import batch, cost_model, settings, trace_run, virtual_run
from paged_jax.serving.engine import Engine
from paged_jax.serving.memory_log import MemoryLog
from paged_jax.serving.requests import Request, Sequence
from paged_jax.workload.timed import Timed
from tests.support import decoder as definition
from tests.support import models
from tests.support.moments import Moments

# hf_tiny/gemma2_softcap's, so that it shares programs with random weights.
SHAPE = ModelConfig(
    vocabulary=320,
    width=48,
    layers=4,
    query_heads=6,
    kv_heads=2,
    head_width=16,
    mlp_width=112,
    max_length=512,
    norm_epsilon=1e-6,
    norm_offset=1.0,
    activation="gelu_tanh",
    windows=(16, None, 16, None),
    post_norms=True,
    tied_embedding=True,
    attention_scale=24**-0.5,
    attention_soft_cap=20.0,
    logit_soft_cap=10.0,
    embedding_scale=48**0.5,
)
CONFIG = EngineConfig(
    block_size=4, pool_slots=240, max_length=96, rows=6, step_tokens=16, dispatch_steps=8
)
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, ignore_eos=True)
SAMPLES = 3


@pytest.fixture(scope="module")
def model() -> Loaded:
    return Loaded(config=SHAPE, decoder=models.random_decoder(SHAPE), end_ids=())


def engine_of(model: Loaded, **changes: Any) -> Engine:
    engine = Engine(model, dataclasses.replace(CONFIG, **changes), samples=SAMPLES)
    engine.warm(GREEDY, DRAWN)
    return engine


def load(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose outputs pass the window; a third has three samples."""
    random = np.random.default_rng(seed)
    return [
        (
            random.integers(0, SHAPE.vocabulary, random.integers(1, 30)).tolist(),
            dataclasses.replace(
                DRAWN if number % 2 else GREEDY,
                n=SAMPLES if number % 3 == 2 else 1,
                seed=number,
                max_tokens=int(random.integers(10, 40)),
            ),
        )
        for number in range(count)
    ]


def serve(
    engine: Engine,
    requests: list[tuple[list[int], SamplingParams]],
    between: Callable[[Engine], None] = lambda _: None,
    moments: Moments | None = None,
) -> list[list[list[int]]]:
    """Tokens of each request's samples; ``between`` two dispatches, and nothing is left behind."""
    moments = moments or Moments(engine.memory)
    added = [engine.add(*one) for one in requests]
    while engine.busy:
        engine.advance()
        between(engine)
    moments.check(engine)
    table = engine.cache.table
    assert int(table.pool.used) == 0
    assert block_table.faults(table) == []
    return [[one.token_ids for one in request.sequences] for request in added]


def check_sound(engine: Engine) -> None:
    """No fault, and no row holds more than its window needs between two steps."""
    table = engine.cache.table
    assert block_table.faults(table) == []
    windowed_BM = np.asarray(engine.cache.rows.tables[0])
    held_B = (windowed_BM < table.pool.none).sum(axis=1)
    assert held_B.max() <= 16 // 4 + 1


@pytest.mark.parametrize("swap_slots", [None, 160])
def test_preempted_samples_draw_as_if_alone(model: Loaded, swap_slots: int | None) -> None:
    requests = load(seed=3, count=18)
    engine = engine_of(model, swap_slots=swap_slots)
    assert engine.cache.groups == cache_groups.CacheGroups(
        windows=(16, None), places=((0, 0), (1, 0), (0, 1), (1, 1))
    )
    found = serve(engine, requests, check_sound)
    assert engine.preemptions > 5
    if swap_slots:
        assert engine.swaps > 3
        host = engine.cache.rows.host
        assert host is not None
        assert int(host.table.pool.used) == 0
        assert block_table.faults(host.table) == []
    assert engine.memory.settle().copies > 3
    alone = engine_of(model)
    for tokens, one in zip(found, requests, strict=True):
        assert [tokens] == serve(alone, [one])
    assert alone.preemptions == 0


def check_greedy(model: Loaded, ids: list[int], tokens: list[int]) -> None:
    """Each token is the likeliest by the definition, or as likely to three digits."""
    logits_TV = definition.logits(model.config, definition.weights_of(model.decoder), ids + tokens)
    for place, token in enumerate(tokens, len(ids) - 1):
        assert logits_TV[place, token] >= logits_TV[place].max() - 1e-3


def check_family(folder: Path, windows: tuple[int | None, ...], most: float) -> None:
    """Expected tokens, and more by the definition; at most so much of what all tokens take."""
    model = weights.load(folder)
    expected = json.loads((folder / "expected.json").read_text())
    engine = engine_of(model)
    assert engine.cache.rows.windows == windows
    long = dataclasses.replace(GREEDY, max_tokens=50)
    moments = Moments(engine.memory)
    found = serve(engine, [(ids, long) for ids in expected["ids"]], check_sound, moments)
    for ids, (tokens,), answer in zip(expected["ids"], found, expected["greedy"], strict=True):
        assert tokens[:24] == answer["tokens"]
        check_greedy(model, ids, tokens)
    held = max(moment.used for moment in moments.kept)
    whole = max(int(-(-moment.length_B // 4).sum()) for moment in moments.kept) * len(windows)
    assert held <= most * whole
    use = engine.memory.settle()
    assert use.slot_bytes * len(windows) == cost_model.slot_bytes(model.config)
    filled = sum(use.slots[name] for name in ("token", "reserved", "internal"))
    assert use.entry_slots == pytest.approx(filled)


def test_gemma_draws_what_it_should_out_of_fewer_blocks(shared_data) -> None:
    """At most 56 and 89 tokens at once: 37 blocks that see all, and up to 5 each of the windows."""
    check_family(shared_data("hf_tiny/gemma2_softcap"), (16, None), 0.65)


@pytest.mark.slow
def test_one_window_in_all_layers_releases_too(shared_data) -> None:
    check_family(shared_data("hf_tiny/mistral_window"), (16,), 0.35)


@jax.jit
def poison(cache: Any) -> Any:
    """The cache with NaN in every block that nobody holds."""
    free_N = jnp.tile(cache.table.pool.refcount_N == 0, cache.kv.layers)
    kv_NUKSD = jnp.where(free_N[:, None, None, None, None], jnp.nan, cache.kv.kv_NUKSD)
    return cache.replace(kv=cache.kv.replace(kv_NUKSD=kv_NUKSD))


@jax.jit
def release_early(cache: Any) -> Any:
    """The cache after a release for a window that is one token shorter."""
    early = cache.rows.replace(windows=(15, None)).slide()
    return cache.replace(rows=early.replace(windows=cache.rows.windows))


def test_what_was_released_is_never_read(model: Loaded) -> None:
    requests = load(seed=5, count=6)
    expected = serve(engine_of(model), requests)

    def change(*parts: Callable[[Any], Any]) -> Callable[[Engine], None]:
        def between(engine: Engine) -> None:
            for part in parts:
                engine._batch = engine._batch.replace(cache=part(engine.cache))

        return between

    assert serve(engine_of(model), requests, change(poison)) == expected
    assert serve(engine_of(model), requests, change(release_early, poison)) != expected


SLOW = DeviceConfig(
    name="slow",
    memory_bytes=10**6,
    memory_bandwidth=30_000.0,
    flops=1e30,
    host_bandwidth=1.0,
    launch_seconds=0.125,
)


def at_once(prompt_R: np.ndarray, output_R: np.ndarray) -> Timed:
    count = len(prompt_R)
    return Timed(
        arrival_seconds_R=np.zeros(count),
        prompt_R=prompt_R,
        output_R=output_R,
        number_R=np.arange(count),
    )


def test_virtual_time_takes_the_engines_steps(model: Loaded) -> None:
    random = np.random.default_rng(0)
    requests = at_once(random.integers(1, 30, 24), random.integers(5, 60, 24))
    prompts = [random.integers(0, 320, length).tolist() for length in requests.prompt_R]
    engine = engine_of(model)
    live = trace_run.run(engine, requests, prompts)
    virtual = virtual_run.run(SHAPE, SLOW, engine.config, requests, call_steps=64)
    np.testing.assert_array_equal(virtual.steps.ledger_XJ, live.steps.ledger_XJ)
    np.testing.assert_array_equal(virtual.steps.running_X, live.steps.running_X)
    np.testing.assert_array_equal(virtual.steps.waiting_X, live.steps.waiting_X)
    np.testing.assert_array_equal(virtual.finish_step_R, live.finish_step_R)
    assert (live.steps.ledger_XJ.sum(axis=1) == CONFIG.pool_slots).all()
    assert virtual.preemptions == live.preemptions > 5


grow = jax.jit(lambda rows, tokens_B: rows.slide().reserve(tokens_B)[0])
fork = jax.jit(Rows.fork)
release = jax.jit(Rows.release)
ledger_of = jax.jit(lambda rows, final_B: rows.ledger(final_B, pool_slots=360))


def random_rows(random: np.random.Generator) -> Rows:
    """Rows of two groups that grew and forked, in the middle of a step."""
    rows = memory.create(rows=5, blocks=90, block_size=4, blocks_per_row=9, windows=(None, 6))
    for _ in range(8):
        leaves_B = np.arange(5) == random.integers(5)
        rows = release(rows, leaves_B)
        length_B = np.asarray(rows.length_B)
        forks_B = (length_B == 0) & (random.random(5) < 0.7) & length_B.any()
        rows = fork(rows, np.where(forks_B, length_B.argmax(), 5).astype(np.int32))
        one_B = np.arange(5) == random.integers(5)
        rows = grow(rows, (one_B * random.integers(1, 4)).astype(np.int32))
    return rows


def test_the_logs_ledger_is_the_rows_where_groups_share_blocks() -> None:
    shared = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        rows = random_rows(random)
        table = rows.table
        final_B = np.asarray(rows.length_B) + random.integers(0, 9, 5)
        log = MemoryLog(blocks=90, block_size=4, slot_bytes=1)
        moments = Moments(log)
        owners = [
            (Request(None, [0] * (final + 1), GREEDY, [Sequence()]), 0)
            for final in final_B.tolist()
        ]
        found = jax.device_get(batch.held(table, 5))
        log.append(found, owners)
        (moment,) = moments.kept
        slots, expected = log.ledger(moment), ledger_of(rows, final_B.astype(np.int32))
        assert slots == {name: int(getattr(expected, name)) for name in CATEGORIES}
        assert sum(slots.values()) == 360
        entries = int((np.asarray(table.table_BM) < 90).sum())
        assert log.settle().entry_slots == 4 * entries
        tails = found.tail_B[found.tail_B < 90]
        shared += len({*tails.tolist()}) < len(tails)
    assert shared > 5


def test_a_prompt_is_admitted_by_what_its_windows_hold() -> None:
    """J11: 64 blocks that see all and 13 of a window of 64, in steps of 128 tokens."""
    config = EngineConfig(
        block_size=16, pool_slots=77 * 16, step_tokens=128, max_length=4096, rows=4
    )
    windows, one = (None, 64), SamplingParams(max_tokens=1)
    assert settings.most_blocks(config, windows, 512, 1, 1) == 32 + 13
    settings.check_room(config, windows, 1024, one, 1)
    with pytest.raises(ValueError, match="may need 78 blocks of 16 slots, the pool has 77"):
        settings.check_room(config, windows, 1025, one, 1)
    with pytest.raises(ValueError, match="may need 128 blocks"):
        settings.check_room(config, (None, None), 1024, one, 1)
    # Three samples of 1024 prompt and 1025 output tokens; then of 40 and 9, below the cap.
    assert settings.most_blocks(config, windows, 1024, 1025, 3) == (64 + 3 * 64) + 3 * 13
    assert settings.most_blocks(config, windows, 40, 9, 3) == 2 * (2 + 3)


def test_groups_are_where_windows_release() -> None:
    """Rows in one piece, and blocks that are kept for hits, hold every token in all layers."""
    whole = cache_groups.whole(4)
    assert settings.groups_of(SHAPE, CONFIG) == cache_groups.by_window(SHAPE) != whole
    for settings_ in ({"cache": "dense"}, {"prefix_caching": True}, {"max_length": 16}):
        assert settings.groups_of(SHAPE, dataclasses.replace(CONFIG, **settings_)) == whole
    alike = dataclasses.replace(SHAPE, windows=())
    device = dataclasses.replace(SLOW, memory_bytes=10**7)
    slots = cost_model.pool_slots(alike, device)
    assert cost_model.pool_slots(SHAPE, device) in (2 * slots, 2 * slots + 1)


@pytest.mark.slow
def test_tokens_are_those_of_a_dense_cache(model: Loaded) -> None:
    requests = load(seed=7, count=12)
    dense = Engine(model, dataclasses.replace(CONFIG, cache="dense"), samples=SAMPLES)
    expected = [dense.add(*one) for one in requests]
    for _ in dense.run():
        pass
    tokens = [[one.token_ids for one in request.sequences] for request in expected]
    assert serve(engine_of(model), requests, check_sound) == tokens


@pytest.mark.slow
def test_beams_slide_and_share(model: Loaded) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)
    prompts = [ids for ids, _ in load(seed=9, count=4)]
    served: list[list[Request]] = []
    for cache in ("paged", "dense"):
        engine = Engine(model, dataclasses.replace(CONFIG, cache=cache), samples=3)
        moments = Moments(engine.memory)
        served.append([engine.add(ids, params) for ids in prompts])
        for _ in engine.run():
            pass
        moments.check(engine)
        assert any(moment.passed > 10 for moment in moments.kept) == (cache == "paged")
    for one, other in zip(*served, strict=True):
        assert [x.token_ids for x in one.sequences] == [x.token_ids for x in other.sequences]


@pytest.mark.slow
def test_a_padded_batch_is_refused_by_what_it_computes_at_once() -> None:
    """Else the simulation would wait for ever for blocks that no pool of this size has."""
    requests = at_once(np.array([20, 60]), np.array([5, 30]))
    config = dataclasses.replace(CONFIG, pool_slots=132)
    found = virtual_run.run(SHAPE, SLOW, config, requests, static=True)
    assert set(found.refused) == {1}
    assert virtual_run.run(SHAPE, SLOW, config, requests).refused == {}
