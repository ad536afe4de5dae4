"""A program's code cannot move a trial's rank to a place that another trial may have."""

import os
from unittest import mock

import pytest

from zerotune.trial_lib.rank.rank_placement import RankPlacement, own_devices, own_method

OWN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environment is that of a rank. What the code names as devices is in the list."""
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    noted: list[str] = []
    monkeypatch.setattr(os.environ, "__class__", RankPlacement(OWN, noted.append).environment())
    return noted


def place() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in OWN}


def test_a_port_or_an_address_of_the_code_s_is_passed_over(noted: list[str]) -> None:
    os.environ["MASTER_PORT"] = "29500"
    os.environ.update(MASTER_ADDR="localhost", OTHER="1")
    assert (place(), os.environ["OTHER"]) == (OWN, "1")
    del os.environ["OTHER"], os.environ["MASTER_PORT"]
    assert (place(), os.environ.get("OTHER")) == (OWN, None)
    assert noted == []


def test_a_number_of_the_code_s_counts_the_trial_s_devices(noted: list[str]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "6,7"
    assert place() == OWN
    assert noted == ["CUDA_VISIBLE_DEVICES=1"]


def test_what_the_code_says_to_cuda_counts_for_hip(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**OWN, "HIP_VISIBLE_DEVICES": "6,7"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(os.environ, "__class__", RankPlacement(own, noted.append).environment())
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert os.environ["HIP_VISIBLE_DEVICES"] == "7"
    os.environ["CUDA_VISIBLE_DEVICES"] = "6,7"
    assert os.environ["HIP_VISIBLE_DEVICES"] == "6,7"


def test_code_that_hides_the_devices_for_a_while_has_them_again(noted: list[str]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    del os.environ["CUDA_VISIBLE_DEVICES"]
    assert place() == OWN


def test_a_device_that_the_code_has_read_means_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setattr(os.environ, "__class__", RankPlacement(own, lambda text: None).environment())
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    before = os.environ["CUDA_VISIBLE_DEVICES"]
    assert before == "2", "the second of the trial's"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    os.environ["CUDA_VISIBLE_DEVICES"] = before
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2", "restored"
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_what_is_no_text_is_refused_as_ever(noted: list[str]) -> None:
    for name in ("MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OTHER"):
        with pytest.raises(TypeError, match="str expected"):
            os.environ[name] = 29500  # type: ignore[assignment]


def test_after_the_ranks_have_met_a_child_may_have_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    mine = RankPlacement(OWN, lambda text: None)
    monkeypatch.setattr(os.environ, "__class__", mine.environment())
    assert mine.meets() == {name: OWN[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ["MASTER_PORT"] = "29600"
    assert os.environ["MASTER_PORT"] == "29600"


def test_code_that_clears_the_environment_and_restores_it_keeps_the_place(noted: list[str]) -> None:
    before = dict(os.environ)
    with mock.patch.dict(os.environ, {"OTHER": "1"}, clear=True):
        assert dict(os.environ) == {**OWN, "OTHER": "1"}
        assert os.environ.popitem() == ("OTHER", "1")
        with pytest.raises(KeyError):
            os.environ.popitem()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("named", "own", "meant"),
    [
        ("0", "6,7", "6"),
        ("1, 0", "6,7", "7,6"),
        ("0,1,2,3", "6,7", "6,7"),
        ("6,7", "6,7", "6,7"),
        ("GPU-b", "GPU-a,GPU-b", "GPU-b"),
        ("GPU-c", "GPU-a,GPU-b", "GPU-a,GPU-b"),
        ("", "6,7", ""),
        ("-1", "6,7", "-1"),
        ("0,", "6,7", "6"),
        ("1,-1", "6,7", "7"),
    ],
)
def test_devices_that_the_code_names_are_among_the_trial_s(named: str, own: str, meant: str) -> None:
    assert own_devices(named, own) == meant


@pytest.mark.parametrize(
    ("method", "own"),
    [
        (None, None),
        ("env://", "env://"),
        ("env://?rank=1", "env://?rank=1"),
        ("tcp://10.0.0.1:23456", "tcp://127.0.0.1:29501"),
        ("tcp://10.0.0.1:23456?rank=1&world_size=2", "tcp://127.0.0.1:29501?rank=1&world_size=2"),
        ("file:///tmp/group", "tcp://127.0.0.1:29501"),
    ],
)
def test_a_group_that_the_code_forms_elsewhere_meets_at_the_trial_s_address(
    method: str | None, own: str | None
) -> None:
    assert own_method(method, OWN) == own


def test_an_ipv6_address_stays_one_address() -> None:
    assert own_method("tcp://[::2]:1", {**OWN, "MASTER_ADDR": "::1"}) == "tcp://[::1]:29501"
