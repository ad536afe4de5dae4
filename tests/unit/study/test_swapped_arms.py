"""What a study does about the disks to which some of its arms swap."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, SwapDisk, TrialResult
from zerotune.trial_lib.search.knobs import Arm, SearchSpace
from zerotune.trial_lib.study import limits
from zerotune.trial_lib.study.limits import with_swap_disks, without_disk_room

PARAMETERS = 2**30
PROFILE = ModelProfile(
    num_params=PARAMETERS,
    trainable_num_params=PARAMETERS,
    activation_mem_per_gpu=10,
    gpu_mem=2**36,
    data_parallel_size=8,
    flops_per_sample=1e6,
)
BASE = {"bf16": {"enabled": True}, "zero_optimization": {"offload_param": {"nvme_path": "/nvme"}}}


def arm(**offload: str) -> Arm:
    """An arm of stage 3, with the place of each offload: `cpu`, or a path."""
    sections = {
        f"offload_{name}": {"device": "cpu"} if where == "cpu" else {"device": "nvme", "nvme_path": where}
        for name, where in offload.items()
    }
    return Arm({"zero_optimization": {"stage": 3, **sections}})


def profiled(*disks: SwapDisk) -> TrialResult:
    return TrialResult(
        trial_id="t", number=0, purpose=Purpose.PROFILE, outcome=Outcome.COMPLETED, config_hash="", profile=PROFILE,
        program=ProgramProfile(), swap_disks=list(disks),
    )  # fmt: skip


def free(gib: float, *paths: str) -> SwapDisk:
    return SwapDisk(paths=list(paths), free=round(gib * 2**30))


ARMS = [arm(), arm(optimizer="cpu"), arm(param="/nvme"), arm(optimizer="/nvme", param="/nvme")]


def left(*disks: SwapDisk, arms: list[Arm] = ARMS, **told: Any) -> tuple[int, list[str]]:
    """The number of arms that stay, and what is said."""
    space, said = without_disk_room(SearchSpace.of_arms(arms), BASE, profiled(*disks), slots=8, **told)
    return len(space.arms), said


@pytest.mark.parametrize(("free_gib", "stay"), [(21, 4), (19, 3), (2.3, 3), (2.2, 2)])
def test_arms_that_would_fill_the_disk_are_not_tried(free_gib: float, stay: int) -> None:
    # 2 bytes of a parameter, and 16 of its states and its gradient. A tenth stays free.
    found, said = left(free(free_gib, "/nvme"))
    assert found == stay
    assert len(said) == (stay < 4)
    if stay == 3:
        assert said[0].startswith("Not tried, because they would write 18.0 GiB below ")
    if stay == 2:
        assert said[0].startswith("Not tried, because they would write 2.0 GiB and 18.0 GiB below ")


def test_what_is_not_known_leaves_all_arms() -> None:
    assert left() == (4, [])
    assert left(free(0, "/elsewhere")) == (4, [])


def test_an_arm_that_has_run_is_kept() -> None:
    found, said = left(free(0, "/nvme"), has_run=lambda arm: arm is ARMS[3])
    assert found == 3
    assert said[0].endswith(f": {ARMS[2].label}.")


def test_if_no_arm_would_be_left_all_are_tried_and_the_log_says_so() -> None:
    assert left(free(0, "/nvme"), arms=ARMS[2:]) == (
        2,
        ["No arm seems to have room on the disk below /nvme. So all of them are tried."],
    )


def test_each_section_fills_the_disk_of_its_own_path() -> None:
    two = [arm(), arm(optimizer="/states", param="/nvme")]
    assert left(free(19, "/states"), free(3, "/nvme"), arms=two) == (2, [])
    assert left(free(17, "/states"), free(3, "/nvme"), arms=two)[0] == 1
    assert left(free(19, "/states"), free(2, "/nvme"), arms=two)[0] == 1
    # They are one disk.
    assert left(free(19, "/states", "/nvme"), arms=two)[0] == 1
    assert left(free(21, "/states", "/nvme"), arms=two)[0] == 2


def recorded(folder: Path, config: dict[str, Any], hosts: str = "", **arguments: Any) -> list[SwapDisk]:
    """The disks that the record of a profile trial has."""
    (folder / "train.py").write_text("")
    file = folder / "experiment.yaml"
    file.write_text(
        "{name: t, entrypoint: deepspeed train.py, max_restarts: 0, "
        f"hyperparameters: {{deepspeed_config: {json.dumps(config)}}}{hosts}}}"
    )
    setup = setup_of(read_experiment(file, folder), folder / "study", **arguments)
    return with_swap_disks(profiled(), setup).swap_disks


def swapping(optimizer: Path, param: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(optimizer)},
            "offload_param": {"device": "nvme", "nvme_path": str(param)},
        },
    }


def test_the_free_room_is_recorded_with_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    one, other = tmp_path / "not" / "there" / "yet", tmp_path / "other"
    assert recorded(tmp_path, swapping(one, other)) == [SwapDisk(paths=[str(one), str(other)], free=7)]
    assert recorded(tmp_path, {"train_micro_batch_size_per_gpu": 1}) == []
    monkeypatch.setattr(limits, "_looked_at", lambda path: (len(path.parts), 8))
    assert recorded(tmp_path, swapping(one, other)) == [
        SwapDisk(paths=[str(one)], free=8),
        SwapDisk(paths=[str(other)], free=8),
    ]


def test_the_disks_of_other_hosts_are_not_known(tmp_path: Path) -> None:
    config = swapping(tmp_path, tmp_path)
    assert recorded(tmp_path, config, ray_address="auto") == []
    hosts = ", resources: {slots_per_trial: 4, hosts: {one: 2, two: 2}}"
    assert recorded(tmp_path, config, hosts=hosts) == []


def test_a_disk_that_cannot_be_looked_at_ends_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> SimpleNamespace:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert recorded(tmp_path, swapping(tmp_path, tmp_path)) == []
