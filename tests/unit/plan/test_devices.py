from pathlib import Path

import pytest

from zerotune.trial_lib.device.data_sheets import sheet_of
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.devices import Cluster, DeviceFigures, known_devices

OWN = """\
fast-96gb:
  teraflops: {float32: 60, tf32: 480, float16: 1000, bfloat16: 1000}
  memory_gib: 95.0
  bandwidth: 4000
  link: 450
  network: 50
  to_host: 64
  host_memory_gib: 128
  host_bandwidth: 80
  host_cores: 12
  per_host: 4
slow-network:
  like: h100-80gb
  network: 3.1
"""


def test_the_peaks_are_those_of_the_data_sheet() -> None:
    device, sheet = known_devices()["h100-80gb"], sheet_of("NVIDIA H100 80GB HBM3")
    assert sheet is not None
    assert sheet.bfloat16 is not None
    assert device.peak("torch.bfloat16") == sheet.bfloat16 * 1e12
    assert known_devices()["v100-32gb"].peak("bfloat16") == known_devices()["v100-32gb"].peak("float32")


@pytest.mark.parametrize("device", known_devices().values(), ids=lambda each: each.name)
def test_every_device_is_plausible(device: DeviceFigures) -> None:
    """The name says the memory in decimal gigabytes or more; links get slower with the distance."""
    named = int(device.name.split("-")[1].removesuffix("gb"))
    assert 0.89 * named * 1e9 < device.memory < 1.09 * named * 1e9
    assert device.peaks["float32"] < device.peak("float16")
    # Newer adapters are faster than the host's own links.
    assert device.network < 2 * device.to_host <= 4 * device.link < 2 * device.bandwidth
    assert device.host_bandwidth < device.bandwidth


def test_a_user_adds_devices_in_a_few_lines(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(OWN)
    devices = known_devices(file)
    assert devices["fast-96gb"].link == 450e9
    assert devices["fast-96gb"].per_host == 4
    known = devices["h100-80gb"]
    assert devices["slow-network"] == DeviceFigures(**{**vars(known), "name": "slow-network", "network": 3.1e9})


def test_a_device_has_the_compute_capability_of_the_one_that_it_is_like(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text("mine: {like: h200-141gb, network: 3.1}\nother: {like: a100-80gb, capability: 9}\n")
    devices = known_devices(file)
    names = ("mine", "other", "a100-80gb", "b200-180gb", "v100-32gb")
    assert [devices[name].capability for name in names] == [9.0, 9.0, 8.0, 10.0, 7.0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- h100", "it has no devices"),
        ("a: [1", "it is not YAML"),
        ("a: {bandwith: 3}", "Did you mean `bandwidth`?"),
        ("a: {like: h100-80g}", "The nearest are h100-80gb"),
        ("a: {like: h100-80gb, link: fast}", "It must be a number above 0"),
        ("a: {like: h100-80gb, link: -1}", "It must be a number above 0"),
        ("a: {like: h100-80gb, teraflops: {bfloat16: 3}}", "`float32` among them"),
        ("a: {like: h100-80gb, sheet: Z9}", "Give its `teraflops` instead"),
        ("a: {bandwidth: 100}", "lacks memory_gib"),
        ("a: {like: h100-80gb, per_host: 0.5}", "It must be a whole number"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=r"devices\.yaml") as refused:
        known_devices(file)
    assert part in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        known_devices(tmp_path / "none.yaml")


def test_a_cluster_counts_its_ranks() -> None:
    cluster = Cluster(device=known_devices()["a100-40gb"], hosts=2, per_host=8)
    assert (cluster.ranks, str(cluster)) == (16, "a100-40gb:2x8")
