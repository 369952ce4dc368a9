"""Tiles of packed queries: each token in one tile of its own row, at its own position."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import query_tiles
from pallas_kernels.query_tiles import QueryTiles

ROWS, QUERIES = 5, 24  # one shape: one compilation a tile size


def tile_list(
    counts: list[int], lengths: list[int], size: int, align: int
) -> list[tuple[int, int, int, int, int]]:
    """Row, first token, tokens, position and skip of every tile, in order of tokens."""
    tiles, start = [], 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        skip = start % align
        for token in range(start - skip, start + count, size) if count else ():
            here = min(size, start + count - token)
            position = length - count + token - start
            tiles.append((row, token, here, position, max(0, start - token)))
        start += count
    return tiles


def fields(tiles: QueryTiles) -> list[tuple[int, ...]]:
    return list(zip(*(np.asarray(field).tolist() for field in tiles), strict=True))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Queries and length of every row; what is left of ``QUERIES`` is padding."""
    cuts = sorted(draw(st.lists(st.integers(0, QUERIES), min_size=ROWS, max_size=ROWS)))
    counts = [end - start for start, end in itertools.pairwise([0, *cuts])]
    return counts, [count + draw(st.integers(0, 9)) for count in counts]


def starts(counts: list[int]) -> jax.Array:
    return jnp.array([0, *itertools.accumulate(counts)], jnp.int32)


@pytest.mark.parametrize(("size", "align"), [(1, 1), (4, 1), (16, 1), (4, 4), (8, 4)])
@given(batch=batches())
def test_tiles_are_those_of_plain_python(batch, size, align):
    counts, lengths = batch
    tiles = query_tiles.cut(
        starts(counts), jnp.array(lengths, jnp.int32), queries=QUERIES, size=size, align=align
    )
    expected = tile_list(counts, lengths, size, align)
    found = fields(tiles)
    assert found[: len(expected)] == expected
    for row, token, count, _, skip in found[len(expected) :]:
        assert (row, token, count, skip) == (0, sum(counts), 0, 0)


@pytest.mark.parametrize(
    ("counts", "align"), [([1, 1, 1, 1, 13], 1), ([3, 4, 4, 4, 9], 4), ([1, 2, 3, 4, 14], 4)]
)
def test_as_many_tiles_as_a_batch_can_need(counts, align):
    """Rows with as many short tiles as can be, and no padding that would make room for them."""
    length_B = jnp.full(5, 20)
    tiles = query_tiles.cut(starts(counts), length_B, queries=sum(counts), size=4, align=align)
    expected = tile_list(counts, [20] * 5, 4, align)
    assert fields(tiles)[: len(expected)] == expected


@given(batch=batches())
def test_tokens_know_their_row_and_padding_is_nobodys(batch):
    counts, _ = batch
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    padding = [ROWS] * (QUERIES - len(owners))
    row_T = query_tiles.row_of_tokens(starts(counts), QUERIES)
    assert np.asarray(row_T).tolist() == owners + padding
