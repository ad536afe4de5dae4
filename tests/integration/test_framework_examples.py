"""The examples of frameworks are tuned as their README has them typed. That of Lightning: test_lightning.py."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PROGRAMS
from study_fixtures import Zerotune

pytestmark = pytest.mark.alone

EXAMPLES = PROGRAMS.parents[1] / "examples"
FRAMEWORKS = Path(os.environ.get("ZEROTUNE_FRAMEWORKS", EXAMPLES.parent / "build" / "frameworks"))


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    return Zerotune(tmp_path, home, slots=2)


def typed_in_readme(folder: str) -> list[str]:
    """The words behind `--` in the line that begins in this folder."""
    text = (EXAMPLES / "README.md").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith(f"cd examples/{folder} "))
    return shlex.split(line.partition(" -- ")[2])


def tune(zerotune: Zerotune, folder: str, tmp_path: Path, python: Path | None = None) -> dict[str, object]:
    zerotune.folder = tmp_path / folder
    shutil.copytree(EXAMPLES / folder, zerotune.folder)
    if python is not None:
        subprocess.run([python, "prepare.py"], cwd=zerotune.folder, check=True, capture_output=True)
    ended = zerotune.run("tune", "--max-trials", "3", "--json", "--", *typed_in_readme(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, object] = json.loads(ended.stdout)
    return document


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_trainers_example_is_tuned(tmp_path: Path, zerotune: Zerotune) -> None:
    document = tune(zerotune, "hugging_face", tmp_path)
    assert document["best_ds_config"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_trls_example_is_tuned_and_the_answer_is_in_its_files(tmp_path: Path, zerotune: Zerotune) -> None:
    root = FRAMEWORKS / "trl"
    if not (root / "bin" / "python").exists():
        pytest.skip(f"trl is not installed in {root} (make frameworks)")
    zerotune.environment |= {
        "PATH": f"{root / 'bin'}:{zerotune.environment['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(root / "extensions"),
    }
    document = tune(zerotune, "trl", tmp_path, root / "bin" / "python")
    assert "per_device_train_batch_size" in str(document["diff"])
