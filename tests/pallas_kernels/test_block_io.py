"""Writes and copies touch what they name and nothing else, where it lies, in every cache type."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_io

N, K, S, D = 5, 2, 4, 8
QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
HALF_STEP = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}  # of the value itself


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def pool_of(value: float, dtype: str = "float32", *, blocks: int = N) -> jax.Array:
    return jnp.full((blocks, 2, K, S, D), value, dtype)


def tokens(count: int, seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    k_key, v_key = jax.random.split(jax.random.key(seed))
    shape = (count, K, D)
    return jax.random.normal(k_key, shape, dtype), jax.random.normal(v_key, shape, dtype)


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def dequantised(stored: jax.Array, scale: jax.Array) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # infinite times 0
        return exact(stored) * exact(scale)[..., None]


def written(pool, k, v, slots):
    """What a pool holds after the writes, slot by slot."""
    pool = np.array(pool)
    for t, slot in enumerate(slots):
        if 0 <= slot < pool.shape[0] * S:
            block, offset = divmod(slot, S)
            pool[block, 0, :, offset] = k[t]
            pool[block, 1, :, offset] = v[t]
    return pool


@pytest.mark.parametrize("nothing", [N * S, N * S + 3, block_io.NOWHERE, -1, -N * S])
def test_padded_writes_touch_nothing(nothing):
    """Case 16: of slots 5, nothing, 6 only 5 and 6 change."""
    k, v = tokens(3)
    slots = jnp.array([5, nothing, 6], jnp.int32)
    kv = block_io.write_kv(pool_of(7), k, v, slots)
    np.testing.assert_array_equal(kv, written(pool_of(7), k, v, [5, N * S, 6]))
    changed = np.argwhere((np.asarray(kv) != 7).any(axis=(1, 2, 4)))
    assert changed.tolist() == [[1, 1], [1, 2]]


def test_block_zero_and_the_last_are_like_any_other():
    """Case 18, and the slots of a fourth block in a pool of three (case 21)."""
    k, v = tokens(4)
    slots = [0, 3 * S - 1, 3 * S, 4 * S - 1]
    kv = block_io.write_kv(pool_of(7, blocks=3), k, v, jnp.array(slots, jnp.int32))
    np.testing.assert_array_equal(kv, written(pool_of(7, blocks=3), k, v, slots))


@pytest.mark.parametrize("index", ["uint8", "int16", "uint32"])
def test_slots_may_have_any_integer_type(index):
    k, v = tokens(2)
    pool = pool_of(7, blocks=100)  # more slots than uint8 counts
    kv = block_io.write_kv(pool, k, v, jnp.array([9, 2], index))
    np.testing.assert_array_equal(kv, written(pool, k, v, [9, 2]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_cast_to_the_type_of_the_pool(dtype):
    k, v = tokens(2)
    pool = pool_of(7, dtype)
    kv = block_io.write_kv(pool, k, v.astype(jnp.bfloat16), jnp.array([4, 1], jnp.int32))
    assert kv.dtype == dtype
    expected = written(pool, np.asarray(k, dtype), np.asarray(v.astype("bfloat16"), dtype), [4, 1])
    np.testing.assert_array_equal(exact(kv), exact(expected))


def test_two_rows_have_their_own_slots():
    """Case 17: of requests of 5 and 3 tokens in blocks of 4 the second begins at slot 8."""
    table = jnp.array([[0, 1], [2, 3]], jnp.int32)
    starts = jnp.array([0, 5, 8], jnp.int32)
    slots = block_io.query_slots(
        table, jnp.array([5, 3], jnp.int32), starts, queries=8, block_size=4
    )
    assert slots.tolist() == [0, 1, 2, 3, 4, 8, 9, 10]


def test_slots_of_a_step_are_those_of_the_last_tokens():
    table = np.array([[3, 0, -1], [4, 900, 2], [-7, 1, 0], [1, 2, 2**30]], np.int32)
    length, count = [6, 0, 5, 13], [3, 0, 1, 5]
    starts = jnp.array(np.append(0, np.cumsum(count)), jnp.int32)
    slots = block_io.query_slots(
        jnp.array(table), jnp.array(length, jnp.int32), starts, queries=12, block_size=4
    )
    none = block_io.NOWHERE
    # Row 0: tokens 3..5; row 2: token 4; row 3: tokens 8..12, of which none lies in a block.
    assert slots.tolist() == [15, 0, 1, 4, *[none] * 5, *[none] * 3]


def test_slots_of_a_decode_step():
    table = jnp.array([[3, 0], [4, -1], [2, 2]], jnp.int32)
    slots = block_io.query_slots(table, jnp.array([5, 0, 4], jnp.int32), queries=3, block_size=4)
    assert slots.tolist() == [0, block_io.NOWHERE, 11]


def test_slots_of_a_table_of_small_integers_do_not_wrap():
    """Block 200 fits uint8, its slots do not."""
    table, length = jnp.array([[200], [7]], jnp.uint8), jnp.array([2, 1], jnp.int8)
    slots = block_io.query_slots(table, length, queries=2, block_size=16)
    assert slots.dtype == jnp.int32
    assert slots.tolist() == [200 * 16 + 1, 7 * 16]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_dequantised_values_are_within_half_a_step(dtype):
    x = jax.random.normal(jax.random.key(1), (64, K, D)) * jnp.exp2(
        jax.random.uniform(jax.random.key(2), (64, 1, 1), minval=-60, maxval=60)
    )
    stored, scale = jax.jit(block_io.quantise_kv, static_argnums=1)(x, dtype)
    assert stored.dtype == dtype
    back, most = dequantised(stored, scale), np.abs(exact(x)).max(axis=-1, keepdims=True)
    if dtype == "int8":
        bound = most / 127 / 2
        np.testing.assert_array_equal(np.abs(np.int32(stored)).max(axis=-1), 127)
    else:
        smallest = float(jnp.finfo(dtype).smallest_subnormal) * most / float(jnp.finfo(dtype).max)
        bound = np.maximum(HALF_STEP[dtype] * np.abs(exact(x)), smallest / 2)
    assert (np.abs(back - exact(x)) <= bound * (1 + 1e-5)).all()
    assert (np.abs(back - exact(x)).max(axis=-1, keepdims=True) > bound / 4).any(), (
        "a vacuous bound"
    )


@pytest.mark.parametrize("dtype", QUANTISED)
def test_zeros_tiny_and_huge_values_quantise(dtype):
    rows = [0.0, 1e-45, 1e-38, 3e38, -3e38]
    x = jnp.broadcast_to(jnp.array(rows, jnp.float32)[:, None, None], (5, 1, 2))
    stored, scale = block_io.quantise_kv(x, dtype)
    back = dequantised(stored, scale)
    assert scale[0, 0] == 1
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[:, 0, 0], rows, rtol=1e-6, atol=1e-37)
    assert back[0, 0, 0] == 0


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_no_number_stays_none(dtype):
    x = jnp.array([[[1.0, jnp.nan]], [[1.0, jnp.inf]], [[1.0, 2.0]]])
    stored, scale = block_io.quantise_kv(x, dtype)
    back = dequantised(stored, scale)
    assert np.isnan(back[:2, 0, 1]).all()
    assert np.isfinite(back[2]).all()


@pytest.mark.parametrize(("dtype", "most"), [*zip(QUANTISED, (127, 448, 57344), strict=True)])
def test_given_scales_saturate(dtype, most):
    x = jnp.array([[[1e9, -1e9], [0.5, -2.0]]])
    stored, scale = block_io.quantise_kv(x, dtype, jnp.array([2.0, 0.5]))
    np.testing.assert_array_equal(exact(stored), [[[most, -most], [1, -4]]])
    assert scale.tolist() == [[2.0, 0.5]]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_writes_bring_their_scales(dtype):
    k, v = tokens(3, dtype="bfloat16")
    ones = jnp.ones((N, K, S))
    slots = [2 * S + 1, N * S, 0]
    kv, k_scale, v_scale = block_io.write_quantised_kv(
        pool_of(1, dtype), ones, ones, k, v, jnp.array(slots, jnp.int32)
    )
    assert (kv.dtype, k_scale.dtype, v_scale.dtype) == (dtype, jnp.float32, jnp.float32)
    back = dequantised(kv, jnp.stack([k_scale, v_scale], axis=1))
    # Within the largest step of the type, at most 1/8 (e5m2) of the largest value of the token.
    expected = written(pool_of(1), exact(k), exact(v), slots)
    np.testing.assert_allclose(back, expected, atol=0.125 * np.abs(expected).max())
    touched = np.ones((N, S), bool)
    touched[[2, 0], [1, 0]] = False
    keep = np.broadcast_to(touched[:, None], (N, K, S))
    for scale, x in ((k_scale, k), (v_scale, v)):
        assert (np.asarray(scale)[keep] == 1).all()
        most = 127 if dtype == "int8" else float(jnp.finfo(dtype).max)
        expected = np.abs(exact(x)).max(axis=-1) / most
        np.testing.assert_allclose(scale[2, :, 1], expected[0], rtol=1e-6)
        np.testing.assert_allclose(scale[0, :, 0], expected[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([3], [0], [3, 1, 2, 3, 4]),
        ([0, 1], [1, 2], [0, 0, 1, 3, 4]),  # a chain: block 1 is read before it is written
        ([0, 4], [4, 0], [4, 1, 2, 3, 0]),
        ([N, 2], [N, N], [0, 1, 2, 3, 4]),
        ([N, -1, N + 7], [0, 1, 2], [0, 1, 2, 3, 4]),
        ([1, 1], [-1, 3], [0, 1, 2, 1, 4]),
        ([], [], [0, 1, 2, 3, 4]),
    ],
)
def test_blocks_are_read_before_any_is_written(source, target, expected):
    pairs = (jnp.array(source, jnp.int32), jnp.array(target, jnp.int32))
    kv = jnp.broadcast_to(jnp.arange(N, dtype=jnp.float32).reshape(N, 1, 1, 1, 1), (N, 2, K, S, D))
    scale = kv[:, 0, :, :, 0]
    copied = block_io.copy_blocks(kv, *pairs)
    with_scales = block_io.copy_blocks((kv.astype(jnp.int8), scale, scale + 0.5), *pairs)
    assert copied[:, 0, 0, 0, 0].tolist() == expected
    for array, add in zip((copied, *with_scales), (0, 0, 0, 0.5), strict=True):
        by_block = exact(array).reshape(N, -1)
        assert (by_block == np.array(expected)[:, None] + add).all()


def copy_with_scales(kv, k_scale, v_scale, source, target):
    return block_io.copy_blocks((kv, k_scale, v_scale), source, target)


def is_in_place(operation, *, quantised: bool, writes: bool) -> bool:
    """Whether an operation on donated pools makes nothing of a pool's size, compiled for two."""
    array = jax.ShapeDtypeStruct
    new, index = array((6, K, 64), "bfloat16"), array((6,), "int32")

    def compiled(blocks: int) -> tuple[Any, str, int]:
        pool = array((blocks, 2, K, 16, 64), "int8" if quantised else "bfloat16")
        scale = array((blocks, K, 16), "float32")
        pools = (pool, scale, scale) if quantised else (pool,)
        function = jax.jit(operation, donate_argnums=tuple(range(len(pools))))
        rest = (new, new, index) if writes else (index, index)
        done = function.lower(*pools, *rest).compile()
        pool_bytes = sum(one.size * one.dtype.itemsize for one in pools)
        return done.memory_analysis(), done.as_text() or "", pool_bytes

    (small, *_), (memory, text, pool_bytes) = compiled(64), compiled(4096)
    return (
        memory.alias_size_in_bytes == pool_bytes
        and memory.temp_size_in_bytes == small.temp_size_in_bytes < pool_bytes / 100
        and "[4096," in text
        and not re.search(r"\[4096,[\d,]*\]\S* (copy|transpose)\(", text)
    )


