"""Requests with arrival times in virtual time: the engine's scheduling and memory, no model.

With the engine's settings, and everybody there from the start, steps, ledgers and the order in
which requests finish are the engine's; see ``virtual_step``. Prompts need no tokens unless a prefix
cache is to find them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import MOST, DeviceConfig, EngineConfig, ModelConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import prefix_hits, rows
from paged_jax.memory.cache_groups import Windows
from paged_jax.memory.layout import blocks_of
from paged_jax.scheduling import book as books
from paged_jax.scheduling import policy
from paged_jax.scheduling.book import Book
from paged_jax.serving import settings, virtual_step
from paged_jax.serving.served import NEVER, Pulse, Served, Steps
from paged_jax.serving.virtual_step import Record, Settings, State, Time
from paged_jax.workload.timed import Timed

CALL_STEPS = 4096  # of one call of the loop
LEAST_BOUND = 32  # requests that a program has room for


def run(
    model: ModelConfig,
    device: DeviceConfig | None,
    config: EngineConfig,
    requests: Timed,
    *,
    static: bool = False,
    sequences: Sequences[Sequences[int]] | None = None,
    watch: Callable[[Pulse], None] = lambda _: None,
    call_steps: int = CALL_STEPS,
) -> Served:
    """Serves all requests; arguments as those of ``trace_run.run``.

    ``device``: what tells the time; None: a step lasts a second, as by ``trace_run.step_clock``.
    ``sequences``: token ids of each request's prompt and output, which a prefix cache needs.
    ``watch`` is called every ``call_steps`` steps. Raises ``ValueError`` where none can be served.
    """
    config = dataclasses.replace(config, max_length=min(config.max_length, model.max_length))
    windows = settings.groups_of(model, config).windows
    # Prompts of a static batch are computed whole, so windows bound nothing.
    refused = _refused(config, (None,) * len(windows) if static else windows, requests)
    if config.prefix_caching and sequences is None:
        raise ValueError("sequences: a prefix cache needs the tokens of prompts and outputs")
    compiled = Settings(model, device, config.kv_dtype, static, call_steps)
    state = _create(config, windows, requests, refused, sequences)
    bound = state.book.rank_R.shape[0]
    arrival_R = _time(np.pad(requests.arrival_seconds_R, (0, bound - requests.count), "edge"))
    limits = policy.limits(
        rows=config.rows,
        tokens=MOST if static else config.step_tokens,
        chunked=config.chunked_prefill,
        swapped=config.swap_sequences,
    )
    calls: list[tuple[np.ndarray, Steps]] = []
    steps = 0
    while steps == call_steps * len(calls):
        state, record = virtual_step.advance(state, arrival_R, limits, compiled)
        count, steps = int(state.step) - steps, int(state.step)
        calls.append(_steps(record, count))
        watch(_pulse(state, calls[-1][1], bound - requests.count))
    begin_X = np.concatenate([begin_X for begin_X, _ in calls])
    return _result(requests, refused, jax.device_get(state), begin_X, _joined(calls))


def _refused(config: EngineConfig, windows: Windows, requests: Timed) -> dict[int, str]:
    """Why requests cannot be served, as the engine refuses them; ``ValueError`` if all are."""
    refused: dict[int, str] = {}
    for index, lengths in enumerate(zip(requests.prompt_R, requests.output_R, strict=True)):
        prompt, output = map(int, lengths)
        try:
            if prompt + output > config.max_length:
                raise ValueError(
                    f"prompt: {prompt} tokens and {output} to come pass the context of"
                    f" {config.max_length}"
                )
            settings.check_room(config, windows, prompt, SamplingParams(max_tokens=output), 1)
        except ValueError as error:
            refused[index] = str(error)
    if len(refused) == requests.count:
        raise ValueError(f"no request can be served, the first: {refused[0]}")
    return refused


def _create(
    config: EngineConfig,
    windows: Windows,
    requests: Timed,
    refused: dict[int, str],
    sequences: Sequences[Sequences[int]] | None,
) -> State:
    """Everybody waits, with nothing stored."""
    # So that one program serves many workloads.
    bound = max(LEAST_BOUND, 1 << (requests.count - 1).bit_length())
    paged = config.cache == "paged"
    size = config.block_size if paged else config.max_length
    memory = rows.create(
        rows=config.rows,
        blocks=config.blocks if paged else config.rows,
        block_size=size,
        blocks_per_row=-(-config.max_length // size),
        caches_prefixes=config.prefix_caching,
        windows=windows,
    )
    if config.swap_blocks:
        memory = memory.with_host(rows=bound, blocks=config.swap_blocks)
    tokens = memory.table.table_BM.shape[1] * size if config.prefix_caching else 1
    never_R = np.full(bound, NEVER, np.int32)
    return State(
        book=_book(requests, refused, sequences, bound, tokens, config.rows),
        memory=memory,
        now=Time(jnp.int32(0), jnp.float32(0)),
        step=jnp.int32(0),
        batch_R=jnp.zeros(bound, bool),
        age=jnp.int32(0),
        preemptions=jnp.int32(0),
        swaps=jnp.int32(0),
        start_R=jnp.array(never_R),
        first_R=jnp.array(never_R),
        finish_R=jnp.array(never_R),
        found_R=jnp.zeros(bound, jnp.int32),
    )


def _book(
    requests: Timed,
    refused: dict[int, str],
    sequences: Sequences[Sequences[int]] | None,
    bound: int,
    tokens: int,
    rows: int,
) -> Book:
    """The requests, in order of arrival, and padding; those refused are over."""
    count = requests.count
    served_R = ~np.isin(np.arange(count), list(refused))
    token_RT = np.zeros((count, tokens), np.int32)
    for index, sequence in enumerate(sequences or ()):
        kept = sequence[:tokens]
        token_RT[index, : len(kept)] = kept

    def pad(values: np.ndarray, fill: int) -> jax.Array:
        ends = [(0, bound - count), *[(0, 0)] * (values.ndim - 1)]
        return jnp.asarray(np.pad(values, ends, constant_values=fill))

    return books.create(requests=bound, samples=1, rows=rows).replace(
        rank_R=pad(np.where(served_R, np.arange(count), MOST).astype(np.int32), MOST),
        prompt_R=pad(requests.prompt_R.astype(np.int32), 1),
        output_RF=pad(requests.output_R.astype(np.int32)[:, None], 1),
        live_RF=pad(served_R[:, None], 0),
        token_RT=pad(token_RT, 0),
    )


def _time(seconds_R: np.ndarray) -> Time:
    """Rounded up to what the clock can tell: nobody is served before it arrives."""
    whole_R = np.floor(seconds_R)
    exact_R = seconds_R - whole_R
    fraction_R = exact_R.astype(np.float32)
    up_R = np.where(fraction_R < exact_R, np.nextafter(fraction_R, np.float32(2)), fraction_R)
    return Time(jnp.asarray(whole_R, jnp.int32), jnp.zeros(len(up_R))).after(jnp.asarray(up_R))


def _pulse(state: State, steps: Steps, padding: int) -> Pulse:
    book, now = state.book, state.now
    return Pulse(
        seconds=float(now.whole) + float(now.fraction),
        finished=int((book.rank_R >= MOST).sum()) - padding,
        tokens=int(book.drawn_RF.sum()),
        used=float(steps.used_X[-1:].sum()),
    )


def _steps(record: Record, count: int) -> tuple[np.ndarray, Steps]:
    """When each of a call's steps began, in double precision, and the steps."""
    cut: Any = jax.tree.map(lambda array: array[:count], jax.device_get(record))
    begin_X = cut.begin.whole.astype(np.float64) + cut.begin.fraction
    return begin_X, Steps(
        seconds_X=begin_X + cut.seconds_X,
        running_X=cut.running_X,
        waiting_X=cut.waiting_X,
        ledger_XJ=cut.ledger_XJ,
        host_XJ=cut.host_XJ,
    )


