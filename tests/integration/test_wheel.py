"""The wheel: it holds all that the repository's packages do, and is enough where only its dependencies are installed.

The environment is made of links to the packages of this one, so that nothing is downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from report_fixtures import STUDY_ID, recorded_study
from study_fixtures import TINY

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "trial_lib", "deployments")
# For people, in the repository.
NOT_IN_THE_WHEEL = ("deployments/Dockerfile", "deployments/README.md", "deployments/ray", "deployments/slurm")
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: what an earlier build left in the repository would hide a file that is missing."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, source], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and of all other packages only those that it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required_by_zerotune(wheel):
        link(name, packages)
    return folder / "bin"


def required_by_zerotune(wheel: Path) -> set[str]:
    """The names of all packages that pip would install with the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    wanted = [(line, frozenset[str]()) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        line, extras = wanted.pop()
        requirement = Requirement(line)
        asked = (requirement.name.lower(), frozenset(requirement.extras))
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        if applies and asked not in seen:
            seen.add(asked)
            wanted += [(line, asked[1]) for line in distribution(requirement.name).requires or []]
    return {name for name, _ in seen}


def link(name: str, packages: Path) -> None:
    """Links the modules of one of this environment's packages into another's folder of packages."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))))


def run(command: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment |= {
        "XDG_DATA_HOME": str(folder / "data"),
        # The paths of an op's headers are others here, and with them the op: the user's own stays.
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "PATH": f"{command.parent}{os.pathsep}{environment['PATH']}",
        "COLUMNS": "120",
    }
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return subprocess.run(
        [command, *arguments], cwd=work, env=environment, stdin=subprocess.DEVNULL, text=True, capture_output=True
    )


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()]
    names = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    expected = {name for name in names if not name.startswith(NOT_IN_THE_WHEEL)}
    assert {"trial_lib/py.typed", "deployments/prefect.yaml"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_its_command_runs_where_there_is_no_repository(installed: Path, tmp_path: Path) -> None:
    command = installed / "zerotune"
    version = run(command, "--version", folder=tmp_path)
    assert version.stdout.strip().endswith(distribution("zerotune").version), version.stderr
    for arguments in ([], ["adaptive"], ["tune"], ["up"]):
        helped = run(command, *arguments, "--help", folder=tmp_path)
        assert (helped.returncode, helped.stderr) == (0, "")
        assert "Usage: zerotune" in helped.stdout
    where = "import deployments, flows, tasks, trial_lib; print(*flows.__path__, *trial_lib.__path__)"
    imported = run(installed / "python", "-c", where, folder=tmp_path)
    packages = installed.parent
    assert all(Path(path).is_relative_to(packages) for path in imported.stdout.split()), imported.stdout
    assert len(imported.stdout.split()) == 2, imported.stderr


def test_it_reads_a_study_and_draws_its_report(installed: Path, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path / "work")
    shown = run(installed / "zerotune", "show", STUDY_ID, "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["status"] == "completed", shown.stderr
    code = "import pathlib, sys; from trial_lib.report.html_report import write_report as write; "
    code += "from trial_lib.records.folders import StudyPaths; write(StudyPaths(pathlib.Path(sys.argv[1])))"
    paths.report.unlink(missing_ok=True)
    drawn = run(installed / "python", "-c", code, str(paths.root), folder=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert "</html>" in paths.report.read_text()


@pytest.mark.long
def test_the_doctor_looks_at_its_environment(installed: Path, tmp_path: Path) -> None:
    looked = run(installed / "zerotune", "doctor", "--json", folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(looked.stdout)["checks"]}
    environment = checks["environment"]
    assert environment["verdict"] == "ok"
    assert str(installed) in environment["said"]


@pytest.mark.long
def test_a_whole_study_needs_nothing_else(installed: Path, tmp_path: Path) -> None:
    """It builds the op that its ranks need, which takes half a minute and more."""
    shutil.copytree(TINY, tmp_path / "work" / "tiny")
    tuned = run(
        installed / "zerotune", "asha", "tiny/deepspeed.yaml", "tiny", "--max-trials", "2", "--json", folder=tmp_path
    )
    assert tuned.returncode == 0, tuned.stderr
    document = json.loads(tuned.stdout)
    assert document["status"] == "completed"
    assert (Path(document["folder"]) / "report.html").stat().st_size > 0
