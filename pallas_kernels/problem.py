"""What one call of paged attention asks for: its arrays, and everything static about them.

``check`` turns the arguments of the public function into ``Operands`` (arrays in one normal form)
and a ``Problem`` (sizes, types and options: hashable, known at trace time). A back end is a module
with three functions over the two:

- ``refusal(problem, tiling)``: None, or in a line the argument it cannot serve and what it can;
- ``default_tiling(problem)``: a ``tiling.Tiling`` with every field set;
- ``attend(operands, problem, tiling, interpret)``: ``(out_THD in q's type, lse_TH in f32)``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dims import dims

FLOATS = ("float64", "float32", "bfloat16", "float16")
QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
NORMAL = {
    "table_BM": jnp.int32,
    "length_B": jnp.int32,
    "query_start_P": jnp.int32,
    "sinks_H": jnp.float32,
    "alibi_slope_H": jnp.float32,
}


class Operands(NamedTuple):
    """The arrays of a call; None where an option is not used."""

    q_THD: jax.Array
    kv_NUKSD: jax.Array
    table_BM: jax.Array  # i32; entries past a row's length may hold anything
    length_B: jax.Array  # i32, stored tokens, those of the queries included
    query_start_P: jax.Array | None = None  # i32; None: one query a row
    sinks_H: jax.Array | None = None  # f32
    alibi_slope_H: jax.Array | None = None  # f32
    draft_mask_TQ: jax.Array | None = None  # bool
    k_scale: jax.Array | None = None  # f32, [K] or [N, K, S]
    v_scale: jax.Array | None = None  # f32, [K] or [N, K, S]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Sizes, types and options of a call."""

    rows: int  # B
    queries: int  # T, query tokens with padding
    query_heads: int  # H
    kv_heads: int  # K
    width: int  # D
    block_size: int  # S
    blocks: int  # N, layers included
    row_blocks: int  # M
    dtype: str  # of queries and outputs
    cache_dtype: str
    decode: bool  # one query a row, T = B
    scale: float
    causal: bool = True
    window: int | None = None  # visible tokens, the query's own included
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    draft: int | None = None  # Q
    k_scale: str | None = None  # "head": [K]; "slot": [N, K, S]
    v_scale: str | None = None

    @property
    def group(self) -> int:
        """Query heads of a key/value head, G."""
        return self.query_heads // self.kv_heads

    @property
    def quantised(self) -> bool:
        """Whether the cache's type means nothing without a scale."""
        return self.cache_dtype in QUANTISED


def check(
    q_THD: Any,
    kv_NUKSD: Any,
    table_BM: Any,
    length_B: Any,
    query_start_P: Any = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Any = None,
    alibi_slope_H: Any = None,
    draft_mask_TQ: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Operands, Problem]:
    """The normal form of a call's arguments. Raises ``ValueError`` for arguments that do not go."""
    given = {
        "q_THD": q_THD,
        "kv_NUKSD": kv_NUKSD,
        "table_BM": table_BM,
        "length_B": length_B,
        "query_start_P": query_start_P,
        "sinks_H": sinks_H,
        "alibi_slope_H": alibi_slope_H,
        "draft_mask_TQ": draft_mask_TQ,
    }
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    sizes = dims(**arrays)
    _check_sizes(sizes, decode=query_start_P is None, draft=draft_mask_TQ is not None)
    for name, array in arrays.items():
        _check_type(name, array)
        if name in NORMAL:
            arrays[name] = array.astype(NORMAL[name])
    _check_options(scale, window, soft_cap)
    k_scale, k_kind = _normal_scale("k_scale", k_scale, sizes)
    v_scale, v_kind = _normal_scale("v_scale", v_scale, sizes)
    cache_dtype = arrays["kv_NUKSD"].dtype.name
    if cache_dtype in QUANTISED and (k_kind is None or v_kind is None):
        raise ValueError(f"k_scale, v_scale: a cache of {cache_dtype} needs both, 1.0 if unscaled")
    operands = Operands(**arrays, k_scale=k_scale, v_scale=v_scale)
    problem = Problem(
        rows=sizes.B,
        queries=sizes.T,
        query_heads=sizes.H,
        kv_heads=sizes.K,
        width=sizes.D,
        block_size=sizes.S,
        blocks=sizes.N,
        row_blocks=sizes.M,
        dtype=arrays["q_THD"].dtype.name,
        cache_dtype=cache_dtype,
        decode=query_start_P is None,
        scale=sizes.D**-0.5 if scale is None else float(scale),
        causal=bool(causal),
        window=None if window is None else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=sinks_H is not None,
        alibi=alibi_slope_H is not None,
        draft=None if draft_mask_TQ is None else sizes.Q,
        k_scale=k_kind,
        v_scale=v_kind,
    )
    return operands, problem


