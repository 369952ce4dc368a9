"""Continuous batching: one step of scheduling over the rows of a block table, as a pure function.

A step first serves what runs: rows that decode take one token each, rows with more to compute (a
prompt, or what a preemption undid) share what is left of the token budget, in order of service.
While their blocks do not all fit, the last request in that order gives up its memory
(PagedAttention, section 4.5). If nobody had to, requests are admitted from the head of the queue as
long as ``policy.judge`` lets them in. The unit is the request with all its samples: they are
admitted and preempted together, the first one computes the prompt, and the others fork from it once
it is stored.

``advance`` is the step up to the forward pass, ``draws`` says who draws from it, ``finish`` is what
comes after. An engine puts a model between them, a simulation nothing, so both take the same
decisions. A row stores a token in the step after it was drawn: between two steps a row that decodes
has stored all it knows but one token, and to decode is to compute a prompt's last token.

Cost: O(B * W) a step, W the blocks a row may gain; O(B * M) for each preemption and admission.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.config import MOST
from paged_jax.memory import block_table
from paged_jax.memory.block_table import BlockTable, Copies
from paged_jax.memory.layout import blocks_of
from paged_jax.scheduling import policy
from pallas_kernels import dims


class Book(flax.struct.PyTreeNode):
    """Who is served: R requests of up to F samples, and who sits in the table's B rows."""

    rank_R: jax.Array  # i32: place in the order of service, no two alike; MOST for no request
    running_R: jax.Array  # bool; the others wait
    prompt_R: jax.Array  # i32: tokens
    output_RF: jax.Array  # i32: tokens that a sample draws at most
    drawn_RF: jax.Array  # i32: tokens that a sample has drawn
    live_RF: jax.Array  # bool: samples that have not ended
    owner_B: jax.Array  # i32: the request of a row, R for none
    sample_B: jax.Array  # i32: which of its samples

    def known_B(self) -> jax.Array:
        """Tokens of each row's sequence, prompt and drawn; 0 for a free row."""
        drawn_B = self.drawn_RF.at[self.owner_B, self.sample_B].get(mode="fill", fill_value=0)
        return self.prompt_B() + drawn_B

    def prompt_B(self) -> jax.Array:
        """Tokens of each row's prompt, 0 for a free row."""
        return jnp.append(self.prompt_R, 0)[self.owner_B]

    def leader_B(self) -> jax.Array:
        """The first row of each row's request; B for a free row."""
        rows = self.owner_B.shape[0]
        row_B = jnp.arange(rows, dtype=jnp.int32)
        first_R = jnp.full(self.rank_R.shape[0], rows).at[self.owner_B].min(row_B, mode="drop")
        return jnp.append(first_R, rows)[self.owner_B]


class Step(flax.struct.PyTreeNode):
    """What a step computes and why it took in nobody more."""

    tokens_B: jax.Array  # i32: tokens each row computes and stores, its last ones
    admitted_R: jax.Array  # bool
    preempted_R: jax.Array  # bool
    verdict: jax.Array  # i32: a constant of ``policy``


def create(*, requests: int, samples: int, rows: int) -> Book:
    """A book without requests."""
    per_sample = (requests, samples)
    return Book(
        rank_R=jnp.full(requests, MOST, jnp.int32),
        running_R=jnp.zeros(requests, bool),
        prompt_R=jnp.ones(requests, jnp.int32),
        output_RF=jnp.ones(per_sample, jnp.int32),
        drawn_RF=jnp.zeros(per_sample, jnp.int32),
        live_RF=jnp.zeros(per_sample, bool),
        owner_B=jnp.full(rows, requests, jnp.int32),
        sample_B=jnp.zeros(rows, jnp.int32),
    )


