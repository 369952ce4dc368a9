"""Requests with arrival times through an engine, in wall-clock time.

Each is submitted at the first dispatch boundary after it is due, never before. Outputs have the
length that the trace says: the model's end token is ignored. What the engine cannot serve is
refused, and harms nobody else. Static batching, the baseline, hands over a batch of requests and
looks for the next only when the last of them has ended (request-level scheduling; Yu et al., Orca,
OSDI 2022).

Times of tokens are those at which the host has them: after the dispatch that drew them. Times of
steps inside a dispatch are spread evenly over it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import prefix_hits
from paged_jax.memory.ledger import CATEGORIES
from paged_jax.serving.engine import Engine
from paged_jax.serving.memory_log import Moment
from paged_jax.serving.requests import Request
from paged_jax.serving.served import NEVER, Pulse, Served, Steps
from paged_jax.workload.timed import Timed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What tells the time; a test turns its own."""

    seconds: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    # The steps until a time, where that is known: a dispatch then ends before it.
    steps_until: Callable[[float], int | None] = lambda _: None


def step_clock(engine: Engine) -> Clock:
    """A clock on which every step of an engine lasts a second; arrivals are steps then."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    def now() -> float:
        return engine.memory.count + slept

    return Clock(seconds=now, sleep=sleep, steps_until=lambda due: max(math.ceil(due - now()), 1))


def run(
    engine: Engine,
    requests: Timed,
    prompts: Sequences[Sequences[int]],
    *,
    static: bool = False,
    watch: Callable[[Pulse], None] = lambda _: None,
    clock: Clock | None = None,
) -> Served:
    """Serves all requests with an engine that serves nobody else; ``prompts`` are token ids.

    ``static``: in batches of as many requests as the engine has rows. ``watch`` is called after
    every dispatch and wait. Raises ``ValueError`` where none can be served.
    """
    running = _Run(engine, requests, prompts, clock or Clock())
    while running.coming or engine.busy:
        if not (static and engine.busy):
            running.submit(engine.config.rows if static else requests.count)
        if engine.busy:
            running.advance()
        elif running.coming:
            running.wait()
        watch(running.pulse())
    if len(running.refused) == requests.count:
        raise ValueError(f"no request can be served, the first: {running.refused[0]}")
    return running.result()


def static_config(config: EngineConfig) -> EngineConfig:
    """Settings of static batching in as much memory: rows of the longest length, in one piece.

    Raises ``ValueError`` where not one of them fits.
    """
    rows = min(config.rows, config.pool_slots // config.max_length)
    if not rows:
        raise ValueError(
            f"pool_slots: static batching reserves {config.max_length} slots a row, the pool has"
            f" {config.pool_slots}"
        )
    fewer = tuple(few for few in config.decode_rows if few < rows)
    return dataclasses.replace(config, cache="dense", rows=rows, decode_rows=fewer)


def params(output: int) -> SamplingParams:
    """How a request draws: greedily, as many tokens as are asked for."""
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


class _Ledgers:
    """A ``Watcher`` that keeps ledgers, by moment."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}

    def record(self, moment: Moment) -> None:
        """Nothing is known of it yet."""

    def settle(self, moment: Moment, ledger: dict[str, int]) -> None:
        """The ledger of a step."""
        self.of[moment.number] = [ledger[name] for name in CATEGORIES]


