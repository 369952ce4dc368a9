"""Any back end by name: kernels run in their interpreter, and a race found there is an error."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ops import BACKENDS, KERNELS, paged_attention
from pallas_kernels.problem import QUANTISED
from pallas_kernels.tiling import Tiling
from tests.support.attention import Call, Result

REASON = r"((q_THD|kv_NUKSD|table_BM|draft_mask_TQ|[kv]_scale|tiling(\.\w+)?|, )+): .+"
INTERPRETERS = {"mosaic_gpu": plgpu.InterpretGPUParams, "mosaic_tpu": pltpu.InterpretParams}
# What exact answers are asked for in: a type that each back end serves.
DTYPE = {name: "bfloat16" if name in INTERPRETERS else "float32" for name in BACKENDS}
assert set(INTERPRETERS) == set(KERNELS.values()) < set(BACKENDS)


def must_serve(call: Call, backend: str, tiling: Tiling | None = None) -> bool:
    """Whether a refusal of the call would be a defect."""
    types = {call["q_THD"].dtype.name, call["kv_NUKSD"].dtype.name} - set(QUANTISED)
    block_size, width = call["kv_NUKSD"].shape[3:]
    return tiling is None and promises(backend, types, block_size=block_size, width=width)


def promises(backend: str, types: set[str], *, block_size: int, width: int) -> bool:
    """What a back end is there for; more is welcome if it is right."""
    if backend not in INTERPRETERS:
        return True
    return types in PROMISED[backend] and block_size in range(8, 257, 8) and width in (64, 128, 256)


PROMISED = {"mosaic_gpu": [{"bfloat16"}, {"float16"}], "mosaic_tpu": [{"bfloat16"}, {"float32"}]}


def attempt(call: Call, backend: str, **settings: Any) -> Result | None:
    """``run``, or None where the back end may refuse the call and does so by name."""
    tiling = Tiling(**{k: v for k, v in settings.items() if k != "races"})
    try:
        return run(call, backend, **settings)
    except ValueError as refusal:
        promised = must_serve(call, backend, None if tiling == Tiling() else tiling)
        check_refusal(refusal, backend, promised=promised)
        return None


def check_refusal(refusal: ValueError, backend: str, *, promised: bool) -> None:
    """A refusal is one line that says which argument, and what would be right."""
    text = f"backend={backend!r} cannot serve this: {REASON}"
    assert re.fullmatch(text, str(refusal)), refusal
    assert not promised, refusal


def run(call: Call, backend: str, *, races: bool = False, **tiling: int) -> Result:
    """Output and lse of a call on a back end; with ``races``, a race is a ``RuntimeError``."""
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    options = tuple((name, value) for name, value in call.items() if name not in arrays)
    attend = _compiled(backend, options, Tiling(**tiling) if tiling else None, races)
    with race_free() if races else contextlib.nullcontext():
        out_THD, lse_TH = attend(arrays)
        return np.asarray(out_THD), np.asarray(lse_TH)


@functools.cache
def _compiled(
    backend: str, options: tuple[tuple[str, Any], ...], tiling: Tiling | None, races: bool
) -> Callable[[Any], Any]:
    interpret = INTERPRETERS[backend](detect_races=races) if backend in INTERPRETERS else False
    settings: Call = {
        "backend": backend,
        "interpret": interpret,
        "tiling": tiling,
        "return_lse": True,
    }
    return jax.jit(lambda arrays: paged_attention(**arrays, **dict(options), **settings))


@contextlib.contextmanager
def race_free() -> Iterator[None]:
    """Raises ``RuntimeError`` if an interpreter finds a race: jax 0.12 does so, 0.11 prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())
