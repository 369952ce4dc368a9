"""What the writers and the readers of a sweep's rows agree on; imports nothing, so all may."""

from __future__ import annotations

from collections.abc import Collection

NO_BLOCKS = "-"  # the block size of an allocator that has none
REFERENCE_BLOCK_SIZE = 16  # the paper's default


def reference_block_size(sizes: Collection[int]) -> int:
    """The block size that stands for paging: 16 slots, or the median of sizes without it."""
    ordered = sorted(sizes)
    return REFERENCE_BLOCK_SIZE if REFERENCE_BLOCK_SIZE in ordered else ordered[len(ordered) // 2]
