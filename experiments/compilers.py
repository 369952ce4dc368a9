"""The real compilers of TPUs and of NVIDIA GPUs on a machine that has neither.

libtpu and XLA's CUDA plugin compile for a topology that is only described; both read their dump
flags from the environment once, before JAX first computes, so ``environment`` is for a child
process. What they dump about a kernel (VLIW bundles; registers and SASS) comes back as text.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from configs import chips
from configs.chips import Chip

TOOLS = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}


@dataclasses.dataclass(frozen=True, slots=True)
class TpuDump:
    """What libtpu says of one kernel."""

    name: str
    listing: str  # final bundles
    allocations: str


@dataclasses.dataclass(frozen=True, slots=True)
class GpuDump:
    """What ptxas and nvdisasm say of one kernel."""

    name: str
    report: str  # of ptxas -v: registers, spills, static shared memory
    whole_report: str  # the same for a kernel that is compiled whole, see _mosaic_dump
    sass: str
    dynamic_smem: int  # bytes
    threads: int  # of a CTA


def missing(chip: Chip) -> str | None:
    """The extra or package that this Python lacks for a chip, in words; None if all is there."""
    if chip.platform == "tpu":
        found = importlib.util.find_spec("libtpu")
        return None if found else "needs the extra [tpu] (jax[tpu])"
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        found = None
    if not found:
        return "needs the extra [cuda13] (jax[cuda13])"
    for tool, package in TOOLS.items():
        if _tool(tool) is None:
            return f"needs {tool}: install the package {package}"
    return None


def environment(chip: Chip, dumps: Path) -> dict[str, str]:
    """Variables of a process that compiles for ``chip`` and leaves the compilers' dumps there."""
    shared = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if chip.platform == "tpu":
        flags = (
            f"--xla_jf_dump_to={dumps}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_bundles|pre-finalize-registers",
        )
        return shared | {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is claimed where there is no device
            "TPU_ACCELERATOR_TYPE": chip.accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "LIBTPU_INIT_ARGS": " ".join(flags),
        }
    return shared | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_TO": f"{dumps}",
        "XLA_FLAGS": f"--xla_dump_to={dumps} --xla_dump_emitter_re=ptx",
    }