@pytest.mark.parametrize(
    ("operation", "options"),
    [
        (block_io.write_kv, {"quantised": False, "writes": True}),
        (block_io.write_quantised_kv, {"quantised": True, "writes": True}),
        (block_io.copy_blocks, {"quantised": False, "writes": False}),
        (copy_with_scales, {"quantised": True, "writes": False}),
    ],
)
def test_donated_pools_are_updated_where_they_lie(operation, options):
    assert is_in_place(operation, **options)


def test_a_copy_of_the_pool_is_found():
    def permuted(kv, k, v, slots):
        return block_io.write_kv(kv[::-1], k, v, slots)

    assert not is_in_place(permuted, quantised=False, writes=True)


def test_a_batch_of_pools_is_a_pool_each():
    k, v = tokens(6)
    k, v = (x.reshape(2, 3, K, D) for x in (k, v))
    pools = jnp.stack([pool_of(7), pool_of(9)])
    slots = [[5, N * S, -1], [0, 19, 5]]
    kv = jax.vmap(block_io.write_kv)(pools, k, v, jnp.array(slots, jnp.int32))
    for one, pool, *rest in zip(kv, pools, k, v, slots, strict=True):
        np.testing.assert_array_equal(one, written(pool, *rest))
    source, target = jnp.array([[0, N], [4, 1]], jnp.int32), jnp.array([[4, 2], [0, 2]], jnp.int32)
    copied = jax.vmap(block_io.copy_blocks)(kv, source, target)
    np.testing.assert_array_equal(copied[0], kv[0, jnp.array([0, 1, 2, 3, 0])])
    np.testing.assert_array_equal(copied[1], kv[1, jnp.array([4, 1, 1, 3, 4])])


