"""Axis letters: sizes are read off names, and clashes are named."""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dims

key = sys.modules["pallas_kernels.dims"]  # the package's attribute is the function


def test_sizes_come_from_names():
    sizes = dims(kv_NUKSD=np.zeros((7, 2, 3, 4, 5)), table_BM=jnp.zeros((6, 8)))
    assert vars(sizes) == {"N": 7, "U": 2, "K": 3, "S": 4, "D": 5, "B": 6, "M": 8}


def test_sizes_are_known_while_tracing():
    @jax.jit
    def rows(length_B):
        assert dims(length_B=length_B).B == 3
        return length_B

    rows(jnp.zeros(3))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a_BM": np.zeros((2, 3)), "b_M": np.zeros(4)},
            "b_M: axis M has size 4, but a_BM gave it 3",
        ),
        ({"a_BM": np.zeros(2)}, r"a_BM: expected 2 axes \(BM\), got shape \(2,\)"),
        ({"a_Bb": np.zeros((2, 2))}, "a_Bb: the name must end in axis letters"),
        ({"a_": np.zeros(2)}, "a_: the name must end in axis letters"),
    ],
)
def test_clashes_are_named(arrays, message):
    with pytest.raises(ValueError, match=message):
        dims(**arrays)


def test_the_key_lists_every_letter():
    documented = re.findall(r"``([A-Z])``", key.__doc__ or "")
    assert len(documented) == len(set(documented))
    assert set(documented) == key.AXES