def _check_sizes(sizes: Any, *, decode: bool, draft: bool) -> None:
    if sizes.U != 2:
        raise ValueError(f"kv_NUKSD: axis U holds keys and values, expected 2, got {sizes.U}")
    if min(sizes.H, sizes.K) < 1 or sizes.H % sizes.K:
        raise ValueError(
            f"q_THD: expected query heads that are a multiple of the cache's {sizes.K} heads,"
            f" got {sizes.H}"
        )
    empty = [axis for axis in "TDNSBM" if getattr(sizes, axis) < 1]
    if empty:
        raise ValueError(
            f"q_THD, kv_NUKSD, table_BM: expected no empty axis, got {', '.join(empty)}"
        )
    if decode and sizes.T != sizes.B:
        raise ValueError(
            f"query_start_P: {sizes.T} queries for {sizes.B} rows; without offsets a row has one"
        )
    if not decode and sizes.P != sizes.B + 1:
        raise ValueError(f"query_start_P: expected rows + 1 = {sizes.B + 1} offsets, got {sizes.P}")
    if draft and decode:
        raise ValueError("draft_mask_TQ: needs query_start_P, the offsets of the rows' queries")


def _check_type(name: str, array: jax.Array) -> None:
    allowed = {
        "q_THD": FLOATS,
        "kv_NUKSD": FLOATS + QUANTISED,
        "sinks_H": FLOATS,
        "alibi_slope_H": FLOATS,
        "draft_mask_TQ": ("bool",),
        "k_scale": FLOATS,
        "v_scale": FLOATS,
    }
    if name in allowed and array.dtype.name not in allowed[name]:
        raise ValueError(f"{name}: expected one of {', '.join(allowed[name])}, got {array.dtype}")
    if name not in allowed and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: expected integers, got {array.dtype}")


def _check_options(scale: Any, window: Any, soft_cap: Any) -> None:
    for name, value in (("scale", scale), ("window", window), ("soft_cap", soft_cap)):
        if value is not None and not isinstance(value, int | float | np.integer | np.floating):
            raise ValueError(f"{name}: expected a Python number, got {type(value).__name__}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if window is not None and not (1 <= window < 2**31 and window == int(window)):
        raise ValueError(f"window: expected a whole number of at least 1, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap: expected a number above 0, got {soft_cap}")


def _normal_scale(name: str, scale: Any, sizes: Any) -> tuple[jax.Array | None, str | None]:
    """A scale as f32 [K] ("head") or [N, K, S] ("slot")."""
    if scale is None:
        return None, None
    scale = jnp.asarray(scale, jnp.float32 if isinstance(scale, int | float) else None)
    _check_type(name, scale)
    scale = scale.astype(jnp.float32)
    slots = (sizes.N, sizes.K, sizes.S)
    if scale.shape in ((), (sizes.K,)):
        return jnp.broadcast_to(scale, (sizes.K,)), "head"
    if scale.shape == slots:
        return scale, "slot"
    raise ValueError(
        f"{name}: expected a scalar, [K] = {(sizes.K,)} or [N, K, S] = {slots}, got shape"
        f" {scale.shape}"
    )
