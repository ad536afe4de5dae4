"""Reports while ranks stand still what they wait for, and which rank works."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_POLL_S = 2.0
# `trial_lib.measure.ends.endings` names the end of a rank so.
_ENDED, _WORKS = "ended", "works"
# The time to the next report of a trial, and the factor for the time to the one after it.
_AGAIN_S, _LONGER = 120.0, 2.0


@contextlib.contextmanager
def told_of(label: str, states: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Reports the states of a trial's ranks while the trial runs.

    Args:
        label: the trial's name.
        states: the ranks' files, by rank. A file exists only while its rank stands still.
        note: called with a sentence for the user.
    """
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(label, states, note, over), daemon=True, name="standing-ranks")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(label: str, states: list[Path], note: Callable[[str], None], over: threading.Event) -> None:
    next_at, pause_s = 0.0, _AGAIN_S
    while not over.wait(_POLL_S):
        if time.monotonic() < next_at:
            continue
        said = [state for state in map(_read, states) if state is not None]
        # If all ranks have ended, none waits. Their processes are about to end.
        kinds = {state["end"]["kind"] for state in said}
        if len(said) == len(states) and kinds != {_ENDED}:
            words = "; ".join(f"rank {rank} {state['words']}" for rank, state in enumerate(said))
            note(f"{label} {'takes long' if kinds == {_WORKS} else 'stands still'}: {words}")
            next_at, pause_s = time.monotonic() + pause_s, pause_s * _LONGER


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        state: dict[str, Any] = json.loads(path.read_text())
        return state
    return None
