"""The scheduler over whole arrays: a pure function from counts to a plan.

Requests stand on the axis R in order of priority: running ones first, then waiting ones by
arrival. The youngest are preempted until the rest fit. Where no two requests share a block that
has the closed form: keep the longest prefix k with

    sum(demand of the first k) <= free + sum(private blocks of those after k).

Where blocks are shared, what one victim frees depends on the victims before it, so victims go one
at a time in a bounded loop, asking memory. Admission is the longest prefix of waiting requests
that ``policy.judge`` lets in one after another. Cost: O(R), and O(R) questions where shared.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.scheduling import policy
from pallas_kernels import dims


class Counts(flax.struct.PyTreeNode):
    """What the scheduler knows of R requests in order of priority, and of memory."""

    running_R: jax.Array  # bool
    waiting_R: jax.Array  # bool: arrived, and not running
    demand_R: jax.Array  # i32: blocks a running request takes this step, copies included
    private_R: jax.Array  # i32: blocks that preempting it frees, where nothing else is shared
    need_R: jax.Array  # i32: blocks that storing a waiting request takes
    rows_R: jax.Array  # i32: sequences of the request that run, or would
    free: jax.Array  # i32: free blocks


class Plan(flax.struct.PyTreeNode):
    """Who runs in this step. Everybody else keeps waiting."""

    keep_R: jax.Array  # bool: running, and stays
    preempt_R: jax.Array  # bool: running, and gives up its memory
    admit_R: jax.Array  # bool: waiting, and is stored
    verdict: jax.Array  # i32: why nobody more was admitted, a constant of ``policy``


def schedule(
    counts: Counts,
    limits: policy.Limits,
    *,
    freed_by: Callable[[jax.Array], jax.Array] | None = None,
) -> Plan:
    """Decides one step.

    Args:
      counts: requests and memory; entries that neither run nor wait are ignored.
      limits: the settings of the rules.
      freed_by: blocks that preempting the marked requests ([R] bool) would free; needed, and
        asked, where requests share blocks. Default: the sum of their private blocks.
    """
    dims(
        running_R=counts.running_R,
        waiting_R=counts.waiting_R,
        demand_R=counts.demand_R,
        private_R=counts.private_R,
        need_R=counts.need_R,
        rows_R=counts.rows_R,
    )
    keep_R = _keep_alone(counts) if freed_by is None else _keep_shared(counts, freed_by)
    preempt_R = counts.running_R & ~keep_R
    need_R = jnp.where(counts.waiting_R, counts.need_R, 0)
    joins_R = jnp.where(counts.waiting_R, counts.rows_R, 0)
    demand = jnp.where(keep_R, counts.demand_R, 0).sum()
    rows = jnp.where(keep_R, counts.rows_R, 0).sum()
    verdict_R = policy.judge(
        limits,
        waiting=counts.waiting_R,
        need=need_R,
        free=counts.free - demand - (jnp.cumsum(need_R) - need_R),
        rows=joins_R,
        running=rows + jnp.cumsum(joins_R) - joins_R,
        preempted=preempt_R.any(),
    )
    refused_R = counts.waiting_R & (verdict_R != policy.ADMITTED)
    first = jnp.argmax(refused_R)
    nobody = jnp.where(preempt_R.any(), policy.SHORT, policy.IDLE)  # but for those just preempted
    return Plan(
        keep_R=keep_R,
        preempt_R=preempt_R,
        admit_R=counts.waiting_R & (jnp.cumsum(refused_R) == 0),
        verdict=jnp.where(refused_R.any(), verdict_R[first], nobody),
    )


def _keep_alone(counts: Counts) -> jax.Array:
    demand_R = jnp.where(counts.running_R, counts.demand_R, 0)
    private_R = jnp.where(counts.running_R, counts.private_R, 0)
    freed_R = private_R.sum() - jnp.cumsum(private_R)
    return counts.running_R & policy.may_grow(jnp.cumsum(demand_R), counts.free + freed_R)


def _keep_shared(counts: Counts, freed_by: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Victims one at a time, the youngest first."""
    index_R = jnp.arange(counts.running_R.shape[0])

    def crowded(keep_R: jax.Array) -> jax.Array:
        demand = jnp.where(keep_R, counts.demand_R, 0).sum()
        free = counts.free + freed_by(counts.running_R & ~keep_R)
        return keep_R.any() & ~policy.may_grow(demand, free)

    def drop(keep_R: jax.Array) -> jax.Array:
        return keep_R & (index_R != jnp.where(keep_R, index_R, -1).max())

    return lax.while_loop(crowded, drop, counts.running_R)
