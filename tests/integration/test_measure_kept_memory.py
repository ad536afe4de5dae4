"""What the C library does with memory that a step frees."""

import subprocess
import sys

import pytest

# Of each step the pages that the process is given anew, 4 KiB each; a step uses and frees 12 MiB.
STEPS = """
import resource, sys
from zerotune.trial_lib.rank.device import CpuDevice

if sys.argv[1:]:
    CpuDevice().keep_what_is_freed()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(4 << 20) for _ in range(3)]
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_of_steps(*arguments):
    run = subprocess.run([sys.executable, "-c", STEPS, *arguments], capture_output=True, text=True, check=True)
    return [int(pages) for pages in run.stdout.split()]


@pytest.mark.long
def test_a_rank_keeps_what_its_steps_free_instead_of_being_given_it_anew_each_time():
    assert min(pages_of_steps()) > 500
    assert max(pages_of_steps("keep")[1:]) < 100
