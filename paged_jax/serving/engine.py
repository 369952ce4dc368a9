"""An engine: requests in, tokens out, continuous batching on the device in between.

The host keeps what the device cannot know (texts, who is who), enters requests into the device's
slots in order of service, and looks at the device once a dispatch: after one step that computes
prompts, or after many that only decode. Who runs, waits or is preempted is decided on the device by
``scheduling.batching``; a preempted request recomputes its tokens, or gets them back from host
memory, and goes on as if nothing had been. Samples of a request share its prompt's blocks and copy
the partial last one when they write. A beam search is a request like any other, whose rows are
chosen together.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.decoding import sampling
from paged_jax.decoding.beams import Beams, BeamSearchParams
from paged_jax.decoding.caches import Cache
from paged_jax.model.split import split
from paged_jax.model.weights import Loaded
from paged_jax.scheduling import policy
from paged_jax.serving import beam_search, dispatch, entries, settings
from paged_jax.serving.admission_hits import AdmissionHits
from paged_jax.serving.batch import Moment
from paged_jax.serving.device_reads import DeviceReads
from paged_jax.serving.host_memory import HostMemory
from paged_jax.serving.memory_log import MemoryLog
from paged_jax.serving.requests import Params, Request, Search, Sequence, as_samples

_ORDER = operator.attrgetter("order")


class Engine:
    """Serves requests of one model, of up to ``samples`` sequences each.

    Raises ``ValueError`` for settings the model cannot have.
    """

    def __init__(self, model: Loaded, config: EngineConfig, *, samples: int = 1) -> None:
        self.config = settings.fit_config(config, model)
        self._end_ids = model.end_ids
        self._vocabulary = model.config.vocabulary
        self._windows = settings.groups_of(model.config, self.config).windows
        self._model = split(model.decoder)  # its graph and its weights
        self._limits = policy.limits(
            rows=self.config.rows,
            tokens=self.config.step_tokens,
            chunked=self.config.chunked_prefill,
            swapped=self.config.swap_sequences,
        )
        # Those that run, and as many that wait: the device always sees the head of the queue.
        slots = 2 * self.config.rows
        self._slots: list[Request | None] = [None] * slots
        self._batch = dispatch.create(
            settings.create_cache(model, self.config),
            requests=slots,
            samples=samples,
            ends=settings.ENDS,
            swap_blocks=self.config.swap_blocks,
        )
        self._queue: list[Request] = []
        self._numbers = itertools.count()
        self._row: list[tuple[Request, int] | None] = [None] * self.config.rows
        self._uses = sampling.Uses()
        self._calm = False  # whether the next steps may only decode, as far as the host knows
        self.reads = DeviceReads()
        blocks = self.config.swap_blocks
        self._host = HostMemory(self._batch, blocks, self.reads) if blocks else None
        self.preemptions = self.swaps = 0  # of those preempted, swapped
        self.hits = AdmissionHits(self.config.block_size)
        kv, size = self._batch.cache.kv, self._batch.cache.rows.block_size
        self.memory = MemoryLog(blocks=kv.blocks, block_size=size, slot_bytes=kv.slot_bytes)

    def add(
        self,
        prompt_ids: Sequences[int],
        params: Params,
        prompt: str | None = None,
        *,
        priority: int = 0,
        salt: int = 0,
    ) -> Request:
        """Queues a request; the lowest ``priority`` is served first, then the first to come.

        Its ``params`` say whether it is sampled or searched; a search's sequences are its beams,
        once it is over what was found. With prefix caching it shares blocks with requests of the
        same ``salt`` alone. Raises ``ValueError`` for one that could never be served.
        """
        settings.check_prompt(prompt_ids, params.max_tokens, self.config, self._vocabulary)
        most, samples = self._batch.book.live_RF.shape[1], as_samples(params)
        settings.check_room(self.config, self._windows, len(prompt_ids), params, most)
        settings.end_tokens(samples, self._end_ids)
        request = Request(
            prompt=prompt,
            prompt_ids=list(prompt_ids),
            params=samples,
            sequences=[Sequence() for _ in range(samples.n)],
            search=Search(params) if isinstance(params, BeamSearchParams) else None,
            priority=priority,
            salt=salt,
            number=next(self._numbers),
        )
        self._use([params])
        bisect.insort(self._queue, request, key=_ORDER)
        return request

    @property
    def cache(self) -> Cache:
        """What the rows hold now; the next dispatch takes its arrays."""
        return self._batch.cache

    def warm(self, *params: Params) -> None:
        """Compiles all that requests of such ``params`` may need.

        Without it a program is compiled when it is first needed, while requests wait. Raises
        ``ValueError`` once requests are served.
        """
        if any(self._slots):
            raise ValueError("warm: requests are being served, call it before")
        self._use(params)
        self._enter([])
        for rows in self.config.decode_sizes:
            self._batch, _ = self._call(dispatch.decode, 1, rows, rehearses=True)
        self._batch, planned = dispatch.plan(self._batch, self._limits)
        self._equip({})
        for size in dispatch.sizes(self._most_tokens):
            packed = np.zeros(size, np.int32), np.zeros(self.config.rows + 1, np.int32)
            self._batch, *_ = dispatch.compute(
                *self._model, self._batch, planned.step, planned.copies, *packed, uses=self._uses
            )
        if self._host:
            self._batch = self._host.warm(self._batch)
        self._batch = dispatch.stop(self._batch, np.zeros(self._batch.book.live_RF.shape, bool))

    @property
    def logs(self) -> tuple[MemoryLog, ...]:
        """Of the device's memory, and of the host's where requests are swapped."""
        return (self.memory, self._host.log) if self._host else (self.memory,)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._queue) or any(self._slots)

    def run(self) -> Iterator[list[Request]]:
        """Serves all that was added, a dispatch at a time; yields the requests it moved on."""
        while self.busy:
            yield self.advance()

    def advance(self, steps: int | None = None) -> list[Request]:
        """One dispatch, of at most so many steps. Returns the requests that have new tokens."""
        most = self.config.dispatch_steps
        for log in self.logs:
            log.sweep()
        self._submit()
        return (self._calm and self._decode(min(steps or most, most))) or self._compute()

    def trace_decode(self, params: Params) -> jax.stages.Traced:
        """The program of a decode dispatch for requests of such params, to look into."""
        self._use([params])
        return self._call(dispatch.decode.trace, 1, self.config.rows)

    def stop(self, request: Request, sequence: Sequence, tokens: int) -> None:
        """Ends a sequence after its first ``tokens`` tokens: a stop string was met.

        One beam's end is the end of all, where they are.
        """
        if not sequence.finish_reason:
            ended = request.sequences if request.search else [sequence]
            self._leave(request, ended)
            for one in ended:
                one.finish("stop", len(one.token_ids))
        sequence.finish("stop", tokens)
        self._free(request)

    def abort(self, request: Request) -> None:
        """Drops a request wherever it is, and frees what it holds. What it has drawn stays."""
        open_ = [sequence for sequence in request.sequences if not sequence.finish_reason]
        if request in self._queue:
            self._queue.remove(request)
        elif open_:
            self._leave(request, open_)
        for sequence in open_:
            sequence.finish("abort", len(sequence.token_ids))
        self._free(request)

    def _use(self, params: Sequences[Params]) -> None:
        """From now on the device can draw with such ``params``."""
        self._uses |= sampling.Uses.of(list(map(as_samples, params)))
        if any(isinstance(one, BeamSearchParams) for one in params):
            self._batch = dispatch.allow_searches(self._batch)
        if self._uses.penalises and self._batch.seen_BV is None:
            seen_BV = jax.device_put(np.zeros((self.config.rows, self._vocabulary), bool))
            self._batch = self._batch.replace(seen_BV=seen_BV)

    def _free(self, request: Request) -> None:
        """The slot of a request that is over is empty."""
        if request.finished and request in self._slots:
            self._slots[self._slots.index(request)] = None

    def _submit(self) -> None:
        """Enters queued requests into free slots, in order of service."""
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        new = free[: len(self._queue)]
        for slot in new:
            self._slots[slot] = self._queue.pop(0)
        new += self._outrank()
        if new:
            self._enter(new)

    def _outrank(self) -> list[int]:
        """Slots whose requests have not begun, and now are those of queued ones that come first."""
        running = {held[0] for held in self._row if held}
        idle = [
            (one.order, slot, one)
            for slot, one in enumerate(self._slots)
            if one and one not in running and not one.begun
        ]
        taken = []
        for order, slot, late in sorted(idle, reverse=True):
            if not self._queue or order < self._queue[0].order:
                break
            self._slots[slot] = self._queue.pop(0)
            bisect.insort(self._queue, late, key=_ORDER)
            taken.append(slot)
        return taken

    def _enter(self, new: list[int]) -> None:
        """Tells the device of the requests in ``new`` slots, and everybody's rank."""
        how = None if self._batch.beams is None else beam_search.describe(self._slots)
        tokens = self._batch.book.token_RT.shape[1]
        self._batch = dispatch.submit(self._batch, *entries.of_slots(self._slots, new, tokens), how)

    def _decode(self, steps: int) -> list[Request]:
        """Many steps in which every row decodes; none where the next one has to be planned."""
        run = sum(held is not None for held in self._row)
        rows = next(rows for rows in self.config.decode_sizes if rows >= run)
        self._batch, drawn = self._call(dispatch.decode, steps, rows)
        drawn, beams = self.reads((drawn, self._batch.beams))
        self._calm = drawn.steps == steps
        moved: list[Request] = []
        for nth in range(drawn.steps):
            parts = drawn.moments, drawn.draws
            moment, draw = jax.tree.map(lambda many, nth=nth: many[nth], parts)
            self._record(moment, drawn.host)
            moved += self._collect(draw, beams)
        return self._conclude(moved, beams)

    def _call(
        self, decode: Callable[..., Any], steps: int, rows: int, *, rehearses: bool = False
    ) -> Any:
        """``dispatch.decode`` or its trace, for so many rows at most."""
        return decode(
            *self._model,
            self._batch,
            self._limits,
            np.int32(steps),
            np.bool_(rehearses),
            most_steps=self.config.dispatch_steps,
            most_rows=rows,
            uses=self._uses,
        )

    def _compute(self) -> list[Request]:
        """One step with any mix of rows."""
        self._batch, planned = dispatch.plan(self._batch, self._limits)
        self._calm = True
        found = self.reads(planned)
        self.preemptions += int(found.step.preempted_R.sum())
        if found.step.moved:
            assert self._host, "somebody is swapped"
            self._batch = self._host.move(self._batch, found.step, self._slots)
            self.swaps += int((found.step.swapped_R & found.step.preempted_R).sum())
        if self.config.prefix_caching:
            self.hits.count(found.step, self._slots)
        self._seat(found)
        self._record(found.moment, found.host)
        tokens_of = {
            row: self._tokens(row, found.moment.length_B[row], count)
            for row, count in enumerate(found.step.tokens_B)
            if count
        }
        assert tokens_of, "somebody is served in every step"
        packed = dispatch.pack(tokens_of, self.config.rows, self._most_tokens)
        self._batch, draw = dispatch.compute(
            *self._model, self._batch, planned.step, planned.copies, *packed, uses=self._uses
        )
        draw, beams = self.reads((draw, self._batch.beams))
        return self._conclude(self._collect(draw, beams), beams)

    @property
    def _most_tokens(self) -> int:
        """Tokens of one step: rows that decode are not held to the budget."""
        return max(self.config.step_tokens, self.config.rows)

    def _tokens(self, row: int, length: int, count: int) -> list[int]:
        """The last ``count`` of the first ``length`` tokens of what a row holds."""
        held = self._row[row]
        assert held is not None, "a row that computes was seated"
        request, index = held
        return request.known(index)[length - count : length]

    def _seat(self, found: dispatch.Planned) -> None:
        """Follows what a plan did to the rows."""
        before, holders = self._row, [*self._slots, None]
        self._row = [
            (holder, int(sample)) if (holder := holders[owner]) else None
            for owner, sample in zip(found.owner_B.tolist(), found.sample_B, strict=True)
        ]
        seated = {
            row: held
            for row, held in enumerate(self._row)
            if held is not None and held != before[row]
        }
        if seated:
            self._equip(seated)

    def _equip(self, seated: dict[int, tuple[Request, int]]) -> None:
        """Gives rows that were seated what they draw with."""
        equipment = entries.of_rows(
            self._row, seated, self._end_ids, self._vocabulary, penalises=self._uses.penalises
        )
        self._batch = dispatch.seat(self._batch, *equipment)

    def _record(self, moment: Moment, host: Moment | None) -> None:
        """Logs what is held in a step, on both sides."""
        self.memory.append(moment, self._row)
        if self._host and host is not None:
            self._host.record(host, self._slots)

    def _collect(self, draw: Any, beams: Beams | None) -> list[Request]:
        """Hands out a ``dispatch.Draw`` that the host has read; returns the requests that drew.

        ``beams``: the searches as they stood at the end of the dispatch.
        """
        moved: list[Request] = []
        rows_of: dict[Request, dict[int, int]] = {}
        for row in np.flatnonzero(draw.token_B >= 0):
            held = self._row[row]
            assert held is not None, "a row that draws was seated"
            request, index = held
            moved.append(request)
            if request.search:
                rows_of.setdefault(request, {})[index] = int(row)
                continue
            sequence = request.sequences[index]
            sequence.token_ids.append(int(draw.token_B[row]))
            sequence.logprobs.append(float(draw.logprob_B[row]))
            if sequence.token_ids[-1] in settings.end_tokens(request.params, self._end_ids):
                sequence.finish_reason = "stop"
            elif len(sequence.token_ids) >= request.params.max_tokens:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                self._row[row] = None
            self._free(request)
        for request, row_of in rows_of.items():
            assert beams is not None, "somebody searches"
            beam_search.follow(request, row_of, draw, beams, self._slots.index(request))
        if draw.parent_B is not None and self.memory.parents is not None:
            self.memory.parents.append(draw.parent_B)
        return moved

    def _conclude(self, moved: list[Request], beams: Beams | None) -> list[Request]:
        """Ends searches that are over; returns the requests that moved, each once."""
        moved = list(dict.fromkeys(moved))
        for request in [one for one in moved if one.search]:
            assert beams is not None, "somebody searches"
            if beam_search.conclude(request, beams, self._slots.index(request)):
                self._row = [one if one and one[0] is not request else None for one in self._row]
                self._free(request)
        return moved

    def _leave(self, request: Request, sequences: list[Sequence]) -> None:
        """Sequences of a request that is in a slot end on the device."""
        slot = self._slots.index(request)
        stopped_RF = np.zeros(self._batch.book.live_RF.shape, bool)
        for index, sequence in enumerate(request.sequences):
            stopped_RF[slot, index] = sequence in sequences
        self._batch = dispatch.stop(self._batch, stopped_RF)
        self._row = [
            None
            if held and held[0] is request and held[0].sequences[held[1]] in sequences
            else held
            for held in self._row
        ]
