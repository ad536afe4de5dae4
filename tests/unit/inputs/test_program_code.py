"""Which programs may start their ranks themselves, and what they import first, told by their code."""

from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.program_code import leading_imports, may_start_ranks, mentions

STARTS = {
    "torchrun in a process": 'import subprocess\nsubprocess.run(["torchrun", __file__])',
    "torchrun in a shell": 'import os\nos.system(f"torchrun --nproc_per_node {2} x.py")',
    "deepspeed in a process": 'from subprocess import Popen\nPopen(["deepspeed", "x.py"])',
    "torchrun called": "from torch.distributed.run import main\nmain()",
    "torchrun imported from its package": "from torch.distributed import run\nrun.main()",
    "accelerate called": "from accelerate.commands.launch import launch_command",
    "spawn": "import torch.multiprocessing as mp\nmp.spawn(print)",
    "exec": 'import os\nos.execvp("python", ["python", "x.py"])',
    "a notebook's launcher": "from accelerate import notebook_launcher\nnotebook_launcher(print)",
    "Lightning": "import lightning as L",
    "its older name": "from pytorch_lightning import Trainer",
}
TRAINS_ITSELF = {
    "an explanation": '"""Start me by torchrun --nproc_per_node 2."""\nimport subprocess\nimport deepspeed',
    "a comment": "import subprocess  # torchrun\nimport deepspeed",
    "a revision": 'import subprocess\nsubprocess.run(["git", "rev-parse", "HEAD"])',
    "a key": 'config = {"deepspeed": "ds.json"}',
    "workers": "import multiprocessing\nmultiprocessing.Pool(2)",
    "no Python": "train --deepspeed",
}


@pytest.mark.parametrize("code", STARTS.values(), ids=STARTS)
def test_a_program_that_may_start_ranks_is_known(tmp_path: Path, code: str) -> None:
    (tmp_path / "train.py").write_text(code)
    assert may_start_ranks(tmp_path / "train.py", [tmp_path])


@pytest.mark.parametrize("code", TRAINS_ITSELF.values(), ids=TRAINS_ITSELF)
def test_a_program_that_trains_by_itself_is_not_followed(tmp_path: Path, code: str) -> None:
    (tmp_path / "train.py").write_text(code)
    assert not may_start_ranks(tmp_path / "train.py", [tmp_path])


@pytest.mark.parametrize("how", ["import kit.launch", "from kit import launch", "from kit.launch import go"])
def test_its_own_modules_are_looked_at_too(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(how)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("")
    (tmp_path / "kit" / "launch.py").write_text("from . import deeper\nfrom .. import train")
    (tmp_path / "kit" / "deeper.py").write_text(STARTS["torchrun in a process"])
    assert may_start_ranks(tmp_path / "train.py", [tmp_path])
    (tmp_path / "kit" / "deeper.py").unlink()
    assert not may_start_ranks(tmp_path / "train.py", [tmp_path])


def test_a_program_that_names_deepspeed_is_known(tmp_path: Path) -> None:
    train, prepare = tmp_path / "train.py", tmp_path / "prepare.py"
    train.write_text('from transformers import TrainingArguments\nTrainingArguments("out", deepspeed=None)')
    prepare.write_text('"""Prepares the data for deepspeed."""\nfrom transformers import AutoTokenizer')
    assert mentions(train, [tmp_path], "deepspeed")
    assert not mentions(prepare, [tmp_path], "deepspeed")


LEADS = {
    "up to the program's own code": (
        '"""Trains."""\nfrom __future__ import annotations\nimport os, sys\nimport torch as t\n'
        "from transformers import (\n    AutoModel,  # the model\n    AutoTokenizer as Words,\n)\n"
        "os.environ['HF_HUB_OFFLINE'] = '1'\nimport datasets",
        ["import torch as t", "from transformers import AutoModel, AutoTokenizer as Words"],
    ),
    "up to a module of its own": ("import torch\nimport mine\nimport datasets", ["import torch"]),
    "up to a package of its own": ("import torch\nfrom package import load", ["import torch"]),
    # An installed package comes before a folder without an `__init__.py`, such as that of a tracker's runs.
    "also with a folder of the same name": ("import wandb\nimport torch", ["import wandb", "import torch"]),
    "up to a relative import": ("import torch\nfrom . import mine\nimport peft", ["import torch"]),
    "up to a condition": ("import torch\nif torch:\n    import peft", ["import torch"]),
    "none without imports": ("print()", []),
    "none of what is no Python": ("import torch\ndef train", []),
}


@pytest.mark.parametrize(("code", "leading"), LEADS.values(), ids=LEADS)
def test_the_imports_at_the_head_of_a_program_are_known(tmp_path: Path, code: str, leading: list[str]) -> None:
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "wandb").mkdir()
    assert leading_imports(tmp_path / "train.py", [tmp_path]) == leading
