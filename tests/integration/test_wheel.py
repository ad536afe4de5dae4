"""The wheel: it holds all that the repository's packages do, and its dependencies are enough for it.

It is installed as `uv tool install` does, in an environment of its own. Another one, as a user's, has what ranks need,
and neither ZeroTune, Prefect nor MLflow. Both are made of links to the packages of this one, so that nothing is
downloaded.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from report_fixtures import STUDY_ID, recorded_study
from server_fixtures import free_port
from study_fixtures import TINY, Running

ROOT = Path(__file__).parents[2]
PACKAGES = ("zerotune", "flows", "tasks", "trial_lib", "deployments")
# For people, in the repository.
NOT_IN_THE_WHEEL = ("Dockerfile", "README.md", "ray", "slurm")
UP_S = 150  # on a busy machine
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: what an earlier build left in the repository would hide a file that is missing."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, source], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and of all other packages only those that it requires."""
    commands = environment_with(required_by_zerotune(wheel), tmp_path_factory.mktemp("environment"))
    pip = [sys.executable, "-m", "pip", "--python", commands / "python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    return commands


@pytest.fixture(scope="module")
def users(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which a user trains."""
    commands = environment_with(required_by_zerotune(wheel, "train"), tmp_path_factory.mktemp("users"))
    for name in ("zerotune", "prefect", "mlflow"):
        asked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        subprocess.run([commands / "python", "-c", asked], cwd=commands, check=True)
    return commands


def environment_with(names: set[str], folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        link(name, packages)
    return folder / "bin"


def required_by_zerotune(wheel: Path, extra: str = "") -> set[str]:
    """The names of all packages that pip would install with the wheel, or those that only an extra of it needs."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    lines = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    if extra:
        lines = [line.partition(";")[0] for line in lines if f'extra == "{extra}"' in line]
    wanted = [(line, frozenset[str]()) for line in lines]
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


def environment_in(folder: Path, active: Path, **variables: str) -> dict[str, str]:
    """The variables of a shell in which an environment is active, and nothing of this one's."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        **environment,
        "XDG_DATA_HOME": str(folder / "data"),
        # The paths of an op's headers are others here, and with them the op: the user's own stays.
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "PATH": f"{active}{os.pathsep}{environment['PATH']}",
        "COLUMNS": "120",
        **variables,
    }


def run(
    command: Path, *arguments: str, folder: Path, active: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return subprocess.run(
        [command, *arguments],
        cwd=work,
        env=environment_in(folder, active or command.parent, **variables),
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    folders = [ROOT / "zerotune" / name for name in (".", "alias", "flows", "tasks", "trial_lib", "deployments")]
    files = [
        file
        for folder in folders
        for file in (folder.glob("*.*") if folder.name in ("zerotune", "alias") else folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts and not file.match("deployments/README.md")
    ]
    names = {str(file.relative_to(ROOT)) for file in files}
    left_out = tuple(f"zerotune/deployments/{name}" for name in NOT_IN_THE_WHEEL)
    expected = {name for name in names if not name.startswith(left_out)}
    assert {"zerotune/py.typed", "zerotune/deployments/prefect.yaml"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected | {"trial_lib/__init__.py", "trial_lib/py.typed"}


@pytest.mark.long
def test_its_command_runs_where_there_is_no_repository(installed: Path, tmp_path: Path) -> None:
    command = installed / "zerotune"
    version = run(command, "--version", folder=tmp_path)
    assert version.stdout.strip().endswith(distribution("zerotune").version), version.stderr
    for arguments in ([], ["adaptive"], ["tune"], ["up"]):
        helped = run(command, *arguments, "--help", folder=tmp_path)
        assert (helped.returncode, helped.stderr) == (0, "")
        assert "Usage: zerotune" in helped.stdout
    where = "import trial_lib, zerotune.flows; print(*zerotune.flows.__path__, *trial_lib.__path__, trial_lib.__name__)"
    imported = run(installed / "python", "-c", where, folder=tmp_path)
    *paths, name = imported.stdout.split()
    assert name == "zerotune.trial_lib", imported.stderr
    assert all(Path(path).is_relative_to(installed.parent) for path in paths), imported.stdout
    assert len(paths) == 2


@pytest.mark.long
def test_its_packages_have_one_name_and_an_alias(installed: Path) -> None:
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    listed = [sys.executable, "-m", "pip", "--python", installed / "python", "show", "-f", "zerotune"]
    shown = subprocess.run(listed, text=True, capture_output=True, check=True).stdout
    files = [line.strip() for line in shown.partition("Files:\n")[2].splitlines()]
    tops = {file.partition("/")[0] for file in files if not file.startswith("..")}
    assert tops == {"zerotune", "trial_lib", f"zerotune-{distribution('zerotune').version}.dist-info"}
    assert {file.name for file in (packages / "trial_lib").iterdir()} - {"__pycache__"} == {"__init__.py", "py.typed"}


@pytest.mark.long
def test_it_reads_a_study_and_draws_its_report(installed: Path, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path / "work")
    shown = run(installed / "zerotune", "show", STUDY_ID, "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["status"] == "completed", shown.stderr
    code = "import pathlib, sys; from zerotune.trial_lib.report.html_report import write_report as write; "
    code += "from zerotune.trial_lib.records.folders import StudyPaths; write(StudyPaths(pathlib.Path(sys.argv[1])))"
    paths.report.unlink(missing_ok=True)
    drawn = run(installed / "python", "-c", code, str(paths.root), folder=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert "</html>" in paths.report.read_text()


@pytest.mark.long
def test_the_doctor_looks_at_the_users_environment(installed: Path, users: Path, tmp_path: Path) -> None:
    looked = run(installed / "zerotune", "doctor", "--json", folder=tmp_path, active=users)
    checks = {check["name"]: check for check in json.loads(looked.stdout)["checks"]}
    environment = checks["environment"]
    assert environment["verdict"] == "ok"
    assert str(users) in environment["said"]


@pytest.mark.long
def test_a_whole_study_needs_nothing_else(installed: Path, users: Path, tmp_path: Path) -> None:
    """It builds the op that its ranks need, which takes half a minute and more."""
    shutil.copytree(TINY, tmp_path / "work" / "tiny")
    asha = ["asha", "tiny/deepspeed.yaml", "tiny", "--max-trials", "2", "--json"]
    tuned = run(installed / "zerotune", *asha, folder=tmp_path, active=users)
    assert tuned.returncode == 0, tuned.stderr
    document = json.loads(tuned.stdout)
    assert document["status"] == "completed"
    assert (Path(document["folder"]) / "report.html").stat().st_size > 0


# A project whose packages have the names that ZeroTune's had, and a training that imports them.
OF_THE_PROJECT = ("tasks", "flows", "deployments")
IMPORTS = """import deployments, flows, tasks, sys
print("own", tasks.OWN, flows.OWN, deployments.OWN, sys.executable, flush=True)
"""
TUNE_IN_A_LOOP = """
import asyncio, json, zerotune

async def main():
    study = zerotune.tune("python train.py --deepspeed_config ds_config.json", max_trials=2, max_slots=1)
    print(json.dumps([str(study.folder), study.status.value, len(study.trials), study.best.trial]))

asyncio.run(main())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(TINY, folder)
    for name in OF_THE_PROJECT:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"OWN = 'of the project: {name}'\n")
    script = folder / "train.py"
    docstring, rest = script.read_text().split("import argparse\n", 1)
    script.write_text(f"{docstring}{IMPORTS}import argparse\n{rest}")
    return folder


def trains_with_its_own(study: Path, users: Path) -> bool:
    logs = [log.read_text() for log in study.glob("trials/*/rank0.log")]
    own = "own " + " ".join(f"of the project: {name}" for name in OF_THE_PROJECT)
    return bool(logs) and all(f"{own} {users / 'python'}" in log for log in logs)


@pytest.mark.long
def test_a_project_with_packages_of_those_names_is_tuned_from_python_and_deployed(
    installed: Path, users: Path, project: Path, tmp_path: Path
) -> None:
    own = {"PYTHONPATH": str(project)}
    tuned = run(installed / "python", "-c", TUNE_IN_A_LOOP, folder=tmp_path, active=users, **own)
    assert tuned.returncode == 0, tuned.stderr
    folder, status, trials, best = json.loads(tuned.stdout)
    assert (status, trials >= 1, best >= 0) == ("completed", True, True)
    assert trains_with_its_own(Path(folder), users)

    prefect_port, mlflow_port = free_port(), free_port()
    ports = ["--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
    environment = environment_in(tmp_path, users, **own)
    up = Running([str(installed / "zerotune"), "up", *ports], project, environment)
    try:
        up.wait_until(lambda: "Stop everything" in up.said, "its addresses", UP_S)
        parameters = {"config_path": str(project / "deepspeed.yaml"), "max_trials": "2"}
        given = [word for name, value in parameters.items() for word in ("--param", f"{name}={value}")]
        script = (
            '. "$XDG_DATA_HOME/zerotune/up/environment"; exec "$0" -m prefect deployment run tune/local --watch "$@"'
        )
        watched = run(Path("/bin/sh"), "-c", script, str(installed / "python"), *given, folder=tmp_path, **environment)
        assert watched.returncode == 0, watched.stdout + watched.stderr
    finally:
        up.process.send_signal(signal.SIGTERM)
        up.end(timeout=60)
    (deployed,) = {study.parent for study in project.glob("zerotune-studies/*/study.json")} - {Path(folder)}
    assert json.loads((deployed / "study.json").read_text())["status"] == "completed"
    assert trains_with_its_own(deployed, users)
