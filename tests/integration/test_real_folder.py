"""Whatever a program does to its own folder in a trial, the real folder stays bit for bit what it was.

The program sees the folder as it would without ZeroTune. No study is in it, and no file is in it twice.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS
from disk_fixtures import CannotMountError, small_disk

from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.trial_files import hidden_folders, layer_for, layer_refusal
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.folders import STUDIES, StudyPaths

REPOSITORY = Path(__file__).parents[2]
SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
ANOTHER_USER = "nobody"
# The tests' own Python may be one that only root can run.
ANOTHER_PYTHON = "/usr/bin/python3"

WRITES_THROUGH_LINK = "hard links are written through"
PRUNES = "for old in Path('.').rglob('step*'): shutil.rmtree(old)"
DELETES = "subprocess.run(['find', '.', '-name', '*.tmp', '-delete'], check=True)"
READS_ALL = "print(sorted(map(str, Path('.').rglob('*.json'))), sorted(glob.glob('**/*.py', recursive=True)))"

IN_PYTHON = {
    "old checkpoints are pruned": PRUNES,
    "a data set is found by a recursive glob": READS_ALL,
    "the folder is walked": "print(sorted((at, sorted(below), sorted(files)) for at, below, files in os.walk('.')))",
    "every child is removed": "[shutil.rmtree(at) if os.path.isdir(at) else os.remove(at) for at in os.listdir()]",
    "the studies are removed": "shutil.rmtree('zerotune-studies', ignore_errors=True)",
    WRITES_THROUGH_LINK: "os.link('data.json', 'link'); open('link', 'a').write('!'); os.remove('link')",
    "modes change": "[os.chmod(each, 0o700) for each in Path('.').rglob('*') if not each.is_symlink()]",
    "times change": "[os.utime(each, (1, 1)) for each in Path('.').rglob('*') if not each.is_symlink()]",
    "files are cut short": "os.truncate('data.json', 2); open('notes/a.txt', 'r+').truncate(1)",
    "modes change by descriptor": "os.fchmod(os.open('data.json', os.O_RDONLY), 0o600)",
    "a link is put in place of a file": "os.remove('data.json'); os.symlink('train.py', 'data.json')",
    "a file is overwritten by another": "Path('new').write_text('new'); os.replace('new', 'data.json')",
    "attributes change": "os.setxattr('data.json', 'user.seen', b'1') if os.getuid() else None",
}
# What follows goes past Python's functions, or needs copies of whole folders.
PAST_PYTHON = {
    "temporary files are deleted by find": DELETES,
    "git cleans": "subprocess.run('git clean -fdxq && git checkout -q .', shell=True, check=True)",
    "folders are moved": "shutil.move('notes', 'moved'); os.rename('moved', 'run/again')",
    "a child moves folders": "subprocess.run('mv notes moved && mv run notes', shell=True, check=True)",
    "a child changes modes": "subprocess.run('chmod -R go-rwx .', shell=True, check=True)",
    "a child removes all": "subprocess.run('rm -rf ./* ./.[a-z]*', shell=True, check=True)",
    "a child writes and touches": "subprocess.run('echo x >> data.json; touch -d @1 train.py; ln -f data.json l; "
    "echo y >> l', shell=True, check=True)",
    "a database is changed": "import sqlite3; base = sqlite3.connect('base.db'); base.execute('delete from t'); "
    "base.commit(); base.close()",
    "sed edits in place": "subprocess.run('sed -i s/1/2/ data.json notes/*', shell=True, check=True)",
}

BEGINNING = "import glob, os, shutil, subprocess; from pathlib import Path\n"
# The program's own view of its folder when it has done its work.
ENDING = """
import hashlib
for at, folders, files in os.walk('.'):
    folders[:] = sorted(each for each in folders if each != '.git')
    for name in sorted((*folders, *files)):
        path = os.path.join(at, name)
        to = os.path.basename(os.readlink(path)) if os.path.islink(path) else ''
        print(path, to or (open(path, 'rb').read() if name in files else ''))
