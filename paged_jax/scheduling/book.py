"""Who is served: requests in their slots, and which rows of a batch are whose.

A request is a prompt and up to F samples; each live sample of a running request has a row. The
first row of a request leads: it stores the prompt, and the others follow, with nothing stored of
their own, till they fork from it.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.config import MOST
from paged_jax.memory.rows import Rows


class Book(flax.struct.PyTreeNode):
    """Who is served: R requests of up to F samples, and who sits in the table's B rows."""

    rank_R: jax.Array  # i32: place in the order of service, no two alike; MOST for no request
    running_R: jax.Array  # bool; the others wait
    prompt_R: jax.Array  # i32: tokens
    output_RF: jax.Array  # i32: tokens that a sample draws at most
    drawn_RF: jax.Array  # i32: tokens that a sample has drawn
    live_RF: jax.Array  # bool: samples that have not ended
    token_RT: jax.Array  # i32: tokens to be found by, see ``finish``; read with a prefix cache only
    salt_R: jax.Array  # u32: tenant whose blocks alone a request may share
    owner_B: jax.Array  # i32: the request of a row, R for none
    sample_B: jax.Array  # i32: which of its samples
    joint_R: jax.Array | None = None  # bool: its samples draw in one step; None: nobody's

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


def create(*, requests: int, samples: int, rows: int, tokens: int = 1) -> Book:
    """A book without requests; a prefix cache needs the ``tokens`` of the longest sequence."""
    per_sample = (requests, samples)
    return Book(
        rank_R=jnp.full(requests, MOST, jnp.int32),
        running_R=jnp.zeros(requests, bool),
        prompt_R=jnp.ones(requests, jnp.int32),
        output_RF=jnp.ones(per_sample, jnp.int32),
        drawn_RF=jnp.zeros(per_sample, jnp.int32),
        live_RF=jnp.zeros(per_sample, bool),
        token_RT=jnp.zeros((requests, tokens), jnp.int32),
        salt_R=jnp.zeros(requests, jnp.uint32),
        owner_B=jnp.full(rows, requests, jnp.int32),
        sample_B=jnp.zeros(rows, jnp.int32),
    )


def rows_of(book: Book, request: jax.Array) -> jax.Array:
    """The row of each of a request's samples, [F]; B for those that have none."""
    rows, samples = book.owner_B.shape[0], book.live_RF.shape[1]
    sample_B = jnp.where(book.owner_B == request, book.sample_B, samples)
    row_B = jnp.arange(rows, dtype=jnp.int32)
    return jnp.full(samples, rows, jnp.int32).at[sample_B].set(row_B, mode="drop")


def host_rows_of(book: Book, request: jax.Array) -> jax.Array:
    """The row that each of a request's samples has in host memory, [F]."""
    samples = book.live_RF.shape[1]
    return request * samples + jnp.arange(samples, dtype=jnp.int32)


def seated(book: Book) -> jax.Array:
    """Rows that are somebody's, [B] bool."""
    return book.owner_B < book.rank_R.shape[0]


def follows(book: Book, memory: Rows) -> tuple[jax.Array, jax.Array]:
    """Rows that wait to fork from their request's first row, and that row for every row."""
    leader_B = book.leader_B()
    row_B = jnp.arange(leader_B.shape[0])
    return (leader_B < row_B) & (memory.length_B == 0), leader_B


def seat(book: Book, request: jax.Array) -> Book:
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


def vacate(book: Book, memory: Rows, rows_B: jax.Array) -> tuple[Book, Rows]:
    """Empties rows and gives their seats up."""
    book = book.replace(owner_B=jnp.where(rows_B, book.rank_R.shape[0], book.owner_B))
    return book, memory.release(rows_B)


def close(book: Book) -> Book:
    """Requests none of whose samples is live are over, and their slots empty."""
    over_R = ~book.live_RF.any(axis=1)
    return book.replace(
        running_R=book.running_R & ~over_R, rank_R=jnp.where(over_R, MOST, book.rank_R)
    )
