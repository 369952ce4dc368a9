"""Workloads: what arrives, when, how long it is, and what it shares, in NumPy on the host.

``draw(Workload(law=lengths.sharegpt(), max_length=2048), seed=0, count=1000)`` and
``replay(read_trace(path), step_seconds=0.05)`` both give ``Requests``, all that a scheduler sees.
"""

from paged_jax.workload.requests import Requests
from paged_jax.workload.source import Workload, draw, replay
from paged_jax.workload.trace import Trace, read_trace

__all__ = ["Requests", "Trace", "Workload", "draw", "read_trace", "replay"]