class _Run(_Ledgers):
    """A run that goes on: who was submitted, and what was noted."""

    def __init__(
        self, engine: Engine, requests: Timed, prompts: Sequences[Sequences[int]], clock: Clock
    ) -> None:
        super().__init__()
        self.engine, self.requests, self.prompts, self.clock = engine, requests, prompts, clock
        self.refused: dict[int, str] = {}
        self._next = 0  # the first request that was not submitted yet
        self._index: dict[Request, int] = {}  # of those that were and have not ended
        self._start_R, self._first_R, self._finish_R = np.full((3, requests.count), np.nan)
        self._last_R = np.full(requests.count, NEVER)  # the last step that served it
        self._token_ids: list[list[int]] = [[] for _ in prompts]
        self._drawn_R = np.zeros(requests.count, int)
        self._seconds: list[float] = []
        self._waiting: list[int] = []
        self._served: list[list[int]] = []  # by step of the last dispatch, whom it served
        self._running: list[int] = []
        self._used = 0  # blocks
        engine.memory.watcher = self
        self._host = _Ledgers()
        for log in engine.logs[1:]:
            log.watcher = self._host
        self._began = clock.seconds()

    @property
    def coming(self) -> bool:
        """Whether requests are left that were not submitted yet."""
        return self._next < self.requests.count

    @property
    def _over(self) -> int:
        """Requests that need no more: served or refused."""
        return self._next - len(self._index)

    def submit(self, most: int) -> None:
        """Queues the requests that are due, up to ``most`` of them."""
        now = self._now()
        arrival_R, output_R = self.requests.arrival_seconds_R, self.requests.output_R
        while most and self.coming and arrival_R[self._next] <= now:
            index, self._next = self._next, self._next + 1
            try:
                request = self.engine.add(self.prompts[index], params(int(output_R[index])))
            except ValueError as error:
                self.refused[index] = str(error)
                continue
            self._index[request] = index
            most -= 1

    def record(self, moment: Moment) -> None:
        """A step that the engine took, as a ``Watcher`` of its log."""
        self._served.append([self._index[owner[0]] for owner in moment.owners if owner])
        self._running.append(len(self._served[-1]))
        self._used = moment.used

    def wait(self) -> None:
        """Sleeps until the next request is due."""
        due = self.requests.arrival_seconds_R[self._next]
        self.clock.sleep(max(due - self._now(), 0.0))

    def advance(self) -> None:
        """One dispatch, and what is to be known of it."""
        before, known = self._now(), len(self._running)
        self._served = []
        due = self.requests.arrival_seconds_R[self._next] if self.coming else math.inf
        steps = None if math.isinf(due) else self.clock.steps_until(self._began + due)
        moved = self.engine.advance(steps)
        after, served = self._now(), self._served
        newcomers = [index for index in served[0] if np.isnan(self._start_R[index])]
        self._start_R[newcomers] = before
        for step, indices in enumerate(served, known):
            self._last_R[indices] = step
        came = int(np.searchsorted(self.requests.arrival_seconds_R, before, side="right"))
        # Nobody is admitted or preempted inside a dispatch, so as many wait till its end.
        self._waiting += [came - self._over - len(served[0])] * len(served)
        self._seconds += np.linspace(before, after, len(served) + 1)[1:].tolist()
        for request in moved:
            index = self._index[request]
            self._drawn_R[index] = len(request.sequences[0].token_ids)
            if np.isnan(self._first_R[index]):
                self._first_R[index] = after
            if request.finished:
                self._finish_R[index] = after
                self._token_ids[index] = request.sequences[0].token_ids
                del self._index[request]

    def pulse(self) -> Pulse:
        """How far it has come."""
        config = self.engine.config
        blocks = config.blocks if config.cache == "paged" else config.rows
        return Pulse(
            seconds=self._now(),
            finished=self._over,
            tokens=int(self._drawn_R.sum()),
            used=self._used / blocks,
        )

    def result(self) -> Served:
        """What became of everybody, once all have ended."""
        for log in self.engine.logs:
            log.sweep()
            log.watcher = None
        ledgers = [ledger for _, ledger in sorted(self.of.items())]
        host = [ledger for _, ledger in sorted(self._host.of.items())]
        return Served(
            requests=self.requests,
            start_seconds_R=self._start_R,
            first_seconds_R=self._first_R,
            finish_seconds_R=self._finish_R,
            finish_step_R=self._last_R,
            token_ids=self._token_ids,
            refused=self.refused,
            steps=Steps(
                seconds_X=np.array(self._seconds),
                running_X=np.array(self._running),
                waiting_X=np.array(self._waiting),
                ledger_XJ=np.array(ledgers),
                host_XJ=np.array(host) if host else np.zeros_like(ledgers),
            ),
            preemptions=self.engine.preemptions,
            swaps=self.engine.swaps,
            hits=prefix_hits.rates(self.engine.hits.new),
        )

    def _now(self) -> float:
        return self.clock.seconds() - self._began
