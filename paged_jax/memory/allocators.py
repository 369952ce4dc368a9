"""Every allocator by name, ready for a simulation.

A scheme is how memory is handed out: the module with its verbs, how to begin, whom to refuse. A
new contiguous one is a module with the functions of ``contiguous.Allocator`` and one line in
``ALLOCATORS``; any other is a module with the verbs of ``verbs.Memory`` and a class like these.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from paged_jax.config import Bounds, PoolConfig
from paged_jax.memory import buddy, chunks, contiguous, first_fit, layout, paged
from paged_jax.memory.verbs import Memory
from paged_jax.workload.arrays import RequestArrays
from paged_jax.workload.requests import Requests


@dataclasses.dataclass(frozen=True, slots=True)
class OnDemand:
    """Blocks on demand."""

    verbs: Memory = paged
    has_blocks: ClassVar[bool] = True

    def create(self, work: RequestArrays, config: PoolConfig, bounds: Bounds) -> paged.Paged:
        """Empty memory for a run of ``work``."""
        return paged.create(
            work,
            pool_slots=jnp.int32(config.pool_slots),
            block_size=jnp.int32(config.block_size),
            blocks_bound=bounds.blocks,
            block_size_bound=bounds.block_size,
        )

    def refusal(self, requests: Requests, config: PoolConfig) -> str | None:
        """Why some request could never run, even alone; None when every one could."""
        size, prompt_R = config.block_size, requests.prompt_R.astype(np.int64)
        tokens_X = requests.prefix_tokens_X
        used_X = np.isin(np.arange(len(tokens_X)), requests.prefix_R)
        pinned = int(layout.blocks_of(tokens_X[used_X], size).sum())
        base_R = np.append(tokens_X, 0)[requests.prefix_R] // size
        joint_R = prompt_R // size if requests.samples > 1 else base_R
        end_RF = layout.blocks_of(prompt_R[:, None] + requests.output_RF - 1, size)
        need_R = joint_R - base_R + (end_RF - joint_R[:, None]).sum(axis=1)
        worst = int(np.argmax(need_R))
        if pinned + need_R[worst] <= config.blocks:
            return None
        return (
            f"request {worst} needs {need_R[worst]} blocks of {size} slots beside {pinned} pinned"
            f" ones, the pool has {config.blocks}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Reserving:
    """One contiguous chunk a sequence, of ``allocator``, for what ``promise`` reserves."""

    allocator: contiguous.Allocator
    promise: str
    verbs: Memory = chunks
    has_blocks: ClassVar[bool] = False

    def create(self, work: RequestArrays, config: PoolConfig, bounds: Bounds) -> chunks.Chunks:
        """Empty memory for a run of ``work``."""
        prompt_Y = jnp.repeat(work.prompt_R, work.samples)
        return chunks.create(
            work,
            allocator=self.allocator,
            chunks=self.allocator.create(config.pool_slots, bounds.slots),
            promise_Y=contiguous.promise(self.promise, prompt_Y, work.output_Y, config.max_length),
        )

    def refusal(self, requests: Requests, config: PoolConfig) -> str | None:
        """Why some request could never run, even alone; None when every one could."""
        promise_RF = np.asarray(
            contiguous.promise(
                self.promise, requests.prompt_R[:, None], requests.output_RF, config.max_length
            )
        )
        final_R = requests.prompt_R + requests.output_RF.max(axis=1)
        if self.promise != "oracle" and (final_R > config.max_length).any():
            worst = int(np.argmax(final_R))
            return f"request {worst} has {final_R[worst]} tokens, max_length is {config.max_length}"
        chunk_RF = np.asarray(self.allocator.chunk_slots(promise_RF))
        fits_R = self.allocator.could_hold(config.pool_slots, chunk_RF)
        if fits_R.all():
            return None
        worst = int(np.argmin(fits_R))
        return (
            f"request {worst} needs {requests.samples} chunk(s) of {chunk_RF[worst].max()}"
            f" contiguous slots, the largest of a pool of {config.pool_slots} slots is"
            f" {self.allocator.largest_slots(config.pool_slots)}"
        )


Scheme = OnDemand | Reserving

ALLOCATORS: dict[str, Scheme] = {
    "orca_max": Reserving(buddy, "max"),
    "orca_pow2": Reserving(buddy, "pow2"),
    "orca_oracle": Reserving(buddy, "oracle"),
    "first_fit_max": Reserving(first_fit, "max"),
    "first_fit_oracle": Reserving(first_fit, "oracle"),
    "paged": OnDemand(),
}
