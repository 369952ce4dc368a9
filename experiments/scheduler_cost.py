"""What does a whole scheduled step cost, beside a production engine's scheduler?

    python -m experiments.scheduler_cost --rows=256 --blocks=10000,100000

A step decides who runs, gives blocks, keeps the ledger and lets rows draw; here all rows decode, a
request waits that does not fit, and every row takes a block in each ``--block_size`` steps. Many
steps run in one compiled loop and the median over ``--repeats`` counts. Beside it stands the whole
scheduler of vLLM 0.33.0, block manager included: 3.25 ms for 256 running rows on one quiet core,
measured once and elsewhere.
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
from paged_jax.memory import rows as memory
from paged_jax.memory.ledger import CATEGORIES, Ledger
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
from paged_jax.scheduling.book import Book

INCUMBENT_MICROSECONDS = 3_250
STEPS = 256

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_integer("rows", 256, "rows that decode", lower_bound=1)
    flags.DEFINE_list("blocks", ["10000", "100000"], "blocks of the pool")
    flags.DEFINE_integer("block_size", 16, "slots of a block", lower_bound=1)
    flags.DEFINE_integer("repeats", 9, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_string("out", "results/scheduler_cost", "folder of the results")


def main(_: list[str]) -> None:
    rows, size = FLAGS.rows, FLAGS.block_size
    row_blocks = 1 + -(-(size + STEPS) // size)
    sizes = command.numbers("blocks", FLAGS.blocks, int, low=rows * row_blocks)
    table = results.Table.open(
        FLAGS.out,
        factors=("blocks",),
        metrics=[("step_microseconds", "us"), ("compile_seconds", "s")],
        cells=[(blocks,) for blocks in sizes],
        run=environment.describe({"rows": rows, "block_size": size, "steps": STEPS}, []),
    )
    print(f"{'blocks':>10}{'us a step':>12}{'vLLM, us':>12}{'times less':>12}")
    with table:
        for blocks in sizes:
            state = begin(rows, blocks, size, row_blocks)
            assert int(jax.jit(functools.partial(steps, blocks=blocks))(*state)[0]) == STEPS
            timed = timing.compile_and_time(
                functools.partial(steps, blocks=blocks), *state, repeats=FLAGS.repeats
            )
            microseconds = 1e6 * timed.run_seconds / STEPS
            values = {"step_microseconds": microseconds, "compile_seconds": timed.compile_seconds}
            table.append((blocks,), values)
            less = INCUMBENT_MICROSECONDS / microseconds
            print(f"{blocks:>10,}{microseconds:>12.1f}{INCUMBENT_MICROSECONDS:>12,}{less:>12.1f}")


def begin(rows: int, blocks: int, size: int, row_blocks: int) -> tuple[Book, Rows]:
    """Every row has stored between 1 and ``size`` tokens; one request more waits for a row."""
    row_B = jnp.arange(rows, dtype=jnp.int32)
    stored_B = 1 + row_B % size
    held = memory.create(rows=rows, blocks=blocks, block_size=size, blocks_per_row=row_blocks)
    held, _, _ = held.reserve(stored_B)
    book = books.create(requests=rows + 1, samples=1, rows=rows)
    return book.replace(
        rank_R=jnp.arange(rows + 1, dtype=jnp.int32),
        running_R=jnp.arange(rows + 1) < rows,
        prompt_R=jnp.append(stored_B, 1),
        output_RF=jnp.full((rows + 1, 1), STEPS + 2),
        drawn_RF=jnp.append(jnp.ones_like(row_B), 0)[:, None],
        live_RF=jnp.ones((rows + 1, 1), bool),
        owner_B=row_B,
    ), held


def steps(book: Book, held: Rows, *, blocks: int) -> tuple[jax.Array, Book, Rows, Ledger]:
    """``STEPS`` decode steps as an engine's dispatch takes them, without the model.

    Returns how many passed before one would not only decode, the state, and the last ledger.
    """
    limits = policy.limits(rows=book.owner_B.shape[0])

    def goes_on(carry: tuple[jax.Array, Book, Rows, Ledger]) -> jax.Array:
        count, book, held, _ = carry
        return (count < STEPS) & batching.only_decodes(book, held, limits)

    def step(
        carry: tuple[jax.Array, Book, Rows, Ledger],
    ) -> tuple[jax.Array, Book, Rows, Ledger]:
        count, book, held, _ = carry
        book, held, _, step = batching.advance(book, held, limits, decodes=True)
        ledger = block_table.ledger(
            held.table,
            book.prompt_B() + STEPS,
            pool_slots=blocks * held.table.block_size,
            short=step.verdict == policy.SHORT,
        )
        # The ledger reads the reference counts before rows that end change them (``pool.read``).
        held, ledger = lax.optimization_barrier((held, ledger))
        draws_B, token_B = step.tokens_B > 0, jnp.zeros_like(step.tokens_B)
        book, held, _ = batching.finish(
            book, held, step, draws_B, token_B, token_B > 0, decodes=True
        )
        return count + 1, book, held, ledger

    nothing = Ledger(*[jnp.int32(0)] * len(CATEGORIES))
    return lax.while_loop(goes_on, step, (jnp.int32(0), book, held, nothing))


if __name__ == "__main__":
    command.run(main, define_flags)
