"""The benchmark of a decode step times steps that all fit, and reports each pool."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from experiments.reserve_cost import DECODE_STEPS, decode_rounds
from paged_jax.measure import results
from paged_jax.memory import block_table


@pytest.mark.parametrize(("blocks", "fits"), [(4 * 9, True), (4 * 9 - 1, False)])
def test_every_step_fits_where_there_are_blocks_for_it(blocks, fits):
    """Four rows of up to 4 + 32 tokens in blocks of 4: nine blocks each, less for shorter ones."""
    state = block_table.create(rows=4, blocks=blocks, block_size=4, blocks_per_row=9)
    state, fitted = jax.jit(decode_rounds, static_argnames="rounds")(state, rounds=2)
    assert fitted == fits
    if fits:
        assert state.length_B.tolist() == [DECODE_STEPS + start for start in (1, 2, 3, 4)]
    assert block_table.faults(state) == []


def test_command_reports_each_pool(tmp_path):
    out = tmp_path / "out"
    flags = ("--rows=4", "--blocks=40,80", "--rounds=2", "--repeats=1", f"--out={out}")
    command = [sys.executable, "-m", "experiments.reserve_cost", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = results.read(out)
    assert [row["blocks"] for row in rows] == ["40", "40", "80", "80"]
    assert all(row["value"] > 0 for row in rows)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert again.stderr == f"error: {out / 'rows.csv'} exists: take another --out\n"
