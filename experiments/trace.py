"""What is in a request trace: lengths, arrivals, and what its prompts share.

    python -m experiments.trace --trace=conversation_trace.jsonl

Any format of ``paged_jax.workload.trace``; of ServeGen clients, one sampled window. Prefix hits
are given under three definitions, as published figures use different ones.
"""

from __future__ import annotations

import numpy as np
from absl import flags

from experiments import command, workloads
from paged_jax.workload import Trace, prefixes

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    workloads.define_trace_flags()
    flags.adopt_module_key_flags(workloads)
    flags.mark_flag_as_required("trace")
    flags.DEFINE_integer(
        "block_size",
        None,
        "tokens a block of the prefix statistics; by default what the trace's ids stand for, or 16",
        lower_bound=1,
    )


def main(_: list[str]) -> None:
    trace = workloads.open_trace(FLAGS.trace)
    print(f"format    {trace.format}")
    print(f"requests  {trace.count:,}")
    print(f"arrivals  {_arrivals(trace)}")
    print(f"\n{'tokens':<8}{'mean':>12}{'median':>12}{'p95':>12}{'max':>12}")
    for name, length_R in (("prompt", trace.prompt_R), ("output", trace.output_R)):
        median, p95 = np.percentile(length_R, [50, 95])
        print(
            f"{name:<8}{length_R.mean():>12,.1f}{median:>12,.0f}{p95:>12,.0f}{length_R.max():>12,}"
        )
    if trace.prompt_ids is not None:
        trace = prefixes.from_tokens(trace, FLAGS.block_size or 16)
    if trace.ids is not None:
        _print_hits(trace)


def _arrivals(trace: Trace) -> str:
    time_R, unit = trace.arrival_seconds_R, "s"
    if time_R is None:
        time_R, unit = trace.arrival_steps_R, "step"
    if time_R is None:
        return "not recorded"
    span = float(time_R[-1] - time_R[0])
    if not span:
        return "all at once"
    span_unit = "s" if unit == "s" else "steps"
    return f"{(trace.count - 1) / span:.4g} / {unit} over {span:,.0f} {span_unit}"


def _print_hits(trace: Trace) -> None:
    hits = prefixes.infinite_cache(trace, FLAGS.block_size)
    donor_R, shared_R = prefixes.donors(trace)
    sharing_R = donor_R < trace.count
    block_size = FLAGS.block_size or trace.ids_tokens
    print(f"\nprefix hits of a cache that never evicts, in blocks of {block_size} tokens")
    for share, what in (
        (hits.blocks, "blocks found / blocks"),
        (hits.tokens, "tokens found / tokens"),
        (hits.requests, "mean over requests of tokens found / tokens"),
        (sharing_R.mean(), f"requests that share a prefix, {shared_R.sum():,} tokens in all"),
    ):
        print(f"{share:>9.2%}  {what}")


if __name__ == "__main__":
    command.run(main, define_flags)
