"""Inputs of paged attention whose answers are known exactly: rational numbers, logarithms.

One head, one value in every lane, scale ``D ** -0.5`` unless said. With q = 0 every logit is 0 and
the output is the plain mean of the visible V: a wrong page or mask shows as a wrong number. Slots
that nobody may read are NaN, tables are not in order. Numbers are those of the project's case list;
where it says a block size of 4, which no kernel serves, a second form with 8 stands beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.attention import Call, problem

WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and, in every lane, what comes back; without ``out_TH`` the definition says it."""

    name: str
    call: Call
    out_TH: Any = None
    lse_TH: Any = None
    splits: int | None = None
    slow: bool = False  # in an interpreter


def exact_cases(dtype: str) -> Iterator[Case]:
    """Cases 1 to 11 and 14 to 18 in a type of queries and, but for 14, of the cache."""
    yield from table_cases(dtype)
    yield from mask_cases(dtype)
    yield from option_cases(dtype)
    yield from batch_cases(dtype)


def table_cases(dtype: str) -> Iterator[Case]:
    """1, 2, 3 and 18: which slots a table names; block 0 is like any other."""
    tails = [[1, 1], [-1, -1], [9, 9], [2**30, -1]]  # block 1 is NaN, 9 is N + 5
    for size, length, mean in ((4, 10, 7.7), (8, 20, 15.9)):
        call = flat(
            dtype,
            table=[*([3, 0, 2, *tail] for tail in tails), [0, 9, 9, 9, 9]],
            lengths=[length] * 4 + [size],
            size=size,
        )
        out, lse = [[mean]] * 4 + [[(size - 1) / 2]], [[math.log(length)]] * 4 + [[math.log(size)]]
        yield Case(f"1, 2 and 18, block size {size}", call, out, lse)
    call = flat(dtype, table=[[1]], lengths=[5], size=16, value=lambda slot: 1.0)
    yield Case("3", call, [[1.0]], [[math.log(5)]])


def mask_cases(dtype: str) -> Iterator[Case]:
    """5 to 9: which tokens a query sees."""
    yield Case("5", ordered(dtype, lengths=[10], window=4), [[7.5]], [[math.log(4)]])
    yield Case("6", ordered(dtype, lengths=[40], window=8), [[35.5]], [[math.log(8)]])
    yield Case(
        "7",
        ordered(dtype, lengths=[64], counts=[64], window=8),
        [[i / 2 if i < 8 else i - 3.5] for i in range(64)],
        [[math.log(min(i + 1, 8))] for i in range(64)],
    )
    call = ordered(dtype, lengths=[5], counts=[2])
    yield Case("8", call, [[1.5], [2.0]], [[math.log(4)], [math.log(5)]])
    call = ordered(dtype, lengths=[37], causal=False)
    yield Case("9", call, [[18.0]], [[math.log(37)]])
    call = ordered(dtype, lengths=[37], counts=[2], causal=False)
    yield Case("9, two queries", call, [[18.0]] * 2, [[math.log(37)]] * 2, slow=True)


def option_cases(dtype: str) -> Iterator[Case]:
    """10, 11 and 14: sinks, ALiBi, scales."""
    for sink, length, out, lse in (
        (0.0, 3, 0.75, math.log(4)),
        (1.5, 0, 0.0, 1.5),
        (-math.inf, 3, 1.0, math.log(3)),
        (-math.inf, 0, 0.0, -math.inf),
    ):
        call = ordered(dtype, lengths=[length], value=lambda token: 1.0)
        call["sinks_H"] = np.array([sink], np.float32)
        yield Case(f"10, sink {sink}, length {length}", call, [[out]], [[lse]])
    call = ordered(dtype, lengths=[3]) | {"alibi_slope_H": np.array([math.log(2)], np.float32)}
    yield Case("11", call, [[10 / 7]], [[math.log(1.75)]])
    yield scale_case(dtype, None, axes=0)
    for cache_dtype, axes in itertools.product(("int8", "float8_e4m3fn", "float8_e5m2"), (1, 3)):
        yield scale_case(dtype, cache_dtype, axes)


