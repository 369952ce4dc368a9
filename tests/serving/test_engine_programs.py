"""What an engine compiles, and that device and host meet nowhere but at a dispatch's end."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.decoding import sampling
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.model.weights import Loaded
from paged_jax.serving import beam_search, dispatch, entries, llm, memory_log
from paged_jax.serving import engine as engine_module
from paged_jax.serving.device_reads import DeviceReads
from paged_jax.serving.engine import Engine
from tests.support import backends, engines, models
from tests.support import decoder as definition

TRANSFER = re.compile(r"callback|infeed|outfeed|\bsend\b|\brecv\b", re.IGNORECASE)


@pytest.fixture(params=[False, True], ids=["samples", "searches"])
def searches(request: pytest.FixtureRequest) -> bool:
    """Whether an engine is used for beam search beside sampling."""
    return request.param


def transfers(engine: Engine) -> list[str]:
    """Where a decode dispatch talks to the host, by its jaxpr and by what XLA made of it."""
    traced = engine.trace_decode(engines.KINDS[0])
    text = traced.lower().compile().as_text()
    assert text is not None
    assert "while" in text
    return [*map(str, traced.jaxpr.effects), *TRANSFER.findall(text)]


def test_a_dispatch_does_not_talk_to_the_host(searches: bool) -> None:
    assert transfers(engines.create(searches=searches)) == []


def test_a_print_within_a_dispatch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(logits_BV: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
        jax.debug.print("{}", logits_BV[0, 0])
        return sample_in_silence(logits_BV, *rest)

    sample_in_silence = sampling.sample
    monkeypatch.setattr(sampling, "sample", sample)
    # A static argument of its own, so that no program of another test is found or left behind.
    config = dataclasses.replace(engines.CONFIG, dispatch_steps=3)
    found = transfers(Engine(engines.MODEL, config, samples=engines.SAMPLES))
    assert "Debug" in found[0]
    assert any("callback" in one for one in found[1:])


class HostNumPy:
    """NumPy, which reads a device array's memory without the array's knowing."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function

        def watched(*given: Any, **options: Any) -> Any:
            if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((given, options))):
                self.found.append(f"np.{name}")
            return function(*given, **options)

        return watched


@pytest.fixture
def unowned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reads of device arrays that do not go through ``DeviceReads``, as they happen."""
    owned, found = [False], list[str]()
    read_as_ever, array_type = DeviceReads.__call__, type(jnp.zeros(1))

    def read(reads: DeviceReads, tree: Any) -> Any:
        owned[0] = True
        read = read_as_ever(reads, tree)
        owned[0] = False
        return read

    def spy(name: str) -> Any:
        known = getattr(array_type, name)
        read = known.__get__ if isinstance(known, property) else known

        def watched(array: jax.Array, *rest: Any, **options: Any) -> Any:
            if not owned[0]:
                found.append(name)
            return read(array, *rest, **options)

        return property(watched) if isinstance(known, property) else watched

    monkeypatch.setattr(DeviceReads, "__call__", read)
    # int, bool, float, an index, a format: all of them come to `_value`.
    for name in ("_value", "__array__", "__iter__", "item", "block_until_ready"):
        monkeypatch.setattr(array_type, name, spy(name))
    for module in (engine_module, beam_search, entries, memory_log):
        monkeypatch.setattr(module, "np", HostNumPy(found))
    return found


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that an engine dispatches and has to hear back from."""
    made: list[str] = []

    def noting(name: str, program: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            made.append(name)
            return program(*given, **options)

        return run

    for name in ("decode", "plan", "compute"):
        monkeypatch.setattr(dispatch, name, noting(name, getattr(dispatch, name)))
    return made


def serve_six(engine: Engine, *, searches: bool = False) -> None:
    """As many sequences as rows, that decode most of the time; with ``searches`` half are beams."""
    for number in range(6 - 3 * searches):
        engine.add([number], dataclasses.replace(engines.KINDS[number % 3], max_tokens=6))
    if searches:
        engine.add([3], dataclasses.replace(engines.SEARCH, max_tokens=6))
    for _ in engine.run():
        pass


def test_one_read_a_dispatch_and_no_other(
    unowned: list[str], dispatches: list[str], searches: bool
) -> None:
    engine = engines.create(searches=searches)
    dispatches.clear()
    unowned.clear()
    before = engine.reads.count
    serve_six(engine, searches=searches)
    engine.abort(engine.add([1], engines.KINDS[0]))
    reads = engine.reads.count - before
    assert reads == len(dispatches)
    assert dispatches == ["plan", "compute", "decode"]
    assert engine.memory.count == 6
    assert unowned == []


@pytest.mark.parametrize("fault", ["a read a step", "int", "np.asarray"])
def test_more_reads_are_found(
    monkeypatch: pytest.MonkeyPatch, unowned: list[str], dispatches: list[str], fault: str
) -> None:
    engine = engines.create()
    if fault == "a read a step":
        call = Engine._call

        def one_step(self: Engine, decode: Any, _: int, rows: int) -> Any:
            return call(self, decode, 1, rows)

        monkeypatch.setattr(Engine, "_call", one_step)
    else:
        collect = Engine._collect

        def spied(self: Engine, *drawn: Any) -> Any:
            _ = (int if fault == "int" else engine_module.np.asarray)(self.cache.copies)
            return collect(self, *drawn)

        monkeypatch.setattr(Engine, "_collect", spied)
    dispatches.clear()
    unowned.clear()
    before = engine.reads.count
    serve_six(engine)
    if fault == "a read a step":
        assert engine.reads.count - before > 6
    else:
        assert unowned
        assert len(unowned) == engine.memory.count


@pytest.mark.parametrize("module", [engine_module, beam_search, entries, llm, memory_log, dispatch])
def test_no_other_module_of_serving_fetches(module: Any) -> None:
    names = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
    }
    fetches = {"device_get", "block_until_ready", "copy_to_host_async", "from_dlpack"}
    assert names.isdisjoint(fetches)


