"""Where ranks build DeepSpeed's ops: torch's own folder, or ZeroTune's where that cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trial_lib.launch.processes import bootstrap
from trial_lib.study.opening.build_folder import build_root, with_build_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose cache cannot be written, by nobody: it is no folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return home


def test_where_torch_s_own_folder_can_be_written_the_environment_stays(home: Path) -> None:
    (home / ".cache").unlink()
    environment = {"HOME": str(home)}
    assert with_build_folder(environment, "python") == environment
    assert build_root(environment) == home / ".cache" / "torch_extensions"
    assert not (home / ".cache").exists()


def test_where_it_cannot_zerotune_s_own_is_named_one_for_each_interpreter(home: Path) -> None:
    environments = [with_build_folder({"HOME": str(home)}, interpreter) for interpreter in ("a/python", "b/python")]
    folders = {build_root(environment) for environment in environments}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {home / ".local" / "share" / "zerotune" / "torch_extensions"}


def test_a_folder_that_the_user_names_stays_named(home: Path) -> None:
    environment = {"HOME": str(home), "TORCH_EXTENSIONS_DIR": "/nowhere"}
    assert with_build_folder(environment, "python") == environment


def test_where_neither_can_be_written_the_environment_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / ".cache" / "data"))
    assert with_build_folder({"HOME": str(home)}, "python") == {"HOME": str(home)}


def test_an_op_whose_folder_cannot_be_written_is_told_of_in_a_sentence(home: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(home / ".cache" / "named")}
    command = bootstrap.command(sys.executable, "trial_lib.launch.processes.jit_builds", "ShareMemCommBuilder")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("DeepSpeed's ")]
    assert len(said) == 1
    assert said[0].startswith("DeepSpeed's deepspeed_shm_comm cannot be built: ")
    assert "named" in said[0]
    assert "Traceback" not in ended.stderr
