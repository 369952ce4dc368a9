"""Paged attention in float64 NumPy, token by token, and the rule that says who is close enough.

``attend`` is the definition: loops over rows, queries and heads, each token's key and value looked
up through the table where a query sees it and nowhere else. ``naive`` is the yardstick: what a
dense product, softmax, product gives when every operation stores its result in the queries' type.
A back end may err at most twice as much as it (``faults``). A *call* is a dictionary of
``paged_attention``'s arguments, so that ``attend(**call)`` and ``paged_attention(**call)`` are the
same question.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

Call = dict[str, Any]
Result = tuple[np.ndarray, np.ndarray]


def attend(
    q_THD: Any,
    kv_NUKSD: Any,
    table_BM: Any,
    length_B: Any,
    query_start_P: Any = None,
    *,
    scale: float | None = None,
    sinks_H: Any = None,
    alibi_slope_H: Any = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    window: int | None = None,
    draft_mask_TQ: Any = None,
) -> Result:
    """Output [T, H, D] and natural-log normaliser [T, H], float64."""
    q_THD = np.asarray(q_THD).astype(np.float64)
    tokens, heads, width = q_THD.shape
    sinks = [-math.inf] * heads if sinks_H is None else [float(sink) for sink in sinks_H]
    scale = 1 / math.sqrt(width) if scale is None else scale
    out_THD, lse_TH = np.zeros(q_THD.shape), np.empty((tokens, heads))
    lse_TH[:] = sinks
    for row, (first, last) in enumerate(owners(tokens, query_start_P)):
        cache = Row(kv_NUKSD, table_BM[row], k_scale, v_scale)
        for query in range(first, last):
            position = int(length_B[row]) - last + query
            seen = [
                token
                for token in range(int(length_B[row]))
                if sees(token, position, causal=causal, window=window)
                and drafted(draft_mask_TQ, query, token - (int(length_B[row]) - (last - first)))
            ]
            for head in range(heads):
                kv_head = head * cache.heads // heads
                logits = [sinks[head]]
                for token in seen:
                    logit = scale * float(cache.key(token, kv_head) @ q_THD[query, head])
                    if soft_cap is not None:
                        logit = soft_cap * math.tanh(logit / soft_cap)
                    if alibi_slope_H is not None:
                        logit += float(alibi_slope_H[head]) * (token - position)
                    logits.append(logit)
                highest = max(logits)
                if highest == -math.inf:
                    continue
                weights = [math.exp(logit - highest) for logit in logits]
                lse_TH[query, head] = highest + math.log(sum(weights))
                for weight, token in zip(weights[1:], seen, strict=True):
                    out_THD[query, head] += weight / sum(weights) * cache.value(token, kv_head)
    return out_THD, lse_TH


def owners(tokens: int, query_start_P: Any) -> list[tuple[int, int]]:
    """First query and one past the last, of every row."""
    starts = range(tokens + 1) if query_start_P is None else [int(at) for at in query_start_P]
    return list(itertools.pairwise(starts))


def sees(token: int, position: int, *, causal: bool, window: int | None) -> bool:
    """Whether a query at ``position`` sees a stored token."""
    return not (causal and token > position) and not (window and token <= position - window)


def drafted(draft_mask_TQ: Any, query: int, nth: int) -> bool:
    """Whether the draft lets a query see the ``nth`` query token of its row; before: always."""
    return draft_mask_TQ is None or nth < 0 or bool(draft_mask_TQ[query][nth])


class Row:
    """Keys and values of one row's tokens, found through its table."""

    def __init__(self, kv_NUKSD: Any, table_M: Any, k_scale: Any, v_scale: Any) -> None:
        self.kv_NUKSD, self.table_M = np.asarray(kv_NUKSD), table_M
        self.scales = (k_scale, v_scale)
        self.heads, self.block_size = self.kv_NUKSD.shape[2:4]
        self.read: dict[tuple[int, int, int], np.ndarray] = {}

    def key(self, token: int, head: int) -> np.ndarray:
        return self._read(0, token, head)

    def value(self, token: int, head: int) -> np.ndarray:
        return self._read(1, token, head)

    def _read(self, side: int, token: int, head: int) -> np.ndarray:
        if (side, token, head) not in self.read:
            block, slot = int(self.table_M[token // self.block_size]), token % self.block_size
            assert 0 <= block < len(self.kv_NUKSD), "the problem is wrong, not the back end"
            stored = self.kv_NUKSD[block, side, head, slot].astype(np.float64)
            scale = self.scales[side]
            if scale is not None and np.ndim(scale):
                scale = scale[head] if np.ndim(scale) == 1 else scale[block][head][slot]
            self.read[side, token, head] = stored if scale is None else stored * float(scale)
        return self.read[side, token, head]


def naive(call: Call) -> Result:
    """Dense attention in the queries' type: every result is rounded to it, softmax is in f32."""
    call = {"scale": None, "causal": True, "window": None, "soft_cap": None, **call}
    q_THD = np.asarray(call["q_THD"])
    dtype, (tokens, heads, width) = q_THD.dtype, q_THD.shape
    wide = np.promote_types(np.float32, dtype if dtype.itemsize > 2 else np.float32)
    scale = width**-0.5 if call["scale"] is None else call["scale"]

    def rounded(array: Any) -> np.ndarray:
        return np.asarray(array, wide).astype(dtype).astype(wide)

    sinks_H = np.asarray(call.get("sinks_H", [-np.inf] * heads), wide)
    out_THD = np.zeros(q_THD.shape, wide)
    lse_TH = np.broadcast_to(sinks_H, (tokens, heads)).copy()
    for row, (first, last) in enumerate(owners(tokens, call.get("query_start_P"))):
        length = int(call["length_B"][row])
        cache = Row(
            call["kv_NUKSD"], call["table_BM"][row], call.get("k_scale"), call.get("v_scale")
        )
        for query in range(first, last):
            position = length - last + query
            seen = [
                token
                for token in range(length)
                if sees(token, position, causal=call["causal"], window=call["window"])
                and drafted(call.get("draft_mask_TQ"), query, token - (length - (last - first)))
            ]
            for head in range(heads if seen else 0):
                kv_head = head * cache.heads // heads
                k = rounded([cache.key(token, kv_head) for token in seen])
                v = rounded([cache.value(token, kv_head) for token in seen])
                logit = rounded(rounded(k @ q_THD[query, head].astype(wide)) * wide.type(scale))
                if call["soft_cap"] is not None:
                    cap = wide.type(call["soft_cap"])
                    logit = rounded(cap * rounded(np.tanh(rounded(logit / cap))))
                if "alibi_slope_H" in call:
                    slope = wide.type(call["alibi_slope_H"][head])
                    logit = rounded(logit + rounded(slope * (np.asarray(seen, wide) - position)))
                highest = max(logit.max(), sinks_H[head])
                weight = np.exp(logit - highest)
                total = weight.sum() + np.exp(sinks_H[head] - highest)
                out_THD[query, head] = rounded(rounded(weight / total) @ v)
                lse_TH[query, head] = rounded(highest + np.log(total))
    return out_THD, lse_TH


def faults(result: Any, call: Call, *, factor: float | None = None) -> list[str]:
    """What is wrong with a back end's ``(out_THD, lse_TH)``, in words; empty if nothing is.

    Largest error at most ``factor`` times the naive one's (2; soft cap 3; fp8 cache 4) + 1e-5, mean
    error at most 1.5 times + 1e-5; 0 and -inf where the definition says nothing is seen.
    """
    if factor is None:
        fp8 = np.asarray(call["kv_NUKSD"]).dtype.name.startswith("float8")
        factor = 4 if fp8 else 3 if call.get("soft_cap") is not None else 2
    found = []
    parts = zip(("output", "lse"), result, naive(call), attend(**call), strict=True)
    for name, given, yardstick, exact in parts:
        value = np.asarray(given).astype(np.float64)
        if value.shape != exact.shape:
            found.append(f"{name}: shape {value.shape}, expected {exact.shape}")
            continue
        sure = np.isfinite(exact) if name == "lse" else exact != 0
        if not np.array_equal(value[~sure], exact[~sure]):
            found.append(f"{name}: {value[~sure]} where nothing is seen")
        error = np.abs(value[sure] - exact[sure])
        allowed = np.abs(yardstick[sure].astype(np.float64) - exact[sure])
        if not sure.any():
            continue
        if not error.max() <= factor * allowed.max() + 1e-5:
            found.append(f"{name}: error {error.max():.2e}, naive {allowed.max():.2e}")
        if not error.mean() <= 1.5 * allowed.mean() + 1e-5:
            found.append(f"{name}: mean error {error.mean():.2e}, naive {allowed.mean():.2e}")
    return found


def problem(
    seed: int = 0,
    *,
    lengths: Sequence[int],
    counts: Sequence[int] | None = None,
    padding: int = 0,
    query_heads: int = 4,
    kv_heads: int = 2,
    width: int = 64,
    block_size: int = 16,
    row_blocks: int | None = None,
    blocks: int | None = None,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    poison: bool = True,
    sinks: bool = False,
    alibi: bool = False,
    draft: bool = False,
    k_scale: str | None = None,
    v_scale: str | None = None,
    **options: Any,
) -> Call:
    """A call over a pool in random order: rows of ``lengths`` tokens, ``counts`` queries each.

    Scales are named by kind: "scalar", "head", "slot"; sinks, slopes and a draft mask are drawn.
    Values are N(0, 1), each row's from its own generator. With ``poison``, every slot and query
    that counts for nothing is NaN (int8: 127, its slot scale NaN), and table entries past a row's
    length or behind its window are huge, -1, N + 5 and the like; without, they are like any other.
    """
    rows, tokens = len(lengths), sum(counts or [1] * len(lengths)) + padding
    cache_dtype = cache_dtype or dtype
    rng = np.random.default_rng(seed)
    used = [-(-length // block_size) for length in lengths]
    blocks = blocks or sum(used) + 2
    table_BM = _table(rng, used, blocks, row_blocks or max(used) + 2, poison)
    kv_NUKSD = _stored(rng, (blocks, 2, kv_heads, block_size, width), cache_dtype)
    kinds = {name: kind for name, kind in (("k_scale", k_scale), ("v_scale", v_scale)) if kind}
    scales = {name: _scales(rng, kind, kv_NUKSD) for name, kind in kinds.items()}
    q_THD = rng.normal(size=(tokens, query_heads, width)).astype(jnp.dtype(dtype))
    starts = np.cumsum([0, *(counts or [1] * rows)], dtype=np.int32)
    idle_T, idle_NS = np.ones(tokens, bool), np.ones((blocks, block_size), bool)
    for row, (length, (first, last)) in enumerate(
        zip(lengths, itertools.pairwise(starts), strict=True)
    ):
        idle_T[first:last] = not length
        row_rng = np.random.default_rng([seed, row])
        unseen = length - (last - first) - options["window"] + 1 if options.get("window") else 0
        for token in range(max(0, unseen) if first < last else length, length):
            block, slot = table_BM[row, token // block_size], token % block_size
            idle_NS[block, slot] = False
            kv_NUKSD[block, :, :, slot] = _stored(row_rng, (2, kv_heads, width), cache_dtype)
        if poison and first < last:
            released = max(0, unseen) // block_size
            table_BM[row, :released] = np.resize([2**30, -1, blocks, blocks + 5], released)
    if poison:
        q_THD[idle_T] = np.nan
        kv_NUKSD.transpose(0, 3, 1, 2, 4)[idle_NS] = 127 if cache_dtype == "int8" else np.nan
        for name, kind in kinds.items():
            if kind == "slot":
                scales[name].transpose(0, 2, 1)[idle_NS] = np.nan
    call = {"q_THD": q_THD, "kv_NUKSD": kv_NUKSD, "table_BM": table_BM}
    call |= {"length_B": np.array(lengths, np.int32)} | scales | options
    call |= {"query_start_P": starts} if counts is not None else {}
    call |= {"sinks_H": rng.normal(size=query_heads).astype(np.float32)} if sinks else {}
    slopes_H = (2.0 ** -np.arange(1, query_heads + 1)).astype(np.float32)
    call |= {"alibi_slope_H": slopes_H} if alibi else {}
    mask_TQ = rng.random((tokens, max(counts or [1]))) < 0.6
    return call | ({"draft_mask_TQ": mask_TQ} if draft else {})


def _table(
    rng: np.random.Generator, used: list[int], blocks: int, row_blocks: int, poison: bool
) -> np.ndarray:
    """Rows of ``used`` blocks in random order, and of what their length does not reach."""
    order = list(rng.permutation(blocks))
    cells = [[order.pop(0) for _ in range(count)] for count in used]
    assert order, "a block that no row uses is among the junk"
    junk = itertools.cycle([2**30, -1, blocks + 5, order[0]] if poison else order)
    for row in cells:
        row += [next(junk) for _ in range(row_blocks - len(row))]
    return np.array(cells, np.int32)


def _stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def _scales(rng: np.random.Generator, kind: str, kv_NUKSD: np.ndarray) -> Any:
    blocks, _, heads, slots, _ = kv_NUKSD.shape
    shape = {"scalar": (), "head": (heads,), "slot": (blocks, heads, slots)}[kind]
    unit = 1 / 64 if kv_NUKSD.dtype == np.int8 else 1.0
    scale = (unit * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    return scale if kind != "scalar" else float(scale)
