"""Paged-attention building blocks that import jax and numpy only."""

from pallas_kernels.dims import dims

__all__ = ["dims"]
