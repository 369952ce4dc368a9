"""What a run's cache held at each dispatch, settled once the rows' ends are known.

A live engine does not know how long a row will get, so it cannot split the slots that are promised
and empty into those that later tokens fill (reserved) and those that none will (internal). The log
keeps tables as they were and makes their ledgers at the end.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.decoding.caches import Cache, PagedCache
from paged_jax.memory import block_table
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving.requests import MemoryUse, Request, Sequence

Held = Sequences[tuple[Request, int] | None]


class MemoryLog:
    """Snapshots of one run's cache."""

    def __init__(self, cache: Cache) -> None:
        self._snapshots: list[tuple[object, list[tuple[Request, Sequence] | None]]] = []
        self._copies = 0
        if isinstance(cache, PagedCache):
            self._pool_slots = cache.kv.blocks * cache.table.block_size
            self._block_size, self._slot_bytes = cache.table.block_size, cache.kv.slot_bytes
        else:
            rows, slots = cache.kv_LUBKSD.shape[2], cache.kv_LUBKSD.shape[4]
            self._pool_slots, self._block_size = rows * slots, slots
            self._slot_bytes = cache.kv_LUBKSD.nbytes // self._pool_slots

    def record(self, cache: Cache, held: Held) -> None:
        """Keeps this moment: after a dispatch, before rows that ended are freed."""
        state = cache.table if isinstance(cache, PagedCache) else cache.length_B
        if isinstance(cache, PagedCache):
            self._copies = int(cache.copies)
        owners = [(one[0], one[0].sequences[one[1]]) if one else None for one in held]
        # The batch is donated to the next dispatch: keep copies, not views.
        self._snapshots.append((jax.tree.map(np.array, state), owners))

    def settle(self, *more: MemoryLog, skip: int = 0) -> MemoryUse:
        """The mean ledger of this run, and of ``more`` like it. Every sequence has ended.

        ``skip`` snapshots of each run are left out at its beginning. Rows that outlive their
        sequence, as beams do, count as filled up to what they hold.
        """
        totals = dict.fromkeys(CATEGORIES, 0.0)
        entry_slots = saved = 0.0
        logs = (self, *more)
        snapshots = [snapshot for log in logs for snapshot in log._snapshots[skip:]]
        for state, owners in snapshots:
            final_B = np.array(
                [len(o[0].prompt_ids) + len(o[1].token_ids) - 1 if o else 0 for o in owners]
            )
            if isinstance(state, block_table.BlockTable):
                slots = self._paged(state, final_B)
                entries = int((np.asarray(state.table_BM) < state.pool.none).sum())
                entry_slots += entries * self._block_size
                saved += (entries - int(state.pool.used)) * self._block_size
            else:
                slots = self._dense(np.asarray(state), final_B)
                entry_slots += self._pool_slots - slots["free"]
            for category, count in slots.items():
                totals[category] += count
        count = max(len(snapshots), 1)
        return MemoryUse(
            pool_slots=self._pool_slots,
            block_size=self._block_size,
            slot_bytes=self._slot_bytes,
            slots={category: total / count for category, total in totals.items()},
            entry_slots=entry_slots / count,
            saved_slots=saved / count,
            copies=sum(log._copies for log in logs),
        )

    def _paged(self, table: block_table.BlockTable, final_B: np.ndarray) -> dict[str, int]:
        state = jax.tree.map(jnp.asarray, table)
        final_B = np.maximum(final_B, table.length_B)
        ledger = _ledger(state, jnp.asarray(final_B), self._pool_slots)
        return {category: int(getattr(ledger, category)) for category in CATEGORIES}

    def _dense(self, length_B: np.ndarray, final_B: np.ndarray) -> dict[str, int]:
        token = int(length_B.sum())
        promised = int((length_B > 0).sum()) * self._block_size
        reserved = int(np.where(length_B > 0, np.maximum(final_B - length_B, 0), 0).sum())
        return {
            "token": token,
            "reserved": reserved,
            "internal": promised - token - reserved,
            "free": self._pool_slots - promised,
        }


_ledger = jax.jit(
    lambda state, final_B, slots: block_table.ledger(state, final_B, pool_slots=slots),
    static_argnums=2,
)
