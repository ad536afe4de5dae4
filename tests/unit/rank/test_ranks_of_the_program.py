"""Launchers in what a program starts, and the process groups that it joins."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank import early_finish
from zerotune.trial_lib.rank.early_finish import launcher_of


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


def test_what_is_to_surround_the_joining_of_a_process_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: seen.append("joins"))

    @contextlib.contextmanager
    def joining() -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    early_finish._watch_groups(lambda reason: None, 1, joining)
    torch.distributed.init_process_group("gloo")
    assert seen == ["before", "joins", "after"]
