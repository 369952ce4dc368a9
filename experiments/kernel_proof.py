"""What do the kernels compile to, and what bounds them, on chips that nobody has at hand?

    python -m experiments.kernel_proof --targets=v5e,v6e --kernels=decode --block_sizes=16,64

Compiles this package's kernels and JAX's own with the real compilers, no device: the extra [tpu]
for v5e, v5p, v6e and v7x, [cuda13] and nvdisasm for sm_90a. Each flag's first value is the base;
shapes differ from it in at most ``--changes`` factors, or are those that a goal speaks of. The
inner loop's bundles (TPU) or issue slots (GPU) for 64 KiB of cache stand beside the cycles in which
memory delivers them: where they are fewer, bandwidth bounds the kernel. A spill, a kernel that does
not compile or a missed goal makes the exit code 1. Each target has a process and a folder.
"""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags

from configs import chips
from configs.chips import Chip
from experiments import command, compilers, proof_kernels, proof_table
from experiments.proof_kernels import Build, Shape
from paged_jax.measure import environment, results

KERNELS = ("decode", "prefill")
DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
DUMPS = "KERNEL_PROOF_DUMPS"  # set by the parent: the child compiles, and dumps there

# What lowering and compiling raise: XLA's error is a RuntimeError, the rest are Pallas's.
COMPILER_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)
FACTOR_FLAGS = ("kernels", "block_sizes", "widths", "groups", "kv_heads", "dtypes", "changes")

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_list("targets", list(chips.CHIPS), "chips to compile for")
    flags.DEFINE_list("kernels", list(KERNELS), "kernels to compile")
    flags.DEFINE_list("sources", None, "whose kernels; default: all there are for the target")
    flags.DEFINE_list("block_sizes", ["16", "8", "32", "64", "128"], "slots of a block")
    flags.DEFINE_list("widths", ["128", "64"], "head widths")
    flags.DEFINE_list("groups", ["4", "1", "8"], "query heads of a kv head")
    flags.DEFINE_list("kv_heads", ["8", "1", "2"], "kv heads")
    flags.DEFINE_list("dtypes", ["bfloat16", "float32", "int8", "float8_e4m3fn"], "cache types")
    flags.DEFINE_integer("changes", 1, "factors in which a shape may leave the base", lower_bound=0)
    flags.DEFINE_string("out", "results/kernel_proof", "folder of the results; empty: print only")
    flags.DEFINE_string("dumps", None, "folder to keep the compilers' dumps in")
    flags.DEFINE_bool("reprint", False, "print the tables of --out and compile nothing")


def main(_: list[str]) -> None:
    targets = command.choices("targets", FLAGS.targets, chips.CHIPS)
    if FLAGS.reprint:
        for target in targets:
            reprint(target)
        return
    for target in targets:
        if lack := compilers.missing(chips.CHIPS[target]):
            raise ValueError(f"--targets: {target} {lack}")
    if DUMPS in os.environ:
        prove(targets[0], Path(os.environ[DUMPS]))
        return
    for target in targets:
        read_shapes(target)
        read_sources(target)
        rows = Path(FLAGS.out, target, results.ROWS)
        if FLAGS.out and rows.exists():
            raise ValueError(f"{rows} exists: take another --out")
    if failed := [target for target in targets if run_child(target)]:
        raise ValueError(f"not proved for {', '.join(failed)}")


def run_child(target: str) -> int:
    """The exit code of this command for one target, in a process whose compilers dump."""
    with tempfile.TemporaryDirectory() as scratch:
        dumps = Path(FLAGS.dumps or scratch).absolute() / target
        dumps.mkdir(parents=True)
        variables = compilers.environment(chips.CHIPS[target], dumps) | {DUMPS: str(dumps)}
        arguments = [*sys.argv[1:], f"--targets={target}"]
        return subprocess.run(
            [sys.executable, "-m", "experiments.kernel_proof", *arguments],
            env=os.environ | variables,
            check=False,
        ).returncode


def reprint(target: str) -> None:
    """Prints a target's rows as ``prove`` did; ``ValueError`` or ``OSError`` if there are none."""
    proved = proof_table.read(Path(FLAGS.out, target))
    print_heading(target)
    for (source, shape), figures in proved.items():
        print(proof_table.line(chips.CHIPS[target].platform, source, shape, figures))
    conclude(target, proved, [])


def print_heading(target: str) -> None:
    chip = chips.CHIPS[target]
    cycles = chip.memory_cycles(proof_table.PIECE)
    print(f"\n{target}, {chip.kind}: 64 KiB come from memory in {cycles:,.0f} cycles")
    print(proof_table.header(chip.platform))


