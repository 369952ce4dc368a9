"""Workloads by name, from the flags that shape them; for every command that draws requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags

from configs import pools, sweeps
from experiments import command
from paged_jax.workload import Trace, Workload, arrivals, lengths, read_trace

NAMES = ("sharegpt", "alpaca", "lognormal", "uniform", "zipf", "fixed", "trace")

_TRACE = flags.DEFINE_string("trace", None, "file of the workload trace")
_PROMPT = flags.DEFINE_integer(
    "prompt_tokens", 161, "prompts of lognormal (median), uniform (mean), fixed", lower_bound=1
)
_OUTPUT = flags.DEFINE_integer(
    "output_tokens", 338, "outputs of lognormal (median), uniform (mean), fixed", lower_bound=1
)
_SIGMA = flags.DEFINE_float("sigma", 1.0, "sd of the logarithm of lognormal lengths", lower_bound=0)
_EXPONENT = flags.DEFINE_float("zipf_exponent", 1.0, "of zipf lengths, from 1 to half max_length")
_CORRELATION = flags.DEFINE_float(
    "correlation", 0.0, "rank correlation of prompt and output lengths", -1, 1
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    None,
    "most tokens of prompt and output, longer ones are cut; default 2048, a trace's own longest",
    lower_bound=3,
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "parallel samples of a request", lower_bound=1)
_SAMPLE_LENGTHS = flags.DEFINE_enum(
    "sample_lengths", "same", ("same", "own"), "one output length a request, or a sample"
)
_PREFIX_TOKENS = flags.DEFINE_list(
    "prefix_tokens",
    [str(tokens) for tokens in sweeps.PREFIX_TOKENS],
    "lengths of the common prefixes",
)
_ARRIVALS = flags.DEFINE_enum(
    "arrivals",
    "saturated",
    ("saturated", "poisson", "gamma", "weibull", "trace"),
    "when requests arrive; trace: the trace's requests once, in its order and at its times",
)
_RATE = flags.DEFINE_float(
    "rate", 0.02, "requests a step of poisson, gamma, weibull", lower_bound=0
)
_CV = flags.DEFINE_float("cv", 2.0, "coefficient of variation of gamma and weibull gaps")
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds", None, "seconds of a step, for a trace whose times are seconds"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Workloads by name; ``replayed`` is the trace whose own arrivals are asked for."""

    workloads: dict[str, Workload]
    replayed: Trace | None
    step_seconds: float | None


def from_flags(names: Sequence[str]) -> Chosen:
    """The named workloads as the flags shape them; ``ValueError`` for flags that do not go."""
    if ("trace" in names) != (_TRACE.value is not None):
        raise ValueError("trace: --workloads=trace and --trace=FILE go together")
    trace = read_trace(_TRACE.value) if _TRACE.value else None
    replays = _ARRIVALS.value == "trace"
    if replays and list(names) != ["trace"]:
        raise ValueError("arrivals: trace needs --workloads=trace alone")
    if replays and _SAMPLES.value != 1:
        raise ValueError("samples: a replayed trace has 1 a request")
    if _STEP_SECONDS.value is not None and not replays:
        raise ValueError("step_seconds: needs --arrivals=trace")
    prefix_tokens = command.numbers("prefix_tokens", _PREFIX_TOKENS.value, int, low=1)
    return Chosen(
        workloads={
            name: Workload(
                law=_law(name, trace),
                max_length=_max_length(name, trace, prefix_tokens),
                correlation=_CORRELATION.value,
                arrivals=_arrivals(),
                prefix_tokens=prefix_tokens,
                samples=_SAMPLES.value,
                sample_lengths="own" if _SAMPLE_LENGTHS.value == "own" else "same",
            )
            for name in names
        },
        replayed=trace if replays else None,
        step_seconds=_STEP_SECONDS.value,
    )


def _law(name: str, trace: Trace | None) -> lengths.Law:
    prompt, output = _PROMPT.value, _OUTPUT.value
    match name:
        case "sharegpt":
            return lengths.sharegpt()
        case "alpaca":
            return lengths.alpaca()
        case "lognormal":
            return lengths.Pair(
                prompt=lengths.LogNormal(median=prompt, sigma=_SIGMA.value),
                output=lengths.LogNormal(median=output, sigma=_SIGMA.value),
            )
        case "uniform":
            return lengths.Pair(
                prompt=lengths.Uniform(low=1, high=2 * prompt - 1),
                output=lengths.Uniform(low=1, high=2 * output - 1),
            )
        case "zipf":
            high = (_MAX_LENGTH.value or pools.OPT_13B.max_length) // 2
            marginal = lengths.Zipf(exponent=_EXPONENT.value, low=1, high=high)
            return lengths.Pair(prompt=marginal, output=marginal)
        case "fixed":
            return lengths.Pair(
                prompt=lengths.Fixed(tokens=prompt), output=lengths.Fixed(tokens=output)
            )
    assert trace is not None
    return lengths.Empirical(prompt_R=trace.prompt_R, output_R=trace.output_R)


def _max_length(name: str, trace: Trace | None, prefix_tokens: tuple[int, ...]) -> int:
    if _MAX_LENGTH.value is not None or name != "trace" or trace is None:
        return _MAX_LENGTH.value or pools.OPT_13B.max_length
    return int((trace.prompt_R.astype(int) + trace.output_R).max()) + max(prefix_tokens, default=0)


def _arrivals() -> arrivals.Arrivals:
    match _ARRIVALS.value:
        case "poisson":
            return arrivals.Poisson(rate=_RATE.value)
        case "gamma":
            return arrivals.Gamma(rate=_RATE.value, cv=_CV.value)
        case "weibull":
            return arrivals.Weibull(rate=_RATE.value, cv=_CV.value)
    return arrivals.Saturated()
