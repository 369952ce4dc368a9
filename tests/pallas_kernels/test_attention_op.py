"""The public function: what it refuses, and how it goes through vmap, jit and cascades."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops, reference
from pallas_kernels.ops import BACKENDS, paged_attention
from pallas_kernels.problem import Problem, check
from pallas_kernels.tiling import Tiling
from tests.support import attention, backends
from tests.support.attention import Call, problem

RAGGED: Call = {"lengths": [20, 0, 37], "counts": [1, 0, 5], "padding": 2, "block_size": 8}


def wrong(**changes: Any) -> Call:
    """A good ragged call with some arguments changed; None leaves one out."""
    call = problem(**RAGGED) | changes
    return {name: value for name, value in call.items() if value is not None}


Q, KV = np.zeros((8, 4, 64), np.float32), np.zeros((12, 2, 2, 8, 64), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_THD": Q[0]}, r"q_THD: expected 3 axes \(THD\), got shape \(4, 64\)"),
        ({"q_THD": Q[:, :, :32]}, "kv_NUKSD: axis D has size 64, but q_THD gave it 32"),
        ({"q_THD": Q[:, :3]}, "q_THD: expected query heads that are a multiple of the cache's 2"),
        ({"q_THD": Q.astype(np.int32)}, "q_THD: expected one of float64, .*, got int32"),
        ({"q_THD": Q[:, :0]}, "q_THD: expected query heads"),
        ({"q_THD": Q[:0]}, "expected no empty axis, got T"),
        ({"kv_NUKSD": KV[:, :1]}, "kv_NUKSD: axis U holds keys and values, expected 2, got 1"),
        ({"kv_NUKSD": KV.astype(np.uint8)}, "kv_NUKSD: expected one of .*, got uint8"),
        ({"kv_NUKSD": KV.astype(np.int8)}, "k_scale, v_scale: a cache of int8 needs both"),
        (
            {"kv_NUKSD": KV.astype(np.int8), "v_scale": 1.0},
            "k_scale, v_scale: a cache of int8 needs both",
        ),
        ({"kv_NUKSD": KV[:0]}, "expected no empty axis, got N"),
        ({"table_BM": np.zeros((3, 0), np.int32)}, "expected no empty axis, got M"),
        ({"table_BM": np.zeros((2, 3), np.int32)}, "length_B: axis B has size 3, but table_BM"),
        ({"table_BM": np.zeros((3, 3))}, "table_BM: expected integers, got float32"),
        ({"length_B": np.ones(3)}, "length_B: expected integers, got float32"),
        ({"query_start_P": None}, "query_start_P: 8 queries for 3 rows; without offsets"),
        ({"query_start_P": np.zeros(3, np.int32)}, r"query_start_P: expected rows \+ 1 = 4 off"),
        ({"query_start_P": np.zeros(4)}, "query_start_P: expected integers, got float32"),
        ({"sinks_H": np.zeros(3, np.float32)}, "sinks_H: axis H has size 3"),
        ({"sinks_H": np.zeros(4, np.int32)}, "sinks_H: expected one of float64, .*, got int32"),
        ({"alibi_slope_H": np.zeros((1, 4))}, "alibi_slope_H: expected 1 axes"),
        ({"alibi_slope_H": np.zeros(4, bool)}, "alibi_slope_H: expected one of .*, got bool"),
        ({"draft_mask_TQ": np.ones((8, 5))}, "draft_mask_TQ: expected one of bool, got float32"),
        ({"draft_mask_TQ": np.ones((7, 5), bool)}, "draft_mask_TQ: axis T has size 7"),
        ({"k_scale": np.ones(3, np.float32)}, r"k_scale: expected a scalar, \[K\] = \(2,\) or"),
        ({"v_scale": np.ones((12, 2))}, r"v_scale: expected .* = \(10, 2, 8\), got shape \(12, 2"),
        ({"v_scale": np.ones(2, np.int32)}, "v_scale: expected one of float64, .*, got int32"),
        ({"scale": "1"}, "scale: expected a Python number, got str"),
        ({"scale": 1j}, "scale: expected a Python number, got complex"),
        ({"scale": np.inf}, "scale: expected a finite number, got inf"),
        ({"window": 0}, "window: expected a whole number of at least 1, got 0"),
        ({"window": 2.5}, "window: expected a whole number of at least 1, got 2.5"),
        ({"window": np.nan}, "window: expected a whole number of at least 1, got nan"),
        ({"window": np.inf}, "window: expected a whole number of at least 1, got inf"),
        ({"soft_cap": 0.0}, "soft_cap: expected a number above 0, got 0.0"),
        ({"soft_cap": np.nan}, "soft_cap: expected a number above 0, got nan"),
        ({"soft_cap": np.inf}, "soft_cap: expected a number above 0, got inf"),
        ({"backend": "triton"}, "backend: expected one of reference, xla, mosaic_gpu, mosaic_tpu"),
        ({"backend": "xla", "interpret": True}, "interpret: xla is no kernel"),
        ({"tiling": {"splits": 2}}, "tiling: expected a Tiling, got dict"),
        ({"backend": "reference", "tiling": Tiling(splits=2)}, "reference.*: tiling: .* none"),
    ],
)
def test_a_wrong_argument_is_named(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        paged_attention(**wrong(**changes))
    assert "\n" not in str(caught.value)


def test_a_draft_mask_needs_offsets():
    call = problem(lengths=[5, 9], draft=True)
    with pytest.raises(ValueError, match="draft_mask_TQ: needs query_start_P"):
        paged_attention(**call)


def test_a_traced_option_is_refused():
    call = problem(lengths=[5, 9])
    for name in ("scale", "window", "soft_cap"):
        with pytest.raises(ValueError, match=f"{name}: expected a Python number"):
            jax.jit(lambda value, name=name: paged_attention(**call, **{name: value}))(1)


def test_arguments_may_be_lists_and_scales_numbers():
    call = problem(**RAGGED, k_scale="scalar", v_scale="head")
    named = ("table_BM", "length_B", "query_start_P")
    lists = call | {name: call[name].tolist() for name in named}
    lists |= {"v_scale": jnp.asarray(call["v_scale"]), "k_scale": np.float32(call["k_scale"])}
    result = paged_attention(**lists, backend="reference", return_lse=True)
    assert not attention.faults(result, call)
    alone = paged_attention(**call, backend="reference")
    np.testing.assert_array_equal(alone, result[0])


OPTIONS = {"soft_cap": 3.0, "sinks": True, "alibi": True, "k_scale": "slot", "v_scale": "head"}
BATCHED = [
    {"q_THD"},
    {"kv_NUKSD"},
    {"table_BM"},
    {"length_B"},
    {"length_B", "query_start_P"},
    {"draft_mask_TQ"},
    {"k_scale"},
    {"kv_NUKSD", "k_scale", "table_BM"},
    {"v_scale"},
    {"sinks_H", "alibi_slope_H"},
    set(),
]


@pytest.mark.parametrize("batched", BATCHED, ids=lambda names: " ".join(sorted(names)) or "all")
def test_vmap_is_a_loop(batched):
    """Over one operand, some, and all of them with every slot that is not read poisoned."""
    shape: Call = {"row_blocks": 6, "blocks": 14, "block_size": 8, **OPTIONS}
    shape |= {"poison": not batched, "window": 9}
    calls = [
        problem(1, lengths=[20, 0, 37], counts=[2, 1, 3], padding=2, draft=True, **shape),
        problem(2, lengths=[9, 40, 3], counts=[1, 3, 2], padding=2, draft=True, **shape),
    ]
    arrays = {name for name, value in calls[0].items() if isinstance(value, np.ndarray)}
    check_vmap(calls, batched or arrays, "reference" if batched else "xla")


@pytest.mark.parametrize("batched", [set(), {"q_THD"}], ids=["all", "q"])
def test_vmap_of_decode_is_a_loop(batched):
    shape: Call = {"row_blocks": 6, "blocks": 14, "block_size": 8, "poison": not batched}
    calls = [problem(1, lengths=[20, 0, 37], **shape), problem(2, lengths=[9, 40, 3], **shape)]
    arrays = {name for name, value in calls[0].items() if isinstance(value, np.ndarray)}
    check_vmap(calls, batched or arrays, "reference")


def check_vmap(calls: list[Call], batched: set[str], backend: str) -> None:
    stacked = {name: np.stack([call[name] for call in calls]) for name in batched}
    fixed = {name: value for name, value in calls[0].items() if name not in batched}

    @jax.jit
    @jax.vmap
    def attend(arrays):
        return paged_attention(**arrays, **fixed, backend=backend, return_lse=True)

    out_THDs, lse_THs = attend(stacked)
    for index, call in enumerate(calls):
        one = fixed | {name: call[name] for name in batched}
        assert not attention.faults((out_THDs[index], lse_THs[index]), one), index


def test_vmap_over_rows_is_one_larger_call(monkeypatch):
    """A batch of what rows have of their own makes no loop: a row more a batch owns its padding."""
    call, attend, seen = problem(**RAGGED, sinks=True), reference.attend, []

    def watched(operands, problem, tiling, interpret):
        seen.append(problem.rows)
        return attend(operands, problem, tiling, interpret)

    monkeypatch.setattr(reference, "attend", watched)

    def rows(batched: str) -> int:
        seen.clear()
        many = jnp.zeros((3, *call[batched].shape), call[batched].dtype)
        jax.eval_shape(
            jax.vmap(lambda one: paged_attention(**call | {batched: one}, backend="reference")),
            many,
        )
        return max(seen)

    assert rows("q_THD") == 3 * (3 + 1)
    assert rows("sinks_H") == 3


@pytest.mark.parametrize("backend", ops.KERNELS.values())
def test_true_is_the_kernels_own_interpreter(backend):
    call = problem(lengths=[5], dtype="bfloat16")
    result = paged_attention(**call, backend=backend, interpret=True, return_lse=True)
    assert not attention.faults(result, call)


def test_a_bucket_is_traced_once():
    traced = []

    @jax.jit
    def attend(arrays):
        traced.append(1)
        return paged_attention(**arrays, backend="xla", return_lse=True)

    for seed, lengths in enumerate([[20, 0, 37], [1, 2, 3], [40, 40, 40]]):
        call = problem(seed, lengths=lengths, row_blocks=6, blocks=20, block_size=8)
        assert not attention.faults(attend(call), call)
    assert len(traced) == 1


def test_a_platform_has_its_kernel_where_that_serves(monkeypatch):
    """Otherwise xla, which is not silent: the function that chooses is public."""
    cpus = jax.devices()
    assert ops._choose(described(dtype="float32"), None) == "xla"
    for platform, kernel in ops.KERNELS.items():
        pretend(monkeypatch, platform=platform, compute_capability="9.0")
        assert ops._choose(described(dtype="bfloat16"), None) == kernel
        wide = dataclasses.replace(described(dtype="bfloat16"), dtype="float64")
        assert ops._choose(wide, None) == "xla"
        assert ops._choose(described(dtype="bfloat16"), Tiling(tokens=1)) == "xla"
        with jax.default_device(cpus[0]):
            assert ops._choose(described(dtype="bfloat16"), None) == "xla"
    monkeypatch.undo()
    with jax.default_device("cpu"):
        assert ops._choose(described(dtype="bfloat16"), None) == "xla"
    arrays = problem(0, lengths=[5])
    names = ("q_THD", "kv_NUKSD", "table_BM", "length_B")
    assert ops.choose_backend(*(arrays[name] for name in names)) == "xla"


@pytest.mark.parametrize("capability", ["8.0", "10.0", "gfx942"])
def test_a_gpu_that_is_no_hopper_has_xla(monkeypatch, capability):
    pretend(monkeypatch, platform="gpu", compute_capability=capability)
    assert ops._choose(described(dtype="bfloat16"), None) == "xla"


def pretend(monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
    """Makes JAX's first device one with these properties, for the rest of a test."""
    device = types.SimpleNamespace(device_kind="a device without tuned sizes", **properties)
    monkeypatch.setattr(jax, "devices", lambda _=None: [device])


