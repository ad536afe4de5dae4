"""The user's program runs as Python would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import multiprocessing, sys
from zerotune.trial_lib.rank.user_program import run_program
sys.path.insert(0, ".")
run_program({program}, [])
"""
_PROGRAM = """
import pickle
class Batch: pass
Batch.__module__ = "__mp_main__"  # as in a process that multiprocessing spawns
print(type(pickle.loads(pickle.dumps(Batch()))) is Batch)
"""


@pytest.mark.parametrize("program", [{"script": "train.py"}, {"module": "package.train"}])
def test_what_a_spawned_worker_sends_is_of_the_programs_own_classes(program: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for path in ("train.py", "package/__init__.py", "package/train.py"):
        # A spawned process names the class so; here pickle looks for it under that name as well.
        (tmp_path / path).write_text(_PROGRAM if path.endswith("train.py") else "")
    said = subprocess.run(
        [sys.executable, "-c", _RUN.format(program=program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said.stdout == "True\n", said.stderr
