"""Host memory for the blocks of requests that wait: their bytes, and moving them.

Which block goes where is decided on the device (``memory.swap``); here the bytes follow, between a
plan and the step that it planned, while no block is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paged_jax.serving import dispatch
from paged_jax.serving.dispatch import Batch

CALL_BLOCKS = 32  # of one transfer: one program moves any number


class HostMemory:
    """Bytes of ``blocks`` blocks of a batch's cache. ``read`` brings device values to the host."""

    def __init__(self, batch: Batch, blocks: int, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._none = batch.cache.table.pool.none  # of the device
        shapes = jax.eval_shape(dispatch.fetch, batch, self._padded(np.zeros(0, np.int32)))
        self._values = jax.tree.map(lambda x: np.zeros((blocks, *x.shape[1:]), x.dtype), shapes)

    def move(self, batch: Batch, out_Z: np.ndarray, in_Z: np.ndarray) -> Batch:
        """Moves what a plan decided to; ``out_Z`` and ``in_Z`` mark rows of host memory."""
        host = batch.cache.rows.host
        assert host is not None, "it has host memory"
        device_ZM, host_ZM = self._read((host.device_ZM, host.host_ZM))
        self._store(batch, device_ZM[out_Z], host_ZM[out_Z])
        return self._restore(batch, device_ZM[in_Z], host_ZM[in_Z])

    def warm(self, batch: Batch) -> Batch:
        """Compiles what ``move`` runs; moves nothing."""
        nothing = self._padded(np.zeros(0, np.int32))
        return dispatch.put(batch, nothing, self._read(dispatch.fetch(batch, nothing)))

    def _store(self, batch: Batch, device_FM: np.ndarray, host_FM: np.ndarray) -> None:
        for device_C, host_C in self._calls(device_FM, host_FM):
            found = self._read(dispatch.fetch(batch, self._padded(device_C)))
            for held, values in zip(*map(jax.tree.leaves, (self._values, found)), strict=True):
                held[host_C] = values[: len(host_C)]

    def _restore(self, batch: Batch, device_FM: np.ndarray, host_FM: np.ndarray) -> Batch:
        for device_C, host_C in self._calls(device_FM, host_FM):
            values = jax.tree.map(lambda held, host_C=host_C: _rows(held, host_C), self._values)
            batch = dispatch.put(batch, self._padded(device_C), values)
        return batch

    def _calls(
        self, device_FM: np.ndarray, host_FM: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The blocks that rows name, cut into transfers."""
        named_FM = device_FM < self._none
        pair_UZ = np.stack([device_FM[named_FM], host_FM[named_FM]])
        starts = range(0, pair_UZ.shape[1], CALL_BLOCKS)
        return [tuple(pair_UZ[:, start : start + CALL_BLOCKS]) for start in starts]

    def _padded(self, block_C: np.ndarray) -> np.ndarray:
        return np.pad(block_C, (0, CALL_BLOCKS - len(block_C)), constant_values=self._none)


def _rows(held: np.ndarray, host_C: np.ndarray) -> np.ndarray:
    """Blocks of host memory, and anything in the places of a transfer that move none."""
    return held[np.pad(host_C, (0, CALL_BLOCKS - len(host_C)))]
