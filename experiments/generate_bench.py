"""How fast does a real model generate, beside Hugging Face's ``generate`` on the same machine?

    python -m experiments.generate_bench --model=smollm2 --peer_python=PATH

Random prompts of ragged lengths and greedy tokens, the same for both, in f32 unless ``--dtype``
says otherwise. The two take turns, so that a slow minute of the machine falls on both; the ratio is
of medians. ``--peer_python`` is any interpreter with torch and transformers (for a GGUF model the
package gguf, too); without it only ours runs.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

import numpy as np
from absl import flags

from experiments import command, generate
from experiments.peer import Peer
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.measure import environment, results
from paged_jax.serving.llm import LLM

FLAGS = flags.FLAGS
SHORTEST_PROMPT = 8


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    flags.FLAGS.set_default("dtype", "float32")
    flags.DEFINE_string("peer_python", None, "an interpreter with torch and transformers")
    flags.DEFINE_list("batches", ["1", "8"], "prompts that run together")
    flags.DEFINE_integer(
        "prompt_tokens", 64, "of the longest prompt of a batch", lower_bound=SHORTEST_PROMPT
    )
    flags.DEFINE_integer("max_tokens", 64, "tokens of every output", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "timed runs of each; the median counts", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the prompts", lower_bound=0)
    flags.DEFINE_string("out", "results/generate_bench", "folder of the results")


def main(_: list[str]) -> None:
    batches = command.numbers("batches", FLAGS.batches, int, low=1, high=FLAGS.rows)
    path = generate.find_model(FLAGS.model)
    llm = generate.load_model()
    deciding = ("model", "dtype", "cache", "block_size", "prompt_tokens", "max_tokens", "repeats")
    described = {name: FLAGS[name].value for name in deciding}
    with Peer(FLAGS.peer_python, path) if FLAGS.peer_python else nullcontext() as peer:
        described["peer"] = peer.versions if peer else None
        table = results.Table.open(
            FLAGS.out,
            factors=("batch", "system", "repeat"),
            metrics=[("tokens_per_second", "1/s")],
            cells=[
                (batch, system, repeat)
                for batch in batches
                for repeat in range(FLAGS.repeats)
                for system in (("ours", "peer") if peer else ("ours",))
            ],
            run=environment.describe(described, [FLAGS.seed]),
        )
        if peer:
            print(f"peer: {peer.versions}")
        print(f"{'batch':>6}{'ours, tokens/s':>18}{'peer, tokens/s':>18}{'ratio':>8}  same tokens")
        with table:
            for batch in batches:
                _compare(llm, peer, batch, table)


def _compare(llm: LLM, peer: Peer | None, batch: int, table: results.Table) -> None:
    """Times one batch in turn, appends the rows and prints the line."""
    prompts = draw_prompts(batch, FLAGS.prompt_tokens, llm.model.config.vocabulary, FLAGS.seed)
    _ours(llm, prompts)  # compiles
    if peer:
        peer.generate(prompts, FLAGS.max_tokens)
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    same = 0
    for repeat in range(FLAGS.repeats):
        seconds = {}
        seconds["ours"], tokens = _ours(llm, prompts)
        if peer:
            seconds["peer"], others = peer.generate(prompts, FLAGS.max_tokens)
            same = sum(one == other for one, other in zip(tokens, others, strict=True))
        for system, taken in seconds.items():
            speeds[system].append(batch * FLAGS.max_tokens / taken)
            table.append((batch, system, repeat), {"tokens_per_second": speeds[system][-1]})
    ours = statistics.median(speeds["ours"])
    if not peer:
        print(f"{batch:>6}{ours:>18.1f}{'':>26}")
        return
    theirs = statistics.median(speeds["peer"])
    print(f"{batch:>6}{ours:>18.1f}{theirs:>18.1f}{ours / theirs:>8.2f}  {same} of {batch}")


def _ours(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=FLAGS.max_tokens, ignore_eos=True)
    start = time.perf_counter()
    found = llm.generate(prompts, params)
    return time.perf_counter() - start, [list(one.outputs[0].token_ids) for one in found]


def draw_prompts(batch: int, longest: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids; lengths spread evenly up to ``longest``."""
    random = np.random.default_rng(seed)
    lengths = np.linspace(longest, SHORTEST_PROMPT, batch).astype(int)
    return [random.integers(vocabulary, size=length).tolist() for length in lengths]


if __name__ == "__main__":
    command.run(main, define_flags)
