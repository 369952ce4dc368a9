"""The requests of a sweep's groups: how many a run needs, drawn or replayed, as arrays."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from experiments.plan import Group, Settings
from paged_jax.config import Bounds
from paged_jax.serving import simulator
from paged_jax.workload import Requests, arrays, arrivals, draw, replay

PROBE = 4_096  # requests that an estimate looks at
MOST_REQUESTS = 2**22


def requests_of(settings: Settings, group: Group, count: int) -> Requests:
    """The first ``count`` requests of a group, or the whole of a replayed trace."""
    workload = dataclasses.replace(settings.workloads[group.workload], sharing=group.sharing)
    if settings.replayed is None:
        return draw(workload, group.seed, count)
    return replay(
        settings.replayed, step_seconds=settings.step_seconds, max_length=workload.max_length
    )


def count_needed(settings: Settings, group: Group) -> int:
    """Requests that a run can hardly use up.

    A request holds at least its own prompt and half its output while it runs, so a full pool gets
    through about slots * steps / E[output * (prompt + output / 2)] of them; a third on top.
    ``ValueError`` when that is more than a run can hold.
    """
    if settings.replayed is not None:
        return settings.replayed.count
    workload = settings.workloads[group.workload]
    probe = draw(
        dataclasses.replace(workload, sharing=group.sharing, arrivals=arrivals.Saturated()),
        seed=0,
        count=PROBE,
    )
    output_RF = probe.output_RF.astype(np.float64)
    own_R = probe.prompt_R - np.append(probe.prefix_tokens_X, 0)[probe.prefix_R]
    held_R = (output_RF * (own_R[:, None] / probe.samples + output_RF / 2)).sum(axis=1)
    at_once = group.pool_slots / (own_R + output_RF.sum(axis=1) / 2).mean()
    steps = settings.warmup_steps + settings.steps
    needed = 4 / 3 * (group.pool_slots * steps / held_R.mean() + at_once)
    rate = getattr(workload.arrivals, "rate", math.inf)  # requests a step
    count = math.ceil(min(needed, 4 / 3 * rate * steps + 100))
    if count > MOST_REQUESTS:
        raise ValueError(
            f"{group.workload}: {settings.steps} steps get through about {count:,} requests, more"
            f" than {MOST_REQUESTS:,}: lower --steps or --pool_slots"
        )
    return count


def bounds_of(settings: Settings) -> Bounds:
    """Array sizes with which one program of each kind serves the whole sweep."""
    counts = [count_needed(settings, group) for group in settings.groups() if group.seed == 0]
    return Bounds(
        requests=_power_of_two(max(counts)),
        # Requests are cut to the longest length, so no output passes it.
        output=_power_of_two(max(drawn.max_length for drawn in settings.workloads.values())),
        blocks=max(max(settings.pool_slots) // min(settings.block_sizes), 1),
        block_size=max(settings.block_sizes),
        slots=max(settings.pool_slots),
    )


class Source:
    """The requests of a group, on the host and on the device; more of them when they run out.

    The first requests are the same however many there are, so a run that did not need more would
    have given the same results with them.
    """

    def __init__(self, settings: Settings, group: Group, bounds: Bounds) -> None:
        self.settings, self.group = settings, group
        self.first_count = count_needed(settings, group)
        self._load(self.first_count, bounds)

    def extend(self) -> None:
        """Twice as many requests."""
        self._load(2 * self.requests.count, self.bounds)

    def cut(self) -> float:
        """Fraction of requests that the longest length cut short."""
        return float(self.requests.cut_R[: self.first_count].mean())

    def _load(self, count: int, bounds: Bounds) -> None:
        self.requests = requests_of(self.settings, self.group, count)
        self.bounds = dataclasses.replace(
            bounds, requests=max(bounds.requests, _power_of_two(self.requests.count))
        )
        with simulator.on_cpu():
            self.work = arrays.put(self.requests, self.bounds.requests)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
