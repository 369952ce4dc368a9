"""Rows of different lengths in one array: the packed form of prefix ids and of token ids.

Row ``r`` of R is ``values_T[offset_P[r]:offset_P[r + 1]]`` with P = R + 1, so every statistic over
all rows is one NumPy expression over ``values_T`` and needs no loop over requests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """R packed rows of whole numbers. ``ValueError`` when the offsets do not cut up the values."""

    values_T: np.ndarray  # int64, all rows end to end
    offset_P: np.ndarray  # int64, where each row begins, and the end

    def __post_init__(self) -> None:
        steps_R = np.diff(self.offset_P)
        ends = self.offset_P[[0, -1]].tolist() if len(self.offset_P) else []
        if ends != [0, len(self.values_T)] or (steps_R < 0).any():
            raise ValueError(
                f"offset_P: expected 0 up to {len(self.values_T)} in order, got {ends}"
            )

    @property
    def count_R(self) -> np.ndarray:
        """Values in each row."""
        return np.diff(self.offset_P)

    @property
    def row_T(self) -> np.ndarray:
        """The row that each value belongs to."""
        return np.repeat(np.arange(len(self.offset_P) - 1), self.count_R)

    @property
    def position_T(self) -> np.ndarray:
        """The place of each value in its row, from 0."""
        return np.arange(len(self.values_T)) - np.repeat(self.offset_P[:-1], self.count_R)

    def row(self, index: int) -> np.ndarray:
        """The values of one row, a view."""
        return self.values_T[self.offset_P[index] : self.offset_P[index + 1]]


def pack(rows: Sequence[Sequence[int]]) -> Ragged:
    """The rows in packed form. Raises ``OverflowError`` for a value outside int64."""
    count_R = np.fromiter(map(len, rows), np.int64, len(rows))
    values_T = np.fromiter(itertools.chain.from_iterable(rows), np.int64, int(count_R.sum()))
    return Ragged(values_T, np.append(0, count_R.cumsum()))