def described(**settings: Any) -> Problem:
    """A decode call's."""
    return check(**problem(lengths=[20, 0, 37], width=128, **settings))[1]


SUFFIXES = [0, 1, 17]


@pytest.mark.parametrize(
    ("backend", "ragged"),
    [*((backend, True) for backend in BACKENDS), ("reference", False), ("xla", False)],
)
def test_a_shared_prefix_is_read_apart(backend, ragged):
    """Case 13: equal to one flat run, lse too; padded queries still give 0 and -inf."""
    dtype = "bfloat16" if backend in backends.INTERPRETERS else "float32"
    settings: Call = {"counts": [0, 1, 5], "padding": 2} if ragged else {}
    settings |= {"sinks": True, "soft_cap": 5.0, "dtype": dtype}
    flat = problem(13, lengths=[32 + suffix for suffix in SUFFIXES], **settings)
    prefix_M = flat["table_BM"][0, :2].copy()
    for row in (1, 2):
        flat["kv_NUKSD"][flat["table_BM"][row, :2]] = np.nan
        flat["table_BM"][row, :2] = prefix_M
    if ragged:  # row 0 has no query, so that its blocks are still to be filled
        rng = np.random.default_rng(0)
        shape = flat["kv_NUKSD"][prefix_M].shape
        flat["kv_NUKSD"][prefix_M] = rng.normal(size=shape).astype(flat["kv_NUKSD"].dtype)
    own = {"table_BM": flat["table_BM"][:, 2:], "length_B": np.array(SUFFIXES, np.int32)}
    interpreter = backends.INTERPRETERS.get(backend)
    settings = {"backend": backend, "interpret": interpreter() if interpreter else False}
    arrays = {name: value for name, value in (flat | own).items() if isinstance(value, np.ndarray)}
    result = jax.jit(
        lambda arrays: ops.shared_prefix_attention(
            prefix_table_M=jnp.asarray(prefix_M),
            prefix_length=32,
            soft_cap=5.0,
            return_lse=True,
            **arrays,
            **settings,
        )
    )(arrays)
    assert not attention.faults(result, flat)
    if dtype == "float32":
        for found, exact in zip(result, attention.attend(**flat), strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_a_shared_prefix_refuses_what_depends_on_positions():
    call = problem(lengths=[5])
    for name, value in (("window", 4), ("alibi_slope_H", np.ones(4, np.float32))):
        with pytest.raises(ValueError, match=f"{name}: not supported with a shared prefix"):
            ops.shared_prefix_attention(
                prefix_table_M=jnp.zeros(1, int), prefix_length=3, **call | {name: value}
            )