def compile_for(chip: Chip, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Compiles ``function`` for arguments of those shapes and types; raises what the compiler does.

    Works in a process that was started with ``environment(chip, ...)``.
    """
    gpu = chip.platform == "cuda"
    options = {"target_config": chips.H200_TARGET, "topology": chip.topology} if gpu else {}
    topology = topologies.get_topology_desc("" if gpu else chip.topology, chip.platform, **options)
    sharding = SingleDeviceSharding(topology.devices[0])
    placed = [
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)
        for argument in arguments
    ]
    # Kernels ask the mesh what they are lowered for: Triton's always, others for sizes.
    device = AbstractDevice(chip.kind, chip.cores, "gpu" if gpu else "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=(chip.platform,))
    lowered.compile()


def read_dumps(chip: Chip, dumps: Path) -> list[TpuDump] | list[GpuDump]:
    """The Pallas kernels that have been dumped since the folder was last cleared."""
    fresh = _files(dumps)
    return _tpu_dumps(fresh) if chip.platform == "tpu" else _gpu_dumps(fresh)


def clear(dumps: Path, keep: bool) -> None:
    """Takes the dumps away; with ``keep`` into a folder of their own, numbered from 000."""
    fresh = _files(dumps)
    folder = dumps / f"{len(list(dumps.iterdir())) - len(fresh):03}"
    if keep:
        folder.mkdir()
    for path in fresh:
        if keep:
            path.rename(folder / path.name)
        else:
            path.unlink()


def _files(dumps: Path) -> list[Path]:
    return sorted(path for path in dumps.iterdir() if path.is_file())


def version(chip: Chip) -> str:
    """The release of the compiler that ``compile_for`` uses."""
    package = "libtpu" if chip.platform == "tpu" else "nvidia-cuda-nvcc"
    return f"{package} {importlib.metadata.version(package)}"


def _tpu_dumps(fresh: Sequence[Path]) -> list[TpuDump]:
    found = []
    for path in fresh:
        parts = re.fullmatch(r"(\d+-(.+))-\d+-schedule-analysis_final_bundles\.txt", path.name)
        if parts is None:
            continue
        prefix, name = parts.groups()
        if not re.search(rf'%{re.escape(name)} = .*"tpu_custom_call"', path.read_text()):
            continue  # one of XLA's own fusions, or the program around them
        found.append(
            TpuDump(
                name,
                _only(fresh, prefix, r"-\d+-final_bundles\.txt"),
                _only(fresh, prefix, r"-\d+-pre-finalize-registers-and-allocations\.txt"),
            )
        )
    return found


def _gpu_dumps(fresh: Sequence[Path]) -> list[GpuDump]:
    """Mosaic's kernels and Triton's."""
    found = [_mosaic_dump(path) for path in fresh if path.suffix == ".ptxas"]
    launches: Mapping[str, tuple[int, int]] = {}
    for path in fresh:
        if path.name.endswith("thunk_sequence.txt"):
            launches = _launches(path.read_text())
    for path in fresh:
        if path.suffix == ".ptx" and not path.with_suffix(".ptxas").exists():
            kernels = re.findall(r"\.entry (\w+)", path.read_text())
            found += [
                _triton_dump(path, name, *launches[name])
                for name in kernels
                if not name.startswith(("loop_", "input_", "wrapped_", "copy"))  # XLA's fusions
            ]
    return found


def _mosaic_dump(report: Path) -> GpuDump:
    """A kernel as XLA compiled it, and once more by ptxas alone.

    Where nvJitLink is installed XLA compiles through it, for linking, and then ``setmaxnreg`` is
    ignored: all warps keep what the thirstiest needs. ptxas alone heeds it.
    """
    source = report.with_suffix(".before_layout_inference.txt").read_text()
    launch = re.search(
        r"threads\(.*?\) in \(%\S+ = %c(\d+), .*?dynamic_shared_memory_size %c(\d+)_i32", source
    )
    if launch is None:
        raise ValueError(f"{report.name}: the dump beside it shows no launch")
    sass = report.with_suffix(".sass_ctrl")
    if not sass.exists():
        raise ValueError(f"{report.name}: no SASS beside it, nvdisasm failed")
    whole_report, _ = _assemble(report.with_suffix(".ptx"))
    return GpuDump(
        name=report.stem,
        report=report.read_text(),
        whole_report=whole_report,
        sass=sass.read_text(),
        dynamic_smem=int(launch[2]),
        threads=int(launch[1]),
    )


def _triton_dump(path: Path, name: str, threads: int, dynamic_smem: int) -> GpuDump:
    """XLA dumps the PTX of a Triton kernel only, so this is ptxas alone."""
    report, cubin = _assemble(path)
    sass = _run("nvdisasm", "-c", cubin)
    return GpuDump(name, report, report, sass, dynamic_smem, threads)


def _assemble(ptx: Path) -> tuple[str, Path]:
    """(report, file of the machine code) of a kernel in PTX."""
    cubin = ptx.with_suffix(".cubin")
    return _run("ptxas", "-v", "-arch", "sm_90a", ptx, "-o", cubin), cubin


def _run(name: str, *arguments: str | Path) -> str:
    tool = _tool(name)
    assert tool is not None, "see missing"
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _launches(thunks: str) -> dict[str, tuple[int, int]]:
    """(threads, dynamic shared memory) by kernel."""
    pattern = r"(\w+) grid: \[[^]]*\] threads: \[(\d+), (\d+), (\d+)\] +shared_memory: (\d+) bytes"
    return {
        name: (int(x) * int(y) * int(z), int(smem))
        for name, x, y, z, smem in re.findall(pattern, thunks)
    }


def _tool(name: str) -> Path | None:
    """NVIDIA's program of that name: from its wheel, or what the shell would find."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    wheels = [Path(folder, "cu13", "bin") for folder in folders or ()]
    path = os.pathsep.join([*map(str, wheels), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def _only(paths: Sequence[Path], prefix: str, suffix: str) -> str:
    """The text of the one file whose name is ``prefix`` and matches ``suffix`` after it."""
    pattern = re.compile(re.escape(prefix) + suffix)
    found = [path for path in paths if pattern.fullmatch(path.name)]
    if len(found) != 1:
        raise ValueError(f"{prefix}: expected one dump of {suffix}, found {len(found)}")
    return found[0].read_text()
