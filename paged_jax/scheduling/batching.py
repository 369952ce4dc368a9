"""Continuous batching: one step of scheduling over the rows of a block table, as a pure function.

A step first serves what runs: rows that decode take one token each, rows with more to compute (a
prompt, or what a preemption undid) share what is left of the token budget, in order of service.
While their blocks do not all fit, the last request in that order gives up its memory
(PagedAttention, section 4.5). If nobody had to, requests are admitted from the head of the queue as
long as ``policy.judge`` lets them in. The unit is the request with all its samples: they are
admitted and preempted together, the first one computes the prompt, and the others fork from it once
it is stored. With a prefix cache a request begins with the blocks that hold its first tokens
already.

``advance`` is the step up to the forward pass, ``draws`` says who draws from it, ``finish`` is what
comes after. An engine puts a model between them, a simulation nothing, so both take the same
decisions. A row stores a token in the step after it was drawn: between two steps a row that decodes
has stored all it knows but one token, and to decode is to compute a prompt's last token.

Cost: O(B * W) a step, W the blocks a row may gain; O(B * M) for each preemption and admission.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.config import MOST
from paged_jax.memory.block_table import Copies
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.loops import when
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import book as books
from paged_jax.scheduling import policy
from paged_jax.scheduling.book import Book
from pallas_kernels import dims


class Head(flax.struct.PyTreeNode):
    """The first request in the queue, and what admitting it now would mean."""

    request: jax.Array  # i32
    tokens: jax.Array  # i32: it would compute in this step
    block_M: jax.Array  # i32: cached blocks that it begins with
    hits: jax.Array  # i32: how many
    verdict: jax.Array  # i32: a constant of ``policy``


class Step(flax.struct.PyTreeNode):
    """What a step computes and why it took in nobody more."""

    tokens_B: jax.Array  # i32: tokens each row computes and stores, its last ones
    admitted_R: jax.Array  # bool
    preempted_R: jax.Array  # bool
    found_R: jax.Array  # i32: tokens that an admitted request found in the prefix cache
    verdict: jax.Array  # i32: a constant of ``policy``


def advance(
    book: Book,
    memory: Rows,
    limits: policy.Limits,
    *,
    arrived_R: jax.Array | None = None,
    decodes: bool = False,
) -> tuple[Book, Rows, Copies, Step]:
    """A step up to the forward pass: who computes what, with room for all of it.

    Args:
      book: the requests; those of a rank below ``MOST`` that do not run wait.
      memory: B rows.
      limits: the settings of the rules.
      arrived_R: bool, requests that may be admitted yet. Default: all.
      decodes: ``only_decodes`` holds: nobody is preempted, nor admitted even if growth has evicted
        what made the head of the queue too large. An engine is in a dispatch then.

    Returns:
      ``(book', memory', copies, step)``. ``memory'`` counts the step's tokens as stored; ``copies``
      are to be made before they are.
    """
    dims(rank_R=book.rank_R, owner_B=book.owner_B, length_B=memory.length_B)
    ran_R = book.running_R
    if decodes:
        tokens_B = books.seated(book).astype(jnp.int32)
    else:
        book, memory, tokens_B = _make_room(book, memory, grants(book, memory, limits))
    memory, copies, _ = memory.reserve(tokens_B, most_tokens=1 if decodes else None)
    preempted_R = ran_R & ~book.running_R

    def judge(book: Book, memory: Rows, tokens_B: jax.Array) -> Head:
        waits_R = _waits(book, arrived_R)
        return _judge(
            book,
            memory,
            limits,
            waits_R,
            tokens_B,
            preempted_R.any(),
            demand=0,
            stored_B=memory.length_B,
        )

    def admit(carry: tuple) -> tuple:
        book, memory, tokens_B, found_R, head = carry
        book = books.seat(book, head.request)
        row_B = jnp.arange(len(tokens_B))
        leads_B = (book.owner_B == head.request) & (book.leader_B() == row_B)
        memory = memory.adopt(jnp.argmax(leads_B), head.block_M, head.hits)
        new_B = jnp.where(leads_B, head.tokens, 0)
        memory, _, _ = memory.reserve(new_B)
        tokens_B += new_B
        found_R = found_R.at[head.request].set(head.hits * memory.block_size)
        return book, memory, tokens_B, found_R, judge(book, memory, tokens_B)

    found_R = jnp.zeros(ran_R.shape, jnp.int32)
    carry = (book, memory, tokens_B, found_R, judge(book, memory, tokens_B))
    if not decodes:
        carry = lax.while_loop(lambda carry: carry[-1].verdict == policy.ADMITTED, admit, carry)
    book, memory, tokens_B, found_R, head = carry
    admitted_R = book.running_R & ~ran_R
    return book, memory, copies, Step(tokens_B, admitted_R, preempted_R, found_R, head.verdict)


def only_decodes(
    book: Book,
    memory: Rows,
    limits: policy.Limits,
    *,
    arrived_R: jax.Array | None = None,
) -> jax.Array:
    """Whether in the next step every row decodes, nobody is preempted and nobody admitted."""
    wanted_B = targets(book, memory) - memory.length_B
    seated_B = books.seated(book)
    demand = memory.demand(wanted_B)
    head = _judge(
        book,
        memory,
        limits,
        _waits(book, arrived_R),
        wanted_B,
        jnp.bool_(False),
        demand=demand,
        stored_B=memory.length_B + wanted_B,
    )
    calm = (wanted_B == seated_B).all() & seated_B.any()
    within = wanted_B.sum() <= limits.tokens
    fits = policy.may_grow(demand, memory.room)
    return calm & within & fits & (head.verdict != policy.ADMITTED)


def grants(book: Book, memory: Rows, limits: policy.Limits) -> jax.Array:
    """Tokens that each row computes in the next step if all that runs stays, [B]."""
    wanted_B = targets(book, memory) - memory.length_B
    decodes_B = wanted_B == 1
    left = limits.tokens - decodes_B.sum(dtype=jnp.int32)

    def cut(wanted_B: jax.Array) -> jax.Array:
        longer_B = jnp.where(decodes_B, 0, wanted_B)
        order_B = jnp.argsort(jnp.append(book.rank_R, MOST)[book.owner_B], stable=True)
        ordered_B = longer_B[order_B]
        before_B = jnp.zeros_like(longer_B).at[order_B].set(jnp.cumsum(ordered_B) - ordered_B)
        return jnp.where(decodes_B, 1, policy.share(limits, longer_B, before_B, left))

    return lax.cond((wanted_B > 1).any(), cut, lambda wanted_B: wanted_B, wanted_B)


def targets(book: Book, memory: Rows) -> jax.Array:
    """Tokens that each row is to have stored next: all it knows, [B].

    While others wait to fork from it, the first sample stops at the end of the prompt; they have
    nothing to store till then.
    """
    follows_B, leader_B = books.follows(book, memory)
    joint_B = jnp.zeros_like(follows_B).at[leader_B].max(follows_B, mode="drop")
    return jnp.where(follows_B, 0, jnp.where(joint_B, book.prompt_B(), book.known_B()))


def draws(book: Book, memory: Rows, step: Step) -> tuple[jax.Array, jax.Array]:
    """Who draws a token after a step's forward pass, and from which row's last hidden state.

    Returns ``(draws_B, source_B)``: rows that have stored all they know, and samples that are
    about to fork from a prompt that was stored for the first time.
    """
    known_B, (follows_B, leader_B) = book.known_B(), books.follows(book, memory)
    draws_B = (step.tokens_B > 0) & (memory.length_B == known_B)
    ready_B = draws_B.at[leader_B].get(mode="fill", fill_value=False)
    joins_B = follows_B & ready_B & (known_B == book.prompt_B())
    row_B = jnp.arange(known_B.shape[0], dtype=jnp.int32)
    return draws_B | joins_B, jnp.where(joins_B, leader_B, row_B)


def finish(
    book: Book,
    memory: Rows,
    step: Step,
    draws_B: jax.Array,
    token_B: jax.Array,
    ends_B: jax.Array,
    *,
    decodes: bool = False,
) -> tuple[Book, Rows, jax.Array]:
    """The end of a step: blocks it filled are found from now on, samples fork from a stored prompt,
    rows draw, rows that end are emptied, and the others lose what their windows leave behind.

    Args:
      book, memory, step: what ``advance`` returned.
      draws_B: rows that draw, from ``draws``.
      token_B: i32, what they draw. Where requests have one sample each these tokens are found by a
        prefix cache as prompts are.
      ends_B: bool, rows whose sequence ends with that token, besides those that draw their last.
      decodes: as it was for ``advance``; nobody forks then.

    Returns:
      ``(book', memory', ended_B)``.
    """
    requests = book.rank_R.shape[0]
    alone = book.live_RF.shape[1] == 1
    memory = memory.register(
        book.token_RT,
        jnp.append(book.salt_R, 0)[book.owner_B],
        book.owner_B,
        step.tokens_B,
        book.known_B() if alone else book.prompt_B(),
    )
    if not decodes:
        memory = _fork(book, memory)
    if memory.prefix is not None and alone:
        owner_B = jnp.where(draws_B, book.owner_B, requests)
        token_RT = book.token_RT.at[owner_B, book.known_B()].set(token_B, mode="drop")
        book = book.replace(token_RT=token_RT)

    at_draw = (jnp.where(draws_B, book.owner_B, requests), book.sample_B)
    drawn_RF = book.drawn_RF.at[at_draw].add(1, mode="drop")
    spent_B = (drawn_RF >= book.output_RF).at[at_draw].get(mode="fill", fill_value=False)
    ended_B = draws_B & (spent_B | ends_B)
    live_RF = book.live_RF.at[jnp.where(ended_B, book.owner_B, requests), book.sample_B].set(
        False, mode="drop"
    )
    book, memory = when(
        ended_B.any(),
        lambda state: books.vacate(*state, ended_B),
        (book.replace(drawn_RF=drawn_RF, live_RF=live_RF), memory),
    )
    return books.close(book), memory.slide(), ended_B


def _fork(book: Book, memory: Rows) -> Rows:
    """Samples whose prompt their leader has stored share it."""
    follows_B, leader_B = books.follows(book, memory)
    stored_B = memory.length_B.at[leader_B].get(mode="fill", fill_value=0)
    forks_B = follows_B & (stored_B >= book.prompt_B())
    return memory.fork(jnp.where(forks_B, leader_B, len(forks_B)))


def stop(book: Book, memory: Rows, stopped_RF: jax.Array) -> tuple[Book, Rows]:
    """Between two steps: the marked samples end, whether they run or wait."""
    rows_B = stopped_RF.at[book.owner_B, book.sample_B].get(mode="fill", fill_value=False)
    book, memory = books.vacate(book.replace(live_RF=book.live_RF & ~stopped_RF), memory, rows_B)
    return books.close(book), memory


def _waits(book: Book, arrived_R: jax.Array | None) -> jax.Array:
    waits_R = ~book.running_R & (book.rank_R < MOST)
    return waits_R if arrived_R is None else waits_R & arrived_R


def _make_room(book: Book, memory: Rows, tokens_B: jax.Array) -> tuple[Book, Rows, jax.Array]:
    """Who stays has room for its grant; the last in the order of service go first."""

    def crowded(carry: tuple[Book, Rows, jax.Array]) -> jax.Array:
        book, memory, tokens_B = carry
        demand = memory.demand(tokens_B)
        return book.running_R.any() & ~policy.may_grow(demand, memory.room)

    def preempt(carry: tuple[Book, Rows, jax.Array]) -> tuple[Book, Rows, jax.Array]:
        book, memory, tokens_B = carry
        victim = jnp.argmax(jnp.where(book.running_R, book.rank_R, -1))
        leaves_B = book.owner_B == victim
        book, memory = books.vacate(book, memory, leaves_B)
        book = book.replace(running_R=book.running_R.at[victim].set(False))
        return book, memory, jnp.where(leaves_B, 0, tokens_B)

    return lax.while_loop(crowded, preempt, (book, memory, tokens_B))


def _judge(
    book: Book,
    memory: Rows,
    limits: policy.Limits,
    waits_R: jax.Array,
    tokens_B: jax.Array,
    preempted: jax.Array,
    *,
    demand: jax.Array | int,
    stored_B: jax.Array,
) -> Head:
    """The head of the queue, and the verdict on it.

    ``demand``: blocks that ``tokens_B`` are yet to take; ``stored_B``: tokens that rows have room
    for then. What admitted prompts have yet to store counts as taken.
    """
    head = jnp.argmin(jnp.where(waits_R, book.rank_R, MOST)).astype(jnp.int32)
    prompt, live_F, drawn_F = book.prompt_R[head], book.live_RF[head], book.drawn_RF[head]
    size, live = memory.block_size, live_F.sum(dtype=jnp.int32)
    own_F = jnp.where(live_F, blocks_of(prompt + drawn_F, size) - prompt // size, 0)
    fresh = (drawn_F == 0).all()
    need = jnp.where(fresh, blocks_of(prompt, size), prompt // size + own_F.sum(dtype=jnp.int32))
    need = memory.need(need, jnp.where(fresh, 1, live), limits.tokens)
    target = jnp.where(live == 1, prompt + jnp.max(drawn_F, where=live_F, initial=0), prompt)
    known = target if live_F.shape[0] == 1 else prompt
    # Nobody waits: nothing is looked up.
    block_M, hits = memory.match(
        book.token_RT[head], jnp.where(waits_R.any(), known, 0), book.salt_R[head]
    )
    tokens = policy.share(
        limits, target - hits * size, tokens_B.sum(dtype=jnp.int32), limits.tokens
    )
    rows = book.owner_B.shape[0]
    verdict = policy.judge(
        limits.replace(rows=jnp.minimum(limits.rows, rows)),
        waiting=waits_R.any(),
        need=need + memory.extra_need(block_M, hits),
        free=memory.room - demand - _outstanding(book, memory, limits, stored_B),
        rows=live,
        running=books.seated(book).sum(dtype=jnp.int32),
        preempted=preempted,
        granted=tokens,
    )
    return Head(head, tokens, block_M, hits, verdict)


def _outstanding(book: Book, memory: Rows, limits: policy.Limits, stored_B: jax.Array) -> jax.Array:
    """Blocks that rows with room for ``stored_B`` tokens have yet to take for what they know."""
    follows_B, _ = books.follows(book, memory)
    known_B, prompt_B, size = book.known_B(), book.prompt_B(), memory.block_size
    has_B = jnp.where(follows_B, prompt_B // size, blocks_of(stored_B, size))
    gap_B = jnp.where(follows_B & (known_B == prompt_B), 0, blocks_of(known_B, size) - has_B)
    return memory.outstanding(jnp.maximum(gap_B, 0), stored_B, limits.tokens)
