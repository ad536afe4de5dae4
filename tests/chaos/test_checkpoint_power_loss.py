"""A save is killed before each of its operations on files, and then the power goes: a checkpoint is complete or absent.

A forked child does the work, counts its operations and dies before the n-th. It also keeps what a disk would have: the
content of each file and the names in each folder as they were when they were last synced. From that, and from what is
there now, the test builds what could be found after a loss of power, and looks for checkpoints in it.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import stat
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.training.checkpoints import CheckpointStore, save_rank_state
from zerotune.trial_lib.training.distributed import DistributedContext

FINISHED, KILLED, FAILED = 0, 17, 1
MAX_OPERATIONS = 200
COUNTED = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.truncate", "half written"}
# Which names are as they are now, by the depth of their folder (the store's is 1); the others are as last synced.
LOSSES = {
    "contents": lambda depth: True,
    "contents and names": lambda depth: False,
    "contents, and names of checkpoints": lambda depth: depth > 1,
    "contents, and names in checkpoints": lambda depth: depth < 2,
}


@pytest.fixture
def folder(tmp_path):
    """In main memory, where there is such a folder: thousands of folders are made and removed."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        yield Path(temporary)


# -- a disk ------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """The contents of files, and the names in folders with (inode, whether a folder), all by inode."""

    files: dict = field(default_factory=dict)
    folders: dict = field(default_factory=dict)


def names_in(folder):
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


def look_at(tree):
    disk = Disk()
    for parent, _, names in os.walk(tree):
        disk.folders[Path(parent).stat().st_ino] = names_in(parent)
        for path in (Path(parent, name) for name in names):
            disk.files[path.stat().st_ino] = path.read_bytes()
    return disk


