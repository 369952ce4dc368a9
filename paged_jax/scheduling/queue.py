"""The scheduler one request at a time: a queue in linked lists, work only at events.

First come, first served with the youngest as victim keeps every unfinished request in the order of
its arrival: the running ones, then the preempted ones, then those never admitted. So one list and
the place of the first waiting request are the whole queue: admitting moves that place forward,
preempting moves it back. Running sequences also stand in the list of the step they end in.

The rules are those of ``policy``; memory is any module with the verbs of ``verbs.Memory``. The same
decisions over the rows of an engine are ``batching``'s; a test holds both equal.
Cost: O(1) for each admission, preemption, growth and end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.memory import linked_list as lists
from paged_jax.memory.loops import fetch, repeat_where, when
from paged_jax.memory.verbs import Memory, Stay
from paged_jax.scheduling import policy
from paged_jax.workload.arrays import RequestArrays


class Queue(flax.struct.PyTreeNode):
    """Unfinished requests in order of arrival, and when their sequences end."""

    order: lists.LinkedLists  # R + 1 nodes: unfinished requests; the last node is the head
    waiting: jax.Array  # i32: first request that waits, R when none is left
    ends: lists.LinkedLists  # Y + bound nodes: rows by the step they end in, modulo the bound
    generated_R: jax.Array  # i32: tokens each live sample had generated when last admitted
    admitted_R: jax.Array  # i32: step of the last admission
    live_R: jax.Array  # i32: samples that run
    requests: jax.Array  # i32: running requests
    rows: jax.Array  # i32: running sequences
    preemptions: jax.Array  # i32
    finished: jax.Array  # i32: requests


def create(work: RequestArrays, output_bound: int) -> Queue:
    """A queue of all requests, none admitted. ``output_bound``: no output is longer."""
    zero = jnp.int32(0)
    return Queue(
        order=lists.chain(work.bound, work.count),
        waiting=zero,
        ends=lists.create(work.output_Y.shape[0] + output_bound),
        generated_R=jnp.zeros(work.bound, jnp.int32),
        admitted_R=jnp.zeros(work.bound, jnp.int32),
        live_R=jnp.zeros(work.bound, jnp.int32),
        requests=zero,
        rows=zero,
        preemptions=zero,
        finished=zero,
    )


def advance(
    queue: Queue,
    memory: Any,
    step: jax.Array,
    *,
    work: RequestArrays,
    limits: policy.Limits,
    verbs: Memory,
) -> tuple[Queue, Any, jax.Array]:
    """One step up to the moment of record: make room, grow, admit.

    Returns ``(queue', memory', verdict)``, the verdict being ``policy``'s reason for which nobody
    more was admitted. ``retire`` ends the step.
    """
    before = queue.preemptions
    queue, memory = _make_room(queue, memory, step, work=work, verbs=verbs)
    if work.samples > 1:
        memory = _visit_admitted(
            queue, memory, step - 1, work, lambda memory, r: verbs.split(memory, work, r)
        )
    memory = verbs.grow(memory, step, queue.rows)
    preempted = queue.preemptions > before

    def judge(queue: Queue, memory: Any) -> tuple[Stay, jax.Array, jax.Array]:
        stay, rows = _head(queue, step, work)
        verdict = policy.judge(
            limits,
            waiting=(queue.waiting < work.bound) & (work.arrival_R[stay.request] <= step),
            need=verbs.need(memory, work, stay),
            free=verbs.free(memory),
            rows=rows,
            running=queue.rows,
            preempted=preempted,
        )
        return stay, rows, verdict

    def admit(carry: tuple) -> tuple:
        queue, memory, stay, rows, _ = carry
        memory, fits = verbs.store(memory, work, stay)
        queue = when(fits, lambda queue: _start(queue, stay, rows, work), queue)
        stay, rows, verdict = judge(queue, memory)
        return queue, memory, stay, rows, jnp.where(fits, verdict, policy.STRANDED)

    queue, memory, _, _, verdict = lax.while_loop(
        lambda carry: carry[-1] == policy.ADMITTED, admit, (queue, memory, *judge(queue, memory))
    )
    return queue, memory, verdict


def retire(
    queue: Queue, memory: Any, step: jax.Array, *, work: RequestArrays, verbs: Memory
) -> tuple[Queue, Any]:
    """Ends a step: new samples fork off, sequences that have generated their last token leave."""
    head = _ends_head(queue, work, step)

    def fork(memory: Any, request: jax.Array) -> Any:
        fresh = queue.generated_R[request] == 0
        return when(fresh, lambda memory: verbs.fork(memory, work, request), memory)

    if work.samples > 1:
        memory = _visit_admitted(queue, memory, step, work, fork)

    def end(carry: tuple[Queue, Any]) -> tuple[Queue, Any]:
        queue, memory = carry
        row, next_Z = fetch(queue.ends.next_Z, head)
        request = row // work.samples
        tokens = work.prompt_R[request] + work.output_Y[row] - 1
        memory = verbs.release(memory, work, row, tokens, step)
        running, live_R = fetch(queue.live_R, request)
        live = running - 1
        queue = queue.replace(
            ends=lists.remove(queue.ends.replace(next_Z=next_Z), row),
            live_R=live_R.at[request].set(live),
            rows=queue.rows - 1,
        )
        if work.samples == 1:
            return _finish(queue, request), memory
        return when(live == 0, lambda queue: _finish(queue, request), queue), memory

    return lax.while_loop(lambda carry: carry[0].ends.next_Z[head] != head, end, (queue, memory))


def _finish(queue: Queue, request: jax.Array) -> Queue:
    return queue.replace(
        order=lists.remove(queue.order, request),
        requests=queue.requests - 1,
        finished=queue.finished + 1,
    )


def _head(queue: Queue, step: jax.Array, work: RequestArrays) -> tuple[Stay, jax.Array]:
    """The first waiting request as memory sees it, and the sequences it adds."""
    request = jnp.minimum(queue.waiting, work.bound - 1)
    generated = queue.generated_R[request]
    rows = work.output_Y.shape[0]
    stay = Stay(request, generated, step, jnp.int32(rows), jnp.int32(0))
    if work.has_donors:
        donor = jnp.minimum(work.donor_R[request], work.bound - 1)
        # Blocks written in this very step cannot be shared in it.
        known = (queue.live_R[donor] > 0) & (queue.admitted_R[donor] < step)
        known &= work.shared_R[request] > 0
        since = step - queue.admitted_R[donor]
        stored = work.prompt_R[donor] + queue.generated_R[donor] + since
        live_F = work.outputs(donor) > queue.generated_R[donor] + since
        stay = stay.replace(
            donor=jnp.where(known, donor * work.samples + jnp.argmax(live_F), rows),
            donor_tokens=jnp.where(known, stored, 0),
        )
    return stay, (work.outputs(request) > generated).sum(dtype=jnp.int32)


def _start(queue: Queue, stay: Stay, rows: jax.Array, work: RequestArrays) -> Queue:
    """The first waiting request, which is stored, begins to run."""
    request = stay.request

    def runs(f: jax.Array) -> jax.Array:
        return work.output_Y[request * work.samples + f] > stay.generated

    def begin(f: jax.Array, queue: Queue) -> Queue:
        row = request * work.samples + f
        head = _ends_head(queue, work, stay.step + work.output_Y[row] - 1 - stay.generated)
        return queue.replace(ends=lists.append(queue.ends, head, row))

    queue = repeat_where(work.samples, runs, begin, queue)
    return queue.replace(
        waiting=queue.order.next_Z[request],
        admitted_R=queue.admitted_R.at[request].set(stay.step),
        live_R=queue.live_R.at[request].set(rows),
        requests=queue.requests + 1,
        rows=queue.rows + rows,
    )


def _make_room(
    queue: Queue, memory: Any, step: jax.Array, *, work: RequestArrays, verbs: Memory
) -> tuple[Queue, Any]:
    """Preempts the youngest until what the others demand is free."""

    def crowded(carry: tuple[Queue, Any]) -> jax.Array:
        queue, memory = carry
        demand = verbs.demand(memory, step)
        return (queue.requests > 0) & ~policy.may_grow(demand, verbs.free(memory))

    def evict(carry: tuple[Queue, Any]) -> tuple[Queue, Any]:
        return _preempt_youngest(*carry, step, work=work, verbs=verbs)

    return lax.while_loop(crowded, evict, (queue, memory))


def _preempt_youngest(
    queue: Queue, memory: Any, step: jax.Array, *, work: RequestArrays, verbs: Memory
) -> tuple[Queue, Any]:
    """The youngest running request gives up its memory and waits at the front."""
    request = queue.order.previous_Z[queue.waiting]
    before, generated_R = fetch(queue.generated_R, request)
    running, live_R = fetch(queue.live_R, request)
    generated = before + step - queue.admitted_R[request]
    tokens = work.prompt_R[request] + generated - 1

    def runs(f: jax.Array) -> jax.Array:
        return work.output_Y[request * work.samples + f] > generated

    def leave(f: jax.Array, carry: tuple[Queue, Any]) -> tuple[Queue, Any]:
        queue, memory = carry
        row = request * work.samples + f
        memory = verbs.release(memory, work, row, tokens, step - 1)
        return queue.replace(ends=lists.remove(queue.ends, row)), memory

    queue, memory = repeat_where(work.samples, runs, leave, (queue, memory))
    queue = queue.replace(
        waiting=request,
        generated_R=generated_R.at[request].set(generated),
        requests=queue.requests - 1,
        rows=queue.rows - running,
        live_R=live_R.at[request].set(0),
        preemptions=queue.preemptions + 1,
    )
    return queue, memory


def _visit_admitted(
    queue: Queue, memory: Any, step: jax.Array, work: RequestArrays, visit: Callable
) -> Any:
    """``visit(memory, request)`` for each running request that was admitted in ``step``.

    They are the youngest; ``step`` is this step, or the one before while nobody was admitted yet.
    """

    def recent(carry: tuple[jax.Array, Any]) -> jax.Array:
        request = jnp.minimum(carry[0], work.bound - 1)
        return (carry[0] < work.bound) & (queue.admitted_R[request] == step)

    def part(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        request, memory = carry
        return queue.order.previous_Z[request], visit(memory, request)

    return lax.while_loop(recent, part, (queue.order.previous_Z[queue.waiting], memory))[1]


def _ends_head(queue: Queue, work: RequestArrays, step: jax.Array) -> jax.Array:
    rows = work.output_Y.shape[0]
    return rows + step % (queue.ends.next_Z.shape[0] - rows)
