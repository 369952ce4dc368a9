"""Does a decode step of a model cost more time or memory in a larger pool?

    python -m experiments.pool_cost --model=smollm2 --multiples=1,8,64 --out=results/pool_cost

Rows of one length decode in pools of ``--pool_slots`` times each multiple, in turn. Printed beside
the smallest pool: seconds a step, and the temporary bytes of the compiled program, which would grow
with the pool if anything in it copied a layer.
"""

from __future__ import annotations

import dataclasses
import statistics

from absl import flags

from experiments import command, generate
from paged_jax.config import EngineConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.measure import environment, results, timing
from paged_jax.model.weights import Loaded
from paged_jax.serving import settings
from paged_jax.serving.engine import Engine

PROMPT_TOKENS = 32

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    flags.FLAGS.set_default("pool_slots", 2_048)
    flags.FLAGS.set_default("max_length", 256)
    flags.FLAGS.set_default("rows", 8)
    flags.DEFINE_list("multiples", ["1", "8", "64"], "pools, in multiples of --pool_slots")
    flags.DEFINE_integer("steps", 8, "decode steps of a timed run", lower_bound=1)
    flags.DEFINE_integer("repeats", 9, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_string("out", "results/pool_cost", "folder of the results")


def main(_: list[str]) -> None:
    multiples = command.numbers("multiples", FLAGS.multiples, int, low=1)
    llm = generate.load_model()
    config = settings.fit_config(llm.config, llm.model)
    decoded = (FLAGS.repeats + 1) * FLAGS.steps
    if PROMPT_TOKENS + decoded + 1 > config.max_length:
        raise ValueError(
            f"--max_length: {FLAGS.repeats + 1} runs of {FLAGS.steps} steps need"
            f" {PROMPT_TOKENS + decoded + 1} tokens, got {config.max_length}"
        )
    if config.rows * config.max_length > config.pool_slots:
        raise ValueError(
            f"--pool_slots: {config.rows} rows of {config.max_length} tokens need"
            f" {config.rows * config.max_length}, got {config.pool_slots}"
        )
    config = dataclasses.replace(
        config,
        dispatch_steps=FLAGS.steps,
        step_tokens=max(config.step_tokens, config.rows * PROMPT_TOKENS),
    )
    sizes = [config.pool_slots * multiple for multiple in multiples]
    deciding = ("model", "dtype", "kv_dtype", "block_size", "rows", "steps", "repeats")
    table = results.Table.open(
        FLAGS.out,
        factors=("pool_slots",),
        metrics=[("step_milliseconds", "ms"), ("temporary_bytes", "B")],
        cells=[(size,) for size in sizes],
        run=environment.describe({name: FLAGS[name].value for name in deciding}, []),
    )
    pools = [
        Decoding(llm.model, dataclasses.replace(config, pool_slots=size), PROMPT_TOKENS)
        for size in sizes
    ]
    for pool in pools:
        pool.run()  # warms up
    seconds = timing.time_in_turn([pool.run for pool in pools], repeats=FLAGS.repeats)
    print(f"{'slots':>10}{'ms a step':>12}{'ratio':>8}{'temporary bytes':>18}{'ratio':>8}")
    with table:
        for size, pool, each in zip(sizes, pools, seconds, strict=True):
            step = statistics.median(each) / FLAGS.steps
            first = statistics.median(seconds[0]) / FLAGS.steps
            table.append(
                (size,),
                {"step_milliseconds": 1e3 * step, "temporary_bytes": pool.temporary_bytes},
            )
            print(
                f"{size:>10,}{1e3 * step:>12.2f}{step / first:>8.2f}{pool.temporary_bytes:>18,}"
                f"{pool.temporary_bytes / pools[0].temporary_bytes:>8.2f}"
            )


class Decoding:
    """An engine of its own pool, all of whose rows decode."""

    def __init__(self, model: Loaded, config: EngineConfig, prompt: int) -> None:
        self._engine = Engine(model, config)
        params = SamplingParams(
            temperature=0, max_tokens=config.max_length - prompt, ignore_eos=True
        )
        for row in range(config.rows):
            self._engine.add([1 + row % (model.config.vocabulary - 1)] * prompt, params)
        self._engine.advance()  # stores the prompts
        memory = self._engine.trace_decode(params).lower().compile().memory_analysis()
        assert memory is not None, "this back end tells"
        self.temporary_bytes = int(memory.temp_size_in_bytes)

    def run(self) -> None:
        """One dispatch of decode steps."""
        self._engine.advance()


if __name__ == "__main__":
    command.run(main, define_flags)
