"""What the kernel proof compiles: this package's kernels and JAX's own, at the same shapes.

Every kernel gets a pool of a gigabyte, which no on-chip memory holds, and rows of up to 4,096
tokens. A ``Build`` also says what the dumps cannot: how many bytes of cache one trip of the
kernel's main loop attends.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from configs.chips import Chip
from pallas_kernels import ops, tiling
from pallas_kernels.problem import QUANTISED, Operands, Problem

POOL_BYTES = 1 << 30
ROW_TOKENS = 4_096
DECODE_ROWS = 64
PREFILL_ROWS = 8
PREFILL_QUERIES = 2_048
JAX_STEP_TOKENS = 512  # of the sizes that its kernels leave open, what serves them best
JAX_STEP_QUERIES = 32
LANES = 128  # a TPU stores narrower heads padded


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What decides a kernel, and the columns of its rows."""

    kernel: str  # "decode" or "prefill"
    dtype: str  # of the cache; queries are of it too, bfloat16 where it is quantised
    block_size: int
    width: int
    group: int
    kv_heads: int

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def query_dtype(self) -> str:
        return "bfloat16" if self.dtype in QUANTISED else self.dtype

    @property
    def rows(self) -> int:
        return DECODE_ROWS if self.kernel == "decode" else PREFILL_ROWS

    @property
    def queries(self) -> int:
        return DECODE_ROWS if self.kernel == "decode" else PREFILL_QUERIES

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token of one kv head."""
        return 2 * self.width * self.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_heads * self.token_bytes

    @property
    def blocks(self) -> int:
        return POOL_BYTES // self.block_bytes

    @property
    def row_blocks(self) -> int:
        return ROW_TOKENS // self.block_size

    @property
    def query_heads(self) -> int:
        return self.group * self.kv_heads

    def trip(self, tokens: int, heads: int, queries: int = 1) -> tuple[int, int, int, int]:
        """(bytes, copies, heads, queries) of a trip over some tokens of some kv heads."""
        blocks = max(1, tokens // self.block_size)
        return tokens * heads * self.token_bytes, 2 * blocks, heads, queries

    def array(self, *shape: int, dtype: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """A function to compile, and how much cache a trip of its main loop attends."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    trip_bytes: int  # of cache
    copies: int  # blocks' keys, and their values, that a trip fetches
    heads: int  # kv heads that one program attends
    queries: int  # query tokens of a row that share the trip
    stages: int = 2  # buffers of a trip's size in on-chip memory


def build(source: str, shape: Shape, chip: Chip) -> Build | str:
    """The kernel of a source at a shape, or in a line why it has none."""
    return SOURCES[chip.platform][source](shape, chip)


