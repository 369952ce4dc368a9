"""What a run's cache held in each step, settled once the rows' ends are known.

A live engine does not know how long a row will get, so it cannot split the slots that are promised
and empty into those that later tokens fill (reserved) and those that none will (internal). The log
keeps each row's length and last block, which is all that the ledger needs, until the sequences that
a moment names have ended; then it adds the moment's ledger to its sums and drops it. So it never
holds more moments than those that served somebody who has not ended, however long the run.

Cost: O(rows) a moment, O(sequences that have not ended) a ``sweep``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence as Sequences
from typing import Protocol

import numpy as np

from paged_jax.memory.layout import blocks_of
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving import batch
from paged_jax.serving.requests import MemoryUse, Request, Sequence

MOST_SKIPPED = 16  # moments that ``MemoryLog.settle`` may leave out

Held = Sequences[tuple[Request, int] | None]
Owner = tuple[Request, Sequence]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A cache at its moment of record: after it grew, before rows that ended were emptied."""

    number: int  # of moments before it
    length_B: np.ndarray  # stored tokens
    tail_B: np.ndarray  # last block, for rows that hold any; of each row in every cache group
    used: int  # blocks that rows hold
    idle: int  # blocks kept for prefix hits
    short: bool  # the queue's head lacked blocks, or somebody was preempted
    passed: int  # cells of the tables whose blocks windows have left behind
    owners: tuple[Owner | None, ...]


class Watcher(Protocol):
    """Who wants to know of every moment, since the log forgets them."""

    def record(self, moment: Moment) -> None:
        """A moment, as it is recorded."""

    def settle(self, moment: Moment, ledger: dict[str, int]) -> None:
        """What it came to, by category; later, and in any order."""


class MemoryLog:
    """The moments of one run.

    ``parents``, kept by an engine that searches where there is a list: of each step the row that
    each row continued, B for those that drew nothing.
    """

    def __init__(self, *, blocks: int, block_size: int, slot_bytes: int) -> None:
        self.parents: list[np.ndarray] | None = None
        self.watcher: Watcher | None = None
        self.count = 0  # moments so far
        self._named: dict[Owner, list[Moment]] = {}  # by sequence that has not ended
        self._waits: dict[Moment, int] = {}  # how many of those a moment names
        # Sums over settled moments; the first ones have one each.
        self._sums = [collections.Counter[str]() for _ in range(MOST_SKIPPED + 1)]
        self._copies = 0
        self._blocks, self._block_size, self._slot_bytes = blocks, block_size, slot_bytes

    @property
    def pending(self) -> int:
        """Moments that are kept until sequences end."""
        return len(self._waits)

    def append(self, found: batch.Moment, held: Held) -> None:
        """Keeps a moment that the host has read; ``held``: whose each row is."""
        owners = tuple(
            (one[0], one[0].sequences[one[1]]) if one and length else None
            for one, length in zip(held, found.length_B, strict=True)
        )
        moment = Moment(
            number=self.count,
            length_B=np.asarray(found.length_B),
            tail_B=np.asarray(found.tail_B),
            used=int(found.used),
            idle=int(found.idle),
            short=bool(found.short),
            passed=0 if found.passed is None else int(found.passed),
            owners=owners,
        )
        self.count += 1
        self._copies = int(found.copies)
        if self.watcher:
            self.watcher.record(moment)
        named = {owner for owner in owners if owner}
        for owner in named:
            self._named.setdefault(owner, []).append(moment)
        self._waits[moment] = len(named)
        if not named:
            self._settle(moment)

    def sweep(self) -> None:
        """Settles and drops the moments whose sequences have all ended.

        Between two dispatches: until the next one begins, tokens may be taken back from a sequence.
        """
        for owner in [(request, one) for request, one in self._named if _over(request, one)]:
            for moment in self._named.pop(owner):
                self._waits[moment] -= 1
                if not self._waits[moment]:
                    self._settle(moment)

    def settle(self, *, skip: int = 0) -> MemoryUse:
        """The mean ledger of this run, every sequence of which has ended.

        ``skip`` moments are left out at its beginning, ``MOST_SKIPPED`` at most.
        """
        if not 0 <= skip <= MOST_SKIPPED:
            raise ValueError(f"skip: expected 0 to {MOST_SKIPPED} moments, got {skip}")
        total = collections.Counter[str]()
        for counts in self._counted()[skip:]:
            total.update(counts)
        size, count = self._block_size, max(total["moments"], 1)
        return MemoryUse(
            pool_slots=self._blocks * size,
            block_size=size,
            slot_bytes=self._slot_bytes,
            slots={name: total[name] / count for name in CATEGORIES},
            entry_slots=total["entries"] * size / count,
            saved_slots=(total["entries"] - total["used"]) * size / count,
            copies=self._copies,
            running=total["running"] / count,
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

    def _settle(self, moment: Moment) -> None:
        del self._waits[moment]
        ledger = self.ledger(moment)
        self._sums[min(moment.number, MOST_SKIPPED)].update(self._counts(moment, ledger))
        if self.watcher:
            self.watcher.settle(moment, ledger)

    def _counts(self, moment: Moment, ledger: dict[str, int]) -> dict[str, int]:
        """What is added up of a moment."""
        return ledger | {
            "moments": 1,
            "entries": self._entries(moment),
            "used": moment.used,
            "running": sum(owner is not None for owner in moment.owners),
        }

    def _counted(self) -> list[collections.Counter[str]]:
        """The sums, with what is pending as if it ended here."""
        sums = [counts.copy() for counts in self._sums]
        for moment in self._waits:
            counts = self._counts(moment, self.ledger(moment))
            sums[min(moment.number, MOST_SKIPPED)].update(counts)
        return sums

    def _entries(self, moment: Moment) -> int:
        """Table entries that name a block."""
        cells = int(blocks_of(moment.length_B, self._block_size).sum())
        return _groups(moment) * cells - moment.passed


def _groups(moment: Moment) -> int:
    """Cache groups: each has a last block of every row."""
    return len(moment.tail_B) // len(moment.length_B)


def _over(request: Request, sequence: Sequence) -> bool:
    # The sequences that a beam search ends with are not those that it began with.
    return bool(sequence.finish_reason) or request.finished
