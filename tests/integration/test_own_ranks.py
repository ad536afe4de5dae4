"""A rank whose program starts ranks of its own, in a way that its code does not show: the trial ends at once."""

from pathlib import Path

import pytest

from trial_lib.records.result import Outcome

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
