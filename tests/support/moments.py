"""A watcher of a memory log, which keeps what the log forgets."""

from __future__ import annotations

from paged_jax.serving.engine import Engine
from paged_jax.serving.memory_log import MemoryLog, Moment


class Moments:
    """Every moment of a run, and the ledger of each."""

    def __init__(self, log: MemoryLog) -> None:
        self.kept: list[Moment] = []
        self.ledgers: dict[Moment, dict[str, int]] = {}
        self._before = log.count
        log.watcher = self

    def record(self, moment: Moment) -> None:
        self.kept.append(moment)

    def settle(self, moment: Moment, ledger: dict[str, int]) -> None:
        assert moment not in self.ledgers
        self.ledgers[moment] = ledger

    def check(self, engine: Engine) -> None:
        """Once all has ended: each moment is settled, and accounts for every slot of the pool."""
        engine.memory.sweep()
        assert self.ledgers.keys() == {*self.kept}
        assert len(self.kept) == engine.memory.count - self._before
        pool_slots = engine.memory.settle().pool_slots
        assert all(sum(ledger.values()) == pool_slots for ledger in self.ledgers.values())
