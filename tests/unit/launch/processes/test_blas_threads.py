"""A fork of a process whose OpenBLAS has one thread gets as many as a fresh interpreter has."""

import os
import subprocess
import sys

import pytest

from zerotune.trial_lib.launch.processes.rank_process import NUMBER

# As the fork server loads it, and then as one of its ranks.
RANK = """
import os, numpy, threadpoolctl
from zerotune.trial_lib.launch.processes import rank_process as blas_threads
before = len(os.listdir("/proc/self/task"))
blas_threads.start_threads(os.environ | {variables})
after = len(os.listdir("/proc/self/task"))
pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["internal_api"] == "openblas"]
print(before, after, *pools)
"""


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({NUMBER: "3", "OMP_NUM_THREADS": "2"}, 3),
        ({NUMBER: "", "OMP_NUM_THREADS": "2"}, 2),
        ({NUMBER: "0", "OMP_NUM_THREADS": "1"}, 1),
        ({NUMBER: "", "OMP_NUM_THREADS": "many"}, len(os.sched_getaffinity(0))),
    ],
)
def test_openblas_starts_the_threads_that_the_rank_s_own_environment_says(
    variables: dict[str, str], number: int
) -> None:
    program = RANK.format(variables=variables)
    environment = os.environ | {NUMBER: "1"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    before, after, *pools = map(int, said.stdout.split())
    assert pools
    assert set(pools) == {number}
    assert (before, after) == (1, 1 + (number - 1) * len(pools))