def advance(
    book: Book,
    table: BlockTable,
    limits: policy.Limits,
    *,
    arrived_R: jax.Array | None = None,
    most_tokens: int | None = None,
) -> tuple[Book, BlockTable, Copies, Step]:
    """A step up to the forward pass: who computes what, with room for all of it.

    Args:
      book: the requests; those of a rank below ``MOST`` that do not run wait.
      table: B rows.
      limits: the settings of the rules.
      arrived_R: bool, requests that may be admitted yet. Default: all.
      most_tokens: static bound on what a row that runs computes; 1 makes a decode step cheap.

    Returns:
      ``(book', table', copies, step)``. ``table'`` counts the step's tokens as stored; ``copies``
      are to be made before they are.
    """
    dims(rank_R=book.rank_R, owner_B=book.owner_B, length_B=table.length_B)
    ran_R = book.running_R
    tokens_B = grants(book, table, limits)
    book, table, copies, tokens_B = _make_room(book, table, tokens_B, most_tokens)
    preempted_R = ran_R & ~book.running_R

    def judge(book: Book, table: BlockTable, tokens_B: jax.Array) -> Any:
        waits_R = _waits(book, arrived_R)
        return _judge(book, table, limits, waits_R, tokens_B, preempted_R.any())

    def admit(carry: tuple) -> tuple:
        book, table, tokens_B, head, granted, _ = carry
        book = _seat(book, head)
        leads_B = (book.owner_B == head) & (book.leader_B() == jnp.arange(len(tokens_B)))
        new_B = jnp.where(leads_B, granted, 0)
        table, _, _ = block_table.reserve(table, new_B)
        tokens_B += new_B
        return book, table, tokens_B, *judge(book, table, tokens_B)

    book, table, tokens_B, *_, verdict = lax.while_loop(
        lambda carry: carry[-1] == policy.ADMITTED,
        admit,
        (book, table, tokens_B, *judge(book, table, tokens_B)),
    )
    admitted_R = book.running_R & ~ran_R
    return book, table, copies, Step(tokens_B, admitted_R, preempted_R, verdict)


def only_decodes(
    book: Book,
    table: BlockTable,
    limits: policy.Limits,
    *,
    arrived_R: jax.Array | None = None,
) -> jax.Array:
    """Whether in the next step every row decodes, nobody is preempted and nobody admitted."""
    wanted_B = targets(book, table) - table.length_B
    seated_B = book.owner_B < book.rank_R.shape[0]
    demand = block_table.demand(table, wanted_B)
    *_, verdict = _judge(
        book,
        table,
        limits,
        _waits(book, arrived_R),
        wanted_B,
        jnp.bool_(False),
        demand=demand,
    )
    calm = (wanted_B == seated_B).all() & seated_B.any()
    within = wanted_B.sum() <= limits.tokens
    fits = policy.may_grow(demand, table.pool.free)
    return calm & within & fits & (verdict != policy.ADMITTED)


def grants(book: Book, table: BlockTable, limits: policy.Limits) -> jax.Array:
    """Tokens that each row computes in the next step if all that runs stays, [B]."""
    wanted_B = targets(book, table) - table.length_B
    decodes_B = wanted_B == 1
    left = limits.tokens - decodes_B.sum(dtype=jnp.int32)

    def cut(wanted_B: jax.Array) -> jax.Array:
        longer_B = jnp.where(decodes_B, 0, wanted_B)
        order_B = jnp.argsort(jnp.append(book.rank_R, MOST)[book.owner_B], stable=True)
        ordered_B = longer_B[order_B]
        before_B = jnp.zeros_like(longer_B).at[order_B].set(jnp.cumsum(ordered_B) - ordered_B)
        return jnp.where(decodes_B, 1, policy.share(limits, longer_B, before_B, left))

    return lax.cond((wanted_B > 1).any(), cut, lambda wanted_B: wanted_B, wanted_B)


def targets(book: Book, table: BlockTable) -> jax.Array:
    """Tokens that each row is to have stored next: all it knows, [B].

    While others wait to fork from it, the first sample stops at the end of the prompt; they have
    nothing to store till then.
    """
    follows_B, leader_B = _follows(book, table)
    joint_B = jnp.zeros_like(follows_B).at[leader_B].max(follows_B, mode="drop")
    return jnp.where(follows_B, 0, jnp.where(joint_B, book.prompt_B(), book.known_B()))


