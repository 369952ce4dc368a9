"""Devices that virtual time can be told in: peaks of their data sheets, not calibrated.

Matrix rates are dense, bf16 with f32 accumulation; where a sheet gives the rate "with sparsity",
half of it stands here. Sheets say GB of memory and mean GiB; a driver keeps one or two per cent of
it. A PCIe link's rate is one way. ``experiments.calibrate`` fits what steps reach of all this.
"""

from configs import chips
from paged_jax.config import DeviceConfig

GIB = 2**30
PCIE_4 = 32e9  # 16 lanes, one way: half of the 64 GB/s of NVIDIA's A100 data sheet
PCIE_5 = 64e9  # 16 lanes, one way: half of the 128 GB/s of NVIDIA's H100 data sheet

# NVIDIA A100 Tensor Core GPU, data sheet: SXM, 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB).
A100_40GB = DeviceConfig(
    name="a100_40gb",
    memory_bytes=40 * GIB,
    memory_bandwidth=1_555e9,
    flops=312e12,
    host_bandwidth=PCIE_4,
)
A100_80GB = DeviceConfig(
    name="a100_80gb",
    memory_bytes=80 * GIB,
    memory_bandwidth=2_039e9,
    flops=312e12,
    host_bandwidth=PCIE_4,
)
# NVIDIA H100 Tensor Core GPU, data sheet: SXM, 3.35 TB/s; Hopper architecture white paper: 989.4.
H100 = DeviceConfig(
    name="h100",
    memory_bytes=80 * GIB,
    memory_bandwidth=3.35e12,
    flops=989.4e12,
    host_bandwidth=PCIE_5,
)
# NVIDIA H200 Tensor Core GPU, data sheet: 141 GB, 4.8 TB/s, matrix rate and link of the H100. A
# copy on the device reaches 4.3 TB/s, an efficiency of 0.90 (measured).
H200 = DeviceConfig(
    name="h200",
    memory_bytes=141 * GIB,
    memory_bandwidth=4.8e12,
    flops=989.4e12,
    host_bandwidth=PCIE_5,
)
# NVIDIA Ada GPU architecture, white paper, appendix A: 24 GB at 1,008 GB/s, 165.2 TFLOPS of FP16
# with FP32 accumulation (330.3 without), PCIe 4.0.
RTX_4090 = DeviceConfig(
    name="rtx_4090",
    memory_bytes=24 * GIB,
    memory_bandwidth=1_008e9,
    flops=165.2e12,
    host_bandwidth=PCIE_4,
)
# Google Cloud TPU documentation, pages "TPU v5e" and "TPU v6e"; links to the host: Austin et al.,
# How To Scale Your Model, part 2: about 15 GB/s a chip, 32 GB/s on v6e.
TPU_V5E = DeviceConfig(
    name="tpu_v5e",
    memory_bytes=16 * GIB,
    memory_bandwidth=chips.V5E.bandwidth,
    flops=chips.V5E.flops,
    host_bandwidth=15e9,
)
TPU_V6E = DeviceConfig(
    name="tpu_v6e",
    memory_bytes=32 * GIB,
    memory_bandwidth=chips.V6E.bandwidth,
    flops=chips.V6E.flops,
    host_bandwidth=32e9,
)

DEVICES = {
    device.name: device for device in (A100_40GB, A100_80GB, H100, H200, RTX_4090, TPU_V5E, TPU_V6E)
}
