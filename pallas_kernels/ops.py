"""Paged attention as one differentiable, vmappable function over four back ends.

``out[t] = sum_j softmax_j(logit[t, j]) v[j]`` over the stored tokens j that query t sees, where the
keys and values of row b's token j lie in slot ``j % S`` of block ``table_BM[b, j // S]`` (Kwon et
al., PagedAttention, SOSP 2023, section 4.1). Forward by the chosen back end, gradients by ``xla``,
one tile of the cache at a time. Under ``vmap`` the batch is folded into rows, and into blocks where
the cache is batched, so a kernel sees a larger problem and never a batch axis.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, dtypes, lax

from pallas_kernels import problem as problems
from pallas_kernels import tiling as tilings
from pallas_kernels import xla_gradient
from pallas_kernels.merge import merge_attention
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

BACKENDS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")
KERNELS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def paged_attention(
    q_THD: jax.Array,
    kv_NUKSD: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    query_start_P: jax.Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    alibi_slope_H: jax.Array | None = None,
    draft_mask_TQ: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    interpret: Any = False,
    tiling: Tiling | None = None,
) -> Any:
    """Attention of packed queries over keys and values stored in blocks.

    ``q_THD`` [T, H, D]: query tokens of all rows, one after another. ``kv_NUKSD`` [N, 2, K, S, D]:
    the pool; layers are folded into N by an offset on the table. ``table_BM`` [B, M]: the block of
    each logical block, where the row's length does not reach anything at all. ``length_B`` [B]:
    stored tokens, the queries' own included, at most M * S. ``query_start_P`` [B + 1], rising from
    0: row b owns queries ``query_start_P[b] : query_start_P[b + 1]``, the last tokens of its
    length; from the last offset on queries are padding. None: one query a row, T = B.

    ``scale`` defaults to ``D ** -0.5``. ``window`` counts visible tokens, the query's own included.
    ``soft_cap`` c makes a logit ``c tanh(logit / c)``. ``sinks_H`` [H] are logits of one more key
    with value 0. ``alibi_slope_H`` [H] adds ``slope * (key position - query position)``.
    ``draft_mask_TQ`` [T, Q]: which of its own row's query tokens a query may see, of those that
    ``causal`` and ``window`` allow (tree drafts); Q is at least the most queries of a row.
    ``k_scale``, ``v_scale``: factors of the stored keys and values, a scalar, [K] or [N, K, S]; a
    cache of int8 or fp8 needs both.

    Returns the output [T, H, D] in q's type, with ``return_lse`` also the natural-log normaliser
    [T, H] in f32. Padded queries, and queries of rows of length 0, give 0 and -inf (with sinks, the
    sink's logit).

    ``backend`` is one of reference, xla, mosaic_gpu, mosaic_tpu; None is the platform's kernel
    where it can serve the request and xla where it cannot (``choose_backend`` says which).
    ``interpret`` (True, or the interpreter's parameters) runs a kernel on a CPU. ``tiling``
    overrides the tuned sizes. Raises ``ValueError``, before anything runs, for arguments that do
    not go together and for a back end that cannot serve them, naming the argument.
    """
    operands, problem = problems.check(
        q_THD,
        kv_NUKSD,
        table_BM,
        length_B,
        query_start_P,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        sinks_H=sinks_H,
        alibi_slope_H=alibi_slope_H,
        draft_mask_TQ=draft_mask_TQ,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    name = _choose(problem, tiling) if backend is None else backend
    call = Call(
        problem=problem,
        backend=name,
        given=tiling,
        interpret=interpret or None,
    )
    _refuse(call)
    out_THD, lse_TH = _attend(operands, call)
    return (out_THD, lse_TH) if return_lse else out_THD


def choose_backend(*arrays: jax.Array, tiling: Tiling | None = None, **options: Any) -> str:
    """What ``backend=None`` means for ``paged_attention`` of these arguments, on this process."""
    return _choose(problems.check(*arrays, **options)[1], tiling)


def shared_prefix_attention(
    q_THD: jax.Array,
    kv_NUKSD: jax.Array,
    prefix_table_M: jax.Array,
    prefix_length: jax.Array | int,
    table_BM: jax.Array,
    length_B: jax.Array,
    query_start_P: jax.Array | None = None,
    *,
    sinks_H: jax.Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of rows that share a prefix, whose blocks are read once for all queries (cascade).

    ``prefix_table_M`` and ``prefix_length``: the shared blocks and their tokens; ``table_BM`` and
    ``length_B``: each row's own blocks and tokens after the prefix, may be 0. Other arguments,
    results and errors as ``paged_attention``; ``window`` and ``alibi_slope_H`` are refused, since
    they depend on positions that differ between the two parts.
    """
    for name in ("window", "alibi_slope_H"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: not supported with a shared prefix, use paged_attention")
    queries = jnp.shape(q_THD)[0]
    mask = options.pop("draft_mask_TQ", None)
    causal = options.pop("causal", True)
    # The prefix is one row of all queries, padding left out.
    end = queries if query_start_P is None else query_start_P[-1]
    prefix = paged_attention(
        q_THD,
        kv_NUKSD,
        jnp.asarray(prefix_table_M)[None],
        jnp.reshape(jnp.asarray(prefix_length), (1,)),
        jnp.stack([0, end]),
        causal=False,
        return_lse=True,
        sinks_H=sinks_H,
        **options,
    )
    own = paged_attention(
        q_THD,
        kv_NUKSD,
        table_BM,
        length_B,
        query_start_P,
        causal=causal,
        draft_mask_TQ=mask,
        return_lse=True,
        **options,
    )
    out_THD, lse_TH = merge_attention(*prefix, *own)
    return (out_THD, lse_TH) if return_lse else out_THD


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Everything static about one call: hashable."""

    problem: Problem
    backend: str
    given: Tiling | None  # what the caller sets of the tiling
    interpret: Any  # None, True or an interpreter's parameters

    @property
    def tiling(self) -> Tiling:
        """The caller's sizes and, for this problem's size, the others."""
        return _tiling(self.backend, self.problem, self.given)


def _choose(problem: Problem, tiling: Tiling | None) -> str:
    device = tilings.default_device()
    name = KERNELS.get(device.platform)
    if name == "mosaic_gpu" and device.compute_capability != "9.0":
        name = None  # its matrix instructions are Hopper's alone
    if name and not _module(name).refusal(problem, _tiling(name, problem, tiling)):
        return name
    return "xla"


def _module(backend: str) -> ModuleType:
    """A back end, loaded when it is first asked for: one platform's kernels need not load here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return importlib.import_module(f"pallas_kernels.{backend}")


def _tiling(backend: str, problem: Problem, given: Tiling | None) -> Tiling:
    """The caller's fields over the tuned ones over the formula's."""
    default = tilings.fill(
        tilings.tuned(backend, problem), _module(backend).default_tiling(problem)
    )
    return tilings.fill(given, default)


def _refuse(call: Call) -> None:
    if call.interpret and call.backend not in KERNELS.values():
        raise ValueError(f"interpret: {call.backend} is no kernel and has no interpreter")
    refusal = _module(call.backend).refusal(call.problem, call.tiling)
    if refusal:
        raise ValueError(f"backend={call.backend!r} cannot serve this: {refusal}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(operands: Operands, call: Call) -> tuple[jax.Array, jax.Array]:
    return _folded(operands, call)


def _attend_fwd(operands: Operands, call: Call) -> tuple[Any, Any]:
    result = _folded(operands, call)
    return result, (operands, result)


def _attend_bwd(call: Call, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, result = residuals
    computed = xla_gradient.gradient(operands, call.problem, result, cotangents)

    def cotangent(primal: Any, computed: Any) -> Any:
        if jnp.issubdtype(primal.dtype, jnp.inexact):
            return computed.astype(primal.dtype)
        return np.zeros(primal.shape, dtypes.float0)

    return (
        Operands._make(
            None if primal is None else cotangent(primal, value)
            for primal, value in zip(operands, computed, strict=True)
        ),
    )


_attend.defvjp(_attend_fwd, _attend_bwd)


def _folded(operands: Operands, call: Call) -> tuple[jax.Array, jax.Array]:
    """The back end's call, with a rule for ``vmap``."""

    @custom_batching.custom_vmap
    def attend(operands: Operands) -> tuple[jax.Array, jax.Array]:
        module = _module(call.backend)
        return module.attend(operands, call.problem, call.tiling, call.interpret)

    @attend.def_vmap
    def rule(size: int, batched: list[Any], operands: Operands) -> Any:
        return _attend_batch(size, Operands(*batched[0]), operands, call), (True, True)

    return attend(operands)


# What every row or block has its own of; a batch of anything else is attended one by one.
_FOLDS = {"q_THD", "kv_NUKSD", "table_BM", "length_B", "query_start_P", "draft_mask_TQ"}


def _attend_batch(
    size: int, batched: Operands, operands: Operands, call: Call
) -> tuple[jax.Array, jax.Array]:
    problem = call.problem
    slot_scales = {f"{side}_scale" for side in "kv" if getattr(problem, f"{side}_scale") == "slot"}
    folds = _FOLDS | (slot_scales if batched.kv_NUKSD else set())
    if any(on for name, on in batched._asdict().items() if name not in folds):
        return _attend_one_by_one(size, batched, operands, call)

    def spread(name: str) -> Any:
        array = getattr(operands, name)
        if array is None or getattr(batched, name):
            return array
        return jnp.broadcast_to(array, (size, *array.shape))

    def flat(name: str) -> Any:
        array = spread(name)
        return None if array is None else array.reshape(-1, *array.shape[2:])

    table = spread("table_BM")
    length = spread("length_B")
    starts = spread("query_start_P")
    changes: dict[str, Any] = {"rows": size * problem.rows, "queries": size * problem.queries}
    pool = ["kv_NUKSD", *sorted(slot_scales)] if batched.kv_NUKSD else []
    if pool:
        offset = problem.blocks * jnp.arange(size, dtype=jnp.int32)[:, None, None]
        in_pool = (table >= 0) & (table < problem.blocks)
        table = jnp.where(in_pool, table + offset, size * problem.blocks)
        changes["blocks"] = size * problem.blocks
    if starts is not None:
        # One more row a batch, empty, owns the padding between one batch's tokens and the next's.
        first = problem.queries * jnp.arange(size, dtype=jnp.int32)[:, None]
        starts = jnp.append((starts + first).reshape(-1), size * problem.queries)
        table = jnp.pad(table, ((0, 0), (0, 1), (0, 0)))
        length = jnp.pad(length, ((0, 0), (0, 1)))
        changes["rows"] += size
    folded = operands._replace(
        q_THD=flat("q_THD"),
        draft_mask_TQ=flat("draft_mask_TQ"),
        table_BM=table.reshape(-1, problem.row_blocks),
        length_B=length.reshape(-1),
        query_start_P=starts,
        **{name: flat(name) for name in pool},
    )
    larger = dataclasses.replace(call, problem=dataclasses.replace(problem, **changes))
    if call.backend in KERNELS.values():
        _refuse(larger)  # a launch has its limits
    out_THD, lse_TH = _folded(folded, larger)
    return (
        out_THD.reshape(size, problem.queries, *out_THD.shape[1:]),
        lse_TH.reshape(size, problem.queries, problem.query_heads),
    )


def _attend_one_by_one(
    size: int, batched: Operands, operands: Operands, call: Call
) -> tuple[jax.Array, jax.Array]:
    def attend(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        def pick(array: Any, on: bool) -> jax.Array:
            return lax.dynamic_index_in_dim(array, index, keepdims=False) if on else array

        return _folded(jax.tree.map(pick, operands, batched), call)

    return lax.map(attend, jnp.arange(size))
