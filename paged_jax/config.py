"""Settings as frozen values: hashable, checked when they are made, each a single argument."""

from __future__ import annotations

import dataclasses

MOST = 2**30  # sizes, times and lengths stay below: their sums fit 32 bits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A KV-cache pool and how it is handed out. Raises ``ValueError`` for sizes that do not go.

    ``block_size`` concerns paged memory alone; ``max_length``, the longest prompt plus output that
    a model takes, concerns contiguous memory alone.
    """

    pool_slots: int  # tokens whose keys and values the pool has room for
    block_size: int = 16  # slots of a block
    max_length: int = 2048  # tokens

    def __post_init__(self) -> None:
        _demand_sizes(self)

    @property
    def blocks(self) -> int:
        """Whole blocks of the pool."""
        return self.pool_slots // self.block_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Sizes of a compiled simulation's arrays: one program serves every run that they hold.

    Paged memory uses ``blocks`` and ``block_size``, contiguous memory ``slots``.
    """

    requests: int
    output: int  # tokens of the longest output
    blocks: int
    block_size: int
    slots: int

    def __post_init__(self) -> None:
        _demand_sizes(self)


def _demand_sizes(config: PoolConfig | Bounds) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, int) or not 1 <= value < MOST:
            raise ValueError(
                f"{field.name}: expected a whole number from 1 and below {MOST}, got {value!r}"
            )
