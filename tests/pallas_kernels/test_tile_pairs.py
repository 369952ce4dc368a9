"""Pairs of tiles: those with something to do, each once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import problem as problems
from pallas_kernels import tile_pairs
from pallas_kernels.problem import Operands, Problem
from tests.support.attention import owners, sees

ROWS, QUERIES, ROW_BLOCKS, BLOCK_SIZE = 4, 16, 6, 2  # one shape: one compilation an option

Batch = tuple[list[int], list[int]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Queries and length of every row; what is left of ``QUERIES`` is padding."""
    cuts = sorted(draw(st.lists(st.integers(0, 12), min_size=ROWS, max_size=ROWS)))
    counts = [end - start for start, end in itertools.pairwise([0, *cuts])]
    most = ROW_BLOCKS * BLOCK_SIZE
    return counts, [draw(st.sampled_from([0, *range(count, most + 1)])) for count in counts]


def call(
    start_P: Any, length_B: Any, options: dict[str, Any], queries: int = QUERIES
) -> tuple[Operands, Problem]:
    unused: dict[str, Any] = dict.fromkeys(
        ("scale", "window", "soft_cap", "sinks_H", "alibi_slope_H", "k_scale", "v_scale")
    )
    return problems.check(
        jnp.zeros((queries, 1, 2)),
        jnp.zeros((1, 2, 1, BLOCK_SIZE, 2)),
        jnp.zeros((ROWS, ROW_BLOCKS), jnp.int32),
        length_B,
        start_P,
        **(unused | {"causal": True, "draft_mask_TQ": None} | options),
    )


def starts(counts: list[int]) -> np.ndarray:
    return np.array([0, *itertools.accumulate(counts)], np.int32)


Listed = list[tuple[int, int, int]]  # row, first token and key tile of pairs


def lister(options: dict[str, Any], size: int, tokens: int) -> Callable[[Batch], Listed]:
    @jax.jit
    def columns(start_P: jax.Array, length_B: jax.Array) -> tuple[jax.Array, ...]:
        operands, problem = call(start_P, length_B, options)
        tiles = tile_pairs.cut(operands, problem, size)
        pairs = tile_pairs.every_pair(tiles, tokens)
        number = jnp.arange(QUERIES * ROW_BLOCKS, dtype=jnp.int32)
        tile, key = jax.vmap(pairs.at)(number)
        busy = tile < len(tiles.row_I) - 1
        return busy, number < pairs.end_I[-1], tiles.row_I[tile], tiles.token_IQ[tile, 0], key

    def listed(batch: Batch) -> Listed:
        found = columns(starts(batch[0]), np.array(batch[1], np.int32))
        busy, listed, *where = (np.asarray(column) for column in found)
        assert (busy == listed).all(), "numbers past the last pair are the idle tile's"
        return list(zip(*(column[listed].tolist() for column in where), strict=True))

    return listed


def expected(batch: Batch, size: int, tokens: int, options: dict[str, Any]) -> Listed:
    """All pairs in which a query sees a key, drafts apart."""
    counts, lengths = batch
    causal, window = options.get("causal", True), options.get("window")
    return [
        (row, token, key)
        for row, (first, last) in enumerate(owners(QUERIES, starts(counts)))
        for token in range(first, last, size)
        for key in range(-(-ROW_BLOCKS * BLOCK_SIZE // tokens))
        if any(
            position < lengths[row]
            and sees(position, lengths[row] - last + query, causal=causal, window=window)
            for query in range(token, min(token + size, last))
            for position in range(key * tokens, (key + 1) * tokens)
        )
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 5},
    {"window": 3, "causal": False},
    {"draft_mask_TQ": jnp.zeros((QUERIES, 12), bool)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "causal")
@pytest.mark.parametrize(("size", "tokens"), [(1, 4), (4, 2)])
def test_pairs_are_those_of_plain_python(options, size, tokens):
    listed = lister(options, size, tokens)

    @given(batch=batches())
    @hypothesis.settings(max_examples=30)
    def check(batch):
        assert listed(batch) == expected(batch, size, tokens, options)

    check()


def test_tiles_hold_every_token_once():
    operands, problem = call(starts([5, 0, 1, 7]), np.array([5, 0, 9, 12]), {})
    token_IQ = np.asarray(tile_pairs.cut(operands, problem, 4).token_IQ)
    assert sorted(token_IQ[token_IQ < QUERIES]) == list(range(13))
    assert (token_IQ[-1] == QUERIES).all(), "the last tile is idle"


def test_steps_take_every_pair_once():
    operands, problem = call(starts([4, 4, 4, 4]), np.array([4, 8, 8, 12]), {})
    pairs = tile_pairs.every_pair(tile_pairs.cut(operands, problem, 4), 4)

    def count(number: jax.Array, seen_Z: jax.Array) -> jax.Array:
        return seen_Z.at[number].add(1)

    seen_Z = tile_pairs.for_each(pairs, 3, count, jnp.zeros(12, jnp.int32))
    assert np.asarray(seen_Z).tolist() == [1] * 9 + [0] * 3  # 1 + 2 + 2 + 3 pairs, 3 a step


def test_a_decode_step_has_a_tile_a_row_and_an_idle_one():
    operands, problem = call(None, np.full(ROWS, 3), {}, queries=ROWS)
    assert len(tile_pairs.cut(operands, problem, 1).row_I) == ROWS + 1
