"""A rank whose program starts ranks of its own, in a way that its code does not show, or names where ranks meet."""

import socket
from pathlib import Path

import pytest
from conftest import PROGRAMS

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome

LAUNCHES = {
    "a launcher": (
        "import os, subprocess\nsubprocess.run(['torchrun', 'x.py'], env={**os.environ, 'A': '1'})",
        "starts `A=1 torchrun x.py`, but ZeroTune starts the ranks itself. Type `zerotune tune -- A=1 torchrun x.py`",
    ),
    "a launcher in a shell": ("import os\nos.system('cd . && torchrun x.py')", "starts `torchrun x.py`"),
    "a launcher in its place": ("import os\nos.execvp('torchrun', ['torchrun', 'x.py'])", "starts `torchrun x.py`"),
    "workers": ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=3)", "starts 3 ranks within Python"),
    "a larger group": (
        "import os, torch.distributed as dist\nos.environ['WORLD_SIZE'] = '2'\ndist.init_process_group('gloo')",
        "joins a process group of 2 ranks, but only 1 was started. Type `zerotune tune -- torchrun --nproc_per_node 2",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("a launcher", "a larger group") else pytest.mark.long)
        for kind in LAUNCHES
    ],
)
def test_ranks_of_its_own_end_a_trial_at_once(trials, tmp_path: Path, kind: str) -> None:
    code, said = LAUNCHES[kind]
    (tmp_path / "train.py").write_text(code)
    result = trials.run("train.py", model_dir=tmp_path, deadline_s=60)
    assert result.outcome is Outcome.INVALID
    assert said in result.reason


MEETS = {
    "a variable": "import os\nos.environ['MASTER_PORT'] = '{port}'",
    "an address": "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=0, world_size=1)",
    "a file": "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://{file}', rank=0, world_size=1)",
}


@pytest.mark.parametrize("way", MEETS)
def test_a_port_in_the_code_is_replaced_by_the_trial_s_own(trials, tmp_path: Path, way: str) -> None:
    """Another trial may run on the host."""
    occupied = tmp_path / "occupied"
    occupied.write_text("another group")
    with socket.create_server(("127.0.0.1", 0)) as other:
        meets = MEETS[way].format(port=other.getsockname()[1], file=occupied)
        (tmp_path / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
        (tmp_path / "train.py").write_text(f"{meets}\n{(PROGRAMS / 'plain.py').read_text()}")
        result = trials.run("train.py", model_dir=tmp_path, window=StepWindow(1, 3, max_steps=2))
    assert result.outcome is Outcome.COMPLETED, result.reason


@pytest.mark.long
def test_workers_of_one_rank_of_several_may_be_started(trials, tmp_path: Path) -> None:
    code = (
        "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=1); raise KeyError"
    )
    (tmp_path / "train.py").write_text(code)
    result = trials.run("train.py", model_dir=tmp_path, deadline_s=60, slots=2)
    assert result.outcome is Outcome.CRASHED
    assert "KeyError" in result.reason


def test_another_process_may_be_started(trials, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import subprocess\nsubprocess.run(['true'], check=True)\nraise KeyError('end')")
    result = trials.run("train.py", model_dir=tmp_path, deadline_s=60)
    assert result.outcome is Outcome.CRASHED
    assert "KeyError: 'end'" in result.reason
