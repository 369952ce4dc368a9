"""Does the cost of a decode step depend on the size of the pool?

    python -m experiments.reserve_cost --rows=256 --blocks=1000,10000,100000 --out=results/reserve

Times ``block_table.reserve`` for rows that decode one token a step, under ``lax.scan`` with the
state carried in place, and prints each pool beside the smallest: the ratio should stay near 1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from experiments import command
from paged_jax.measure import environment, results, timing
from paged_jax.memory import block_table

DECODE_STEPS = 32

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_integer("rows", 256, "rows that decode", lower_bound=1)
    flags.DEFINE_list("blocks", ["1000", "10000", "100000"], "blocks of the pool")
    flags.DEFINE_integer("block_size", 16, "slots of a block", lower_bound=2)
    flags.DEFINE_integer("rounds", 50, f"of {DECODE_STEPS} steps a run", lower_bound=1)
    flags.DEFINE_integer("repeats", 9, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_string("out", "results/reserve_cost", "folder of the results")


def main(_: list[str]) -> None:
    rows, block_size = FLAGS.rows, FLAGS.block_size
    row_blocks = 1 + -(-DECODE_STEPS // block_size)
    sizes = command.numbers("blocks", FLAGS.blocks, int, low=row_blocks * rows)
    table = results.Table.open(
        FLAGS.out,
        factors=("blocks",),
        metrics=[("step_microseconds", "us"), ("compile_seconds", "s")],
        cells=[(blocks,) for blocks in sizes],
        run=environment.describe(
            {"rows": rows, "block_size": block_size, "rounds": FLAGS.rounds}, []
        ),
    )
    first = None
    print(f"{'blocks':>10}{'us a step':>12}{'ratio':>8}")
    with table:
        for blocks in sizes:
            state = block_table.create(
                rows=rows, blocks=blocks, block_size=block_size, blocks_per_row=row_blocks
            )
            timed = timing.compile_and_time(
                functools.partial(decode_rounds, rounds=FLAGS.rounds), state, repeats=FLAGS.repeats
            )
            microseconds = 1e6 * timed.run_seconds / (FLAGS.rounds * DECODE_STEPS)
            first = first or microseconds
            values = {"step_microseconds": microseconds, "compile_seconds": timed.compile_seconds}
            table.append((blocks,), values)
            print(f"{blocks:>10,}{microseconds:>12.2f}{microseconds / first:>8.2f}")


def decode_rounds(
    state: block_table.BlockTable, *, rounds: int
) -> tuple[block_table.BlockTable, jax.Array]:
    """Rounds of ``DECODE_STEPS`` decode steps from rows of 1 to ``block_size`` tokens.

    Returns the state and whether every step fitted; the few steps between rounds that empty and
    refill the rows are timed along.
    """
    size = state.block_size
    start_B = 1 + jnp.arange(state.length_B.shape[0], dtype=jnp.int32) % size
    one_B = jnp.ones_like(start_B)

    def decode(carry: tuple, _: None) -> tuple[tuple, None]:
        state, fits = carry
        state, _copies, fitted = block_table.reserve(state, one_B, most_tokens=1)
        return (state, fits & fitted), None

    def begin(carry: tuple, _: None) -> tuple[tuple, None]:
        state, fits = carry
        state, _valid = block_table.release(state, state.length_B > 0)
        state, _copies, fitted = block_table.reserve(state, start_B, most_tokens=size)
        return lax.scan(decode, (state, fits & fitted), None, length=DECODE_STEPS)[0], None

    return lax.scan(begin, (state, jnp.bool_(True)), None, length=rounds)[0]


if __name__ == "__main__":
    command.run(main, define_flags)