def scale_case(dtype: str, cache_dtype: str | None, axes: int) -> Case:
    """14 with scales of so many axes: row 0 has stored V = 16, row 1 keys 0, 8 and values 0, 4."""
    call = flat(dtype, table=[[2], [0]], lengths=[3, 2], size=16, value=lambda slot: 16.0)
    kv_NUKSD = call["kv_NUKSD"].astype(np.float32)
    kv_NUKSD[0, 0, 0, 1, 0] = 8
    kv_NUKSD[0, 1, 0, :2] = [[0], [16]]
    if cache_dtype == "int8":
        kv_NUKSD = np.nan_to_num(kv_NUKSD, nan=-127)
    call["kv_NUKSD"] = kv_NUKSD.astype(jnp.dtype(cache_dtype or dtype))
    call["q_THD"][1, 0, 0] = 1
    shape = {0: (), 1: (1,), 3: (len(kv_NUKSD), 1, 16)}[axes]
    scales = {name: np.full(shape, value, np.float32) for name, value in SCALES.items()}
    if axes == 3:
        for scale in scales.values():
            scale[1] = scale[:, :, 3:] = np.nan
    name = f"14, cache of {cache_dtype or 'floats'}, scales of {axes} axes"
    slow = (cache_dtype, axes) not in ((None, 0), ("int8", 1), ("float8_e4m3fn", 3))
    call |= scales | {"scale": 1.0}
    return Case(name, call, [[4.0], [3.0]], [[math.log(3)], [math.log(4)]], slow=slow)


SCALES = {"k_scale": math.log(3) / 8, "v_scale": 0.25}


def batch_cases(dtype: str) -> Iterator[Case]:
    """4, 15 and 17: rows of nothing, rows of other requests."""
    shape: dict[str, Any] = {"width": WIDTH, "query_heads": 2, "kv_heads": 1, "dtype": dtype}
    for splits in (1, 4, 16):
        call = problem(4, lengths=[0, 5, 0], **shape)
        yield Case(f"4, {splits} splits", call, splits=splits, slow=splits == 4)
    lengths, counts = [20, 9, 37, 1, 0, 0, 0, 0], [1, 0, 5, 1, 0, 0, 0, 0]
    for name, some in (("15", None), ("15, 2 splits", 2)):
        call = problem(15, lengths=lengths, counts=counts, padding=3, **shape)
        yield Case(name, call, splits=some, slow=some is not None)
    for size, length in ((4, 5), (8, 9)):
        table = [[0, 1], [2, 2**30]]
        call = flat(dtype, table=table, lengths=[length, 3], counts=[length, 3], size=size)
        out = [[i / 2] for i in range(length)] + [[2 * size + i / 2] for i in range(3)]
        lse = [[math.log(i + 1)] for i in (*range(length), *range(3))]
        yield Case(f"17, block size {size}", call, out, lse)


def flat(
    dtype: str,
    *,
    table: Sequence[Sequence[int]],
    lengths: Sequence[int],
    size: int,
    counts: Sequence[int] | None = None,
    value: Callable[[int], float] = float,
) -> Call:
    """A pool of 4 blocks with q = 0, K = 0 and V = ``value(slot)`` where a row reads, else NaN."""
    kv_NUKSD = np.full((4, 2, 1, size, WIDTH), np.nan, jnp.dtype(dtype))
    for row, length in enumerate(lengths):
        for token in range(length):
            block, slot = table[row][token // size], token % size
            kv_NUKSD[block, 0, 0, slot] = 0
            kv_NUKSD[block, 1, 0, slot] = value(block * size + slot)
    call = {
        "q_THD": np.zeros((sum(counts or [1] * len(lengths)), 1, WIDTH), jnp.dtype(dtype)),
        "kv_NUKSD": kv_NUKSD,
        "table_BM": np.array(table, np.int32),
        "length_B": np.array(lengths, np.int32),
    }
    if counts is not None:
        call["query_start_P"] = np.cumsum([0, *counts], dtype=np.int32)
    return call


def ordered(dtype: str, *, value: Callable[[int], float] = float, **settings: Any) -> Call:
    """``problem`` with one head, q = 0, K = 0 and V = ``value(token)`` where a query sees it."""
    # Calls of one shape compile once.
    shape: Call = {"query_heads": 1, "kv_heads": 1, "width": WIDTH, "row_blocks": 5, "blocks": 8}
    call = problem(5, dtype=dtype, **shape, **settings)
    call["q_THD"][:] = 0
    kv_NUKSD = call["kv_NUKSD"]
    size = kv_NUKSD.shape[3]
    for row, length in enumerate(call["length_B"]):
        for token in range(length):
            block, slot = call["table_BM"][row, token // size], token % size
            if not 0 <= block < len(kv_NUKSD):
                continue  # behind the window
            kv_NUKSD[block, 0, 0, slot] *= 0
            if not np.isnan(kv_NUKSD[block, 0, 0, slot, 0]):
                kv_NUKSD[block, 1, 0, slot] = value(token)
    return call


def random_f32(width: int = 128) -> Call:
    """Case 19: what a silent bf16 product would show."""
    return problem(19, lengths=[100, 33, 7], width=width, query_heads=2, kv_heads=1)
