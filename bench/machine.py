"""What this machine is, and what it could do at best."""

# Dense bf16 matrix products per second by NVIDIA's datasheets, by PyTorch's name of the GPU.
PEAK_FLOPS = {
    "NVIDIA A10G": 70e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


def peak_flops(gpu: str | None) -> float | None:
    """The datasheet's bf16 floating-point operations per second; None for a GPU not listed."""
    return PEAK_FLOPS.get(gpu)
