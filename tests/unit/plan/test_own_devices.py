"""The devices of this host, by the names that drivers give them."""

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.devices import known_devices, own_devices

KNOWN = known_devices()
GIB = 2**30


def host_with(model: str, memory_gib: float) -> Host:
    return Host("cuda", ["0", "1"], int(memory_gib * GIB), models={"GPU-1": model, "GPU-2": model})


@pytest.mark.parametrize(
    ("model", "memory_gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", 39.5, "a100-40gb-pcie"),
        ("NVIDIA A800-SXM4-80GB", 79.3, "a800-80gb"),
        ("NVIDIA A800 80GB PCIe", 79.3, "a800-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-80gb-pcie"),
        ("NVIDIA H800", 79.1, "h800-80gb"),
        ("NVIDIA H800 PCIe", 79.1, "h800-80gb-pcie"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24gb"),
        # No known device has its sheet, and its peaks are those of SXM2.
        ("Tesla V100-SXM3-32GB", 31.7, "v100-32gb"),
    ],
)
def test_a_card_is_taken_for_one_of_its_own_form(model: str, memory_gib: float, expected: str) -> None:
    found = own_devices(host_with(model, memory_gib), KNOWN, {expected: 2.5})
    assert (str(found.cluster), found.price) == (f"{expected}:2", 2.5)


def test_a_card_of_another_memory_is_refused() -> None:
    with pytest.raises(InputError, match="no known device is NVIDIA H100 80GB HBM3"):
        own_devices(host_with("NVIDIA H100 80GB HBM3", 40), KNOWN, {})
