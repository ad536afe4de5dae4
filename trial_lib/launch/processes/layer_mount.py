"""Puts a layer over the program's folder. The guard of a trial does so before it starts the ranks.

The kernel keeps the folder as it is, and shows the trial's processes a folder that they can change (overlayfs). Only
these processes and their children see it, in a mount namespace that ends with the last of them. Root needs nothing
else. Any other user needs a user namespace, in which the user's identity stays the same. If the kernel, a container or
the file system refuses, the ranks see the folder itself, and `trial_lib.leave_alone.user_files` protects it.

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
# The version of `capset`'s interface whose data are two sets of three words.
_CAPABILITIES_3 = 0x20080522
# With these a rename of a folder below the layer fails. In the ranks Python's rename then copies it.
_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off"


def enter(layer: Layer) -> bool:
    """Lets this process and its children see a folder through a layer. Returns whether they do.

    Args:
        layer: the layer. Its store is created.
    """
    is_privileged = _is_privileged()
    try:
        _make_store(layer)
        # A process that enters a user namespace and then gets no layer would have fewer rights than before.
        if not is_privileged and not _works_in_a_child(layer):
            return False
        _mount(layer, is_privileged)
    except OSError:
        return False
    return True


def _make_store(layer: Layer) -> None:
    # This must not create the folder of a study that was removed meanwhile.
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
    # Other namespaces must not see what is mounted here.
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
    mounts = _mounts_within(layer.folder, Path("/proc/self/mountinfo").read_bytes())
    through = sorted({*filter(os.path.isdir, layer.through), *mounts})
    with contextlib.ExitStack() as opened:
        folder, upper, work = (opened.enter_context(_held(path)) for path in (layer.folder, layer.upper, layer.work))
        as_they_are = [(path, opened.enter_context(_held(path))) for path in through]
        _bind(folder, layer.below)
        # Descriptors are used, because a path may have any character, and the layer will hide some paths.
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
    """Yields a path of a folder that works whatever is mounted over the folder."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _bind(source: str, target: str | Path) -> None:
    _call("mount", source.encode(), os.fsencode(target), None, _BIND | _RECURSIVE, None)


def _mounts_within(folder: str, table: bytes) -> list[str]:
    """Returns the other file systems that are mounted below a folder, because a layer would hide them.

    Args:
        folder: the folder below the layer.
        table: the kernel's mountinfo.
    """
    # The kernel writes spaces and the like as octal numbers, and every other byte of a name unchanged.
    points = (line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in table.split(b"\n") if line)
    return [text for text in map(os.fsdecode, points) if text.startswith(folder.rstrip(os.sep) + os.sep)]


def _drop_capabilities() -> None:
    """Gives up the capabilities of the namespace, so that the program has no more rights than its user."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def main(arguments: list[str]) -> None:
    """Entry: tries a layer over an empty folder of this host, and prints the reason if that fails."""
    folder = Path(arguments[0])
    layer = Layer(str(folder / "seen"), str(folder / "store"))
    Path(layer.folder).mkdir()
    try:
        _make_store(layer)
        _mount(layer, _is_privileged())
    except OSError as error:
        print(error.args[1])