def test_a_trace_compiles_few_programs_and_none_late(searches: bool) -> None:
    """Making and warming an engine compiles all that 60 requests of all kinds need."""
    sizes = [len(dispatch.sizes(one.step_tokens)) for one in (engines.CONFIG, EngineConfig())]
    assert sizes == [1, 3]
    assert len(engines.first_compilations(searches)) + sizes[1] - sizes[0] <= 16
    engine = engines.create(searches=searches)
    load: list[Any] = [*engines.random_requests(21, 60, prompt=20, output=11)]
    if searches:  # instead of what had three samples
        wide = {number: one for number, one in enumerate(load) if one[1].n == 3}
        for number, (prompt, params) in wide.items():
            ways = {"max_tokens": params.max_tokens, "length_penalty": number % 3}
            load[number] = prompt, dataclasses.replace(engines.SEARCH, **ways)
    kept: list[int] = []
    with engines.compilations() as names:
        requests = [engine.add(*one) for one in load]
        for dispatched, _ in enumerate(engine.run()):
            if dispatched % 9 == 8:
                engine.abort(requests[dispatched // 9 % 60])
            kept.append(engine.memory.pending)
    assert names == []
    assert engine.preemptions
    engines.check_empty(engine)
    engine.memory.sweep()
    assert engine.memory.pending == 0
    assert max(kept) < engine.memory.count / 2


def test_a_program_for_each_number_of_requests_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(self: Engine, new: list[int]) -> None:
        jnp.zeros(len(self._slots), bool).at[np.array(new, int)].set(True)
        enter_as_ever(self, new)

    enter_as_ever = Engine._enter
    monkeypatch.setattr(Engine, "_enter", enter)
    engine = engines.create()
    with engines.compilations() as names:
        for count in (3, 5):
            for number in range(count):
                engine.add([number], dataclasses.replace(engines.KINDS[0], max_tokens=2))
            for _ in engine.run():
                pass
    assert "jit(scatter)" in names


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (16, [16]), (17, [16, 17]), (256, [16, 64, 256])]
)
def test_packed_steps_come_in_few_sizes(most: int, expected: list[int]) -> None:
    assert dispatch.sizes(most) == expected
    for total in range(1, most + 1):
        token_T, start_P = dispatch.pack({2: [*range(total)]}, 4, most)
        assert len(token_T) == min(size for size in expected if size >= total)
        assert token_T.tolist() == [*range(total)] + [0] * (len(token_T) - total)
        assert start_P.tolist() == [0, 0, 0, total, total]


KERNEL_MODEL = dataclasses.replace(
    models.TINY, width=64, query_heads=2, kv_heads=1, head_width=64, mlp_width=64, dtype="bfloat16"
)


PROMPTS = [[3, 14, 15, 9, 26], [5], [35, 8, 9, 7, 9, 3, 2, 38, 46, 1], [60, 0, 60]]


@functools.cache
def kernel_model() -> Loaded:
    return Loaded(config=KERNEL_MODEL, decoder=models.random_decoder(KERNEL_MODEL), end_ids=())


@functools.cache
def served(backend: str) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log probabilities, of four requests in eight steps."""
    config = EngineConfig(
        block_size=8,
        pool_slots=128,
        max_length=24,
        rows=4,
        step_tokens=32,
        dispatch_steps=8,
        backend=backend,
        interpret=backend in backends.INTERPRETERS,
    )
    engine = Engine(kernel_model(), config)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    requests = [engine.add(prompt, greedy) for prompt in PROMPTS]
    engines.finish(engine)
    assert engine.memory.count == 8
    return [(one.sequences[0].token_ids, one.sequences[0].logprobs) for one in requests]


@pytest.mark.parametrize(
    "backend",
    [
        "mosaic_tpu",
        pytest.param("mosaic_gpu", marks=pytest.mark.slow),
        pytest.param("xla", marks=pytest.mark.slow),
    ],
)
def test_kernels_serve_by_the_definition(backend: str) -> None:
    """In bf16, whose rounding costs a log probability 0.013; a softmax scale of 1.1 costs 0.08."""
    model = kernel_model()
    weights = definition.weights_of(model.decoder)
    for prompt, (tokens, logprobs) in zip(PROMPTS, served(backend), strict=True):
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            logit_V = definition.logits(model.config, weights, prompt + tokens[:place])[-1]
            assert logit_V.max() - logit_V[token] < 0.03
            assert abs(logit_V[token] - np.log(np.exp(logit_V).sum()) - logprob) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(backends.INTERPRETERS))
def test_kernels_draw_what_xla_draws(backend: str) -> None:
    assert [tokens for tokens, _ in served(backend)] == [tokens for tokens, _ in served("xla")]
