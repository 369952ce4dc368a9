"""The kernel proof's rows: what a compiled kernel costs, the model of its speed, the goals.

Counts are of the main loop, per 64 KiB of cache (a *piece*), and stand beside the cycles in which
memory delivers as much. The model is an upper bound of what a device can reach. A TPU core spends,
for a row of 4,096 tokens, the larger of the two on each piece, and once a program all bundles that
are not on the loop's steady way. A GPU's SM spends the larger of the two, or waits, where it has
less in flight than memory's latency asks for (Little's law); CTAs hide each other's other work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from configs.chips import Chip
from experiments import bundles, proof_kernels, sass
from experiments.compilers import GpuDump, TpuDump
from experiments.proof_kernels import OWN, ROW_TOKENS, Build, Shape
from paged_jax.measure import results

PIECE = 1 << 16
MEMORY_LATENCY = 1e-6  # seconds, of an H200 under load

FACTORS = ("source", "kernel", "dtype", "block_size", "width", "group", "kv_heads")
METRICS = {
    "tpu": [
        ("vmem_bytes", "B"),
        ("total_bundles", "bundles"),
        ("loop_bundles", "bundles"),
        ("steady_bundles", "bundles"),
        ("assumed_loops", "loops"),
        ("bundles_per_piece", "bundles/64KiB"),
        ("steady_per_piece", "bundles/64KiB"),
    ],
    "cuda": [
        ("registers", "1/thread"),
        ("whole_registers", "1/thread"),
        ("spilled_bytes", "B"),
        ("static_smem_bytes", "B"),
        ("dynamic_smem_bytes", "B"),
        ("threads", "1/CTA"),
        ("ctas_per_sm", "1/SM"),
        ("staged_bytes", "B/SM"),
        ("copy_instructions", "1/trip"),
        ("tensor_instructions", "1/trip"),
        ("exp2_instructions", "1/trip"),
        ("consumer_slots", "slots/64KiB"),
        ("producer_slots", "slots/64KiB"),
        ("slots_per_piece", "slots/64KiB"),
        ("most_slots_per_piece", "slots/64KiB"),
    ],
}
SHARED_METRICS = [
    ("block_bytes", "B"),
    ("trip_bytes", "B"),
    ("memory_cycles", "cycles/64KiB"),
    ("matrix_cycles", "cycles/64KiB"),
    ("bandwidth_fraction", "ratio"),
    ("matrix_fraction", "ratio"),
]

Figures = Mapping[str, float]
Proved = Mapping[tuple[str, Shape], Figures]  # by (source, shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A bound that the figures of some of this package's kernels have to keep."""

    metric: str
    most: float | None = None
    least: float | None = None
    kernels: tuple[str, ...] = ("decode",)
    dtypes: tuple[str, ...] = ("bfloat16",)
    block_sizes: tuple[int, ...] = (16,)
    widths: tuple[int, ...] = (128,)
    groups: tuple[int, ...] = (1, 4, 8)
    kv_heads: tuple[int, ...] = (8,)

    def covers(self, shape: Shape) -> bool:
        return (
            shape.kernel in self.kernels
            and shape.dtype in self.dtypes
            and shape.block_size in self.block_sizes
            and shape.width in self.widths
            and shape.group in self.groups
            and shape.kv_heads in self.kv_heads
        )

    def keeps(self, figure: float) -> bool:
        return figure <= self.most if self.most is not None else figure >= (self.least or 0)


GOALS = {
    "tpu": [Goal("steady_per_piece", most=30, block_sizes=(16, 32, 64, 128), groups=(4, 8))],
    "cuda": [
        Goal("registers", most=80),
        Goal("whole_registers", most=80),
        Goal("ctas_per_sm", least=3),
        Goal("staged_bytes", least=128 << 10),
        Goal("slots_per_piece", most=750),
    ],
}


def metrics(platform: str) -> list[tuple[str, str]]:
    """(name, unit) of what every kernel of a platform reports."""
    return METRICS[platform] + SHARED_METRICS


