"""Drawn shapes, ragged lengths, options and types: every back end within the tolerance rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from pallas_kernels.ops import BACKENDS
from tests.support import attention, backends
from tests.support.attention import Call, problem

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    backend: {"block_size": (8, 16, 48), "width": (64, 128)}
    if backend in backends.INTERPRETERS
    else {"block_size": (1, 3, 8, 16), "width": (8, 24, 64)}
    for backend in BACKENDS
}
# Shapes and options that stay, so that an example costs no compilation.
ROOM: Call = {"width": 64, "block_size": 8, "row_blocks": 7, "blocks": 26}
FIXED: dict[str, Call] = {
    "decode": {},
    "decode, window": {"window": 11, "sinks": True, "kv_heads": 1},
    "ragged": {},
    "ragged, options": {"window": 11, "alibi": True, "soft_cap": 3.0, "sinks": True},
}
ROWS, QUERIES, LONGEST = 4, 16, 48


@st.composite
def rows(draw: st.DrawFn, ragged: bool, *, longest: int, most: int = ROWS) -> Call:
    """Lengths, and in ragged form queries: at most as many as tokens, any number of no tokens."""
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))
    if not ragged:
        return {"lengths": lengths}
    counts, room = [], QUERIES
    for length in lengths:
        counts.append(draw(st.integers(0, min(length or 2, room))))
        room -= counts[-1]
    return {"lengths": lengths, "counts": counts, "padding": room}


@st.composite
def options(draw: st.DrawFn, backend: str, ragged: bool) -> Call:
    """Everything that is static but the sizes of rows."""
    sizes = {name: draw(st.sampled_from(values)) for name, values in SIZES[backend].items()}
    kv_heads = draw(st.integers(1, 3))
    chosen: Call = {
        **sizes,
        "kv_heads": kv_heads,
        "query_heads": kv_heads * draw(st.integers(1, 6)),
        "dtype": draw(st.sampled_from(types(backend))),
        "window": draw(st.none() | st.integers(1, 40)),
        "soft_cap": draw(st.none() | st.sampled_from([1.0, 5.0])),
        "scale": draw(st.none() | st.sampled_from([0.05, 0.3])),
        "causal": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "draft": ragged and draw(st.booleans()),
    }
    chosen["cache_dtype"] = draw(st.sampled_from((chosen["dtype"], *QUANTISED)))
    kinds = st.sampled_from(["scalar", "head", "slot"])
    if chosen["cache_dtype"] in QUANTISED or draw(st.booleans()):
        chosen |= {"k_scale": draw(kinds), "v_scale": draw(kinds)}
    return chosen


def types(backend: str) -> list[str]:
    if backend in backends.INTERPRETERS:
        return sorted(set().union(*backends.PROMISED[backend]))
    return ["float32", "bfloat16", "float16"]


def check(backend: str, settings: Call, seed: int) -> None:
    question = problem(seed, **settings)
    result = backends.attempt(question, backend)
    assert result is not None
    assert not attention.faults(result, question)


def drawn(backend: str, data: st.DataObject) -> None:
    ragged = data.draw(st.booleans())
    settings = data.draw(options(backend, ragged))
    longest = min(LONGEST, 6 * settings["block_size"])
    check(
        backend, settings | data.draw(rows(ragged, longest=longest)), data.draw(st.integers(0, 99))
    )


def examples(few: dict[str, int]) -> pytest.MarkDecorator:
    """Back ends with a number of examples each: what compiles or interprets is slow."""
    return pytest.mark.parametrize(("backend", "examples"), few.items(), ids=list(few))


def explore(check: Callable[[st.DataObject], None], examples: int) -> None:
    hypothesis.settings(max_examples=examples)(hypothesis.given(data=st.data())(check))()


@examples({"reference": 15, "xla": 8, "mosaic_gpu": 3, "mosaic_tpu": 3})
def test_drawn_problems(backend, examples):
    explore(lambda data: drawn(backend, data), examples)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_drawn_problems(backend):
    explore(lambda data: drawn(backend, data), 100)


@pytest.mark.parametrize("name", ["decode", "ragged"])
@examples({"reference": 25, "xla": 25})
def test_drawn_lengths(backend, examples, name):
    explore(lambda data: lengths(backend, name, data), examples)


@pytest.mark.parametrize("name", ["decode, window", "ragged, options"])
@examples({"reference": 25, "xla": 25, "mosaic_gpu": 4, "mosaic_tpu": 4})
def test_drawn_lengths_with_options(backend, examples, name):
    explore(lambda data: lengths(backend, name, data), examples)


def lengths(backend: str, name: str, data: Any) -> None:
    """One shape: as many rows as there is room for, of any length and number of queries."""
    some = data.draw(rows("ragged" in name, longest=LONGEST))
    some["lengths"] += [0] * (ROWS - len(some["lengths"]))
    if "counts" in some:
        some["counts"] += [0] * (ROWS - len(some["counts"]))
    settings = ROOM | FIXED[name] | {"dtype": backends.DTYPE[backend]}
    check(backend, settings | some, data.draw(st.integers(0, 99)))
