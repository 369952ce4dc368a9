"""New keys and values into a paged cache, and blocks from place to place, in place under donation.

Slot ``s`` of the pool is offset ``s % S`` of block ``s // S``. A write is one scatter over
(block, offset) whose window is the rest of a slot: compiled for CPU, GPU and TPU it updates the
donated pool where it lies, in any cache type, and costs the slots written whatever N is. An index
outside the pool, below 0 too, touches nothing; of two writes to one slot, either may win.

Quantised caches hold ``round(x / scale)`` with one scale for each slot and head,
``scale = max|x| / largest value of the type``, so that ``scale * stored`` is within half a step of
x and nothing overflows: int8 to the symmetric 127, fp8 to its largest finite value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import query_tiles
from pallas_kernels.dims import dims
from pallas_kernels.problem import FLOATS, QUANTISED

NOWHERE = np.iinfo(np.int32).max  # a slot that lies outside of any pool


def query_slots(
    table_BM: jax.Array,
    length_B: jax.Array,
    query_start_P: jax.Array | None = None,
    *,
    queries: int,
    block_size: int,
) -> jax.Array:
    """Slots of the rows' last tokens, those of a step's queries, i32 [T] with T = ``queries``.

    Arguments as ``paged_attention``'s, ``length_B`` counting the queries. ``NOWHERE`` for padding,
    for positions outside the table's M blocks, and for entries that are no block's. Raises
    ``ValueError`` for arrays that do not go together.
    """
    named = {"table_BM": table_BM, "length_B": length_B}
    if query_start_P is None:
        query_start_P = jnp.arange(jnp.shape(length_B)[0] + 1, dtype=jnp.int32)
    sizes = dims(**named, query_start_P=query_start_P)
    if sizes.P != sizes.B + 1:
        raise ValueError(f"query_start_P: expected rows + 1 = {sizes.B + 1} offsets, got {sizes.P}")
    for name, array in (named | {"query_start_P": query_start_P}).items():
        _check_integers(name, array)
    table_BM, length_B, query_start_P = map(_index, (table_BM, length_B, query_start_P))
    row_T = query_tiles.row_of_tokens(query_start_P, queries)
    owned_T = row_T < sizes.B
    row_T = jnp.where(owned_T, row_T, 0)
    position_T = length_B[row_T] - query_start_P[row_T + 1] + jnp.arange(queries, dtype=jnp.int32)
    in_table_T = owned_T & (position_T >= 0) & (position_T < sizes.M * block_size)
    position_T = jnp.where(in_table_T, position_T, 0)
    block_T = table_BM[row_T, position_T // block_size]
    in_pool_T = in_table_T & (block_T >= 0) & (block_T < NOWHERE // block_size)
    slot_T = jnp.where(in_pool_T, block_T * block_size + position_T % block_size, NOWHERE)
    return slot_T.astype(jnp.int32)


def write_kv(
    kv_NUKSD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, slot_T: jax.Array
) -> jax.Array:
    """The pool with token t's key and value in slot ``slot_T[t]``, cast to the pool's type.

    Slots outside ``[0, N * S)`` are written nowhere. Raises ``ValueError`` for shapes or types that
    do not go together; a pool of int8 or fp8 takes values of its own type only, from
    ``quantise_kv``.
    """
    sizes = _check_write(kv_NUKSD, k_TKD, v_TKD, slot_T)
    stored = jnp.result_type(kv_NUKSD)
    for name, array in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        allowed = (stored.name,) if stored.name in QUANTISED else FLOATS
        _check_type(name, array, allowed)
    block_T, offset_T = _place(slot_T, sizes)
    new_TUKD = jnp.stack([jnp.asarray(x).astype(stored) for x in (k_TKD, v_TKD)], axis=1)
    return kv_NUKSD.at[block_T, :, :, offset_T].set(new_TUKD, mode="drop")


def write_quantised_kv(
    kv_NUKSD: jax.Array,
    k_scale_NKS: jax.Array,
    v_scale_NKS: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    slot_T: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``write_kv`` of float keys and values into a pool of int8 or fp8, with their scales.

    Returns the pool and both scales, f32 [N, K, S], as ``paged_attention`` takes them. Errors as
    ``write_kv``.
    """
    sizes = _check_write(kv_NUKSD, k_TKD, v_TKD, slot_T)
    dims(kv_NUKSD=kv_NUKSD, k_scale_NKS=k_scale_NKS, v_scale_NKS=v_scale_NKS)
    stored = jnp.result_type(kv_NUKSD)
    _check_type("kv_NUKSD", kv_NUKSD, QUANTISED)
    for name, scale in (("k_scale_NKS", k_scale_NKS), ("v_scale_NKS", v_scale_NKS)):
        _check_type(name, scale, ("float32",))
    k_TKD, k_scale_TK = quantise_kv(k_TKD, stored)
    v_TKD, v_scale_TK = quantise_kv(v_TKD, stored)
    block_T, offset_T = _place(slot_T, sizes)
    # An index for each head: with the heads as a window, the TPU compiler, which lays such an array
    # out with N last, makes and unmakes a transposed copy of all of it.
    place = (block_T[:, None], jnp.arange(sizes.K)[None], offset_T[:, None])
    return (
        write_kv(kv_NUKSD, k_TKD, v_TKD, slot_T),
        k_scale_NKS.at[place].set(k_scale_TK, mode="drop"),
        v_scale_NKS.at[place].set(v_scale_TK, mode="drop"),
    )


