"""Workloads by name, from the flags that shape them; for every command that draws requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags

from configs import pools, sweeps
from experiments import command
from paged_jax.config import MOST
from paged_jax.workload import Trace, Workload, arrivals, lengths, read_trace, servegen

NAMES = ("sharegpt", "alpaca", "lognormal", "uniform", "zipf", "fixed", "trace")

FLAGS = flags.FLAGS
MOST_TOKENS = 2**24  # of a prompt or an output that flags ask for


def define_flags() -> None:
    """The flags of this command."""
    define_trace_flags()
    flags.DEFINE_integer(
        "prompt_tokens", 161, "prompts of lognormal (median), uniform (mean), fixed", 1, MOST_TOKENS
    )
    flags.DEFINE_integer(
        "output_tokens", 338, "outputs of lognormal (median), uniform (mean), fixed", 1, MOST_TOKENS
    )
    flags.DEFINE_float("sigma", 1.0, "sd of the logarithm of lognormal lengths", lower_bound=0)
    flags.DEFINE_float("zipf_exponent", 1.0, "of zipf lengths, from 1 to half max_length")
    flags.DEFINE_float("correlation", 0.0, "rank correlation of prompt and output lengths", -1, 1)
    flags.DEFINE_integer(
        "max_length",
        None,
        "most tokens of prompt and output, longer are cut; default 2048, or a trace's own longest",
        lower_bound=3,
    )
    flags.DEFINE_integer("samples", 1, "parallel samples of a request", lower_bound=1)
    flags.DEFINE_enum(
        "sample_lengths", "same", ("same", "own"), "one output length a request, or a sample"
    )
    flags.DEFINE_list(
        "prefix_tokens",
        [str(tokens) for tokens in sweeps.PREFIX_TOKENS],
        "lengths of the common prefixes",
    )
    flags.DEFINE_enum(
        "arrivals",
        "saturated",
        ("saturated", "poisson", "gamma", "weibull", "trace"),
        "when requests arrive; trace: the trace's requests once, in its order and at its times",
    )
    flags.DEFINE_float("rate", 0.02, "requests a step of poisson, gamma, weibull", lower_bound=0)
    flags.DEFINE_float("cv", 2.0, "coefficient of variation of gamma and weibull gaps")
    flags.DEFINE_float(
        "step_seconds", None, "seconds of a step, for a trace whose times are seconds"
    )


def define_trace_flags() -> None:
    """The flags of commands that read a trace."""
    flags.DEFINE_string("trace", None, "file of requests, or of ServeGen clients to sample from")
    flags.DEFINE_integer("clients_seed", 0, "seed of the sample from clients", lower_bound=0)
    flags.DEFINE_float("clients_start", 0, "begin of the sample, seconds of the clients' day")
    flags.DEFINE_float("clients_stop", 86_400, "end of the sample, seconds of the clients' day")
    flags.DEFINE_float("clients_rate", 1, "factor on the clients' rates")


def open_trace(path: str) -> Trace:
    """The requests of a trace file, or of the sample that the flags ask for from its clients."""
    if not servegen.is_clients(path):
        return read_trace(path)
    return servegen.sample(
        servegen.read_clients(path),
        seed=FLAGS.clients_seed,
        start=FLAGS.clients_start,
        stop=FLAGS.clients_stop,
        rate_scale=FLAGS.clients_rate,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Workloads by name; ``replayed`` is the trace whose own arrivals are asked for."""

    workloads: dict[str, Workload]
    replayed: Trace | None
    step_seconds: float | None


def from_flags(names: Sequence[str], *, shares: bool) -> Chosen:
    """The named workloads as the flags shape them; ``ValueError`` for flags that do not go.

    ``shares``: whether any request begins with a common prefix.
    """
    replays = FLAGS.arrivals == "trace"
    _demand_consistent(names, replays=replays)
    trace = open_trace(FLAGS.trace) if FLAGS.trace is not None else None
    prefix_tokens = (
        command.numbers("prefix_tokens", FLAGS.prefix_tokens, int, low=1, high=MOST - 1)
        if shares
        else ()
    )
    return Chosen(
        workloads={
            name: Workload(
                law=_law(name, trace),
                max_length=_max_length(trace if name == "trace" else None, prefix_tokens),
                correlation=FLAGS.correlation,
                arrivals=_arrivals(),
                prefix_tokens=prefix_tokens,
                samples=FLAGS.samples,
                sample_lengths="own" if FLAGS.sample_lengths == "own" else "same",
            )
            for name in names
        },
        replayed=trace if replays else None,
        step_seconds=FLAGS.step_seconds,
    )


def _demand_consistent(names: Sequence[str], *, replays: bool) -> None:
    """Refuses flags of traces and arrivals that would have no effect."""
    if ("trace" in names) != (FLAGS.trace is not None):
        raise ValueError("--trace: --workloads=trace and --trace=FILE go together")
    if replays and list(names) != ["trace"]:
        raise ValueError("--arrivals: trace needs --workloads=trace alone")
    gaps = {"poisson": ("rate",), "gamma": ("rate", "cv"), "weibull": ("rate", "cv")}
    idle = {name for name in ("rate", "cv") if name not in gaps.get(FLAGS.arrivals, ())}
    idle |= {"correlation", "samples", "sample_lengths", "prefix_tokens"} if replays else set()
    idle |= set() if replays else {"step_seconds"}
    for name in sorted(idle):
        if FLAGS[name].present:
            raise ValueError(f"--{name}: has no effect with --arrivals={FLAGS.arrivals}")


def _law(name: str, trace: Trace | None) -> lengths.Law:
    prompt, output = FLAGS.prompt_tokens, FLAGS.output_tokens
    match name:
        case "sharegpt":
            return lengths.sharegpt()
        case "alpaca":
            return lengths.alpaca()
        case "lognormal":
            return lengths.Pair(
                prompt=lengths.LogNormal(median=prompt, sigma=FLAGS.sigma),
                output=lengths.LogNormal(median=output, sigma=FLAGS.sigma),
            )
        case "uniform":
            return lengths.Pair(
                prompt=lengths.Uniform(low=1, high=2 * prompt - 1),
                output=lengths.Uniform(low=1, high=2 * output - 1),
            )
        case "zipf":
            high = (FLAGS.max_length or pools.OPT_13B.max_length) // 2
            marginal = lengths.Zipf(exponent=FLAGS.zipf_exponent, low=1, high=high)
            return lengths.Pair(prompt=marginal, output=marginal)
        case "fixed":
            return lengths.Pair(
                prompt=lengths.Fixed(tokens=prompt), output=lengths.Fixed(tokens=output)
            )
    assert trace is not None
    return lengths.Empirical(prompt_R=trace.prompt_R, output_R=trace.output_R)


def _max_length(trace: Trace | None, prefix_tokens: tuple[int, ...]) -> int:
    if FLAGS.max_length is not None:
        return FLAGS.max_length
    if trace is None:
        return pools.OPT_13B.max_length
    longest = int((trace.prompt_R.astype(int) + trace.output_R).max())
    return longest + max(prefix_tokens, default=0)


def _arrivals() -> arrivals.Arrivals:
    match FLAGS.arrivals:
        case "poisson":
            return arrivals.Poisson(rate=FLAGS.rate)
        case "gamma":
            return arrivals.Gamma(rate=FLAGS.rate, cv=FLAGS.cv)
        case "weibull":
            return arrivals.Weibull(rate=FLAGS.rate, cv=FLAGS.cv)
    return arrivals.Saturated()
