"""What a run's cache held in each step, settled once the rows' ends are known.

A live engine does not know how long a row will get, so it cannot split the slots that are promised
and empty into those that later tokens fill (reserved) and those that none will (internal). The log
keeps each row's length and last block, which is all that the ledger needs, and makes the ledgers
at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Sequences

import numpy as np

from paged_jax.decoding.caches import Cache
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving.requests import MemoryUse, Request, Sequence

Held = Sequences[tuple[Request, int] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """A cache at its moment of record: after it grew, before rows that ended were emptied."""

    length_B: np.ndarray  # stored tokens
    tail_B: np.ndarray  # last block, for rows that hold any; of each row in every cache group
    used: int  # blocks that rows hold
    idle: int  # blocks kept for prefix hits
    short: bool  # the queue's head lacked blocks, or somebody was preempted
    passed: int  # cells of the tables whose blocks windows have left behind
    owners: tuple[tuple[Request, Sequence] | None, ...]


class MemoryLog:
    """The moments of one run.

    ``parent_XB``: of a beam search, once it has ended: ``Beams.parent_XB`` of its steps.
    """

    def __init__(self, cache: Cache) -> None:
        self.parent_XB: np.ndarray | None = None
        self.moments: list[Moment] = []
        self._copies = 0
        self._blocks, self._block_size = cache.kv.blocks, cache.table.block_size
        self._slot_bytes = cache.kv.slot_bytes

    def append(
        self,
        length_B: np.ndarray,
        tail_B: np.ndarray,
        used: int,
        held: Held,
        *,
        copies: int,
        idle: int = 0,
        short: bool = False,
        passed: int = 0,
    ) -> None:
        """Keeps a moment; ``copies``: blocks copied on write so far."""
        owners = tuple((one[0], one[0].sequences[one[1]]) if one else None for one in held)
        self.moments.append(Moment(length_B, tail_B, used, idle, short, passed, owners))
        self._copies = copies

    def settle(self, *more: MemoryLog, skip: int = 0) -> MemoryUse:
        """The mean ledger of this run, and of ``more`` like it. Every sequence has ended.

        ``skip`` moments of each run are left out at its beginning. Rows that outlive their
        sequence, as beams do, count as filled up to what they hold.
        """
        logs = (self, *more)
        moments = [moment for log in logs for moment in log.moments[skip:]]
        ledgers = [self.ledger(moment) for moment in moments]
        entries = [self._entries(moment) for moment in moments]
        used = [moment.used for moment in moments]
        count = max(len(moments), 1)
        return MemoryUse(
            pool_slots=self._blocks * self._block_size,
            block_size=self._block_size,
            slot_bytes=self._slot_bytes,
            slots={name: sum(one[name] for one in ledgers) / count for name in CATEGORIES},
            entry_slots=sum(entries) * self._block_size / count,
            saved_slots=(sum(entries) - sum(used)) * self._block_size / count,
            copies=sum(log._copies for log in logs),
            running=sum(owner is not None for one in moments for owner in one.owners) / count,
        )

    def ledger(self, moment: Moment) -> dict[str, int]:
        """The settled ledger of a moment, by category; as ``block_table.ledger``."""
        size = self._block_size
        final_B = [
            len(o[0].prompt_ids) + len(o[1].token_ids) - 1 if o else 0 for o in moment.owners
        ]
        groups = _groups(moment)
        held_B = np.tile(moment.length_B > 0, groups)
        length_Z = np.tile(moment.length_B, groups)[held_B]
        final_Z = np.tile(np.array(final_B, int), groups)[held_B]
        filled_Z = (length_Z - 1) % size + 1
        ending_Z = np.clip(final_Z - (length_Z - filled_Z), filled_Z, size)
        # A last block that several rows hold counts once, as the longest of them will leave it.
        tails, block_Z = np.unique(moment.tail_B[held_B], return_inverse=True)
        filled, ending = np.zeros(len(tails), int), np.zeros(len(tails), int)
        np.maximum.at(filled, block_Z, filled_Z)
        np.maximum.at(ending, block_Z, ending_Z)
        unallocated = (self._blocks - moment.used - moment.idle) * size
        slots = {
            "token": moment.used * size - int((size - filled).sum()),
            "reserved": int((ending - filled).sum()),
            "internal": int((size - ending).sum()),
            "cached": moment.idle * size,
            "short" if moment.short else "free": unallocated,
        }
        return dict.fromkeys(CATEGORIES, 0) | slots

    def _entries(self, moment: Moment) -> int:
        """Table entries that name a block."""
        cells = int(blocks_of(moment.length_B, self._block_size).sum())
        return _groups(moment) * cells - moment.passed


def _groups(moment: Moment) -> int:
    """Cache groups: each has a last block of every row."""
    return len(moment.tail_B) // len(moment.length_B)
