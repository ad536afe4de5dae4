"""The environment that a rank is started in."""

from pathlib import Path

from trial_lib.launch.hardware import Host
from trial_lib.launch.program import Program, rank_requests

PROGRAM = Program("python", {"script": "train.py"}, [], False, Path("/model"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})


def test_ranks_number_the_gpus_as_the_slots_are_numbered() -> None:
    (rank,) = rank_requests(PROGRAM, Host("cuda", ["0", "1"], 1), ["1"], 2900, [Path("rank0.log")])
    assert rank.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert rank.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
