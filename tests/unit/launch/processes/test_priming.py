"""What the fork server imports ahead for ranks. A name that is wrong would only make each rank slower."""

from importlib.util import find_spec

import pytest

from trial_lib.launch.processes.priming import _OF_RANKS
from trial_lib.launch.trial import ENTRY


@pytest.mark.parametrize("module", _OF_RANKS)
def test_what_is_imported_for_the_ranks_exists(module: str) -> None:
    assert find_spec(module) is not None


def test_the_entry_of_the_ranks_is_among_it() -> None:
    assert ENTRY.partition(":")[0] in _OF_RANKS
