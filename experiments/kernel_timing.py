"""Seconds of one call of attention, and of a copy beside it, on cold caches.

A timed run makes one call on each of several sets of inputs, which no cache holds, and its time
over their number is the time of a call. Cells that are to be compared are timed in turn. A copy
counts bytes read and bytes written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax

from experiments import attention_contenders, attention_inputs, kernel_plan, torch_attention
from experiments.attention_inputs import Batch, Shape
from experiments.kernel_plan import Cell, Settings
from paged_jax.measure import timing
from paged_jax.measure.timing import Timing
from pallas_kernels.tiling import Tiling

PASSES = 32  # of a copy; the first fetches pages of memory, too


class Stopwatch:
    """Times cells; keeps the inputs of the last ones, and an array larger than the caches."""

    def __init__(
        self, settings: Settings, *, size_bytes: int, most_sets: int, repeats: int
    ) -> None:
        self.settings = settings
        self.size_bytes = size_bytes
        self.most_sets = most_sets
        self.repeats = repeats
        self._evict = attention_inputs.evictor(size_bytes)
        self._batches: dict[Shape, Batch] = {}

    def time_calls(
        self, cells: Iterable[Cell], tiling: Tiling | None = None
    ) -> tuple[dict[Cell, Timing], dict[Cell, Exception]]:
        """Timings of one call of each cell, taken in turn, and what went wrong with the others.

        ``tiling``: in place of the cells' own.
        """
        runs: dict[Cell, tuple[Callable[[], object], float]] = {}
        failed: dict[Cell, Exception] = {}
        cells = list(cells)
        shapes = [self.settings.shape(cell) for cell in cells]
        # Freed before the next are drawn: both may not fit.
        self._batches = {shape: self._batches[shape] for shape in shapes if shape in self._batches}
        for cell, shape in zip(cells, shapes, strict=True):
            try:
                runs[cell] = self._prepare(cell, shape, tiling)
            except Exception as error:  # of one kernel among many: the others' times are wanted
                failed[cell] = error
        every = timing.time_in_turn(
            [run for run, _ in runs.values()], repeats=self.repeats, before=self._evict
        )
        timings = {}
        for (cell, (_, compile_seconds)), seconds in zip(runs.items(), every, strict=True):
            sets = self._set_count(self.settings.shape(cell))
            timings[cell] = timing.summarize([time / sets for time in seconds], compile_seconds)
        return timings, failed

    def time_copy(self) -> Timing:
        """Timing of one pass that reads ``size_bytes`` and writes as many."""
        array_N = jnp.zeros(self.size_bytes // 4, jnp.uint32)
        run, compile_seconds = timing.compile_run(_increment, array_N)
        (seconds,) = timing.time_in_turn([run], repeats=self.repeats)
        return timing.summarize([time / PASSES for time in seconds], compile_seconds)

    def _prepare(
        self, cell: Cell, shape: Shape, tiling: Tiling | None
    ) -> tuple[Callable[[], object], float]:
        """A run of one call on each set, and the seconds to compile it."""
        sets = self._set_count(shape)
        if cell.contender == "torch":
            return torch_attention.capture_calls(shape, sets)
        if shape not in self._batches:
            self._batches[shape] = attention_inputs.draw(shape, sets)
        batch = self._batches[shape]
        if cell.contender == "dense":
            calls = attention_contenders.attend_dense(batch, shape)
        elif cell.contender == "jax":
            calls = attention_contenders.attend_jax(batch, shape, self.settings.platform)
        else:
            tiling = tiling or kernel_plan.tiling(cell)
            calls = attention_contenders.attend(batch, shape, cell.contender, cell.backend, tiling)
        function, arguments = calls
        return timing.compile_run(function, *arguments)

    def _set_count(self, shape: Shape) -> int:
        return attention_inputs.set_count(shape, self.size_bytes, self.most_sets)


def _increment(array_N: jax.Array) -> jax.Array:
    """One pass that copies the argument, and then passes over the copy."""
    return lax.fori_loop(1, PASSES, lambda _, array_N: array_N + jnp.uint32(1), array_N)
