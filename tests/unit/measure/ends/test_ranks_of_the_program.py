"""Launchers in what a program starts."""

from pathlib import Path
from typing import Any

import pytest

from trial_lib.measure.ends.own_ranks import launcher_of


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", Path("x.py")], ["torchrun", "x.py"]),
        ([b"deepspeed", "x.py"], ["deepspeed", "x.py"]),
        ("cd x && A=1 exec torchrun x.py", ["torchrun", "x.py"]),
        ("nohup accelerate launch x.py > log", ["accelerate", "launch", "x.py", ">", "log"]),
        ("git rev-parse HEAD", None),
        ("pip show deepspeed; which torchrun", None),
        ("echo 'it is", None),
        (["nvidia-smi"], None),
        ([3, None], None),
        (None, None),
    ],
)
def test_a_launcher_is_found_where_one_is_started(command: Any, launcher: list[str] | None) -> None:
    assert launcher_of(command) == launcher
