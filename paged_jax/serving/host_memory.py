"""Host memory for the blocks of requests that wait: their bytes, and moving them.

Which block goes where is decided on the device (``memory.swap``); here the bytes follow, between a
plan and the step that it planned, while no block is written.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import numpy as np

from paged_jax.scheduling.batching import Step
from paged_jax.serving import dispatch
from paged_jax.serving.batch import Batch, Moment
from paged_jax.serving.memory_log import MemoryLog
from paged_jax.serving.requests import Request

CALL_BLOCKS = 32  # of one transfer: one program moves any number


class HostMemory:
    """Bytes of ``blocks`` blocks of a batch's cache. ``read`` brings device values to the host."""

    def __init__(self, batch: Batch, blocks: int, read: Callable[[Any], Any]) -> None:
        cache = batch.cache
        self.log = MemoryLog(
            blocks=blocks, block_size=cache.rows.block_size, slot_bytes=cache.kv.slot_bytes
        )
        self._read = read
        self._none = batch.cache.table.pool.none  # of the device
        shapes = jax.eval_shape(dispatch.fetch, batch, self._padded(np.zeros(0, np.int32)))
        self._values = jax.tree.map(lambda x: np.zeros((blocks, *x.shape[1:]), x.dtype), shapes)

    def move(self, batch: Batch, step: Step, slots: Sequences[Request | None]) -> Batch:
        """Moves the blocks of requests that a step sends to host memory or brings back.

        ``step``: on the host. ``slots``: the requests, which know from then on where they are.
        """
        host = batch.cache.rows.host
        assert host is not None, "it has host memory"
        out_R, in_R = step.swapped_R & step.preempted_R, step.swapped_R & step.admitted_R
        groups = len(batch.cache.rows.windows)
        # By request: rows of its samples in every cache group.
        device_RFM, host_RFM = (
            table_ZM.reshape(groups, len(slots), -1, table_ZM.shape[1]).swapaxes(0, 1)
            for table_ZM in self._read((host.device_ZM, host.host_ZM))
        )
        self._store(batch, device_RFM[out_R], host_RFM[out_R])
        batch = self._restore(batch, device_RFM[in_R], host_RFM[in_R])
        for slot in np.flatnonzero(step.swapped_R).tolist():
            request = slots[slot]
            assert request is not None, "it was admitted from this slot, or preempted"
            request.swapped = bool(out_R[slot])
        return batch

    def record(self, moment: Moment, slots: Sequences[Request | None]) -> None:
        """Logs what is here in a step."""
        samples = len(moment.length_B) // len(slots)
        held = [(one, nth) if one else None for one in slots for nth in range(samples)]
        self.log.append(moment, held)

    def warm(self, batch: Batch) -> Batch:
        """Compiles what ``move`` runs; moves nothing."""
        nothing = self._padded(np.zeros(0, np.int32))
        return dispatch.put(batch, nothing, self._read(dispatch.fetch(batch, nothing)))

    def _store(self, batch: Batch, device_ZM: np.ndarray, host_ZM: np.ndarray) -> None:
        for device_C, host_C in self._calls(device_ZM, host_ZM):
            found = self._read(dispatch.fetch(batch, self._padded(device_C)))
            for held, values in zip(*map(jax.tree.leaves, (self._values, found)), strict=True):
                held[host_C] = values[: len(host_C)]

    def _restore(self, batch: Batch, device_ZM: np.ndarray, host_ZM: np.ndarray) -> Batch:
        for device_C, host_C in self._calls(device_ZM, host_ZM):
            values = jax.tree.map(lambda held, host_C=host_C: _rows(held, host_C), self._values)
            batch = dispatch.put(batch, self._padded(device_C), values)
        return batch

    def _calls(
        self, device_ZM: np.ndarray, host_ZM: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The blocks that rows name, cut into transfers."""
        named_ZM = device_ZM < self._none
        pair_UZ = np.stack([device_ZM[named_ZM], host_ZM[named_ZM]])
        starts = range(0, pair_UZ.shape[1], CALL_BLOCKS)
        return [tuple(pair_UZ[:, start : start + CALL_BLOCKS]) for start in starts]

    def _padded(self, block_C: np.ndarray) -> np.ndarray:
        return np.pad(block_C, (0, CALL_BLOCKS - len(block_C)), constant_values=self._none)


def _rows(held: np.ndarray, host_C: np.ndarray) -> np.ndarray:
    """Blocks of host memory, and anything in the places of a transfer that move none."""
    return held[np.pad(host_C, (0, CALL_BLOCKS - len(host_C)))]
