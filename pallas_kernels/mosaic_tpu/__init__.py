"""Paged attention on a TPU, by Pallas kernels that the Mosaic compiler takes and a CPU interprets.

Blocks are fetched from HBM by table index, one copy a block for the keys and values of all heads,
ahead of their use and across rows. Rows with one query go to ``decode``, bound by the bandwidth of
the cache, others to ``prefill``, bound by the matrix unit. Products are of bf16, or of f32 where
the queries or the cache are (six passes of the unit); caches of 8 bits are widened in VMEM.

The pool has to lie in memory as it is indexed. XLA lays it out so where D is a multiple of 128; a
narrower pool, and [N, K, S] scales of fewer than 128 slots, it lays out with blocks innermost, and
would copy whole at every call. Give such a pool the format
``jax.experimental.layout.Format(Layout((0, 1, 2, 3, 4)), sharding)``, or store it padded.
"""

from pallas_kernels.mosaic_tpu.backend import attend, default_tiling, refusal

__all__ = ["attend", "default_tiling", "refusal"]
