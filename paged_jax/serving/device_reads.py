"""Reads of device arrays: serving looks at its device here and nowhere else.

A read waits for all that was dispatched before it, so an engine may have one a dispatch and no
more. ``count`` says how many there were.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass
class DeviceReads:
    """The reads of one run."""

    count: int = 0

    def __call__(self, tree: Any) -> Any:
        """The arrays of a pytree in NumPy, all in one read."""
        self.count += 1
        return jax.device_get(tree)
