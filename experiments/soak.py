"""Does anything leak when requests come, fork, are preempted, stopped and aborted for long?

    python -m experiments.soak --steps=100000
    python -m experiments.soak --steps=100000 --samples=1 --prefix_caching
    python -m experiments.soak --steps=100000 --swap_blocks=80

Runs ``soak_load`` in compiled loops of ``--call_steps`` steps. Between two of them the host checks
every invariant of tables, reference counts and prefix cache, who sits in which row, and that every
request that came has ended or is there. In the end all are served: no block may be held, no
reference count above zero, and the process no larger than after its first tenth. The first fault is
told in one line and ends the run with exit code 1.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import command, soak_load
from experiments.soak_load import Chances, Load, Shape
from paged_jax.config import MOST
from paged_jax.memory import block_table, prefix_cache
from paged_jax.scheduling import book as books
from paged_jax.scheduling import policy

SLACK_BYTES = 16 * 2**20  # that a process may grow by: the allocator's own ups and downs

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    whole = functools.partial(flags.DEFINE_integer, lower_bound=1)
    whole("steps", 100_000, "of the load")
    whole("call_steps", 1000, "steps of a compiled loop, after which the host checks")
    whole("rows", 32, "sequences that run at once")
    whole("blocks", 160, "of the pool")
    whole("block_size", 8, "slots of a block")
    whole("samples", 3, "of a request, most")
    whole("most_prompt", 64, "tokens of a prompt, most")
    whole("most_output", 64, "tokens of an output, most")
    whole("step_tokens", 64, "tokens of a step, most")
    flags.DEFINE_bool("chunked_prefill", True, "cut prompts to fit a step")
    flags.DEFINE_bool("prefix_caching", False, "keep full blocks and find them again")
    flags.DEFINE_integer("swap_blocks", 0, "of host memory, where the preempted wait", 0)
    whole("swap_sequences", 1, "requests with fewer recompute all the same")
    flags.DEFINE_float("watermark", 0.0, "fraction of the pool kept free at admissions")
    whole("priorities", 3, "that requests have", upper_bound=soak_load.MOST_PRIORITIES)
    chance = functools.partial(flags.DEFINE_float, lower_bound=0, upper_bound=1)
    chance("arrivals", 0.05, "chance that a request comes into a free slot, in a step")
    chance("aborts", 0.001, "chance that a request is aborted, in a step")
    chance("stops", 0.0005, "chance that a sample is stopped between two steps")
    chance("ends", 0.005, "chance that a token ends its sample")
    flags.DEFINE_integer("seed", 0, "of the load", lower_bound=0, upper_bound=2**32 - 1)


def faults(load: Load) -> list[str]:
    """Every broken invariant of a concrete load, in words; empty when it is sound. Host only."""
    table, prefix = load.memory.table, load.memory.prefix
    found = block_table.faults(table) if prefix is None else prefix_cache.faults(table, prefix)
    book, counts, length_B = jax.device_get((load.book, load.counts, table.length_B))
    requests, samples = book.live_RF.shape
    there_R, seated_B = book.rank_R < MOST, book.owner_B < requests
    seats_RF = np.zeros((requests, samples), int)
    np.add.at(seats_RF, (book.owner_B[seated_B], book.sample_B[seated_B]), 1)
    known_B = np.zeros_like(length_B)
    owner_Z, sample_Z = book.owner_B[seated_B], book.sample_B[seated_B]
    known_B[seated_B] = book.prompt_R[owner_Z] + book.drawn_RF[owner_Z, sample_Z]
    rank_Z = book.rank_R[there_R]
    away_RF = np.zeros_like(book.live_RF)
    if load.memory.host is not None:
        found += block_table.faults(load.memory.host.table)
        away_RF = np.asarray(load.memory.host.table.length_B).reshape(away_RF.shape) > 0
    expected_RF = book.live_RF & book.running_R[:, None]
    mine = {
        "a live sample of a running request has no row, or two": (seats_RF != expected_RF).any(),
        "a sample that does not wait is in host memory": (
            (away_RF & ~(book.live_RF & ~book.running_R[:, None])).any()
        ),
        "a row stores more than its sequence has": (length_B > known_B).any(),
        "a request is there without a live sample, or gone with one": (
            (book.live_RF.any(axis=1) != there_R).any()
        ),
        "two requests have one place in the order": len(np.unique(rank_Z)) != len(rank_Z),
        f"{counts.arrived} requests came, {counts.finished} finished, {counts.aborted} were"
        f" aborted, {there_R.sum()} are there": (
            counts.arrived != counts.finished + counts.aborted + there_R.sum()
        ),
    }
    return [*found, *(fault for fault, present in mine.items() if present)]


def drain(load: Load, limits: policy.Limits, chances: Chances, *, steps: int) -> Load:
    """Everybody is served, and nobody comes any more; ``ValueError`` where that does not end."""
    nothing = jnp.float32(0)
    last = chances.replace(arrivals=nothing, aborts=nothing, stops=nothing)
    bound = load.book.live_RF.size * load.memory.table.table_BM.shape[1] * load.memory.block_size
    for _ in range(0, 2 * bound, steps):
        if not np.asarray(load.book.live_RF).any():
            return load
        load = soak_load.advance(load, limits, last, steps=steps)
    live = int(np.asarray(load.book.live_RF).any(axis=1).sum())
    raise ValueError(f"{live} requests are still there {2 * bound} steps after the last one came")


def leaks(load: Load) -> list[str]:
    """What is held though nobody is there. Cached blocks are given up first."""
    table, prefix = load.memory.table, load.memory.prefix
    found = faults(load)
    if prefix is not None:
        table, prefix, done = jax.jit(prefix_cache.reset)(table, prefix)
        found += prefix_cache.faults(table, prefix)
        found += [] if done else ["the prefix cache cannot be emptied"]
    held, counted = int(table.pool.used), int(np.count_nonzero(table.pool.refcount_N))
    if load.memory.host is not None:
        held += int(load.memory.host.table.pool.used)
    if held or counted:
        found.append(f"{held} blocks are held, {counted} have references, and nobody is there")
    return found


def resident_bytes() -> int:
    """Memory of this process; where the system does not tell, the most that it ever had."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(
    load: Load, limits: policy.Limits, chances: Chances, *, steps: int, call_steps: int
) -> Load:
    """``steps`` steps, rounded up to whole calls, and the end of it; prints a line for each tenth.

    Raises ``ValueError`` at the first fault.
    """
    calls = -(-steps // call_steps)
    resident: list[int] = []
    began = time.perf_counter()
    for call in range(1, calls + 1):
        load = soak_load.advance(load, limits, chances, steps=call_steps)
        _demand(faults(load), f"step {call * call_steps}")
        resident.append(resident_bytes())
        if 10 * call // calls > 10 * (call - 1) // calls:
            speed = call * call_steps / (time.perf_counter() - began)
            _print(call * call_steps, speed, load, resident[-1])
    load = drain(load, limits, chances, steps=call_steps)
    _demand(leaks(load), f"after the last step, {calls * call_steps}")
    grown = resident_bytes() - max(resident[: max(calls // 10, 1)])
    if grown > SLACK_BYTES:
        raise ValueError(f"the process grew by {grown / 2**20:.1f} MiB after its first tenth")
    return load


def _demand(found: list[str], when: str) -> None:
    if found:
        raise ValueError(f"{when}: {'; '.join(found)}")


def _print(step: int, speed: float, load: Load, resident: int) -> None:
    counts = jax.device_get(load.counts)
    told = ", ".join(f"{name} {getattr(counts, name)}" for name in vars(counts))
    running = int(np.asarray(books.seated(load.book)).sum())
    used = int(load.memory.table.pool.used - load.memory.idle)
    print(
        f"step {step}, {speed:.0f} a second: {told}, rows {running}, blocks {used},"
        f" {resident / 2**20:.0f} MiB",
        flush=True,
    )


def main(_: list[str]) -> None:
    sizes: dict[str, Any] = {
        field.name: FLAGS[field.name].value for field in dataclasses.fields(Shape)
    }
    shape = Shape(**sizes)
    if (FLAGS.steps + FLAGS.call_steps) * 2 * shape.rows >= soak_load.CLASS:
        raise ValueError(
            f"--steps: expected fewer than {soak_load.CLASS} / (2 x --rows), got {FLAGS.steps}"
        )
    longest = shape.most_prompt + shape.most_output - 1
    if not FLAGS.chunked_prefill and FLAGS.step_tokens < longest:
        raise ValueError(
            f"--step_tokens: without chunks a step has to take {longest} tokens,"
            f" got {FLAGS.step_tokens}"
        )
    limits = policy.limits(
        rows=shape.rows,
        watermark=FLAGS.watermark,
        blocks=shape.blocks,
        tokens=FLAGS.step_tokens,
        chunked=FLAGS.chunked_prefill,
        swapped=FLAGS.swap_sequences,
    )
    load = soak(
        soak_load.create(shape, FLAGS.seed),
        limits,
        _chances(),
        steps=FLAGS.steps,
        call_steps=FLAGS.call_steps,
    )
    print(f"nothing leaked: {int(load.counts.arrived)} requests came and are gone")


def _chances() -> Chances:
    # absl's bounds let NaN through.
    (arrivals,), (aborts,), (stops,), (ends,) = (
        command.numbers(name, [FLAGS[name].value], float, low=0.0, high=1.0)
        for name in ("arrivals", "aborts", "stops", "ends")
    )
    return Chances(
        arrivals=jnp.float32(arrivals),
        aborts=jnp.float32(aborts),
        stops=jnp.float32(stops),
        ends=jnp.float32(ends),
        most_prompt=jnp.int32(FLAGS.most_prompt),
        most_output=jnp.int32(FLAGS.most_output),
        priorities=jnp.int32(FLAGS.priorities),
    )


if __name__ == "__main__":
    command.run(main, define_flags)
