"""Which shared memory is removed behind a trial: what is certainly its own, and nobody's any more."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.launch.processes.watchdog import LEFT, REMOVED, clean_up_after, note_segments_before
from zerotune.trial_lib.launch.rank_starter import ProcessesEnd
from zerotune.trial_lib.launch.trial import note_shared_memory
from zerotune.trial_lib.messages import shared_segments


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_segments, "FOLDER", folder)
    return folder


@pytest.fixture
def launch(tmp_path: Path, folder: Path) -> dict[str, Any]:
    """A launch, when there is one segment already."""
    (folder / "older").write_bytes(b"0" * 8)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TMPDIR": str(tmp_path)}
    launch: dict[str, Any] = {"ranks": [{"environment": environment}], "payload": {"scratch": str(scratch)}}
    note_segments_before(launch)
    return launch


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_what_the_trial_is_known_to_have_made_is_removed_and_the_rest_is_told_of(
    launch: dict[str, Any], folder: Path
) -> None:
    for name in ("held", "noted", "torch_77_1_0", "torch_78_1_0", "unknown"):
        (folder / name).write_bytes(b"0" * 16)
    shared_segments.note(Path(launch["payload"]["scratch"]), ["noted"])
    done = clean_up_after(launch, guard=1, held={"held", "older"}, pids={77})
    assert done == {
        REMOVED: {"held": 16, "noted": 16, "torch_77_1_0": 16},
        LEFT: {"torch_78_1_0": 16, "unknown": 16},
    }
    assert names(folder) == {"older", "torch_78_1_0", "unknown"}


def test_what_somebody_has_stays(launch: dict[str, Any], folder: Path) -> None:
    held = folder / "held"
    with held.open("wb"):
        assert clean_up_after(launch, guard=1, held={"held"}) == {REMOVED: {}, LEFT: {}}
    assert names(folder) == {"older", "held"}


def test_where_nothing_has_come_nothing_is_told(launch: dict[str, Any], folder: Path) -> None:
    (folder / "deepspeed_allreduce_buffer_0_127.0.0.1_29501_0").touch()
    assert clean_up_after(launch, guard=1, held={"older"}) == {}
    assert names(folder) == {"older", "deepspeed_allreduce_buffer_0_127.0.0.1_29501_0"}


def test_a_launch_that_nobody_has_looked_before_loses_the_buffers_of_its_rendezvous_alone(
    launch: dict[str, Any], folder: Path
) -> None:
    del launch["segments"]
    for name in ("deepspeed_allreduce_buffer_0_127.0.0.1_29500_0", "deepspeed_allreduce_buffer_0_127.0.0.1_29501_0"):
        (folder / name).touch()
    assert clean_up_after(launch, guard=1, held={"older"}) == {}
    assert names(folder) == {"older", "deepspeed_allreduce_buffer_0_127.0.0.1_29501_0"}


@pytest.mark.parametrize("sees_all", [True, False])
def test_a_segment_of_nccl_that_nobody_has_is_removed_where_its_holder_would_be_seen(
    launch: dict[str, Any], folder: Path, sees_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_segments, "are_all_holders_seen", lambda: sees_all)
    (folder / "nccl-left").write_bytes(b"0" * 16)
    with (folder / "nccl-of-others").open("wb"):
        done = clean_up_after(launch, guard=1)
    assert names(folder) == {"older", "nccl-of-others"} | (set() if sees_all else {"nccl-left"})
    # What may be somebody's is told of.
    assert done.get(LEFT, {}) == ({} if sees_all else {"nccl-left": 16})


def test_a_segment_of_nccl_that_was_there_before_stays(folder: Path, launch: dict[str, Any]) -> None:
    (folder / "nccl-older").touch()
    note_segments_before(launch)
    assert clean_up_after(launch, guard=1) == {}
    assert names(folder) == {"older", "nccl-older"}


@pytest.mark.parametrize(
    ("numbers", "sees_all"),
    [
        ({"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}, True),
        ({"pid": 1, "ipc": 2}, True),
        # A container that shares the host's memory, and not its processes.
        ({"pid": 1, "ipc": 0xEFFFFFFF}, False),
        ({}, False),
    ],
)
def test_holders_of_a_segment_are_seen_unless_they_are_beyond_a_container(
    numbers: dict[str, int], sees_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Namespaces:
        def __init__(self, name: str = "") -> None:
            self._name = name

        def __truediv__(self, name: str) -> "Namespaces":
            return Namespaces(name)

        def stat(self) -> SimpleNamespace:
            if self._name not in numbers:
                raise FileNotFoundError(self._name)
            return SimpleNamespace(st_ino=numbers[self._name])

    monkeypatch.setattr(shared_segments, "_NAMESPACES", Namespaces())
    assert shared_segments.are_all_holders_seen() == sees_all


def test_people_are_told_what_was_removed_and_what_may_be_somebody_s() -> None:
    said: list[str] = []
    shared_memory = {REMOVED: {f"psm_{number}": 2**20 for number in range(4)}, LEFT: {"other": 2**19}}
    note_shared_memory(ProcessesEnd("ranks", [0], shared_memory=shared_memory), "trial 0003", said.append)
    assert said == [
        "trial 0003: the program left 4.0 MiB of shared memory in /dev/shm (psm_0, psm_1, psm_2, ...): it was removed",
        "trial 0003: meanwhile somebody left 512 KiB of shared memory in /dev/shm (other): remove it if it is nobody's",
    ]
    note_shared_memory(ProcessesEnd("ranks", [0]), "trial 0004", said.append)
    assert len(said) == 2


def test_what_a_loader_shares_with_workers_whom_the_trial_ends_or_ranks_with_each_other_is_not_told() -> None:
    said: list[str] = []
    of_workers = {"sem.mp-0amf76qe": 32, "torch_123_456_0": 2**20, "nccl-aT3xkQ": 2**23}
    note_shared_memory(ProcessesEnd("ranks", [0], shared_memory={REMOVED: of_workers}), "trial 0005", said.append)
    assert said == []
    note_shared_memory(
        ProcessesEnd("ranks", [0], shared_memory={REMOVED: {**of_workers, "psm_1": 2**21}}), "trial 0005", said.append
    )
    assert said == ["trial 0005: the program left 2.0 MiB of shared memory in /dev/shm (psm_1): it was removed"]
