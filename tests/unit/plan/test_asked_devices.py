"""`--on` and `--price`: what is read, and the sentence for each mistake."""

import pytest

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.devices import known_devices, ran_as, read_devices

KNOWN = known_devices()


def test_devices_are_read_with_hosts_and_prices() -> None:
    asked = read_devices(["h100-80gb:8", "a100-80gb:2x8", "L4 24GB", "a100-40gb:16"], ["h100-80gb=2.99"], KNOWN)
    assert [str(each.cluster) for each in asked] == ["h100-80gb:8", "a100-80gb:2x8", "l4-24gb:1", "a100-40gb:2x8"]
    assert [each.count for each in asked] == [8, 16, 1, 16]
    assert [each.price for each in asked] == [2.99, None, None, None]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h200:1", "h200-141gb:1"),
        ("mi300x", "mi300x-192gb:1"),
        ("b200:8", "b200-180gb:8"),
        ("GB200:4", "gb200-186gb:4"),
        ("l40s:4", "l40s-48gb:4"),
        ("rtx4090:2", "rtx4090-24gb:2"),
        ("4090", "rtx4090-24gb:1"),
        ("RTX 3090 Ti", "rtx3090ti-24gb:1"),
        ("h100-nvl:2", "h100-94gb-nvl:2"),
        ("h100 pcie:8", "h100-80gb-pcie:8"),
    ],
)
def test_a_short_name_is_taken_if_it_means_one_device(typed: str, meant: str) -> None:
    (asked,) = read_devices([typed], [f"{typed.partition(':')[0]}=1.5"], KNOWN)
    assert (str(asked.cluster), asked.price) == (meant, 1.5)


def test_programs_find_the_name_of_the_device_in_cudas_words() -> None:
    names = [KNOWN[each].cuda_name for each in ("h100-80gb", "a100-40gb-pcie", "rtx4090-24gb", "mi300x-192gb")]
    assert names[:2] == ["NVIDIA H100 80GB", "NVIDIA A100 PCIe 40GB"]
    assert names[2:] == ["NVIDIA GeForce RTX 4090 24GB", "AMD Instinct MI300X 192GB"]


def test_devices_that_differ_in_bfloat16_from_the_programs_are_told() -> None:
    asked = read_devices(["v100-32gb:8", "a100-80gb:2x8", "t4-16gb:8", "h100-80gb:8"], [], KNOWN)
    (said,) = ran_as(asked, asked[1])
    assert said.startswith("The program ran as on a100-80gb. v100-32gb and t4-16gb differ from it in bfloat16, ")
    assert ran_as(asked[1:2] + asked[3:], asked[1]) == []


@pytest.mark.parametrize(
    ("typed", "prices", "said"),
    [
        (["h100:8"], [], '"h100" may be h100-80gb, h100-80gb-pcie or h100-94gb-nvl.'),
        (["a100"], [], "a100-80gb, a100-40gb, a100-80gb-pcie or a100-40gb-pcie"),
        (["a100-pcie:2"], [], "a100-80gb-pcie or a100-40gb-pcie"),
        (["v100:8"], [], "v100-16gb or v100-32gb"),
        (["h100-80g:8"], [], "The nearest: h100-80gb"),
        (["zzz:8"], [], "Known: "),
        (["h100-80gb:0"], [], "NAME:NUMBER"),
        (["h100-80gb:2x"], [], "NAME:NUMBER"),
        (["h100-80gb:-1"], [], "NAME:NUMBER"),
        (["h100-80gb:1e3"], [], "NAME:NUMBER"),
        ([":8"], [], "NAME:NUMBER"),
        (["h100-80gb:12"], [], "do not fill hosts of 8"),
        (["h100-80gb:100000x8"], [], "at most 65,536"),
        (["h100-80gb:8", "h100-80gb:1x8"], [], "is there twice"),
        (["h100-80gb:8"], ["h100-80gb"], "NAME=PRICE"),
        (["h100-80gb:8"], ["h100-80gb=cheap"], "NAME=PRICE"),
        (["h100-80gb:8"], ["h100-80gb=-1"], "NAME=PRICE"),
        (["h100-80gb:8"], ["h100-80gb=nan"], "NAME=PRICE"),
        (["h100-80gb:8"], ["h100-80gb=1", "h100-80gb=2"], "two prices"),
        (["h100-80gb:8"], ["a100-40gb=1"], "no --on asks for a100-40gb"),
    ],
)
def test_a_mistake_gets_one_sentence_with_its_place(typed: list[str], prices: list[str], said: str) -> None:
    with pytest.raises(InputError) as raised:
        read_devices(typed, prices, KNOWN)
    assert said in str(raised.value)
    assert raised.value.where.startswith(("--on ", "--price "))