"""

LAYERED = """
import json, os, sys
from zerotune.trial_lib.launch.processes import layer_mount
from zerotune.trial_lib.messages.folders import Layer, read_layer
told = json.loads(sys.argv[1])
request = {"ranks": [{"environment": {"TMPDIR": told["outside"]}}], "scratch": told["scratch"] + "/"}
layer_mount.name_elsewhere(request)
layer_mount.enter(Layer(**told["layer"]), request)
assert read_layer(__import__("pathlib").Path(request["scratch"])) is not None, "there is no layer"
os.chdir(told["folder"])
os.execv(sys.executable, [sys.executable, "-B", "-c", told["code"]])
"""
INTERCEPTED = """
import json, os, sys, time
from pathlib import Path
from zerotune.trial_lib.rank import sandbox
told = json.loads(sys.argv[1])
os.chdir(told["folder"])
sandbox.install(Path(told["scratch"]), time.time(), Path(told["folder"]), None, told["hidden"])
exec(compile(told["code"], "program", "exec"), {"__name__": "__main__"})
"""


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Returns everything that stands in a folder: kinds and modes, owners, times, contents, targets of links."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        changed = status.st_ctime_ns, status.st_nlink
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_uid, status.st_mtime_ns, content, *changed)
    return found


@pytest.fixture(params=["this user", ANOTHER_USER])
def user(request: pytest.FixtureRequest) -> str | None:
    """The user of the trial; None for the one who runs the tests."""
    if request.param == "this user":
        return None
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    tried = subprocess.run([ANOTHER_PYTHON, "-c", LAYERED.partition("told")[0]], check=False, **as_user(ANOTHER_USER))
    if tried.returncode != 0:
        pytest.skip(f"{ANOTHER_USER} cannot run {ANOTHER_PYTHON} with this code")
    return ANOTHER_USER


def as_user(user: str | None) -> dict[str, Any]:
    """Returns the options of a process of a user's."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GIT_CONFIG_COUNT": "0"}
    return {"user": user, "group": user and pwd.getpwnam(user).pw_gid, "extra_groups": user and [], "env": environment}


