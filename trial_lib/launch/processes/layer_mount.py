"""A layer over the program's folder is put in place: by the guard of a trial, before it starts the ranks.

The kernel keeps the folder as it is and shows the trial's processes, and those that they start, one that they can
change (overlayfs). Only they see it, in a mount namespace of their own, which goes with the last of them. Root needs
nothing for that. Anybody else needs a user namespace, in which they stay who they are; where the kernel, a container or
the file system refuses, the ranks see the folder itself, and have their own ways to leave it alone
(`trial_lib.leave_alone.user_files`).

Runs in the user's environment.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trial_lib.wire.layer import Layer

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000
_CAP_SYS_ADMIN = 21
# Of `capset`: a version of the interface, whose data are two sets of three words.
_CAPABILITIES_3 = 0x20080522
# Nothing may be found in a folder that another one was renamed to before: such a rename fails, and Python's is helped.
_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off"


def enter(layer: Layer) -> bool:
    """Has this process, and what it starts, see a folder through a layer; returns whether it does.

    Args:
        layer: to be put in place. Its store is made.
    """
    is_privileged = _is_privileged()
    try:
        _make_store(layer)
        # In a namespace of its own as another user's equal, a process that then finds no layer would have less rights.
        if not is_privileged and not _works_in_a_child(layer):
            return False
        _mount(layer, is_privileged)
    except OSError:
        return False
    return True


def _make_store(layer: Layer) -> None:
    # A study that has been interrupted and removed meanwhile does not come back by this.
    Path(layer.store).mkdir(exist_ok=True)
    for folder in (layer.upper, layer.work, layer.below):
        folder.mkdir()


def _works_in_a_child(layer: Layer) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            _mount(layer, is_privileged=False)
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _is_privileged() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _mount(layer: Layer, is_privileged: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_MOUNTS if is_privileged else _NEW_MOUNTS | _NEW_USER)
    if not is_privileged:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    # Nothing that is mounted here is seen elsewhere.
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
    mounts = _mounts_within(layer.folder, Path("/proc/self/mountinfo").read_bytes())
    through = sorted({*filter(os.path.isdir, layer.through), *mounts})
    with contextlib.ExitStack() as opened:
        folder, upper, work = (opened.enter_context(_held(path)) for path in (layer.folder, layer.upper, layer.work))
        as_they_are = [(path, opened.enter_context(_held(path))) for path in through]
        _bind(folder, layer.below)
        # By descriptors: a path may have any character, and the layer is over some of them in a moment.
        options = f"lowerdir={folder},upperdir={upper},workdir={work},{_OPTIONS}"
        if not is_privileged:
            options += ",userxattr"
        _call("mount", b"overlay", os.fsencode(layer.folder), b"overlay", 0, options.encode())
        for path, original in as_they_are:
            _bind(original, path)
    if not is_privileged:
        _drop_capabilities()
    replace(layer, through=tuple(through)).write()


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextlib.contextmanager
def _held(path: str | Path) -> Iterator[str]:
    """Yields a path by which a folder is found whatever is mounted over it."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _bind(source: str, target: str | Path) -> None:
    _call("mount", source.encode(), os.fsencode(target), None, _BIND | _RECURSIVE, None)


def _mounts_within(folder: str, table: bytes) -> list[str]:
    """Returns where other file systems are mounted below a folder: a layer would hide them.

    Args:
        folder: that the layer is over.
        table: the kernel's mountinfo.
    """
    # Spaces and the like are written as octal numbers; any other byte of a name stands as it is.
    points = (line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in table.split(b"\n") if line)
    return [text for text in map(os.fsdecode, points) if text.startswith(folder.rstrip(os.sep) + os.sep)]


def _drop_capabilities() -> None:
    """Gives up what the namespace has brought: the program runs with no more rights than its user has."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def main(arguments: list[str]) -> None:
    """Entry: puts a layer over an empty folder of this host, and prints why it cannot."""
    folder = Path(arguments[0])
    layer = Layer(str(folder / "seen"), str(folder / "store"))
    Path(layer.folder).mkdir()
    try:
        _make_store(layer)
        _mount(layer, _is_privileged())
    except OSError as error:
        print(error.args[1])
