"""Paged attention for GPU, TPU and CPU in Pallas and JAX, importing jax and numpy only.

Keys and values of all layers lie in the blocks of one array, ``kv_NUKSD``: ``write_kv`` puts tokens
there, and ``paged_attention`` reads them by block table, one operation on four back ends (``ops``).
Capitals at the end of a name are its axes (``dims``).
"""

from pallas_kernels.block_io import (
    copy_blocks,
    quantise_kv,
    query_slots,
    write_kv,
    write_quantised_kv,
)
from pallas_kernels.dims import dims
from pallas_kernels.merge import merge_attention
from pallas_kernels.ops import choose_backend, paged_attention, shared_prefix_attention
from pallas_kernels.tiling import Tiling

__all__ = [
    "Tiling",
    "choose_backend",
    "copy_blocks",
    "dims",
    "merge_attention",
    "paged_attention",
    "quantise_kv",
    "query_slots",
    "shared_prefix_attention",
    "write_kv",
    "write_quantised_kv",
]