def _own(shape: Shape, chip: Chip) -> Build | str:
    """One kernel of a back end, which is the module of its name."""
    backend = ops.KERNELS["tpu" if chip.platform == "tpu" else "gpu"]
    module = importlib.import_module(f"pallas_kernels.{backend}")
    kernel = importlib.import_module(f"pallas_kernels.{backend}.{shape.kernel}")
    problem = _problem(shape)
    if refusal := module.refusal(problem, module.default_tiling(problem)):
        return refusal
    chosen = tiling.fill(tiling.tuned(backend, problem, chip.kind), kernel.default_tiling(problem))
    sizes = dataclasses.asdict(chosen)
    tokens, heads, queries = sizes["tokens"], sizes["heads"], sizes["queries"]

    def attend(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        operands = Operands(*arrays)
        if problem.quantised:
            scale_K = jnp.full((problem.kv_heads,), 0.5, jnp.float32)
            operands = operands._replace(k_scale=scale_K, v_scale=scale_K)
        return kernel.attend(operands, problem, chosen, None)

    arguments = [
        shape.array(problem.queries, problem.query_heads, shape.width, dtype=shape.query_dtype),
        shape.array(problem.blocks, 2, shape.kv_heads, shape.block_size, shape.width),
        shape.array(problem.rows, problem.row_blocks, dtype="int32"),
        shape.array(problem.rows, dtype="int32"),
    ]
    if not problem.decode:
        arguments.append(shape.array(problem.rows + 1, dtype="int32"))
    return Build(attend, tuple(arguments), *shape.trip(tokens, heads, queries), sizes["stages"])


def _problem(shape: Shape) -> Problem:
    scale = "head" if shape.dtype in QUANTISED else None
    return Problem(
        rows=shape.rows,
        queries=shape.queries,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        block_size=shape.block_size,
        blocks=shape.blocks,
        row_blocks=shape.row_blocks,
        dtype=shape.query_dtype,
        cache_dtype=shape.dtype,
        decode=shape.kernel == "decode",
        scale=shape.width**-0.5,
        k_scale=scale,
        v_scale=scale,
    )


def _jax_tpu_decode(shape: Shape, _: Chip) -> Build | str:
    from jax.experimental.pallas.ops.tpu import paged_attention as module

    if shape.kernel != "decode":
        return "decodes only"
    if shape.dtype in QUANTISED and shape.dtype != "int8":
        return "quantised caches are int8"
    pages = shape.array(shape.kv_heads, shape.blocks, shape.block_size, shape.width)
    scales = shape.array(shape.kv_heads, shape.blocks, shape.block_size, 1, dtype="float32")
    step = max(1, JAX_STEP_TOKENS // shape.block_size)
    attend = functools.partial(module.paged_attention, pages_per_compute_block=step)

    def quantised(q, k, k_scale, v, v_scale, length, table):
        tensor = module.quantization_utils.QuantizedTensor
        return attend(q, tensor(k, k_scale), tensor(v, v_scale), length, table)

    q = shape.array(shape.rows, shape.query_heads, shape.width, dtype=shape.query_dtype)
    rest = (
        shape.array(shape.rows, dtype="int32"),
        shape.array(shape.rows, shape.row_blocks, dtype="int32"),
    )
    trip = shape.trip(step * shape.block_size, heads=1)
    if shape.dtype == "int8":
        return Build(quantised, (q, pages, scales, pages, scales, *rest), *trip)
    return Build(attend, (q, pages, pages, *rest), *trip)


def _jax_tpu_ragged(shape: Shape, _: Chip) -> Build | str:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as module

    try:
        _, combined = module.get_min_heads_per_blk(
            shape.query_heads,
            2 * shape.kv_heads,
            jnp.dtype(shape.query_dtype),
            jnp.dtype(shape.dtype),
        )
    except ValueError as error:
        return str(error)
    step = max(1, JAX_STEP_TOKENS // shape.block_size)
    scales = {"k_scale": 0.5, "v_scale": 0.5} if shape.dtype in QUANTISED else {}
    function = functools.partial(
        module.ragged_paged_attention,
        num_kv_pages_per_block=step,
        num_queries_per_block=JAX_STEP_QUERIES,
        vmem_limit_bytes=64 << 20,
        **scales,
    )
    arguments = (
        shape.array(shape.queries, shape.query_heads, shape.width, dtype=shape.query_dtype),
        shape.array(shape.blocks, shape.block_size, 2 * shape.kv_heads, shape.width),
        shape.array(shape.rows, dtype="int32"),
        shape.array(shape.rows, shape.row_blocks, dtype="int32"),
        shape.array(shape.rows + 1, dtype="int32"),
        shape.array(1, dtype="int32"),
    )
    queries = 1 if shape.kernel == "decode" else JAX_STEP_QUERIES  # others are of other rows
    trip = shape.trip(step * shape.block_size, combined // 2, queries)
    return Build(function, arguments, *trip)


def _jax_gpu_decode(shape: Shape, _: Chip) -> Build | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the kernel is, and says so
        from jax.experimental.pallas.ops.gpu import paged_attention as module

    if shape.kernel != "decode":
        return "decodes only"
    q = shape.array(shape.rows, shape.query_heads, shape.width, dtype=shape.query_dtype)
    pages = shape.array(shape.kv_heads, shape.blocks, shape.block_size, shape.width)
    table = shape.array(shape.rows, shape.row_blocks, dtype="int32")
    length = shape.array(shape.rows, dtype="int32")
    splits = 16  # its default, as are steps of at most 8 blocks, and one of them in flight
    step = min(8, shape.row_blocks // splits)
    attend = functools.partial(module.paged_attention, k_splits=splits)
    trip = shape.trip(step * shape.block_size, heads=1)
    if shape.dtype in QUANTISED:
        scales = shape.array(shape.kv_heads, shape.blocks, shape.block_size, dtype="float32")
        arguments = (q, pages, pages, table, length, scales, scales)
        return Build(attend, arguments, *trip, stages=1)
    return Build(attend, (q, pages, pages, table, length), *trip, stages=1)


OWN = "pallas_kernels"
SOURCES: dict[str, dict[str, Callable[[Shape, Chip], Build | str]]] = {
    "tpu": {
        OWN: _own,
        "jax.paged_attention": _jax_tpu_decode,
        "jax.ragged_paged_attention": _jax_tpu_ragged,
    },
    "cuda": {OWN: _own, "jax.paged_attention": _jax_gpu_decode},
}


def padded_bytes(shape: Shape, size: int) -> int:
    """What ``size`` bytes of cache are in a TPU's memory: lanes come in units of 128."""
    return size * math.ceil(shape.width / LANES) * LANES // shape.width
