"""Which share of a trace's prompts does a prefix cache of a given size serve?

    python -m experiments.prefix_replay --trace=conversation_trace.jsonl --blocks=0,10000,50000

One request at a time through the prefix cache of the engine, in the order of the trace: its hit,
new blocks, eviction where the pool is full, release. ``--blocks=0`` is a pool so large that nothing
is evicted. Only full blocks are kept and a prompt's last token is always computed, so rates lie
below those of ``experiments.trace``, which counts a partial block that was seen as found.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from experiments import command
from paged_jax.config import MOST
from paged_jax.measure import environment, progress, results
from paged_jax.memory import block_table, prefix_cache, prefix_hits
from paged_jax.workload import Trace, prefixes, ragged, read_trace

FLAGS = flags.FLAGS
DISPATCH_REQUESTS = 500  # between two looks of the progress bar
METRICS = (
    ("block_hit_rate", "fraction"),
    ("token_hit_rate", "fraction"),
    ("request_hit_rate", "fraction"),
    ("requests_per_second", "requests/s"),
    ("compile_seconds", "s"),
)


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("trace", None, "trace with prefix ids or token ids", required=True)
    flags.DEFINE_list("blocks", ["0"], "blocks of the pools; 0: as many as are ever kept")
    flags.DEFINE_integer("block_size", 512, "slots of a block", 1, MOST - 1)
    flags.DEFINE_integer("limit", None, "requests, the first so many", lower_bound=1)
    flags.DEFINE_string("out", "results/prefix_replay", "folder of the results")


class Prompts(flax.struct.PyTreeNode):
    """Requests in the order of their arrival, a block of a prompt named by one id."""

    id_T: jax.Array  # i32, packed
    offset_R: jax.Array  # i32: where a request's ids begin
    prompt_R: jax.Array  # i32: tokens
    most_blocks: int = flax.struct.field(pytree_node=False)  # of a prompt


class Replay(flax.struct.PyTreeNode):
    """The memory between two requests, and what was found so far."""

    table: block_table.BlockTable
    cache: prefix_cache.PrefixCache
    counts: prefix_hits.HitCounts
    fits: jax.Array  # bool: every request so far


def main(_: list[str]) -> None:
    sizes = command.numbers("blocks", FLAGS.blocks, int, low=0, high=MOST - 1)
    trace, ids = block_ids(read_trace(FLAGS.trace), FLAGS.block_size, FLAGS.limit)
    prompts = put(trace, ids)
    for blocks in sizes:
        if 0 < blocks < prompts.most_blocks:
            least = f"the {prompts.most_blocks} of the longest prompt"
            raise ValueError(f"--blocks: expected at least {least}, got {blocks}")
    name = Path(FLAGS.trace).name
    cells = [(name, blocks, FLAGS.block_size, trace.count) for blocks in sizes]
    table = results.Table.open(
        FLAGS.out,
        factors=("trace", "blocks", "block_size", "requests"),
        metrics=METRICS,
        cells=cells,
        run=environment.describe({"limit": FLAGS.limit}, []),
    )
    with table:
        for cell in cells:
            blocks = cell[1] or kept_blocks(trace, ids, FLAGS.block_size)
            rates, values = measure(prompts, blocks, FLAGS.block_size)
            table.append(cell, values)
            print(f"{blocks:,} blocks of {FLAGS.block_size}, {trace.count:,} requests")
            print(f"{rates.blocks:>9.2%}  blocks found / blocks, partial ones included")
            print(f"{rates.tokens:>9.2%}  tokens found / tokens")
            print(f"{rates.requests:>9.2%}  mean over requests of tokens found / tokens")
            print(f"{values['requests_per_second']:>9,.0f}  requests/s")


def block_ids(trace: Trace, block_size: int, limit: int | None) -> tuple[Trace, ragged.Ragged]:
    """The first requests, and an id for each block of each prompt that covers all before it."""
    if trace.prompt_ids is not None:
        trace = prefixes.from_tokens(trace, block_size)
    if trace.ids is None or trace.ids_tokens is None:
        raise ValueError(f"--trace: expected prefix ids, which the format {trace.format} lacks")
    ids = prefixes.split(trace.ids, trace.prompt_R, trace.ids_tokens, block_size)
    count = min(limit or trace.count, trace.count)
    offset_P = ids.offset_P[: count + 1]
    trace = Trace(
        format=trace.format, prompt_R=trace.prompt_R[:count], output_R=trace.output_R[:count]
    )
    return trace, ragged.Ragged(ids.values_T[: offset_P[-1]], offset_P)


def kept_blocks(trace: Trace, ids: ragged.Ragged, block_size: int) -> int:
    """Blocks that a cache which never evicts fills, at most.

    One for each id, and one for each prompt that ends with a block: its last token is computed
    whatever is cached, so that block then exists twice. One more for a partial block.
    """
    return len(np.unique(ids.values_T)) + int((trace.prompt_R % block_size == 0).sum()) + 1


def put(trace: Trace, ids: ragged.Ragged) -> Prompts:
    """The requests on a device."""
    most = int(ids.count_R.max())
    return Prompts(
        # A slice of the longest prompt's length lies inside, wherever it begins.
        id_T=jnp.asarray(np.pad(ids.values_T, (0, most)), jnp.int32),
        offset_R=jnp.asarray(ids.offset_P[:-1], jnp.int32),
        prompt_R=jnp.asarray(trace.prompt_R, jnp.int32),
        most_blocks=most,
    )


def measure(
    prompts: Prompts, blocks: int, block_size: int
) -> tuple[prefix_hits.HitRates, dict[str, float]]:
    """All requests through a pool of ``blocks`` blocks. Returns the rates, and all metrics."""
    state = Replay(
        table=block_table.create(
            rows=1, blocks=blocks, block_size=block_size, blocks_per_row=prompts.most_blocks
        ),
        cache=prefix_cache.create(blocks=blocks, block_size=block_size),
        counts=prefix_hits.zero(),
        fits=jnp.bool_(True),
    )
    began, count = time.perf_counter(), prompts.prompt_R.shape[0]
    run = jax.jit(serve, donate_argnums=0).lower(state, prompts, 0, 0).compile()
    compile_seconds = time.perf_counter() - began
    with progress.Progress(count, f"{blocks:,} blocks") as bar:
        for start in range(0, count, DISPATCH_REQUESTS):
            stop = min(start + DISPATCH_REQUESTS, count)
            state = jax.block_until_ready(run(state, prompts, start, stop))
            bar.advance(stop - start)
    seconds = time.perf_counter() - began - compile_seconds
    rates = prefix_hits.rates(state.counts)
    assert rates is not None
    assert state.fits
    return rates, {
        "block_hit_rate": rates.blocks,
        "token_hit_rate": rates.tokens,
        "request_hit_rate": rates.requests,
        "requests_per_second": count / seconds,
        "compile_seconds": compile_seconds,
    }


def serve(state: Replay, prompts: Prompts, start: jax.Array, stop: jax.Array) -> Replay:
    """The requests from ``start`` to before ``stop``, one after the other."""
    return lax.fori_loop(start, stop, functools.partial(_serve_one, prompts), state)


def _serve_one(prompts: Prompts, request: jax.Array, state: Replay) -> Replay:
    table, cache, size = state.table, state.cache, state.table.block_size
    tokens, salt = prompts.prompt_R[request], jnp.uint32(0)
    begin = prompts.offset_R[request]
    id_M = lax.dynamic_slice_in_dim(prompts.id_T, begin, prompts.most_blocks)
    token_T = jnp.repeat(id_M, size)  # an id's tokens: any that are told from other ids'
    table, cache, hits, fits = prefix_cache.admit(table, cache, 0, token_T, tokens, salt)
    end = jnp.where(fits, tokens // size, 0)
    cache, valid = prefix_cache.register(table, cache, 0, token_T, 0, end, salt)
    table, cache, released = prefix_cache.release(table, cache, jnp.ones(1, bool))
    return Replay(
        table=table,
        cache=cache,
        counts=prefix_hits.add(state.counts, tokens, hits, size),
        fits=state.fits & fits & valid & released,
    )


if __name__ == "__main__":
    command.run(main, define_flags)