def rebuild(target, inode, durable, now, keeps_names, depth=0):
    """Writes what is found after a loss of power: of a file that was not synced, half."""
    target.mkdir()
    names = (now if keeps_names(depth) else durable).folders.get(inode, {})
    for name, (child, is_folder) in names.items():
        if is_folder:
            rebuild(target / name, child, durable, now, keeps_names, depth + 1)
        else:
            unsynced = now.files.get(child, b"")
            (target / name).write_bytes(durable.files.get(child, unsynced[: len(unsynced) // 2]))


# -- a process that dies -----------------------------------------------------------------------------------------


def work_and_die(work, before_operation, durable, is_lost, pipe):
    """Does `work`, and ends this process before one of its operations; tells the pipe what the disk has then."""
    count, ending, held = 0, False, []
    alone = threading.RLock()  # files are synced in a thread of its own

    def end(code):
        nonlocal ending
        with alone:
            ending = True
            with os.fdopen(pipe, "wb") as file:
                pickle.dump(durable, file)
            os._exit(code)

    def operation():
        nonlocal count
        with alone:
            count += not ending
            if count == before_operation and not ending:
                end(KILLED)

    def audit(event, arguments):
        writes = event == "open" and not isinstance(arguments[0], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in COUNTED or writes:
            operation()

    def fsync(descriptor):
        with alone:
            operation()
            sync(descriptor)

    def sync(descriptor):
        status = os.fstat(descriptor)
        held.append(os.dup(descriptor))  # its inode is given to nothing else
        if is_lost(str(Path(f"/proc/self/fd/{descriptor}").readlink())):
            return
        if stat.S_ISDIR(status.st_mode):
            durable.folders[status.st_ino] = names_in(descriptor)
        else:
            durable.files[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    try:
        os.fsync = fsync
        sys.addaudithook(audit)
        work()
        end(FINISHED)
    finally:  # an error: nothing of the test's own process may run on in its child
        traceback.print_exc()
        os._exit(FAILED)


def run_until(tree, work, before_operation, is_lost=lambda path: False):
    """Runs `work` on a tree in a child; returns whether it finished, what the disk has, and what is there."""
    durable = look_at(tree)
    paths = [tree, *tree.rglob("*")]
    reading, writing = os.pipe()
    with contextlib.ExitStack() as held:
        for path in paths:  # removed or not, its inode is given to nothing else
            held.callback(os.close, os.open(path, os.O_RDONLY))
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            work_and_die(work, before_operation, durable, is_lost, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (FINISHED, KILLED)
        return code == FINISHED, pickle.loads(told), look_at(tree)


def after_each_death(folder, arrange, work):
    """Yields whether the work had finished, what was lost, and the tree that is left; each operation, each loss.

    What equals one that was looked at already is left out.
    """
    seen = set()

    def is_new(finished, tree):
        remains = (
            finished,
            frozenset(
                (path.relative_to(tree), path.read_bytes() if path.is_file() else None) for path in tree.rglob("*")
            ),
        )
        known = remains in seen
        seen.add(remains)
        return not known

    for before_operation in range(1, MAX_OPERATIONS):
        tree = folder / "tree"
        tree.mkdir()
        arrange(tree)
        finished, durable, now = run_until(tree, lambda: work(tree), before_operation)  # noqa: B023 - called here
        inode = tree.stat().st_ino
        if is_new(finished, tree):
            yield finished, "nothing", tree
        for lost, keeps_names in LOSSES.items():
            left = folder / "left"
            rebuild(left, inode, durable, now, keeps_names)
            if is_new(finished, left):
                yield finished, lost, left
            shutil.rmtree(left)
        shutil.rmtree(tree)
        if finished:
            return
    pytest.fail(f"not finished after {MAX_OPERATIONS} operations")


# -- checkpoints -------------------------------------------------------------------------------------------------


def store_in(tree):
    return CheckpointStore(tree / "checkpoints", DistributedContext(), smaller_is_better=True)


def writes(text):
    def write(folder):
        save_rank_state(folder, 0, {"text": text, "numbers": [1.5, 2]})
        (folder / "model0" / "layers").mkdir(parents=True)
        (folder / "latest").write_text("model0")
        with (folder / "model0" / "layers" / "0.pt").open("wb") as file:
            file.write(text.encode())
            file.flush()
            sys.audit("half written")
            file.write(text.encode())

    return write


def save(tree, batch, metric=None, text="weights"):
    return store_in(tree).save(batch, metric, {"epoch": 1}, writes(f"{text} {batch}"))


def find(tree):
    """Returns the newest intact checkpoint's batch and files, and what was said."""
    notes = []
    found = store_in(tree).newest_intact(notes.append)
    return (None if found is None else (found.batch, files_of(found.path))), notes


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_whole(folder):
    files = files_of(folder)
    records = json.loads(files.pop("manifest.json", '{"files": {}}'))["files"]
    return records != {} and {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == {
        name: record["sha256"] for name, record in records.items()
    }


def check_that_saving_goes_on(tree):
    assert all(is_whole(path) for path in (tree / "checkpoints").glob("batch-*"))
    saved = save(tree, 999)
    assert find(tree) == ((999, files_of(saved.path)), [])
    left = sorted(path.name for path in saved.path.parent.iterdir())
    assert [name for name in left if name.startswith(".")] == []


def nothing(tree):
    pass


def one(tree):
    save(tree, 10)


def two(tree):
    save(tree, 10, 0.5)
    save(tree, 15, 0.6)


def one_of_the_same_batch(tree):
    save(tree, 20, text="not validated")


def leftovers(tree):
    path = save(tree, 10).path
    for name in (".batch-00000020.partial", ".batch-00000005.pruned"):
        shutil.copytree(path, path.with_name(name))


def new_one(tree):
    save(tree, 20, 0.4)


@pytest.mark.parametrize(
    "arrange",
    [one, leftovers, *(pytest.param(each, marks=pytest.mark.long) for each in (nothing, two, one_of_the_same_batch))],
)
def test_after_every_death_the_old_or_the_new_checkpoint_is_there_whole(folder, arrange):
    reference = folder / "reference"
    arrange(reference)
    old, _ = find(reference)
    new_one(reference)
    new, _ = find(reference)
    assert new[0] == 20
    seen = []
    for finished, lost, left in after_each_death(folder, arrange, new_one):
        found, notes = find(left)
        assert found in ([new] if finished else [old, new]), (lost, found)
        assert notes == [], lost
        check_that_saving_goes_on(left)
        seen.append(found)
    assert len(seen) > 15
    assert old in seen


def test_after_every_death_a_damaged_checkpoint_is_still_passed_over(folder):
    def damaged(tree):
        save(tree, 10)
        os.truncate(save(tree, 20).path / "latest", 3)

    damaged(folder / "reference")
    older, notes = find(folder / "reference")
    assert (older[0], len(notes)) == (10, 1)
    damage = " is damaged (latest has 3 bytes, not 6)"
    noted = []
    for finished, lost, left in after_each_death(folder, damaged, find):
        found, notes = find(left)
        noted.append(len(notes))
        assert found == older, lost
        assert len(notes) <= (not finished)
        assert all(damage in note for note in notes)
        check_that_saving_goes_on(left)
    assert set(noted) == {0, 1}


def test_a_file_that_is_written_whole_is_the_old_or_the_new_one(folder):
    def written(text):
        return lambda tree: write_whole(tree / "finished.json", text)

    seen = set()
    for finished, lost, left in after_each_death(folder, written("the old text"), written("the new one")):
        text = (left / "finished.json").read_text()
        assert text in ({"the new one"} if finished else {"the old text", "the new one"}), lost
        seen.add(text)
    assert seen == {"the old text", "the new one"}


# -- the emulation can find damage -------------------------------------------------------------------------------


def find_after_a_save_that_syncs_too_little(folder, is_lost, keeps_names):
    tree = folder / "tree"
    one(tree)
    old, _ = find(tree)
    finished, durable, now = run_until(tree, lambda: new_one(tree), 0, is_lost)
    assert finished
    rebuild(folder / "left", tree.stat().st_ino, durable, now, keeps_names)
    found, notes = find(folder / "left")
    assert found == old
    check_that_saving_goes_on(folder / "left")
    return notes


@pytest.mark.parametrize(
    ("is_lost", "problem"),
    [
        (lambda path: path.endswith("/latest"), "latest has 3 bytes, not 6"),
        (lambda path: path.endswith("/0.pt"), "model0/layers/0.pt has 10 bytes, not 20"),
        (lambda path: "manifest" in path, "manifest.json cannot be read: JSONDecodeError"),
        (os.path.isfile, "manifest.json cannot be read: JSONDecodeError"),
    ],
)
def test_without_syncs_of_files_the_loss_shows_and_the_one_before_is_used(folder, is_lost, problem):
    notes = find_after_a_save_that_syncs_too_little(folder, is_lost, LOSSES["contents"])
    assert len(notes) == 1
    assert f"checkpoint batch-00000020 is damaged ({problem}" in notes[0]


def test_without_syncs_of_folders_a_finished_save_is_lost(folder):
    assert find_after_a_save_that_syncs_too_little(folder, os.path.isdir, LOSSES["contents and names"]) == []
