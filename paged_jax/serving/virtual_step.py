"""One step of virtual time, and many of them in one native loop.

A step is ``batching``'s, as the engine takes it; it lasts as long as ``cost_model.step_seconds``
says for what it computes on a device, or, without a device, one second. The clock is whole seconds
and a fraction, so that it never loses more than 0.1 microseconds a step.

Static batching computes as users of padded batches do: all prompts of a batch as long as its
longest, in one step, and then a token for every row of the batch until the last one ends.

Cost: O(R + B * M) a step.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.config import MOST, DeviceConfig, ModelConfig
from paged_jax.memory.ledger import CATEGORIES, Ledger
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
from paged_jax.scheduling.book import Book
from paged_jax.serving import cost_model
from paged_jax.serving.served import NEVER


class Time(flax.struct.PyTreeNode):
    """Seconds since the first arrival; scalars or arrays of one shape."""

    whole: jax.Array  # i32
    fraction: jax.Array  # f32, from 0 and below 1

    def __le__(self, other: Time) -> jax.Array:
        same = (self.whole == other.whole) & (self.fraction <= other.fraction)
        return (self.whole < other.whole) | same

    def after(self, seconds: jax.Array) -> Time:
        """So many seconds later."""
        fraction = self.fraction + seconds
        carried = jnp.floor(fraction)
        return Time(self.whole + carried.astype(jnp.int32), fraction - carried)


class State(flax.struct.PyTreeNode):
    """A run between two steps."""

    book: Book
    memory: Rows
    now: Time
    step: jax.Array  # i32: of the next step
    batch_R: jax.Array  # bool: the batch that runs, of static batching
    age: jax.Array  # i32: steps that it has run
    preemptions: jax.Array  # i32
    swaps: jax.Array  # i32: of those, how many went to host memory
    start_R: jax.Array  # i32: the step that took a request in first
    first_R: jax.Array  # i32: the step that drew its first token
    finish_R: jax.Array  # i32: the step that drew its last
    found_R: jax.Array  # i32: tokens that it found in the prefix cache when it was first taken in


class Record(flax.struct.PyTreeNode):
    """X steps of one call."""

    begin: Time  # [X]
    seconds_X: jax.Array
    running_X: jax.Array
    waiting_X: jax.Array
    ledger_XJ: jax.Array
    host_XJ: jax.Array


class Settings(flax.struct.PyTreeNode):
    """What a program is compiled for."""

    model: ModelConfig = flax.struct.field(pytree_node=False)
    device: DeviceConfig | None = flax.struct.field(pytree_node=False)
    kv_dtype: str = flax.struct.field(pytree_node=False)
    static: bool = flax.struct.field(pytree_node=False)
    steps: int = flax.struct.field(pytree_node=False)


@functools.partial(jax.jit, static_argnames="compiled", donate_argnames="state")
def advance(
    state: State, arrival_R: Time, limits: policy.Limits, compiled: Settings
) -> tuple[State, Record]:
    """As many steps as a call has, or as are left."""

    def goes_on(carry: tuple[State, Record, jax.Array]) -> jax.Array:
        state, _, nth = carry
        return (nth < compiled.steps) & (state.book.rank_R < MOST).any()

    def one_step(carry: tuple[State, Record, jax.Array]) -> tuple[State, Record, jax.Array]:
        state, record, nth = carry
        state, found = _step(_wake(state, arrival_R), arrival_R, limits, compiled)
        record = jax.tree.map(lambda many, one: many.at[nth].set(one), record, found)
        return state, record, nth + 1

    per_step = (compiled.steps,)
    slots_XJ = jnp.zeros((compiled.steps, len(CATEGORIES)), jnp.int32)
    nothing = Record(
        begin=Time(jnp.zeros(per_step, jnp.int32), jnp.zeros(per_step)),
        seconds_X=jnp.zeros(per_step),
        running_X=jnp.zeros(per_step, jnp.int32),
        waiting_X=jnp.zeros(per_step, jnp.int32),
        ledger_XJ=slots_XJ,
        host_XJ=slots_XJ,
    )
    state, record, _ = lax.while_loop(goes_on, one_step, (state, nothing, jnp.int32(0)))
    return state, record


def _wake(state: State, arrival_R: Time) -> State:
    """Where nobody is there, time passes until the next request arrives."""
    came_R = arrival_R <= state.now
    there = (came_R & (state.book.rank_R < MOST)).any()
    following = jnp.minimum(came_R.sum(), len(came_R) - 1)
    due = jax.tree.map(lambda array: array[following], arrival_R)
    now = jax.tree.map(lambda one, other: jnp.where(there, one, other), state.now, due)
    return state.replace(now=now)


def _step(
    state: State, arrival_R: Time, limits: policy.Limits, compiled: Settings
) -> tuple[State, Record]:
    """One step, and its record: a ``Record`` of arrays without the axis X."""
    came_R = arrival_R <= state.now
    allowed_R, age = came_R, state.age
    if compiled.static:
        allowed_R, age = _batch(state, came_R)
    seated, memory, plan = _plan(state.book, state.memory, limits, allowed_R)
    draws_B, _ = batching.draws(seated, memory, plan)
    if compiled.static:
        shape = _padded(seated, allowed_R, age)
    else:
        shape = (memory.length_B, plan.tokens_B, draws_B)
    seconds = _seconds(compiled, shape, plan.moved * memory.block_size / len(memory.windows))
    found = Record(
        begin=state.now,
        seconds_X=seconds,
        running_X=books.seated(seated).sum(dtype=jnp.int32),
        waiting_X=(came_R & ~seated.running_R & (seated.rank_R < MOST)).sum(dtype=jnp.int32),
        ledger_XJ=_ledger(seated, memory, short=plan.verdict == policy.SHORT),
        host_XJ=_host_ledger(seated, memory),
    )
    token_B = seated.token_RT.at[seated.owner_B, seated.known_B()].get(mode="clip")
    nobody_B = jnp.zeros_like(draws_B)
    # A request has one sample, so nobody ever forks.
    after, memory, _ = batching.finish(
        seated, memory, plan, draws_B, token_B, nobody_B, decodes=True
    )
    state = _note(state, plan, seated, after)
    now = state.now.after(seconds)
    return state.replace(
        book=after, memory=memory, now=now, step=state.step + 1, batch_R=allowed_R, age=age + 1
    ), found


def _seconds(compiled: Settings, shape: tuple[jax.Array, ...], swapped: jax.Array) -> jax.Array:
    """What a step of a ``count_step``'s shape lasts that swaps so many slots of all layers."""
    if compiled.device is None:
        return jnp.float32(1)
    counts = cost_model.count_step(compiled.model, *shape).replace(swapped_slots=swapped)
    return cost_model.step_seconds(compiled.model, compiled.device, counts, compiled.kv_dtype)


