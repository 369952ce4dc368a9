"""Paged attention on Hopper in Mosaic GPU: TMA copies by block, products by wgmma.

``decode`` attends one query a row, its cache split over programs; ``prefill`` packs queries of
ragged rows; a batch of both kinds of rows is both kernels (``backend``). Needs a device of compute
capability 9.0, or an interpreter.
"""

from pallas_kernels.mosaic_gpu.backend import attend, default_tiling, refusal

__all__ = ["attend", "default_tiling", "refusal"]
