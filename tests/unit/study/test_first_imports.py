"""The imports by which a user's code begins, as a fork server may run them ahead."""

import os
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.study.program import leading_imports_of
from zerotune.trial_lib.study.typed_command import read_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program that imports torch, and then `shadowing`, which is elsewhere."""
    (tmp_path / "train.py").write_text("import torch\nimport shadowing\n")
    return tmp_path


def first(folder: Path, command: str, **environment: str) -> list[str]:
    experiment = read_command(command.split(), {}, folder, Host("cpu", ["0"], 2**30))
    return leading_imports_of(experiment, environment)


@pytest.mark.parametrize("command", ["deepspeed train.py", "python -m train"])
def test_those_of_the_script_or_module_lead(folder: Path, command: str) -> None:
    assert first(folder, command) == ["import torch", "import shadowing"]


def test_they_end_before_a_module_of_pythonpath(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    others = tmp_path_factory.mktemp("others")
    (others / "shadowing.py").touch()
    assert first(folder, "deepspeed train.py", PYTHONPATH=f"{os.pathsep}{others}") == ["import torch"]


def test_they_end_before_a_module_beside_the_file_that_a_link_names(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    real = tmp_path_factory.mktemp("real")
    (folder / "train.py").rename(real / "train.py")
    (real / "shadowing.py").touch()
    (folder / "train.py").symlink_to(real / "train.py")
    assert first(folder, "deepspeed train.py") == ["import torch"]


def test_a_module_within_a_package_has_none_because_its_package_comes_first(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n")
    (folder / "train.py").rename(folder / "mine" / "train.py")
    assert first(folder, "python -m mine.train") == []
