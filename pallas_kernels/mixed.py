"""Ragged batches on two kernels: rows with one query on the decode form, the rest on prefill.

A decoding row in a tile of many queries would waste the matrix unit and could not be split over its
cache; a row that one of the two kernels does not serve has length 0 there, which costs nothing but
the program that finds it so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.problem import Operands, Problem

# (operands, problem) -> (out_THD, lse_TH)
Attend = Callable[[Operands, Problem], tuple[jax.Array, jax.Array]]


def single_query(problem: Problem) -> Problem:
    """What ``decode`` is asked for in a ragged batch: one query of every row."""
    return dataclasses.replace(problem, decode=True, queries=problem.rows)


def attend(
    operands: Operands, problem: Problem, decode: Attend, prefill: Attend
) -> tuple[jax.Array, jax.Array]:
    """Attention of a ragged batch, each row by the kernel that suits it.

    Draft masks may hide a token from itself, which the decode form does not know: with one, all
    rows go to ``prefill``.
    """
    if problem.draft is not None:
        return prefill(operands, problem)
    starts_P, length_B = operands.query_start_P, operands.length_B
    assert starts_P is not None
    single_B = jnp.diff(starts_P) == 1
    # Rows without their one query read some other token, and hold no key to see with it.
    token_B = jnp.clip(starts_P[:-1], 0, problem.queries - 1)
    out_BHD, lse_BH = decode(
        operands._replace(
            q_THD=operands.q_THD[token_B],
            length_B=jnp.where(single_B, length_B, 0),
            query_start_P=None,
        ),
        single_query(problem),
    )
    out_THD, lse_TH = prefill(operands._replace(length_B=jnp.where(single_B, 0, length_B)), problem)
    target_B = jnp.where(single_B, token_B, problem.queries)
    return (
        out_THD.at[target_B].set(out_BHD, mode="drop"),
        lse_TH.at[target_B].set(lse_BH, mode="drop"),
    )
