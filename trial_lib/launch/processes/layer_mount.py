"""Puts a layer over the program's folder. The guard of a trial does so before it starts the ranks.

The kernel keeps the folder as it is, and shows the trial's processes a folder that they can change (overlayfs). Only
these processes and their children see it, in a mount namespace that ends with the last of them. Root needs nothing
else. Any other user needs a user namespace, in which the user's identity stays the same. If the kernel, a container or
the file system refuses, the ranks see the folder itself, and `zerotune.trial_lib.rank.user_files` protects it.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zerotune.trial_lib.launch.processes.channel import NoAnswerError, ask_fork
from zerotune.trial_lib.messages.folders import Layer

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _SLAVE = 0x1, 0x20, 0x1000, 0x4000, 0x80000
_CAP_SYS_ADMIN = 21
# The version of `capset`'s interface whose data are two sets of three words.
_CAPABILITIES_3 = 0x20080522
# With these a rename of a folder below the layer fails. In the ranks Python's rename then copies it.
_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off"
_MOUNT_S = 60.0  # a file system that does not answer must not hold a trial up
# The driver's files for a trial are small.
_MOST_BYTES = 4 * 2**20


def enter(layer: Layer, request: dict[str, Any]) -> None:
    """Lets this process and its children see a folder through a layer, if the host can make one.

    The paths in the launch change to those that the processes then have.
    """
    is_privileged = may_mount()
    through = mounts_within(layer.folder, Path("/proc/self/mountinfo").read_bytes())
    try:
        layer = replace(layer, elsewhere=_made_elsewhere(layer, request), through=through)
        _make_store(layer)
        mount = partial(_mount, layer, is_privileged)
        # A process that gets no layer must not stay in a namespace of half of one. So a fork tries first.
        ask_fork(mount, _MOUNT_S)
        mount()
        request.update(json.loads(layer.as_seen(json.dumps(request))))
        return
    except (OSError, NoAnswerError):
        pass
    layer.unwrite()


def name_elsewhere(request: dict[str, Any]) -> None:
    """Adds a name to a launch, for the folder at which its processes find its records.

    Another user cannot foresee the name, and so cannot make the folder first.
    """
    request["elsewhere"] = f"zerotune-trial-{os.getpid()}-{os.urandom(8).hex()}"


def elsewhere(request: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the places for the folder that `name_elsewhere` has named. The trial's watchdog removes it."""
    for folder in (request["ranks"][0]["environment"].get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"):
        if folder:
            yield Path(folder).resolve() / request["elsewhere"]


def _made_elsewhere(layer: Layer, request: Mapping[str, Any]) -> str:
    for place in elsewhere(request):
        # The program would find its own files there a second time.
        if not place.is_relative_to(layer.folder):
            with contextlib.suppress(OSError):
                place.mkdir(mode=0o700)
                return str(place)
    raise OSError(errno.ENOENT, "there is no temporary folder outside of the program's")


def _make_store(layer: Layer) -> None:
    # This must not create the folder of a study that was removed meanwhile.
    Path(layer.store).mkdir(exist_ok=True)
    layer.write()
    layer.work.mkdir()
    _make_like(Path(layer.folder), layer.upper)
    for hidden in map(Path, layer.hidden):
        if hidden.is_relative_to(layer.folder):
            within = hidden.relative_to(layer.folder)
            for parent in reversed(within.parents[:-1]):
                _make_like(layer.folder / parent, layer.upper / parent)
            # The kernel's mark of a file that was removed.
            os.mknod(layer.upper / within, stat.S_IFCHR, os.makedev(0, 0))


def _make_like(original: Path, folder: Path) -> None:
    # Makes a folder of the layer that looks as the one below it.
    if not folder.exists():
        folder.mkdir()
        found = original.stat()
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            # In a folder that several users share, the original may be another's.
            with contextlib.suppress(PermissionError):
                os.chown(folder, found.st_uid, found.st_gid)
        shutil.copystat(original, folder)


def may_mount() -> bool:
    """Whether this process needs no user namespace for a layer."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _mount(layer: Layer, is_privileged: bool) -> None:
    # A namespace of mounts, in which this process may mount.
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_MOUNTS if is_privileged else _NEW_MOUNTS | _NEW_USER)
    if not is_privileged:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    # Other namespaces must not see what is mounted here.
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
    with contextlib.ExitStack() as opened:

        def held(paths: Iterable[str | Path]) -> list[tuple[str | Path, str]]:
            return [(path, opened.enter_context(_held(path))) for path in paths]

        # What the program is to see, by descriptors: a path may have any character, and the layer will hide some paths.
        (_, folder), (_, upper), (_, work) = held((layer.folder, layer.upper, layer.work))
        through, records, named = held(layer.through), held(layer.records), held(layer.named)
        # The folder as it is, and the trial's records, at their other place.
        _cover(layer.elsewhere)
        layer.below.mkdir()
        layer.nothing.touch(stat.S_IRUSR)
        _bind(folder, layer.below)
        _make_read_only(layer.below)
        for path, _ in through:
            _make_read_only(layer.below / Path(path).relative_to(layer.folder))
        for path, original in records:
            there = Path(layer.there(str(path)))
            there.mkdir(parents=True)
            _bind(original, there)
            _show_paths(layer, there)
        # The layer, and what it hides or lets through.
        options = f"lowerdir={folder},upperdir={upper},workdir={work},{_OPTIONS}"
        if not is_privileged:
            options += ",userxattr"
        _call("mount", b"overlay", os.fsencode(layer.folder), b"overlay", 0, options.encode())
        for hidden in layer.hidden:
            if not Path(hidden).is_relative_to(layer.folder):
                # SQLite's journal may be gone before it is covered.
                with contextlib.suppress(FileNotFoundError):
                    _cover(hidden) if Path(hidden).is_dir() else _bind(str(layer.nothing), hidden)
        for path, original in through:
            # What is mounted in a hidden folder is hidden with it.
            if not any(Path(path).is_relative_to(hidden) for hidden in layer.hidden):
                _bind(original, path)
        for path, original in named:
            _show(Path(path), original)
    if not is_privileged:
        # Gives up the capabilities of the namespace, so that the program has no more rights than its user.
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
        _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _cover(folder: str) -> None:
    # Lets an empty folder in memory stand at a path.
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"mode=0700")


def _show(path: Path, original: str) -> None:
    # Lets a file or folder be seen, read-only, at its path in a hidden folder.
    path.parent.mkdir(parents=True, exist_ok=True)
    if Path(original).is_dir():
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    _bind(original, path)
    _make_read_only(path)


def _show_paths(layer: Layer, record: Path) -> None:
    # Lets the trial's processes read the driver's files with the paths that these processes have.
    for file in record.iterdir():
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            text = file.read_text(errors="surrogateescape")
            if (seen := layer.as_seen(text)) != text:
                copy = Path(layer.elsewhere, f"{record.name}-{file.name}")
                copy.write_text(seen, errors="surrogateescape")
                _bind(str(copy), file)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextlib.contextmanager
def _held(path: str | Path) -> Iterator[str]:
    descriptor = os.open(path, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _bind(source: str, target: str | Path) -> None:
    _call("mount", source.encode(), os.fsencode(target), None, _BIND | _RECURSIVE, None)


def _make_read_only(mounted: Path) -> None:
    # Forbids writing to what is mounted at a path.
    # A user namespace may not take away flags that the mount had before.
    kept = os.statvfs(mounted).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    _call("mount", None, os.fsencode(mounted), None, _BIND | _REMOUNT | _READ_ONLY | kept, None)


def mounts_within(folder: str, table: bytes) -> tuple[str, ...]:
    """The other file systems that are mounted below a folder, by the kernel's mountinfo. A layer would hide them."""
    # The kernel writes spaces and the like as octal numbers, and every other byte of a name unchanged.
    points = (line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in table.split(b"\n") if line)
    return tuple(text for text in map(os.fsdecode, points) if text.startswith(folder.rstrip(os.sep) + os.sep))


def main(arguments: list[str]) -> None:
    """Entry: tries a layer over an empty folder of this host, and prints the reason if that fails."""
    folder = Path(arguments[0])
    layer = Layer(str(folder / "seen"), str(folder / "store"), elsewhere=str(folder / "elsewhere"))
    for needed in (layer.folder, layer.elsewhere):
        Path(needed).mkdir()
    try:
        _make_store(layer)
        _mount(layer, may_mount())
    except OSError as error:
        print(error.args[1])
