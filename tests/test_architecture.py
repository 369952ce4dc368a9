"""The shape of the repository: who imports whom, how long a file is, what is packaged."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A module may import from its own group and from the rows above it, not from beside it.
ORDER = (
    ("pallas_kernels",),
    ("paged_jax",),
    ("paged_jax.config",),
    ("paged_jax.measure", "paged_jax.workload"),
    ("paged_jax.memory",),
    ("paged_jax.scheduling",),
    ("paged_jax.model",),
    ("paged_jax.decoding",),
    ("paged_jax.serving",),
    ("configs",),
    ("experiments",),
    ("tests",),
)
RANK = {group: rank for rank, row in enumerate(ORDER) for group in row}
LEAF_IMPORTS = sys.stdlib_module_names | {"jax", "jaxlib", "numpy", "pallas_kernels"}
MOST_LINES = 400


def sources() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    tops = {group.partition(".")[0] for group in RANK}
    paths = [path for top in sorted(tops) for path in sorted((ROOT / top).rglob("*.py"))]
    names = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return {
        ".".join(name[:-1] if name[-1] == "__init__" else name): path
        for name, path in zip(names, paths, strict=True)
    }


SOURCES = sources()


def imports(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """Dotted names that a module imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            stem = [*base, node.module] if node.module else base
            yield from (".".join([*stem, alias.name]) for alias in node.names)


def group_of(name: str) -> str | None:
    """The longest group that a dotted name lies in; None outside the project."""
    parts = name.split(".")
    prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK), None)


def import_faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of ``module`` that break the order, in words."""
    own = group_of(module)
    assert own is not None, f"{module} has no place in the order"
    faults = []
    for name in imports(module, source, is_package):
        other = group_of(name)
        if own == "pallas_kernels" and name.partition(".")[0] not in LEAF_IMPORTS:
            faults.append(f"{module} imports {name}: a leaf needs jax and numpy only")
        elif other not in (None, own) and RANK[other] >= RANK[own]:
            faults.append(f"{module} imports {name}: {other} does not come before {own}")
    return faults


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_only_what_comes_before_it(module: str) -> None:
    path = SOURCES[module]
    assert not import_faults(module, path.read_text(), path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.dims", "import paged_jax"),
        ("pallas_kernels.ops", "import flax"),
        ("paged_jax", "from paged_jax import serving"),
        ("paged_jax.config", "from paged_jax.workload import trace"),
        ("paged_jax.measure.results", "from paged_jax import workload"),
        ("paged_jax.workload.lengths", "import paged_jax.measure.results"),
        ("paged_jax.memory.pool", "def late():\n    from paged_jax.scheduling import schedule"),
        ("paged_jax.memory.pool", "from ..serving import simulator"),
        ("paged_jax.memory.pool", "from .. import serving"),
        ("paged_jax.memory.pool", "import configs.pools as pools"),
        ("configs.pools", "from experiments import sweep"),
        ("experiments.sweep", "from tests.support import reference"),
    ],
)
def test_wrong_import_is_found(module: str, source: str) -> None:
    assert len(import_faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.ops", "import math\nimport jax\nfrom pallas_kernels import dims"),
        ("paged_jax.memory.pool", "import flax\nfrom pallas_kernels import dims"),
        ("paged_jax.memory.pool", "from . import ledger\nfrom ..config import CacheConfig"),
        ("paged_jax.measure.environment", "import paged_jax"),
        ("paged_jax.serving.simulator", "from paged_jax import memory, scheduling"),
        ("experiments.sweep", "import configs\nfrom paged_jax.measure import results"),
    ],
)
def test_right_import_passes(module: str, source: str) -> None:
    assert not import_faults(module, source)


@pytest.mark.parametrize("module", SOURCES)
def test_module_is_short_and_says_what_it_is(module: str) -> None:
    source = SOURCES[module].read_text()
    assert len(source.splitlines()) <= MOST_LINES
    assert not source or ast.get_docstring(ast.parse(source)), "a module docstring is missing"


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    tops = {name.partition(".")[0] for name in listed}
    found = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert sorted(listed) == sorted(".".join(path.relative_to(ROOT).parts) for path in found)
