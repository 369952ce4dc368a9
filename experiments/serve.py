"""How long do a trace's requests wait and take, at which rate, in how much memory?

    python -m experiments.serve --model=smollm2 --trace=azure.csv --max_length=512 \\
        --limit=100 --prompt_scale=0.1 --output_scale=0.1 --rate=0.5,1,2
    python -m experiments.serve --model=opt_13b --trace=sharegpt.csv --simulate --device=a100_40gb

Serves the requests with the engine as they come, or with ``--simulate`` in virtual time on a device
of ``configs.devices`` or a ``device.json`` of ``experiments.calibrate``, where ``--model`` may name
a shape of ``configs.models``. Every output has the length that the trace says. Both write
``rows.csv``, ``requests.csv`` and ``steps.csv`` into ``--out``, and figures drawn from them.
"""

from __future__ import annotations

from absl import flags

from configs.devices import DEVICES
from experiments import command, generate, serve_figures, serve_output, serve_systems, workloads
from experiments.serve_systems import System
from paged_jax.config import EngineConfig
from paged_jax.measure import environment, results
from paged_jax.measure.progress import Progress
from paged_jax.serving import served
from paged_jax.serving.served import Pulse, Served
from paged_jax.workload import timed
from paged_jax.workload.timed import Timed
from paged_jax.workload.trace import Trace

OWN_TIMES = "trace"  # the rate of a trace's own arrivals
DECIDING = (
    *("model", "dtype", "cache", "block_size", "pool_slots", "max_length", "kv_dtype", "backend"),
    *("rows", "trace", "clients_seed", "clients_start", "clients_stop", "clients_rate", "limit"),
    *("prompt_scale", "output_scale", "step_seconds", "scheduler", "step_tokens"),
    *("chunked_prefill", "prefix_caching", "swap_slots", "swap_sequences", "dispatch_steps"),
    *("decode_rows", "simulate", "device"),
)
LIVE_SECONDS = 1.0  # over which the progress bar's tokens a second are counted, at least

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    workloads.define_trace_flags()
    flags.DEFINE_list("rate", [], "requests a second, Poisson; default: the trace's own times")
    flags.DEFINE_integer("limit", None, "only the first requests of the trace", lower_bound=1)
    flags.DEFINE_float("prompt_scale", 1.0, "factor on the lengths of prompts, at most 1")
    flags.DEFINE_float("output_scale", 1.0, "factor on the lengths of outputs, at most 1")
    flags.DEFINE_float("step_seconds", None, "of a step, for a trace whose times are steps")
    flags.DEFINE_enum(
        "scheduler",
        serve_systems.SCHEDULERS[0],
        serve_systems.SCHEDULERS,
        "static: a batch at a time, each row max_length slots in one piece",
    )
    usual = EngineConfig()
    flags.DEFINE_integer("step_tokens", usual.step_tokens, "tokens of a step, most", 1)
    flags.DEFINE_bool("chunked_prefill", True, "cut prompts to fit a step")
    flags.DEFINE_bool("prefix_caching", False, "keep full blocks and find them again")
    flags.DEFINE_integer("swap_slots", None, "of host memory, where the preempted wait", 1)
    flags.DEFINE_integer(
        "swap_sequences", usual.swap_sequences, "requests with fewer recompute all the same", 1
    )
    flags.DEFINE_integer("dispatch_steps", usual.dispatch_steps, "decode steps of a dispatch", 1)
    flags.DEFINE_bool("simulate", False, "in virtual time, on --device")
    flags.DEFINE_string("device", None, f"of --simulate: {', '.join(DEVICES)}, or a .json file")
    flags.DEFINE_integer("seed", 0, "of arrivals, and of prompts that the trace lacks", 0)
    flags.DEFINE_string("out", "results/serve", "folder of the results")


def main(_: list[str]) -> None:
    if FLAGS.trace is None:
        raise ValueError("--trace: expected a file of requests")
    rates = (
        command.numbers("rate", FLAGS.rate, float, low=1e-9, high=1e9)
        if FLAGS.rate
        else (OWN_TIMES,)
    )
    trace = workloads.open_trace(FLAGS.trace)
    system = serve_systems.from_flags()
    requests = _requests(trace, system.config.max_length)
    cells = [(system.name, FLAGS.scheduler, rate) for rate in rates]
    table = results.Table.open(
        FLAGS.out,
        factors=("system", "scheduler", "rate"),
        metrics=served.METRICS,
        cells=cells,
        run=environment.describe({name: FLAGS[name].value for name in DECIDING}, [FLAGS.seed]),
    )
    with table:
        system.prepare(requests, trace)
        for rate, cell in zip(rates, cells, strict=True):
            arriving = requests
            if isinstance(rate, float):
                arriving = timed.poisson(requests, rate, FLAGS.seed)
            result = _serve(system, arriving, rate)
            values = served.measures(result)
            first = rate == rates[0]
            serve_output.append(FLAGS.out, rate, result, first=first)
            table.append(cell, values)
            serve_output.report(rate, result, values, first=first)
    for path in serve_figures.draw(FLAGS.out):
        print(path)


def _requests(trace: Trace, max_length: int) -> Timed:
    """What the flags make of a trace; says how many requests are too long."""
    asked = timed.from_trace(
        trace,
        limit=FLAGS.limit,
        prompt_scale=FLAGS.prompt_scale,
        output_scale=FLAGS.output_scale,
        step_seconds=FLAGS.step_seconds,
    )
    kept = timed.within(asked, max_length)
    if kept.count < asked.count:
        print(
            f"{asked.count - kept.count} of {asked.count} requests left out: more than"
            f" {max_length} tokens of prompt and output"
        )
    return kept


def _serve(system: System, requests: Timed, rate: object) -> Served:
    """A run under a progress bar that shows what is drawn a second and how full the pool is."""
    with Progress(requests.count, f"rate {rate}") as progress:
        marks, note = [Pulse(0.0, 0, 0, 0.0)] * 2, ""

        def watch(pulse: Pulse) -> None:
            nonlocal note
            since, before = marks
            if pulse.seconds - since.seconds >= LIVE_SECONDS:
                speed = (pulse.tokens - since.tokens) / (pulse.seconds - since.seconds)
                note, marks[0] = f"{speed:.4g} tokens/s, pool {pulse.used:.0%}", pulse
            marks[1] = pulse
            progress.advance(pulse.finished - before.finished, note)

        return system.run(requests, watch)


if __name__ == "__main__":
    command.run(main, define_flags)
