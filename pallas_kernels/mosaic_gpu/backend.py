"""The back end's three functions: which kernel serves which rows, and what neither serves.

A ragged batch is two launches, rows with one query on ``decode`` and the rest on ``prefill``
(``mixed``). Of its tiling, ``queries``, ``tokens`` and ``stages`` are the prefill kernel's, and
``heads`` and ``splits`` the decode kernel's, whose other sizes are then the default ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels import mixed
from pallas_kernels.mosaic_gpu import decode, parts, prefill
from pallas_kernels.problem import QUANTISED, Operands, Problem
from pallas_kernels.tiling import Tiling

DTYPES = ("bfloat16", "float16")
WIDTHS = (64, 128, 256)


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """What these kernels cannot serve, in a line that names the argument; None where they serve."""
    if problem.dtype not in DTYPES:
        # A tensor core takes f32 as TF32, of 10 bits.
        return f"q_THD: expected {' or '.join(DTYPES)}, got {problem.dtype}"
    if problem.cache_dtype not in (problem.dtype, *QUANTISED):
        allowed = ", ".join((problem.dtype, *QUANTISED))
        return f"kv_NUKSD: expected one of {allowed}, got {problem.cache_dtype}"
    if problem.width not in WIDTHS:
        return f"q_THD: expected a head width of {WIDTHS}, got {problem.width}"
    if problem.block_size not in range(8, 257, 8):
        return (
            "kv_NUKSD: expected a block size that is a multiple of 8, to 256,"
            f" got {problem.block_size}"
        )
    if problem.decode:
        return decode.refusal(problem, tiling)
    refused = prefill.refusal(problem, tiling)
    if refused or problem.draft is not None:  # with a draft, all rows are prefill's
        return refused
    single = mixed.single_query(problem)
    return decode.refusal(single, _decode_tiling(single, tiling))


def default_tiling(problem: Problem) -> Tiling:
    """The tiling of decode, or of both kernels for a ragged batch, every field set."""
    if problem.decode:
        return decode.default_tiling(problem)
    single = decode.default_tiling(mixed.single_query(problem))
    return dataclasses.replace(
        prefill.default_tiling(problem), heads=single.heads, splits=single.splits
    )


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H]; see ``ops.paged_attention``."""
    interpret = parts.interpreter(interpret)
    if problem.decode:
        return decode.attend(operands, problem, tiling, interpret)
    return mixed.attend(
        operands,
        problem,
        decode=lambda operands, problem: decode.attend(
            operands, problem, _decode_tiling(problem, tiling), interpret
        ),
        prefill=lambda operands, problem: prefill.attend(operands, problem, tiling, interpret),
    )


def _decode_tiling(problem: Problem, tiling: Tiling) -> Tiling:
    """The decode kernel's part of a ragged batch's tiling."""
    return dataclasses.replace(
        decode.default_tiling(problem), heads=tiling.heads, splits=tiling.splits
    )
