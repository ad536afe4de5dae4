"""What a program prepares is there for all its ranks and for later trials; what its training writes goes with it."""

import pytest
from conftest import PREPARED_BY

from zerotune.trial_lib.messages.orders import StepWindow

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)


def found(folder):
    """Returns what stands in a folder; of each file when something about it changed."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.lstat().st_ctime_ns
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "way_of_files", [pytest.param("layered", marks=pytest.mark.long), "intercepted"], indirect=True
)
def test_what_one_rank_prepares_by_whatever_function_is_there_for_all_and_for_the_next_trial(
    trials, prepares, way_of_files
):
    results = found(prepares / "results")
    # What writes past Python's own functions is kept from older files by a layer alone.
    native = f"--native_results={int(way_of_files == 'layered')}"
    for is_first in (True, False):
        result = trials.run("prepares.py", native, model_dir=prepares, window=SHORT, slots=2)
        log = trials.log(result)
        assert result.outcome == "completed", (result.reason, log)
        assert result.files == way_of_files
        assert all(f"prepared by {way}" in log for way in PREPARED_BY) == is_first
        assert found(prepares / "results") == results
        assert len(list((prepares / "data").rglob("shard*.bin"))) == 3 * len(PREPARED_BY)