def prove(target: str, dumps: Path) -> None:
    """Compiles, prints and writes a target's kernels; ``ValueError`` if they prove too little."""
    chip = chips.CHIPS[target]
    proved: dict[tuple[str, Shape], proof_table.Figures] = {}
    refused: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    print_heading(target)
    for shape, source in itertools.product(read_shapes(target), read_sources(target)):
        try:
            built = proof_kernels.build(source, shape, chip)
            if isinstance(built, str):
                refused[f"{source}: {built}"] += 1
                continue
            proved[source, shape] = measure(shape, chip, built, dumps)
            print(proof_table.line(chip.platform, source, shape, proved[source, shape]), flush=True)
        except COMPILER_ERRORS as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0].partition(". ")[0][:200]
            if source == proof_kernels.OWN:
                faults.append(f"{proof_table.label(source, shape)}: {reason}")
                print(f"FAIL  {faults[-1]}", flush=True)
            else:
                refused[f"{source}: {reason}"] += 1
        finally:
            compilers.clear(dumps, keep=FLAGS.dumps is not None)
    for reason, count in refused.items():
        print(f"none  {reason} ({count} shapes)")
    if FLAGS.out and proved:
        write(target, proved, refused, faults)
    conclude(target, proved, faults)


def conclude(target: str, proved: proof_table.Proved, faults: Sequence[str]) -> None:
    """Prints what failed and how the goals fare; ``ValueError`` unless all is well."""
    spilling = proof_table.faults(proved)
    for fault in spilling:
        print(f"FAIL  {fault}")
    missed = 0
    for goal in proof_table.GOALS[chips.CHIPS[target].platform]:
        if verdict := proof_table.judge(goal, proved):
            kept, words = verdict
            missed += not kept
            print(f"{'pass' if kept else 'FAIL'}  {words}")
    if failed := len(faults) + len(spilling) + missed:
        raise ValueError(f"{target}: lines above that say FAIL: {failed}")


def measure(shape: Shape, chip: Chip, built: Build, dumps: Path) -> proof_table.Figures:
    """Compiles one kernel and reads its figures off the compiler's dumps."""
    compilers.compile_for(chip, built.function, built.arguments)
    found = compilers.read_dumps(chip, dumps)
    named = [dump for dump in found if shape.kernel in dump.name] or found
    if len(named) != 1:
        names = ", ".join(dump.name for dump in found) or "none"
        raise ValueError(f"expected one kernel named after {shape.kernel}, found {names}")
    if isinstance(named[0], compilers.TpuDump):
        return proof_table.tpu_figures(named[0], shape, chip, built)
    return proof_table.gpu_figures(named[0], shape, chip, built)


def write(
    target: str, proved: proof_table.Proved, refused: Mapping[str, int], faults: Sequence[str]
) -> None:
    """The rows of a target, and in ``run.json`` how many shapes have none and why."""
    described = {name: FLAGS[name].value for name in FACTOR_FLAGS}
    described |= {"target": target, "sources": read_sources(target)}
    run = environment.describe(described, [])
    run |= {"compiler": compilers.version(chips.CHIPS[target]), "refused": dict(refused)}
    run["failed"] = list(faults)
    with results.Table.open(
        Path(FLAGS.out, target),
        factors=proof_table.FACTORS,
        metrics=proof_table.metrics(chips.CHIPS[target].platform),
        cells=[proof_table.cell(*key) for key in proved],
        run=run,
    ) as table:
        for key, figures in proved.items():
            table.append(proof_table.cell(*key), figures)


def read_sources(target: str) -> tuple[str, ...]:
    """Whose kernels to compile for a target."""
    known = proof_kernels.SOURCES[chips.CHIPS[target].platform]
    return command.choices("sources", FLAGS.sources or known, known)


def read_shapes(target: str) -> list[Shape]:
    """The shapes that the flags ask for, in the flags' order."""
    factors: Mapping[str, tuple] = {
        "dtype": command.choices("dtypes", FLAGS.dtypes, DTYPES),
        "block_size": command.numbers("block_sizes", FLAGS.block_sizes, int, low=1),
        "width": command.numbers("widths", FLAGS.widths, int, low=1),
        "group": command.numbers("groups", FLAGS.groups, int, low=1),
        "kv_heads": command.numbers("kv_heads", FLAGS.kv_heads, int, low=1),
    }
    base = tuple(values[0] for values in factors.values())
    goals = proof_table.GOALS[chips.CHIPS[target].platform]
    shapes = []
    for kernel in command.choices("kernels", FLAGS.kernels, KERNELS):
        for values in itertools.product(*factors.values()):
            shape = Shape(kernel, *values)
            changes = sum(a != b for a, b in zip(values, base, strict=True))
            if changes <= FLAGS.changes or any(goal.covers(shape) for goal in goals):
                shapes.append(shape)
    return shapes


if __name__ == "__main__":
    command.run(main, define_flags)
