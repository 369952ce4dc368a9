"""What a sweep plans to run: groups of cells, and what every cell reports.

Cells with the same workload, sharing, pool and seed are a group: they see the very same requests
(common random numbers), and an allocator's gain over a baseline is taken within its group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments.columns import NO_BLOCKS
from paged_jax.config import MOST
from paged_jax.memory import ledger
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.workload import Trace, Workload

FACTORS = ("workload", "allocator", "block_size", "sharing", "pool_slots", "seed")
BASELINES = tuple(name for name, scheme in ALLOCATORS.items() if not scheme.has_blocks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a set of cells has in common."""

    workload: str
    sharing: float
    pool_slots: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A sweep: its factors, and how long every cell runs."""

    workloads: dict[str, Workload]
    allocators: tuple[str, ...]
    block_sizes: tuple[int, ...]
    sharing: tuple[float, ...]
    pool_slots: tuple[int, ...]
    seeds: int
    steps: int
    warmup_steps: int
    watermark: float = 0.0
    max_rows: int = MOST
    replayed: Trace | None = None  # the workload "trace" in its own order, with its own arrivals
    step_seconds: float | None = None
    until_done: bool = False  # a run that leaves requests behind is an error

    def groups(self) -> list[Group]:
        """All groups, in the order of their rows."""
        return [
            Group(workload=workload, sharing=sharing, pool_slots=pool_slots, seed=seed)
            for workload in self.workloads
            for pool_slots in self.pool_slots
            for sharing in self.sharing
            for seed in range(self.seeds)
        ]

    def columns(self) -> list[tuple[str, int | str]]:
        """Allocator and block size of each cell of a group."""
        return [
            (allocator, block_size)
            for allocator in self.allocators
            for block_size in (
                self.block_sizes if ALLOCATORS[allocator].has_blocks else (NO_BLOCKS,)
            )
        ]

    def cells(self) -> Iterator[tuple]:
        """All cells, as values of ``FACTORS``."""
        for group in self.groups():
            for allocator, block_size in self.columns():
                yield cell_of(group, allocator, block_size)

    def metrics(self) -> list[tuple[str, str]]:
        """Names and units of what every cell reports."""
        fractions = (*ledger.CATEGORIES, "external", "fragmented", "saved")
        return [
            *((f"{name}_fraction", "of pool") for name in fractions),
            ("sharing_saving", "of table entries"),
            ("running_mean", "sequences"),
            ("requests_mean", "requests"),
            ("preemptions", "requests"),
            ("copies", "copies"),
            ("finished", "requests"),
            ("cut", "of requests"),
            ("steps", "steps"),
            *(
                (f"reclaimed_fraction_{name}", f"of the waste of {name}")
                for name in self.allocators
                if name in BASELINES
            ),
        ]


def cell_of(group: Group, allocator: str, block_size: int | str) -> tuple:
    """A cell as values of ``FACTORS``."""
    return (
        group.workload,
        allocator,
        block_size,
        group.sharing,
        group.pool_slots,
        group.seed,
    )
