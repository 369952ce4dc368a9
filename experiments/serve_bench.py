"""How many useful tokens a second does continuous batching draw, beside static batching?

    python -m experiments.serve_bench --model=smollm2 --peer_python=PATH

Requests that are all there at once, prompts and outputs uniform in ``--shortest`` to ``--longest``
tokens, random ids, in f32 unless ``--dtype`` says otherwise. Three ways take turns, so that a slow
minute of the machine falls on all, and ratios are of medians: ours; ours with static batching in as
much cache memory, as many rows of ``--max_length`` slots as fit; and, with ``--peer_python``, any
interpreter with torch and transformers, one padded batch of all requests by Hugging Face
``generate``, whose cache is as large as it likes. A static batch runs until its longest output
ends; the tokens that were wanted are what counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
from absl import flags

from experiments import command, generate
from experiments.peer import Peer
from paged_jax.config import EngineConfig
from paged_jax.measure import environment, results
from paged_jax.model.weights import Loaded
from paged_jax.serving import settings, trace_run
from paged_jax.serving.engine import Engine
from paged_jax.workload.timed import Timed

OURS = "continuous"
DECODE_ROWS = (4, 8, 12, 16, 24)
DECIDING = (
    *("model", "dtype", "kv_dtype", "backend", "block_size", "pool_slots", "max_length", "rows"),
    *("decode_rows", "requests", "shortest", "longest", "step_tokens", "dispatch_steps", "repeats"),
)
Tokens = list[list[int]]

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    for name, value in (("dtype", "float32"), ("max_length", 512), ("pool_slots", 8192)):
        FLAGS.set_default(name, value)
    flags.DEFINE_string("peer_python", None, "an interpreter with torch and transformers")
    flags.DEFINE_integer("requests", 32, "that are to be served", lower_bound=1)
    flags.DEFINE_integer("shortest", 8, "tokens of a prompt and of an output", lower_bound=1)
    flags.DEFINE_integer("longest", 256, "tokens of a prompt and of an output", lower_bound=1)
    usual = EngineConfig()
    flags.DEFINE_integer("step_tokens", usual.step_tokens, "tokens of a step, most", 1)
    flags.DEFINE_integer("dispatch_steps", usual.dispatch_steps, "decode steps of a dispatch", 1)
    flags.DEFINE_integer("repeats", 3, "timed runs of each; the median counts", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of lengths and prompts", lower_bound=0)
    flags.DEFINE_string("out", "results/serve_bench", "folder of the results")


def main(_: list[str]) -> None:
    if FLAGS.cache != "paged":
        raise ValueError(f"--cache: continuous batching is compared paged, got {FLAGS.cache}")
    if FLAGS.shortest > FLAGS.longest:
        raise ValueError(f"--shortest: expected at most {FLAGS.longest=}, got {FLAGS.shortest}")
    if not FLAGS["decode_rows"].present:
        FLAGS["decode_rows"].value = [few for few in DECODE_ROWS if few < FLAGS.rows]
    path, llm = generate.find_model(FLAGS.model), generate.load_model()
    config = dataclasses.replace(
        settings.fit_config(llm.config, llm.model),
        step_tokens=FLAGS.step_tokens,
        dispatch_steps=FLAGS.dispatch_steps,
    )
    whole_rows = trace_run.static_config(config)
    requests, prompts = draw(llm.model.config.vocabulary)
    described = {name: FLAGS[name].value for name in DECIDING}
    with Peer(FLAGS.peer_python, path) if FLAGS.peer_python else nullcontext() as peer:
        described["peer"] = peer.versions if peer else None
        systems = {
            OURS: _ours(llm.model, config, requests, prompts, static=False),
            "static": _ours(llm.model, whole_rows, requests, prompts, static=True),
        }
        if peer:
            longest = int(requests.output_R.max())
            peer.generate(prompts, 2)  # so that its first timed run finds all it keeps
            systems["peer"] = lambda: peer.generate(prompts, longest)
            print(f"peer: {peer.versions}")
        table = results.Table.open(
            FLAGS.out,
            factors=("system", "repeat"),
            metrics=[("useful_tokens_per_second", "1/s")],
            cells=[(system, repeat) for repeat in range(FLAGS.repeats) for system in systems],
            run=environment.describe(described, [FLAGS.seed]),
        )
        with table:
            _compare(systems, requests, table)


def draw(vocabulary: int) -> tuple[Timed, Tokens]:
    """The requests, and their prompts' token ids."""
    random = np.random.default_rng(FLAGS.seed)
    prompt_R, output_R = random.integers(
        FLAGS.shortest, FLAGS.longest, size=(2, FLAGS.requests), endpoint=True
    )
    requests = Timed(
        arrival_seconds_R=np.zeros(FLAGS.requests),
        prompt_R=prompt_R,
        output_R=output_R,
        number_R=np.arange(FLAGS.requests),
    )
    return requests, [random.integers(vocabulary, size=size).tolist() for size in prompt_R]


def _ours(
    model: Loaded, config: EngineConfig, requests: Timed, prompts: Tokens, *, static: bool
) -> Callable[[], tuple[float, Tokens]]:
    """A run of ours: its seconds and its tokens. Programs are compiled before."""
    Engine(model, config).warm(trace_run.params(1))

    def run() -> tuple[float, Tokens]:
        found = trace_run.run(Engine(model, config), requests, prompts, static=static)
        if found.refused:
            raise ValueError(f"not all can be served: {next(iter(found.refused.values()))}")
        return float(found.finish_seconds_R.max()), found.token_ids

    return run


def _compare(
    systems: dict[str, Callable[[], tuple[float, Tokens]]], requests: Timed, table: results.Table
) -> None:
    """Times all in turn, appends the rows, and prints medians and how ours compares."""
    speeds: dict[str, list[float]] = {system: [] for system in systems}
    tokens: dict[str, Tokens] = {}
    for repeat in range(FLAGS.repeats):
        for system, run in systems.items():
            seconds, drawn = run()
            pairs = zip(drawn, requests.output_R, strict=True)
            tokens[system] = [one[:wanted] for one, wanted in pairs]
            speeds[system].append(int(requests.output_R.sum()) / seconds)
            table.append((system, repeat), {"useful_tokens_per_second": speeds[system][-1]})
    ours = statistics.median(speeds[OURS])
    print(f"{'':<12}{'useful tokens/s':>16}{'least':>9}{'most':>9}{'ours is':>9}  same outputs")
    for system, found in speeds.items():
        median = statistics.median(found)
        same = sum(one == other for one, other in zip(tokens[system], tokens[OURS], strict=True))
        print(
            f"{system:<12}{median:>16.1f}{min(found):>9.1f}{max(found):>9.1f}{ours / median:>8.2f}x"
            f"  {same} of {requests.count}"
        )


if __name__ == "__main__":
    command.run(main, define_flags)