def quantise_kv(
    x_TKD: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array | float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys or values in int8 or fp8, ``(stored_TKD, scale_TK)``, with ``x ~ scale * stored``.

    ``scale``: a scalar or [K] to use instead of each token's own; what it makes too large saturates
    at the type's largest value. Of its own, a token of zeros has scale 1, and one that is not
    finite comes back as NaN, never as a number. Raises ``ValueError`` for other types.
    """
    sizes = dims(x_TKD=x_TKD)
    _check_type("x_TKD", x_TKD, FLOATS)
    stored = jnp.dtype(dtype)
    if stored.name not in QUANTISED:
        raise ValueError(f"dtype: expected one of {', '.join(QUANTISED)}, got {stored.name}")
    integers = jnp.issubdtype(stored, jnp.integer)
    limit = float(jnp.iinfo(stored).max if integers else jnp.finfo(stored).max)
    x_TKD = jnp.asarray(x_TKD).astype(jnp.float32)
    if scale is None:
        scale_TK = jnp.max(jnp.abs(x_TKD), axis=-1) / limit
        # Below the smallest normal number a device may flush the scale, or what it divides, to 0.
        scale_TK = jnp.where(scale_TK < jnp.finfo(jnp.float32).tiny, 1.0, scale_TK)
    elif np.shape(scale) not in ((), (sizes.K,)):
        raise ValueError(f"scale: expected a scalar or [K] = {(sizes.K,)}, got {np.shape(scale)}")
    else:
        scale_TK = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), x_TKD.shape[:2])
    ratio_TKD = x_TKD / scale_TK[..., None]
    # Before the cast: out of range, int8 is undefined and fp8 is NaN or infinite.
    ratio_TKD = jnp.clip(jnp.round(ratio_TKD) if integers else ratio_TKD, -limit, limit)
    return ratio_TKD.astype(stored), scale_TK


def copy_blocks(kv_NUKSD: Any, source_C: jax.Array, target_C: jax.Array) -> Any:
    """The pool with block ``source_C[c]`` copied to ``target_C[c]``, for all c at once.

    Every source is read before any target is written, so chains and swaps are right. A pair with
    either outside ``[0, N)`` copies nothing. A tree of arrays that share the axis N, a pool and its
    scales, is copied alike. Takes the room of C blocks, padding included, and for scales on a TPU,
    which lays them out with N last, a pass over all of them. Raises ``ValueError`` for shapes or
    types that do not go together.
    """
    dims(source_C=source_C, target_C=target_C)
    _check_integers("source_C", source_C)
    _check_integers("target_C", target_C)
    sizes = {np.shape(array)[:1] for array in jax.tree.leaves(kv_NUKSD)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(f"kv_NUKSD: expected arrays that share their first axis, got {sizes}")
    ((blocks,),) = sizes
    source_C, target_C = _index(source_C), _index(target_C)
    alive_C = (source_C >= 0) & (source_C < blocks) & (target_C >= 0)
    source_C = jnp.clip(source_C, 0, blocks - 1)
    target_C = jnp.where(alive_C, target_C, blocks)

    def copied(array: jax.Array) -> jax.Array:
        return array.at[target_C].set(array[source_C], mode="drop")

    return jax.tree.map(copied, kv_NUKSD)


def _place(slot_T: jax.Array, sizes: Any) -> tuple[jax.Array, jax.Array]:
    """Block and offset of slots; a slot below 0, which would count from the end, past it too."""
    slot_T = _index(slot_T)
    return jnp.where(slot_T < 0, sizes.N, slot_T // sizes.S), slot_T % sizes.S


def _index(index: Any) -> jax.Array:
    """An index in a type that holds slots, and one past the pool: a small one may not."""
    index = jnp.asarray(index)
    return index if index.dtype.itemsize >= 4 else index.astype(jnp.int32)


def _check_write(kv_NUKSD: Any, k_TKD: Any, v_TKD: Any, slot_T: Any) -> Any:
    sizes = dims(kv_NUKSD=kv_NUKSD, k_TKD=k_TKD, v_TKD=v_TKD, slot_T=slot_T)
    if sizes.U != 2:
        raise ValueError(f"kv_NUKSD: axis U holds keys and values, expected 2, got {sizes.U}")
    _check_type("kv_NUKSD", kv_NUKSD, FLOATS + QUANTISED)
    _check_integers("slot_T", slot_T)
    return sizes


def _check_type(name: str, array: Any, allowed: tuple[str, ...]) -> None:
    dtype = jnp.result_type(array)
    if dtype.name not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {dtype}")


def _check_integers(name: str, array: Any) -> None:
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name}: expected integers, got {dtype}")
