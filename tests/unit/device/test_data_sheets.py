"""Which data sheet is a device's, by its name."""

import pytest

from zerotune.trial_lib.device.data_sheets import multiplied_in, peak_flops, share_of

NONE = None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 147.1),
        ("AMD Instinct MI300X", 1307.4),
        # Of other names these are a part.
        ("NVIDIA RTX A1000", NONE),
        ("NVIDIA T400 4GB", NONE),
        ("NVIDIA A100X", NONE),
        ("Quadro RTX 6000", NONE),
        # Of other forms, and virtual ones.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", NONE),
        ("NVIDIA RTX 6000 Ada Generation Laptop GPU", NONE),
        ("GRID A100-10C", NONE),
        ("NVIDIA A10-24Q", NONE),
        ("", NONE),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(name: str, teraflops: float | None) -> None:
    assert peak_flops(name, "bfloat16", 1.0) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


@pytest.mark.parametrize(
    ("name", "of_types"),
    [
        ("NVIDIA A100-SXM4-40GB", {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "float8": None, "float64": None}),
        ("NVIDIA H100 80GB HBM3", {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "float8": 1978.9}),
        ("Tesla V100-SXM2-16GB", {"float32": 15.7, "tf32": None, "float16": 125.0, "bfloat16": None}),
        ("Tesla V100-PCIE-32GB", {"float16": 112.0}),
        ("Tesla T4", {"float16": 65.0, "bfloat16": None}),
    ],
)
def test_the_peak_is_that_of_the_type(name: str, of_types: dict[str, float | None]) -> None:
    found = {dtype: peak_flops(name, dtype, 1.0) for dtype in of_types}
    assert found == {dtype: None if peak is None else pytest.approx(peak * 1e12) for dtype, peak in of_types.items()}


@pytest.mark.parametrize(
    ("name", "multiprocessors", "share"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 42 / 108),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 16 / 132),
        # Another count than the sheet's is no slice: some are sold with fewer.
        ("NVIDIA H100 80GB HBM3", 114, 1.0),
        ("NVIDIA Unknown MIG 1g.10gb", 16, 1.0),
    ],
)
def test_a_slice_has_its_multiprocessors_share(name: str, multiprocessors: int, share: float) -> None:
    assert share_of(name, multiprocessors) == pytest.approx(share)
    peak, whole = peak_flops(name, "bfloat16", share_of(name, multiprocessors)), peak_flops(name, "bfloat16", 1.0)
    assert peak == (None if whole is None else pytest.approx(whole * share))


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [
        (["float32"], "float32"),
        (["float32", "tf32"], "tf32"),
        (["bfloat16", "float32", "tf32"], "bfloat16"),
        (["float16"], "float16"),
        (["bfloat16", "float8_e4m3fn"], "float8"),
        (["bfloat16", "float16"], None),
        (["float64"], None),
        ([], None),
    ],
)
def test_a_training_multiplies_in_the_narrowest_of_its_formats(formats: list[str], dtype: str | None) -> None:
    assert multiplied_in(formats) == dtype
