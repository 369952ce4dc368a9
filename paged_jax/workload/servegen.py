"""ServeGen clients: requests sampled from published distributions of a production service.

A file holds, for each client, a rate, a burstiness and a gap law for every window of 600 s, and
length distributions for fewer, longer windows (Xiang et al., ServeGen, arXiv 2505.09999). In each
window a client's arrivals are a stationary renewal process with the window's rate and the shape
of its Gamma or Weibull law: the first gap is length-biased and cut at a uniform place, or else a
bursty client would send (cv ** 2 - 1) / 2 requests too many a window. Input and output lengths are
independent, as no joint law was published. Cost: about a second for a million requests.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from paged_jax.workload import columns, lengths
from paged_jax.workload.trace import Trace

WINDOW_SECONDS = 600
MOST_RATE = 10_000  # requests a second of one client


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one client does from ``start`` on, for 600 s."""

    start: int  # seconds
    rate: float  # requests a second
    pattern: str  # "Gamma" or "Weibull"
    shape: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client: its active windows, and the length laws in force from each time on."""

    name: str
    windows: tuple[Window, ...]
    pairs: dict[int, lengths.Pair]


def read_clients(path: str) -> tuple[Client, ...]:
    """The clients of a JSON file, gzip or not; ``ValueError`` naming the client and the field."""
    content = columns.json_object(path, 1, columns.read_text(path))
    clients = []
    for name, entry in content.items():
        where = f"{path}: client {name}"
        if not isinstance(entry, dict) or not {"trace", "dataset"} <= set(entry):
            raise ValueError(f'{where}: expected an object with "trace" and "dataset"')
        clients.append(_client(where, name, entry))
    return tuple(clients)


def is_clients(path: str) -> bool:
    """Whether the file looks like clients rather than like requests: by its first key's value."""
    text = columns.read_text(path)
    if not text.lstrip().startswith("{"):
        return False
    try:
        first = next(iter(json.loads(text).values()), None)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"trace", "dataset"} <= set(first)


def sample(
    clients: tuple[Client, ...], *, seed: int, start: float, stop: float, rate_scale: float = 1.0
) -> Trace:
    """The requests that arrive from ``start`` up to ``stop``, in seconds of the recorded day.

    ``rate_scale`` multiplies every rate and leaves the burstiness. Each client and window has its
    own stream, so the same requests come whatever ``start`` and ``stop`` are. Arrivals count from
    ``start``. ``ValueError`` when no request arrives.
    """
    if not 0 <= start < stop:
        raise ValueError(f"start, stop: expected 0 <= start < stop, got {start}, {stop}")
    if not 0 < rate_scale < math.inf:
        raise ValueError(f"rate_scale: expected a positive number, got {rate_scale}")
    parts = []
    for number, client in enumerate(clients):
        for window in client.windows:
            if window.start < stop and window.start + WINDOW_SECONDS > start:
                generator = np.random.default_rng((seed, number, window.start))
                parts.append(_window_requests(client, window, rate_scale, generator))
    if not parts:
        raise ValueError(f"start, stop: no client is active from {start} to {stop} s")
    arrival_R, prompt_R, output_R = (np.concatenate(part) for part in zip(*parts, strict=True))
    order_R = np.argsort(arrival_R, kind="stable")
    order_R = order_R[(arrival_R[order_R] >= start) & (arrival_R[order_R] < stop)]
    if not len(order_R):
        raise ValueError(f"start, stop: no request arrived from {start} to {stop} s")
    return Trace(
        format="servegen",
        prompt_R=prompt_R[order_R],
        output_R=output_R[order_R],
        arrival_seconds_R=arrival_R[order_R] - start,
    )


def _window_requests(
    client: Client, window: Window, rate_scale: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals in seconds of the day, prompts and outputs of one window."""
    times, lengths_generator = generator.spawn(2)
    rate = window.rate * rate_scale
    expected = rate * WINDOW_SECONDS  # in units of the mean gap, the window's length, too
    elapsed_R = _first(window, times, 1).cumsum()
    while elapsed_R[-1] < expected:
        gap_R = _gaps(window, times, int(expected) + 16)
        elapsed_R = np.concatenate([elapsed_R, elapsed_R[-1] + gap_R.cumsum()])
    elapsed_R = elapsed_R[elapsed_R < expected]
    in_force = max(since for since in client.pairs if since <= window.start)
    prompt_R, output_RF = client.pairs[in_force].draw(lengths_generator, len(elapsed_R))
    return window.start + elapsed_R / rate, prompt_R, output_RF[:, 0]


def _gaps(window: Window, generator: np.random.Generator, count: int) -> np.ndarray:
    """Gaps of mean 1."""
    if window.pattern == "Gamma":
        return generator.standard_gamma(window.shape, count) / window.shape
    power = 1 / window.shape
    return generator.standard_exponential(count) ** power / math.gamma(1 + power)


def _first(window: Window, generator: np.random.Generator, count: int) -> np.ndarray:
    """Waits for the first arrival, seen from a time that knows nothing of the process.

    Such a time falls into a gap x with density x f(x): Gamma of shape + 1, or for Weibull
    x ** shape distributed as Gamma(1 + 1 / shape).
    """
    if window.pattern == "Gamma":
        biased_R = generator.standard_gamma(window.shape + 1, count) / window.shape
    else:
        power = 1 / window.shape
        biased_R = generator.standard_gamma(1 + power, count) ** power / math.gamma(1 + power)
    return biased_R * generator.random(count)


def _client(where: str, name: str, entry: dict[str, Any]) -> Client:
    if not isinstance(entry["trace"], list) or not isinstance(entry["dataset"], dict):
        raise ValueError(f'{where}: expected a list "trace" and an object "dataset"')
    windows = [_window(f"{where}: trace {at}", row) for at, row in enumerate(entry["trace"])]
    active = tuple(window for window in windows if window.rate > 0)
    pairs = {}
    for since, fields in entry["dataset"].items():
        what = f"{where}: dataset {since}"
        if not since.isdecimal() or not isinstance(fields, dict):
            raise ValueError(f"{what}: expected seconds and an object of distributions")
        if any(fields.values()):  # a client that sends nothing has empty distributions
            pairs[int(since)] = lengths.Pair(
                prompt=_law(f"{what}: input_tokens", fields.get("input_tokens")),
                output=_law(f"{what}: output_tokens", fields.get("output_tokens")),
            )
    for window in active:
        if window.start < min(pairs, default=math.inf):
            raise ValueError(f"{where}: expected lengths in force at {window.start} s, got none")
    return Client(name=name, windows=active, pairs=pairs)


def _window(where: str, row: Any) -> Window:
    expected = "expected [t, rate, cv, Gamma or Weibull, shape, scale], or a rate of 0"
    try:
        start, rate, _, pattern, shape, _ = row
        window = Window(start=int(start), rate=float(rate), pattern=pattern, shape=float(shape))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: {expected}, got {row}") from None
    works = window.pattern in ("Gamma", "Weibull") and 0.01 <= window.shape <= 1e6
    if not (window.rate == 0 or (0 < window.rate <= MOST_RATE and works)):
        raise ValueError(f"{where}: {expected}, got {row}")
    return window


def _law(where: str, weights: object) -> lengths.Discrete:
    if not isinstance(weights, dict) or not weights:
        raise ValueError(f"{where}: expected an object of tokens and probabilities, got {weights}")
    try:
        items = sorted((int(value), float(weight)) for value, weight in weights.items())
        values, shares = zip(*items, strict=True)
        return lengths.Discrete(values=values, weights=shares)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
