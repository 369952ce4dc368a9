"""What a kernel benchmark times: its cells, in order, and what it leaves out and why.

A cell is one contender on one shape. The baselines stand before the kernels they are compared with,
and cells of one shape stand together, so that its inputs are drawn once.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from experiments import attention_contenders, attention_inputs
from experiments.attention_inputs import Shape
from pallas_kernels import tiling as tilings
from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling

KERNELS = ("decode", "prefill")
LENGTHS = ("full", "ragged")
AUTO = "auto"  # splits as the kernel chooses them
NONE = "-"


class Cell(NamedTuple):
    """The factors of an observation; 0 and - where a contender knows no such thing."""

    kernel: str
    contender: str
    backend: str
    lengths: str
    batch: int
    context: int
    block_size: int
    dtype: str
    splits: str


COPY = Cell("copy", "copy", NONE, NONE, 0, 0, 0, NONE, NONE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of every factor, and what all cells share."""

    kernels: tuple[str, ...]
    contenders: tuple[str, ...]
    backends: tuple[str, ...]
    lengths: tuple[str, ...]
    batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    splits: tuple[str, ...]
    query_heads: int
    kv_heads: int
    width: int
    chunk: int  # of a prefill; 0: the whole context
    platform: str

    def shape(self, cell: Cell) -> Shape:
        """The call that a cell times."""
        whole = cell.context if self.chunk == 0 else min(self.chunk, cell.context)
        return Shape(
            batch=cell.batch,
            context=cell.context,
            chunk=1 if cell.kernel == "decode" else whole,
            ragged=cell.lengths == "ragged",
            # A contiguous cache is padded to the first block size, as its neighbours are.
            block_size=cell.block_size or self.block_sizes[0],
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            width=self.width,
            dtype=cell.dtype,
        )


def plan(settings: Settings) -> tuple[list[Cell], list[str]]:
    """The cells, and a line for each reason to leave others out. ``ValueError`` if none is left."""
    cells: list[Cell] = []
    reasons: dict[str, None] = {}
    for cell in _every(settings):
        reason = refusal(settings, cell)
        if reason is None:
            cells.append(cell)
        else:
            who = cell.contender if cell.backend == NONE else cell.backend
            reasons.setdefault(f"{cell.kernel} by {who} {reason}", None)
    if not cells:
        raise ValueError(f"nothing to time: {'; '.join(reasons)}")
    return cells, list(reasons)


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells whose times are compared: those that differ in contender, blocks and splits only."""

    def same(cell: Cell) -> Cell:
        return cell._replace(contender=NONE, backend=NONE, block_size=0, splits=NONE)

    return [list(group) for _, group in itertools.groupby(cells, same)]


def refusal(settings: Settings, cell: Cell) -> str | None:
    """Why a cell cannot be timed, in a line, or None."""
    shape = settings.shape(cell)
    if cell.contender not in attention_contenders.TABLES:
        return attention_contenders.refusal(cell.contender, shape, settings.platform)
    if cell.kernel == "prefill" and cell.splits != AUTO:
        return "is not split"
    problem = attention_inputs.problem_of(shape)
    chosen = full_tiling(cell.backend, problem, tiling(cell))
    return backend_module(cell.backend).refusal(problem, chosen)


def backend_module(backend: str) -> ModuleType:
    """The module of a back end, see ``pallas_kernels.problem``."""
    return importlib.import_module(f"pallas_kernels.{backend}")


def full_tiling(backend: str, problem: Problem, given: Tiling | None = None) -> Tiling:
    """Every size of a kernel: the given ones, else the tuned ones, else the formula's."""
    default = backend_module(backend).default_tiling(problem)
    return tilings.fill(given, tilings.fill(tilings.tuned(backend, problem), default))


def tiling(cell: Cell) -> Tiling | None:
    """The sizes that a cell sets; the rest are the kernel's own."""
    return None if cell.splits in (AUTO, NONE) else Tiling(splits=int(cell.splits))


def _every(settings: Settings) -> Iterator[Cell]:
    for kernel in settings.kernels:
        decodes = kernel == "decode"
        for dtype, batch, context, lengths in itertools.product(
            settings.dtypes,
            settings.batches if decodes else settings.prefill_batches,
            settings.contexts,
            settings.lengths if decodes else LENGTHS[:1],
        ):
            shape: dict[str, Any] = {"kernel": kernel, "lengths": lengths, "dtype": dtype}
            shape |= {"batch": batch, "context": context}
            yield from (Cell(**shape, **of) for of in _of_contenders(settings))


def _of_contenders(settings: Settings) -> Iterator[dict[str, Any]]:
    """The factors in which the contenders for one shape differ."""
    chosen = [name for name in attention_contenders.CONTENDERS if name in settings.contenders]
    none = {"backend": NONE, "splits": NONE}
    for contender in chosen:
        if contender in attention_contenders.DENSE:
            yield {"contender": contender, "block_size": 0} | none
    for block_size, contender in itertools.product(settings.block_sizes, chosen):
        if contender in attention_contenders.TABLES:
            for backend, splits in itertools.product(settings.backends, settings.splits):
                factors = {"contender": contender, "block_size": block_size}
                yield factors | {"backend": backend, "splits": splits}
        elif contender not in attention_contenders.DENSE:
            yield {"contender": contender, "block_size": block_size} | none
