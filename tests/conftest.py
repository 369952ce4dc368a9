"""What all tests share: markers that depend on the machine, and data that may be absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import jax
import pytest

import paged_jax  # noqa: F401  its flag for XLA counts if it is there before JAX first computes

# The first example of a property compiles, and a suite that CI repeats must find the same.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# An interpreted kernel blocks a thread of XLA's pool for each warpgroup that waits: on a machine of
# two cores, three of them hang.
os.environ.setdefault("PJRT_NPROC", "16")

MOST_MAPS = 30_000
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests that take minutes, too")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("takes minutes: run with --slow")
    for platform in ("gpu", "tpu"):
        if item.get_closest_marker(platform) and jax.default_backend() != platform:
            pytest.skip(f"needs a {platform.upper()}, JAX found {jax.default_backend()}")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Programs are dropped between modules before a worker has so many that XLA's compiler crashes:
    each keeps pages mapped, of which Linux lets a process have 65,530."""
    maps = Path("/proc/self/maps")
    leaves = nextitem is None or nextitem.path != item.path
    if leaves and maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """``shared_data(name)`` is the path of a file or folder of the shared data, or skips."""

    def path(name: str) -> Path:
        if not (SHARED_DATA / name).exists():
            pytest.skip(f"shared data {name} is not in ../shared/data beside the repository")
        return SHARED_DATA / name

    return path
