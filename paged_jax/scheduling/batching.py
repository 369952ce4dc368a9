"""Continuous batching: one step of scheduling over the rows of a block table, as a pure function.

A step first serves what runs: rows that decode take one token each, rows with more to compute (a
prompt, or what a preemption undid) share what is left of the token budget, in order of service.
While their blocks do not all fit, the last request in that order gives up its memory
(PagedAttention, section 4.5), to recompute it later, or to find it again in host memory where
``policy.swaps`` says so. If nobody had to, requests are admitted from the head of the queue as
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
from paged_jax.memory.loops import when
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import admission, policy
from paged_jax.scheduling import book as books
from paged_jax.scheduling.admission import Head
from paged_jax.scheduling.book import Book
from pallas_kernels import dims


class Step(flax.struct.PyTreeNode):
    """What a step computes and why it took in nobody more."""

    tokens_B: jax.Array  # i32: tokens each row computes and stores, its last ones
    admitted_R: jax.Array  # bool
    preempted_R: jax.Array  # bool
    swapped_R: jax.Array  # bool: a preempted request went to host memory, an admitted one came back
    moved: jax.Array  # i32: blocks that did
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
    swapped_R, moved = jnp.zeros(ran_R.shape, bool), jnp.int32(0)
    if decodes:
        tokens_B = books.seated(book).astype(jnp.int32)
    else:
        tokens_B = grants(book, memory, limits)
        book, memory, tokens_B, swapped_R, moved = _make_room(book, memory, limits, tokens_B)
    memory, copies, _ = memory.reserve(tokens_B, most_tokens=1 if decodes else None)
    preempted_R = ran_R & ~book.running_R

    def judge(book: Book, memory: Rows, tokens_B: jax.Array) -> Head:
        waits_R, preempted = admission.waits(book, arrived_R), preempted_R.any()
        return admission.judge(
            book, memory, limits, waits_R, tokens_B, preempted, demand=0, stored_B=memory.length_B
        )

    def admit(carry: tuple) -> tuple:
        book, memory, copies, step, head = carry
        book, memory, copies, step = _admit(book, memory, copies, step, head)
        return book, memory, copies, step, judge(book, memory, step.tokens_B)

    head = judge(book, memory, tokens_B)
    step = Step(
        tokens_B=tokens_B,
        admitted_R=jnp.zeros(ran_R.shape, bool),
        preempted_R=preempted_R,
        swapped_R=swapped_R,
        moved=moved,
        found_R=jnp.zeros(ran_R.shape, jnp.int32),
        verdict=head.verdict,
    )
    carry = (book, memory, copies, step, head)
    if not decodes:
        carry = lax.while_loop(lambda carry: carry[-1].verdict == policy.ADMITTED, admit, carry)
    book, memory, copies, step, head = carry
    return book, memory, copies, step.replace(verdict=head.verdict)


def _admit(
    book: Book, memory: Rows, copies: Copies, step: Step, head: Head
) -> tuple[Book, Rows, Copies, Step]:
    """The head of the queue takes its seats, with room for what it computes in this step."""
    request = head.request
    book = books.seat(book, request)
    row_F = books.rows_of(book, request)
    memory = memory.adopt(row_F.min(), head.block_M, head.hits)
    moved = jnp.int32(0)
    if memory.host is not None:
        from_F = books.host_rows_of(book, request)
        back_F = jnp.where(head.swapped, row_F, len(book.owner_B))
        memory = when(head.swapped, lambda memory: memory.swap_in(from_F, row_F), memory)
        moved = memory.blocks(back_F)
    tokens_B = jnp.zeros_like(step.tokens_B).at[row_F].set(head.tokens_F, mode="drop")
    memory, made, _ = memory.reserve(tokens_B)
    made_B = made.target_C < memory.table.pool.none
    copies = jax.tree.map(lambda new, old: jnp.where(made_B, new, old), made, copies)
    step = step.replace(
        tokens_B=step.tokens_B + tokens_B,
        admitted_R=step.admitted_R.at[request].set(True),
        swapped_R=step.swapped_R.at[request].set(head.swapped),
        moved=step.moved + moved,
        found_R=step.found_R.at[request].set(head.hits * memory.block_size),
    )
    return book, memory, copies, step


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
    head = admission.judge(
        book,
        memory,
        limits,
        admission.waits(book, arrived_R),
        wanted_B,
        jnp.bool_(False),
        demand=demand,
        stored_B=memory.length_B + wanted_B,
    )
    calm = (wanted_B == seated_B).all() & seated_B.any()
    if book.joint_R is not None:  # a row that waits for its siblings may store one token, too
        calm &= (memory.length_B + wanted_B == book.known_B()).all()
    within = wanted_B.sum() <= limits.tokens
    fits = policy.may_grow(demand, memory.room)
    return calm & within & fits & (head.verdict != policy.ADMITTED)


def grants(book: Book, memory: Rows, limits: policy.Limits) -> jax.Array:
    """Tokens that each row computes in the next step if all that runs stays, [B]."""
    wanted_B = targets(book, memory) - memory.length_B

    def cut(wanted_B: jax.Array) -> jax.Array:
        order_B = jnp.argsort(jnp.append(book.rank_R, MOST)[book.owner_B], stable=True)
        ordered_B = policy.divide(limits, wanted_B[order_B], limits.tokens)
        return jnp.zeros_like(wanted_B).at[order_B].set(ordered_B)

    return lax.cond((wanted_B > 1).any(), cut, lambda wanted_B: wanted_B, wanted_B)


def targets(book: Book, memory: Rows) -> jax.Array:
    """Tokens that each row is to have stored next: all it knows, [B].

    While others wait to fork from it, the first sample stops at the end of the prompt; they have
    nothing to store till then. Samples that draw in one step keep back the token that they draw
    from till each of them has stored all before it: after a preemption that takes some longer.
    """
    follows_B, leader_B = books.follows(book, memory)
    forked_B = jnp.zeros_like(follows_B).at[leader_B].max(follows_B, mode="drop")
    known_B = book.known_B()
    target_B = jnp.where(follows_B, 0, jnp.where(forked_B, book.prompt_B(), known_B))
    if book.joint_R is None:
        return target_B
    behind_B = (known_B > book.prompt_B()) & (memory.length_B < known_B - 1)
    waits_R = jnp.zeros_like(book.joint_R).at[book.owner_B].max(behind_B, mode="drop")
    waits_B = jnp.append(waits_R & book.joint_R, False)[book.owner_B]
    return jnp.where(waits_B, jnp.minimum(target_B, known_B - 1), target_B)


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
        _fresh(book, memory, step),
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


def _fresh(book: Book, memory: Rows, step: Step) -> jax.Array:
    """Last tokens of each row that a prefix cache does not know of, [B]: new ones, and all of a
    row that came back from host memory."""
    if memory.host is None:
        return step.tokens_B
    back_R = jnp.append(step.swapped_R & step.admitted_R, False)
    return jnp.where(back_R[book.owner_B], memory.length_B, step.tokens_B)


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
    memory = memory.forget(stopped_RF.ravel())
    return books.close(book), memory


def _make_room(
    book: Book, memory: Rows, limits: policy.Limits, tokens_B: jax.Array
) -> tuple[Book, Rows, jax.Array, jax.Array, jax.Array]:
    """Who stays has room for its grant; the last in the order of service go first.

    Returns ``(book', memory', tokens_B', swapped_R, moved)``: what is granted then, who of those
    who left waits in host memory, and how many blocks went there.
    """

    def crowded(carry: tuple) -> jax.Array:
        book, memory, tokens_B, *_ = carry
        demand = memory.demand(tokens_B)
        return book.running_R.any() & ~policy.may_grow(demand, memory.room)

    def preempt(carry: tuple) -> tuple:
        book, memory, tokens_B, swapped_R, moved = carry
        victim = jnp.argmax(jnp.where(book.running_R, book.rank_R, -1))
        if memory.host is not None:
            row_F, to_F = books.rows_of(book, victim), books.host_rows_of(book, victim)
            sequences = (row_F < len(book.owner_B)).sum(dtype=jnp.int32)
            blocks = memory.blocks(row_F)
            swaps = policy.swaps(limits, sequences=sequences, blocks=blocks, room=memory.host_room)
            memory = when(swaps, lambda memory: memory.swap_out(row_F, to_F), memory)
            swapped_R = swapped_R.at[victim].set(swaps)
            moved += jnp.where(swaps, blocks, 0)
        leaves_B = book.owner_B == victim
        book, memory = books.vacate(book, memory, leaves_B)
        book = book.replace(running_R=book.running_R.at[victim].set(False))
        return book, memory, jnp.where(leaves_B, 0, tokens_B), swapped_R, moved

    nothing = jnp.zeros(book.running_R.shape, bool), jnp.int32(0)
    return lax.while_loop(crowded, preempt, (book, memory, tokens_B, *nothing))
