"""The README's Python runs as it stands, and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def example(section: str) -> tuple[str, dict[str, Any]]:
    """The code of a section's only example, and the names that running it leaves."""
    text = (ROOT / "README.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return code, names


def test_kernels_example() -> None:
    code, names = example("The kernels alone")
    rows = np.concatenate([np.asarray(names["kv"])[block] for block in (7, 3)], axis=2)
    np.testing.assert_array_equal(rows[0, :, :20].swapaxes(0, 1), names["k"][:20])
    q, k, v = (np.asarray(names[name], np.float64) for name in "qkv")
    odds = np.exp(q[1, 3] @ k[20:, 0].T / 8)  # row 1 has five tokens; query head 3 reads kv head 0
    np.testing.assert_allclose(names["out"][1, 3], odds @ v[20:, 0] / odds.sum(), atol=1e-5)
    np.testing.assert_allclose(names["lse"][1, 3], np.log(odds.sum()), atol=1e-5)
    assert len([line for line in code.splitlines() if "import" not in line]) <= 10


def test_block_manager_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, names = example("The block manager alone")
    # Rows 0 and 1 copy block 2 to blocks 3 and 4, row 2 keeps it; each writes at offset 8.
    assert capsys.readouterr().out == "True [ 3  4 64 64] [  56   72   40 1039] 59\n"
    assert names["valid"]
    assert names["state"].pool.free == 64
    assert len(code.splitlines()) <= 30
