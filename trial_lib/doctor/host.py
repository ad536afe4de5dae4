"""Checks this host: shared memory, the folders that studies write to and their room, the clock."""

import contextlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from trial_lib.doctor.check import Check, fail, ok, warn
from trial_lib.launch.trial_files import UNCOVERED, layer_refusal
from trial_lib.records.units import bytes_shown
from trial_lib.slots.lock_dir import own_folder
from trial_lib.wire import shared_segments
from trial_lib.wire.errors import InputError

GIB = 2**30
# DeepSpeed's CPU collectives take about 70 MB a rank, NCCL and data loaders' workers more.
_LITTLE_SHARED_MEMORY = GIB // 2
_NO_ROOM, _LITTLE_ROOM = GIB // 4, 5 * GIB
_SKEW_S = 5.0
_CLOCK_S = 0.2


def check_shared_memory() -> Check:
    """Checks the size of shared memory, and the buffers that ended ranks left in it."""
    name, folder = "shared memory", shared_segments.FOLDER
    remedy = (
        "Docker: --shm-size=8g; Kubernetes: an emptyDir with `medium: Memory` on /dev/shm; "
        "else: mount -o remount,size=8G /dev/shm"
    )
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail(name, f"{folder} cannot be written ({error.strerror})", remedy)
    said = f"{folder}: {bytes_shown(usage.free)} free of {bytes_shown(usage.total)}"
    left = abandoned_buffers()
    if left:
        size = sum(left.values())
        said += f", {bytes_shown(size)} of it in {len(left)} buffers of ended runs"
    if usage.free < _LITTLE_SHARED_MEMORY:
        return fail(name, said, _removal(left) if left else remedy)
    if left:
        return warn(name, said, _removal(left))
    return ok(name, said)


def _removal(paths: Iterable[Path]) -> str:
    return shlex.join(["rm", *map(str, paths)])


def abandoned_buffers() -> dict[Path, int]:
    """Returns this user's buffers of DeepSpeed's CPU collectives and of NCCL that no process uses, with their bytes."""
    names = shared_segments.abandoned(shared_segments.BUFFERS)
    if shared_segments.are_all_holders_seen():
        names |= shared_segments.abandoned(shared_segments.OF_NCCL)
    sizes = {}
    for name in names:
        path = shared_segments.FOLDER / name
        # A run that ends meanwhile removes its own.
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.stat().st_blocks * 512
    return sizes


_LAYERS = "Run as root, or let users make namespaces. Else tune a copy of your folder: see docs/any_program.md."


def check_layers(work_dir: Path) -> Check:
    """Mounts a layer over a folder, as trials do over the program's."""
    name = "trial files"
    try:
        refusal = layer_refusal(work_dir)
    except OSError as error:
        refusal = f"{work_dir} cannot be written: {error.strerror}"
    if refusal is None:
        return ok(name, "layered: a trial sees the program's folder through a layer of its own")
    return warn(name, f"intercepted in Python, because this host has no layers ({refusal}). {UNCOVERED}", _LAYERS)


def check_write_access(folders: Mapping[str, Path]) -> list[Check]:
    """Writes a byte to each folder that ZeroTune writes to, and checks the room there.

    Args:
        folders: the path of each folder by its purpose. It need not exist yet.
    """
    return [_write_access(what, folder) for what, folder in folders.items()]


def _write_access(what: str, folder: Path) -> Check:
    if not folder.is_absolute():
        return fail(what, "there is no home folder: HOME is not set, nor is one in the password database", _HOME)
    try:
        if what == LOCKS:
            folder = own_folder(folder)
        there = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return fail(what, f"{folder} cannot be written ({error.strerror})", _elsewhere(what))
    except InputError as error:
        return fail(what, f"{folder}: {error.what}", _elsewhere(what))
    said = f"{folder}: {bytes_shown(free)} free"
    if free < _NO_ROOM:
        return fail(what, said, "Make room: a study stops when the disk is full.")
    if free < _LITTLE_ROOM:
        return warn(what, said, "Make room before a long study, or one with a full experiment's checkpoints.")
    return ok(what, said)


_HOME = "Set HOME to a folder that you may write to."
STUDIES, DATA, BUILDS, LOCKS = "studies", "data folder", "op builds", "locks"


def _elsewhere(what: str) -> str:
    ways = {
        STUDIES: "Run zerotune in a folder that you can write to.",
        DATA: "Mend its permissions, or set XDG_DATA_HOME to another folder.",
        BUILDS: "Mend its permissions, or set TORCH_EXTENSIONS_DIR to another folder.",
        LOCKS: "Let every user of this host write to it (chmod 1777).",
    }
    return ways[what]


def check_clock(server_time: float | None, asked_at: float) -> Check:
    """Checks whether the clock runs evenly, and agrees with the Prefect server's.

    Args:
        server_time: the time on the server's clock, in seconds since the epoch. None if no server was asked.
        asked_at: the time on this host's clock then.
    """
    name, remedy = "clock", "Synchronise it: timedatectl set-ntp true, or chronyc makestep."
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_S)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    if abs(drift) > _CLOCK_S / 4:
        return warn(name, f"it was set while it ran ({drift:+.2f} s within {_CLOCK_S} s)", remedy)
    if server_time is None:
        return ok(name, "it runs evenly; there is no Prefect server to compare it with")
    skew = asked_at - server_time
    if abs(skew) > _SKEW_S:
        said = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the Prefect server's"
        return warn(name, f"{said}: states and schedules have the wrong time", remedy)
    return ok(name, f"it runs evenly, and agrees with the Prefect server's to {_SKEW_S:.0f} s")