@pytest.fixture
def outside(user: str | None) -> Iterator[Path]:
    """A folder of the user's."""
    folder = Path(tempfile.mkdtemp(prefix="zerotune-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def program(outside: Path) -> Path:
    """The user's folder, a checkout with an earlier study and today's in it."""
    folder = outside / "program"
    for name in ("run/step10", "run/step20", "notes", f"{STUDIES}/earlier/trials/0000/step5", "empty"):
        (folder / name).mkdir(parents=True)
    for name in (
        *("train.py", "data.json", "old.tmp", "run/step10/model.bin", "run/step20/model.bin", "notes/a.txt"),
        *(f"{STUDIES}/earlier/study.json", f"{STUDIES}/earlier/trials/0000/step5/a.tmp", f"{STUDIES}/earlier/a.py"),
    ):
        (folder / name).write_text(f"1: {name}")
    (folder / "run/latest").symlink_to("step20")
    subprocess.run("sqlite3 base.db 'create table t (a); insert into t values (1)'", shell=True, check=True, cwd=folder)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "train.py", "data.json"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True, cwd=folder)
    (folder / "notes").chmod(0o750)
    os.utime(folder / "notes", (1_000_000_000, 1_000_000_000))
    return folder


@pytest.fixture
def runs(program: Path, user: str | None) -> Callable[..., str]:
    """Runs code as a program in a trial, or as it is (`plain`), and returns what it has printed."""
    study = StudyPaths(program / STUDIES / "today")
    scratch = study.trial(3).scratch
    scratch.mkdir(parents=True)
    for file in (study.record, study.trial(2).log(0), study.trial(3).ds_config):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1: a record")
    if user is not None:
        subprocess.run(["chown", "-Rh", f"{user}:", program.parent], check=True)

    def run(way: str, code: str, folder: Path = program) -> str:
        whole = BEGINNING + textwrap.dedent(code) + ENDING
        asked = Program(sys.executable, {"script": "train.py"}, [], False, folder, {})
        records = [study.trial(3).root]
        layer = layer_for(asked, scratch, records)
        assert layer is not None
        hidden = [str(each) for each in hidden_folders(folder, records)]
        told = {"folder": str(folder), "scratch": str(scratch), "code": whole, "hidden": hidden, "layer": vars(layer)}
        told["outside"] = str(program.parent)
        host = {"layered": LAYERED, "intercepted": INTERCEPTED}.get(way)
        python = sys.executable if user is None else ANOTHER_PYTHON
        command = [python, "-B", "-c", host or whole, json.dumps(told)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, **as_user(user))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def without_studies(program: Path, user: str | None) -> Path:
    """Returns a copy of the program's folder as it would be without ZeroTune."""
    copy = program.parent / "plain" / "program"
    copy.parent.mkdir()
    subprocess.run(["cp", "-a", program, copy], check=True)
    shutil.rmtree(copy / STUDIES)
    if user is not None:
        subprocess.run(["chown", "-Rh", f"{user}:", copy.parent], check=True)
    return copy


def check(runs: Callable[..., str], program: Path, user: str | None, way: str, code: str) -> None:
    copy = without_studies(program, user)
    before = snapshot(program)
    seen = runs(way, code)
    after = snapshot(program)
    # The driver removes this folder of the trial's with what the program has written.
    scratch = f"{STUDIES}/today/trials/0003/scratch"
    left = {path for path in (*before, *after) if not path.startswith(scratch)}
    if way == "intercepted":
        # A new file is at its own path for a while, so the times of its folder change.
        left.discard(".")
    assert {path: after.get(path) for path in left} == {path: before.get(path) for path in left}
    if (way, code) != ("intercepted", IN_PYTHON[WRITES_THROUGH_LINK]):
        # Python's function makes a copy there in place of a link.
        assert seen == runs("plain", code, copy)


@pytest.fixture
def layers(tmp_path: Path, user: str | None) -> None:
    if refusal := layer_refusal(tmp_path):
        pytest.skip(f"this host has no layered folders: {refusal}")


QUICK = ("old checkpoints are pruned", "temporary files are deleted by find", "a data set is found by a recursive glob")
EVERYTHING = {**IN_PYTHON, **PAST_PYTHON}


def table(acts: dict[str, str]) -> list[object]:
    return [pytest.param(act, marks=[] if act in QUICK else pytest.mark.long) for act in acts]


@pytest.mark.parametrize("act", table(EVERYTHING))
def test_under_a_layer_the_real_folder_stays(act, runs, program, user, layers) -> None:
    check(runs, program, user, "layered", EVERYTHING[act])


@pytest.mark.parametrize("act", table(IN_PYTHON))
@pytest.mark.parametrize("user", [None])
def test_by_interception_the_real_folder_stays(act, runs, program, user) -> None:
    check(runs, program, user, "intercepted", IN_PYTHON[act])


@pytest.mark.parametrize("user", [None])
def test_a_disk_that_is_mounted_in_a_hidden_folder_is_hidden_with_it(runs, program, user, layers) -> None:
    # A container may have a volume there.
    disk = program / STUDIES / "volume"
    with contextlib.ExitStack() as mounted:
        try:
            mounted.enter_context(small_disk(disk, 1))
        except CannotMountError as error:
            pytest.skip(f"this user may not mount a disk: {error}")
        (disk / "old.tmp").write_text("1: of the disk")
        check(runs, program, user, "layered", DELETES)


@pytest.mark.parametrize("user", [None])
def test_a_disk_in_the_folder_that_stays_writable_below_the_layer_means_no_layer(
    runs, program, user, layers, monkeypatch
) -> None:
    # The program would find the disk at the path of the folder below the layer, and could write there.
    writable = """
real = layer_mount._make_read_only
def make_read_only(path):
    if path.name == "disk":
        raise PermissionError(1, "Operation not permitted")
    real(path)
layer_mount._make_read_only = make_read_only
"""
    monkeypatch.setattr(f"{__name__}.LAYERED", LAYERED.replace("told =", f"{writable}told =", 1))
    with contextlib.ExitStack() as mounted:
        try:
            mounted.enter_context(small_disk(program / "disk", 1))
        except CannotMountError as error:
            pytest.skip(f"this user may not mount a disk: {error}")
        with pytest.raises(AssertionError, match="there is no layer"):
            runs("layered", "")


@pytest.mark.parametrize("user", [None])
def test_zerotunes_records_above_the_programs_folder_stay(runs, program, user, layers) -> None:
    above = program.parent
    for name in (f"{STUDIES}/earlier/study.json", "mlflow.db", "mlartifacts/1/file"):
        (above / name).parent.mkdir(parents=True, exist_ok=True)
        (above / name).write_text("1: a record")
    shutil.move(program / ".git", above / ".git.kept")  # else the layer would be over a checkout
    before = snapshot(above)
    seen = runs(
        "layered",
        """
        seen = [Path('..', name) for name in ('mlflow.db', 'mlartifacts/1')]
        print([each.exists() and each.stat().st_size for each in seen])
        subprocess.run('rm -rf ../mlflow.db ../mlartifacts/* ../zerotune-studies/*; echo x > ../mlflow.db', shell=True)
        """,
    )
    kept = {path for path in before if path.startswith(("mlflow", "mlartifacts", f"{STUDIES}/"))}
    assert {path: snapshot(above).get(path) for path in kept} == {path: before[path] for path in kept}
    assert seen.startswith("[0, False]")


def left_in_temporary() -> set[Path]:
    """Places of trials whose guard is gone. Other tests run trials meanwhile."""
    places = Path(tempfile.gettempdir()).glob("zerotune-trial-*")
    return {place for place in places if not Path("/proc", place.name.split("-")[2]).exists()}


CLEANS = """
import glob, json, os, shutil, subprocess, sys
from pathlib import Path
import deepspeed
from toy import parse_arguments, small_model, train

print("sees", sorted(str(path) for path in Path(".").rglob("*") if "__pycache__" not in path.parts))
args = parse_arguments()
micro_batch = json.loads(Path(args.deepspeed_config).resolve().read_text())["train_micro_batch_size_per_gpu"]
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
assert engine.train_micro_batch_size_per_gpu() == micro_batch
{body}
train(engine, 1000)
"""


@pytest.mark.parametrize(
    ("starter", "slots"), [("warm", 1), pytest.param("cold", 2, marks=[pytest.mark.long, pytest.mark.devices(2)])]
)
def test_a_trial_measures_while_its_program_cleans_its_folder(trials, tmp_path, way_of_files, starter, slots) -> None:
    folder = tmp_path / "program"
    (folder / "run" / "step10").mkdir(parents=True)
    (folder / "run" / "step10" / "model.bin").write_text("a checkpoint")
    earlier = folder / STUDIES / "earlier"
    (earlier / "trials" / "0000" / "step1").mkdir(parents=True)
    (earlier / "study.json").write_text("{}")
    (folder / "old.tmp").write_text("old")
    layered = f"{DELETES}; shutil.rmtree('{STUDIES}', ignore_errors=True)"
    (folder / "train.py").write_text(CLEANS.format(body=f"{PRUNES}\n{layered if way_of_files == 'layered' else ''}"))
    (folder / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
    trials.root = folder / STUDIES / "today" / "trials"
    before = {path: found for path, found in snapshot(folder).items() if path not in (".", STUDIES)}
    others = left_in_temporary()
    result = trials.run("train.py", model_dir=folder, window=SHORT, starter=starter, slots=slots)
    assert (result.outcome, result.files) == ("completed", way_of_files), (result.reason, trials.log(result))
    after = snapshot(folder)
    assert {path: after.get(path) for path in before} == before
    assert set(after) - set(before) <= {".", "__pycache__", *(p for p in after if p.startswith((STUDIES, "__pyc")))}
    assert "sees ['old.tmp', 'run', 'run/step10', 'run/step10/model.bin', 'toy.py', 'train.py']" in trials.log(result)
    assert str(trials.root) in result.logs[0]
    trials.wait_until(lambda: not (left_in_temporary() - others), 10.0, "the trial's watchdog")


ASKS = """
import signal, sys
from pathlib import Path
from zerotune.trial_lib.launch.trial_files import layer_refusal

signal.signal(signal.SIGINT, lambda number, frame: None)
print("listens", flush=True)
print(layer_refusal(Path(sys.argv[1])))
"""


def test_an_interrupt_while_a_layer_is_tried_does_not_make_the_host_one_without_layers(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()
        while asking.poll() is None:
            # As a terminal does: all of the group.
            os.killpg(asking.pid, signal.SIGINT)
            time.sleep(0.01)
        assert asking.stdout.read().strip() == str(layer_refusal(tmp_path))
    assert not list(tmp_path.iterdir())
