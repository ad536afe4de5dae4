"""Hosts that one trial spans: which is this machine, and whose slots are whose."""

import socket

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.hosts import HostPart, is_this_host, ranks_of, spanned
from zerotune.trial_lib.launch.outcome import RankRecord, classify
from zerotune.trial_lib.launch.rank_starter import HOST, LaunchRequest, ProcessesEnd, RankRequest
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import RankFailure
from zerotune.trial_lib.records.result import Outcome

HERE = Host("cpu", ["4", "5", "6"], 2**30)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()])
def test_a_loopback_address_and_this_machine_s_name_are_this_host(name):
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid"])
def test_any_other_is_not(name):
    assert not is_this_host(name)


def test_the_slots_are_this_host_s_own_and_the_others_by_name():
    assert spanned(HERE, {"127.0.0.1": 2, "192.0.2.1": 2}, "hosts").slots == ["4", "5", "192.0.2.1/0", "192.0.2.1/1"]


def test_two_loopback_addresses_share_this_host_s_slots():
    assert spanned(HERE, {"127.0.0.1": 1, "127.0.0.2": 2}, "hosts").slots == ["4", "5", "6"]


def test_a_study_runs_on_the_first_host():
    with pytest.raises(InputError, match=r"the first host is 192.0.2.1"):
        spanned(HERE, {"192.0.2.1": 2, "127.0.0.1": 2}, "hosts")


def test_more_slots_than_this_host_has_are_refused():
    with pytest.raises(InputError, match="4 slots are asked of this host, which has 3 cpu slot"):
        spanned(HERE, {"127.0.0.1": 4, "192.0.2.1": 4}, "hosts")


def test_a_rank_on_this_host_is_given_the_devices_that_are_locked_and_elsewhere_deepspeed_s_own():
    environment = {"CUDA_VISIBLE_DEVICES": "2,GPU-8f3a,192.0.2.1/0,192.0.2.1/1"}
    ranks = [RankRequest(environment, f"rank{number}.log", []) for number in range(4)]
    parts = [HostPart("127.0.0.1", range(2)), HostPart("192.0.2.1", range(2, 4))]
    told = ranks_of(LaunchRequest("python", "m:f", {}, "/", ranks, 60.0), parts)
    assert [rank["devices"] for rank in told] == ["2,GPU-8f3a", "2,GPU-8f3a", None, None]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "Warning\nme@node-2: Permission denied (publickey).\n",
            "The host node-2 could not be reached or died: me@node-2: Permission denied (publickey). Log: /t/rank1.log",
        ),
        # Of a host of a cluster nothing has come back.
        ("", "The host node-2 could not be reached or died. Log: /t/rank0.log"),
    ],
)
def test_a_host_s_death_is_the_reason_and_not_what_its_peers_say_of_it(log, said):
    peer = RankFailure(type="RuntimeError", message="something broke", time=1.0)
    ranks = [RankRecord(None, peer, "", "/t/rank0.log"), RankRecord(None, None, log, "/t/rank1.log")]
    end = classify(
        ProcessesEnd(HOST, [1, -9], host="node-2", host_rank=1), ranks, 60.0, kernel_killed=False, device="cpu"
    )
    assert end.outcome is Outcome.CRASHED
    assert end.reason == said
    assert end.failed_rank == (1 if log else 0)
