"""The README's Python runs as it stands, and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_block_manager_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    # Rows 0 and 1 copy block 2 to blocks 3 and 4, row 2 keeps it; each writes at offset 8.
    assert capsys.readouterr().out == "True [ 3  4 64 64] [  56   72   40 1039] 59\n"
    assert names["valid"]
    assert names["state"].pool.free == 64
    assert len(code.splitlines()) <= 30
