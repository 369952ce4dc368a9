"""Case 20: no hidden powers of two. Every shape is served, or refused by name before it runs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from pallas_kernels import ops
from pallas_kernels.ops import BACKENDS
from pallas_kernels.problem import Problem
from tests.support import attention, backends, covers
from tests.support.attention import Call, problem

FACTORS = {
    "group": (1, 2, 3, 5, 6, 7, 8, 16),
    "kv_heads": (1, 3, 6),
    "width": (64, 80, 96, 128, 192, 256),
    "block_size": (1, 8, 16, 48, 64, 128, 256),
}
FORMS: dict[str, Call] = {"decode": {}, "ragged": {"counts": [1, 3], "padding": 1}}
SHAPES = [dict(zip(FACTORS, sizes, strict=True)) for sizes in itertools.product(*FACTORS.values())]
CI_SHAPES = {"reference": 58, "xla": 24, "mosaic_gpu": 8, "mosaic_tpu": 8}


def call(group: int, dtype: str, form: str, **shape: Any) -> Call:
    """A row that ends one token into its second block, and a row of three tokens."""
    return problem(
        20,
        lengths=[shape["block_size"] + 1, 3],
        query_heads=group * shape["kv_heads"],
        dtype=dtype,
        **shape,
        **FORMS[form],
    )


def shapes(backend: str) -> list[Any]:
    """A pairwise cover of what the back end promises, in alternating forms; its tail is slow."""
    types = {backends.DTYPE[backend]}

    def promised(shape: dict[str, int]) -> bool:
        sizes = {name: shape[name] for name in ("block_size", "width")}
        return backends.promises(backend, types, **sizes)

    cover = covers.pairwise(FACTORS, promised)
    return [
        pytest.param(
            *(backend, shape, form),
            marks=[pytest.mark.slow] if nth >= CI_SHAPES[backend] else [],
            id="-".join(map(str, (backend, *shape.values(), form))),
        )
        for nth, (shape, form) in enumerate(zip(cover, itertools.cycle(FORMS), strict=False))
    ]


def check(backend: str, shape: dict[str, int], form: str) -> None:
    question = call(dtype=backends.DTYPE[backend], form=form, **shape)
    result = backends.attempt(question, backend)
    assert result is None or not attention.faults(result, question)


@pytest.mark.parametrize(
    ("backend", "shape", "form"), [param for name in BACKENDS for param in shapes(name)]
)
def test_every_pair_of_sizes(backend, shape, form):
    check(backend, shape, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_every_shape(backend, form):
    for shape in SHAPES:
        check(backend, shape, form)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("backend", backends.INTERPRETERS)
def test_what_a_kernel_does_not_serve_it_refuses_by_name(backend, decode):
    """All shapes, without running any."""
    for shape, cache_dtype in itertools.product(SHAPES, ("bfloat16", "float16", "float32", "int8")):
        sizes: Call = {name: size for name, size in shape.items() if name != "group"}
        asked = Problem(
            rows=2,
            queries=2 if decode else 5,
            query_heads=shape["group"] * shape["kv_heads"],
            blocks=8,
            row_blocks=3,
            dtype="bfloat16" if cache_dtype == "int8" else cache_dtype,
            cache_dtype=cache_dtype,
            decode=decode,
            scale=0.1,
            k_scale="head",
            v_scale="head",
            **sizes,
        )
        module = ops._module(backend)
        refusal = module.refusal(asked, module.default_tiling(asked))
        assert refusal is None or re.fullmatch(backends.REASON, refusal), refusal
