"""The tolerance rule tells a healthy back end from nine faulty ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pallas_kernels.ops import BACKENDS
from tests.support import attention, backends
from tests.support.attention import Call, Result
from tests.support.backends import INTERPRETERS
from tests.support.mutants import MUTANTS

SMALLEST = ("newest_token_unseen", "window_one_wider", "scale_a_tenth_higher")
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


def cases() -> Iterator[Any]:
    """Every back end and form. Of an interpreter CI asks the smallest faults of the ragged form.

    Rows with one query of a ragged batch are decoded, too. What else the rule tells apart it tells
    apart above, in the same types.
    """
    for backend, form in itertools.product(BACKENDS, COUNTS):
        long = backend in INTERPRETERS
        if long and form == "ragged":
            yield pytest.param(backend, form, SMALLEST, id=f"{backend}-{form}-smallest")
        marks = [pytest.mark.slow] if long else []
        yield pytest.param(backend, form, MUTANTS, marks=marks, id=f"{backend}-{form}")


@pytest.mark.parametrize(("backend", "form", "names"), list(cases()))
def test_no_mutant_of_a_back_end_passes(backend, form, names):
    question = call(form, "bfloat16" if backend in INTERPRETERS else "float32")

    def attend(call: Call) -> Result:
        return backends.run(call, backend)

    assert not attention.faults(attend(question), question)
    for name in names:
        out_THD, lse_TH = MUTANTS[name](attend, question)
        assert np.isfinite(np.asarray(out_THD, np.float32)).all(), f"{name} read poison"
        assert attention.faults((out_THD, lse_TH), question), name
