"""The arrays behind a cache: all layers' keys and values in one pool of blocks, and scales.

Block b of layer l is row ``l * blocks + b`` of one array, so that writing a layer is a scatter into
the donated pool and reading it an offset on the block table; neither ever copies a layer. Types of
8 bits carry one f32 scale a slot, head and side, written, copied and freed with their block.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory.block_table import Copies
from pallas_kernels import block_io, dims

QUANTISED = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
ARRAYS = ("kv_NUKSD", "k_scale_NKS", "v_scale_NKS")  # of a ``KVCache``
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, **QUANTISED}


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of ``blocks`` blocks in each of several layers."""

    kv_NUKSD: jax.Array  # N: layers * blocks
    k_scale_NKS: jax.Array | None  # f32, quantised caches only
    v_scale_NKS: jax.Array | None
    blocks: int = flax.struct.field(pytree_node=False)

    @property
    def layers(self) -> int:
        """Layers whose blocks lie in the pool."""
        return self.kv_NUKSD.shape[0] // self.blocks

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in all layers, scales included."""
        total = sum(array.nbytes for array in self._arrays if array is not None)
        return total // (self.blocks * self.kv_NUKSD.shape[3])

    def write(
        self, layer: int | jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, slot_T: jax.Array
    ) -> KVCache:
        """The cache with a layer's keys and values at the slots; past ``blocks * S``: nowhere."""
        slots = self.blocks * self.kv_NUKSD.shape[3]
        slot_T = jnp.where(slot_T < slots, slot_T + layer * slots, self.layers * slots)
        if self.k_scale_NKS is None or self.v_scale_NKS is None:
            return self.replace(kv_NUKSD=block_io.write_kv(self.kv_NUKSD, k_TKD, v_TKD, slot_T))
        written = block_io.write_quantised_kv(
            self.kv_NUKSD, self.k_scale_NKS, self.v_scale_NKS, k_TKD, v_TKD, slot_T
        )
        return self.replace(**dict(zip(ARRAYS, written, strict=True)))

    def copy(self, copies: Copies) -> KVCache:
        """The cache after block copies, in every layer; all sources are read before any write."""
        dims(source_C=copies.source_C, target_C=copies.target_C)
        source_Z, target_Z = (
            self._rows(copies.source_C).ravel(),
            self._rows(copies.target_C).ravel(),
        )
        copied = block_io.copy_blocks(self._arrays, source_Z, target_Z)
        return self.replace(**dict(zip(ARRAYS, copied, strict=True)))

    def read(self, block_C: jax.Array) -> tuple[jax.Array | None, ...]:
        """The bytes of blocks in all layers: arrays [C, layers, ...], None without scales."""
        row_CL = self._rows(block_C).T
        return tuple(
            None if array is None else array.at[row_CL].get(mode="clip") for array in self._arrays
        )

    def put(self, block_C: jax.Array, values: tuple[jax.Array | None, ...]) -> KVCache:
        """The cache with what ``read`` gave in other blocks; past the last one: nowhere."""
        row_CL = self._rows(block_C).T
        written = (
            None if array is None else array.at[row_CL].set(value, mode="drop")
            for array, value in zip(self._arrays, values, strict=True)
        )
        return self.replace(**dict(zip(ARRAYS, written, strict=True)))

    @property
    def _arrays(self) -> tuple[jax.Array | None, ...]:
        return tuple(getattr(self, name) for name in ARRAYS)

    def _rows(self, block_C: jax.Array) -> jax.Array:
        """The pool's row of each block in each layer, [layers, C]; past the end for no block."""
        offset = self.blocks * jnp.arange(self.layers, dtype=jnp.int32)[:, None]
        return jnp.where(block_C < self.blocks, block_C + offset, self.layers * self.blocks)


class DenseKV(flax.struct.PyTreeNode):
    """Keys and values in contiguous rows of S slots: blocks as long as a sequence can get."""

    kv_LUBKSD: jax.Array  # B: blocks

    @property
    def blocks(self) -> int:
        """Rows."""
        return self.kv_LUBKSD.shape[2]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.kv_LUBKSD.nbytes // (self.blocks * self.kv_LUBKSD.shape[4])

    def copy(self, copies: Copies) -> DenseKV:
        """As ``KVCache.copy``: whole rows."""
        kv = self.kv_LUBKSD
        row_C = jnp.minimum(copies.source_C, self.blocks - 1)
        return self.replace(
            kv_LUBKSD=kv.at[:, :, copies.target_C].set(kv[:, :, row_C], mode="drop")
        )


def create(
    *, layers: int, blocks: int, block_size: int, kv_heads: int, width: int, dtype: str
) -> KVCache:
    """A cache of zeros. ``dtype``: f32, bf16, int8, fp8_e4m3 or fp8_e5m2; else ``ValueError``."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    rows = layers * blocks
    scale = (lambda: jnp.ones((rows, kv_heads, block_size))) if dtype in QUANTISED else lambda: None
    return KVCache(
        kv_NUKSD=jnp.zeros((rows, 2, kv_heads, block_size, width), DTYPES[dtype]),
        k_scale_NKS=scale(),
        v_scale_NKS=scale(),
        blocks=blocks,
    )


def create_dense(
    *, layers: int, rows: int, slots: int, kv_heads: int, width: int, dtype: str
) -> DenseKV:
    """Rows of zeros, of ``slots`` slots each. ``dtype``: f32 or bf16."""
    shape = (layers, 2, rows, kv_heads, slots, width)
    return DenseKV(jnp.zeros(shape, DTYPES[dtype]))