def test_what_does_not_go_together_is_named():
    k, v = tokens(2)
    slots = jnp.zeros(2, jnp.int32)
    scale = jnp.ones((N, K, S))
    write, copy = block_io.write_kv, block_io.copy_blocks
    quantised = functools.partial(block_io.write_quantised_kv, pool_of(0, "int8"))
    floats = "float64, float32, bfloat16, float16"
    for message, call in {
        "slot_T: axis T has size 2, but k_TKD gave it 1": lambda: write(
            pool_of(0), k[:1], v[:1], slots
        ),
        "slot_T: expected integers, got float32": lambda: write(
            pool_of(0), k, v, slots.astype(jnp.float32)
        ),
        "kv_NUKSD: axis U holds keys and values, expected 2, got 1": lambda: write(
            pool_of(0)[:, :1], k, v, slots
        ),
        "k_TKD: expected one of int8, got float32": lambda: write(pool_of(0, "int8"), k, v, slots),
        f"v_TKD: expected one of {floats}, got int32": lambda: write(
            pool_of(0), k, v.astype(jnp.int32), slots
        ),
        "v_scale_NKS: expected one of float32, got bfloat16": lambda: quantised(
            scale, scale.astype(jnp.bfloat16), k, v, slots
        ),
        "k_scale_NKS: axis N has size 4": lambda: quantised(scale[:4], scale, k, v, slots),
        "kv_NUKSD: expected one of int8, float8_e4m3fn, float8_e5m2, got float32": lambda: (
            block_io.write_quantised_kv(pool_of(0), scale, scale, k, v, slots)
        ),
        "dtype: expected one of int8, float8_e4m3fn, float8_e5m2, got int32": lambda: (
            block_io.quantise_kv(k, "int32")
        ),
        r"scale: expected a scalar or \[K\] = \(2,\), got \(3,\)": lambda: block_io.quantise_kv(
            k, "int8", jnp.ones(3)
        ),
        "target_C: axis C has size 1, but source_C gave it 2": lambda: copy(
            pool_of(0), slots, slots[:1]
        ),
        "source_C: expected integers, got bool": lambda: copy(
            pool_of(0), slots.astype(bool), slots
        ),
        "kv_NUKSD: expected arrays that share their first axis": lambda: copy(
            (pool_of(0), scale[:4]), slots, slots
        ),
        "query_start_P: expected rows": lambda: block_io.query_slots(
            jnp.zeros((1, 1), jnp.int32), slots[:1], slots[:1], queries=1, block_size=4
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
