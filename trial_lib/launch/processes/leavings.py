"""Removes what the ended processes of a trial have left outside of its folder."""

import contextlib
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trial_lib.launch.processes import rank_process
from trial_lib.messages import folders, shared_segments

REMOVED, LEFT = "removed", "left"
"""Shared memory of the trial was removed. Shared memory that may be another program's was left."""

_BEFORE = "segments"
# torch puts the number of the process into a segment's name.
_OF_TORCH = re.compile(r"torch_(\d+)_")


def look_before(request: dict[str, Any]) -> None:
    request[_BEFORE] = shared_segments.segments()


def remove_leavings(
    request: dict[str, Any], guard: int, held: Collection[str] = (), pids: Collection[int] = ()
) -> dict[str, dict[str, int]]:
    """Removes what the processes of a trial have left.

    Returns:
        The bytes of each segment that was removed, and of each new segment that no process has and that was left.
    """
    environment = request["ranks"][0]["environment"]
    before = request.get(_BEFORE)
    remove_shared_memory(environment["MASTER_ADDR"], environment["MASTER_PORT"], before)
    shutil.rmtree(rank_process.workers_folder(environment, guard), ignore_errors=True)
    if scratch := scratch_of(request["payload"]):
        folders.remove(scratch)
    if before is None:
        return {}
    new = {
        name
        for name, number in shared_segments.segments().items()
        # Buffers of another rendezvous belong to another trial, whose guard removes them.
        if before.get(name) != number and not name.startswith(shared_segments.BUFFERS)
    }
    if not new:
        return {}
    noted = shared_segments.noted(scratch) if scratch else set()
    known = {*held, *noted, *(name for name in new if _made_by(name) in pids)}
    without_holder = new - shared_segments.held_by_anybody()
    removed, left = {}, {}
    for name in without_holder:
        segment = shared_segments.FOLDER / name
        with contextlib.suppress(OSError):
            size = segment.stat().st_size
            if name in known:
                segment.unlink()
                removed[name] = size
            else:
                left[name] = size
    return {REMOVED: removed, LEFT: left}


def _made_by(name: str) -> int | None:
    named = _OF_TORCH.match(name)
    return None if named is None else int(named[1])


def scratch_of(payload: Mapping[str, Any]) -> Path | None:
    """Returns the scratch folder of a launch. None if it has none."""
    scratch = payload.get("scratch")
    return None if scratch is None else Path(scratch)


def remove_shared_memory(address: str, port: str, before: Mapping[str, int] | None) -> None:
    """Removes what DeepSpeed and NCCL leave in shared memory when their ranks are killed.

    The buffers of DeepSpeed's CPU collectives take some 70 MB a rank. Their names end in the address and port of the
    rendezvous, which only one trial has. A segment of NCCL's, some MB for each pair of ranks, may belong to another
    program. It is removed only if this process would see that program.
    """
    for buffer in shared_segments.FOLDER.glob(f"{shared_segments.BUFFERS}*_{address}_{port}_*"):
        buffer.unlink(missing_ok=True)
    if before is None or not shared_segments.are_all_holders_seen():
        return
    now = shared_segments.segments()
    for name in shared_segments.abandoned(shared_segments.OF_NCCL):
        if name in now and before.get(name) != now[name]:
            with contextlib.suppress(OSError):
                (shared_segments.FOLDER / name).unlink()
