"""Chips that kernels are compiled for without having one, and what bounds a kernel on them.

Bandwidths and matrix rates are the vendors' published peaks; a TPU's clock follows from its matrix
rate and its number of matrix units. ``Chip.memory_cycles`` is what a static count is held against.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One core of a chip: what runs one program of a kernel's grid at a time."""

    platform: str  # as jax names it
    topology: str  # the name the compiler knows the smallest machine by
    kind: str  # device_kind, the key of tuned tilings
    accelerator: str = ""  # TPU_ACCELERATOR_TYPE of that machine
    cores: int = 1  # that share a device's memory
    clock: float  # Hz
    bandwidth: float  # bytes a second of one core
    flops: float  # of its matrix units a second, bf16

    def memory_cycles(self, size: int) -> float:
        """Cycles that ``size`` bytes take to arrive from memory at full bandwidth."""
        return size / self.bandwidth * self.clock

    def matrix_cycles(self, operations: float) -> float:
        """Cycles that so many multiplications and additions take at the matrix units' peak."""
        return operations / self.flops * self.clock


V5E = Chip(
    platform="tpu",
    topology="v5e:2x2",
    kind="TPU v5 lite",
    accelerator="v5litepod-4",
    clock=1.5e9,
    bandwidth=819e9,
    flops=197e12,
)
V5P = Chip(
    platform="tpu",
    topology="v5p:2x2x1",
    kind="TPU v5",
    cores=2,
    accelerator="v5p-8",
    clock=1.75e9,
    bandwidth=2765e9 / 2,
    flops=459e12 / 2,
)
V6E = Chip(
    platform="tpu",
    topology="v6e:2x2",
    kind="TPU v6 lite",
    accelerator="v6e-4",
    clock=1.75e9,
    bandwidth=1640e9,
    flops=918e12,
)
V7X = Chip(
    platform="tpu",
    topology="tpu7x:2x2x1",
    kind="TPU7x",
    accelerator="tpu7x-8",
    clock=2.2e9,
    bandwidth=7370e9 / 2,
    flops=2307e12 / 2,
)
# A device-to-device copy on an H200 moves 4.3 TB/s (measured), over 132 SMs; clock under load.
SM_90A = Chip(
    platform="cuda",
    topology="1x1x1",
    kind="NVIDIA H200",
    cores=132,
    clock=1.755e9,
    bandwidth=4.3e12 / 132,
    flops=989.4e12 / 132,
)

CHIPS = {"v5e": V5E, "v5p": V5P, "v6e": V6E, "v7x": V7X, "sm_90a": SM_90A}

# An H200 as XLA's text format describes it (stream_executor's GpuTargetConfigProto).
H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
