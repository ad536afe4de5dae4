"""What a device can do at best, for model FLOPs utilisation."""

import torch

# Dense 16-bit tensor-core peak in FLOP/s, from NVIDIA's data sheets (without sparsity).
_PEAK_16BIT = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "B200": 2250e12,
}


def peak_flops() -> float | None:
    """Returns the 16-bit peak of this rank's device in FLOP/s; None where it is not known (a CPU, say)."""
    if not torch.cuda.is_initialized():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_16BIT.items() if part in name), None)