def _joined(calls: Sequences[tuple[np.ndarray, Steps]]) -> Steps:
    names = [field.name for field in dataclasses.fields(Steps)]
    parts = {name: [getattr(steps, name) for _, steps in calls] for name in names}
    return Steps(**{name: np.concatenate(arrays) for name, arrays in parts.items()})


def _result(
    requests: Timed, refused: dict[int, str], state: Any, begin_X: np.ndarray, steps: Steps
) -> Served:
    """What became of everybody; ``state`` is on the host."""
    count = requests.count
    start_R, first_R, finish_R = (
        step_R[:count] for step_R in (state.start_R, state.first_R, state.finish_R)
    )

    def at(seconds_X: np.ndarray, step_R: np.ndarray) -> np.ndarray:
        return np.where(step_R == NEVER, np.nan, seconds_X[step_R])

    return Served(
        requests=requests,
        start_seconds_R=at(begin_X, start_R),
        first_seconds_R=at(steps.seconds_X, first_R),
        finish_seconds_R=at(steps.seconds_X, finish_R),
        finish_step_R=finish_R,
        token_ids=[[] for _ in range(count)],
        refused=refused,
        steps=steps,
        preemptions=int(state.preemptions),
        swaps=int(state.swaps),
        hits=_hits(requests, state) if state.memory.prefix is not None else None,
    )


def _hits(requests: Timed, state: Any) -> prefix_hits.HitRates | None:
    count, size = requests.count, state.memory.block_size
    served_R = state.start_R[:count] != NEVER
    prompt_R, found_R = requests.prompt_R[served_R], state.found_R[:count][served_R]
    return prefix_hits.rates(
        prefix_hits.HitCounts(
            requests=served_R.sum(),
            blocks=blocks_of(prompt_R, size).sum(),
            blocks_hit=(found_R // size).sum(),
            tokens=prompt_R.sum(),
            tokens_hit=found_R.sum(),
            shares=(found_R / prompt_R).sum(),
        )
    )
