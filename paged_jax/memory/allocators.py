"""Every allocator by name, ready for a simulation.

A new one is a module with the verbs of ``scheduling.queue.Memory`` or, for a contiguous one, with
the functions of ``contiguous.Allocator``, and one line in ``ALLOCATORS``.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from paged_jax.config import Bounds, PoolConfig
from paged_jax.memory import buddy, chunks, contiguous, first_fit, layout, paged
from paged_jax.workload.arrays import RequestArrays
from paged_jax.workload.requests import Requests


@dataclasses.dataclass(frozen=True, slots=True)
class Paged:
    """Blocks on demand."""

    verbs: ModuleType = paged

    def create(self, work: RequestArrays, config: PoolConfig, bounds: Bounds) -> paged.Paged:
        """Empty memory for a run of ``work``."""
        return paged.create(
            work,
            pool_slots=jnp.int32(config.pool_slots),
            block_size=jnp.int32(config.block_size),
            bounds=bounds,
        )

    def refusal(self, requests: Requests, config: PoolConfig) -> str | None:
        """Why some request could never run, even alone; None when every one could."""
        size, samples = config.block_size, requests.samples
        pinned_X = np.isin(np.arange(len(requests.prefix_tokens_X)), requests.prefix_R)
        pinned = layout.blocks_of(requests.prefix_tokens_X[pinned_X], size).sum()
        prefix_R = np.append(requests.prefix_tokens_X, 0)[requests.prefix_R]
        end_RF = layout.blocks_of(requests.prompt_R[:, None] + requests.output_RF - 1, size)
        joint_R = requests.prompt_R // size if samples > 1 else 0 * requests.prompt_R
        need_R = (end_RF - joint_R[:, None]).sum(axis=1) + joint_R - prefix_R // size
        worst = int(np.argmax(need_R))
        if pinned + need_R[worst] <= config.blocks:
            return None
        return (
            f"request {worst} needs {need_R[worst]} blocks of {size} slots beside {pinned} pinned"
            f" ones, the pool has {config.blocks}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Contiguous:
    """One chunk a sequence, of ``allocator``, for what ``promise`` reserves."""

    allocator: ModuleType
    promise: str
    verbs: ModuleType = chunks

    def create(self, work: RequestArrays, config: PoolConfig, bounds: Bounds) -> chunks.Chunks:
        """Empty memory for a run of ``work``."""
        del bounds
        prompt_Y = jnp.repeat(work.prompt_R, work.samples)
        return chunks.create(
            work,
            allocator=self.allocator,
            chunks=self.allocator.create(config.pool_slots),
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


Allocator = Paged | Contiguous

ALLOCATORS: dict[str, Allocator] = {
    "orca_max": Contiguous(buddy, "max"),
    "orca_pow2": Contiguous(buddy, "pow2"),
    "orca_oracle": Contiguous(buddy, "oracle"),
    "first_fit_max": Contiguous(first_fit, "max"),
    "first_fit_oracle": Contiguous(first_fit, "oracle"),
    "paged": Paged(),
}