def draws(book: Book, table: BlockTable, step: Step) -> tuple[jax.Array, jax.Array]:
    """Who draws a token after a step's forward pass, and from which row's last hidden state.

    Returns ``(draws_B, source_B)``: rows that have stored all they know, and samples that are
    about to fork from a prompt that was stored for the first time.
    """
    known_B, (follows_B, leader_B) = book.known_B(), _follows(book, table)
    draws_B = (step.tokens_B > 0) & (table.length_B == known_B)
    ready_B = draws_B.at[leader_B].get(mode="fill", fill_value=False)
    joins_B = follows_B & ready_B & (known_B == book.prompt_B())
    row_B = jnp.arange(known_B.shape[0], dtype=jnp.int32)
    return draws_B | joins_B, jnp.where(joins_B, leader_B, row_B)


def finish(
    book: Book, table: BlockTable, draws_B: jax.Array, ends_B: jax.Array
) -> tuple[Book, BlockTable, jax.Array]:
    """The end of a step: samples fork from a stored prompt, rows draw, rows that end are emptied.

    ``ends_B``: bool, rows whose sequence ends with the token it draws now, besides those that draw
    the last they may. Returns ``(book', table', ended_B)``.
    """
    rows, requests = book.owner_B.shape[0], book.rank_R.shape[0]
    follows_B, leader_B = _follows(book, table)
    stored_B = table.length_B.at[leader_B].get(mode="fill", fill_value=0) >= book.prompt_B()
    table, _ = block_table.fork(table, jnp.where(follows_B & stored_B, leader_B, rows))

    at_draw = (jnp.where(draws_B, book.owner_B, requests), book.sample_B)
    drawn_RF = book.drawn_RF.at[at_draw].add(1, mode="drop")
    spent_B = (drawn_RF >= book.output_RF).at[at_draw].get(mode="fill", fill_value=False)
    ended_B = draws_B & (spent_B | ends_B)
    live_RF = book.live_RF.at[jnp.where(ended_B, book.owner_B, requests), book.sample_B].set(
        False, mode="drop"
    )
    book, table = vacate(book.replace(drawn_RF=drawn_RF, live_RF=live_RF), table, ended_B)
    return _close(book), table, ended_B


def stop(book: Book, table: BlockTable, stopped_RF: jax.Array) -> tuple[Book, BlockTable]:
    """Between two steps: the marked samples end, whether they run or wait."""
    rows_B = stopped_RF.at[book.owner_B, book.sample_B].get(mode="fill", fill_value=False)
    book, table = vacate(book.replace(live_RF=book.live_RF & ~stopped_RF), table, rows_B)
    return _close(book), table


def _close(book: Book) -> Book:
    """Requests none of whose samples is live are over, and their slots empty."""
    over_R = ~book.live_RF.any(axis=1)
    return book.replace(
        running_R=book.running_R & ~over_R, rank_R=jnp.where(over_R, MOST, book.rank_R)
    )


def vacate(book: Book, table: BlockTable, rows_B: jax.Array) -> tuple[Book, BlockTable]:
    """Empties rows and gives their seats up."""
    table, _ = block_table.release(table, rows_B & (table.length_B > 0))
    return book.replace(owner_B=jnp.where(rows_B, book.rank_R.shape[0], book.owner_B)), table


def _follows(book: Book, table: BlockTable) -> tuple[jax.Array, jax.Array]:
    """Rows that wait to fork from their request's first row, and that row for every row."""
    leader_B = book.leader_B()
    row_B = jnp.arange(leader_B.shape[0])
    return (leader_B < row_B) & (table.length_B == 0), leader_B


def _waits(book: Book, arrived_R: jax.Array | None) -> jax.Array:
    waits_R = ~book.running_R & (book.rank_R < MOST)
    return waits_R if arrived_R is None else waits_R & arrived_R


