"""The back end's three functions: which kernel serves which rows, and what neither serves.

A ragged batch is two launches, rows with one query on ``decode`` and the rest on ``prefill``
(``mixed``). Its tiling is the prefill kernel's; the decode kernel then has its default one.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import mixed
from pallas_kernels.mosaic_tpu import decode, parts, prefill
from pallas_kernels.problem import QUANTISED, Operands, Problem
from pallas_kernels.tiling import Tiling

DTYPES = ("bfloat16", "float32")


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """What these kernels cannot serve, in a line that names the argument; None where they serve."""
    if problem.dtype not in DTYPES:
        return f"q_THD: expected {' or '.join(DTYPES)}, got {problem.dtype}"
    if problem.cache_dtype not in DTYPES + QUANTISED:
        allowed = ", ".join(DTYPES + QUANTISED)
        return f"kv_NUKSD: expected one of {allowed}, got {problem.cache_dtype}"
    if problem.block_size % parts.SUBLANES:
        return f"kv_NUKSD: expected a block size that is a multiple of 8, got {problem.block_size}"
    if problem.row_blocks > parts.TABLE_CELLS:
        return f"table_BM: a row of {problem.row_blocks} blocks, SMEM holds {parts.TABLE_CELLS}"
    if problem.decode:
        return decode.refusal(problem, tiling)
    refused = prefill.refusal(problem, tiling)
    if refused or problem.draft is not None:  # with a draft, all rows are prefill's
        return refused
    single = mixed.single_query(problem)
    return decode.refusal(single, decode.default_tiling(single))


def default_tiling(problem: Problem) -> Tiling:
    """The tiling of decode, or of prefill for a ragged batch, every field set."""
    return (decode if problem.decode else prefill).default_tiling(problem)


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H]; see ``ops.paged_attention``."""
    if problem.decode:
        return decode.attend(operands, problem, tiling, interpret)
    return mixed.attend(
        operands,
        problem,
        decode=lambda operands, problem: decode.attend(
            operands, problem, decode.default_tiling(problem), interpret
        ),
        prefill=lambda operands, problem: prefill.attend(operands, problem, tiling, interpret),
    )
