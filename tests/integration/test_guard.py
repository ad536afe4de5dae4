"""What the guard of a trial does behind its ranks, with ranks that import next to nothing."""

import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd, RankRequest
from zerotune.trial_lib.launch.starters import ColdStarter, rank_environment
from zerotune.trial_lib.messages import shared_segments

SHM = Path("/dev/shm")


class Guarded:
    """Runs programs as the only rank of a trial."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.log = folder / "rank0.log"

    def run(self, program: str, deadline_s: float = 30.0, **payload: Any) -> ProcessesEnd:
        """Runs a function `run(payload, rank)` to its end."""
        (self._folder / "guarded_program.py").write_text(textwrap.dedent(program))
        environment = rank_environment()
        environment |= {"PYTHONPATH": str(self._folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        starter = ColdStarter(sys.executable, [], environment, print)
        scratch = self._folder / "scratch"
        scratch.mkdir()
        request = LaunchRequest(
            interpreter=sys.executable,
            entry="guarded_program:run",
            payload={"scratch": str(scratch), **payload},
            cwd=str(self._folder),
            ranks=[RankRequest(environment, str(self.log), [])],
            deadline_s=deadline_s,
        )
        try:
            return starter.launch(request).wait()
        finally:
            starter.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


def test_what_ranks_leave_of_nccl_that_are_killed_while_they_connect_is_gone(guarded: Guarded) -> None:
    name = f"nccl-test-{uuid.uuid4().hex[:8]}"
    left, held = SHM / name, SHM / f"{name}-held"
    try:
        with held.open("wb"):
            ending = guarded.run(
                """
                import mmap, os, signal
                def run(payload, rank):
                    with open(payload["name"], "w+b") as file:
                        file.truncate(mmap.PAGESIZE)
                        mapped = mmap.mmap(file.fileno(), 0)
                    os.kill(os.getpid(), signal.SIGKILL)
                """,
                name=str(left),
            )
            assert ending.statuses == [-9], guarded.log.read_text()
            assert left.exists() == (not shared_segments.are_all_holders_seen())
            # It was there before.
            assert held.exists()
    finally:
        left.unlink(missing_ok=True)
        held.unlink()


@pytest.mark.alone
@pytest.mark.parametrize(("what", "ended_by"), [("builds", "ranks"), ("trains", "deadline")])
def test_a_deadline_passes_over_what_ranks_build(guarded: Guarded, what: str, ended_by: str) -> None:
    ending = guarded.run(
        """
        import contextlib, os, time
        from pathlib import Path
        from zerotune.trial_lib.messages import build_times
        def run(payload, rank):
            building = build_times.noted(Path(payload["scratch"]))
            with building if payload["what"] == "builds" else contextlib.nullcontext():
                time.sleep(2.5)
            os._exit(0)
        """,
        deadline_s=1.5,
        what=what,
    )
    assert ending.ended_by == ended_by, guarded.log.read_text()


def test_what_a_killed_trial_has_swapped_to_nvme_is_gone_and_what_others_have_there_stays(
    guarded: Guarded, tmp_path: Path
) -> None:
    nvme = tmp_path / "nvme"
    of_a_training = nvme / "zero_stage_3" / "float16params" / "rank0" / "0_param.tensor.swp"
    of_a_training.parent.mkdir(parents=True)
    of_a_training.write_bytes(b"0" * 64)
    ending = guarded.run(
        """
        import os, signal
        from pathlib import Path
        from zerotune.trial_lib.messages import folders as swap_folders
        def run(payload, rank):
            scratch = Path(payload["scratch"])
            own = swap_folders.own_folder(Path(payload["nvme"]), scratch)
            swap_folders.note(scratch, own)
            # What no trial has made, whatever the notes say.
            swap_folders.note(scratch, own.parent)
            (own / "zero_stage_3").mkdir(parents=True)
            (own / "zero_stage_3" / "0_param.tensor.swp").write_bytes(b"1" * 64)
            print(own, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        nvme=str(nvme),
    )
    assert ending.statuses == [-9]
    own = Path(guarded.log.read_text().strip())
    assert own.parent == nvme
    assert not own.exists()
    assert of_a_training.read_bytes() == b"0" * 64
