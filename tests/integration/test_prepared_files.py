"""What a program prepares is there for all its ranks and for later trials; what its training writes goes with it."""

import shutil

import pytest
from conftest import PROGRAMS

from trial_lib.experiment.window import StepWindow

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
WAYS = ("torch", "numpy", "numpy, raw", "memory map", "open", "rename", "link")
NATIVE_WAYS = ("database", "arrow", "child", "copy")


@pytest.fixture
def program(tmp_path):
    """The user's folder, with results that were there before the study; an empty file is an empty database."""
    folder = tmp_path / "program"
    folder.mkdir()
    for name in ("prepares.py", "toy.py"):
        shutil.copy(PROGRAMS / name, folder)
    for way in (*WAYS, *NATIVE_WAYS):
        (folder / "results" / way).mkdir(parents=True)
        (folder / "results" / way / "old.bin").touch()
    return folder


def found(folder):
    """Returns what stands in a folder; of each file when something about it changed."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.lstat().st_ctime_ns
        for path in sorted(folder.rglob("*"))
    }


def test_what_one_rank_prepares_by_whatever_function_is_there_for_all_and_for_the_next_trial(trials, program):
    results = found(program / "results")
    for is_first in (True, False):
        result = trials.run("prepares.py", "--native_results=0", model_dir=program, window=SHORT, slots=2)
        log = trials.log(result)
        assert result.outcome == "completed", (result.reason, log)
        assert all(f"prepared by {way}" in log for way in (*WAYS, *NATIVE_WAYS)) == is_first
        assert found(program / "results") == results
        assert len(list((program / "data").rglob("shard*.bin"))) == 3 * len((*WAYS, *NATIVE_WAYS))
