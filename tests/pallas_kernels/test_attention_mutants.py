"""The tolerance rule tells a healthy back end from nine faulty ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pallas_kernels.ops import BACKENDS
from tests.support import attention, backends
from tests.support.attention import Call, Result
from tests.support.backends import INTERPRETERS
from tests.support.mutants import MUTANTS

COUNTS = {"decode": None, "ragged": [1, 5, 1]}
CACHES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "float16": {"soft_cap": 4.0},
    "int8": {"dtype": "bfloat16", "k_scale": "head", "v_scale": "slot"},
    "float8_e4m3fn": {"dtype": "bfloat16", "k_scale": "slot", "v_scale": "head"},
}


def call(form: str, dtype: str) -> Call:
    settings: dict[str, Any] = {"dtype": dtype, "cache_dtype": dtype, **CACHES[dtype]}
    return attention.problem(
        7, lengths=[100, 70, 37], counts=COUNTS[form], window=64, poison=False, **settings
    )


def exact(call: Call) -> Result:
    return attention.attend(**call)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("form", COUNTS)
def test_the_rule_passes_the_definition_and_no_mutant_of_it(form, dtype):
    """In every type, so that no tolerance is too wide; without a back end."""
    question = call(form, dtype)
    assert not attention.faults(exact(question), question)
    for name, mutant in MUTANTS.items():
        assert attention.faults(mutant(exact, question), question), name


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        pytest.param(
            *(backend, form),
            # Rows with one query of a ragged batch are decoded, too.
            marks=[pytest.mark.slow] if form == "decode" and backend in INTERPRETERS else [],
        )
        for backend in BACKENDS
        for form in COUNTS
    ],
)
def test_no_mutant_of_a_back_end_passes(backend, form):
    question = call(form, "bfloat16" if backend in INTERPRETERS else "float32")

    def attend(call: Call) -> Result:
        return backends.run(call, backend)

    assert not attention.faults(attend(question), question)
    for name, mutant in MUTANTS.items():
        out_THD, lse_TH = mutant(attend, question)
        assert np.isfinite(np.asarray(out_THD, np.float32)).all(), f"{name} read poison"
        assert attention.faults((out_THD, lse_TH), question), name
