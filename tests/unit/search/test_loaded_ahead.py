"""Devices wait while a search imports. So it imports all that it needs before its first trial."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from case_fixtures import quick_first

from zerotune.trial_lib.search.methods import METHODS

SEARCH = """
import sys

from simulated_model import drive, ran, search

method = sys.argv[1]
tuner = search(method, max_trials=14)
tuner.tell(tuner.ask(), ran())
loaded = set(sys.modules)
drive(tuner, lambda candidate: ran(candidate.micro_batch_size))
print(*sorted(name for name in sys.modules.keys() - loaded if sys.modules[name].__spec__ is not None))
"""


@pytest.mark.parametrize("method", quick_first(2, sorted(METHODS)))
def test_a_search_imports_nothing_further_between_trials(method: str) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here.parents[2], here)))
    command = [sys.executable, "-c", SEARCH, method]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
