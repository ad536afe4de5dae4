"""What a study does about the disk to which some of its arms swap."""

import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from trial_lib.records.candidate import Purpose
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.space.knobs import Arm, SearchSpace
from trial_lib.study.opening.disk_room import without_disk_room

PARAMETERS = 2**30
PROFILE = ModelProfile(
    num_params=PARAMETERS,
    trainable_num_params=PARAMETERS,
    activation_mem_per_gpu=10,
    gpu_mem=2**36,
    data_parallel_size=8,
    flops_per_sample=1e6,
)


def space_of(folder: Path) -> SearchSpace:
    def arm(**offload: str) -> Arm:
        sections = {f"offload_{name}": {"device": where, "nvme_path": str(folder)} for name, where in offload.items()}
        return Arm({"zero_optimization": {"stage": 3, **sections}})

    return SearchSpace.of_arms([arm(), arm(optimizer="cpu"), arm(param="nvme"), arm(optimizer="nvme", param="nvme")])


def left(folder: Path, host: str = platform.node()) -> tuple[int, list[str]]:
    """The number of arms that stay, of four, and what is said."""
    base = {"bf16": {"enabled": True}, "zero_optimization": {"offload_param": {"nvme_path": str(folder)}}}
    profiled = TrialResult(
        trial_id="t", number=0, purpose=Purpose.PROFILE, outcome=Outcome.COMPLETED, config_hash="", profile=PROFILE,
        host=host,
    )  # fmt: skip
    space, said = without_disk_room(space_of(folder), base, profiled, slots=8)
    return len(space.arms), said


@pytest.mark.parametrize(("free_gib", "stay"), [(21, 4), (19, 3), (2.3, 3), (2.2, 2)])
def test_arms_that_would_fill_the_disk_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, stay: int
) -> None:
    # 2 bytes of a parameter, and 16 of its states and its gradient. A tenth stays free.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_gib * 2**30))
    found, said = left(tmp_path / "not" / "there" / "yet")
    assert found == stay
    assert len(said) == (stay < 4)
    if stay == 3:
        assert said[0].startswith("Not tried, because they would write 18.0 GiB below ")
    if stay == 2:
        assert said[0].startswith("Not tried, because they would write 2.0 GiB and 18.0 GiB below ")


def test_the_disk_of_another_host_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0.0))
    assert left(tmp_path, host="elsewhere") == (4, [])
    assert left(tmp_path)[0] == 2
