"""Inputs with exact answers, on every back end that serves them; refusals are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pallas_kernels.ops import BACKENDS
from tests.support import attention, attention_cases, backends
from tests.support.attention import problem
from tests.support.attention_cases import Case

# One step of the type below 1: outputs are exact but for the last rounding.
STEP = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
CASES = {
    backend: {case.name: case for case in attention_cases.exact_cases(dtype)}
    for backend, dtype in backends.DTYPE.items()
}
NAMES = list(CASES["xla"])


def check(case: Case, backend: str, **settings: Any) -> None:
    """The case's answer, or a refusal by name where the back end promises nothing."""
    tiling = {"splits": case.splits} if case.splits else {}
    result = backends.attempt(case.call, backend, **tiling, **settings)
    if result is None:
        return
    out_THD, lse_TH = result
    assert out_THD.dtype == case.call["q_THD"].dtype
    assert lse_TH.dtype == np.float32
    if case.out_TH is None:
        assert not attention.faults((out_THD, lse_TH), case.call)
        return
    step = STEP[out_THD.dtype.name]
    expected_THD = np.broadcast_to(np.array(case.out_TH)[..., None], out_THD.shape)
    np.testing.assert_allclose(out_THD.astype(np.float64), expected_THD, rtol=step, atol=1e-6)
    np.testing.assert_allclose(lse_TH, case.lse_TH, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_answers_exactly(name):
    case = CASES["xla"][name]
    out_THD, lse_TH = attention.attend(**case.call)
    if case.out_TH is not None:
        np.testing.assert_allclose(out_THD, np.array(case.out_TH)[..., None] + 0 * out_THD)
        np.testing.assert_allclose(lse_TH, case.lse_TH)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(
            backend,
            name,
            marks=[pytest.mark.slow] if case.slow and backend in backends.INTERPRETERS else [],
        )
        for backend, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_a_case_has_its_answer(backend, name):
    """Kernels run with race detection."""
    check(CASES[backend][name], backend, races=backend in backends.INTERPRETERS)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (backend, dtype)
        for backend in BACKENDS
        for dtype in ("float16", "bfloat16", "float32")
        if dtype != backends.DTYPE[backend]
    ],
)
def test_empty_rows_are_zero_in_every_other_type(backend, dtype):
    """Case 4: 0 and -inf, not what memory held."""
    call = problem(4, lengths=[0, 5, 0], width=attention_cases.WIDTH, dtype=dtype)
    check(Case("4", call), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_f32_is_f32(backend):
    """Case 19: a product in bf16 would err by 1e-3."""
    call = attention_cases.random_f32()
    result = backends.attempt(call, backend)
    if result is not None:
        assert np.abs(result[0] - attention.attend(**call)[0]).max() <= 1e-5