def tpu_figures(dump: TpuDump, shape: Shape, chip: Chip, build: Build) -> Figures:
    """The metrics of a kernel from libtpu's dumps; ``ValueError`` where they show no main loop."""
    program = bundles.parse(dump.listing)
    padded = proof_kernels.padded_bytes(shape, build.trip_bytes)
    cost = bundles.cost(bundles.main_loop(program), padded)
    memory = chip.memory_cycles(PIECE * padded // build.trip_bytes)
    steady = PIECE / build.trip_bytes * cost.steady
    pieces = ROW_TOKENS * build.heads * shape.token_bytes / PIECE
    once = max(0, len(program.bundles) - cost.steady) / pieces
    modelled = max(steady, memory) + once
    return {
        "vmem_bytes": bundles.vmem_bytes(dump.allocations),
        "total_bundles": len(program.bundles),
        "loop_bundles": cost.bundles,
        "steady_bundles": cost.steady,
        "assumed_loops": cost.assumed,
        "bundles_per_piece": PIECE / build.trip_bytes * cost.bundles,
        "steady_per_piece": steady,
        "memory_cycles": memory,
        **shared_figures(shape, chip, build, modelled),
    }


def gpu_figures(dump: GpuDump, shape: Shape, chip: Chip, build: Build) -> Figures:
    """The metrics of a kernel from ptxas's report and its SASS; ``ValueError`` as above."""
    report, whole = sass.read_report(dump.report), sass.read_report(dump.whole_report)
    main = sass.main_loops(sass.parse(dump.sass), build.copies)
    warpgroups = dump.threads // (sass.WARP * sass.SCHEDULERS) - (main.producer is not None)
    per_piece = PIECE / build.trip_bytes
    consumed, consumed_most = (
        per_piece * warpgroups * sass.slots(loop) for loop in (main.steady, main.longest)
    )
    produced = per_piece * sass.slots(main.producer, build.copies) if main.producer else 0.0
    smem = report.static_smem + dump.dynamic_smem
    ctas = sass.ctas_per_sm(max(report.registers, whole.registers), dump.threads, smem)
    if ctas == 0:
        raise ValueError(f"a CTA of {whole.registers} registers and {smem:,} B fits no SM")
    if build.stages * build.trip_bytes > smem:
        raise ValueError(f"{build.stages} stages of {build.trip_bytes:,} B in {smem:,} B: no trip")
    staged = build.stages * build.trip_bytes * ctas
    memory = chip.memory_cycles(PIECE)
    late = MEMORY_LATENCY * chip.bandwidth / staged
    matrix = matrix_cycles(shape, chip, build)
    modelled = max(consumed + produced, memory * max(1.0, late), matrix)
    return {
        "registers": report.registers,
        "whole_registers": whole.registers,
        "spilled_bytes": report.spilled_bytes + whole.spilled_bytes,
        "static_smem_bytes": report.static_smem,
        "dynamic_smem_bytes": dump.dynamic_smem,
        "threads": dump.threads,
        "ctas_per_sm": ctas,
        "staged_bytes": staged,
        "copy_instructions": main.copies,
        "tensor_instructions": main.steady.count(sass.TENSOR),
        "exp2_instructions": main.steady.count(sass.EXPONENTIAL),
        "consumer_slots": consumed,
        "producer_slots": produced,
        "slots_per_piece": consumed + produced,
        "most_slots_per_piece": consumed_most + produced,
        "memory_cycles": memory,
        **shared_figures(shape, chip, build, modelled),
    }


def shared_figures(shape: Shape, chip: Chip, build: Build, cycles: float) -> Figures:
    """What follows from a shape and the modelled cycles of a piece."""
    matrix = matrix_cycles(shape, chip, build)
    return {
        "block_bytes": shape.block_bytes,
        "trip_bytes": build.trip_bytes,
        "matrix_cycles": matrix,
        "bandwidth_fraction": chip.memory_cycles(PIECE) / cycles,
        "matrix_fraction": matrix / cycles,
    }


def matrix_cycles(shape: Shape, chip: Chip, build: Build) -> float:
    """Cycles that the products of all queries with a piece take at bf16's peak."""
    elements = PIECE / shape.itemsize  # half are keys, half values: each meets every query once
    return chip.matrix_cycles(2 * build.queries * shape.group * elements)


def faults(proved: Proved) -> list[str]:
    """This package's kernels that spill registers, in words."""
    return [
        f"{label(source, shape)} spills {figures['spilled_bytes']:,.0f} bytes"
        for (source, shape), figures in proved.items()
        if source == OWN and figures.get("spilled_bytes", 0) > 0
    ]


def judge(goal: Goal, proved: Proved) -> tuple[bool, str] | None:
    """(kept, the worst figure in words) of a goal; None where no kernel proved is of its kind."""
    held = {
        shape: figures[goal.metric]
        for (source, shape), figures in proved.items()
        if source == OWN and goal.covers(shape)
    }
    if not held:
        return None
    worst = (max if goal.most is not None else min)(held, key=lambda shape: held[shape])
    bound = f"<= {goal.most:,}" if goal.most is not None else f">= {goal.least:,}"
    kept = all(goal.keeps(figure) for figure in held.values())
    return kept, (
        f"{goal.metric} {bound} over {len(held)} shapes: at worst {held[worst]:,.1f}"
        f" ({label(OWN, worst)})"
    )


def read(folder: Path) -> Proved:
    """What a target's folder of results holds; raises as ``results.read``."""
    proved: dict[tuple[str, Shape], dict[str, float]] = {}
    for row in results.read(folder):
        kernel, dtype = row["kernel"], row["dtype"]
        shape = Shape(kernel, dtype, *(int(row[name]) for name in FACTORS[3:]))
        proved.setdefault((row["source"], shape), {})[row["metric"]] = row["value"]
    return proved


def label(source: str, shape: Shape) -> str:
    """A kernel's name for messages."""
    return (
        f"{source} {shape.kernel} {shape.dtype} block {shape.block_size} width {shape.width}"
        f" group {shape.group} kv heads {shape.kv_heads}"
    )


def cell(source: str, shape: Shape) -> tuple[object, ...]:
    """The factors of a kernel's rows."""
    return (source, *dataclasses.astuple(shape))


COLUMNS = {
    "tpu": (
        ("VMEM KiB", "vmem_bytes", 1 << 10),
        ("bundles", "total_bundles", 1),
        ("loop", "loop_bundles", 1),
        ("steady", "steady_bundles", 1),
        ("/64KiB", "bundles_per_piece", 1),
        ("steady", "steady_per_piece", 1),
        ("memory", "memory_cycles", 1),
        ("matrix", "matrix_cycles", 1),
    ),
    "cuda": (
        ("regs", "registers", 1),
        ("whole", "whole_registers", 1),
        ("spilled", "spilled_bytes", 1),
        ("smem", "dynamic_smem_bytes", 1),
        ("CTAs", "ctas_per_sm", 1),
        ("staged KiB", "staged_bytes", 1 << 10),
        ("copies", "copy_instructions", 1),
        ("mma", "tensor_instructions", 1),
        ("ex2", "exp2_instructions", 1),
        ("consumer", "consumer_slots", 1),
        ("producer", "producer_slots", 1),
        ("steady", "slots_per_piece", 1),
        ("most", "most_slots_per_piece", 1),
        ("memory", "memory_cycles", 1),
        ("matrix", "matrix_cycles", 1),
    ),
}


def header(platform: str) -> str:
    """The heading over ``line``s."""
    titles = "".join(f"{title:>11}" for title, _, _ in COLUMNS[platform])
    shape = f"{'source':<27}{'kernel':<8}{'dtype':<14}{'S':>4}{'D':>4}{'G':>3}{'K':>3}"
    return f"{shape}{titles}{'bound':>9}{'memory':>7}{'matrix':>7}"


def line(platform: str, source: str, shape: Shape, figures: Figures) -> str:
    """A kernel's figures; the last two are what the model reaches of memory and matrix peaks."""
    numbers = "".join(f"{figures[name] / unit:>11,.0f}" for _, name, unit in COLUMNS[platform])
    sizes = f"{shape.block_size:>4}{shape.width:>4}{shape.group:>3}{shape.kv_heads:>3}"
    work = figures.get("steady_per_piece", figures.get("slots_per_piece", 0))
    bounds = {
        "memory": figures["memory_cycles"],
        "matrix": figures["matrix_cycles"],
        "issue": work,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    fractions = f"{figures['bandwidth_fraction']:>7.0%}{figures['matrix_fraction']:>7.0%}"
    return f"{source:<27}{shape.kernel:<8}{shape.dtype:<14}{sizes}{numbers}{bound:>9}{fractions}"