def _make_room(
    book: Book, table: BlockTable, tokens_B: jax.Array, most_tokens: int | None
) -> tuple[Book, BlockTable, Copies, jax.Array]:
    """Room for the grants of the rows that stay; the last in the order of service go first."""

    def crowded(carry: tuple[Book, BlockTable, jax.Array]) -> jax.Array:
        book, table, tokens_B = carry
        demand = block_table.demand(table, tokens_B)
        return book.running_R.any() & ~policy.may_grow(demand, table.pool.free)

    def preempt(carry: tuple[Book, BlockTable, jax.Array]) -> tuple[Book, BlockTable, jax.Array]:
        book, table, tokens_B = carry
        victim = jnp.argmax(jnp.where(book.running_R, book.rank_R, -1))
        leaves_B = book.owner_B == victim
        book, table = vacate(book, table, leaves_B)
        book = book.replace(running_R=book.running_R.at[victim].set(False))
        return book, table, jnp.where(leaves_B, 0, tokens_B)

    book, table, tokens_B = lax.while_loop(crowded, preempt, (book, table, tokens_B))
    table, copies, _ = block_table.reserve(table, tokens_B, most_tokens=most_tokens)
    return book, table, copies, tokens_B


def _judge(
    book: Book,
    table: BlockTable,
    limits: policy.Limits,
    waits_R: jax.Array,
    tokens_B: jax.Array,
    preempted: jax.Array,
    *,
    demand: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The head of the queue, the tokens it would compute now, and the verdict on it.

    ``demand``: blocks that ``tokens_B`` are yet to take. What admitted prompts have yet to store
    counts as taken.
    """
    head = jnp.argmin(jnp.where(waits_R, book.rank_R, MOST))
    prompt, live_F, drawn_F = book.prompt_R[head], book.live_RF[head], book.drawn_RF[head]
    size, live = table.block_size, live_F.sum(dtype=jnp.int32)
    own_F = jnp.where(live_F, blocks_of(prompt + drawn_F, size) - prompt // size, 0)
    fresh = (drawn_F == 0).all()
    need = jnp.where(fresh, blocks_of(prompt, size), prompt // size + own_F.sum(dtype=jnp.int32))
    target = jnp.where(live == 1, prompt + jnp.max(drawn_F, where=live_F, initial=0), prompt)
    granted = policy.share(limits, target, tokens_B.sum(dtype=jnp.int32), limits.tokens)
    rows = book.owner_B.shape[0]
    verdict = policy.judge(
        limits.replace(rows=jnp.minimum(limits.rows, rows)),
        waiting=waits_R.any(),
        need=need,
        free=table.pool.free - demand - _outstanding(book, table, tokens_B, demand),
        rows=live,
        running=(book.owner_B < book.rank_R.shape[0]).sum(dtype=jnp.int32),
        preempted=preempted,
        granted=granted,
    )
    return head, granted, verdict


def _outstanding(
    book: Book, table: BlockTable, tokens_B: jax.Array, demand: jax.Array | int
) -> jax.Array:
    """Blocks that seated rows have yet to take for what they know already."""
    follows_B, _ = _follows(book, table)
    known_B, prompt_B, size = book.known_B(), book.prompt_B(), table.block_size
    stored_B = table.length_B + (0 if isinstance(demand, int) else tokens_B)
    has_B = jnp.where(follows_B, prompt_B // size, blocks_of(stored_B, size))
    gap_B = jnp.where(follows_B & (known_B == prompt_B), 0, blocks_of(known_B, size) - has_B)
    return jnp.maximum(gap_B, 0).sum(dtype=jnp.int32)


def _seat(book: Book, request: jax.Array) -> Book:
    """The live samples of a waiting request take the first free rows."""
    requests = book.rank_R.shape[0]
    free_B = book.owner_B == requests
    nth_B = jnp.cumsum(free_B) - 1
    live_F = book.live_RF[request]
    taken_B = free_B & (nth_B < live_F.sum())
    sample_F = jnp.argsort(~live_F, stable=True).astype(jnp.int32)
    return book.replace(
        running_R=book.running_R.at[request].set(True),
        owner_B=jnp.where(taken_B, request.astype(jnp.int32), book.owner_B),
        sample_B=jnp.where(taken_B, sample_F.at[nth_B].get(mode="clip"), book.sample_B),
    )
