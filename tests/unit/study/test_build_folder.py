"""Where ranks build DeepSpeed's ops: a folder for each environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes import bootstrap
from zerotune.trial_lib.study.program import build_root, with_build_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose cache cannot be written, by nobody: it is no folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return home


def test_each_environment_has_a_folder_beside_torch_s_own(home: Path) -> None:
    (home / ".cache").unlink()
    environment = {"HOME": str(home), "PATH": ""}
    usual = build_root(environment)
    assert usual == home / ".cache" / "torch_extensions"

    def folder(interpreter: str = "a/bin/python", **variables: str) -> Path:
        found = build_root(with_build_folder({**environment, **variables}, interpreter))
        assert found.parent == usual
        assert found.name.startswith("zerotune-")
        return found

    assert folder() == folder(CUDA_VISIBLE_DEVICES="1")
    others = [folder("b/bin/python"), folder(CXX="clang++"), folder(DS_ACCELERATOR="cpu")]
    assert len({folder(), *others}) == 4
    assert not (home / ".cache").exists()


def test_another_version_of_ninja_or_of_torch_has_another_folder(home: Path) -> None:
    (home / ".cache").unlink()
    folders = set()
    for version in ("1.11", "1.13"):
        ninja = home / version / "ninja"
        ninja.parent.mkdir()
        ninja.touch(mode=0o755)
        folders.add(build_root(with_build_folder({"HOME": str(home), "PATH": str(ninja.parent)}, "bin/python")))
    for version in ("2.12", "2.13"):
        (home / "lib" / "python3.11" / "site-packages" / f"torch-{version}.dist-info").mkdir(parents=True)
        folders.add(build_root(with_build_folder({"HOME": str(home), "PATH": ""}, str(home / "bin" / "python"))))
    # Debian's, those of its pip, and those of a user.
    for folder in ("lib/python3/dist", "local/lib/python3.11/dist", ".local/lib/python3.11/site"):
        (home / f"{folder}-packages" / "torch-2.13.dist-info").mkdir(parents=True)
        folders.add(build_root(with_build_folder({"HOME": str(home), "PATH": ""}, str(home / "bin" / "python"))))
    assert len(folders) == 7


def test_where_torch_s_cannot_be_written_they_are_in_zerotune_s_data_folder(home: Path) -> None:
    environments = [with_build_folder({"HOME": str(home)}, f"{name}/bin/python") for name in "ab"]
    folders = {build_root(environment) for environment in environments}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {home / ".local" / "share" / "zerotune" / "torch_extensions"}


def test_a_folder_that_the_user_names_stays_named(home: Path) -> None:
    environment = {"HOME": str(home), "TORCH_EXTENSIONS_DIR": "/nowhere"}
    assert with_build_folder(environment, "python") == environment


def test_where_neither_can_be_written_the_environment_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / ".cache" / "data"))
    assert with_build_folder({"HOME": str(home)}, "python") == {"HOME": str(home)}


@pytest.mark.long
def test_an_op_whose_folder_cannot_be_written_is_told_of_in_a_sentence(home: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(home / ".cache" / "named")}
    command = bootstrap.command(sys.executable, "zerotune.trial_lib.launch.processes.jit_builds", "ShareMemCommBuilder")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("DeepSpeed's ")]
    assert len(said) == 1
    assert said[0].startswith("DeepSpeed's deepspeed_shm_comm cannot be built: ")
    assert "named" in said[0]
    assert "Traceback" not in ended.stderr
