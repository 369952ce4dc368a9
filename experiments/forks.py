"""What sharing saves, from lengths and recorded forks alone: the predictions, without a model.

Parallel samples go through the simulator. Beams are replayed on a block table: in a step each beam
that runs writes one token, then becomes a copy of the beam that it continues; what a request holds
is freed after its last step. The saving is that of PagedAttention's Figure 15: 1 - blocks in use /
table entries, over the decode steps. Cost: for beams, O(rows * blocks a row) a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.config import Bounds, PoolConfig
from paged_jax.memory import block_table
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.memory.layout import blocks_of
from paged_jax.serving import simulator
from paged_jax.workload import requests


class Sharing(NamedTuple):
    """Blocks of a run, mean over its decode steps, and copies in total."""

    entries: float  # of all block tables: what it would hold without sharing
    used: float
    copies: int

    @property
    def saving(self) -> float:
        """The fraction of blocks that sharing saves."""
        return 1 - self.used / self.entries


def of_samples(prompt_R: np.ndarray, output_RF: np.ndarray, *block_sizes: int) -> list[Sharing]:
    """The simulator's answers for requests that begin together in a pool that holds them all.

    One answer a block size, all by one compiled program. ``ValueError`` where no output has a
    second token: there is no decode step then.
    """
    longest = int(output_RF.max())
    _demand_steps(longest)
    work = requests.independent(prompt_R, output_RF)
    final_RF = prompt_R[:, None] + output_RF
    pools = [
        PoolConfig(pool_slots=int(blocks_of(final_RF, size).sum()) * size, block_size=size)
        for size in block_sizes
    ]
    bounds = Bounds(
        requests=work.count,
        output=longest,
        blocks=max(pool.blocks for pool in pools),
        block_size=max(block_sizes),
        slots=max(pool.pool_slots for pool in pools),
    )
    answers = []
    for pool in pools:
        result = simulator.simulate(
            work,
            ALLOCATORS["paged"],
            pool,
            steps=longest,
            warmup_steps=1,  # the step that stores the prompts
            bounds=bounds,
        )
        means = result.mean("entries"), result.mean("used")
        answers.append(Sharing(*means, copies=result.sums["copies"]))
    return answers


class Beams(NamedTuple):
    """A replayed beam search at two moments of each step; copies are the same."""

    between: Sharing  # as it begins: beams of one parent share even its last block
    writing: Sharing  # as it writes: each beam has a last block of its own


def of_beams(parent_XB: np.ndarray, prompt_R: np.ndarray, block_size: int) -> Beams:
    """The block table's answer for recorded parents (``MemoryLog.parents``).

    ``ValueError`` where every request was done with its first token.
    """
    _demand_steps(len(parent_XB))
    steps, rows = parent_XB.shape
    width = rows // len(prompt_R)
    blocks_per_row = int(blocks_of(int(prompt_R.max()) + steps, block_size))
    state = block_table.create(
        rows=rows,
        blocks=rows * blocks_per_row,
        block_size=block_size,
        blocks_per_row=blocks_per_row,
    )
    prompt_B = np.zeros(rows, np.int32)
    prompt_B[::width] = prompt_R
    first_B = np.arange(rows, dtype=np.int32) // width * width
    fits, counts = _replay(state, jnp.asarray(prompt_B), jnp.asarray(first_B), parent_XB)
    assert fits, "the pool holds every row"
    total = {name: int(np.asarray(values_X).sum()) for name, values_X in counts.items()}
    mean = {name: count / (steps - 1) for name, count in total.items()}
    return Beams(
        Sharing(mean["entries"], mean["used"], total["copies"]),
        Sharing(mean["writing_entries"], mean["writing_used"], total["copies"]),
    )


@jax.jit
def _replay(
    state: block_table.BlockTable, prompt_B: jax.Array, first_B: jax.Array, parent_XB: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Whether everything fitted, and counts of each decode step."""
    rows = parent_XB.shape[1]
    live_XB = parent_XB < rows
    parent_XB = jnp.where(live_XB, parent_XB, jnp.arange(rows))
    ends_XB = live_XB & ~jnp.roll(live_XB, -1, axis=0).at[-1].set(True)
    state, _, stored = block_table.reserve(state, prompt_B)
    state, forked = block_table.fork(state, jnp.where(prompt_B > 0, rows, first_B))
    state, _ = block_table.release(block_table.reorder(state, parent_XB[0]), ends_XB[0])

    def entries(state: block_table.BlockTable) -> jax.Array:
        return (state.table_BM < state.pool.none).sum()

    def step(state: block_table.BlockTable, now: tuple) -> tuple[block_table.BlockTable, tuple]:
        live_B, parent_B, ends_B = now
        counts = {"entries": entries(state), "used": state.pool.used}
        state, copies, fits = block_table.reserve(state, live_B.astype(jnp.int32), most_tokens=1)
        counts |= {
            "copies": (copies.target_C < state.pool.none).sum(),
            "writing_entries": entries(state),
            "writing_used": state.pool.used,
        }
        state, _ = block_table.release(block_table.reorder(state, parent_B), ends_B)
        return state, (counts, fits)

    _, (counts, fits_X) = lax.scan(step, state, (live_XB[1:], parent_XB[1:], ends_XB[1:]))
    return stored & forked & fits_X.all(), counts


def _demand_steps(tokens: int) -> None:
    if tokens < 2:
        raise ValueError("outputs: every one ended with its first token, so nothing was decoded")