def _note(state: State, plan: batching.Step, seated: Book, after: Book) -> State:
    """What is kept of requests: ``seated`` are those of a step, ``after`` what it left of them."""
    drew_R = (after.drawn_RF > seated.drawn_RF).any(axis=1)
    over_R = (seated.rank_R < MOST) & (after.rank_R >= MOST)
    return state.replace(
        preemptions=state.preemptions + plan.preempted_R.sum(dtype=jnp.int32),
        swaps=state.swaps + (plan.preempted_R & plan.swapped_R).sum(dtype=jnp.int32),
        found_R=jnp.where(state.start_R == NEVER, plan.found_R, state.found_R),
        start_R=_first(state.start_R, plan.admitted_R, state.step),
        first_R=_first(state.first_R, drew_R, state.step),
        finish_R=_first(state.finish_R, over_R, state.step),
    )


def _plan(
    waiting: Book, memory: Rows, limits: policy.Limits, allowed_R: jax.Array
) -> tuple[Book, Rows, batching.Step]:
    """The step up to the forward pass, as an engine takes it: one that only decodes is cheaper."""

    def advance(*, decodes: bool) -> tuple[Book, Rows, batching.Step]:
        seated, held, _, plan = batching.advance(
            waiting, memory, limits, arrived_R=allowed_R, decodes=decodes
        )
        # A ``cond`` copies what its branches return, and the tokens of all requests are large.
        return seated.replace(token_RT=jnp.zeros((0, 0), jnp.int32)), held, plan

    if memory.host is not None:  # it is large as well
        seated, memory, _, plan = batching.advance(waiting, memory, limits, arrived_R=allowed_R)
        return seated, memory, plan
    calm = batching.only_decodes(waiting, memory, limits, arrived_R=allowed_R)
    seated, held, plan = lax.cond(
        calm, lambda: advance(decodes=True), lambda: advance(decodes=False)
    )
    return seated.replace(token_RT=waiting.token_RT), held, plan


def _batch(state: State, came_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The requests of the batch that runs, or of the next one, and the steps it has run."""
    rows = state.memory.length_B.shape[0]
    waits_R = came_R & (state.book.rank_R < MOST)
    ended = ~state.book.running_R.any()
    next_R = waits_R & (jnp.cumsum(waits_R) <= rows)
    return jnp.where(ended, next_R, state.batch_R), jnp.where(ended, 0, state.age)


def _padded(
    seated: Book, batch_R: jax.Array, age: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lengths, new tokens and drawing rows of a batch that computes its longest request's shape."""
    row_B = jnp.arange(seated.owner_B.shape[0])
    in_B = row_B < batch_R.sum()
    longest = jnp.max(seated.prompt_R, where=batch_R, initial=0)
    queries = jnp.where(age == 0, longest, 1)
    return jnp.where(in_B, longest + age, 0), jnp.where(in_B, queries, 0), in_B


def _ledger(seated: Book, memory: Rows, *, short: jax.Array) -> jax.Array:
    """Slots by category, [J], where every output's end is known."""
    output_B = seated.output_RF.at[seated.owner_B, seated.sample_B].get(mode="fill", fill_value=1)
    final_B = seated.prompt_B() + output_B - 1
    pool_slots = memory.table.pool.blocks * memory.block_size
    return _stacked(memory.ledger(final_B, pool_slots=pool_slots, short=short))


def _host_ledger(seated: Book, memory: Rows) -> jax.Array:
    """The same of host memory, where requests of one sample have a row each; zeros without any."""
    if memory.host is None:
        return jnp.zeros(len(CATEGORIES), jnp.int32)
    return _stacked(memory.host_ledger(seated.prompt_R + seated.output_RF[:, 0] - 1))


def _stacked(ledger: Ledger) -> jax.Array:
    return jnp.stack([getattr(ledger, name) for name in CATEGORIES])


def _first(step_R: jax.Array, now_R: jax.Array, step: jax.Array) -> jax.Array:
    """The steps of what happens now for the first time are set."""
    return jnp.where(now_R & (step_R == NEVER), step, step_R)
